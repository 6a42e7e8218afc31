#include "kvant/tools/acceptance.h"

#include <algorithm>
#include <cmath>

#include "kvant/tools/tensor_walk.h"

namespace kvant {
namespace {

struct Tolerance {
  double absolute = 0;
  double relative = 0;
};

double EpsilonOf(DataType type) {
  switch (type) {
    case kF16:
      return 0x1p-10;
    case kBF16:
      return 0x1p-7;
    case kF8E4M3:
      return 0x1p-3;
    case kF8E5M2:
      return 0x1p-2;
    default:
      return 0x1p-23;
  }
}

Tolerance ToleranceOf(DataType type) {
  if (IsFloat(type)) {
    const double epsilon = EpsilonOf(type);
    return {.absolute = std::max(epsilon, 2e-5), .relative = std::max(epsilon, 8e-6)};
  }
  if (type == kS8 || type == kU8) return {.absolute = 1};
  return {};
}

}  // namespace

Comparison Compare(const LogicalTensor& tensor, const void* expected, const void* got,
                   double rounding) {
  const Tolerance tolerance = ToleranceOf(tensor.type);
  Comparison result;
  double sum_squares = 0;
  double sum_error = 0;
  ForEachElement(tensor, [&](int64_t, int64_t offset, const Dims&) {
    ++result.total;
    const double want = LoadElement(tensor.type, expected, offset);
    const double have = LoadElement(tensor.type, got, offset);
    if (!std::isfinite(want) || !std::isfinite(have)) {
      const bool same = want == have || (std::isnan(want) && std::isnan(have));
      result.not_finite += same ? 0 : 1;
      return;
    }
    const double diff = std::abs(have - want);
    result.max_abs = std::max(result.max_abs, diff);
    sum_error += diff * diff;
    sum_squares += want * want;
    // want == 0 has no relative error; the absolute bound decides alone.
    const bool close = diff <= tolerance.absolute || diff <= tolerance.relative * std::abs(want);
    result.failing += close ? 0 : 1;
  });
  if (sum_error > 0) result.rel_l2 = std::sqrt(sum_error / std::max(sum_squares, 1e-300));
  result.passed =
      result.not_finite == 0 && (result.failing == 0 || result.rel_l2 <= rounding ||
                                 (result.failing <= result.total / 1024 && result.rel_l2 <= 3e-3));
  result.failing += result.not_finite;
  return result;
}

}  // namespace kvant
