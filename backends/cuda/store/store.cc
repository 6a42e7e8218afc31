#include "kvant/backends/cuda/store/store.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cuda/constants.h"
#include "kvant/backends/cuda/store/quantize_kernel.h"
#include "kvant/backends/cuda/store/quantize_plan.h"
#include "kvant/graph/status.h"

namespace kvant::cuda {
namespace {

class Store : public Executable {
 public:
  Store(std::string device, QuantizePlan plan, std::shared_ptr<const Launcher> launcher,
        std::vector<std::shared_ptr<const LoadedKernel>> kernels,
        std::shared_ptr<const Constants> constants)
      : device_(std::move(device)),
        plan_(std::move(plan)),
        launcher_(std::move(launcher)),
        kernels_(std::move(kernels)),
        constants_(std::move(constants)) {}

  std::string kernel() const override {
    std::string text = absl::StrCat(device_, " ", plan_.ToString());
    for (const auto& kernel : kernels_) absl::StrAppend(&text, ", ", kernel->description());
    return text;
  }
  size_t scratch_bytes(int) const override { return plan_.scratch_bytes; }

  absl::Status Run(const ExecutionPlace& place, absl::Span<const void* const> inputs,
                   absl::Span<void* const> outputs, std::byte* scratch) const override {
    for (size_t i = 0; i < kernels_.size(); ++i) {
      const QuantizeLaunch& launch = plan_.launches[i];
      QuantizeParams params = launch.params;
      FillParams(launch.binding, inputs, outputs, constants_->data(), &params);
      for (const ScratchPointer& pointer : launch.scratch) {
        SetPointer(&params, pointer.offset, scratch + pointer.at);
      }
      KVANT_RETURN_IF_ERROR(
          launcher_->Launch(*kernels_[i], launch.blocks, &params, sizeof(params), place.stream));
    }
    return absl::OkStatus();
  }

 private:
  const std::string device_;
  const QuantizePlan plan_;
  const std::shared_ptr<const Launcher> launcher_;
  const std::vector<std::shared_ptr<const LoadedKernel>> kernels_;
  const std::shared_ptr<const Constants> constants_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Executable>> CompileStore(const StoreSpec& spec,
                                                         std::shared_ptr<Launcher> launcher,
                                                         std::string device) {
  KVANT_ASSIGN_OR_RETURN(QuantizePlan plan, PlanStore(spec, launcher->properties()));
  std::vector<std::shared_ptr<const LoadedKernel>> kernels;
  for (const QuantizeLaunch& launch : plan.launches) {
    KVANT_ASSIGN_OR_RETURN(kernels.emplace_back(), launcher->Load(MakeQuantizeKernel(launch)));
  }
  KVANT_ASSIGN_OR_RETURN(std::shared_ptr<const Constants> constants,
                         Constants::Copy(launcher->memory(), plan.constant_bytes));
  return std::make_unique<Store>(std::move(device), std::move(plan), std::move(launcher),
                                 std::move(kernels), std::move(constants));
}

}  // namespace kvant::cuda
