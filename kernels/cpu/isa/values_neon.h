// CodeKernels::values by products of bytes: four or eight tokens at a time, where codes_values.h
// takes two. Written over the primitives of codes_neon.h.
#ifndef KVANT_KERNELS_CPU_ISA_VALUES_NEON_H_
#define KVANT_KERNELS_CPU_ISA_VALUES_NEON_H_

#include <cstdint>

#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/isa/codes_neon.h"
#include "kvant/kernels/cpu/isa/codes_weights.h"

namespace kvant::cpu {
namespace {

inline constexpr int kRunBytes = NeonCodes::kColumnBytes;

// 16 bytes of each token, in the order of TransposedAt.
struct TransposedTokens {
  alignas(16) int32_t dwords[kTokenTile * kRunBytes / 4];
};

// Of bytes [byte, byte + 16) or less, each ^ flip; of tokens that are not there, whatever.
template <typename S>
void TransposeTokens(const TokenRows& rows, int64_t byte, uint8_t flip, TransposedTokens& out) {
  constexpr int kQuads = S::kTokens / 4;
  const int64_t bytes = rows.row_bytes - byte;
  const uint8x16_t flips = vdupq_n_u8(flip);
  for (int64_t t = 0; t < rows.tokens; t += S::kTokens) {
    // Dword j of a quad is byte j of its tokens.
    int32x4_t quads[kQuads][4];
#pragma GCC unroll 2
    for (int q = 0; q < kQuads; ++q) {
      const int64_t own = t + 4 * q;
      // The next tile, a line for as many bytes as are read.
      __builtin_prefetch(rows.next[t / kPageUnit] + byte * kPageUnit + own % kPageUnit * kRunBytes,
                         0, 2);
      const int64_t there = CodesMin(own, rows.tokens - 1);
      int32x4_t token[4];
      S::LoadRows(rows.At(there) + byte, rows.stride, rows.tokens - 1 - there, bytes, token);
      const auto zip = [&](int i) __attribute__((always_inline)) {
        return vzipq_u8(vreinterpretq_u8_s32(token[i]), vreinterpretq_u8_s32(token[i + 1]));
      };
      const uint8x16x2_t first = zip(0), second = zip(2);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const uint16x8x2_t dwords = vzipq_u16(vreinterpretq_u16_u8(first.val[half]),
                                              vreinterpretq_u16_u8(second.val[half]));
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          const uint8x16_t codes = veorq_u8(vreinterpretq_u8_u16(dwords.val[i]), flips);
          quads[q][half * 2 + i] = vreinterpretq_s32_u8(codes);
        }
      }
    }
    S::StoreTransposed(quads, out.dwords + t * (kRunBytes / 4));
  }
}

// Weights of a group of up to four rows, two vectors for 16 tokens; and what sums of products begin
// at.
struct WeightPlanes {
  static constexpr int kMostRows = 4;
  // By runs of 16 tokens first: of rows one behind the other GCC keeps what it read as one's for
  // the next, and sums leave the registers.
  alignas(16) int8_t planes[kTokenTile / 16][kMostRows][2 * 16];
  int32_t starts[kMostRows];

  int8x16x2_t At(int row, int64_t token) const {
    const int8_t* const from = planes[token / 16][row];
    return {{vld1q_s8(from), vld1q_s8(from + 16)}};
  }
  // `less`: what a code is less than what counts.
  template <typename S>
  void Read(const CodeKernels::Values& args, int64_t row, int rows, int64_t group, int32_t less) {
    for (int r = 0; r < rows; ++r) {
      const int16_t* const from = args.weights + ((row + r) * args.groups + group) * kTokenTile;
      int32x4_t sum = vdupq_n_s32(0);
      for (int i = 0; i < args.rows.tokens; i += 16) {
        const int8x16x2_t some = S::WeightsOf(from + i);
        vst1q_s8(planes[i / 16][r], some.val[0]);
        vst1q_s8(planes[i / 16][r] + 16, some.val[1]);
        if (less == 0) continue;
        sum = vpadalq_s16(vpadalq_s16(sum, vld1q_s16(from + i)), vld1q_s16(from + i + 8));
      }
      starts[r] = less * vaddvq_s32(sum);
    }
  }
};

