#include "kvant/backends/cuda/quantize_plan.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "kvant/backends/cuda/element_type.h"
#include "kvant/graph/op_shapes.h"
#include "kvant/graph/status.h"
#include "kvant/kernels/cuda/group_parameters.h"
#include "kvant/kernels/cuda/quantize.h"

namespace kvant::cuda {
namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
constexpr int64_t kWarp = 32;
constexpr int64_t kThreads = 256;
// Tiles are cut into parts until there are so many blocks per multiprocessor, but not so small
// that a thread has fewer runs than this, nor into more parts than are quickly joined.
constexpr int64_t kBlocksPerMultiprocessor = 4;
constexpr int64_t kRunsPerThread = 4;
constexpr int64_t kMostParts = 128;
constexpr int64_t kMostColumns = 16;  // runs
constexpr int64_t kFewestColumns = 4;

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t PowerOfTwoFrom(int64_t x) {
  int64_t power = 1;
  while (power < x) power *= 2;
  return power;
}

// A tensor of the op, and which port it is.
struct Operand {
  const LogicalTensor* tensor = nullptr;  // null: there is none
  PortPointer port;
};

Operand OperandOf(const Partition& partition, TensorId id, size_t offset, bool output) {
  const auto& ports = output ? partition.outputs() : partition.inputs();
  const auto at = std::find(ports.begin(), ports.end(), id);
  return {&partition.ops().tensor(id), {offset, static_cast<int>(at - ports.begin()), output}};
}

struct Operands {
  Operand values, codes, scales, zero_points;

  static Operands Of(const Partition& partition) {
    const Op& op = partition.ops().ops()[0];
    const bool dequantizes = op.kind == OpKind::kDynamicDequantize;
    const bool computes = !dequantizes && op.inputs.size() == 1;
    const auto of = [&](TensorId id, size_t offset, bool output) {
      return OperandOf(partition, id, offset, output);
    };
    const TensorId data = op.inputs[0], result = op.outputs[0];
    const auto parameters =
        computes ? absl::MakeConstSpan(op.outputs) : absl::MakeConstSpan(op.inputs);
    Operands operands;
    operands.values =
        of(dequantizes ? result : data, offsetof(QuantizeParams, values), dequantizes);
    operands.codes = of(dequantizes ? data : result, offsetof(QuantizeParams, codes), !dequantizes);
    operands.scales = of(parameters[1], offsetof(QuantizeParams, scales), computes);
    if (parameters.size() > 2) {
      operands.zero_points = of(parameters[2], offsetof(QuantizeParams, zero_points), computes);
    }
    return operands;
  }
};

struct Axis {
  int64_t extent = 1;
  int64_t values = 0, codes = 0, scales = 0, zero_points = 0;  // strides
  bool in_group = false;
};
using Axes = absl::InlinedVector<Axis, 8>;

bool Continues(const Axis& outer, const Axis& inner) {
  return outer.in_group == inner.in_group && outer.values == inner.extent * inner.values &&
         outer.codes == inner.extent * inner.codes && outer.scales == inner.extent * inner.scales &&
         outer.zero_points == inner.extent * inner.zero_points;
}

// Outer to inner as `order` has them; those of one element are left out, neighbours merged.
Axes SplitAxes(const Op& op, const Operands& t, int64_t Axis::*order) {
  const Dims& dims = *t.values.tensor->dims;
  const int rank = t.values.tensor->rank();
  const Dims group = QuantizationGroup(op, dims);
  const Dims values = t.values.tensor->StridesOrDense(), codes = t.codes.tensor->StridesOrDense();
  const auto stride = [&](const Operand& parameters, int d) {
    return parameters.tensor == nullptr ? 0 : GroupStride(op, *parameters.tensor, rank, d);
  };
  Axes split;
  for (int d = 0; d < rank; ++d) {
    split.push_back({group[d] == 0 ? 1 : dims[d] / group[d], values[d] * group[d],
                     codes[d] * group[d], stride(t.scales, d), stride(t.zero_points, d)});
    split.push_back({group[d], values[d], codes[d], 0, 0, /*in_group=*/true});
  }
  split.erase(
      std::remove_if(split.begin(), split.end(), [](const Axis& axis) { return axis.extent == 1; }),
      split.end());
  std::stable_sort(split.begin(), split.end(),
                   [order](const Axis& a, const Axis& b) { return a.*order > b.*order; });
  Axes axes;
  for (const Axis& axis : split) {
    if (!axes.empty() && Continues(axes.back(), axis)) {
      const int64_t extent = axes.back().extent * axis.extent;
      axes.back() = axis;
      axes.back().extent = extent;
    } else {
      axes.push_back(axis);
    }
  }
  return axes;
}

int64_t ElementsOf(const Axes& axes) {
  int64_t elements = 1;
  for (const Axis& axis : axes) elements *= axis.extent;
  return elements;
}

// Whether each index of an outer axis begins behind all that inner ones reach.
bool IsNested(const Axes& axes, int64_t Axis::*stride) {
  int64_t reach = 0;
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    if ((*axis).*stride <= reach) return false;
    reach += (axis->extent - 1) * (*axis).*stride;
  }
  return true;
}

