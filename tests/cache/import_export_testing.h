// Memory and values for tests of foreign formats.
#ifndef KVANT_TESTS_CACHE_IMPORT_EXPORT_TESTING_H_
#define KVANT_TESTS_CACHE_IMPORT_EXPORT_TESTING_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kvant/backends/tensor.h"
#include "kvant/graph/data_type.h"

namespace kvant::testing {

using RawBytes = std::vector<uint8_t>;

// Memory between guard bytes, which must stay as they are.
class Guarded {
 public:
  explicit Guarded(int64_t size) : size_(size), memory_(size + 2 * kGuard, 0xA5) {}
  explicit Guarded(const RawBytes& bytes) : Guarded(static_cast<int64_t>(bytes.size())) {
    std::copy(bytes.begin(), bytes.end(), memory_.begin() + kGuard);
  }
  ~Guarded() {
    const auto untouched = [](uint8_t byte) { return byte == 0xA5; };
    EXPECT_TRUE(std::all_of(memory_.begin(), memory_.begin() + kGuard, untouched));
    EXPECT_TRUE(std::all_of(memory_.end() - kGuard, memory_.end(), untouched));
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  uint8_t* data() { return memory_.data() + kGuard; }
  RawBytes bytes() const { return {memory_.begin() + kGuard, memory_.end() - kGuard}; }
  operator Tensor() { return {data(), static_cast<size_t>(size_)}; }       // NOLINT
  operator ConstTensor() { return {data(), static_cast<size_t>(size_)}; }  // NOLINT

 private:
  static constexpr int64_t kGuard = 37;  // odd: nothing is aligned
  int64_t size_;
  RawBytes memory_;
};

inline uint16_t HalfAt(const RawBytes& bytes, int64_t index) {
  return static_cast<uint16_t>(bytes[2 * index] | bytes[2 * index + 1] << 8);
}

inline void SetHalf(RawBytes& bytes, int64_t offset, uint32_t half) {
  bytes[offset] = static_cast<uint8_t>(half);
  bytes[offset + 1] = static_cast<uint8_t>(half >> 8);
}

inline RawBytes RandomBytes(int64_t size, uint32_t seed) {
  std::mt19937 generator(seed);
  RawBytes bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(generator() >> 11);
  return bytes;
}

inline int NibbleOf(uint8_t byte, bool high) { return high ? byte >> 4 : byte & 15; }

// Code * scale - zero point as docs/ops.md has it; `group` gives the group of an element.
template <typename GroupOf>
std::vector<double> ValuesOf(DataType type, const RawBytes& codes, const RawBytes& scales,
                             const RawBytes& zero_points, absl::Span<const float> codebook,
                             int64_t elements, GroupOf group) {
  std::vector<double> values;
  for (int64_t i = 0; i < elements; ++i) {
    const double code = LoadElement(type, codes.data(), i);
    const double level = codebook.empty() ? code : codebook[static_cast<size_t>(code)];
    const double zero_point = zero_points.empty() ? 0 : F16ToF32(HalfAt(zero_points, group(i)));
    values.push_back(level * F16ToF32(HalfAt(scales, group(i))) - zero_point);
  }
  return values;
}

// All bits but those of NaN.
inline void ExpectSame(const std::vector<double>& got, const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(got[i]) && std::isnan(want[i])) continue;
    ASSERT_EQ(std::bit_cast<uint64_t>(got[i]), std::bit_cast<uint64_t>(want[i]))
        << "element " << i << ": " << got[i] << ", not " << want[i];
  }
}

}  // namespace kvant::testing

#endif  // KVANT_TESTS_CACHE_IMPORT_EXPORT_TESTING_H_
