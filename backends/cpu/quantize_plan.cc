#include "kvant/backends/cpu/quantize_plan.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cpu/quantize_loops.h"
#include "kvant/graph/op_shapes.h"
#include "kvant/graph/status.h"
#include "kvant/kernels/cpu/attention_args.h"

namespace kvant::cpu {
namespace {

// A unit is worth some microseconds; there are so many that threads end together.
constexpr int64_t kUnitElements = 64 * 1024;
constexpr int64_t kEnoughUnits = 64;
constexpr int64_t kNarrowChunk = 64;  // columns of a chunk, where lines are many

class QuantizePlan {
 public:
  QuantizePlan(const Op& op, const QuantizeTensors& t) {
    p_.computes = t.computes;
    p_.converts = t.scales == nullptr;
    p_.src_type = t.values->type;
    p_.code_type = t.codes->type;
    p_.zero_point_type = t.zero_points ? t.zero_points->type : kUndef;
    if (!p_.converts) {
      const bool ggml = op.attrs.Find(Attr::kFormula) != nullptr;
      if (const auto* values = op.attrs.Get<std::vector<float>>(Attr::kCodebook)) {
        codebook_.emplace(values->data(), BitsOf(p_.code_type),
                          ggml ? CodebookTies::kLargerValue : CodebookTies::kLowerCode);
      }
      p_.scale_type = t.scales->type;
      p_.rule = MakeParameterRule(p_.code_type, p_.scale_type, p_.zero_point_type,
                                  {.power_of_two = op.attrs.GetOr(Attr::kPowerOfTwoScales, false),
                                   .floor = op.attrs.GetOr(Attr::kScaleFloor, 0.f),
                                   .codebook = codebook_ ? &*codebook_ : nullptr,
                                   .ggml = ggml});
    }
    // Rows of an Append have places of their own, so they are walked one by one.
    const int first = op.kind == OpKind::kAppend ? 1 : 0;
    if (op.kind == OpKind::kAppend) PlaceRows(op, t);
    Take(ChooseLoops(LoopAxesOf(op, t, first, t.values->rank()), t));
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

 private:
  void PlaceRows(const Op& op, const QuantizeTensors& t) {
    const AppendedTokens to = AppendedTokensOf(op, *t.values, *t.codes);
    const GroupedAxis unit = PositionAxis(op, t, to);
    p_.rows = (*t.values->dims)[0];
    p_.position_unit = to.group;
    p_.per_position = {0, unit.codes, unit.scales, unit.zero_points};
    for (const LoopAxis& axis : LoopAxesOf(op, t, 0, 1)) p_.outer[p_.outer_axes++] = axis;
  }

  QuantizeLoops ChooseLoops(const LoopAxes& axes, const QuantizeTensors& t) {
    if (p_.converts) return ConversionLoops(axes);
    reason_ = WhyElements(axes, t);
    if (!reason_.empty()) return ElementLoops(axes);
    // ggml's formulas go through the elements of a batch again.
    return LineLoops(axes, /*dense_source=*/p_.rule.ggml != GgmlFormat::kNone);
  }

  // Whether runs and lines, at any position, begin at whole bytes.
  bool WholeBytes(int bits, int64_t QuantizeStrides::*tensor) const {
    const auto whole = [=](const QuantizeStrides& by) { return by.*tensor * bits % 8 == 0; };
    return whole(p_.per_position) && whole(p_.runs.strides) && whole(p_.lines.strides) &&
           std::all_of(p_.outer, p_.outer + p_.outer_axes,
                       [=](const QuantizeAxis& axis) { return whole(axis.strides); });
  }

  void Take(const QuantizeLoops& loops) {
    p_.layout = loops.layout;
    for (const LoopAxis& axis : loops.outer) p_.outer[p_.outer_axes++] = axis;
    for (const LoopAxis& axis : loops.inner) p_.inner[p_.inner_axes++] = axis;
    for (int a = 0; a < p_.outer_axes; ++a) p_.outer_count *= p_.outer[a].extent;
    p_.groups = loops.groups;
    p_.group = loops.group;
    p_.runs = loops.runs;
    p_.lines = loops.lines;
    p_.next = loops.next;
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
        const int64_t run = p_.group * p_.groups;
        p_.chunk = p_.runs.extent > 1 ? std::max<int64_t>(1, kUnitElements / run) * p_.groups
                                      : std::max<int64_t>(4, kUnitElements / p_.group / 4 * 4);
        p_.outer_run = std::max<int64_t>(1, kUnitElements / (run * p_.runs.extent));
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

  std::optional<Codebook> codebook_;
  QuantizeProblem p_;
  std::string reason_;
  bool serial_ = false;
};

class Quantize : public Executable {
 public:
  Quantize(const Partition& partition, const KernelSet& kernels)
      : kernels_(kernels),
        op_(partition.ops().ops()[0]),
        plan_(op_, QuantizeTensorsOf(partition.ops(), op_)) {
    const Graph& graph = partition.ops();
    const QuantizeTensors t = QuantizeTensorsOf(graph, op_);
    src_ = partition.InputPort(t.values->id);
    codes_ = partition.OutputPort(t.codes->id);
    const auto port_of = [&](const LogicalTensor* parameters) {
      if (parameters == nullptr) return kNoPort;
      return t.computes ? partition.OutputPort(parameters->id)
                        : partition.InputPort(parameters->id);
    };
    scales_ = port_of(t.scales);
    zero_points_ = port_of(t.zero_points);
    if (t.positions == nullptr) return;
    position_port_ = partition.InputPort(t.positions->id);
    positions_.emplace(op_, t);
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
    const auto parameters = [&](int port) -> void* {
      if (port == kNoPort) return nullptr;
      return call.problem->computes ? outputs[port] : const_cast<void*>(inputs[port]);
    };
    call.scales = parameters(scales_);
    call.zero_points = parameters(zero_points_);
    call.ranges = reinterpret_cast<float*>(scratch);
    if (positions_) {
      call.positions = static_cast<const int32_t*>(inputs[position_port_]);
      call.position_step = positions_->step();
      KVANT_RETURN_IF_ERROR(positions_->Check(call.positions));
    }
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
  const Op op_;
  const QuantizePlan plan_;
  int src_ = 0, codes_ = 0, scales_ = kNoPort, zero_points_ = kNoPort, position_port_ = kNoPort;
  std::optional<AppendPositions> positions_;
};

}  // namespace

bool IsQuantize(const Partition& partition) {
  if (partition.ops().ops().size() != 1) return false;
  const OpKind kind = partition.ops().ops()[0].kind;
  return kind == OpKind::kDynamicQuantize || kind == OpKind::kAppend;
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
