#include "kvant/kernels/cpu/group_parameters.h"

#include <cmath>

namespace kvant::cpu {
namespace {

FloatFormat FormatOf(DataType type) {
  if (type == kF16) return {11, -14, 65504};
  if (type == kBF16) return {8, -126, 0x1.fep127};
  return {24, -126, 0x1.fffffep127};
}

double HighestCode(DataType type) {
  if (type == kF8E4M3) return 448;
  if (type == kF8E5M2) return 57344;
  return static_cast<double>(HighestOf(type));
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

}  // namespace kvant::cpu
