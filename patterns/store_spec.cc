#include "kvant/patterns/store_spec.h"

#include <utility>

#include "kvant/graph/op_shapes.h"

namespace kvant {
namespace {

bool Continues(const StoreAxis& outer, const StoreAxis& inner) {
  const auto along = [&](int64_t StoreAxis::*array) {
    return outer.*array == inner.extent * inner.*array;
  };
  return outer.in_group == inner.in_group && along(&StoreAxis::values) &&
         along(&StoreAxis::codes) && along(&StoreAxis::scales) && along(&StoreAxis::zero_points) &&
         along(&StoreAxis::positions);
}

// How far what is written moves by a group of so many elements along dimension `d` of codes.
StoreAxis MoveAlong(const StoreSpec& spec, int d, int64_t group) {
  const auto stride = [d](const PortArray& parameters) {
    return parameters.present() ? parameters.strides[d] : 0;
  };
  return {.codes = spec.codes.strides[d] * group,
          .scales = stride(spec.scales),
          .zero_points = stride(spec.zero_points)};
}

}  // namespace

PortArray StoreSpec::Source() const {
  if (hadamard == 0 || only_rotates()) return values;
  PortArray rotated;
  rotated.type = kF32;
  rotated.strides = DenseStrides(dims);
  return rotated;
}

StoreAxes SplitAxes(const StoreSpec& spec, int first, int last) {
  const Dims values = spec.Source().strides;
  const auto stride = [&spec](const PortArray& array, int d) {
    const bool by_page = d == 0 && spec.position.page > 0;
    return array.present() && !by_page ? array.strides[d] : 0;
  };
  StoreAxes axes;
  const auto add = [&axes](const StoreAxis& axis) {
    if (axis.extent != 1) axes.push_back(axis);
  };
  for (int d = first; d < last; ++d) {
    const int64_t group = spec.group[d];
    const int64_t positions = d == 0 && spec.appends() ? spec.position.array.strides[0] : 0;
    add({.extent = group == 0 ? 1 : spec.dims[d] / group,
         .values = values[d] * group,
         .codes = stride(spec.codes, d) * group,
         .scales = stride(spec.scales, d),
         .zero_points = stride(spec.zero_points, d),
         .positions = positions * group});
    add({.extent = group,
         .values = values[d],
         .codes = stride(spec.codes, d),
         .positions = positions,
         .in_group = true});
  }
  return axes;
}

void MergeAxes(StoreAxes& axes) {
  StoreAxes merged;
  for (const StoreAxis& axis : axes) {
    if (merged.empty() || !Continues(merged.back(), axis)) {
      merged.push_back(axis);
      continue;
    }
    const int64_t extent = merged.back().extent * axis.extent;
    merged.back() = axis;
    merged.back().extent = extent;
  }
  axes = std::move(merged);
}

StoreAxis PositionAxis(const StoreSpec& spec) {
  return MoveAlong(spec, spec.position.axis, spec.position.group);
}

StoreAxis PageAxis(const StoreSpec& spec) {
  return spec.position.page > 0 ? MoveAlong(spec, 0, 1) : StoreAxis();
}

StoreSpec ResolveStore(const Graph& graph, absl::Span<const TensorId> inputs,
                       absl::Span<const TensorId> outputs) {
  const Op& first = graph.ops().front();
  const Op& op = graph.ops().back();
  const bool appends = Appends(op.kind), pages = op.kind == OpKind::kAppendPages;
  const TensorId from = first.inputs[0], to = op.outputs[0];
  const auto find = [&](TensorId id) { return FindPortArray(graph, inputs, outputs, id); };
  AppendedTokens tokens;
  if (appends) tokens = AppendedTokensOf(op, graph.tensor(op.inputs[0]), graph.tensor(to));
  const LogicalTensor values =
      pages ? TokensAsRows(graph.tensor(from), tokens.axis) : graph.tensor(from);
  StoreSpec spec;
  if (first.kind == OpKind::kHadamard) spec.hadamard = first.Get<Attr::kBlock>();
  spec.dequantizes = op.kind == OpKind::kDynamicDequantize;
  spec.dims = *values.dims;
  spec.values = find(spec.dequantizes ? to : from);
  if (!spec.dequantizes) spec.values.strides = values.StridesOrDense();
  spec.codes = find(spec.dequantizes ? from : to);
  spec.group = op.kind == OpKind::kHadamard ? spec.dims : QuantizationGroup(op, spec.dims);
  if (op.kind == OpKind::kHadamard) return spec;
  // What tokens of several pages share is not by their order.
  if (pages) spec.group[0] = 1;
  if (appends) {
    spec.position = {find(op.inputs[1]), tokens.axis,  tokens.tokens,
                     tokens.capacity,    tokens.group, tokens.page};
    Dims& strides = spec.position.array.strides;
    // One position may be all rows'.
    strides = Dims{graph.tensor(op.inputs[1]).elements() > 1 ? strides[0] : 0};
  }
  spec.rule.computes = op.outputs.size() > 1;
  const auto parameters = spec.rule.computes
                              ? absl::MakeConstSpan(op.outputs).subspan(1)
                              : absl::MakeConstSpan(op.inputs).subspan(appends ? 2 : 1);
  const auto find_parameters = [&](TensorId id) {
    PortArray array = find(id);
    const auto rank = static_cast<int>(spec.dims.size());
    array.strides.resize(spec.dims.size());
    for (int d = 0; d < rank; ++d) {
      array.strides[d] = GroupStride(op, graph.tensor(id), rank, d);
    }
    return array;
  };
  if (!parameters.empty()) spec.scales = find_parameters(parameters[0]);
  if (parameters.size() > 1) spec.zero_points = find_parameters(parameters[1]);
  spec.rule.power_of_two_scales = op.Get<Attr::kPowerOfTwoScales>();
  spec.rule.scale_floor = op.Get<Attr::kScaleFloor>();
  spec.rule.ggml = op.attrs.Find(Attr::kFormula) != nullptr;
  spec.rule.codebook = op.Get<Attr::kCodebook>();
  return spec;
}

}  // namespace kvant
