#include "kvant/backends/cuda/store/quantize_plan.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/backends/backend.h"
#include "kvant/backends/cuda/element_type.h"
#include "kvant/backends/cuda/store/quantize_launch.h"
#include "kvant/graph/status.h"
#include "kvant/kernels/cpu/codebook.h"
#include "kvant/kernels/cuda/group_parameters.h"
#include "kvant/kernels/cuda/quantize.h"

namespace kvant::cuda {
namespace {

constexpr int64_t kScratchAlignment = 64;
// Tiles are cut into parts until there are so many blocks per multiprocessor, but not so small
// that a thread has fewer runs than this, nor into more parts than are quickly joined.
constexpr int64_t kBlocksPerMultiprocessor = 4;
constexpr int64_t kRunsPerThread = 4;
constexpr int64_t kMostParts = 128;
constexpr int64_t kMostColumns = 16;  // runs
constexpr int64_t kFewestColumns = 4;

using Axis = StoreAxis;
using Axes = StoreAxes;

GgmlFormat GgmlFormatOf(const StoreSpec& spec) {
  if (!spec.rule.ggml) return kNoGgml;
  if (!spec.rule.codebook.empty()) return kGgmlIq4Nl;
  if (spec.zero_points.present()) return kGgmlQ4_1;
  return spec.codes.type == kS8 ? kGgmlQ8_0 : kGgmlQ4_0;
}

class Planner {
 public:
  // `rotated`: where the values are, if they are rotated before.
  Planner(const StoreSpec& spec, std::optional<size_t> rotated, const DeviceProperties& device,
          QuantizePlan& plan)
      : spec_(spec),
        rotated_(rotated),
        device_(device),
        plan_(plan),
        dequantizes_(spec.dequantizes),
        ggml_(GgmlFormatOf(spec)) {
    if (spec.appends()) {
      unit_ = PositionAxis(spec);
      page_ = PageAxis(spec);
    }
    axes_ = SplitAxes(spec, 0, static_cast<int>(spec.dims.size()));
    Sort(dequantizes_ ? &Axis::values : &Axis::codes, axes_);
    MergeAxes(axes_);
    // No run goes through several rows.
    if (!axes_.empty() && axes_.back().positions != 0) axes_.push_back(OneElement());
    whole_bytes_ = dequantizes_ || HasWholeBytes(axes_, &Axis::codes, spec_.codes);
  }

  absl::Status Plan() && {
    KVANT_RETURN_IF_ERROR(Check());
    if (spec_.rule.computes) return AddComputing();
    if (ElementsOf(axes_) > 0) AddElements();
    return absl::OkStatus();
  }

 private:
  // Rows come first, wherever they are put, then what is outer in an array.
  static void Sort(int64_t Axis::*stride, Axes& axes) {
    const auto key = [stride](const Axis& axis) {
      return std::pair(axis.positions != 0, axis.*stride);
    };
    std::stable_sort(axes.begin(), axes.end(),
                     [key](const Axis& a, const Axis& b) { return key(a) > key(b); });
  }
  // Positions move what is written by multiples of it.
  int64_t Step(int64_t Axis::*stride) const { return std::gcd(unit_.*stride, page_.*stride); }

  static int PerByte(const PortArray& array) {
    return array.present() ? std::max(1, 8 / kvant::BitsOf(array.type)) : 1;
  }
  // Whether lines begin, and are dense, so that no two share a byte.
  bool HasWholeBytes(const Axes& axes, int64_t Axis::*stride, const PortArray& array) const {
    const int per_byte = PerByte(array);
    if (Step(stride) % per_byte != 0) return false;
    if (per_byte == 1 || axes.empty()) return true;
    return axes.back().*stride == 1 &&
           std::all_of(axes.begin(), axes.end() - 1,
                       [=](const Axis& axis) { return axis.*stride % per_byte == 0; });
  }

  absl::Status Check() const {
    KVANT_RETURN_IF_ERROR(CheckSize(axes_));
    if (!whole_bytes_ && !SharesBytesInOrder(axes_, &Axis::codes, PerByte(spec_.codes))) {
      return NotTaken(
          "codes of less than a byte whose groups or rows end within bytes that others write");
    }
    return absl::OkStatus();
  }

