#include "kvant/backends/cuda/merge/merge.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cuda/merge/merge_plan.h"
#include "kvant/graph/status.h"

namespace kvant::cuda {
namespace {

class Merge : public Executable {
 public:
  Merge(std::string device, MergePlan plan, std::shared_ptr<const Launcher> launcher,
        std::vector<std::shared_ptr<const LoadedKernel>> kernels)
      : device_(std::move(device)),
        plan_(std::move(plan)),
        launcher_(std::move(launcher)),
        kernels_(std::move(kernels)) {}

  std::string kernel() const override {
    std::string text = absl::StrCat(device_, " ", plan_.ToString());
    if (!kernels_.empty()) absl::StrAppend(&text, ", ", kernels_.back()->description());
    return text;
  }
  size_t scratch_bytes(int) const override { return plan_.scratch_bytes; }

  absl::Status Run(const ExecutionPlace& place, absl::Span<const void* const> inputs,
                   absl::Span<void* const> outputs, std::byte* scratch) const override {
    for (size_t i = 0; i < kernels_.size(); ++i) {
      const MergeLaunch& launch = plan_.launches[i];
      MergeParams params = launch.params;
      FillParams(launch.binding, inputs, outputs, nullptr, &params);
      for (const ScratchPointer& pointer : launch.scratch) {
        SetPointer(&params, pointer.offset, scratch + pointer.at);
      }
      KVANT_RETURN_IF_ERROR(
          launcher_->Launch(*kernels_[i], plan_.blocks, &params, sizeof(params), place.stream));
    }
    return absl::OkStatus();
  }

 private:
  const std::string device_;
  const MergePlan plan_;
  const std::shared_ptr<const Launcher> launcher_;
  const std::vector<std::shared_ptr<const LoadedKernel>> kernels_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Executable>> CompileMerge(const MergeSpec& spec,
                                                         std::shared_ptr<Launcher> launcher,
                                                         std::string device) {
  KVANT_ASSIGN_OR_RETURN(MergePlan plan, PlanMerge(spec));
  std::vector<std::shared_ptr<const LoadedKernel>> kernels;
  for (const MergeLaunch& launch : plan.launches) {
    KVANT_ASSIGN_OR_RETURN(kernels.emplace_back(), launcher->Load(MakeMergeKernel(launch)));
  }
  return std::make_unique<Merge>(std::move(device), std::move(plan), std::move(launcher),
                                 std::move(kernels));
}

}  // namespace kvant::cuda