absl::Status Refusal(absl::string_view why) {
  return MakeError(ErrorKind::kUnimplemented, absl::StrCat("does not take ", why));
}

class Planner {
 public:
  Planner(const Partition& partition, const DeviceProperties& device)
      : op_(partition.ops().ops()[0]),
        device_(device),
        t_(Operands::Of(partition)),
        dequantizes_(op_.kind == OpKind::kDynamicDequantize),
        axes_(SplitAxes(op_, t_, dequantizes_ ? &Axis::values : &Axis::codes)),
        whole_bytes_(dequantizes_ || HasWholeBytes(axes_, &Axis::codes, t_.codes)) {}

  absl::StatusOr<QuantizePlan> Plan() && {
    KVANT_RETURN_IF_ERROR(Check());
    const bool computes = !dequantizes_ && op_.inputs.size() == 1;
    if (computes) {
      KVANT_RETURN_IF_ERROR(AddComputing());
    } else if (ElementsOf(axes_) > 0) {
      AddElements();
    }
    return std::move(plan_);
  }

 private:
  static int PerByte(const Operand& operand) {
    return operand.tensor == nullptr ? 1 : std::max(1, 8 / kvant::BitsOf(operand.tensor->type));
  }
  // Whether lines begin, and are dense, so that no two share a byte.
  static bool HasWholeBytes(const Axes& axes, int64_t Axis::*stride, const Operand& operand) {
    const int per_byte = PerByte(operand);
    if (per_byte == 1 || axes.empty()) return true;
    return axes.back().*stride == 1 &&
           std::all_of(axes.begin(), axes.end() - 1,
                       [=](const Axis& axis) { return axis.*stride % per_byte == 0; });
  }

  absl::Status Check() const {
    if (op_.attrs.Find(Attr::kCodebook) != nullptr) return Refusal("codebooks");
    if (op_.attrs.Find(Attr::kFormula) != nullptr) return Refusal("formula ggml");
    if (ElementsOf(axes_) > kMost) {
      return Refusal(
          absl::StrCat("tensors of ", ElementsOf(axes_), " elements, more than ", kMost));
    }
    if (axes_.size() > kMaxQuantizeAxes) {
      return Refusal(absl::StrCat("tensors of ", axes_.size(), " axes, more than ",
                                  kMaxQuantizeAxes, ", with neighbours merged"));
    }
    if (!whole_bytes_ && !IsNested(axes_, &Axis::codes)) {
      return Refusal("codes of less than a byte whose lines interleave");
    }
    return absl::OkStatus();
  }

  bool HasVectors(int64_t Axis::*stride) const {
    if (axes_.empty() || axes_.back().*stride != 1) return false;
    return std::all_of(axes_.begin(), axes_.end() - 1,
                       [stride](const Axis& axis) { return axis.*stride % kRun == 0; });
  }

