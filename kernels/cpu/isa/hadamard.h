// KernelSet's hadamard over a vector wrapper such as simd_avx512.h's.
#ifndef KVANT_KERNELS_CPU_ISA_HADAMARD_H_
#define KVANT_KERNELS_CPU_ISA_HADAMARD_H_

#include <cstdint>

namespace kvant::cpu {
namespace {

// Sums and differences of elements `step` apart, for each run of 2 * step.
template <typename S>
inline void Butterflies(float* x, int64_t n, int64_t step) {
  for (int64_t run = 0; run < n; run += 2 * step) {
    float* const low = x + run;
    float* const high = low + step;
    int64_t i = 0;
    for (; i + S::kWidth <= step; i += S::kWidth) {
      const auto a = S::Load(low + i), b = S::Load(high + i);
      S::Store(low + i, S::Add(a, b));
      S::Store(high + i, S::Sub(a, b));
    }
    for (; i < step; ++i) {
      const float a = low[i], b = high[i];
      low[i] = a + b;
      high[i] = a - b;
    }
  }
}

// -1 in lanes whose number has the bit `step`.
template <int step>
constexpr float kLaneSigns[16] = {1,
                                  1 & step ? -1 : 1,
                                  2 & step ? -1 : 1,
                                  3 & step ? -1 : 1,
                                  4 & step ? -1 : 1,
                                  5 & step ? -1 : 1,
                                  6 & step ? -1 : 1,
                                  7 & step ? -1 : 1,
                                  8 & step ? -1 : 1,
                                  9 & step ? -1 : 1,
                                  10 & step ? -1 : 1,
                                  11 & step ? -1 : 1,
                                  12 & step ? -1 : 1,
                                  13 & step ? -1 : 1,
                                  14 & step ? -1 : 1,
                                  15 & step ? -1 : 1};

// The same for a step within a vector: the partner of a lane plus or minus what is in it.
template <typename S, int step>
inline typename S::Vector LaneButterflies(typename S::Vector x) {
  return S::Fma(x, S::Load(kLaneSigns<step>), S::template Partner<step>(x));
}

// Every set adds the same numbers in the same order, so that all agree on every bit.
template <typename S>
void Hadamard(float* x, int64_t n, int64_t block) {
  // First, so that nothing overflows but what the result is.
  const float norm = 1.f / __builtin_sqrtf(static_cast<float>(block));
  for (int64_t i = 0; i < n; ++i) x[i] *= norm;
  int64_t step = 1;
  if constexpr (S::kWidth > 1) {
    const int64_t end = block < S::kWidth ? block : S::kWidth;
    int64_t i = 0;
    for (; i + S::kWidth <= n; i += S::kWidth) {
      auto v = S::Load(x + i);
      if (end > 1) v = LaneButterflies<S, 1>(v);
      if (end > 2) v = LaneButterflies<S, 2>(v);
      if (end > 4) v = LaneButterflies<S, 4>(v);
      if constexpr (S::kWidth > 8) {
        if (end > 8) v = LaneButterflies<S, 8>(v);
      }
      S::Store(x + i, v);
    }
    // Less than a vector is left only where blocks are.
    for (; step < end; step *= 2) Butterflies<S>(x + i, n - i, step);
  }
  for (; step < block; step *= 2) Butterflies<S>(x, n, step);
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_HADAMARD_H_
