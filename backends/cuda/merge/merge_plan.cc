#include "kvant/backends/cuda/merge/merge_plan.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kvant/backends/backend.h"
#include "kvant/backends/cuda/element_type.h"
#include "kvant/backends/cuda/kernel_traits.h"
#include "kvant/graph/status.h"

namespace kvant::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kMostThreads = std::numeric_limits<int32_t>::max();

constexpr KernelRow kKernel = {
#define KVANT_MERGE_KERNEL(entry, Class) #entry, "merge", #Class, "MergeTraits", "MergeParams"
#include "kvant/backends/cuda/kernels.inc"
};

// Where rows of an array lie, and within them channels.
struct Rows {
  Dims strides;
  int64_t channel = 0;
};

Rows RowsOf(const PortArray& array) {
  return {Dims(array.strides.begin(), array.strides.end() - 1), array.strides.back()};
}

struct Side {
  Rows output, stats;
};

class Planner {
 public:
  explicit Planner(const MergeSpec& spec) : spec_(spec) {}

  absl::StatusOr<MergePlan> Plan() {
    KVANT_RETURN_IF_ERROR(Collect());
    plan_.parts = static_cast<int64_t>(spec_.parts.size());
    const int64_t rows = spec_.rows(), channels = spec_.dims.back();
    // A row without channels has statistics.
    const int64_t threads = std::max<int64_t>(1, (channels + kMergeChannels - 1) / kMergeChannels);
    if (rows == 0 || (channels == 0 && !spec_.stats.present())) return std::move(plan_);
    if (channels > kMostThreads || rows > kMostThreads / threads) {
      return NotTaken(absl::StrCat("outputs of ", rows, " rows of ", channels,
                                   " channels, more than ", kMostThreads, " threads"));
    }
    MergeAxes();
    if (extents_.size() > kMaxMergeAxes) {
      return NotTaken(absl::StrCat("outputs of ", extents_.size() + 1, " axes, more than ",
                                   kMaxMergeAxes + 1, ", with neighbours merged"));
    }
    params_.channels = static_cast<i32>(channels);
    params_.row_threads = static_cast<u32>(threads);
    params_.count = static_cast<u32>(rows * threads);
    std::copy(extents_.begin(), extents_.end(), params_.extents);
    PlanLaunches();
    return std::move(plan_);
  }

 private:
  // The arrays: of parts, of the result, and where there are more than one launch takes, of what
  // launches leave to each other, densely in the scratch.
  absl::Status Collect() {
    for (const MergeSpec::Part& part : spec_.parts) {
      for (const PortArray* array : {&part.output, &part.stats}) {
        if (array->constant) return NotTaken("constants as parts of attention");
        if (array->on_host) return NotTaken("host scalars as parts of attention");
      }
      sides_.push_back({RowsOf(part.output), RowsOf(part.stats)});
    }
    extents_.assign(spec_.dims.begin(), spec_.dims.end() - 1);
    const Rows none{Dims(extents_.size(), 0)};
    sides_.push_back({RowsOf(spec_.output), spec_.stats.present() ? RowsOf(spec_.stats) : none});
    if (spec_.parts.size() <= kMaxMergeParts) return absl::OkStatus();
    Rows outputs{DenseStrides(spec_.dims), 1};
    outputs.strides.pop_back();
    sides_.push_back({std::move(outputs), Rows{DenseStrides(extents_)}});
    return absl::OkStatus();
  }

  template <typename Body>
  void ForEachRows(const Body& body) {
    for (Side& side : sides_) {
      body(side.output);
      body(side.stats);
    }
  }

  // Makes one axis of neighbours where the outer continues the inner in every array. There is one
  // left at least.
  void MergeAxes() {
    const auto erase = [this](size_t axis) {
      extents_.erase(extents_.begin() + static_cast<ptrdiff_t>(axis));
      ForEachRows([axis](Rows& rows) {
        rows.strides.erase(rows.strides.begin() + static_cast<ptrdiff_t>(axis));
      });
    };
    for (size_t a = extents_.size(); a-- > 0;) {
      if (extents_[a] == 1) erase(a);
    }
    for (size_t a = extents_.size(); a-- > 1;) {
      bool continues = true;
      ForEachRows([&](const Rows& rows) {
        continues &= rows.strides[a - 1] == rows.strides[a] * extents_[a];
      });
      if (!continues) continue;
      extents_[a] *= extents_[a - 1];
      erase(a - 1);
    }
    if (!extents_.empty()) return;
    extents_.push_back(1);
    ForEachRows([](Rows& rows) { rows.strides.push_back(0); });
  }

