// Numbers that quantization, and products over what it gives, find hard: outliers, zeros, scales
// that are subnormal in f16 or too large for it, and numbers just where rounding turns.
#ifndef KVANT_TESTS_COMMON_HOSTILE_DATA_H_
#define KVANT_TESTS_COMMON_HOSTILE_DATA_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <string_view>

#include "absl/types/span.h"

namespace kvant::testing {

enum class Hostile : uint8_t {
  kOutlierChannels,  // one channel of 8 is 1e4 times larger
  kOutlierTokens,    // one token of 8 is 1e4 times larger
  kZeroTokens,       // one token of 3 is 0, others are about 1e-4
  kZeroGroups,       // one run of 8 channels in 3 is 0, others are about 1e-4 or 100
  kSmallTokens,      // each token of its own magnitude, 1e-8 to 3: scales are subnormal in f16
  kMagnitudes,       // each run of 8 channels of its own magnitude, 1e-8 to 1e5
  kMixedMagnitudes,  // each number of its own magnitude, 1e-8 to 1e5
  kOffsets,          // runs of 8 channels with a mean of up to 1e4 times their spread
  kConstants,        // runs of 8 channels of one number, 1e-8 to 1e5
  kEdges,            // the largest of 8 channels where the rounding of a scale or code turns, the
                     // others at ties of codes
  kOneHuge,          // ordinary numbers, and 1e5, beyond f16, at the place of all zeros
};

inline constexpr Hostile kAllHostile[] = {
    Hostile::kOutlierChannels, Hostile::kOutlierTokens, Hostile::kZeroTokens,
    Hostile::kZeroGroups,      Hostile::kSmallTokens,   Hostile::kMagnitudes,
    Hostile::kMixedMagnitudes, Hostile::kOffsets,       Hostile::kConstants,
    Hostile::kEdges,           Hostile::kOneHuge,
};

inline std::string_view NameOf(Hostile kind) {
  constexpr std::string_view kNames[] = {
      "outlier_channels", "outlier_tokens", "zero_tokens",      "zero_groups",
      "small_tokens",     "magnitudes",     "mixed_magnitudes", "offsets",
      "constants",        "edges",          "one_huge",
  };
  static_assert(std::size(kNames) == std::size(kAllHostile));
  return kNames[static_cast<size_t>(kind)];
}

// Such numbers as a pure function of the coordinates [.., token, channel]; with fewer than two
// dims, or 0, the coordinates left out are 0. What is beyond `largest` becomes it, so that numbers
// of f16 (65504) stay finite.
struct HostileNumbers {
  Hostile kind = Hostile::kMagnitudes;
  uint64_t seed = 1;
  double largest = 1e5;

  double operator()(absl::Span<const int64_t> at) const {
    return std::clamp(Number(at), -largest, largest);
  }

 private:
  static constexpr int64_t kRun = 8;  // channels that belong together

  // Uniform in [0, 1), by seed, `salt` and the first n coordinates, `last` in place of the next.
  double Uniform(uint64_t salt, absl::Span<const int64_t> at, size_t n, int64_t last) const {
    uint64_t state = Mix(seed * 0x100000001b3u + salt);
    for (size_t d = 0; d < n; ++d) state = Mix(state ^ static_cast<uint64_t>(at[d]));
    return static_cast<double>(Mix(state ^ static_cast<uint64_t>(last)) >> 11) * 0x1p-53;
  }
  static uint64_t Mix(uint64_t x) {  // splitmix64
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }

  // By number, by run of channels and by token.
  double OfNumber(uint64_t salt, absl::Span<const int64_t> at) const {
    return at.empty() ? Uniform(salt, at, 0, 0) : Uniform(salt, at, at.size() - 1, at.back());
  }
  double OfRun(uint64_t salt, absl::Span<const int64_t> at) const {
    return at.empty() ? Uniform(salt, at, 0, 0)
                      : Uniform(salt, at, at.size() - 1, -2 - at.back() / kRun);
  }
  double OfToken(uint64_t salt, absl::Span<const int64_t> at) const {
    return Uniform(salt, at, at.empty() ? 0 : at.size() - 1, -1);
  }
  static double Between(double low, double high, double uniform) {
    return std::exp(std::log(low) + (std::log(high) - std::log(low)) * uniform);
  }