  // What all kernels are told.
  QuantizeLaunch Describe(QuantizeKernel kernel) const {
    QuantizeLaunch launch;
    launch.kernel = kernel;
    QuantizeTraits& k = launch.traits;
    const auto bind = [&launch](const Operand& operand) -> i32 {
      if (operand.tensor == nullptr) return kNone;
      launch.binding.ports.push_back(operand.port);
      return ElementTypeOf(operand.tensor->type);
    };
    k.values = bind(t_.values);
    k.codes = bind(t_.codes);
    k.scales = bind(t_.scales);
    k.zero_points = bind(t_.zero_points);
    if (t_.zero_points.tensor != nullptr) {
      k.zero_point_kind = IsFloat(t_.zero_points.tensor->type) ? kRealZeroPoints : kCodeZeroPoints;
    }
    k.value_vectors = HasVectors(&Axis::values);
    k.code_vectors = HasVectors(&Axis::codes);
    return launch;
  }

  static QuantizeAxis DeviceAxis(const Axis& axis) {
    return {
        axis.values, axis.codes, axis.scales, axis.zero_points, static_cast<i32>(axis.extent), 0};
  }
  static i32 SetAxes(const Axes& from, QuantizeAxis* axes) {
    for (size_t i = 0; i < from.size(); ++i) axes[i] = DeviceAxis(from[i]);
    return static_cast<i32>(from.size());
  }
  static void SetRun(const Axis& run, QuantizeLaunch& launch) {
    launch.params.run = DeviceAxis(run);
    launch.params.line_runs = static_cast<u32>(DivideUp(run.extent, kRun));
    launch.traits.whole_runs = run.extent % kRun == 0;
  }
  // Takes the last; where there is none, there is one element.
  static Axis TakeRun(Axes& axes) {
    if (axes.empty()) return {.extent = 1, .values = 1, .codes = 1};
    const Axis run = axes.back();
    axes.pop_back();
    return run;
  }

  static void SetThreads(int64_t wanted, QuantizeLaunch& launch) {
    launch.threads = static_cast<int>(std::clamp(PowerOfTwoFrom(wanted), kWarp, kThreads));
    launch.blocks = DivideUp(wanted, launch.threads);
  }

  // Of DynamicDequantize, or of DynamicQuantize when scales and zero points are there.
  void AddElements() {
    QuantizeLaunch launch =
        Describe(dequantizes_ ? QuantizeKernel::kDequantize : QuantizeKernel::kElements);
    launch.traits.shares_bytes = !whole_bytes_;
    SetElements(axes_, launch);
    plan_.launches.push_back(std::move(launch));
  }

  static void SetElements(Axes axes, QuantizeLaunch& launch) {
    QuantizeTraits& k = launch.traits;
    QuantizeParams& p = launch.params;
    const Axis run = TakeRun(axes);
    k.outer_axes = SetAxes(axes, p.outer);
    SetRun(run, launch);
    k.scales_vary = run.scales != 0;
    k.zero_points_vary = run.zero_points != 0;
    const int64_t lines = ElementsOf(axes);
    p.count = static_cast<u32>(lines * (k.shares_bytes ? run.extent : int64_t{p.line_runs}));
    SetThreads(k.shares_bytes ? DivideUp(p.count, kRun) : p.count, launch);
  }

  // Scales, zero points and codes; or, where different lines of codes share bytes, these later, and
  // so for zero points.
  absl::Status AddComputing() {
    Axes groups, lines;
    for (const Axis& axis : axes_) (axis.in_group ? lines : groups).push_back(axis);
    if (ElementsOf(groups) == 0) return absl::OkStatus();
    const bool empty = ElementsOf(lines) == 0;
    if (empty) lines = {{.extent = 0, .in_group = true}};

    QuantizeLaunch launch = Describe(QuantizeKernel::kTiles);
    QuantizeTraits& k = launch.traits;
    k.computes = true;
    k.power_of_two = op_.attrs.GetOr(Attr::kPowerOfTwoScales, false);
    k.zero_point_codes = k.zero_points;
    k.encodes = whole_bytes_ && !empty;
    k.run_in_group = empty || axes_.empty() || axes_.back().in_group;
    launch.params.scale_floor = op_.attrs.GetOr(Attr::kScaleFloor, 0.f);

    const bool in_lanes = k.encodes && k.run_in_group && lines.size() <= 1 &&
                          ElementsOf(lines) <= kRun * kMaxLaneRuns * kWarp;
    if (in_lanes) ChooseLanes(ElementsOf(lines), k);
    const int per_byte = PerByte(t_.zero_points);
    const bool packs_later =
        per_byte > 1 && !(in_lanes && kWarp / k.lanes % per_byte == 0 && AreDense(groups));
    const Axes packed = PackingAxes(groups);
    if (packs_later && !IsNested(packed, &Axis::codes)) {
      return Refusal("zero points of less than a byte whose lines interleave");
    }
    if (packs_later) MoveZeroPoints(groups, launch);
    const bool encodes = k.encodes;
    if (in_lanes) {
      AddRows(groups, lines, std::move(launch));
    } else {
      AddTiles(std::move(groups), std::move(lines), std::move(launch));
    }
    if (packs_later) AddPacking(packed);
    if (!encodes && !empty) AddElements();
    return absl::OkStatus();
  }

