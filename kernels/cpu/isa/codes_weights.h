// Probabilities as s16 weights, and what becomes of their sums: see kernels/cpu/codes.h.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_WEIGHTS_H_
#define KVANT_KERNELS_CPU_ISA_CODES_WEIGHTS_H_

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
template <typename S, int kRows, int kColumns>
void WeightsOf(const float* probs, const CodeParameters& parameters, int64_t groups,
               int16_t* weights, float* weight_scales, float* weight_biases, float* units) {
  using F = typename S::Vector;
  constexpr int kVectors = kColumns / S::kWidth;
  constexpr int kBatch = S::kWidth / kRows;
  constexpr float kTop = S::kMost;
  // The reciprocal of a number below kTiny would overflow; kLess is the largest of them. Such
  // weights become 0, and all of what they sum to is lost. The scale says how much that may be: the
  // estimate takes it for a step, of which kTokenTile errors of 1 / sqrt(6) each are independent.
  constexpr float kTiny = 0x1p-109f, kLess = 0x1.fffffep-110f, kLostSteps = 28;
  static_assert(kLostSteps * kLostSteps >= 6 * kTokenTile);
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
    const F lost = S::ZeroBelow(S::Set1(kLess), most, most);
    const F scale_of_each = S::Fma(lost, S::Set1(kLostSteps), S::Mul(most, S::Set1(1.f / kTop)));
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
                           S::Set1(factors[r * kBatch + g]), kDither.at + t);
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
void Weights(const float* probs, int64_t rows, int64_t columns, const CodeParameters& parameters,
             int64_t groups, int16_t* weights, float* weight_scales, float* weight_biases,
             float* units) {
  ForRowBlocks(rows, [&](auto block, int64_t row) {
    constexpr int kRows = decltype(block)::value;
    const auto run =
        columns == kHalfTile ? WeightsOf<S, kRows, kHalfTile> : WeightsOf<S, kRows, kTokenTile>;
    run(probs + row * kTokenTile, parameters, groups, weights + row * groups * kTokenTile,
        weight_scales + row * groups, weight_biases + row * groups,
        units == nullptr ? nullptr : units + row);
  });
}

// Adds to `square` that of what is added, in the row's unit. kPlain: there are no channel scales,
// and all lanes are of channels.
template <typename S, bool kPlain = false>
inline __attribute__((always_inline)) void AddToOutput(const CodeKernels::Values& args, int64_t row,
                                                       int64_t channel, int64_t group,
                                                       const float* shrink, typename S::Vector sum,
                                                       float* out, typename S::Vector* square) {
  using F = typename S::Vector;
  const int64_t n = kPlain ? S::kWidth : args.channels - channel;
  if (n <= 0) return;
  const int64_t at = row * args.groups + group;
  F x = S::Mul(sum, S::Set1(args.weight_scales[at]));
  F bias = S::Set1(args.weight_biases[at]);
  if (!kPlain && args.channel_scales != nullptr) {
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

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_WEIGHTS_H_
