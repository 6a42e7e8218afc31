#include "kvant/backends/cpu/quantize_loops.h"

#include <algorithm>
#include <utility>

namespace kvant::cpu {
namespace {

LoopAxis Pop(LoopAxes& axes, LoopAxes::iterator at) {
  const LoopAxis axis = *at;
  axes.erase(at);
  return axis;
}

QuantizeLoops RowLoops(LoopAxes axes, bool dense_source) {
  QuantizeLoops loops;
  loops.layout = QuantizeLayout::kRows;
  loops.group = Pop(axes, axes.end() - 1).extent;
  if (!axes.empty()) {
    const LoopAxis& next = axes.back();
    if (!next.in_group && next.strides.src == loops.group) {
      loops.next = next.strides;
      loops.groups = Pop(axes, axes.end() - 1).extent;
    }
  }
  // Few groups are a part of a batch.
  const bool few = 2 * loops.groups <= QuantizeBatch(loops.group);
  const bool together = loops.groups == 1 || loops.next.codes == loops.group;
  if (!axes.empty() && few && together) {
    const bool dense = axes.back().strides.src == loops.groups * loops.group;
    if (dense || !dense_source) loops.runs = Pop(axes, axes.end() - 1);
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

LoopAxes LoopAxesOf(const StoreSpec& spec, int first, int last) {
  StoreAxes axes = SplitAxes(spec, first, last);
  MergeAxes(axes);
  LoopAxes loops;
  for (const StoreAxis& axis : axes) {
    LoopAxis& loop = loops.emplace_back();
    loop.extent = axis.extent;
    loop.strides = {axis.values, axis.codes, axis.scales, axis.zero_points};
    loop.in_group = axis.in_group;
  }
  return loops;
}

std::string WhyElements(const LoopAxes& axes, const StoreSpec& spec) {
  if (axes.empty()) return "there is one element";
  if (std::any_of(axes.begin(), axes.end(), [](const LoopAxis& axis) { return axis.extent == 0; }))
    return "there are none";
  const LoopAxis& last = axes.back();
  if (last.strides.src != 1) return "elements of the source are not side by side";
  if (last.strides.codes != 1) return "codes are not side by side";
  if (IsFloat(spec.codes.type) && spec.zero_points.present()) {
    return "codes of floating-point type have zero points";
  }
  const auto within =
      std::count_if(axes.begin(), axes.end(), [](const LoopAxis& axis) { return axis.in_group; });
  if (spec.rule.computes && within > 1) return "a group is neither one run nor one column";
  return "";
}

QuantizeLoops LineLoops(LoopAxes axes, bool dense_source) {
  if (axes.back().in_group) return RowLoops(std::move(axes), dense_source);
  return ColumnLoops(std::move(axes));
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