  // A lane has two runs, over which finding the parameters is spread, or more where else a warp's
  // zero points would not be whole bytes.
  void ChooseLanes(int64_t group, QuantizeTraits& k) const {
    const int64_t runs = DivideUp(group, kRun);
    int64_t lanes = std::min(PowerOfTwoFrom(DivideUp(runs, 2)), kWarp);
    const int64_t whole = kWarp / PerByte(t_.zero_points);
    if (lanes > whole && DivideUp(runs, whole) <= kMaxLaneRuns) lanes = whole;
    k.lanes = static_cast<i32>(lanes);
    k.lane_runs = static_cast<i32>(DivideUp(runs, lanes));
  }

  // Whether zero points lie side by side in the order of groups.
  static bool AreDense(const Axes& groups) {
    int64_t stride = 1;
    for (auto axis = groups.rbegin(); axis != groups.rend(); ++axis) {
      if (axis->zero_points != stride) return false;
      stride *= axis->extent;
    }
    return true;
  }

  // To the scratch, as f32 in the order of groups.
  void MoveZeroPoints(Axes& groups, QuantizeLaunch& launch) {
    launch.traits.zero_points = kFloat32;
    launch.binding.ports.pop_back();
    launch.scratch.push_back({offsetof(QuantizeParams, zero_points), 0});
    plan_.scratch_bytes = static_cast<size_t>(ElementsOf(groups)) * sizeof(float);
    int64_t stride = 1;
    for (auto axis = groups.rbegin(); axis != groups.rend(); ++axis) {
      axis->zero_points = stride;
      stride *= axis->extent;
    }
  }

  // From there to the op's zero points.
  static Axes PackingAxes(const Axes& groups) {
    Axes axes;
    int64_t stride = ElementsOf(groups);
    for (const Axis& axis : groups) {
      stride /= axis.extent;
      axes.push_back({.extent = axis.extent, .values = stride, .codes = axis.zero_points});
    }
    std::stable_sort(axes.begin(), axes.end(),
                     [](const Axis& a, const Axis& b) { return a.codes > b.codes; });
    return axes;
  }

  // Numbers as they are, to codes: those of the scratch to the op's zero points.
  void AddPacking(const Axes& axes) {
    QuantizeLaunch launch;
    launch.kernel = QuantizeKernel::kElements;
    launch.traits.values = kFloat32;
    launch.traits.codes = ElementTypeOf(t_.zero_points.tensor->type);
    launch.traits.shares_bytes = true;
    PortPointer port = t_.zero_points.port;
    port.offset = offsetof(QuantizeParams, codes);
    launch.binding.ports.push_back(port);
    launch.scratch.push_back({offsetof(QuantizeParams, values), 0});
    SetElements(axes, launch);
    plan_.launches.push_back(std::move(launch));
  }

  void AddRows(const Axes& groups, Axes lines, QuantizeLaunch launch) {
    launch.kernel = QuantizeKernel::kRows;
    QuantizeParams& p = launch.params;
    launch.traits.outer_axes = SetAxes(groups, p.outer);
    SetRun(TakeRun(lines), launch);
    p.count = static_cast<u32>(ElementsOf(groups));
    SetThreads(int64_t{p.count} * launch.traits.lanes, launch);
    plan_.launches.push_back(std::move(launch));
  }

