// CodeKernels::values by dot products of bytes: four tokens at a time, where codes_values.h takes
// two.
#ifndef KVANT_KERNELS_CPU_ISA_VALUES_NEON_H_
#define KVANT_KERNELS_CPU_ISA_VALUES_NEON_H_

#include <cstdint>

#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/isa/codes_neon.h"
#include "kvant/kernels/cpu/isa/codes_weights.h"

namespace kvant::cpu {
namespace {

inline constexpr int kQuads = kTokenTile / 4;
inline constexpr int kRunBytes = 16;

// 16 bytes of each token: dword j of quad q is byte j of tokens 4 q to 4 q + 3.
struct QuadsOfTokens {
  alignas(16) int32_t dwords[kQuads][kRunBytes];
};

// Of bytes [byte, byte + 16) or less, each ^ flip; of tokens that are not there, whatever.
inline void TurnQuads(const CodeRows& rows, int64_t byte, uint8_t flip, QuadsOfTokens& out) {
  using S = NeonCodes;
  const int64_t bytes = rows.row_bytes - byte;
  const uint8x16_t flips = vdupq_n_u8(flip);
  for (int64_t t = 0; t < rows.tokens; t += 4) {
    // The next tile, a line for as many bytes as are read.
    __builtin_prefetch(rows.next[t / kPageUnit] + byte * kPageUnit + t % kPageUnit * kRunBytes, 0,
                       2);
    uint8x16_t token[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const uint8_t* p = rows.At(CodesMin(t + i, rows.tokens - 1)) + byte;
      token[i] = bytes >= kRunBytes ? vld1q_u8(p) : S::LoadRawSome(p, bytes).raw;
    }
    const uint8x16x2_t first = vzipq_u8(token[0], token[1]), second = vzipq_u8(token[2], token[3]);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const uint16x8x2_t dwords =
          vzipq_u16(vreinterpretq_u16_u8(first.val[half]), vreinterpretq_u16_u8(second.val[half]));
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const uint8x16_t codes = veorq_u8(vreinterpretq_u8_u16(dwords.val[i]), flips);
        vst1q_s32(out.dwords[t / 4] + (half * 2 + i) * 4, vreinterpretq_s32_u8(codes));
      }
    }
  }
}

// Weights of a group of up to four rows, by planes; and what sums of products begin at.
struct WeightPlanes {
  static constexpr int kMostRows = 4;
  alignas(16) int8_t planes[kMostRows][2][kTokenTile];
  int32_t starts[kMostRows];

  // `less`: what a code is less than what counts.
  void Read(const CodeKernels::Values& args, int64_t row, int rows, int64_t group, int32_t less) {
    for (int r = 0; r < rows; ++r) {
      const int16_t* const from = args.weights + ((row + r) * args.groups + group) * kTokenTile;
      int32x4_t sum = vdupq_n_s32(0);
      for (int i = 0; i < kTokenTile; i += 16) {
        const int8x16x2_t some = NeonCodes::PlanesOf(from + i);
        vst1q_s8(planes[r][0] + i, some.val[0]);
        vst1q_s8(planes[r][1] + i, some.val[1]);
        if (less == 0) continue;
        sum = vpadalq_s16(vpadalq_s16(sum, vld1q_s16(from + i)), vld1q_s16(from + i + 8));
      }
      starts[r] = less * vaddvq_s32(sum);
    }
  }
};

// kVectors times four bytes of each token, from the v-th on, times kRows rows of weights.
template <int kBits, int kRows, int kVectors>
void ValuesOfQuads(const QuadsOfTokens& quads, int64_t tokens, const WeightPlanes& weights, int v,
                   int32x4_t (&sums)[kVectors][kRows][8 / kBits]) {
  using S = NeonCodes;
  constexpr int kFields = 8 / kBits;
  int32x4_t low[kVectors][kRows][kFields], high[kVectors][kRows][kFields];
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int f = 0; f < kFields; ++f) {
        low[i][r][f] = vdupq_n_s32(weights.starts[r]);
        high[i][r][f] = vdupq_n_s32(0);
      }
    }
  }
  // Whole runs of 16 tokens: weights of those that are not there are 0.
  for (int64_t t = 0; t < tokens; t += 16) {
    int8x16_t low_weights[kRows], high_weights[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      low_weights[r] = vld1q_s8(weights.planes[r][0] + t);
      high_weights[r] = vld1q_s8(weights.planes[r][1] + t);
    }
    ForEachOf<4>([&](auto quad) __attribute__((always_inline)) {
      ForEachOf<kVectors>([&](auto i) __attribute__((always_inline)) {
        const int32x4_t word = vld1q_s32(quads.dwords[t / 4 + quad.value] + 4 * (v + i.value));
        ForEachOf<kFields>([&](auto f) __attribute__((always_inline)) {
          const int8x16_t codes = vreinterpretq_s8_s32(S::ByteField<kBits, f.value>(word));
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            int32x4_t& to_low = low[i.value][r][f.value];
            int32x4_t& to_high = high[i.value][r][f.value];
            to_low = vdotq_laneq_s32(to_low, codes, low_weights[r], quad.value);
            to_high = vdotq_laneq_s32(to_high, codes, high_weights[r], quad.value);
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
      for (int f = 0; f < kFields; ++f) sums[i][r][f] = S::Joined(low[i][r][f], high[i][r][f]);
    }
  }
}

template <int kBits, int kRows>
void ValuesOfRows(const CodeKernels::Values& args, int64_t row, const float* shrink, float* out) {
  using S = NeonCodes;
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
  QuadsOfTokens quads = {};
  WeightPlanes weights;
  int64_t group = -1;
  for (int64_t byte = 0; byte < args.rows.row_bytes; byte += kRunBytes) {
    TurnQuads(args.rows, byte, flip, quads);
    for (int v = 0; v < 4; v += kVectors) {
      const int64_t first = byte * kFields + v * kChannels;
      if (first >= args.channels) break;
      if (const int64_t own = first / args.group; own != group) {
        group = own;
        weights.Read(args, row, kRows, group, less);
      }
      int32x4_t sums[kVectors][kRows][kFields];
      ValuesOfQuads<kBits, kRows, kVectors>(quads, args.rows.tokens, weights, v, sums);
      for (int r = 0; r < kRows; ++r) {
        float* const lanes = args.lanes + (row + r) * kSquareLanes;
        auto square = S::Load(lanes);
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
          S::Vector by_field[kFields];
          for (int f = 0; f < kFields; ++f) by_field[f] = S::ToFloat(sums[i][r][f]);
          S::Vector channels[kFields];
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

inline void ValuesByQuads(const CodeKernels::Values& args, int64_t query_rows, const float* shrink,
                          float* out) {
  ForRowBlocks(query_rows, [&](auto block, int64_t row) {
    constexpr int kRows = decltype(block)::value;
    if (args.bits == 8) return ValuesOfRows<8, kRows>(args, row, shrink, out);
    if (args.bits == 4) return ValuesOfRows<4, kRows>(args, row, shrink, out);
    if constexpr (kRows <= 2) {
      ValuesOfRows<2, kRows>(args, row, shrink, out);
    } else {
      // More have no room in the registers.
      ValuesOfRows<2, 2>(args, row, shrink, out);
      ValuesOfRows<2, kRows - 2>(args, row + 2, shrink, out);
    }
  });
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_VALUES_NEON_H_
