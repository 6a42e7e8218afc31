// The products on codes of kernels/cpu/codes.h, for any instruction set that has the primitives of
// codes_avx512.h.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_KERNELS_H_
#define KVANT_KERNELS_CPU_ISA_CODES_KERNELS_H_

#include <cstdint>

#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/isa/codes_common.h"
#include "kvant/kernels/cpu/isa/codes_scores.h"
#include "kvant/kernels/cpu/isa/codes_values.h"

namespace kvant::cpu {
namespace {

template <typename S>
bool Biases(const float* scales, const float* zero_points, bool real, float offset, bool in_codes,
            int64_t n, float* biases) {
  using F = typename S::Vector;
  // Chains of their own, so that one element does not wait for the last.
  F scale_nans = S::Set1(0.f), bias_nans = S::Set1(0.f);
  const F zero = S::Set1(0.f), one = S::Set1(1.f), shift = S::Set1(offset);
  for (int64_t i = 0; i < n; i += S::kWidth) {
    const F scale = LoadPart<S>(scales + i, n - i);
    scale_nans = S::Fma(scale, zero, scale_nans);
    if (biases == nullptr) continue;
    const F unit = in_codes ? one : scale;
    F bias = S::Mul(shift, unit);
    if (zero_points != nullptr) {
      const F point = LoadPart<S>(zero_points + i, n - i);
      // Real zero points are multiplied by the scale already.
      const F in_unit = !real ? S::Mul(point, unit) : in_codes ? S::Div(point, scale) : point;
      bias = S::Add(in_unit, bias);
    }
    StorePart<S>(biases + i, n - i, bias);
    bias_nans = S::Fma(bias, zero, bias_nans);
  }
  return S::SumOf(S::Add(scale_nans, bias_nans)) == 0.f;
}

template <typename S>
constexpr CodeKernels kCodeKernels = {Prepare<S>, Scores<S>, Biases<S>, Weights<S>, Values<S>};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_KERNELS_H_
