// The demo's cache: keys or values as a format stores them.
#ifndef KVANT_TOOLS_DEMO_CACHE_H_
#define KVANT_TOOLS_DEMO_CACHE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/logical_tensor.h"
#include "kvant/tools/buffer.h"
#include "kvant/cache/kv_format.h"

namespace kvant {

// A tensor with its data, dense row-major.
struct FilledTensor {
  LogicalTensor desc;
  Buffer data{0};
};

// Without memory for it yet: zeros.
FilledTensor MakeTensor(DataType type, Dims dims);

struct StorageFormat {
  KvFormat format;
  // The zero points are of the scales' type and in real units, so that they hold
  // the group's minimum exactly; otherwise they are codes.
  bool real_zero_points = false;
};

// Keys or values: `data` alone, or codes with scales and, with some formats, zero
// points. Those not there have type kUndef.
struct StoredTensor {
  FilledTensor data;
  FilledTensor scales;
  FilledTensor zero_points;
  Dims group_shape;  // elements per scale and axis; empty without scales

  bool quantized() const { return !group_shape.empty(); }
  size_t bytes() const {
    return data.data.bytes() + scales.data.bytes() + zero_points.data.bytes();
  }
};

// Stores values (dense row-major, [N, Hkv, 1, S, D]) in that format, scales in
// f16, by a graph of one DynamicQuantize run on `engine`. Errors are those of
// KvFormat::GroupShape or the engine's.
absl::StatusOr<StoredTensor> Store(const Engine& engine, const StorageFormat& format,
                                   absl::Span<const float> values, const Dims& dims);

}  // namespace kvant

#endif  // KVANT_TOOLS_DEMO_CACHE_H_