  void AddTiles(Axes groups, Axes lines, QuantizeLaunch launch) {
    QuantizeTraits& k = launch.traits;
    QuantizeParams& p = launch.params;
    const Axis run = TakeRun(k.run_in_group ? lines : groups);
    k.outer_axes = SetAxes(groups, p.outer);
    k.line_axes = SetAxes(lines, p.lines);
    SetRun(run, launch);
    const int64_t runs = p.line_runs, line_count = ElementsOf(lines);
    p.line_count = static_cast<u32>(line_count);
    const int64_t wanted = kBlocksPerMultiprocessor * device_.multiprocessors;
    int64_t tiles = ElementsOf(groups), work = line_count, at_once = 1;
    if (k.run_in_group) {
      work *= runs;
      launch.threads = static_cast<int>(std::clamp(PowerOfTwoFrom(work), kWarp, kThreads));
      at_once = launch.threads;
    } else {
      int64_t columns = std::min(PowerOfTwoFrom(runs), kMostColumns);
      while (columns > kFewestColumns && tiles * DivideUp(runs, columns) < wanted) columns /= 2;
      tiles *= DivideUp(runs, columns);
      k.columns = static_cast<i32>(columns);
      const int64_t rows =
          std::max(std::min(PowerOfTwoFrom(work), kThreads / columns), kWarp / columns);
      launch.threads = static_cast<int>(columns * rows);
      at_once = rows;
    }
    launch.shared_bytes = static_cast<size_t>(QuantizeTilesSharedBytes(k, launch.threads));
    const int64_t parts = std::clamp<int64_t>(
        std::min(DivideUp(wanted, tiles), work / (at_once * kRunsPerThread)), 1, kMostParts);
    p.part_size = static_cast<u32>(std::max<int64_t>(1, DivideUp(work, parts)));
    p.parts = static_cast<u32>(std::max<int64_t>(1, DivideUp(work, p.part_size)));
    launch.blocks = tiles * p.parts;
    if (p.parts > 1) {
      launch.scratch.push_back({offsetof(QuantizeParams, ranges), plan_.scratch_bytes});
      const int64_t ranges = launch.blocks * (k.run_in_group ? 1 : k.columns * kRun);
      plan_.scratch_bytes += static_cast<size_t>(ranges) * 2 * sizeof(float);
      k.pass = kPartRanges;
      plan_.launches.push_back(launch);
      k.pass = kJoinParts;
    }
    plan_.launches.push_back(std::move(launch));
  }

  const Op& op_;
  const DeviceProperties& device_;
  const Operands t_;
  const bool dequantizes_;
  const Axes axes_;
  const bool whole_bytes_;
  QuantizePlan plan_;
};

std::string Describe(const QuantizeLaunch& launch) {
  const QuantizeTraits& k = launch.traits;
  const QuantizeParams& p = launch.params;
  switch (launch.kernel) {
    case QuantizeKernel::kRows:
      return absl::StrCat("groups of ", p.run.extent, " elements, each by ", k.lanes,
                          k.lanes == 1 ? " lane" : " lanes");
    case QuantizeKernel::kTiles: {
      if (k.pass == kPartRanges) return absl::StrCat("ranges in ", p.parts, " parts");
      const std::string what = k.encodes ? "" : "parameters of ";
      if (k.run_in_group) return absl::StrCat(what, "groups, each by ", launch.threads, " threads");
      return absl::StrCat(what, "groups in columns, ", k.columns * kRun, " by ", launch.threads,
                          " threads");
    }
    case QuantizeKernel::kElements:
      return k.shares_bytes ? "codes, byte by byte" : "codes with given scales";
    case QuantizeKernel::kDequantize:
      return "dequantize";
  }
  return "";
}

}  // namespace

std::string QuantizePlan::ToString() const {
  if (launches.empty()) return "nothing to do";
  return absl::StrJoin(launches, ", then ", [](std::string* out, const QuantizeLaunch& launch) {
    out->append(Describe(launch));
  });
}

bool IsQuantization(const Partition& partition) {
  if (partition.ops().ops().size() != 1) return false;
  const OpKind kind = partition.ops().ops()[0].kind;
  return kind == OpKind::kDynamicQuantize || kind == OpKind::kDynamicDequantize;
}

absl::StatusOr<QuantizePlan> PlanQuantization(const Partition& partition,
                                              const DeviceProperties& device) {
  return Planner(partition, device).Plan();
}

}  // namespace kvant::cuda
