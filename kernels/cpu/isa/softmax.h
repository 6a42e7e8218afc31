// KernelSet's softmax, exp_row and tanh over a vector wrapper such as simd.h's.
#ifndef KVANT_KERNELS_CPU_ISA_SOFTMAX_H_
#define KVANT_KERNELS_CPU_ISA_SOFTMAX_H_

#include <cstdint>

#include "kvant/kernels/cpu/attention_args.h"

namespace kvant::cpu {
namespace {

// exp(x) for x <= 0 or NaN; 0 below -87.3 where the result would be subnormal. x = n ln 2 + r,
// with Cephes' two constants for ln 2; 1 + r + ... is the polynomial of degree 5 whose
// relative error for |r| <= ln 2 / 2 is least, 1.1e-7.
template <typename S>
inline typename S::Vector Exp(typename S::Vector x) {
  const auto round = S::Set1(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const auto shifted = S::Fma(x, S::Set1(1.44269504088896341f), round);
  const auto n = S::Sub(shifted, round);
  auto r = S::Fnma(n, S::Set1(0.693359375f), x);
  r = S::Fma(n, S::Set1(2.12194440e-4f), r);
  auto p = S::Fma(S::Set1(8.312529419e-3f), r, S::Set1(4.189037457e-2f));
  p = S::Fma(p, r, S::Set1(1.666711522e-1f));
  p = S::Fma(p, r, S::Set1(4.999922992e-1f));
  p = S::Fma(p, r, S::Set1(1.f));
  p = S::Fma(p, r, S::Set1(1.f));
  return S::ZeroBelow(x, S::Set1(-87.3f), S::Mul(p, S::PowerOfTwo(shifted)));
}

// scores[i] = exp(scores[i] * factor - max) over a row; returns their sum. The product is rounded,
// as that in `max` is: else a large one would be above it.
template <typename S, bool kScaled>
inline float ExpAndSum(float* scores, int64_t columns, float factor, float max) {
  const auto times = S::Set1(factor), most = S::Set1(max);
  auto sum = S::Zero();
  for (const float* const end = scores + columns; scores != end; scores += kHalfTile) {
#pragma GCC unroll 8
    for (int i = 0; i < kHalfTile; i += S::kWidth) {
      auto x = S::Load(scores + i);
      if (kScaled) x = S::Mul(x, times);
      const auto e = Exp<S>(S::Sub(x, most));
      S::Store(scores + i, e);
      sum = S::Add(sum, e);
    }
  }
  return S::SumOf(sum);
}

template <typename S>
void ExpRow(float* scores, int64_t columns, float max) {
  ExpAndSum<S, false>(scores, columns, 1.f, max);
}

template <typename S>
void Softmax(float* scores, int64_t rows, int64_t columns, const float* factors, float* max,
             float* sum, float* shrink) {
  const float neg_inf = -__builtin_inff();
  for (int64_t r = 0; r < rows; ++r) {
    float* row = scores + r * kTokenTile;
    auto highest = S::Load(row);
    for (int64_t half = 0; half < columns; half += kHalfTile) {
#pragma GCC unroll 8
      for (int i = 0; i < kHalfTile; i += S::kWidth) {
        highest = S::Max(highest, S::Load(row + half + i));
      }
    }
    const float factor = factors == nullptr ? 1.f : factors[r];
    const float seen = S::MaxOf(highest) * factor;
    const float now = seen > max[r] ? seen : max[r];
    // With nothing but -inf so far, any finite stand-in gives exp(-inf) = 0.
    const float base = now == neg_inf ? 0.f : now;
    float by = 1.f;
    // Most tiles do not raise the maximum. (A NaN is not equal to itself.)
    if (max[r] != base) {
      float lane[S::kWidth];
      S::Store(lane, Exp<S>(S::Set1(max[r] - base)));
      by = lane[0];
    }
    shrink[r] = by;
    const auto exp_and_sum = factors == nullptr ? ExpAndSum<S, false> : ExpAndSum<S, true>;
    sum[r] = sum[r] * by + exp_and_sum(row, columns, factor, base);
    max[r] = now;
  }
}

// A rational approximation, odd over even, within 4 ulp; Eigen's coefficients.
template <typename S>
inline typename S::Vector TanhOf(typename S::Vector x) {
  const auto bound = S::Set1(7.90531110763549805f);  // rounds to 1 beyond
  // In this order both keep a NaN.
  x = S::Max(S::Sub(S::Zero(), bound), S::Min(bound, x));
  const auto x2 = S::Mul(x, x);
  auto p = S::Fma(S::Set1(-2.76076847742355e-16f), x2, S::Set1(2.00018790482477e-13f));
  p = S::Fma(p, x2, S::Set1(-8.60467152213735e-11f));
  p = S::Fma(p, x2, S::Set1(5.12229709037114e-08f));
  p = S::Fma(p, x2, S::Set1(1.48572235717979e-05f));
  p = S::Fma(p, x2, S::Set1(6.37261928875436e-04f));
  p = S::Fma(p, x2, S::Set1(4.89352455891786e-03f));
  auto q = S::Fma(S::Set1(1.19825839466702e-06f), x2, S::Set1(1.18534705686654e-04f));
  q = S::Fma(q, x2, S::Set1(2.26843463243900e-03f));
  q = S::Fma(q, x2, S::Set1(4.89352518554385e-03f));
  // In this order a small x loses no bits.
  return S::Mul(x, S::Div(p, q));
}

template <typename S>
void Tanh(float* values, int64_t n) {
  int64_t i = 0;
  for (; i + S::kWidth <= n; i += S::kWidth) {
    S::Store(values + i, TanhOf<S>(S::Load(values + i)));
  }
  if (i < n) S::StoreSome(values + i, TanhOf<S>(S::LoadSome(values + i, n - i)), n - i);
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_SOFTMAX_H_