  // What all kernels are told.
  QuantizeLaunch Describe(QuantizeKernel kernel) const {
    QuantizeLaunch launch;
    launch.kernel = kernel;
    QuantizeTraits& k = launch.traits;
    k.ggml = ggml_;
    const auto bind = [&](const PortArray& array, size_t offset) -> i32 {
      if (!array.present()) return kNone;
      launch.binding.Add(offset, array);
      return ElementTypeOf(array.type);
    };
    if (rotated_) {
      launch.binding.scratch.push_back({offsetof(QuantizeParams, values), *rotated_});
      k.values = kFloat32;
    } else {
      k.values = bind(spec_.values, offsetof(QuantizeParams, values));
    }
    k.codes = bind(spec_.codes, offsetof(QuantizeParams, codes));
    k.scales = bind(spec_.scales, offsetof(QuantizeParams, scales));
    SetPositions(launch);
    SetCodebook(launch);
    // Last, for MoveZeroPoints.
    k.zero_points = bind(spec_.zero_points, offsetof(QuantizeParams, zero_points));
    if (spec_.zero_points.present()) {
      k.zero_point_kind = IsFloat(spec_.zero_points.type) ? kRealZeroPoints : kCodeZeroPoints;
    }
    k.value_vectors = HasVectors(axes_, &Axis::values, 0);
    k.code_vectors = HasVectors(axes_, &Axis::codes, Step(&Axis::codes));
    return launch;
  }

  void SetPositions(QuantizeLaunch& launch) const {
    if (!spec_.appends()) return;
    const StoreSpec::Position& to = spec_.position;
    launch.traits.positions = ElementTypeOf(to.array.type);
    launch.traits.pages = to.page > 0;
    launch.binding.Add(offsetof(QuantizeParams, positions), to.array);
    launch.params.per_position = DeviceAxis(unit_);
    launch.params.per_page = DeviceAxis(page_);
    launch.params.page_units = static_cast<i32>(std::min(to.page, kMostElements));
    // Positions have 32 bits.
    launch.params.position_unit = static_cast<i32>(std::min(to.group, kMostElements));
    launch.params.last_position =
        static_cast<i32>(std::min(to.capacity - to.tokens, kMostElements));
  }

  void SetCodebook(QuantizeLaunch& launch) const {
    if (spec_.rule.codebook.empty()) return;
    const int bits = kvant::BitsOf(spec_.codes.type);
    const bool ggml = ggml_ != kNoGgml;
    const cpu::Codebook codebook(
        spec_.rule.codebook.data(), bits,
        ggml ? cpu::CodebookTies::kLargerValue : cpu::CodebookTies::kLowerCode);
    launch.traits.codebook_bits = bits;
    launch.params.codebook_largest = codebook.largest;
    launch.params.codebook_reciprocal = 1 / launch.params.codebook_largest;
    launch.shared_bytes = static_cast<size_t>(CodebookBytes(launch.traits, dequantizes_));
    std::vector<float> table;
    if (!dequantizes_) table.assign(codebook.nodes, codebook.nodes + (2 << bits));
    if (dequantizes_ || ggml) {
      table.insert(table.end(), codebook.values, codebook.values + (1 << bits));
    }
    launch.binding.AddConstants(offsetof(QuantizeParams, codebook), table.data(),
                                table.size() * sizeof(float));
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
    SetOuterAxes(axes, launch);
    SetRun(run, launch);
    if (k.shares_bytes) k.whole_runs = false;
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
    if (empty) lines = {Axis{.extent = 0, .in_group = true}};

    QuantizeLaunch launch = Describe(QuantizeKernel::kTiles);
    QuantizeTraits& k = launch.traits;
    k.computes = true;
    k.power_of_two = spec_.rule.power_of_two_scales;
    k.zero_point_codes = k.zero_points;
    k.encodes = whole_bytes_ && !empty;
    k.run_in_group = empty || axes_.empty() || axes_.back().in_group;
    launch.params.scale_floor = spec_.rule.scale_floor;

    const bool in_lanes = k.encodes && k.run_in_group && lines.size() <= 1 &&
                          ElementsOf(lines) <= kRun * kMaxLaneRuns * kWarp;
    if (ggml_ != kNoGgml && !in_lanes) {
      return NotTaken(absl::StrCat("formula ggml where groups are no runs of up to ",
                                   kRun * kMaxLaneRuns * kWarp,
                                   " elements side by side in whole bytes"));
    }
    if (in_lanes) ChooseLanes(ElementsOf(lines), k);
    const int per_byte = PerByte(spec_.zero_points);
    const bool packs_later =
        per_byte > 1 && !(in_lanes && kWarp / k.lanes % per_byte == 0 && AreInWholeBytes(groups));
    const Axes packed = PackingAxes(groups);
    if (packs_later && !SharesBytesInOrder(packed, &Axis::codes, per_byte)) {
      return NotTaken(
          "zero points of less than a byte whose rows end within bytes that others write");
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
    const int64_t whole = kWarp / PerByte(spec_.zero_points);
    if (lanes > whole && DivideUp(runs, whole) <= kMaxLaneRuns) lanes = whole;
    k.lanes = static_cast<i32>(lanes);
    k.lane_runs = static_cast<i32>(DivideUp(runs, lanes));
  }

  // Whether zero points that share a byte are those of neighbouring groups.
  bool AreInWholeBytes(const Axes& groups) const {
    const int per_byte = PerByte(spec_.zero_points);
    if (Step(&Axis::zero_points) % per_byte != 0) return false;
    int64_t stride = 1;
    for (auto axis = groups.rbegin(); axis != groups.rend(); ++axis) {
      const bool continues = axis->zero_points == stride && axis->positions == 0;
      const bool begins = axis->zero_points % per_byte == 0 && stride % per_byte == 0;
      if (!continues && !begins) return false;
      stride *= axis->extent;
    }
    return true;
  }

  // To the scratch, as f32 in the order of groups.
  void MoveZeroPoints(Axes& groups, QuantizeLaunch& launch) {
    launch.traits.zero_points = kFloat32;
    launch.params.per_position.zero_points = launch.params.per_page.zero_points = 0;
    launch.binding.ports.pop_back();
    packed_at_ = plan_.ReserveScratch(ElementsOf(groups) * int64_t{sizeof(float)});
    launch.binding.scratch.push_back({offsetof(QuantizeParams, zero_points), packed_at_});
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
      axes.push_back({.extent = axis.extent,
                      .values = stride,
                      .codes = axis.zero_points,
                      .positions = axis.positions});
    }
    Sort(&Axis::codes, axes);
    return axes;
  }

