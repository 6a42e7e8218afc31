// Lowering: from the ops of a partition to a plan, op by op.
#ifndef KVANT_BACKENDS_REFERENCE_LOWERING_H_
#define KVANT_BACKENDS_REFERENCE_LOWERING_H_

#include <string_view>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "kvant/backends/reference/plan.h"
#include "kvant/graph/graph.h"
#include "kvant/patterns/partition.h"

namespace kvant::reference {

class Lowering {
 public:
  Lowering(const Partition& partition, Plan& plan) : plan(plan), partition_(partition) {}

  // All ops, then the outputs. Afterwards the plan is complete but for Finish().
  absl::Status LowerPartition();

  Plan& plan;

  // Input of an op; a port is loaded where it is first used. An input that the op does not have
  // must not be asked for.
  Array Input(const Op& op, int index);
  // The same, but dims may be 1 where elements repeat along them. Elementwise ops can do with
  // that; it keeps the index arithmetic of masks small.
  Array CompactInput(const Op& op, int index) { return Value(op.inputs[index]); }
  // The input of that name; of none if the op does not have it.
  Array FindInput(const Op& op, std::string_view name);
  bool HasInput(const Op& op, int index) const {
    return index < static_cast<int>(op.inputs.size());
  }
  bool HasOutput(const Op& op, int index) const {
    return index < static_cast<int>(op.outputs.size());
  }
  const LogicalTensor& InputTensor(const Op& op, int index) const {
    return graph().tensor(op.inputs[index]);
  }
  const LogicalTensor& OutputTensor(const Op& op, int index) const {
    return graph().tensor(op.outputs[index]);
  }
  const Dims& OutputDims(const Op& op, int index) const { return *OutputTensor(op, index).dims; }
  // Output `index` of the op is this array (of its elements, or compact as above).
  void SetOutput(const Op& op, int index, Array array);

  // Of output `index`, with rows along axis 0, only those before the last of `offsets` are written.
  void WriteRowsOf(const Op& op, int index, const Array& offsets);
  // The port that an input comes through; kNoPort: none.
  int PortOf(const Op& op, int index) const { return partition_.InputPort(op.inputs[index]); }

 private:
  const Graph& graph() const { return partition_.ops(); }
  Array Value(TensorId id);

  const Partition& partition_;
  absl::flat_hash_map<TensorId, Array> values_;
  absl::flat_hash_map<TensorId, Array> written_rows_;
};

// One per row of the op table; a new op does not link until it has one. They return output 0
// (anything if the op has none), and set further ones.
#define KVANT_OP(kind, ...) absl::StatusOr<Array> Lower##kind(const Op& op, Lowering& lowering);
#include "kvant/graph/ops.inc"

}  // namespace kvant::reference

#endif  // KVANT_BACKENDS_REFERENCE_LOWERING_H_
