#include "kvant/graph/shape_inference.h"

#include <algorithm>

#include "kvant/graph/op_shapes.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

// Writes a tensor's dims if they are new.
absl::Status StoreDims(Graph& graph, const Op& op, const LogicalTensor& tensor,
                       std::optional<Dims> dims) {
  if (tensor.dims == dims) return absl::OkStatus();
  LogicalTensor updated = tensor;
  // Strides were made for the old dims, if those were known.
  const bool stale =
      !dims || updated.has_shape() || (updated.strides && updated.strides->size() != dims->size());
  if (stale) updated.strides.reset();
  updated.dims = std::move(dims);
  if (updated.strides) {
    if (const absl::Status valid = ValidateTensor(updated); !valid.ok()) {
      return OpError(ErrorKind::kInvalidShape, op, std::string(valid.message()));
    }
  }
  return graph.SetTensor(updated);
}

// `declared` says whether what the graph holds of an output counts.
template <typename Declared>
absl::Status InferAll(Graph& graph, Declared declared) {
  ShapeContext context;
  for (const Op& op : graph.ops()) {
    context.inputs.clear();
    for (const TensorId id : op.inputs) context.inputs.push_back(&graph.tensor(id));
    context.outputs.assign(op.outputs.size(), std::nullopt);
    context.declared.clear();
    for (const TensorId id : op.outputs) context.declared.push_back(&graph.tensor(id));
    KVANT_RETURN_IF_ERROR(ShapeRuleOf(op.kind)(op, context));
    for (size_t i = 0; i < op.outputs.size(); ++i) {
      const LogicalTensor& tensor = graph.tensor(op.outputs[i]);
      LogicalTensor open;
      open.id = tensor.id;
      open.type = tensor.type;
      KVANT_RETURN_IF_ERROR(MergeOutput(op, declared(tensor) ? tensor : open, context.outputs[i]));
      KVANT_RETURN_IF_ERROR(StoreDims(graph, op, tensor, std::move(context.outputs[i])));
    }
  }
  return absl::OkStatus();
}

absl::Status PutIn(Graph& graph, const LogicalTensor& given) {
  const Graph::TensorInfo* info = graph.FindTensor(given.id);
  if (info == nullptr) {
    return InvalidArguments("tensor ", given.id, " is not in the graph");
  }
  if (given.type != kUndef && given.type != info->desc.type) {
    return MakeError(ErrorKind::kInvalidDataType, info->desc.Label(), " is ", info->desc.ToString(),
                     " in the graph, but given as ", given.ToString());
  }
  if (info->desc.dims == given.dims && info->desc.strides == given.strides &&
      info->desc.layout == given.layout) {
    return absl::OkStatus();
  }
  LogicalTensor updated = info->desc;
  updated.dims = given.dims;
  updated.strides = given.strides;
  updated.layout = given.layout;
  KVANT_RETURN_IF_ERROR(ValidateTensor(updated));
  return graph.SetTensor(updated);
}

}  // namespace

absl::Status InferShapes(Graph& graph) {
  return InferAll(graph, [](const LogicalTensor&) { return true; });
}

absl::Status InferShapes(Graph& graph, absl::Span<const LogicalTensor> known) {
  absl::InlinedVector<TensorId, 16> given;
  given.reserve(known.size());
  for (const LogicalTensor& tensor : known) given.push_back(tensor.id);
  std::ranges::sort(given);
  const auto* const twice = std::ranges::adjacent_find(given);
  if (twice != given.end()) return InvalidArguments("tensor ", *twice, " is given twice");
  for (const LogicalTensor& tensor : known) KVANT_RETURN_IF_ERROR(PutIn(graph, tensor));
  return InferAll(graph, [&given](const LogicalTensor& tensor) {
    return tensor.property == Property::kConstant || std::ranges::binary_search(given, tensor.id);
  });
}

absl::Status CheckShapesKnown(const Graph& graph, const Op& op) {
  for (const auto& ids : {absl::MakeSpan(op.inputs), absl::MakeSpan(op.outputs)}) {
    for (const TensorId id : ids) {
      if (graph.tensor(id).has_shape()) continue;
      return OpError(ErrorKind::kInvalidShape, op, "the shape of ", graph.tensor(id).Label(),
                     " is not known");
    }
  }
  return absl::OkStatus();
}

}  // namespace kvant