  double Number(absl::Span<const int64_t> at) const {
    const int64_t channel = at.empty() ? 0 : at.back();
    const int64_t token = at.size() < 2 ? 0 : at[at.size() - 2];
    // Of either sign, 0.3 to 1.3: no number is 0 by chance.
    const double part = OfNumber(1, at), noise = part < 0.5 ? -0.3 - 2 * part : 2 * part - 0.7;
    switch (kind) {
      case Hostile::kOutlierChannels:
        return channel % kRun == 3 ? 1e4 * noise : noise;
      case Hostile::kOutlierTokens:
        return token % 8 == 5 ? 1e4 * noise : noise;
      case Hostile::kZeroTokens:
        return token % 3 == 1 ? 0 : 1e-4 * noise;
      case Hostile::kZeroGroups:
        if ((channel / kRun + token) % 3 == 1) return 0;
        return (OfRun(2, at) < 0.5 ? 1e-4 : 100) * noise;
      case Hostile::kSmallTokens:
        return Between(1e-8, 3, OfToken(2, at)) * noise;
      case Hostile::kMagnitudes:
        return Between(1e-8, 1e5, OfRun(2, at)) * noise;
      case Hostile::kMixedMagnitudes:
        return Between(1e-8, 1e5, OfNumber(2, at)) * noise;
      case Hostile::kOffsets: {
        const double mean = Between(1e-7, 1e3, OfRun(2, at)) * (OfRun(3, at) < 0.5 ? -1 : 1);
        return mean * (1 + Between(1e-4, 1, OfRun(4, at)) * noise);
      }
      case Hostile::kConstants:
        return Between(1e-8, 1e5, OfRun(2, at)) * (OfRun(3, at) < 0.5 ? -1 : 1);
      case Hostile::kEdges:
        return Edge(at, channel % kRun == static_cast<int64_t>(kRun * OfRun(2, at)));
      case Hostile::kOneHuge: {
        const bool first = std::all_of(at.begin(), at.end(), [](int64_t i) { return i == 0; });
        return first ? 1e5 : noise;
      }
    }
    return 0;
  }

  // The largest of its run is `highest` times a scale halfway between two of f16's (some bits of
  // which are bf16's and powers of two as well), or there up to a millionth; or highest + 1/2 times
  // one of f16's. The others are ties of codes of one of them.
  double Edge(absl::Span<const int64_t> at, bool is_largest) const {
    constexpr double kHighest[] = {1, 3, 7, 8, 15, 113, 127, 255, 448, 464, 57344, 61440};
    constexpr double kTurns[] = {0.5, 0.5, 0.5 - 1e-6, 0.5 + 1e-6, 0, 1e-6, 0.25, 0.75};
    const double highest = kHighest[static_cast<size_t>(OfRun(3, at) * std::size(kHighest))];
    // Half of the scales are subnormal in f16, the least ones among them.
    const double place = OfRun(4, at);
    double whole = std::floor(Between(1, 2048, 2 * std::min(place, 0.499)));
    if (place < 0.25) whole = std::floor(12 * place);
    double unit = 0x1p-24;
    if (place > 0.5) unit *= std::exp2(std::floor(34 * (place - 0.5)));
    const double scale = whole * unit;
    if (is_largest) {
      const double turn = kTurns[static_cast<size_t>(OfRun(5, at) * std::size(kTurns))];
      const double number = OfRun(6, at) < 0.8 ? highest * (scale + turn * unit)
                                               : (highest + turn) * std::max(scale, unit);
      return OfRun(7, at) < 0.5 ? -number : number;
    }
    const double code = std::floor(OfNumber(8, at) * highest) + 0.5;
    return (OfNumber(9, at) < 0.5 ? -1 : 1) * std::min(code, highest) * std::max(scale, unit);
  }
};

}  // namespace kvant::testing

#endif  // KVANT_TESTS_COMMON_HOSTILE_DATA_H_
