// The oracle's ops: one function per row of the op table, straight from the op's definition.
#ifndef KVANT_BACKENDS_ORACLE_OPS_H_
#define KVANT_BACKENDS_ORACLE_OPS_H_

#include <optional>
#include <string_view>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "kvant/backends/oracle/array.h"
#include "kvant/graph/graph.h"

namespace kvant::oracle {

// One op being evaluated: its inputs, and where its outputs go.
class OpContext {
 public:
  struct Input {
    Array* array = nullptr;
    // Nothing else needs the array: its memory may become an output's.
    bool last_use = false;
  };

  OpContext(const Graph& graph, const Op& op, Executor& executor)
      : graph(graph), op(op), executor(executor) {}

  const Graph& graph;
  const Op& op;
  Executor& executor;
  absl::InlinedVector<Input, 4> inputs;
  absl::InlinedVector<Array, 2> outputs;

  const Array& in(int port) const { return *inputs[port].array; }
  // Null if the op has no input of that name.
  const Array* Find(std::string_view name) const {
    const std::optional<size_t> port = FindInput(op, name);
    return port ? inputs[*port].array : nullptr;
  }
  bool has_input(int port) const { return port < static_cast<int>(inputs.size()); }
  const LogicalTensor& in_desc(int port) const { return graph.tensor(op.inputs[port]); }
  const LogicalTensor& out_desc(int port) const { return graph.tensor(op.outputs[port]); }
  const Dims& out_dims(int port) const { return *out_desc(port).dims; }

  // Output `port` beyond 0, zeros of its tensor's dims; null if the op does not have it.
  Array* Output(int port);
  // The input itself where nothing else needs it, else a copy.
  Array Take(int port);
  // Memory for output 0: that of an input of these dims which nothing else needs, if there is one.
  // Pointers into the input stay valid, and element i may be written once element i of that input
  // has been read.
  Array NewOutput(const Dims& dims);
};

// Each returns output 0 (anything if the op has none), and sets further ones.
//
// Ops take and give arrays of their tensors' dims, which shape inference has checked. Except that
// elementwise ops and GenIndex may give less, with dims of 1 where elements would repeat, and
// elementwise ops take that: the index arithmetic of a causal mask would otherwise be several
// arrays of the size of the scores.
#define KVANT_OP(kind, ...) absl::StatusOr<Array> Eval##kind(OpContext& context);
#include "kvant/graph/ops.inc"

// Outputs of a DynamicQuantize with formula ggml, from input 0, its scales having these dims;
// `groups` says which group an element is in. Returns output 0.
Array QuantizeByGgml(OpContext& context, const Dims& dims, const IndexMap& groups);

// Of row n of axis 0, which elements along an axis exist: [first, end) of `capacity`, by the inputs
// `lengths` and `first` of an op, which may be null. Of one element, an input is for all rows.
struct Existing {
  int64_t first = 0, end = 0;
};
Existing ExistingOf(const Array* lengths, const Array* first, int64_t capacity, int64_t n);

}  // namespace kvant::oracle

#endif  // KVANT_BACKENDS_ORACLE_OPS_H_
