#include "kvant/backends/reference/lowering.h"

#include <utility>

#include "kvant/backends/reference/pieces.h"
#include "kvant/graph/shape_inference.h"

namespace kvant::reference {
namespace {

using LowerFn = absl::StatusOr<Array> (*)(Lowering&);

constexpr LowerFn kLower[] = {
#define KVANT_OP(kind, ...) Lower##kind,
#include "kvant/graph/ops.inc"
};

}  // namespace

absl::Status Lowering::LowerPartition() {
  for (const Op& op : graph().ops()) {
    KVANT_RETURN_IF_ERROR(CheckShapesKnown(graph(), op));
    op_ = &op;
    KVANT_ASSIGN_OR_RETURN(Array first, kLower[static_cast<size_t>(op.kind)](*this));
    if (!plan.declined().empty()) return OpError(ErrorKind::kUnimplemented, op, plan.declined());
    if (HasOutput(0)) SetOutput(0, std::move(first));
  }
  // Last, so that an execution that fails has written nothing, and inputs may share the memory of
  // outputs.
  for (size_t port = 0; port < partition_.outputs().size(); ++port) {
    const LogicalTensor& tensor = partition_.output(static_cast<int>(port));
    const Array array = Expanded(plan, Value(tensor.id), *tensor.dims);
    StorePort(plan, static_cast<int>(port), tensor, array, written_rows_[tensor.id]);
  }
  return absl::OkStatus();
}

Array Lowering::Value(TensorId id) {
  const auto found = values_.find(id);
  if (found != values_.end()) return found->second;
  const int port = partition_.InputPort(id);
  const LogicalTensor& tensor = graph().tensor(id);
  Array array = tensor.value ? LoadConstant(plan, *tensor.value)
                             : LoadPort(plan, port, partition_.input(port));
  values_[id] = array;
  return array;
}

Array Lowering::Input(int index) {
  return Expanded(plan, Value(op_->inputs[index]), *InputTensor(index).dims);
}

Array Lowering::FindInput(std::string_view name) {
  const std::optional<size_t> input = kvant::FindInput(*op_, name);
  return input ? Input(static_cast<int>(*input)) : Array();
}

void Lowering::SetOutput(int index, Array array) {
  const Dims& dims = OutputDims(index);
  if (array.elements() == ElementsOf(dims)) array.dims = dims;
  values_[op_->outputs[index]] = std::move(array);
}

absl::StatusOr<Array> LowerEnd(Lowering&) { return Array(); }

absl::StatusOr<Array> LowerWildcard(Lowering& lowering) {
  return OpError(ErrorKind::kUnimplemented, lowering.op(), "a wildcard has no meaning to run");
}

}  // namespace kvant::reference
