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
  int page;                // tokens of a page; 0: there are none
  std::vector<int> table;  // [b][pages of the capacity]: each a page of its own
  Elements codes, scales, zero_points;

  int PagesOfEntry() const { return page == 0 ? 0 : (capacity + page - 1) / page; }
  // Of batch * heads * tokens rows, or of pages * heads * page; two pages are nobody's.
  int64_t RowsFor(int batch) const {
    return page == 0 ? int64_t{batch} * heads * capacity
                     : (int64_t{batch} * PagesOfEntry() + 2) * heads * page;
  }

  // Where token t of batch entry b is kept, and whether what is kept at `at` is one of `length`.
  int Place(int b, int t) const {
    return first.empty() ? t : (first[static_cast<size_t>(b)] + t) % capacity;
  }
  bool Holds(int b, int at, int length) const {
    const int t = first.empty() ? at : at - first[static_cast<size_t>(b)];
    return (t + capacity) % capacity < length;
  }
  int64_t Row(int b, int h, int t) const { return RowAt(b, h, t, heads_inside); }
  int64_t RowAt(int b, int h, int t, bool inside) const {
    int64_t entry = b, tokens = capacity;
    if (page != 0) {
      entry = table[static_cast<size_t>(b * PagesOfEntry() + t / page)];
      tokens = page;
      t %= page;
    }
    return inside ? (entry * tokens + t) * heads + h : (entry * heads + h) * tokens + t;
  }
  // What the kernel gets: numbers of no page where no token is.
  std::vector<int> TableFor(const std::vector<int>& lengths) const {
    std::vector<int> given = table;
    for (size_t b = 0; b < lengths.size() && page != 0; ++b) {
      for (int i = (lengths[b] + page - 1) / page; i < PagesOfEntry(); ++i) {
        given[b * static_cast<size_t>(PagesOfEntry()) + static_cast<size_t>(i)] =
            i % 2 == 0 ? -5 : 1 << 30;
      }
    }
    return given;
  }
  // Whether a token of the group that is kept at `at` is one of `length`.
  bool HoldsInGroup(int b, int at, int length) const {
    const int n = GroupTokens();
    for (int t = at / n * n; t < at / n * n + n; ++t) {
      if (Holds(b, t, length)) return true;
    }
    return false;
  }
  // Of each row 1 if a token of `lengths` is kept there, else 0.
  std::vector<uint32_t> RowsRead(const std::vector<int>& lengths, bool inside) const {
    const int batch = static_cast<int>(lengths.size());
    std::vector<uint32_t> rows(static_cast<size_t>(RowsFor(batch)));
    for (int b = 0; b < batch; ++b) {
      for (int at = 0; at < capacity; ++at) {
        if (!Holds(b, at, lengths[static_cast<size_t>(b)])) continue;
        for (int h = 0; h < heads; ++h) rows[static_cast<size_t>(RowAt(b, h, at, inside))] = 1;
      }
    }
    return rows;
  }
  // Tokens of a group: 1, or by channel more.
  int GroupTokens() const {
    return side.tokens == 0 ? 1 : side.tokens == CodesSide::kAll ? capacity : side.tokens;
  }
  int64_t Group(int b, int h, int t, int d) const {
    // Groups of tokens are whole in an entry, or in a page.
    return RowAt(b, h, t, false) / GroupTokens() * groups + d / (channels / groups);
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