  // Numbers as they are, to codes: those of the scratch to the op's zero points.
  void AddPacking(const Axes& axes) {
    QuantizeLaunch launch;
    launch.kernel = QuantizeKernel::kElements;
    launch.traits.values = kFloat32;
    launch.traits.codes = ElementTypeOf(spec_.zero_points.type);
    launch.traits.shares_bytes = true;
    launch.binding.Add(offsetof(QuantizeParams, codes), spec_.zero_points);
    launch.binding.scratch.push_back({offsetof(QuantizeParams, values), packed_at_});
    SetPositions(launch);
    launch.params.per_position.codes = unit_.zero_points;
    launch.params.per_page.codes = page_.zero_points;
    SetElements(axes, launch);
    plan_.launches.push_back(std::move(launch));
  }

  void AddRows(const Axes& groups, Axes lines, QuantizeLaunch launch) {
    launch.kernel = QuantizeKernel::kRows;
    QuantizeParams& p = launch.params;
    SetOuterAxes(groups, launch);
    SetRun(TakeRun(lines), launch);
    p.count = static_cast<u32>(ElementsOf(groups));
    SetThreads(int64_t{p.count} * launch.traits.lanes, launch);
    plan_.launches.push_back(std::move(launch));
  }

  void AddTiles(Axes groups, Axes lines, QuantizeLaunch launch) {
    QuantizeTraits& k = launch.traits;
    QuantizeParams& p = launch.params;
    const Axis run = TakeRun(k.run_in_group ? lines : groups);
    SetOuterAxes(groups, launch);
    k.line_axes = SetAxes(lines, p.lines);
    SetRun(run, launch);
    const int64_t runs = p.line_runs, line_count = ElementsOf(lines);
    p.line_count = static_cast<u32>(line_count);
    const int64_t wanted = kBlocksPerMultiprocessor * device_.multiprocessors;
    int64_t tiles = ElementsOf(groups), work = line_count, at_once = 1;
    if (k.run_in_group) {
      work *= runs;
      launch.threads = static_cast<int>(std::clamp(PowerOfTwoFrom(work), kWarp, kMostThreads));
      at_once = launch.threads;
    } else {
      int64_t columns = std::min(PowerOfTwoFrom(runs), kMostColumns);
      while (columns > kFewestColumns && tiles * DivideUp(runs, columns) < wanted) columns /= 2;
      tiles *= DivideUp(runs, columns);
      k.columns = static_cast<i32>(columns);
      const int64_t rows =
          std::max(std::min(PowerOfTwoFrom(work), kMostThreads / columns), kWarp / columns);
      launch.threads = static_cast<int>(columns * rows);
      at_once = rows;
    }
    launch.shared_bytes += static_cast<size_t>(QuantizeTilesSharedBytes(k, launch.threads));
    const int64_t parts = std::clamp<int64_t>(
        std::min(DivideUp(wanted, tiles), work / (at_once * kRunsPerThread)), 1, kMostParts);
    p.part_size = static_cast<u32>(std::max<int64_t>(1, DivideUp(work, parts)));
    p.parts = static_cast<u32>(std::max<int64_t>(1, DivideUp(work, p.part_size)));
    launch.blocks = tiles * p.parts;
    if (p.parts > 1) {
      const int64_t ranges = launch.blocks * (k.run_in_group ? 1 : k.columns * kRun);
      const size_t at = plan_.ReserveScratch(ranges * 2 * int64_t{sizeof(float)});
      launch.binding.scratch.push_back({offsetof(QuantizeParams, ranges), at});
      k.pass = kPartRanges;
      plan_.launches.push_back(launch);
      k.pass = kJoinParts;
    }
    plan_.launches.push_back(std::move(launch));
  }

