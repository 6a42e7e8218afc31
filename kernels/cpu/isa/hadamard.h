// KernelSet's hadamard over a vector wrapper such as simd.h's.
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

// All steps of the blocks that `count` vectors are, or that they are a part of, in registers.
template <typename S, int count>
inline void RotateVectors(float* x, int64_t block, float norm) {
  constexpr int kWidth = S::kWidth;
  typename S::Vector v[count];
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) {
    v[i] = S::Mul(S::Load(x + i * kWidth), S::Set1(norm));
    if (block > 1) v[i] = LaneButterflies<S, 1>(v[i]);
    if (block > 2) v[i] = LaneButterflies<S, 2>(v[i]);
    if constexpr (kWidth > 4) {
      if (block > 4) v[i] = LaneButterflies<S, 4>(v[i]);
    }
    if constexpr (kWidth > 8) {
      if (block > 8) v[i] = LaneButterflies<S, 8>(v[i]);
    }
  }
#pragma GCC unroll 3
  for (int step = 1; step < count; step *= 2) {
    if (block <= step * kWidth) continue;
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
      if ((i & step) != 0) continue;
      const auto a = v[i], b = v[i + step];
      v[i] = S::Add(a, b);
      v[i + step] = S::Sub(a, b);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) S::Store(x + i * kWidth, v[i]);
}

template <typename S, int count>
inline int64_t RotateRuns(float* x, int64_t n, int64_t block, float norm) {
  int64_t i = 0;
  for (; i + count * S::kWidth <= n; i += count * S::kWidth) {
    RotateVectors<S, count>(x + i, block, norm);
  }
  return i;
}

// Every set adds the same numbers in the same order, so that all agree on every bit.
template <typename S>
void Hadamard(float* x, int64_t n, int64_t block) {
  // First, so that nothing overflows but what the result is.
  const float norm = 1.f / __builtin_sqrtf(static_cast<float>(block));
  int64_t i = 0;
  if constexpr (S::kWidth > 1) {
    // What is left has whole blocks, so that no fewer vectors are taken than a block has.
    i += RotateRuns<S, 8>(x + i, n - i, block, norm);
    i += RotateRuns<S, 4>(x + i, n - i, block, norm);
    i += RotateRuns<S, 2>(x + i, n - i, block, norm);
    i += RotateRuns<S, 1>(x + i, n - i, block, norm);
    for (int64_t step = 8 * S::kWidth; step < block; step *= 2) Butterflies<S>(x, n, step);
  }
  for (int64_t j = i; j < n; ++j) x[j] *= norm;
  for (int64_t step = 1; step < block && i < n; step *= 2) Butterflies<S>(x + i, n - i, step);
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_HADAMARD_H_
