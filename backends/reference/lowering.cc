#include "kvant/backends/reference/lowering.h"

#include <utility>

#include "kvant/backends/reference/pieces.h"
#include "kvant/graph/shape_inference.h"

namespace kvant::reference {
namespace {

using LowerFn = absl::StatusOr<Array> (*)(const Op&, Lowering&);

constexpr LowerFn kLower[] = {
#define KVANT_OP(kind, ...) Lower##kind,
#include "kvant/graph/ops.inc"
};

}  // namespace

absl::Status Lowering::LowerPartition() {
  for (const Op& op : graph().ops()) {
    KVANT_RETURN_IF_ERROR(CheckShapesKnown(graph(), op));
    KVANT_ASSIGN_OR_RETURN(Array first, kLower[static_cast<size_t>(op.kind)](op, *this));
    if (!plan.declined().empty()) return OpError(ErrorKind::kUnimplemented, op, plan.declined());
    if (HasOutput(op, 0)) SetOutput(op, 0, std::move(first));
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

Array Lowering::Input(const Op& op, int index) {
  return Expanded(plan, Value(op.inputs[index]), *InputTensor(op, index).dims);
}

Array Lowering::FindInput(const Op& op, std::string_view name) {
  const std::optional<size_t> input = kvant::FindInput(op, name);
  return input ? Input(op, static_cast<int>(*input)) : Array();
}

void Lowering::SetOutput(const Op& op, int index, Array array) {
  const Dims& dims = OutputDims(op, index);
  if (array.elements() == ElementsOf(dims)) array.dims = dims;
  values_[op.outputs[index]] = std::move(array);
}

void Lowering::WriteRowsOf(const Op& op, int index, const Array& offsets) {
  written_rows_[op.outputs[index]] = offsets;
}

absl::StatusOr<Array> LowerEnd(const Op&, Lowering&) { return Array(); }

absl::StatusOr<Array> LowerWildcard(const Op& op, Lowering&) {
  return OpError(ErrorKind::kUnimplemented, op, "a wildcard has no meaning to run");
}

}  // namespace kvant::reference