  const StoreSpec& spec_;
  const std::optional<size_t> rotated_;
  const DeviceProperties& device_;
  QuantizePlan& plan_;
  const bool dequantizes_;
  const GgmlFormat ggml_;
  Axis unit_, page_;  // of positions
  Axes axes_;
  bool whole_bytes_ = true;
  size_t packed_at_ = 0;  // of zero points in the scratch
};

std::string Describe(const QuantizeLaunch& launch) {
  const QuantizeTraits& k = launch.traits;
  const QuantizeParams& p = launch.params;
  switch (launch.kernel) {
    case QuantizeKernel::kRows:
      return absl::StrCat(k.ggml == kNoGgml ? "" : "formula ggml, ", "groups of ", p.run.extent,
                          " elements, each by ", k.lanes, k.lanes == 1 ? " lane" : " lanes");
    case QuantizeKernel::kTiles: {
      if (k.pass == kPartRanges) return absl::StrCat("ranges in ", p.parts, " parts");
      const std::string what = k.encodes ? "" : "parameters of ";
      if (k.run_in_group) return absl::StrCat(what, "groups, each by ", launch.threads, " threads");
      return absl::StrCat(what, "groups in columns, ", k.columns * kRun, " by ", launch.threads,
                          " threads");
    }
    case QuantizeKernel::kElements:
      if (kvant::cuda::BitsOf(k.codes) >= 16) return "convert";
      return k.shares_bytes ? "codes, byte by byte" : "codes with given scales";
    case QuantizeKernel::kDequantize:
      return "dequantize";
    case QuantizeKernel::kRotateRuns:
    case QuantizeKernel::kRotateBlocks:
      return absl::StrCat("Hadamard in blocks of ", k.block);
  }
  return "";
}

}  // namespace

std::string QuantizePlan::ToString() const {
  if (launches.empty()) return "nothing to do";
  const std::string what = launches.back().traits.positions != kNone ? "append, " : "";
  return what + absl::StrJoin(launches, ", then ", [](std::string* out, const QuantizeLaunch& one) {
           out->append(Describe(one));
         });
}

size_t QuantizePlan::ReserveScratch(int64_t bytes) {
  const size_t at = scratch_bytes;
  scratch_bytes += static_cast<size_t>(DivideUp(bytes, kScratchAlignment) * kScratchAlignment);
  return at;
}

absl::StatusOr<QuantizePlan> PlanStore(const StoreSpec& spec, const DeviceProperties& device) {
  const auto on_host = [](const PortArray& array) { return array.on_host; };
  if (on_host(spec.scales) || on_host(spec.zero_points) || on_host(spec.values)) {
    return NotTaken("host scalars where it stores");
  }
  QuantizePlan plan;
  if (spec.only_rotates()) {
    KVANT_RETURN_IF_ERROR(AddRotation(spec, spec.codes, std::nullopt, device, plan));
    return plan;
  }
  std::optional<size_t> rotated;
  if (spec.hadamard > 0) {
    rotated = plan.ReserveScratch(kvant::ElementsOf(spec.dims) * int64_t{sizeof(float)});
    KVANT_RETURN_IF_ERROR(AddRotation(spec, spec.Source(), rotated, device, plan));
  }
  KVANT_RETURN_IF_ERROR(Planner(spec, rotated, device, plan).Plan());
  return plan;
}

}  // namespace kvant::cuda
