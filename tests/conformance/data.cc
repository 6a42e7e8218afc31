#include "kvant/tests/conformance/data.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kvant/tools/tensor_walk.h"

namespace kvant::conformance {
namespace {

uint64_t Mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Sines are most of the time that data take, and under an emulator most of all: those that come up
// again and again are kept.
double Wave(size_t axis, uint64_t seed, int64_t x) {
  constexpr size_t kAxes = 6, kKept = 1024;
  thread_local std::vector<double> kept[kAxes][5];
  const auto sine = [&](int64_t at) {
    const double frequency = 0.37 + 0.21 * static_cast<double>(axis + seed % 5);
    return 0.2 * std::sin(frequency * static_cast<double>(at) + static_cast<double>(axis));
  };
  if (axis >= kAxes || x < 0 || x >= static_cast<int64_t>(kKept)) return sine(x);
  std::vector<double>& waves = kept[axis][seed % 5];
  while (static_cast<int64_t>(waves.size()) <= x) {
    waves.push_back(sine(static_cast<int64_t>(waves.size())));
  }
  return waves[static_cast<size_t>(x)];
}

}  // namespace

double Noise(uint64_t seed, absl::Span<const int64_t> at) {
  uint64_t state = Mix(seed);
  for (int64_t x : at) state = Mix(state ^ static_cast<uint64_t>(x));
  return static_cast<double>(state >> 11) * 0x1p-52 - 1.0;
}

double Signal(uint64_t seed, absl::Span<const int64_t> at) {
  double value = 0.3 + 0.8 * Noise(seed, at);
  for (size_t axis = 0; axis < at.size(); ++axis) value += Wave(axis, seed, at[axis]);
  return value;
}

TestBuffer::TestBuffer(size_t bytes)
    : bytes_(bytes),
      data_(static_cast<std::byte*>(::operator new (bytes + kGuard, std::align_val_t{64}))) {
  std::memset(data_.get(), 0xff, bytes + kGuard);
}

TestBuffer::TestBuffer(const TestBuffer& other) : TestBuffer(other.bytes_) {
  std::memcpy(data_.get(), other.data_.get(), bytes_ + kGuard);
}

bool TestBuffer::GuardIntact() const {
  return std::all_of(data_.get() + bytes_, data_.get() + bytes_ + kGuard,
                     [](std::byte b) { return b == std::byte{0xff}; });
}

TestBuffer FilledBuffer(const LogicalTensor& tensor, const Fill& fill) {
  TestBuffer buffer(static_cast<size_t>(tensor.memory_bytes()));
  ForEachElement(tensor, [&](int64_t, int64_t offset, const Dims& at) {
    StoreElement(tensor.type, buffer.data(), offset, fill(at));
  });
  return buffer;
}

bool GapsIntact(const LogicalTensor& tensor, const TestBuffer& buffer) {
  const size_t element = static_cast<size_t>(std::max(BitsOf(tensor.type) / 8, 1));
  std::vector<bool> covered(buffer.bytes(), false);
  ForEachElement(tensor, [&](int64_t, int64_t offset, const Dims&) {
    std::fill_n(covered.begin() + offset * static_cast<int64_t>(element), element, true);
  });
  for (size_t i = 0; i < covered.size(); ++i) {
    if (!covered[i] && buffer.data()[i] != std::byte{0xff}) return false;
  }
  return true;
}

}  // namespace kvant::conformance
