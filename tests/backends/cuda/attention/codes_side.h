// K or V of a CodesProblem: codes and parameters as they are stored, and what they stand for.
#ifndef KVANT_TESTS_BACKENDS_CUDA_ATTENTION_CODES_SIDE_H_
#define KVANT_TESTS_BACKENDS_CUDA_ATTENTION_CODES_SIDE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvant/graph/data_type.h"
#include "kvant/tests/backends/cuda/attention/codes_problem.h"

namespace kvant::cuda {

inline DataType TypeOf(ElementType type) {
  switch (type) {
    case kFloat32:
      return kF32;
    case kFloat16:
      return kF16;
    case kBFloat16:
      return kBF16;
    case kInt8:
      return kS8;
    case kUint8:
      return kU8;
    case kInt4:
      return kS4;
    case kInt2:
      return kS2;
    case kUint2:
      return kU2;
    case kFloat8E4M3:
      return kF8E4M3;
    case kFloat8E5M2:
      return kF8E5M2;
    default:
      return kU4;
  }
}

// An array [axes], aligned to 128 bytes.
class Elements {
 public:
  Elements() = default;
  Elements(ElementType type, int64_t count)
      : type_(type),
        bytes_(static_cast<size_t>(BytesFor(TypeOf(type), count))),
        words_(bytes_ / 128 + 1) {}
  void Set(int64_t i, double x) { StoreElement(TypeOf(type_), words_.data(), i, x); }
  double Get(int64_t i) const { return kvant::LoadElement(TypeOf(type_), words_.data(), i); }
  void* data() { return words_.data(); }
  size_t bytes() const { return bytes_; }

 private:
  struct alignas(128) Line {
    unsigned char bytes[128];
  };
  ElementType type_ = kNone;
  size_t bytes_ = 0;
  std::vector<Line> words_;
};

struct SideData {
  CodesSide side;
  int channels, groups, heads, capacity;
  bool heads_inside;
  std::vector<int> first;  // CodesProblem's
  Elements codes, scales, zero_points;

  // Where token t of batch entry b is kept, and whether what is kept at `at` is one of `length`.
  int Place(int b, int t) const {
    return first.empty() ? t : (first[static_cast<size_t>(b)] + t) % capacity;
  }
  bool Holds(int b, int at, int length) const {
    const int t = first.empty() ? at : at - first[static_cast<size_t>(b)];
    return (t + capacity) % capacity < length;
  }
  int64_t Row(int b, int h, int t) const {
    return heads_inside ? (int64_t{b} * capacity + t) * heads + h
                        : (int64_t{b} * heads + h) * capacity + t;
  }
  int64_t Group(int b, int h, int t, int d) const {
    return ((int64_t{b} * heads + h) * capacity + t) * groups + d / (channels / groups);
  }
  int64_t ScaleAt(int b, int h, int t, int d) const {
    return Group(b, h, side.common_scale ? 0 : t, d);
  }
  int64_t ZeroAt(int b, int h, int t, int d) const {
    return Group(b, h, side.common_zero_point ? 0 : t, d);
  }
  double Value(int b, int h, int t, int d) const {
    const double code = codes.Get(Row(b, h, t) * channels + d);
    if (side.scales == kNone) return code;
    const double scale = scales.Get(ScaleAt(b, h, t, d));
    const double zero = side.zero_points == kNone ? 0 : zero_points.Get(ZeroAt(b, h, t, d));
    return side.real_zero_points ? code * scale - zero : (code - zero) * scale;
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_TESTS_BACKENDS_CUDA_ATTENTION_CODES_SIDE_H_
