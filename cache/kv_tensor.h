// KvTensor: the keys, or the values, of layers that share a scheme: what their memory looks like,
// and how tokens get there.
#ifndef KVANT_CACHE_KV_TENSOR_H_
#define KVANT_CACHE_KV_TENSOR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/backends/engine.h"
#include "kvant/cache/kv_layout.h"
#include "kvant/cache/kv_storage.h"

namespace kvant {

// The arrays of a layer's K or V, in this order; those that a scheme has not are empty.
enum class KvPart : uint8_t { kSinks, kCodes, kScales, kZeroPoints, kWindow };
inline constexpr int kKvParts = 5;

// Where they lie, each aligned to 64 bytes.
using KvPointers = std::array<std::byte*, kKvParts>;

inline int64_t KvAligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

struct KvShape {
  int64_t batch = 0, heads = 0, head_size = 0;
};

class KvTensor {
 public:
  // `layout` as it is for good. `name` is "K" or "V".
  KvTensor(std::string name, const KvStorage& storage, const KvShape& shape,
           const KvLayout& layout);
  // What Store runs.
  absl::Status Compile(const Engine& engine);

  const std::string& name() const { return name_; }
  const KvStorage& storage() const { return storage_; }
  const KvLayout& layout() const { return layout_; }
  const KvShape& shape() const { return shape_; }
  // 0: none.
  int64_t rotation() const;

  // Dims and type of a part, [batch, heads, slots, head_size], of parameters divided by GroupShape;
  // of no rank if the scheme has none. Static scales are the same for all of the batch.
  const LogicalTensor& part(KvPart part) const;
  bool has(KvPart part) const { return this->part(part).dims.has_value(); }
  // Of a sequence: 1 to 3.
  int segments() const { return 1 + has(KvPart::kSinks) + has(KvPart::kWindow); }
  // The largest magnitude that all of its types hold.
  double largest() const;
  // Elements of a group along the dims of the codes.
  Dims GroupShape() const;

  // Bytes that Store needs to work in; 64-byte aligned.
  size_t working_bytes() const;

  // Tokens of every batch row: row b gets tokens [from, from + counts[b]) of `src`, f32, f16 or
  // bf16 [batch, heads, tokens, channels] with strides, behind the lengths[b] it has. Lengths are
  // the caller's to advance. Every bound has been checked.
  struct Source {
    const void* data = nullptr;
    const LogicalTensor* desc = nullptr;
  };
  absl::Status Store(const Stream& stream, const Source& src, absl::Span<const int64_t> lengths,
                     absl::Span<const int64_t> counts, const KvPointers& layer,
                     std::byte* working) const;

  // Of batch rows of these lengths, their windows by the tokens that are in them.
  int64_t UsedBytes(absl::Span<const int64_t> lengths) const;

  // Copies to batch row `to` what a sequence of `tokens` has in row `from`; or exchanges them, for
  // sequences up to that.
  void CopyRow(const KvPointers& layer, int64_t from, int64_t to, int64_t tokens) const;
  void SwapRows(const KvPointers& layer, int64_t a, int64_t b, int64_t tokens) const;

 private:
  // One op over `tokens` tokens that every batch row takes part in or is left out of.
  struct Op {
    int64_t tokens = 0;
    CompiledPartition compiled;
  };
  struct Ops {
    Op one, many;  // one.tokens is 1
    const Op& Of(int64_t tokens) const { return tokens == many.tokens ? many : one; }
  };
  class Writer;

  // Tokens that are stored at once, and that leave the window at once, at most.
  int64_t Pieces() const;
  int64_t MostLeaving() const;
  // Appends f32 or window_type tokens to the part.
  absl::StatusOr<Op> CompileAppend(const Engine& engine, KvPart part, DataType src,
                                   int64_t tokens) const;
  // Elements of a row's part, per head, that a sequence uses, and that there are.
  struct Extent {
    DataType type = kUndef;
    int64_t used = 0, stride = 0, heads = 0;
  };
  Extent ExtentOf(KvPart part, int64_t tokens) const;
  static bool EndsAtByte(const Extent& extent);

  std::string name_;
  KvStorage storage_;
  KvShape shape_;
  KvLayout layout_;
  std::array<LogicalTensor, kKvParts> parts_;
  Ops sinks_, main_, window_;
  Op bulk_;  // from the window to the main segment
};

}  // namespace kvant

#endif  // KVANT_CACHE_KV_TENSOR_H_
