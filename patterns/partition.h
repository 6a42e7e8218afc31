// Partition: a part of a graph that is compiled and executed as one.
#ifndef KVANT_PATTERNS_PARTITION_H_
#define KVANT_PATTERNS_PARTITION_H_

#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/graph/graph.h"
#include "kvant/patterns/attention_spec.h"
#include "kvant/patterns/merge_spec.h"
#include "kvant/patterns/store_spec.h"

namespace kvant {

struct AttentionMatch;  // which op plays which part; match.h, internal to patterns

// One that was made by default or moved from has no ops and no ports.
class Partition {
 public:
  // kStore: what is written into a cache, or read back: DynamicQuantize, Append, AppendPages,
  // Hadamard, a Hadamard before one of these, DynamicDequantize. kMerge: MergeAttention.
  enum class Kind : uint8_t { kAttention, kAttentionBackward, kStore, kOps, kMerge };

  int id() const { return id_; }
  Kind kind() const { return kind_; }
  // What was recognised, in a few words: "attention: compressed K and V, scale,
  // additive mask", "single op: Tanh", "chain: Divide, Add".
  const std::string& pattern() const { return pattern_; }
  // The ops it covers, as a finalized graph of their own.
  const Graph& ops() const;
  // Ports: ids in order. An input is listed once however often it is used.
  const std::vector<TensorId>& inputs() const { return inputs_; }
  const std::vector<TensorId>& outputs() const { return outputs_; }
  // Where a tensor is among them; kNoPort if it is not.
  int InputPort(TensorId id) const { return PortOf(inputs_, id); }
  int OutputPort(TensorId id) const { return PortOf(outputs_, id); }
  // Descriptors of the ports, in that order; shapes as far as known. NoTensor() for a port that
  // it has not.
  const LogicalTensor& input(int port) const { return At(inputs_, port); }
  const LogicalTensor& output(int port) const { return At(outputs_, port); }
  // For attention whose shapes are all known and fold into views (else notes()
  // say why not); null otherwise.
  const AttentionSpec* attention() const { return SpecOf<AttentionSpec>(); }
  // For a store whose shapes are all known; null otherwise.
  const StoreSpec* store() const { return SpecOf<StoreSpec>(); }
  // Likewise, for a merge.
  const MergeSpec* merge() const { return SpecOf<MergeSpec>(); }
  // Why it is not more than it is, a sentence each.
  const std::vector<std::string>& notes() const { return notes_; }
  // Why ops of it, or beside it, that might be attention are not fused, or not wholly: a sentence
  // each, which names them.
  const std::vector<std::string>& misses() const { return misses_; }

  // The same partition for these ports (matched by id; others keep what is known),
  // shapes inferred and the spec rebuilt. Every port must have a known shape
  // afterwards. kInvalidShape, kInvalidArguments as InferShapes; kInvalidArguments if it has no
  // ops.
  absl::StatusOr<Partition> WithPorts(absl::Span<const LogicalTensor> ports) const;

 private:
  friend class Partitioner;
  template <typename Spec>
  const Spec* SpecOf() const {
    return ops_ ? std::get_if<Spec>(&spec_) : nullptr;
  }
  const LogicalTensor& At(const std::vector<TensorId>& ports, int port) const;
  // After shape inference. Makes spec_ anew, or a note if the shapes are known but no spec
  // expresses them.
  void ResolveSpec();

  int id_ = 0;
  Kind kind_ = Kind::kOps;
  std::string pattern_;
  std::shared_ptr<const Graph> ops_;
  std::vector<TensorId> inputs_;
  std::vector<TensorId> outputs_;
  std::shared_ptr<const AttentionMatch> match_;  // null unless attention
  std::variant<std::monostate, AttentionSpec, StoreSpec, MergeSpec> spec_;
  std::vector<std::string> notes_, misses_;
  bool noted_ = false;  // the last note is from ResolveSpec
};

// The misses of all of them, each once.
std::vector<std::string> MissesOf(absl::Span<const Partition> partitions);

}  // namespace kvant

#endif  // KVANT_PATTERNS_PARTITION_H_
