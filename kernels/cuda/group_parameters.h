// Scale and zero point of a group of numbers, from its smallest and largest: in f64, the formulas
// and the bits of kernels/cpu/group_parameters.h.
#ifndef KVANT_KERNELS_CUDA_GROUP_PARAMETERS_H_
#define KVANT_KERNELS_CUDA_GROUP_PARAMETERS_H_

#include "kvant/kernels/cuda/elements.h"
#include "kvant/kernels/cuda/quantize_params.h"

namespace kvant::cuda {

KVANT_DEVICE double LargestFinite(i32 type) {
  switch (type) {
    case kFloat16:
      return 65504;
    case kBFloat16:
      return AsFloat(0x7f7f0000u);
    default:
      return AsFloat(0x7f7fffffu);
  }
}
KVANT_DEVICE double LargestPowerOfTwo(i32 type) {
  return type == kFloat16 ? 32768 : AsFloat(0x7f000000u);
}

// To the nearest number of that type, ties to even; of 16-bit types it may exceed the largest.
KVANT_DEVICE double RoundTo(i32 type, double x) {
  if (BitsOf(type) == 32) return static_cast<float>(x);
  const u64 precision = type == kFloat16 ? 11 : 8, bias = type == kFloat16 ? 14 : 126;
  // Adding a number whose last place is the type's leaves what is above that place.
  const u64 exponent = AsBits(x) & 0x7ff0000000000000u, least = (1023 - bias) << 52;
  const double power =
      1.5 * AsDouble((exponent > least ? exponent : least) + ((53 - precision) << 52));
  return (x + power) - power;
}

// A scale x >= 0: subnormals round up, as in the header named above.
KVANT_DEVICE double RoundScale(i32 type, double x) {
  const double smallest_normal = type == kFloat16 ? 0x1p-14 : 0x1p-126;
  const double step = type == kFloat16 ? 0x1p-24 : type == kBFloat16 ? 0x1p-133 : 0x1p-149;
  const double nearest = RoundTo(type, x);
  return nearest < x && x < smallest_normal ? nearest + step : nearest;
}

KVANT_DEVICE double RoundToInteger(double x) {
  constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52
  return (x + kShift) - kShift;                  // |x| < 2^51
}

KVANT_DEVICE double Clamp(double x, double low, double high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

// The smallest and largest of numbers; infinite if one is not finite.
struct ValueRange {
  float min, max;

  KVANT_DEVICE static ValueRange Nothing() { return {Infinity(), -Infinity()}; }
  KVANT_DEVICE void Join(const ValueRange& other) {
    min = Min(min, other.min);
    max = Max(max, other.max);
  }
};

// Collects numbers. Without zero points `max` is the largest magnitude, and `min` its negative.
template <class T>
struct RangeFinder {
  float min = Infinity(), max = -Infinity();
  float check = 0.f;  // NaN once a number was not finite: Min and Max pass over NaN

  KVANT_DEVICE void Add(float x) {
    if (T::k.zero_point_kind == kNoZeroPoints) {
      max = Max(max, Abs(x));
    } else {
      min = Min(min, x);
      max = Max(max, x);
    }
    check = Fma(x, 0.f, check);
  }
  KVANT_DEVICE ValueRange Result() const {
    if (check != check) return {-Infinity(), Infinity()};
    return {T::k.zero_point_kind == kNoZeroPoints ? -max : min, max};
  }
};

// As stored.
struct ComputedParameters {
  float scale, zero_point;
};

// What follows from a range, as docs/ops.md has it: a group of nothing counts as one of zeros.
template <class T>
KVANT_DEVICE ComputedParameters ParametersOf(const ValueRange& range, const QuantizeParams& p) {
  const bool empty = range.min > range.max;
  double min = empty ? 0 : range.min, max = empty ? 0 : range.max;
  if (!((max - min) * 0 == 0)) return {QuietNan(), 0.f};
  const i32 type = T::k.scales;
  const double lowest = LowestCode(T::k.codes);
  const double highest = T::k.codebook_bits > 0 ? p.codebook_largest : HighestCode(T::k.codes);
  double span = max, steps = highest;
  if (T::k.zero_point_kind != kNoZeroPoints) {
    if (T::k.zero_point_kind == kCodeZeroPoints) {
      min = min < 0 ? min : 0;
      max = max > 0 ? max : 0;
    }
    span = max - min;
    steps = highest - lowest;
  }
  // span / steps: a product with the reciprocal, which is no division here, corrected by its
  // remainder.
  const double reciprocal = T::k.codebook_bits > 0 ? p.codebook_reciprocal : 1 / steps;
  const double near = span * reciprocal;
  double scale = Fma(Fma(-near, steps, span), reciprocal, near);
  scale = scale < p.scale_floor ? static_cast<double>(p.scale_floor) : scale;
  if (T::k.power_of_two) {
    // The least one that is not below.
    scale = AsDouble((AsBits(scale) + 0x000fffffffffffffu) & 0xfff0000000000000u);
  }
  scale = RoundScale(type, scale);
  scale = scale == 0 ? 1 : scale;
  const double largest = T::k.power_of_two ? LargestPowerOfTwo(type) : LargestFinite(type);
  scale = scale > largest ? largest : scale;
  double zero_point = 0;
  if (T::k.zero_point_kind == kCodeZeroPoints) {
    const i32 codes = T::k.zero_point_codes;
    zero_point = RoundToInteger(Clamp(lowest - min / scale, lowest, highest));
    zero_point = Clamp(zero_point, LowestCode(codes), HighestCode(codes));
  } else if (T::k.zero_point_kind == kRealZeroPoints) {
    const double most = LargestFinite(T::k.zero_points);
    zero_point = Clamp(RoundTo(T::k.zero_points, lowest * scale - min), -most, most);
  }
  return {static_cast<float>(scale), static_cast<float>(zero_point)};
}

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_GROUP_PARAMETERS_H_
