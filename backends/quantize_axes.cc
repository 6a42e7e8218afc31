#include "kvant/backends/quantize_axes.h"

#include <utility>

#include "absl/types/span.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

bool Continues(const GroupedAxis& outer, const GroupedAxis& inner) {
  const auto along = [&](int64_t GroupedAxis::*tensor) {
    return outer.*tensor == inner.extent * inner.*tensor;
  };
  return outer.in_group == inner.in_group && along(&GroupedAxis::values) &&
         along(&GroupedAxis::codes) && along(&GroupedAxis::scales) &&
         along(&GroupedAxis::zero_points) && along(&GroupedAxis::positions);
}

}  // namespace

QuantizeTensors QuantizeTensorsOf(const Graph& graph, const Op& op) {
  const bool dequantizes = op.kind == OpKind::kDynamicDequantize;
  const bool appends = op.kind == OpKind::kAppend;
  QuantizeTensors tensors;
  tensors.values = &graph.tensor(op.inputs[0]);
  tensors.codes = &graph.tensor(op.outputs[0]);
  if (dequantizes) std::swap(tensors.values, tensors.codes);
  if (appends) tensors.positions = &graph.tensor(op.inputs[1]);
  tensors.computes = op.outputs.size() > 1;
  const auto parameters = tensors.computes
                              ? absl::MakeConstSpan(op.outputs).subspan(1)
                              : absl::MakeConstSpan(op.inputs).subspan(appends ? 2 : 1);
  if (!parameters.empty()) tensors.scales = &graph.tensor(parameters[0]);
  if (parameters.size() > 1) tensors.zero_points = &graph.tensor(parameters[1]);
  return tensors;
}

GroupedAxes SplitAxes(const Op& op, const QuantizeTensors& t, int first, int last) {
  const Dims& dims = *t.values->dims;
  const Dims group = QuantizationGroup(op, dims);
  const Dims values = t.values->StridesOrDense(), codes = t.codes->StridesOrDense();
  const auto group_stride = [&](const LogicalTensor* parameters, int d) {
    return parameters == nullptr ? 0 : GroupStride(op, *parameters, t.values->rank(), d);
  };
  GroupedAxes axes;
  const auto add = [&axes](const GroupedAxis& axis) {
    if (axis.extent != 1) axes.push_back(axis);
  };
  for (int d = first; d < last; ++d) {
    // One position may be all rows'.
    const bool by_row = d == 0 && t.positions != nullptr && t.positions->elements() > 1;
    const int64_t positions = by_row ? t.positions->StridesOrDense()[0] : 0;
    add({.extent = group[d] == 0 ? 1 : dims[d] / group[d],
         .values = values[d] * group[d],
         .codes = codes[d] * group[d],
         .scales = group_stride(t.scales, d),
         .zero_points = group_stride(t.zero_points, d),
         .positions = positions * group[d]});
    add({.extent = group[d],
         .values = values[d],
         .codes = codes[d],
         .positions = positions,
         .in_group = true});
  }
  return axes;
}

void MergeAxes(GroupedAxes& axes) {
  GroupedAxes merged;
  for (const GroupedAxis& axis : axes) {
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

GroupedAxis PositionAxis(const Op& op, const QuantizeTensors& t, const AppendedTokens& tokens) {
  const auto parameter_stride = [&](const LogicalTensor* parameters) {
    if (parameters == nullptr || tokens.one_group) return int64_t{0};
    return GroupStride(op, *parameters, t.values->rank(), tokens.axis);
  };
  return {.codes = t.codes->StridesOrDense()[tokens.axis] * tokens.group,
          .scales = parameter_stride(t.scales),
          .zero_points = parameter_stride(t.zero_points)};
}

AppendPositions::AppendPositions(Op op, const QuantizeTensors& t)
    : op_(std::move(op)),
      tokens_(AppendedTokensOf(op_, *t.values, *t.codes)),
      rows_((*t.values->dims)[0]),
      step_(t.positions->elements() > 1 ? t.positions->StridesOrDense()[0] : 0) {}

absl::Status AppendPositions::Check(const int32_t* positions) const {
  for (int64_t row = 0; row < rows_; ++row) {
    KVANT_RETURN_IF_ERROR(tokens_.Check(op_, row, positions[row * step_]));
  }
  return absl::OkStatus();
}

}  // namespace kvant
