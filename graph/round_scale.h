// Scales of codes as their type holds them.
#ifndef KVANT_GRAPH_ROUND_SCALE_H_
#define KVANT_GRAPH_ROUND_SCALE_H_

#include <cmath>

#include "kvant/graph/data_type.h"

namespace kvant {

// A scale >= 0 as f32, f16 or bf16 holds it: to nearest, but upward where it is subnormal. There
// the nearest may be half as large, and the largest number that it is for would be beyond the
// codes.
inline double RoundScale(DataType type, double scale) {
  const double smallest_normal = type == kF16 ? 0x1p-14 : 0x1p-126;
  const double step = type == kF16 ? 0x1p-24 : type == kBF16 ? 0x1p-133 : 0x1p-149;
  return scale < smallest_normal ? std::ceil(scale / step) * step : RoundTo(type, scale);
}

}  // namespace kvant

#endif  // KVANT_GRAPH_ROUND_SCALE_H_
