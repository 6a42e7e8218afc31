#include "kvant/backends/cpu/quantize_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvant/kernels/cpu/attention_args.h"

namespace kvant::cpu {
namespace {

// A unit is worth some microseconds; there are so many that threads end together.
constexpr int64_t kUnitElements = 64 * 1024;
constexpr int64_t kEnoughUnits = 64;
constexpr int64_t kNarrowChunk = 64;  // columns of a chunk, where lines are many

QuantizeAxis AxisOf(const StoreAxis& axis) {
  return {axis.extent, {axis.values, axis.codes, axis.scales, axis.zero_points}};
}

// Those of dimensions `first` to `last` - 1, merged.
StoreAxes AxesOf(const StoreSpec& spec, int first, int last) {
  StoreAxes axes = SplitAxes(spec, first, last);
  MergeAxes(axes);
  return axes;
}

QuantizeAxis Pop(StoreAxes& axes, StoreAxes::iterator at) {
  const QuantizeAxis axis = AxisOf(*at);
  axes.erase(at);
  return axis;
}

// Why neither rows nor columns will do; empty if one will.
std::string WhyElements(const StoreAxes& axes, const StoreSpec& spec) {
  if (axes.empty()) return "there is one element";
  if (std::ranges::count(axes, 0, &StoreAxis::extent) > 0) return "there are none";
  if (axes.back().values != 1) return "elements of the source are not side by side";
  if (axes.back().codes != 1) return "codes are not side by side";
  if (IsFloat(spec.codes.type) && spec.zero_points.present()) {
    return "codes of floating-point type have zero points";
  }
  const auto within = std::ranges::count(axes, true, &StoreAxis::in_group);
  if (spec.rule.computes && within > 1) return "a group is neither one run nor one column";
  return "";
}

void TakeRows(StoreAxes& axes, QuantizeProblem& p) {
  p.layout = QuantizeLayout::kRows;
  p.group = Pop(axes, axes.end() - 1).extent;
  if (!axes.empty() && !axes.back().in_group && axes.back().values == p.group) {
    const QuantizeAxis next = Pop(axes, axes.end() - 1);
    p.groups = next.extent;
    p.next = next.strides;
  }
  // Few groups are a part of a batch.
  const bool few = 2 * p.groups <= QuantizeBatch(p.group);
  const bool together = p.groups == 1 || p.next.codes == p.group;
  if (axes.empty() || !few || !together) return;
  // ggml's formulas go through the elements of a batch again: numbers of all runs of one have to be
  // side by side.
  const bool dense = axes.back().values == p.groups * p.group;
  if (dense || p.rule.ggml == GgmlFormat::kNone) p.runs = Pop(axes, axes.end() - 1);
}

void TakeColumns(StoreAxes& axes, QuantizeProblem& p) {
  p.layout = QuantizeLayout::kColumns;
  const QuantizeAxis last = Pop(axes, axes.end() - 1);
  p.groups = last.extent;
  p.next = last.strides;
  // Given parameters repeat along all axes within groups; the last of them are the lines.
  const auto lines =
      std::find_if(axes.rbegin(), axes.rend(), [](const StoreAxis& axis) { return axis.in_group; });
  if (lines != axes.rend()) p.lines = Pop(axes, std::prev(lines.base()));
}

// Any: outer axes and those within groups.
void TakeElements(StoreAxes& axes, QuantizeProblem& p) {
  const auto inner = std::stable_partition(axes.begin(), axes.end(),
                                           [](const StoreAxis& axis) { return !axis.in_group; });
  for (auto axis = inner; axis != axes.end(); ++axis) p.inner[p.inner_axes++] = AxisOf(*axis);
  axes.erase(inner, axes.end());
}

// A conversion. Rows: of side by side numbers where there are any, else of one each.
void TakeNumbers(StoreAxes& axes, QuantizeProblem& p) {
  p.layout = QuantizeLayout::kRows;
  // Where there are no elements, the outer axes say so.
  if (axes.empty() || axes.back().extent == 0) return;
  const QuantizeAxis last = Pop(axes, axes.end() - 1);
  if (last.strides.src == 1 && last.strides.codes == 1) {
    p.group = last.extent;
  } else {
    p.groups = last.extent;
    p.next = last.strides;
  }
}

}  // namespace

QuantizePlan::QuantizePlan(const StoreSpec& spec) {
  p_.computes = spec.rule.computes;
  p_.converts = spec.converts();
  p_.src_type = spec.Source().type;
  p_.code_type = spec.codes.type;
  p_.zero_point_type = spec.zero_points.type;
  if (!p_.converts) {
    if (!spec.rule.codebook.empty()) {
      codebook_.emplace(spec.rule.codebook.data(), BitsOf(p_.code_type),
                        spec.rule.ggml ? CodebookTies::kLargerValue : CodebookTies::kLowerCode);
    }
    p_.scale_type = spec.scales.type;
    p_.rule = MakeParameterRule(p_.code_type, p_.scale_type, p_.zero_point_type,
                                {.power_of_two = spec.rule.power_of_two_scales,
                                 .floor = spec.rule.scale_floor,
                                 .codebook = codebook_ ? &*codebook_ : nullptr,
                                 .ggml = spec.rule.ggml});
  }
  // Rows of an Append have places of their own, so they are walked one by one.
  const int first = spec.appends() ? 1 : 0;
  if (spec.appends()) PlaceRows(spec);
  ChooseLoops(AxesOf(spec, first, static_cast<int>(spec.dims.size())), spec);
  ChooseUnits();
  serial_ = SharesBytes();
}

std::string QuantizePlan::WhyUnsupported() const {
  if (p_.rule.ggml == GgmlFormat::kNone || p_.layout == QuantizeLayout::kRows) return "";
  if (p_.outer_count == 0 || p_.groups == 0) return "";
  return absl::StrCat("formula ggml where groups are no runs of elements side by side",
                      reason_.empty() ? "" : ": ", reason_);
}

std::string QuantizePlan::ToString() const {
  const std::string what =
      absl::StrCat(p_.rows > 0 ? "append, " : "",
                   p_.converts   ? "convert"
                   : p_.computes ? "quantize, ranges and codes in one kernel"
                                 : "quantize with given scales",
                   p_.rule.codebook ? ", codebook" : "",
                   p_.rule.ggml == GgmlFormat::kNone ? "" : ", formula ggml", ": ");
  if (!reason_.empty()) return absl::StrCat(what, "element by element (", reason_, ")");
  const std::string parts =
      p_.parts > 1 ? absl::StrCat(", in ", p_.parts, " parts each") : std::string();
  if (p_.layout == QuantizeLayout::kRows) {
    return absl::StrCat(what, "runs of ", p_.group, " elements", parts);
  }
  return absl::StrCat(what, "columns of ", p_.lines.extent, " elements", parts);
}

void QuantizePlan::PlaceRows(const StoreSpec& spec) {
  const StoreAxis unit = PositionAxis(spec), page = PageAxis(spec);
  p_.rows = spec.dims[0];
  p_.position_unit = spec.position.group;
  if (spec.position.page > 0) p_.page_units = spec.position.page;
  p_.per_position = {0, unit.codes, unit.scales, unit.zero_points};
  p_.per_page = {0, page.codes, page.scales, page.zero_points};
  for (const StoreAxis& axis : AxesOf(spec, 0, 1)) p_.outer[p_.outer_axes++] = AxisOf(axis);
}

// See QuantizeProblem: each layout takes what it has loops for from the axes; the rest are outer
// ones.
void QuantizePlan::ChooseLoops(StoreAxes axes, const StoreSpec& spec) {
  if (p_.converts) {
    TakeNumbers(axes, p_);
  } else if (reason_ = WhyElements(axes, spec); !reason_.empty()) {
    TakeElements(axes, p_);
  } else if (axes.back().in_group) {
    TakeRows(axes, p_);
  } else {
    TakeColumns(axes, p_);
  }
  for (const StoreAxis& axis : axes) p_.outer[p_.outer_axes++] = AxisOf(axis);
  for (int a = 0; a < p_.outer_axes; ++a) p_.outer_count *= p_.outer[a].extent;
}

// Whether runs and lines, at any position, begin at whole bytes.
bool QuantizePlan::WholeBytes(int bits, int64_t QuantizeStrides::*array) const {
  const auto whole = [=](const QuantizeStrides& by) { return by.*array * bits % 8 == 0; };
  return whole(p_.per_position) && whole(p_.per_page) && whole(p_.runs.strides) &&
         whole(p_.lines.strides) &&
         std::all_of(p_.outer, p_.outer + p_.outer_axes,
                     [=](const QuantizeAxis& axis) { return whole(axis.strides); });
}

void QuantizePlan::ChooseUnits() {
  const int64_t outer = std::max<int64_t>(1, p_.outer_count);
  if (p_.layout == QuantizeLayout::kElements) {
    p_.outer_run = std::max<int64_t>(1, outer / kEnoughUnits);
  } else if (p_.layout == QuantizeLayout::kColumns) {
    const int64_t lines = p_.lines.extent;
    p_.chunk = lines * kMaxQuantizeChunk <= kUnitElements ? kMaxQuantizeChunk : kNarrowChunk;
    const int64_t width = std::min(p_.chunk, p_.groups);
    // Lines with given parameters do not depend on each other.
    if (!p_.computes && lines * width > kUnitElements) Split(lines, kUnitElements / width);
    p_.outer_run = std::max<int64_t>(1, kUnitElements / (width * lines));
  } else if (outer * p_.groups < kEnoughUnits && p_.group > kUnitElements &&
             p_.rule.ggml == GgmlFormat::kNone) {
    // But for ggml's formulas, which look at the elements of a group again.
    Split(p_.group, kUnitElements);
    p_.chunk = 1;
  } else {
    const int64_t run = p_.group * p_.groups;
    p_.chunk = p_.runs.extent > 1 ? std::max<int64_t>(1, kUnitElements / run) * p_.groups
                                  : std::max<int64_t>(4, kUnitElements / p_.group / 4 * 4);
    p_.outer_run = std::max<int64_t>(1, kUnitElements / (run * p_.runs.extent));
  }
}

void QuantizePlan::Split(int64_t elements, int64_t part) {
  p_.part = part;
  p_.parts = CeilDiv(elements, part);
}

// Codes or zero points of less than a byte, of units that do not begin at whole bytes.
bool QuantizePlan::SharesBytes() const {
  const int code_bits = BitsOf(p_.code_type);
  if (code_bits < 8) {
    if (p_.layout == QuantizeLayout::kElements) return true;
    if (!WholeBytes(code_bits, &QuantizeStrides::codes)) return true;
    // Units begin at multiples of 4 groups, so at whole bytes where these are side by side; but
    // parts of one group, and what lies between groups that are apart, may begin anywhere.
    if (p_.groups > 1 && p_.next.codes * code_bits % 8 != 0) {
      const bool rows = p_.layout == QuantizeLayout::kRows;
      if (p_.next.codes != (rows ? p_.group : 1) || (rows && p_.parts > 1)) return true;
    }
  }
  if (!p_.computes || p_.zero_point_type == kUndef) return false;
  const int bits = BitsOf(p_.zero_point_type);
  if (bits >= 8) return false;
  if (p_.layout == QuantizeLayout::kElements) return true;
  // A unit that has all of a run of zero points, and units that begin at multiples of 4, share
  // nothing if runs begin at whole bytes.
  if (p_.groups > 1 && p_.next.zero_points != 1) return true;
  if (p_.parts > 1 && p_.groups > 1) return true;
  return !WholeBytes(bits, &QuantizeStrides::zero_points);
}

}  // namespace kvant::cpu