// kVectors times four bytes of each token, from the v-th on, times kRows rows of weights.
template <typename S, int kBits, int kRows, int kVectors>
void ValuesOfTokens(const TransposedTokens& transposed, int64_t tokens, const WeightPlanes& weights,
                    int v, int32x4_t (&sums)[kVectors][kRows][8 / kBits]) {
  constexpr int kFields = 8 / kBits;
  int32x4_t acc[kVectors][kRows][kFields][2];
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int f = 0; f < kFields; ++f) {
        acc[i][r][f][0] = S::Start(0, weights.starts[r]);
        acc[i][r][f][1] = S::Start(1, weights.starts[r]);
      }
    }
  }
  // Whole runs of 16 tokens: weights of those that are not there are 0.
  for (int64_t t = 0; t < tokens; t += 16) {
    int8x16x2_t own[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) own[r] = weights.At(r, t);
    ForEachOf<4>([&](auto step) __attribute__((always_inline)) {
      ForEachOf<kVectors>([&](auto i) __attribute__((always_inline)) {
        const int32x4_t word = vld1q_s32(transposed.dwords + t * (kRunBytes / 4) +
                                         S::template TransposedAt<step.value>(v + i.value));
        ForEachOf<kFields>([&](auto f) __attribute__((always_inline)) {
          const int32x4_t codes = S::template ByteField<kBits, f.value>(word);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            S::template AddTokens<step.value>(acc[i.value][r][f.value], codes, own[r]);
          }
        });
      });
    });
  }
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int f = 0; f < kFields; ++f) sums[i][r][f] = S::SumOfChains(acc[i][r][f]);
    }
  }
}

template <typename S, int kBits, int kRows>
void ValuesOfRows(const CodeKernels::Values& args, int64_t row, const float* shrink, float* out) {
  constexpr int kFields = 8 / kBits;
  // Of four bytes of a token. Vectors share a group, of 16 channels or more, and their sums the
  // registers.
  constexpr int kChannels = 4 * kFields;
  constexpr int kVectors = kRows > 2 && kFields < 4 ? 2 / kFields : 4 / kFields;
  const int32_t less = kBits == 8 && !args.is_signed ? 0x80 : 0;
  const uint8_t flip = kBits == 8        ? static_cast<uint8_t>(less)
                       : !args.is_signed ? 0
                       : kBits == 4      ? 0x88
                                         : 0xaa;
  TransposedTokens transposed = {};
  WeightPlanes weights;
  int64_t group = -1;
  for (int64_t byte = 0; byte < args.rows.row_bytes; byte += kRunBytes) {
    TransposeTokens<S>(args.rows, byte, flip, transposed);
    for (int v = 0; v < 4; v += kVectors) {
      const int64_t first = byte * kFields + v * kChannels;
      if (first >= args.channels) break;
      if (const int64_t own = first / args.group; own != group) {
        group = own;
        weights.Read<S>(args, row, kRows, group, less);
      }
      int32x4_t sums[kVectors][kRows][kFields];
      ValuesOfTokens<S, kBits, kRows, kVectors>(transposed, args.rows.tokens, weights, v, sums);
      for (int r = 0; r < kRows; ++r) {
        float* const lanes = args.lanes + (row + r) * kSquareLanes;
        auto square = S::Load(lanes);
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
          typename S::Vector by_field[kFields];
          for (int f = 0; f < kFields; ++f) by_field[f] = S::ToFloat(sums[i][r][f]);
          typename S::Vector channels[kFields];
          ZipPlanes<S>(by_field, channels);
          for (int f = 0; f < kFields; ++f) {
            AddToOutput<S>(args, row + r, first + i * kChannels + f * S::kWidth, group, shrink,
                           channels[f], out, &square);
          }
        }
        S::Store(lanes, square);
      }
    }
  }
}

template <typename S>
void ValuesByBytes(const CodeKernels::Values& args, int64_t query_rows, const float* shrink,
                   float* out) {
  ForRowBlocks(query_rows, [&](auto block, int64_t first) {
    constexpr int kRows = decltype(block)::value;
    const auto run = [&](auto bits, auto rows, int64_t row) {
      using Own = typename S::template OfValues<bits.value, rows.value>;
      ValuesOfRows<Own, bits.value, rows.value>(args, row, shrink, out);
    };
    if (args.bits == 8) return run(Constant<8>(), block, first);
    if (args.bits == 4) return run(Constant<4>(), block, first);
    if constexpr (kRows <= 2) {
      run(Constant<2>(), block, first);
    } else {
      // More have no room in the registers.
      run(Constant<2>(), Constant<2>(), first);
      run(Constant<2>(), Constant<kRows - 2>(), first + 2);
    }
  });
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_VALUES_NEON_H_
