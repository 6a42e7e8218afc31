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

}  // namespace

ParameterRule MakeParameterRule(DataType codes, DataType scales, DataType zero_points,
                                bool power_of_two, double floor) {
  ParameterRule rule;
  rule.highest = HighestCode(codes);
  rule.lowest = IsFloat(codes) ? -rule.highest : static_cast<double>(LowestOf(codes));
  rule.scale = FormatOf(scales);
  rule.power_of_two = power_of_two;
  if (power_of_two) rule.scale.largest = std::exp2(std::floor(std::log2(rule.scale.largest)));
  rule.floor = floor;
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
