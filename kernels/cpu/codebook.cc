#include "kvant/kernels/cpu/codebook.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace kvant::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Such that floats beyond it are those that go to `upper`, the larger of two neighbours.
float Threshold(double lower, double upper, bool tie_goes_up) {
  const double middle = (lower + upper) / 2;
  const auto near = static_cast<float>(middle);
  const bool below = tie_goes_up ? near < middle : near <= middle;
  return below ? near : std::nextafter(near, -kInfinity);
}

}  // namespace

Codebook::Codebook(const float* from, int bits, CodebookTies ties) : bits(bits), ties(ties) {
  const int count = 1 << bits;
  std::copy(from, from + count, values);
  int32_t order[256];
  for (int i = 0; i < count; ++i) order[i] = i;
  std::stable_sort(order, order + count, [this](int a, int b) { return values[a] < values[b]; });
  // Of equal values, the lowest code.
  const int distinct = static_cast<int>(
      std::unique(order, order + count, [this](int a, int b) { return values[a] == values[b]; }) -
      order);
  std::fill(order + distinct, order + count, 0);
  std::fill(nodes, nodes + 512, kInfinity);
  for (int level = 0; level < bits; ++level) {
    for (int i = 0; i < 1 << level; ++i) {
      const int at = ((2 * i + 1) << (bits - 1 - level)) - 1;
      if (at + 1 >= distinct) continue;
      const int lower = order[at], upper = order[at + 1];
      const bool up = ties == CodebookTies::kLargerValue || upper < lower;
      nodes[(1 << level) + i] = Threshold(values[lower], values[upper], up);
    }
  }
  std::memcpy(nodes + count, order, count * sizeof(float));
  for (int i = 0; i < count; ++i) largest = std::max(largest, std::fabs(values[i]));
}

int Codebook::Nearest(double x) const {
  const int count = 1 << bits;
  const auto [least, most] = std::minmax_element(values, values + count);
  x = std::clamp<double>(x, *least, *most);
  int best = 0;
  for (int i = 1; i < count; ++i) {
    const double distance = std::fabs(x - values[i]), nearest = std::fabs(x - values[best]);
    const bool tie = ties == CodebookTies::kLargerValue && distance == nearest;
    if (distance < nearest || (tie && values[i] > values[best])) best = i;
  }
  return best;
}

}  // namespace kvant::cpu
