// Integer products of s16 weights with codes, two tokens at a time: see kernels/cpu/codes.h.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_VALUES_H_
#define KVANT_KERNELS_CPU_ISA_CODES_VALUES_H_

#include <cstdint>

#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/isa/codes_common.h"
#include "kvant/kernels/cpu/isa/codes_weights.h"

namespace kvant::cpu {
namespace {

// kChunks runs of kWidth bytes of each token times kRows rows of weights; kGroups of
// them share a run.
template <typename S, int kBits, bool kSigned, int kRows, int kGroups, int kChunks>
void ValuesBlock(const CodeKernels::Values& args, int64_t row, int64_t byte, const float* shrink,
                 float* out) {
  using I = typename S::I;
  using F = typename S::Vector;
  constexpr int kPlanes = 8 / kBits;
  constexpr int64_t kChannels = S::kWidth * kPlanes;
  const I flips = S::Dword(!args.is_signed ? 0 : kBits == 4 ? 0x00880088 : 0x00aa00aa);
  const CodeRows& rows = args.rows;
  const int64_t bytes = rows.row_bytes - byte;
  const int64_t row_step = args.groups * kTokenTile;
  // Lanes past the last channel have no group; what they multiply is not used.
  const int16_t* weights[kChunks][kGroups];
  int64_t groups[kChunks][kGroups];
  for (int ch = 0; ch < kChunks; ++ch) {
    for (int i = 0; i < kGroups; ++i) {
      const int64_t channel = byte * kPlanes + ch * kChannels + i * (kChannels / kGroups);
      groups[ch][i] = CodesMin(channel / args.group, args.groups - 1);
      weights[ch][i] = args.weights + (row * args.groups + groups[ch][i]) * kTokenTile;
    }
  }
  I acc[kChunks][kRows][kPlanes];
  // Loops over the sums are unrolled early, or GCC keeps these in memory.
#pragma GCC unroll 16
  for (auto& chunk : acc) {
#pragma GCC unroll 16
    for (auto& of_row : chunk) {
#pragma GCC unroll 16
      for (I& a : of_row) a = S::ZeroDwords();
    }
  }
  // What of the next tile is asked for with every pair of tokens, so that all passes over the
  // tokens ask for all of it, line after line.
  constexpr int64_t kAhead = 2 * kChunks * S::kWidth;
  const uint8_t *p0 = nullptr, *next = nullptr;
  for (int64_t t = 0; t < rows.tokens; t += 2, p0 += 2 * rows.stride, next += kAhead) {
    if (t % kPageUnit == 0) {
      p0 = rows.blocks[t / kPageUnit] + byte;
      next = rows.next[t / kPageUnit] + byte * kPageUnit;
    }
    const uint8_t* p1 = t + 1 < rows.tokens ? p0 + rows.stride : p0;
    for (int64_t line = 0; line < kAhead; line += 64) __builtin_prefetch(next + line, 0, 2);
#pragma GCC unroll 16
    for (int ch = 0; ch < kChunks; ++ch) {
      const int64_t skip = ch * S::kWidth;
      I word =
          S::template TokenPair<kSigned>(p0 + skip, p1 + skip, kChunks > 1 ? S::kWidth : bytes);
      I plane[kPlanes];
      if constexpr (kPlanes == 1) {
        plane[0] = word;  // of either sign
      } else {
        // Plane k stays where it is, worth 2^(k * kBits) as much: 64 tokens fit s32 even so.
#pragma GCC unroll 16
        for (int k = 0; k < kPlanes; ++k) {
          plane[k] = S::XorAnd(word, flips, S::Dword((((1 << kBits) - 1) << k * kBits) * 0x10001));
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const I weight = S::template Weights<kGroups>(weights[ch], r * row_step + t);
#pragma GCC unroll 16
        for (int k = 0; k < kPlanes; ++k) acc[ch][r][k] = S::Dot(acc[ch][r][k], plane[k], weight);
      }
    }
  }
#pragma GCC unroll 16
  for (int ch = 0; ch < kChunks; ++ch) {
    const int64_t channel = byte * kPlanes + ch * kChannels;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float* const lanes = args.lanes + (row + r) * kSquareLanes;
      F square = S::Load(lanes);
      F v[kPlanes];
      v[0] = S::ToFloat(acc[ch][r][0]);
#pragma GCC unroll 16
      for (int k = 1; k < kPlanes; ++k) {
        v[k] = S::Mul(S::ToFloat(acc[ch][r][k]), S::Set1(1.f / (1 << k * kBits)));
      }
      ZipPlanes<S>(v, v);
#pragma GCC unroll 16
      for (int k = 0; k < kPlanes; ++k) {
        AddToOutput<S>(args, row + r, channel + k * S::kWidth, groups[ch][k * kGroups / kPlanes],
                       shrink, v[k], out, &square);
      }
      S::Store(lanes, square);
    }
  }
}

template <typename S, int kBits, bool kSigned, int kRows, int kGroups>
void ValuesRows(const CodeKernels::Values& args, int64_t row, const float* shrink, float* out) {
  constexpr int kFit = S::kDotAccumulators / (kRows * (8 / kBits));
  constexpr int kChunks = kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  int64_t byte = 0;
  for (; byte + kChunks * S::kWidth <= args.rows.row_bytes; byte += kChunks * S::kWidth) {
    ValuesBlock<S, kBits, kSigned, kRows, kGroups, kChunks>(args, row, byte, shrink, out);
  }
  for (; byte < args.rows.row_bytes; byte += S::kWidth) {
    ValuesBlock<S, kBits, kSigned, kRows, kGroups, 1>(args, row, byte, shrink, out);
  }
}

template <typename S, int kBits, bool kSigned, int kGroups>
void ValuesOf(const CodeKernels::Values& args, int64_t query_rows, const float* shrink,
              float* out) {
  ForRowBlocks(query_rows, [&](auto block, int64_t row) {
    ValuesRows<S, kBits, kSigned, decltype(block)::value, kGroups>(args, row, shrink, out);
  });
}

template <typename S>
void Values(const CodeKernels::Values& args, int64_t query_rows, const float* shrink, float* out) {
  // Groups that share a run of kWidth bytes, at least 16 channels each.
  const int64_t channels = S::kWidth * 8 / args.bits;
  const bool whole = args.groups == 1 || args.group % channels == 0;
  const bool halves = args.group % (channels / 2) == 0;
  const auto pick = [&]() -> decltype(&ValuesOf<S, 8, true, 1>) {
    if (args.bits == 8) return args.is_signed ? ValuesOf<S, 8, true, 1> : ValuesOf<S, 8, false, 1>;
    if (args.bits == 4) {
      if constexpr (S::kWidth * 2 > 16) {
        if (!whole) return ValuesOf<S, 4, false, 2>;
      }
      return ValuesOf<S, 4, false, 1>;
    }
    if (whole) return ValuesOf<S, 2, false, 1>;
    if constexpr (S::kWidth * 4 > 32) {
      if (!halves) return ValuesOf<S, 2, false, 4>;
    }
    return ValuesOf<S, 2, false, 2>;
  };
  pick()(args, query_rows, shrink, out);
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_VALUES_H_
