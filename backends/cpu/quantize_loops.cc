#include "kvant/backends/cpu/quantize_loops.h"

#include <algorithm>
#include <utility>

#include "kvant/graph/op_shapes.h"

namespace kvant::cpu {
namespace {

bool Continues(const LoopAxis& outer, const LoopAxis& inner) {
  const QuantizeStrides &a = outer.strides, &b = inner.strides;
  return outer.in_group == inner.in_group && a.src == inner.extent * b.src &&
         a.codes == inner.extent * b.codes && a.scales == inner.extent * b.scales &&
         a.zero_points == inner.extent * b.zero_points;
}

void AddAxis(const LoopAxis& axis, LoopAxes& axes) {
  if (axis.extent == 1) return;
  if (!axes.empty() && Continues(axes.back(), axis)) {
    const int64_t extent = axes.back().extent * axis.extent;
    axes.back() = axis;
    axes.back().extent = extent;
  } else {
    axes.push_back(axis);
  }
}

LoopAxis Pop(LoopAxes& axes, LoopAxes::iterator at) {
  const LoopAxis axis = *at;
  axes.erase(at);
  return axis;
}

QuantizeLoops RowLoops(LoopAxes axes) {
  QuantizeLoops loops;
  loops.layout = QuantizeLayout::kRows;
  loops.group = Pop(axes, axes.end() - 1).extent;
  if (!axes.empty()) {
    const LoopAxis& next = axes.back();
    if (!next.in_group && next.strides.src == loops.group && next.strides.codes == loops.group) {
      loops.next = next.strides;
      loops.groups = Pop(axes, axes.end() - 1).extent;
    }
  }
  loops.outer = std::move(axes);
  return loops;
}

QuantizeLoops ColumnLoops(LoopAxes axes) {
  QuantizeLoops loops;
  loops.layout = QuantizeLayout::kColumns;
  const LoopAxis last = Pop(axes, axes.end() - 1);
  loops.groups = last.extent;
  loops.next = last.strides;
  // Given parameters repeat along all axes within groups; the last of them are the lines.
  const auto lines =
      std::find_if(axes.rbegin(), axes.rend(), [](const LoopAxis& axis) { return axis.in_group; });
  if (lines != axes.rend()) loops.lines = Pop(axes, std::prev(lines.base()));
  loops.outer = std::move(axes);
  return loops;
}

}  // namespace

QuantizeTensors QuantizeTensorsOf(const Graph& graph, const Op& op) {
  const size_t first = op.kind == OpKind::kAppend ? 2 : 1;
  QuantizeTensors tensors;
  tensors.src = &graph.tensor(op.inputs[0]);
  tensors.codes = &graph.tensor(op.outputs[0]);
  tensors.computes = op.outputs.size() > 1;
  const auto parameters = tensors.computes ? absl::MakeConstSpan(op.outputs).subspan(1)
                                           : absl::MakeConstSpan(op.inputs).subspan(first);
  if (!parameters.empty()) tensors.scales = &graph.tensor(parameters[0]);
  if (parameters.size() > 1) tensors.zero_points = &graph.tensor(parameters[1]);
  return tensors;
}

LoopAxes SplitAxes(const Op& op, const QuantizeTensors& t, int first, int last) {
  const Dims& dims = *t.src->dims;
  const Dims group = QuantizationGroup(op, dims);
  const Dims src = t.src->StridesOrDense(), codes = t.codes->StridesOrDense();
  const auto group_stride = [&](const LogicalTensor* parameters, int d) {
    return parameters == nullptr ? 0 : GroupStride(op, *parameters, t.src->rank(), d);
  };
  LoopAxes axes;
  for (int d = first; d < last; ++d) {
    LoopAxis groups, within;
    groups.extent = group[d] == 0 ? 1 : dims[d] / group[d];
    groups.strides = {src[d] * group[d], codes[d] * group[d], group_stride(t.scales, d),
                      group_stride(t.zero_points, d)};
    within.extent = group[d];
    within.strides = {src[d], codes[d], 0, 0};
    within.in_group = true;
    AddAxis(groups, axes);
    AddAxis(within, axes);
  }
  return axes;
}

bool QuantizeLoops::WholeBytes(int bits) const {
  const auto whole = [bits](int64_t elements) { return elements * bits % 8 == 0; };
  if (layout == QuantizeLayout::kRows && groups > 1 && group > kQuantizeRowGroup && !whole(group)) {
    return false;
  }
  if (layout == QuantizeLayout::kColumns && !whole(lines.strides.codes)) return false;
  return std::all_of(outer.begin(), outer.end(),
                     [&](const LoopAxis& axis) { return whole(axis.strides.codes); });
}

std::string WhyElements(const LoopAxes& axes, const QuantizeTensors& t) {
  if (axes.empty()) return "there is one element";
  if (std::any_of(axes.begin(), axes.end(), [](const LoopAxis& axis) { return axis.extent == 0; }))
    return "there are none";
  const LoopAxis& last = axes.back();
  if (last.strides.src != 1) return "elements of the source are not side by side";
  if (last.strides.codes != 1) return "codes are not side by side";
  if (IsFloat(t.codes->type) && t.zero_points != nullptr) {
    return "codes of floating-point type have zero points";
  }
  const auto within =
      std::count_if(axes.begin(), axes.end(), [](const LoopAxis& axis) { return axis.in_group; });
  if (t.computes && within > 1) return "a group is neither one run nor one column";
  return "";
}

QuantizeLoops LineLoops(LoopAxes axes) {
  return axes.back().in_group ? RowLoops(std::move(axes)) : ColumnLoops(std::move(axes));
}

QuantizeLoops ElementLoops(const LoopAxes& axes) {
  QuantizeLoops loops;
  for (const LoopAxis& axis : axes) (axis.in_group ? loops.inner : loops.outer).push_back(axis);
  return loops;
}

QuantizeLoops ConversionLoops(LoopAxes axes) {
  QuantizeLoops loops;
  loops.layout = QuantizeLayout::kRows;
  // Where there are no elements, the outer axes say so.
  if (!axes.empty() && axes.back().extent > 0) {
    const LoopAxis last = Pop(axes, axes.end() - 1);
    if (last.strides.src == 1 && last.strides.codes == 1) {
      loops.group = last.extent;
    } else {
      loops.groups = last.extent;
      loops.next = last.strides;
    }
  }
  loops.outer = std::move(axes);
  return loops;
}

}  // namespace kvant::cpu
