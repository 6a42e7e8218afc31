// Probabilities as s16 weights, and their integer products with codes: see kernels/cpu/codes.h.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_VALUES_H_
#define KVANT_KERNELS_CPU_ISA_CODES_VALUES_H_

#include <immintrin.h>

#include <cstdint>

#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/isa/codes_common.h"

namespace kvant::cpu {
namespace {

// The sum, or the highest, of each of up to kWidth vectors, as one vector; `rows` holds a multiple
// of four, the others count as zeros.
template <typename S, bool kHighest>
inline __attribute__((always_inline)) typename S::Vector ReduceEach(
    const float (&rows)[S::kWidth][S::kWidth], int64_t used) {
  using F = typename S::Vector;
  const auto fold = [](F a, F b) { return kHighest ? S::Max(a, b) : S::Add(a, b); };
  F fours[S::kWidth / 4];
  for (int i = 0; i < S::kWidth; i += 4) {
    fours[i / 4] = i < used ? S::FoldFour(S::Load(rows[i]), S::Load(rows[i + 1]),
                                          S::Load(rows[i + 2]), S::Load(rows[i + 3]), fold)
                            : S::Zero();
  }
  return S::FoldFours(fours, fold);
}

// Those of kRows rows, a batch of groups at a time: what goes across lanes is done for kWidth
// (row, group) at once.
template <typename S, int kRows>
void WeightsOf(const float* probs, const CodeParameters& parameters, int64_t groups,
               int16_t* weights, float* weight_scales, float* weight_biases, float* units) {
  using F = typename S::Vector;
  constexpr int kVectors = kTokenTile / S::kWidth;
  constexpr int kBatch = S::kWidth / kRows;
  constexpr float kTop = 32767.f;
  // So small that the reciprocal would overflow; nothing that counts is lost.
  constexpr float kTiny = 1e-33f;
  F p[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVectors; ++i) p[r][i] = S::Load(probs + r * kTokenTile + i * S::kWidth);
  }
  alignas(64) float lanes[S::kWidth][S::kWidth];
  alignas(64) float factors[S::kWidth], scales[S::kWidth], biases[S::kWidth];
  F most_of_all = S::Zero();
  for (int64_t first = 0; first < groups; first += kBatch) {
    const int64_t n = CodesMin(kBatch, groups - first);
    const int64_t used = (kRows - 1) * kBatch + n;
    // Lanes in between and past the last are no one's.
    const bool fills = kRows * n == used && used % 4 == 0;
    for (int64_t i = 0; !fills && i < (used + 3) / 4 * 4; ++i) S::Store(lanes[i], S::Zero());
    for (int64_t g = 0; g < n; ++g) {
      const float* const at = parameters.scales + (first + g) * kTokenTile;
      F most[kRows];
      for (int i = 0; i < kVectors; ++i) {
        const F scale = S::Load(at + i * S::kWidth);
        for (int r = 0; r < kRows; ++r) {
          const F x = S::Abs(S::Mul(p[r][i], scale));
          most[r] = i == 0 ? x : S::Max(most[r], x);
        }
      }
      for (int r = 0; r < kRows; ++r) S::Store(lanes[r * kBatch + g], most[r]);
    }
    const F most = ReduceEach<S, true>(lanes, used);
    const F scale_of_each = S::Mul(most, S::Set1(1.f / kTop));
    most_of_all = S::Max(most_of_all, scale_of_each);
    S::Store(factors, S::ZeroBelow(most, S::Set1(kTiny), S::Div(S::Set1(kTop), most)));
    for (int64_t g = 0; g < n; ++g) {
      const int64_t at = (first + g) * kTokenTile;
      const float *s = parameters.scales + at, *z = parameters.biases + at;
      F bias[kRows];
      for (F& b : bias) b = S::Zero();
      for (int i = 0; i < kVectors; i += 2) {
        const int64_t t = i * S::kWidth;
        const F scale0 = S::Load(s + t), scale1 = S::Load(s + t + S::kWidth);
        for (int r = 0; r < kRows; ++r) {
          F a = S::Mul(p[r][i], scale0), b = S::Mul(p[r][i + 1], scale1);
          S::RoundToHalves(weights + r * groups * kTokenTile + at + t, a, b,
                           S::Set1(factors[r * kBatch + g]));
          if (parameters.biases == nullptr) continue;
          // With the weights as rounded, so that what rounding loses multiplies code - zero point.
          bias[r] = S::Fma(a, S::Load(z + t), S::Fma(b, S::Load(z + t + S::kWidth), bias[r]));
        }
      }
      for (int r = 0; r < kRows; ++r) S::Store(lanes[r * kBatch + g], bias[r]);
    }
    const F bias_of_each = S::Mul(ReduceEach<S, false>(lanes, used), scale_of_each);
    if constexpr (kRows == 1) {
      StorePart<S>(weight_scales + first, n, scale_of_each);
      StorePart<S>(weight_biases + first, n, bias_of_each);
      continue;
    }
    S::Store(scales, scale_of_each);
    S::Store(biases, bias_of_each);
    for (int r = 0; r < kRows; ++r) {
      for (int64_t g = 0; g < n; ++g) {
        weight_scales[r * groups + first + g] = scales[r * kBatch + g];
        weight_biases[r * groups + first + g] = biases[r * kBatch + g];
      }
    }
  }
  if (units == nullptr) return;
  S::Store(scales, most_of_all);
  for (int r = 0; r < kRows; ++r) {
    float top = kRows == 1 ? S::MaxOf(most_of_all) : 0.f;
    for (int g = 0; kRows > 1 && g < kBatch; ++g) {
      const float x = scales[r * kBatch + g];
      top = x > top ? x : top;
    }
    units[r] = top > 0.f ? 1.f / top : 0.f;
  }
}

template <typename S>
void Weights(const float* probs, int64_t rows, const CodeParameters& parameters, int64_t groups,
             int16_t* weights, float* weight_scales, float* weight_biases, float* units) {
  ForRowBlocks(rows, [&](auto block, int64_t row) {
    WeightsOf<S, decltype(block)::value>(probs + row * kTokenTile, parameters, groups,
                                         weights + row * groups * kTokenTile,
                                         weight_scales + row * groups, weight_biases + row * groups,
                                         units == nullptr ? nullptr : units + row);
  });
}

// Adds to `square` that of what is added, in the row's unit.
template <typename S>
inline __attribute__((always_inline)) void AddToOutput(const CodeKernels::Values& args, int64_t row,
                                                       int64_t channel, int64_t group,
                                                       const float* shrink, typename S::Vector sum,
                                                       float* out, typename S::Vector* square) {
  using F = typename S::Vector;
  const int64_t n = args.channels - channel;
  if (n <= 0) return;
  const int64_t at = row * args.groups + group;
  F x = S::Mul(sum, S::Set1(args.weight_scales[at]));
  F bias = S::Set1(args.weight_biases[at]);
  if (args.channel_scales != nullptr) {
    x = S::Mul(x, LoadPart<S>(args.channel_scales + channel, n));
    bias = S::Mul(bias, LoadPart<S>(args.channel_biases + channel, n));
  }
  x = S::Sub(x, bias);
  const int64_t first = row * args.channels + channel;
  const F was = LoadPart<S>(out + first, n);
  StorePart<S>(args.saved + first, n, was);
  StorePart<S>(out + first, n, S::Fma(was, S::Set1(shrink[row]), x));
  if (n < S::kWidth) {
    // Lanes past the last channel hold whatever.
    alignas(64) float some[S::kWidth];
    S::Store(some, x);
    x = S::LoadSome(some, n);
  }
  x = S::Mul(x, S::Set1(args.units[row]));
  *square = S::Fma(x, x, *square);
}

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
    for (int64_t line = 0; line < kAhead; line += 64) _mm_prefetch(next + line, _MM_HINT_T1);
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
