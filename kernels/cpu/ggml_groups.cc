#include "kvant/kernels/cpu/ggml_groups.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvant::cpu {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLeast = 1e-15f;  // GROUP_MAX_EPS: less is nothing, for iq4_nl

// x, or the largest number with its sign where x would be infinite.
float Within(float x, const FloatFormat& format) {
  if (RoundToFormat(std::fabs(x), format) <= format.largest) return x;
  return std::copysign(static_cast<float>(format.largest), x);
}

// With its sign, that of 0 included.
float AsStored(float x, const FloatFormat& format) {
  const double rounded = RoundToFormat(std::fabs(Within(x, format)), format);
  return std::copysign(static_cast<float>(rounded), x);
}

float ReciprocalOf(float d) {
  const float reciprocal = 1 / d;
  return std::isfinite(reciprocal) ? reciprocal : 0;
}

// Of group i, the first of the elements of the largest magnitude, with its sign; 0 has none.
float Extreme(const GgmlGroups& g, int64_t i) {
  const float low = g.min[i], high = g.max[i];
  if (-low != high) return -low > high ? low : high;
  if (high == 0) return 0;
  const int64_t first = g.index + i * g.group;
  for (int64_t j = 0; j < g.group; ++j) {
    const double x = LoadElement(g.type, g.src, first + j);
    if (std::fabs(x) == high) return static_cast<float>(x);
  }
  return high;
}

// The scales with which the codes that the reciprocals give fit best.
void Fit(const QuantizeKernels& kernels, const ParameterRule& rule, const GgmlGroups& g) {
  QuantizeParameters how;
  how.codes = kU4;
  how.codebook = rule.codebook;
  how.ggml = rule.ggml;
  how.reciprocals = g.reciprocals;
  float* const sum_qx = g.min;
  float* const sum_qq = g.max;
  std::fill_n(sum_qx, g.groups, 0.f);
  std::fill_n(sum_qq, g.groups, 0.f);
  kernels.row_fits(g.type, g.src, g.index, g.group, g.groups, how, sum_qx, sum_qq);
  for (int64_t i = 0; i < g.groups; ++i) {
    // Where the sums are beyond f32, the scale that the codes are of stays.
    if (std::isnan(g.reciprocals[i]) || !std::isfinite(sum_qx[i])) continue;
    g.scales[i] = AsStored(sum_qq[i] > 0 ? sum_qx[i] / sum_qq[i] : 0.f, rule.scale);
  }
}

}  // namespace

void FindGgmlParameters(const QuantizeKernels& kernels, const ParameterRule& rule,
                        const GgmlGroups& g) {
  for (int64_t i = 0; i < g.groups; ++i) {
    const bool finite = std::isfinite(g.min[i]) && std::isfinite(g.max[i]);
    float d = 0;
    switch (finite ? rule.ggml : GgmlFormat::kNone) {
      case GgmlFormat::kNone:
        break;
      case GgmlFormat::kQ8_0:
        d = Within(g.max[i] / 127, rule.scale);
        break;
      case GgmlFormat::kQ4_0:
        d = Within(Extreme(g, i) / -8, rule.scale);
        break;
      case GgmlFormat::kQ4_1:
        g.min[i] = Within(g.min[i], rule.real_zero_point);
        d = Within((std::max(g.min[i], g.max[i]) - g.min[i]) / 15, rule.scale);
        break;
      case GgmlFormat::kIq4Nl:
        const float extreme = Extreme(g, i);
        d = std::fabs(extreme) < kLeast ? 0 : extreme / rule.codebook->values[0];
        break;
    }
    g.scales[i] = finite ? AsStored(d, rule.scale) : kNan;
    g.reciprocals[i] = finite ? ReciprocalOf(d) : kNan;
    if (rule.zero_points != ZeroPoints::kNone) {
      g.zero_points[i] = finite ? AsStored(-(g.min[i] + 0.f), rule.real_zero_point) : 0;
    }
    if (rule.ggml == GgmlFormat::kIq4Nl && g.reciprocals[i] == 0) {
      g.scales[i] = 0;
      g.reciprocals[i] = kNan;
    }
  }
  if (rule.ggml == GgmlFormat::kIq4Nl) Fit(kernels, rule, g);
}

}  // namespace kvant::cpu
