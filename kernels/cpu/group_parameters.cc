#include "kvant/kernels/cpu/group_parameters.h"

#include <algorithm>
#include <cmath>

namespace kvant::cpu {
namespace {

FloatFormat FormatOf(DataType type) {
  if (type == kF16) return {11, -14, LargestOf(type)};
  if (type == kBF16) return {8, -126, LargestOf(type)};
  return {24, -126, LargestOf(kF32)};
}

double HighestCode(DataType type) {
  return IsFloat(type) ? LargestOf(type) : static_cast<double>(HighestOf(type));
}

GgmlFormat GgmlFormatOf(DataType codes, DataType zero_points, const Codebook* codebook) {
  if (codebook != nullptr) return GgmlFormat::kIq4Nl;
  if (zero_points != kUndef) return GgmlFormat::kQ4_1;
  return codes == kS8 ? GgmlFormat::kQ8_0 : GgmlFormat::kQ4_0;
}

}  // namespace

ParameterRule MakeParameterRule(DataType codes, DataType scales, DataType zero_points,
                                const ParameterOptions& options) {
  ParameterRule rule;
  rule.codes = codes;
  rule.codebook = options.codebook;
  if (options.ggml) rule.ggml = GgmlFormatOf(codes, zero_points, options.codebook);
  rule.highest = options.codebook ? options.codebook->largest : HighestCode(codes);
  rule.lowest = IsFloat(codes) ? -rule.highest : static_cast<double>(LowestOf(codes));
  rule.scale = FormatOf(scales);
  rule.power_of_two = options.power_of_two;
  if (rule.power_of_two) rule.scale.largest = std::exp2(std::floor(std::log2(rule.scale.largest)));
  rule.floor = options.floor;
  if (zero_points == kUndef) return rule;
  if (IsFloat(zero_points)) {
    rule.zero_points = ZeroPoints::kReal;
    rule.real_zero_point = FormatOf(zero_points);
  } else {
    rule.zero_points = ZeroPoints::kCodes;
    rule.lowest_zero_point = static_cast<double>(LowestOf(zero_points));
    rule.highest_zero_point = static_cast<double>(HighestOf(zero_points));
  }
  return rule;
}

double CodeOf(const ParameterRule& rule, double x, double scale, double zero_point) {
  const bool real = rule.zero_points == ZeroPoints::kReal;
  const double quotient = (real ? x + zero_point : x) / scale;
  if (rule.codebook != nullptr) {
    return std::isnan(quotient) ? 0 : rule.codebook->Nearest(quotient);
  }
  if (IsFloat(rule.codes)) {
    const double code = real ? quotient : quotient + zero_point;
    const double largest = LargestOf(rule.codes);
    return std::isfinite(x) ? std::clamp(code, -largest, largest) : code;
  }
  if (real) return quotient;
  const bool exact = quotient > -0x1p51 && quotient < 0x1p51;
  return (exact ? RoundEven(quotient) : quotient) + zero_point;
}

}  // namespace kvant::cpu
