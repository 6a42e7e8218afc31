// Deterministic data that catches errors: every value depends on all of its
// coordinates, means are not zero, heads, tokens and channels differ systematically.
#ifndef KVANT_TESTS_CONFORMANCE_DATA_H_
#define KVANT_TESTS_CONFORMANCE_DATA_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>

#include "absl/types/span.h"
#include "kvant/graph/logical_tensor.h"

namespace kvant::conformance {

// The value of the element at these coordinates.
using Fill = std::function<double(absl::Span<const int64_t> at)>;

// Uniform in [-1, 1), a pure function of seed and coordinates.
double Noise(uint64_t seed, absl::Span<const int64_t> at);
// Noise on top of a slow wave along every axis and a mean of 0.3; within about +-2.
double Signal(uint64_t seed, absl::Span<const int64_t> at);

// 64-byte aligned memory with a guard behind it, all bytes 0xff: NaN in every
// floating-point type, so that what is read from or left in gaps shows up.
class TestBuffer {
 public:
  explicit TestBuffer(size_t bytes);
  TestBuffer(const TestBuffer& other);

  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }
  size_t bytes_with_guard() const { return bytes_ + kGuard; }
  // The guard is as it was.
  bool GuardIntact() const;

 private:
  static constexpr size_t kGuard = 64;
  struct Free {
    void operator()(std::byte* data) const { ::operator delete (data, std::align_val_t{64}); }
  };
  size_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

// A buffer of tensor.memory_bytes() with these elements; gaps stay 0xff.
TestBuffer FilledBuffer(const LogicalTensor& tensor, const Fill& fill);

// Whether every byte that belongs to no element is still 0xff.
bool GapsIntact(const LogicalTensor& tensor, const TestBuffer& buffer);

}  // namespace kvant::conformance

#endif  // KVANT_TESTS_CONFORMANCE_DATA_H_
