// Partition: a part of a graph that is compiled and executed as one.
#ifndef KVANT_PATTERNS_PARTITION_H_
#define KVANT_PATTERNS_PARTITION_H_

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/graph/graph.h"
#include "kvant/patterns/attention_spec.h"

namespace kvant {

struct AttentionMatch;  // which op plays which part; match.h, internal to patterns

// One that was made by default or moved from has no ops and no ports.
class Partition {
 public:
  enum class Kind : uint8_t { kAttention, kAttentionBackward, kOps };

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
  const LogicalTensor& input(int port) const;
  const LogicalTensor& output(int port) const;
  // For attention whose shapes are all known and fold into views (else notes()
  // say why not); null otherwise.
  const AttentionSpec* attention() const { return ops_ && spec_ ? &*spec_ : nullptr; }
  // The input that WithKvLengths or WithSegmentRanges added, which no op consumes: the last one.
  std::optional<TensorId> kv_lengths_id() const { return ExtraId(Extra::kKvLengths); }
  std::optional<TensorId> segment_ranges_id() const { return ExtraId(Extra::kSegmentRanges); }
  // Where K and V enter matched attention: an op's input, and the axis of its tokens, from the end.
  // Of ScaledDotProductAttention, both enter the same op.
  struct Operand {
    OpId op = 0;
    int input = 0;
    int tokens_from_end = 2;
  };
  // Nothing for other partitions.
  std::optional<Operand> keys() const;
  std::optional<Operand> values() const;
  // The SoftMax op of matched attention: what runs it op by op masks its input
  // from the KV length on (by the coordinate along axis 0, when there is more than
  // one). Nothing for other partitions and for ScaledDotProductAttention.
  std::optional<OpId> softmax_op() const;
  // Why it is not more than it is, a sentence each.
  const std::vector<std::string>& notes() const { return notes_; }
  // Near misses: why ops of it, or beside it, that might be attention are not fused, or not wholly.
  const std::vector<std::string>& misses() const { return misses_; }

  // The same partition for these ports (matched by id; others keep what is known),
  // shapes inferred and the spec rebuilt. Every port must have a known shape
  // afterwards. kInvalidShape, kInvalidArguments as InferShapes; kInvalidArguments if it has no
  // ops.
  absl::StatusOr<Partition> WithPorts(absl::Span<const LogicalTensor> ports) const;

  // The same partition with one more input: KV lengths, s32 of shape [N] (or
  // [1]), read at execution; the K and V tensors' token dim is then a capacity.
  // kInvalidArguments if it is not attention or has KV lengths already.
  absl::StatusOr<Partition> WithKvLengths(const LogicalTensor& lengths) const;

  // The same partition with one more input: which tokens of the segments exist, s32 of shape
  // [N, segments of K and of V, 2] (or [1, ...], for every batch), read at execution. For K's
  // segments in the order of the Concat (one, if there is none), then V's, it holds (first,
  // tokens): the columns of the scores are, segment by segment, the tokens first, first + 1, ...,
  // beginning again with token 0 after the segment's last. Where K and V are concatenated, they may
  // be so from different parts; for each batch both have to add up to as many columns. What does
  // not exist is never read. Bottom-right masks are aligned to that number of columns, other masks
  // are indexed by column. kInvalidArguments if it is not attention, has KV lengths or ranges
  // already, or has other segments.
  absl::StatusOr<Partition> WithSegmentRanges(const LogicalTensor& ranges) const;

 private:
  friend class Partitioner;
  static int PortOf(const std::vector<TensorId>& ports, TensorId id) {
    const auto at = std::find(ports.begin(), ports.end(), id);
    return at == ports.end() ? kNoPort : static_cast<int>(at - ports.begin());
  }
  // Makes spec_, or a note if the shapes are known but no spec expresses them.
  void ResolveSpec();
  Partition WithoutSpec() const;
  enum class Extra : uint8_t { kNone, kKvLengths, kSegmentRanges };
  std::optional<TensorId> ExtraId(Extra kind) const {
    return extra_kind_ == kind ? std::optional<TensorId>(extra_->id) : std::nullopt;
  }
  absl::Status CheckExtra(Extra kind, const LogicalTensor& tensor) const;
  absl::StatusOr<Partition> WithExtra(Extra kind, const LogicalTensor& tensor) const;

  int id_ = 0;
  Kind kind_ = Kind::kOps;
  std::string pattern_;
  std::shared_ptr<const Graph> ops_;
  std::vector<TensorId> inputs_;
  std::vector<TensorId> outputs_;
  std::shared_ptr<const AttentionMatch> match_;  // null unless attention
  Extra extra_kind_ = Extra::kNone;
  std::optional<LogicalTensor> extra_;
  std::optional<AttentionSpec> spec_;
  std::vector<std::string> notes_, misses_;
  bool noted_ = false;  // the last note is from ResolveSpec
};

}  // namespace kvant

#endif  // KVANT_PATTERNS_PARTITION_H_
