#include "kvant/backends/cpu/quantize_plan.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "kvant/graph/op_shapes.h"
#include "kvant/graph/status.h"
#include "kvant/kernels/cpu/attention_args.h"

namespace kvant::cpu {
namespace {

// A unit is worth some microseconds; there are so many that threads end together.
constexpr int64_t kUnitElements = 64 * 1024;
constexpr int64_t kEnoughUnits = 64;
constexpr int64_t kNarrowChunk = 64;  // columns of a chunk, where lines are many

struct Axis : QuantizeAxis {
  bool in_group = false;
};
using Axes = absl::InlinedVector<Axis, 8>;

// The tensors of the op.
struct Tensors {
  const LogicalTensor* src = nullptr;
  const LogicalTensor* codes = nullptr;
  const LogicalTensor* scales = nullptr;
  const LogicalTensor* zero_points = nullptr;  // null: none
};

Tensors TensorsOf(const Graph& graph, const Op& op) {
  const bool computes = op.inputs.size() == 1;
  const auto parameters =
      computes ? absl::MakeConstSpan(op.outputs) : absl::MakeConstSpan(op.inputs);
  Tensors tensors;
  tensors.src = &graph.tensor(op.inputs[0]);
  tensors.codes = &graph.tensor(op.outputs[0]);
  tensors.scales = &graph.tensor(parameters[1]);
  if (parameters.size() > 2) tensors.zero_points = &graph.tensor(parameters[2]);
  return tensors;
}

bool Continues(const Axis& outer, const Axis& inner) {
  const QuantizeStrides &a = outer.strides, &b = inner.strides;
  return outer.in_group == inner.in_group && a.src == inner.extent * b.src &&
         a.codes == inner.extent * b.codes && a.scales == inner.extent * b.scales &&
         a.zero_points == inner.extent * b.zero_points;
}

// Each dimension is one of groups and one within groups; those of extent 1 are left out, and
// neighbours are merged where one continues the other.
Axes SplitAxes(const Op& op, const Tensors& t) {
  const Dims& dims = *t.src->dims;
  const Dims group = QuantizationGroup(op, dims);
  const Dims src = t.src->StridesOrDense(), codes = t.codes->StridesOrDense();
  const int rank = t.src->rank();
  const auto group_stride = [&](const LogicalTensor* parameters, int d) {
    return parameters == nullptr ? 0 : GroupStride(op, *parameters, rank, d);
  };
  Axes axes;
  const auto add = [&axes](const Axis& axis) {
    if (axis.extent == 1) return;
    if (!axes.empty() && Continues(axes.back(), axis)) {
      const int64_t extent = axes.back().extent * axis.extent;
      axes.back() = axis;
      axes.back().extent = extent;
    } else {
      axes.push_back(axis);
    }
  };
  for (int d = 0; d < rank; ++d) {
    Axis groups, within;
    groups.extent = group[d] == 0 ? 1 : dims[d] / group[d];
    groups.strides = {src[d] * group[d], codes[d] * group[d], group_stride(t.scales, d),
                      group_stride(t.zero_points, d)};
    within.extent = group[d];
    within.strides = {src[d], codes[d], 0, 0};
    within.in_group = true;
    add(groups);
    add(within);
  }
  return axes;
}

class QuantizePlan {
 public:
  QuantizePlan(const Op& op, const Tensors& t) : axes_(SplitAxes(op, t)) {
    p_.computes = op.inputs.size() == 1;
    p_.src_type = t.src->type;
    p_.code_type = t.codes->type;
    p_.scale_type = t.scales->type;
    p_.zero_point_type = t.zero_points ? t.zero_points->type : kUndef;
    const bool ggml = op.attrs.Find(Attr::kFormula) != nullptr;
    if (const auto* values = op.attrs.Get<std::vector<float>>(Attr::kCodebook)) {
      codebook_.emplace(values->data(), BitsOf(p_.code_type),
                        ggml ? CodebookTies::kLargerValue : CodebookTies::kLowerCode);
    }
    p_.rule = MakeParameterRule(p_.code_type, p_.scale_type, p_.zero_point_type,
                                {.power_of_two = op.attrs.GetOr(Attr::kPowerOfTwoScales, false),
                                 .floor = op.attrs.GetOr(Attr::kScaleFloor, 0.f),
                                 .codebook = codebook_ ? &*codebook_ : nullptr,
                                 .ggml = ggml});
    reason_ = WhyElements();
    if (reason_.empty()) {
      axes_.back().in_group ? TakeRows() : TakeColumns();
      if (!WholeBytes()) {
        p_ = Reset(p_);
        axes_ = SplitAxes(op, t);
        reason_ = "codes of different lines share bytes";
      }
    }
    if (reason_.empty()) {
      for (const Axis& axis : axes_) p_.outer[p_.outer_axes++] = axis;
    } else {
      for (const Axis& axis : axes_) {
        QuantizeAxis& to = axis.in_group ? p_.inner[p_.inner_axes++] : p_.outer[p_.outer_axes++];
        to = axis;
      }
    }
    for (int a = 0; a < p_.outer_axes; ++a) p_.outer_count *= p_.outer[a].extent;
    ChooseUnits();
    serial_ = SharesBytes();
  }

