// LogicalTensor: what is known of a tensor without its data. A value type.
#ifndef KVANT_GRAPH_LOGICAL_TENSOR_H_
#define KVANT_GRAPH_LOGICAL_TENSOR_H_

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvant/graph/constant.h"
#include "kvant/graph/data_type.h"

namespace kvant {

using TensorId = uint64_t;
using OpId = uint64_t;

inline constexpr int kMaxRank = 12;
// A dimension or stride that is not known yet (oneDNN's INT64_MIN).
inline constexpr int64_t kUnknownDim = std::numeric_limits<int64_t>::min();

// Dimensions, or strides in elements.
using Dims = absl::InlinedVector<int64_t, 6>;

enum class Layout : uint8_t { kUndef, kAny, kStrided, kOpaque };
// kHostScalar: rank 0, s32, s64 or f32, lives on the host for every engine.
enum class Property : uint8_t { kUndef, kVariable, kConstant, kHostScalar };
// What JSON calls them, by enumerator.
inline constexpr std::array<std::string_view, 4> kLayoutNames = {"undef", "any", "strided",
                                                                 "opaque"};
inline constexpr std::array<std::string_view, 4> kPropertyNames = {"undef", "variable", "constant",
                                                                   "host_scalar"};

struct LogicalTensor {
  TensorId id = 0;
  DataType type = kUndef;
  // Nothing: rank unknown. Empty: scalar. Single dims may be kUnknownDim.
  std::optional<Dims> dims;
  // In elements. Nothing: not known or not fixed (dense row-major is assumed
  // when memory is laid out).
  std::optional<Dims> strides;
  Layout layout = Layout::kStrided;
  Property property = Property::kUndef;
  // Of a kConstant without dims: its value, which is part of the graph; it is no input then.
  // Without one, a kConstant is an input that does not change between executions.
  std::optional<Constant> value;
  // For people and for look-up by name; not part of a tensor's identity.
  std::string name;

  // -1 if unknown.
  int rank() const { return dims ? static_cast<int>(dims->size()) : -1; }
  // Every dim is known.
  bool has_shape() const;
  // Product of the dims; 1 for a scalar. 0 where it is not known, or not a number of 64 bits.
  int64_t elements() const;
  // The strides, or those of a dense row-major tensor; none where the rank is not known.
  Dims StridesOrDense() const;
  // Elements that the tensor spans in memory: max over d of dims[d]*strides[d]
  // (a dim of 1 counts stride 1), or up to its last element where views that
  // overlap themselves reach further; at least 1; 0 if a dim is 0, or as with elements().
  int64_t span_elements() const;
  // BytesFor(type, span_elements()): 0 too of an undefined type, and where it overflows.
  int64_t memory_bytes() const;
  // "tensor 3 'keys'", or "tensor 3" where it has no name.
  std::string Label() const;
  // "f16[1,8,?,128]", "f32[*]" when the rank is unknown, "f32 0.125" of a value.
  std::string ToString() const;
};

// What stands for a tensor that does not exist: no type, nothing known of its shape.
const LogicalTensor& NoTensor();

// True when type, and everything both sides know of dims, strides and value, agree.
bool Compatible(const LogicalTensor& a, const LogicalTensor& b);

// Rank <= kMaxRank, dims >= 0 or unknown, strides >= 0, one stride per dim, sizes in bits that fit
// int64, and a value only of a constant without dims, of its type. kInvalidShape with a sentence
// otherwise.
absl::Status ValidateTensor(const LogicalTensor& tensor);

// An axis counted from the front; a negative one counts from the end of the rank.
inline int64_t FromFront(int64_t axis, int64_t rank) { return axis < 0 ? axis + rank : axis; }
// False when both are known and differ; of lists, also when they differ in rank.
inline bool MayEqual(int64_t a, int64_t b) {
  return a == b || a == kUnknownDim || b == kUnknownDim;
}
bool MayEqual(absl::Span<const int64_t> a, absl::Span<const int64_t> b);
// Puts in what `other`, of the same rank, says of dims that are unknown.
void Complete(Dims& dims, absl::Span<const int64_t> other);
// The product of known dims.
int64_t ElementsOf(absl::Span<const int64_t> dims);
// Strides of a dense row-major tensor of these dims; they wrap where ValidateTensor would refuse.
Dims DenseStrides(absl::Span<const int64_t> dims);
// "1,8,4096,128"; unknown dims print as "?".
std::string DimsToString(absl::Span<const int64_t> dims);
// Product of dims; nothing if it overflows int64 or a dim is unknown.
std::optional<int64_t> CheckedProduct(absl::Span<const int64_t> dims);
// NumPy-broadcasts `other` into `dims`; the dim of the result that conflicts, or -1. Unknown dims
// yield the other side's dim when that is > 1, else unknown.
int BroadcastInto(Dims& dims, absl::Span<const int64_t> other);
// NumPy broadcast of two shapes; nothing if they do not broadcast.
std::optional<Dims> Broadcast(absl::Span<const int64_t> a, absl::Span<const int64_t> b);

}  // namespace kvant

#endif  // KVANT_GRAPH_LOGICAL_TENSOR_H_
