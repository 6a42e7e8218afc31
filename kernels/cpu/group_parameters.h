// Scale and zero point of a group of numbers from its smallest and largest: the arithmetic that
// every kernel and the reference backend share.
//
// It is f64, without branches and without calls, so that loops over it become vectors, and the
// same bits come out of every instruction set. Everything here has internal linkage: units of
// several instruction sets include it (see isa/simd.h).
#ifndef KVANT_KERNELS_CPU_GROUP_PARAMETERS_H_
#define KVANT_KERNELS_CPU_GROUP_PARAMETERS_H_

#include <cstdint>

#include "kvant/graph/data_type.h"
#include "kvant/kernels/cpu/codebook.h"

namespace kvant::cpu {

enum class ZeroPoints : uint8_t {
  kNone,   // value = code * scale
  kCodes,  // value = (code - zero point) * scale
  kReal,   // value = code * scale - zero point
};

// What a binary floating-point type can hold: f64 rounds to it in one step.
struct FloatFormat {
  int precision = 24;       // bits of the significand
  int min_exponent = -126;  // of the smallest normal number
  double largest = 0;       // the largest value to be stored
};

// Block formats of ggml, whose own formulas give scales, zero points and codes (ggml_groups.h).
enum class GgmlFormat : uint8_t { kNone, kQ8_0, kQ4_0, kQ4_1, kIq4Nl };

// How a group's range becomes its scale and zero point, and a number its code.
struct ParameterRule {
  DataType codes = kUndef;
  ZeroPoints zero_points = ZeroPoints::kNone;
  double lowest = 0, highest = 0;  // codes; of a codebook, the values they stand for
  FloatFormat scale;
  bool power_of_two = false;  // scales are rounded up to one; scale.largest is one, too
  double floor = 0;           // no scale is less, before rounding to its type
  FloatFormat real_zero_point;
  double lowest_zero_point = 0, highest_zero_point = 0;  // of an integer type of zero points
  const Codebook* codebook = nullptr;  // not null: codes are positions in it; outlives the rule
  GgmlFormat ggml = GgmlFormat::kNone;

  // Of a group's range, only the largest magnitude counts.
  bool by_magnitude() const {
    return zero_points == ZeroPoints::kNone && ggml != GgmlFormat::kQ4_0 &&
           ggml != GgmlFormat::kIq4Nl;
  }
};

struct GroupParameters {
  double scale = 1, zero_point = 0;  // as stored
};

namespace {

inline double RoundEven(double x) { return (x + 0x1.8p52) - 0x1.8p52; }  // |x| < 2^51

inline double PowerOfTwo(uint64_t biased_exponent) {
  const uint64_t bits = biased_exponent << 52;
  double power;
  __builtin_memcpy(&power, &bits, sizeof(power));
  return power;
}

// To the nearest number of that precision, ties to even; may exceed `largest`. Adding a number
// whose last place is the format's leaves what is above that place.
inline double RoundToFormat(double x, const FloatFormat& format) {
  uint64_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  const uint64_t exponent = bits >> 52 & 0x7ff;
  const uint64_t least = static_cast<uint64_t>(format.min_exponent + 1023);
  const double power = PowerOfTwo((exponent > least ? exponent : least) +
                                  static_cast<uint64_t>(53 - format.precision));
  return (x + 1.5 * power) - 1.5 * power;
}

// A scale x >= 0 as its format holds it. Subnormals round up: to the nearest would lower them by up
// to a half, and the largest of the group would be far beyond its codes.
inline double RoundScale(double x, const FloatFormat& format) {
  const double nearest = RoundToFormat(x, format);
  const uint64_t least = static_cast<uint64_t>(format.min_exponent + 1023);
  const double unit = PowerOfTwo(least + 1 - static_cast<uint64_t>(format.precision));
  return nearest + (nearest < x && x < PowerOfTwo(least) ? unit : 0);
}

// The least power of two that is not below x >= 0; 0 for 0.
inline double PowerOfTwoFrom(double x) {
  uint64_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  bits = (bits + 0x000fffffffffffff) & 0xfff0000000000000;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

inline double ClampTo(double x, double low, double high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

// A group without spread gets scale 1 (or the floor); a scale too large for its type is its
// largest. A range that is not finite gives scale NaN and zero point 0. Without zero points only
// the larger magnitude of min and max counts.
template <ZeroPoints kZeroPoints>
inline GroupParameters ParametersOf(const ParameterRule& rule, float range_min, float range_max) {
  double min = range_min, max = range_max;
  const bool finite = (max - min) * 0 == 0;
  double span, steps;
  if constexpr (kZeroPoints == ZeroPoints::kNone) {
    const double below = min < 0 ? -min : min, above = max < 0 ? -max : max;
    span = below > above ? below : above;
    steps = rule.highest;
  } else {
    if constexpr (kZeroPoints == ZeroPoints::kCodes) {
      min = min < 0 ? min : 0;
      max = max > 0 ? max : 0;
    }
    span = max - min;
    steps = rule.highest - rule.lowest;
  }
  double scale = span / steps;
  scale = scale < rule.floor ? rule.floor : scale;
  scale = rule.power_of_two ? PowerOfTwoFrom(scale) : scale;
  scale = RoundScale(scale, rule.scale);
  scale = scale == 0 ? 1 : scale;
  scale = scale > rule.scale.largest ? rule.scale.largest : scale;
  double zero_point = 0;
  if constexpr (kZeroPoints == ZeroPoints::kCodes) {
    zero_point = RoundEven(ClampTo(rule.lowest - min / scale, rule.lowest, rule.highest));
    zero_point = ClampTo(zero_point, rule.lowest_zero_point, rule.highest_zero_point);
  } else if constexpr (kZeroPoints == ZeroPoints::kReal) {
    const FloatFormat& format = rule.real_zero_point;
    zero_point = RoundToFormat(rule.lowest * scale - min, format);
    zero_point = ClampTo(zero_point, -format.largest, format.largest);
  }
  return {finite ? scale : static_cast<double>(__builtin_nanf("")), finite ? zero_point : 0};
}

inline GroupParameters ParametersOf(const ParameterRule& rule, float min, float max) {
  switch (rule.zero_points) {
    case ZeroPoints::kNone:
      return ParametersOf<ZeroPoints::kNone>(rule, min, max);
    case ZeroPoints::kCodes:
      return ParametersOf<ZeroPoints::kCodes>(rule, min, max);
    case ZeroPoints::kReal:
      return ParametersOf<ZeroPoints::kReal>(rule, min, max);
  }
  return {};
}

}  // namespace

struct ParameterOptions {
  bool power_of_two = false;
  double floor = 0;
  const Codebook* codebook = nullptr;
  bool ggml = false;
};

// The rule for these types; kUndef: no zero points.
ParameterRule MakeParameterRule(DataType codes, DataType scales, DataType zero_points,
                                const ParameterOptions& options);

// The code of x, to be rounded to the type of the codes (StoreElement): division comes first, and
// what it gives is rounded before an integer zero point is added to an integer, so that which way a
// tie goes does not depend on it. Of a finite x it is finite, unless it is NaN.
double CodeOf(const ParameterRule& rule, double x, double scale, double zero_point);

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_GROUP_PARAMETERS_H_