  // Whether a thread's channels are side by side, and aligned wherever an array is.
  bool HasVectors(const Rows& rows) const {
    return rows.channel == 1 && spec_.dims.back() % kMergeChannels == 0 &&
           std::all_of(rows.strides.begin(), rows.strides.end(),
                       [](int64_t stride) { return stride % kMergeChannels == 0; });
  }

  // Says where `part`, which is of the launch, lies, but for its pointers.
  void Place(const Side& side, MergeLaunch& launch, MergePart& part) const {
    std::copy(side.output.strides.begin(), side.output.strides.end(), part.strides);
    std::copy(side.stats.strides.begin(), side.stats.strides.end(), part.stats_strides);
    part.channel = side.output.channel;
    launch.traits.vectors &= HasVectors(side.output);
  }

  void PlaceInPorts(const Side& side, const PortArray& output, const PortArray& stats,
                    MergeLaunch& launch, MergePart& part) const {
    Place(side, launch, part);
    launch.binding.Add(OffsetIn(launch.params, part.output), output);
    if (stats.present()) launch.binding.Add(OffsetIn(launch.params, part.stats), stats);
  }

  // There are two places in the scratch: a launch reads one and writes the other.
  void PlaceInScratch(size_t which, MergeLaunch& launch, MergePart& part) {
    const auto aligned = [](int64_t floats) {
      return (static_cast<size_t>(floats) * sizeof(float) + 255) / 256 * 256;
    };
    const size_t outputs = aligned(spec_.rows() * spec_.dims.back());
    const size_t bytes = outputs + aligned(spec_.rows());
    plan_.scratch_bytes = 2 * bytes;
    Place(sides_.back(), launch, part);
    launch.binding.scratch.push_back({OffsetIn(launch.params, part.output), which * bytes});
    launch.binding.scratch.push_back(
        {OffsetIn(launch.params, part.stats), which * bytes + outputs});
  }

  void PlanLaunches() {
    const size_t parts = spec_.parts.size();
    const i32 type = ElementTypeOf(spec_.parts[0].output.type);
    for (size_t next = 0; next < parts;) {
      const size_t before = plan_.launches.size();
      MergeLaunch& launch = plan_.launches.emplace_back();
      launch.params = params_;
      launch.blocks = (int64_t{params_.count} + kThreads - 1) / kThreads;
      launch.traits = {.first = before == 0 ? type : static_cast<i32>(kFloat32),
                       .others = type,
                       .axes = static_cast<i32>(extents_.size()),
                       .vectors = 1};
      i32& count = launch.params.part_count;
      if (before > 0) PlaceInScratch(before % 2, launch, launch.params.parts[count++]);
      for (; next < parts && count < kMaxMergeParts; ++next, ++count) {
        const MergeSpec::Part& part = spec_.parts[next];
        PlaceInPorts(sides_[next], part.output, part.stats, launch, launch.params.parts[count]);
      }
      if (next == parts) {
        PlaceInPorts(sides_[parts], spec_.output, spec_.stats, launch, launch.params.result);
        launch.traits.result = ElementTypeOf(spec_.output.type);
        launch.traits.stats = spec_.stats.present();
      } else {
        PlaceInScratch((before + 1) % 2, launch, launch.params.result);
        launch.traits.result = kFloat32;
        launch.traits.stats = 1;
      }
    }
  }

  const MergeSpec& spec_;
  std::vector<Side> sides_;
  Dims extents_;  // of the axes of rows
  MergeParams params_{};
  MergePlan plan_;
};

}  // namespace

std::string MergePlan::ToString() const {
  return absl::StrCat(
      "merge of ", parts, " parts",
      launches.size() > 1 ? absl::StrCat(" in ", launches.size(), " launches") : "");
}

absl::StatusOr<MergePlan> PlanMerge(const MergeSpec& spec) { return Planner(spec).Plan(); }

KernelSpec MakeMergeKernel(const MergeLaunch& launch) {
  return MakeKernel(kKernel, {{"Traits", WordsOf(launch.traits)}}, kThreads);
}

}  // namespace kvant::cuda
