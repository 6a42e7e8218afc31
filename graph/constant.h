// Constant: a number that is part of a graph.
#ifndef KVANT_GRAPH_CONSTANT_H_
#define KVANT_GRAPH_CONSTANT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kvant/graph/data_type.h"

namespace kvant {

// One element of a type, as memory holds it. A value type.
class Constant {
 public:
  // Numbers stand for themselves.
  Constant(float value);    // NOLINT(google-explicit-constructor)
  Constant(int32_t value);  // NOLINT(google-explicit-constructor)
  Constant(int64_t value);  // NOLINT(google-explicit-constructor)
  Constant(bool value);     // NOLINT(google-explicit-constructor)
  // As StoreElement rounds it; see WhyNot.
  Constant(DataType type, double value);
  // The element of that type at `data`.
  Constant(DataType type, const void* data);

  DataType type() const { return type_; }
  // Aligned to 8 bytes.
  const void* data() const { return bytes_.data(); }
  // Exact but for s64 beyond 2^53.
  double value() const { return LoadElement(type_, data(), 0); }
  // Exact for integers; of others towards zero, saturating; 0 for NaN.
  int64_t integer() const;
  // Reads back as the same number: "0.125", "-inf", "-9223372036854775808", "true".
  std::string ToString() const;

  // What is wrong with the number as a constant of that type, which no rounding makes good; empty:
  // nothing.
  static std::string WhyNot(DataType type, double value);

  // The same type and bits.
  friend bool operator==(const Constant& a, const Constant& b) {
    return a.type_ == b.type_ && a.bytes_ == b.bytes_;
  }

 private:
  DataType type_ = kUndef;
  alignas(8) std::array<std::byte, 8> bytes_{};
};

}  // namespace kvant

#endif  // KVANT_GRAPH_CONSTANT_H_
