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

class StoreResolver {
 public:
  StoreResolver(const Graph& graph, absl::Span<const TensorId> inputs,
                absl::Span<const TensorId> outputs)
      : graph_(graph), inputs_(inputs), outputs_(outputs) {}

  StoreSpec Resolve() {
    const Op& first = graph_.ops().front();
    const Op& op = graph_.ops().back();
    if (first.kind == OpKind::kHadamard) {
      spec_.hadamard = first.Get<Attr::kBlock>();
    }
    spec_.dequantizes = op.kind == OpKind::kDynamicDequantize;
    const TensorId from = first.inputs[0], to = op.outputs[0];
    const LogicalTensor values = op.kind == OpKind::kAppendPages
                                     ? TokensAsRows(graph_.tensor(from), Tokens(op).axis)
                                     : graph_.tensor(from);
    spec_.dims = *values.dims;
    spec_.values = Find(spec_.dequantizes ? to : from);
    if (!spec_.dequantizes) spec_.values.strides = values.StridesOrDense();
    spec_.codes = Find(spec_.dequantizes ? from : to);
    spec_.group = op.kind == OpKind::kHadamard ? spec_.dims : QuantizationGroup(op, spec_.dims);
    if (op.kind == OpKind::kHadamard) return std::move(spec_);
    // What tokens of several pages share is not by their order.
    if (op.kind == OpKind::kAppendPages) spec_.group[0] = 1;
    const bool appends = Appends(op.kind);
    if (appends) SetPosition(op);
    spec_.rule.computes = op.outputs.size() > 1;
    const auto parameters = spec_.rule.computes
                                ? absl::MakeConstSpan(op.outputs).subspan(1)
                                : absl::MakeConstSpan(op.inputs).subspan(appends ? 2 : 1);
    if (!parameters.empty()) spec_.scales = FindParameters(op, parameters[0]);
    if (parameters.size() > 1) spec_.zero_points = FindParameters(op, parameters[1]);
    spec_.rule.power_of_two_scales = op.Get<Attr::kPowerOfTwoScales>();
    spec_.rule.scale_floor = op.Get<Attr::kScaleFloor>();
    spec_.rule.ggml = op.attrs.Find(Attr::kFormula) != nullptr;
    spec_.rule.codebook = op.Get<Attr::kCodebook>();
    return std::move(spec_);
  }

 private:
  PortArray Find(TensorId id) const { return FindPortArray(graph_, inputs_, outputs_, id); }

  PortArray FindParameters(const Op& op, TensorId id) const {
    PortArray array = Find(id);
    const auto rank = static_cast<int>(spec_.dims.size());
    array.strides.resize(spec_.dims.size());
    for (int d = 0; d < rank; ++d) {
      array.strides[d] = GroupStride(op, graph_.tensor(id), rank, d);
    }
    return array;
  }

  AppendedTokens Tokens(const Op& op) const {
    return AppendedTokensOf(op, graph_.tensor(op.inputs[0]), graph_.tensor(op.outputs[0]));
  }

  void SetPosition(const Op& op) {
    const AppendedTokens to = Tokens(op);
    spec_.position = {Find(op.inputs[1]), to.axis, to.tokens, to.capacity, to.group, to.page};
    Dims& strides = spec_.position.array.strides;
    // One position may be all rows'.
    const bool by_row = graph_.tensor(op.inputs[1]).elements() > 1;
    strides = Dims{by_row ? strides[0] : 0};
  }

  const Graph& graph_;
  const absl::Span<const TensorId> inputs_, outputs_;
  StoreSpec spec_;
};

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
  return StoreResolver(graph, inputs, outputs).Resolve();
}

}  // namespace kvant
