// KvTensor: the keys, or the values, of layers that share a scheme: what their memory looks like,
// and how tokens get there.
#ifndef KVANT_CACHE_KV_TENSOR_H_
#define KVANT_CACHE_KV_TENSOR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/backends/cache_kernels.h"
#include "kvant/backends/engine.h"
#include "kvant/cache/kv_block.h"
#include "kvant/cache/kv_layout.h"
#include "kvant/cache/kv_mover.h"
#include "kvant/cache/kv_storage.h"

namespace kvant {

// The arrays of a layer's K or V, in this order. Those that its storage does not have are empty.
enum class KvPart : uint8_t { kSinks, kCodes, kScales, kZeroPoints, kWindow };
inline constexpr int kKvParts = 5;

// Where they lie, each aligned to 64 bytes.
using KvPointers = std::array<std::byte*, kKvParts>;

inline int64_t KvAligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

struct KvShape {
  int64_t batch = 0, heads = 0, head_size = 0;
};

// Which of the tokens that are given each batch row takes: counts[b] of them, from starts[b] on.
struct KvTaken {
  absl::Span<const int64_t> counts, starts;
};

// New tokens of a layer, and what works on them.
struct KvArrival {
  const CacheKernels& kernels;
  const Stream& stream;
  // Of the layer, without sides: lengths, what rows take and batch, and the stride of places.
  CacheStep step;
  // What the host knows: how many tokens rows have; nothing, where only the engine's memory says
  // it, and each row takes one. And which they take.
  absl::Span<const int32_t> lengths;
  KvTaken taken;
  std::byte* working = nullptr;  // KvTensor::working_bytes(), 64-byte aligned
};

// Which segments a piece of new tokens may go to, and whether others leave the window before.
struct KvNeeds {
  bool sinks = false, rest = false, leaving = false;
};

class KvTensor {
 public:
  // `name` is "K" or "V". `layout` has its final number of slots.
  KvTensor(std::string name, const KvStorage& storage, const KvShape& shape,
           const KvLayout& layout);
  // Compiles what Store runs.
  absl::Status Compile(const Engine& engine);

  const std::string& name() const { return name_; }
  const KvStorage& storage() const { return storage_; }
  const KvLayout& layout() const { return layout_; }
  const KvShape& shape() const { return shape_; }
  // 0: none.
  int64_t rotation() const;

  // Type and dims of a part, [batch, heads, slots, head_size]. Those of scales and zero points are
  // divided by GroupShape. A part that is not there has no dims. A batch shares its static scales.
  const LogicalTensor& part(KvPart part) const;
  bool has(KvPart part) const { return this->part(part).dims.has_value(); }
  // How many a sequence has: 1 to 3.
  int segments() const { return layout_.plain().segments(); }
  // The largest magnitude that all of its types hold.
  double largest() const;
  // Elements of a group along the dims of the codes.
  Dims GroupShape() const;

  // Bytes that StorePiece needs to work in; 64-byte aligned.
  size_t working_bytes() const;
  // What it has taken of its own, where executions run later.
  int64_t scratch_bytes() const;

  // Appends to every batch row: row b gets what it takes of `source` behind the tokens that it has.
  // The caller has checked all bounds, and advances the lengths.
  absl::Status Store(const KvArrival& arrival, const CacheSource& source, const KvPointers& layer,
                     int* places) const;
  // What a piece needs of StorePiece: without lengths all that it may need.
  KvNeeds NeedsOf(const KvArrival& arrival, int64_t done, int64_t tokens) const;
  // Stores tokens of `source` from `done` on where `places` says.
  absl::Status StorePiece(const KvArrival& arrival, const CacheSource& source,
                          const KvPointers& layer, const int* places, int64_t done, int64_t tokens,
                          KvNeeds needs) const;

  // What batch rows of these lengths hold. A window counts with the tokens that are in it.
  int64_t UsedBytes(absl::Span<const int32_t> lengths) const;

  // Copies what is kept of a sequence of `tokens` tokens to a batch row of `target`, which is this
  // or one of the same storage and heads with other numbers of rows and slots, in the same engine's
  // memory. `kept` becomes what that keeps.
  absl::Status CopyRow(const KvMover& mover, const KvPointers& from, int64_t from_row,
                       const KvTensor& target, const KvPointers& to, int64_t to_row, int64_t tokens,
                       KvKept& kept) const;
  // Exchanges two sequences, of which the longer has `tokens`.
  absl::Status SwapRows(const KvMover& mover, const KvPointers& layer, int64_t a, int64_t b,
                        int64_t tokens) const;

 private:
  // Stores `tokens` tokens of each batch row, or none of a row whose position is -1.
  struct Op {
    int64_t tokens = 0;
    CompiledPartition compiled;
    // Its own, where executions run later: a stream that is captured may take none. All that are
    // put onto streams follow one another.
    std::shared_ptr<const KvBlock> scratch;
  };
  struct Ops {
    Op one, many;  // one.tokens is 1
    const Op& Of(int64_t tokens) const { return tokens == many.tokens ? many : one; }
  };
  absl::Status Execute(const KvArrival& arrival, const Op& op, KvPart to, DataType type,
                       const void* values, const int* positions, const KvPointers& layer) const;
  // Moves op.tokens tokens of each row from the window to the quantized segment.
  absl::Status Leave(const KvArrival& arrival, const Op& op, const KvPointers& layer,
                     const int* places) const;
  // How many tokens are stored next: many if every row that gets any stores them alike, else one.
  int64_t NextTokens(const KvArrival& arrival, int64_t done) const;
  // How many tokens behind `length` are stored like the next one.
  int64_t Room(int64_t length) const;

  // The most tokens that are stored at once, and that leave the window at once.
  int64_t Pieces() const;
  int64_t MostLeaving() const;
  // What appends tokens of type `src`, f32 or window_type, to the part.
  absl::StatusOr<Op> CompileAppend(const Engine& engine, KvPart part, DataType src,
                                   int64_t tokens) const;
  // What a part has of a sequence: slots from, from + 1, ... to - 1 of a ring of so many. 0 slots:
  // nothing that is a sequence's own.
  struct Run {
    int64_t slots = 0, from = 0, to = 0;
  };
  Run RunOf(KvPart part, int64_t tokens, const KvKept& kept) const;

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
