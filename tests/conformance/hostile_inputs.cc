#include "kvant/tests/conformance/hostile_inputs.h"

#include <cmath>
#include <utility>

namespace kvant::conformance {
namespace {

using Magnitudes = Case::Magnitudes;

// By so much keys are smaller, and queries larger.
constexpr double kSmallKeys = 1e-3;

bool IsZeroToken(int64_t token) { return token % 5 == 3; }
int64_t OutlierChannel(const Case& c) { return c.head_size / 3; }

double FactorOf(const Case& c, bool keys, int64_t token) {
  const int64_t at[] = {token};
  switch (c.magnitudes) {
    case Magnitudes::kZeroTokens:
      return keys ? kSmallKeys : 1e-5;
    case Magnitudes::kSmall:
      // Of which f16 keeps a few bits: results would differ by its last.
      if (!keys && c.type == kF16) return 1e-3;
      return keys ? kSmallKeys : 1e-6;
    case Magnitudes::kWide:
      return keys ? 1 : std::pow(10, -1 + 5 * Noise(17, at));  // 1e-6 to 1e4
    default:
      return 1;
  }
}

bool IsZero(const Case& c, const KvAxes& axes, absl::Span<const int64_t> at) {
  if (c.magnitudes == Magnitudes::kZeroTokens) return IsZeroToken(at[axes.token]);
  return c.magnitudes == Magnitudes::kOutlierChannel && axes.keys &&
         at[axes.channel] == OutlierChannel(c);
}

}  // namespace

Fill HostileQuery(const Case& c, Fill fill) {
  const double factor = 1 / FactorOf(c, true, 0);
  const int64_t outlier = c.magnitudes == Magnitudes::kOutlierChannel ? OutlierChannel(c) : -1;
  return [=, fill = std::move(fill)](absl::Span<const int64_t> at) {
    return at.back() == outlier ? 1e4 : factor * fill(at);
  };
}

Fill HostileData(const Case& c, const KvAxes& axes, bool quantized, double zero, Fill fill) {
  return [=, fill = std::move(fill)](absl::Span<const int64_t> at) {
    if (IsZero(c, axes, at)) return zero;
    return quantized ? fill(at) : fill(at) * FactorOf(c, axes.keys, at[axes.token]);
  };
}

Fill HostileScales(const Case& c, const KvAxes& axes, bool by_token, Fill fill) {
  return [=, fill = std::move(fill)](absl::Span<const int64_t> at) {
    const int64_t token = by_token ? at[axes.token] : 0;
    // What quantization makes of zeros: a scale that says nothing.
    if (by_token && c.magnitudes == Magnitudes::kZeroTokens && IsZeroToken(token)) return 1.0;
    return fill(at) * FactorOf(c, axes.keys, token);
  };
}

}  // namespace kvant::conformance
