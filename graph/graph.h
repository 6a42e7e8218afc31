// Graph: ops over logical tensors.
//
// Life: AddOp ... -> Finalize -> read-only. Shapes may be partly unknown; they
// are inferred by InferShapes (shape_inference.h), at the latest when a
// partition is compiled.
#ifndef KVANT_GRAPH_GRAPH_H_
#define KVANT_GRAPH_GRAPH_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvant/graph/logical_tensor.h"
#include "kvant/graph/op.h"

namespace kvant {

// Permission to compute floating-point ops in a lower precision, as in oneDNN.
enum class FpMath : uint8_t { kStrict, kBF16, kF16, kAny, kTF32 };
std::string_view FpMathName(FpMath mode);
std::optional<FpMath> FpMathFromName(std::string_view name);

struct GraphOptions {
  FpMath fpmath = FpMath::kStrict;
  // Integer inputs may be up-converted and multiplied in floating point.
  bool apply_to_int = false;
  std::string engine_kind = "cpu";
};

class Graph {
 public:
  // Index of an op in ops().
  using OpIndex = int32_t;
  static constexpr OpIndex kNoOp = -1;

  struct Use {
    OpIndex op = kNoOp;
    int32_t port = 0;
  };
  struct TensorInfo {
    LogicalTensor desc;
    Use producer;  // op == kNoOp: a graph input
    absl::InlinedVector<Use, 2> consumers;
  };

  Graph() = default;
  explicit Graph(GraphOptions options) : options_(std::move(options)) {}
  Graph(const Graph&) = default;
  // What a graph was moved from is like Graph().
  Graph(Graph&& other) noexcept { Swap(other); }
  Graph& operator=(Graph other) noexcept {
    Swap(other);
    return *this;
  }

  // Adds an op whose ports are these tensors (op.inputs and op.outputs are set
  // from them). Checks the schema and fills in attribute defaults.
  // kInvalidGraphOp: schema violation, or no op kind. kInvalidGraph: a duplicate op id, a
  // tensor that already has a producer, or a tensor that is declared otherwise
  // elsewhere. kInvalidDataType, kInvalidShape: of a tensor. Nothing is added on error.
  absl::Status AddOp(Op op, absl::Span<const LogicalTensor> inputs,
                     absl::Span<const LogicalTensor> outputs);

  // Sorts ops topologically (stable). kInvalidGraph on a cycle, naming an op on it or behind it,
  // and where two inputs or two outputs have one name. AddOp fails afterwards.
  absl::Status Finalize();
  bool finalized() const { return finalized_; }

  const GraphOptions& options() const { return options_; }
  // In topological order once finalized.
  const std::vector<Op>& ops() const { return ops_; }
  // Null if there is none. Tensor ids are those of the user.
  const TensorInfo* FindTensor(TensorId id) const;
  // By name, or if there is none, by decimal id. Null if not found or ambiguous.
  const TensorInfo* FindTensor(std::string_view name_or_id) const;
  // NoTensor() for an id that is not in the graph.
  const LogicalTensor& tensor(TensorId id) const {
    const TensorInfo* info = FindTensor(id);
    return info != nullptr ? info->desc : NoTensor();
  }
  // Tensors with neither producer nor value, in order of first use, and tensors consumed by
  // nothing or by an End op, in order of production. Need a finalized graph.
  const std::vector<TensorId>& inputs() const { return inputs_; }
  const std::vector<TensorId>& outputs() const { return outputs_; }

  // Replaces what is known of a tensor (shape inference, user rewriting).
  // kInvalidArguments for an id that is not in the graph.
  absl::Status SetTensor(const LogicalTensor& desc);

  // A finalized graph of only these ops (indices into ops(), any order; those of no op are left
  // out), with the tensors they touch; what others consume is among its outputs. Needs a finalized
  // graph.
  Graph Subgraph(absl::Span<const OpIndex> ops) const;

 private:
  // That the tensor is valid and agrees with what is known of its id.
  absl::Status CheckPort(const Op& op, const LogicalTensor& tensor, bool is_output) const;
  void Swap(Graph& other) noexcept;
  // The entry of a tensor, made or completed from this description.
  TensorInfo& Touch(const LogicalTensor& tensor);
  absl::Status SortOps();
  // These ops, in this order, with the tensors that they touch.
  Graph WithOps(absl::Span<const OpIndex> order) const;
  // Inputs and outputs of sorted ops, which are those of `whole` or a part of them.
  void FindPorts(const Graph& whole);

  GraphOptions options_;
  std::vector<Op> ops_;
  // Tensors in order of first mention; few enough per graph that building is
  // dominated by it, hence dense storage and an id -> index map.
  std::vector<TensorInfo> tensors_;
  absl::flat_hash_map<TensorId, int32_t> index_;
  absl::flat_hash_map<OpId, OpIndex> op_ids_;
  std::vector<TensorId> inputs_;
  std::vector<TensorId> outputs_;
  bool finalized_ = false;
};

// The nodes 0 to count - 1, each behind all that lead to it and the lowest first; without those on
// or behind a cycle. each_next(node, visit) calls visit(next) for every edge from the node.
std::vector<int32_t> TopologicalOrder(
    int32_t count,
    absl::FunctionRef<void(int32_t node, absl::FunctionRef<void(int32_t next)> visit)> each_next);

}  // namespace kvant

#endif  // KVANT_GRAPH_GRAPH_H_
