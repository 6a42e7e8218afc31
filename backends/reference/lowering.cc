#include "kvant/backends/reference/lowering.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/backends/reference/pieces.h"
#include "kvant/graph/shape_inference.h"

namespace kvant::reference {
namespace {

absl::Status LowerOp(const Op& op, Lowering& lowering) {
  switch (op.kind) {
#define KVANT_OP(kind, ...) \
  case OpKind::k##kind:     \
    return Lower##kind(op, lowering);
#define KVANT_ELEMENTWISE(kind, attributes) \
  case OpKind::k##kind:                     \
    return LowerElementwise(op, lowering);
#define KVANT_BINARY(kind) \
  case OpKind::k##kind:    \
    return LowerBinary(op, lowering);
#include "kvant/graph/ops.inc"
#undef KVANT_OP
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Lowering::LowerPartition() {
  for (const Op& op : graph().ops()) {
    KVANT_RETURN_IF_ERROR(CheckShapesKnown(graph(), op));
    KVANT_RETURN_IF_ERROR(LowerOp(op, *this));
  }
  // Last, so that an execution that fails has written nothing, and inputs may share the memory of
  // outputs.
  for (size_t port = 0; port < partition_.outputs().size(); ++port) {
    const LogicalTensor& tensor = partition_.output(static_cast<int>(port));
    const Array array = Expanded(plan, Value(tensor.id), *tensor.dims);
    const auto rows = written_rows_.find(tensor.id);
    StorePort(plan, static_cast<int>(port), tensor, array,
              rows == written_rows_.end() ? std::nullopt : std::optional(rows->second));
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

Array Lowering::CompactInput(const Op& op, int index) { return Value(op.inputs[index]); }

void Lowering::SetOutput(const Op& op, int index, Array array) {
  const Dims& dims = OutputDims(op, index);
  if (array.elements() == ElementsOf(dims)) array.dims = dims;
  values_[op.outputs[index]] = std::move(array);
}

void Lowering::WriteRowsOf(const Op& op, int index, const Array& offsets) {
  written_rows_[op.outputs[index]] = offsets;
}

absl::Status Lowering::CheckValues(const Op& op, TensorId id, std::string_view what, double low,
                                   double high) {
  if (const std::optional<Constant>& value = graph().tensor(id).value) {
    if (value->value() >= low && value->value() <= high) return absl::OkStatus();
    return MakeError(ErrorKind::kInvalidArguments,
                     absl::StrCat(op.ToString(), ": ", std::string(what), " ", value->ToString(),
                                  " is not in [", low, ", ", high, "]"));
  }
  const int port = partition_.InputPort(id);
  if (port == kNoPort) return absl::OkStatus();
  port_checks_.push_back({port, partition_.input(port), low, high,
                          absl::StrCat(op.ToString(), ": ", std::string(what))});
  return absl::OkStatus();
}

absl::Status LowerEnd(const Op&, Lowering&) { return absl::OkStatus(); }

absl::Status LowerWildcard(const Op& op, Lowering&) {
  return MakeError(ErrorKind::kUnimplemented,
                   absl::StrCat(op.ToString(), ": a wildcard has no meaning to run"));
}

}  // namespace kvant::reference