  QuantizePlan(const QuantizePlan&) = delete;  // the problem points to the codebook

  const QuantizeProblem& problem() const { return p_; }
  // Why the kernels do not take it; empty if they do.
  std::string WhyUnsupported() const {
    if (p_.rule.ggml == GgmlFormat::kNone || p_.layout == QuantizeLayout::kRows) return "";
    if (p_.outer_count == 0 || p_.groups == 0) return "";
    return absl::StrCat("formula ggml where groups are no runs of elements side by side",
                        reason_.empty() ? "" : ": ", reason_);
  }
  // Units must run one after another: some write to the same bytes.
  bool serial() const { return serial_; }

  std::string ToString() const {
    const std::string what = absl::StrCat(
        p_.computes ? "quantize, ranges and codes in one kernel" : "quantize with given scales",
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

 private:
  static QuantizeProblem Reset(const QuantizeProblem& from) {
    QuantizeProblem p;
    p.src_type = from.src_type;
    p.code_type = from.code_type;
    p.scale_type = from.scale_type;
    p.zero_point_type = from.zero_point_type;
    p.computes = from.computes;
    p.rule = from.rule;
    return p;
  }

  // Why neither rows nor columns will do; empty if one will.
  std::string WhyElements() const {
    if (axes_.empty()) return "there is one element";
    if (std::any_of(axes_.begin(), axes_.end(), [](const Axis& axis) { return axis.extent == 0; }))
      return "there are none";
    const Axis& last = axes_.back();
    if (last.strides.src != 1) return "elements of the source are not side by side";
    if (last.strides.codes != 1) return "codes are not side by side";
    if (IsFloat(p_.code_type) && p_.zero_point_type != kUndef) {
      return "codes of floating-point type have zero points";
    }
    const auto within =
        std::count_if(axes_.begin(), axes_.end(), [](const Axis& axis) { return axis.in_group; });
    if (p_.computes && within > 1) return "a group is neither one run nor one column";
    return "";
  }

  Axis Pop(Axes::iterator at) {
    const Axis axis = *at;
    axes_.erase(at);
    return axis;
  }

  void TakeRows() {
    p_.layout = QuantizeLayout::kRows;
    p_.group = Pop(axes_.end() - 1).extent;
    if (axes_.empty()) return;
    const Axis& next = axes_.back();
    if (next.in_group || next.strides.src != p_.group || next.strides.codes != p_.group) return;
    p_.next = next.strides;
    p_.groups = Pop(axes_.end() - 1).extent;
  }

  void TakeColumns() {
    p_.layout = QuantizeLayout::kColumns;
    const Axis last = Pop(axes_.end() - 1);
    p_.groups = last.extent;
    p_.next = last.strides;
    // Given parameters repeat along all axes within groups; the last of them are the lines.
    const auto lines =
        std::find_if(axes_.rbegin(), axes_.rend(), [](const Axis& axis) { return axis.in_group; });
    if (lines != axes_.rend()) p_.lines = Pop(std::prev(lines.base()));
  }

  bool WholeBytes() const {
    const int bits = BitsOf(p_.code_type);
    const auto whole = [bits](int64_t elements) { return elements * bits % 8 == 0; };
    if (p_.layout == QuantizeLayout::kRows && p_.groups > 1 && p_.group > kQuantizeRowGroup &&
        !whole(p_.group)) {
      return false;
    }
    if (p_.layout == QuantizeLayout::kColumns && !whole(p_.lines.strides.codes)) return false;
    return std::all_of(axes_.begin(), axes_.end(),
                       [&](const Axis& axis) { return whole(axis.strides.codes); });
  }

  void ChooseUnits() {
    const int64_t outer = std::max<int64_t>(1, p_.outer_count);
    switch (p_.layout) {
      case QuantizeLayout::kRows: {
        // ggml's formulas look at the elements of a group again.
        const bool few = outer * p_.groups < kEnoughUnits && p_.rule.ggml == GgmlFormat::kNone;
        if (few && p_.group > kUnitElements) {
          Split(p_.group, kUnitElements);
          p_.chunk = 1;
          return;
        }
        p_.chunk = std::max<int64_t>(4, kUnitElements / p_.group / 4 * 4);
        p_.outer_run = std::max<int64_t>(1, kUnitElements / (p_.group * p_.groups));
        return;
      }
      case QuantizeLayout::kColumns: {
        const int64_t lines = p_.lines.extent;
        p_.chunk = lines * kMaxQuantizeChunk <= kUnitElements ? kMaxQuantizeChunk : kNarrowChunk;
        const int64_t width = std::min(p_.chunk, p_.groups);
        // Lines with given parameters do not depend on each other.
        if (!p_.computes && lines * width > kUnitElements) Split(lines, kUnitElements / width);
        p_.outer_run = std::max<int64_t>(1, kUnitElements / (width * lines));
        return;
      }
      case QuantizeLayout::kElements:
        p_.outer_run = std::max<int64_t>(1, outer / kEnoughUnits);
        return;
    }
  }

  void Split(int64_t elements, int64_t part) {
    p_.part = part;
    p_.parts = CeilDiv(elements, part);
  }

  // Codes or zero points of less than a byte, of units that do not begin at whole bytes.
  bool SharesBytes() const {
    if (p_.layout == QuantizeLayout::kElements && BitsOf(p_.code_type) < 8) return true;
    if (!p_.computes || p_.zero_point_type == kUndef) return false;
    const int bits = BitsOf(p_.zero_point_type);
    if (bits >= 8) return false;
    if (p_.layout == QuantizeLayout::kElements) return true;
    // A unit that has all of a run of zero points, and units that begin at multiples of 4, share
    // nothing if runs begin at whole bytes.
    if (p_.groups > 1 && p_.next.zero_points != 1) return true;
    if (p_.parts > 1 && p_.groups > 1) return true;
    return std::any_of(p_.outer, p_.outer + p_.outer_axes, [bits](const QuantizeAxis& axis) {
      return axis.strides.zero_points * bits % 8 != 0;
    });
  }

  Axes axes_;
  std::optional<Codebook> codebook_;
  QuantizeProblem p_;
  std::string reason_;
  bool serial_ = false;
};

int PortOf(const std::vector<TensorId>& ports, TensorId id) {
  return static_cast<int>(std::find(ports.begin(), ports.end(), id) - ports.begin());
}

class Quantize : public Executable {
 public:
  Quantize(const Partition& partition, const KernelSet& kernels)
      : kernels_(kernels),
        plan_(partition.ops().ops()[0], TensorsOf(partition.ops(), partition.ops().ops()[0])) {
    const Op& op = partition.ops().ops()[0];
    const bool computes = plan_.problem().computes;
    const auto ids = computes ? absl::MakeConstSpan(op.outputs) : absl::MakeConstSpan(op.inputs);
    const auto& ports = computes ? partition.outputs() : partition.inputs();
    src_ = PortOf(partition.inputs(), op.inputs[0]);
    codes_ = PortOf(partition.outputs(), op.outputs[0]);
    scales_ = PortOf(ports, ids[1]);
    if (ids.size() > 2) zero_points_ = PortOf(ports, ids[2]);
  }

  std::string WhyUnsupported() const { return plan_.WhyUnsupported(); }

  std::string kernel() const override {
    return absl::StrCat("cpu/", kernels_.name, " ", plan_.ToString());
  }

  size_t scratch_bytes(int) const override { return RangeFloats(plan_.problem()) * sizeof(float); }

  absl::Status Run(const ExecutionPlace& place, absl::Span<const void* const> inputs,
                   absl::Span<void* const> outputs, std::byte* scratch) const override {
    QuantizeCall call;
    call.problem = &plan_.problem();
    call.kernels = &kernels_;
    call.src = inputs[src_];
    call.codes = outputs[codes_];
    // Given parameters are only read.
    const auto parameters = [&](int port) {
      return call.problem->computes ? outputs[port] : const_cast<void*>(inputs[port]);
    };
    call.scales = parameters(scales_);
    if (zero_points_ != kNoPort) call.zero_points = parameters(zero_points_);
    call.ranges = reinterpret_cast<float*>(scratch);
    const int64_t units = QuantizeUnits(plan_.problem());
    if (HasRangePass(plan_.problem())) {
      ForEach(place.executor, units, [&call](int64_t unit) { FindRanges(call, unit); });
    }
    ForEach(place.executor, units, [&call](int64_t unit) { QuantizeUnit(call, unit); });
    return absl::OkStatus();
  }

 private:
  void ForEach(Executor& executor, int64_t n, absl::FunctionRef<void(int64_t)> body) const {
    if (n > 1 && executor.max_concurrency() > 1 && !plan_.serial()) {
      return executor.ParallelFor(n, [&](int64_t i, int) { body(i); });
    }
    for (int64_t i = 0; i < n; ++i) body(i);
  }

  const KernelSet& kernels_;
  const QuantizePlan plan_;
  int src_ = 0, codes_ = 0, scales_ = 0, zero_points_ = kNoPort;
};

}  // namespace

bool IsQuantize(const Partition& partition) {
  return partition.ops().ops().size() == 1 &&
         partition.ops().ops()[0].kind == OpKind::kDynamicQuantize;
}

absl::StatusOr<std::unique_ptr<Executable>> CompileQuantize(const Partition& partition,
                                                            const KernelSet& kernels) {
  auto quantize = std::make_unique<Quantize>(partition, kernels);
  if (const std::string why = quantize->WhyUnsupported(); !why.empty()) {
    return MakeError(ErrorKind::kUnimplemented, "does not take " + why);
  }
  return quantize;
}

}  // namespace kvant::cpu
