// When two results count as equal: benchdnn's rule, for numbers that a user of
// oneDNN trusts.
#ifndef KVANT_TOOLS_ACCEPTANCE_H_
#define KVANT_TOOLS_ACCEPTANCE_H_

#include <cstdint>

#include "kvant/graph/logical_tensor.h"

namespace kvant {

struct Comparison {
  // Over points where both are finite.
  double max_abs = 0;
  // sqrt(sum (got - expected)^2 / sum expected^2), the same points.
  double rel_l2 = 0;
  // Points that differ by more than a point may, and those among them where `got` or `expected` is
  // not finite.
  int64_t failing = 0;
  int64_t not_finite = 0;
  int64_t total = 0;
  bool passed = true;
};

// Compares two tensors of this description (its layout; dense without strides).
//
// A point passes when |diff| <= max(eps, 2e-5) or |diff| / |expected| <=
// max(eps, 8e-6), eps being the distance from 1 to the next value of the type
// (f16 9.8e-4, bf16 7.8e-3, f32 1.2e-7); 8-bit integers when |diff| <= 1, other
// integers when they are equal. When at most total / 1024 points fail, the tensor
// still passes if rel_l2 <= 3e-3. Infinities must be equal and NaN must meet
// NaN; a point that breaks this is never forgiven.
//
// `rounding`: a relative L2 error that is accepted as well, for kernels that say how they round
// (CompiledPartition::rounding). benchdnn has no such kernels to judge.
Comparison Compare(const LogicalTensor& tensor, const void* expected, const void* got,
                   double rounding = 0);

}  // namespace kvant

#endif  // KVANT_TOOLS_ACCEPTANCE_H_
