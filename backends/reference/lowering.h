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

  // What is lowered; inputs and outputs are its.
  const Op& op() const { return *op_; }
  // A port is loaded where it is first used. An input that the op does not have must not be asked
  // for.
  Array Input(int index);
  // The same, but dims may be 1 where elements repeat along them. Elementwise ops can do with
  // that; it keeps the index arithmetic of masks small.
  Array CompactInput(int index) { return Value(op_->inputs[index]); }
  // The input of that name; of none if the op does not have it.
  Array FindInput(std::string_view name);
  bool HasInput(int index) const { return index < static_cast<int>(op_->inputs.size()); }
  bool HasOutput(int index) const { return index < static_cast<int>(op_->outputs.size()); }
  const LogicalTensor& InputTensor(int index) const { return graph().tensor(op_->inputs[index]); }
  const LogicalTensor& OutputTensor(int index) const { return graph().tensor(op_->outputs[index]); }
  const Dims& OutputDims(int index) const { return *OutputTensor(index).dims; }
  // The output is this array (of its elements, or compact as above).
  void SetOutput(int index, Array array);

  // Of the output, with rows along axis 0, only those before the last of `offsets` are written.
  void WriteRowsOf(int index, const Array& offsets) {
    written_rows_[op_->outputs[index]] = offsets;
  }
  // The port that an input comes through; kNoPort: none.
  int PortOf(int index) const { return partition_.InputPort(op_->inputs[index]); }

 private:
  const Graph& graph() const { return partition_.ops(); }
  Array Value(TensorId id);

  const Partition& partition_;
  const Op* op_ = nullptr;
  absl::flat_hash_map<TensorId, Array> values_;
  absl::flat_hash_map<TensorId, Array> written_rows_;
};

// One per row of the op table; a new op does not link until it has one. They return output 0
// (anything if the op has none), and set further ones.
#define KVANT_OP(kind, ...) absl::StatusOr<Array> Lower##kind(Lowering& lowering);
#include "kvant/graph/ops.inc"

}  // namespace kvant::reference

#endif  // KVANT_BACKENDS_REFERENCE_LOWERING_H_
