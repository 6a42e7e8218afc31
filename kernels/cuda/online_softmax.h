// Softmax over tokens as they are seen, of the two rows (g and g + 8) that a lane has in C
// fragments; the four lanes of a g share them.
//
//   m' = max(m, s - h);  l' = l * 2^((m - m') log2 e) + sum 2^((s - m') log2 e);  O likewise
//
// h, headroom: how far below the largest score the maximum stays.
#ifndef KVANT_KERNELS_CUDA_ONLINE_SOFTMAX_H_
#define KVANT_KERNELS_CUDA_ONLINE_SOFTMAX_H_

#include "kvant/kernels/cuda/elements.h"

namespace kvant::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.69314718055994531f;

// e^(x - max), where a maximum of -inf is that of no finite score at all.
KVANT_DEVICE float ExpAbove(float x, float max) {
  return Exp2((x - (max == -Infinity() ? 0.f : max)) * kLog2E);
}

// The same where probabilities are rounded to 16 bits anyhow, in one fused operation: the offset of
// a row's exponents is a little off, for its sum too.
KVANT_DEVICE float RoughExpAbove(float x, float max) {
  return Exp2(Fma(x, kLog2E, max == -Infinity() ? 0.f : -max * kLog2E));
}

// Where probabilities become f16 they reach up to 2^15, so that those down to 2^-29 of the largest
// keep all bits, and down to 2^-39 some.
inline constexpr float kHeadroomOfF16 = 15.f / kLog2E;
// Beyond, a maximum would not hold such a difference.
inline constexpr float kMostWithHeadroom = 1e5f;

struct RowState {
  float max[2], sum[2];  // sum: of this lane's columns alone

  KVANT_DEVICE static RowState Empty() { return {{-Infinity(), -Infinity()}, {0.f, 0.f}}; }

  // Takes `n` fragments of scores in: factor[h] is what earlier sums and outputs of row h shrink
  // by.
  template <i32 kTiles>
  KVANT_DEVICE void Add(const float (&scores)[kTiles][4], i32 n, float headroom,
                        float (&factor)[2]) {
    KVANT_UNROLL
    for (i32 h = 0; h < 2; ++h) {
      float top = -Infinity();
      KVANT_UNROLL
      for (i32 j = 0; j < n; ++j) top = Max(top, Max(scores[j][2 * h], scores[j][2 * h + 1]));
      top = Max(top, ShuffleXor(top, 1));
      top = Max(top, ShuffleXor(top, 2));
      if (Abs(top) < kMostWithHeadroom) top -= headroom;
      top = Max(top, max[h]);
      factor[h] = ExpAbove(max[h], top);
      max[h] = top;
      sum[h] *= factor[h];
    }
  }

  KVANT_DEVICE void SumLanes() {
    KVANT_UNROLL
    for (i32 h = 0; h < 2; ++h) {
      sum[h] += ShuffleXor(sum[h], 1);
      sum[h] += ShuffleXor(sum[h], 2);
    }
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_ONLINE_SOFTMAX_H_
