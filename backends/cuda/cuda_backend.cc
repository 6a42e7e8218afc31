#include "kvant/backends/cuda/cuda_backend.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cuda/attention/attention_kernel.h"
#include "kvant/backends/cuda/attention/attention_parts.h"
#include "kvant/backends/cuda/attention/attention_plan.h"
#include "kvant/backends/cuda/cache/cache_kernels.h"
#include "kvant/backends/cuda/constants.h"
#include "kvant/backends/cuda/merge/merge_plan.h"
#include "kvant/backends/cuda/runtime/driver_launcher.h"
#include "kvant/backends/cuda/store/quantize_plan.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace cuda {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// A band that hides columns if the host scalar that it writes is -inf, as masks have it.
bool MayHide(const ScoreStep& step) {
  return step.kind == ScoreStep::Kind::kBand && !step.inverted && step.operand.view.on_host;
}

// The ports of those host scalars. Where all are -inf, kernels skip what is hidden, which is not
// known when they are made.
std::vector<View> HostFills(const AttentionSpec& spec) {
  std::vector<View> fills;
  for (const ScoreStep& step : spec.steps) {
    if (MayHide(step)) fills.push_back(step.operand.view);
  }
  return fills;
}

AttentionSpec WithNegInfFills(AttentionSpec spec) {
  for (ScoreStep& step : spec.steps) {
    if (MayHide(step)) step.operand = {Constant(kNegInf), View()};
  }
  return spec;
}

struct PlannedKernel {
  KernelSpec spec;
  AttentionLaunch launch;
  double rounding = 0;
  std::string text;
};

// One kernel, or where there are host fills, first one for -inf and then one for the rest.
absl::StatusOr<std::vector<PlannedKernel>> PlanKernels(const AttentionSpec& spec,
                                                       const DeviceProperties& device) {
  std::string why_not_parts;
  if (const std::optional<PartsPlan> parts = PlanParts(spec, device, why_not_parts)) {
    return std::vector<PlannedKernel>{
        {MakePartsKernel(*parts), *parts, parts->rounding(), parts->ToString()}};
  }
  std::vector<PlannedKernel> kernels;
  const auto add = [&](const AttentionSpec& of) -> absl::Status {
    KVANT_ASSIGN_OR_RETURN(AttentionPlan plan, PlanAttention(of, device));
    if (!why_not_parts.empty()) {
      absl::StrAppend(&plan.why_not_codes, "; not in parts: ", why_not_parts);
    }
    kernels.push_back({MakeAttentionKernel(plan), plan, plan.rounding(), plan.ToString()});
    return absl::OkStatus();
  };
  if (!HostFills(spec).empty()) KVANT_RETURN_IF_ERROR(add(WithNegInfFills(spec)));
  KVANT_RETURN_IF_ERROR(add(spec));
  return kernels;
}

class FusedAttention : public Executable {
 public:
  struct Kernel {
    PlannedKernel planned;
    std::shared_ptr<const LoadedKernel> loaded;
    std::shared_ptr<const Constants> constants;
  };
  // As PlanKernels; with fills, two kernels.
  FusedAttention(std::string device, std::vector<View> fills, std::vector<Kernel> kernels,
                 std::shared_ptr<const Launcher> launcher)
      : device_(std::move(device)),
        fills_(std::move(fills)),
        kernels_(std::move(kernels)),
        launcher_(std::move(launcher)) {
    for (const Kernel& one : kernels_) {
      const AttentionLaunch& launch = one.planned.launch;
      partial_bytes_ = std::max(partial_bytes_, launch.partial_bytes);
      count_bytes_ = std::max(count_bytes_, launch.scratch_bytes - launch.partial_bytes);
    }
  }

  std::string kernel() const override {
    const Kernel& first = kernels_.front();
    return absl::StrCat(
        device_, " online softmax, ", first.planned.text, ", ", first.loaded->description(),
        kernels_.size() == 1 ? "" : ", and another kernel where masks do not write -inf");
  }
  double rounding() const override {
    return std::max(kernels_.front().planned.rounding, kernels_.back().planned.rounding);
  }
  size_t scratch_bytes(int) const override { return partial_bytes_ + count_bytes_; }
  size_t alignment() const override { return kPointerAlignment; }

  absl::Status Run(const ExecutionPlace& place, absl::Span<const void* const> inputs,
                   absl::Span<void* const> outputs, std::byte* scratch) const override {
    const bool hides = std::all_of(fills_.begin(), fills_.end(), [&](const View& fill) {
      return LoadElement(fill.type, inputs[fill.port], 0) == kNegInf;
    });
    const auto& [planned, kernel, constants] = hides ? kernels_.front() : kernels_.back();
    const AttentionLaunch& launch = planned.launch;
    if (launch.blocks == 0) return absl::OkStatus();
    AttentionParams params = launch.params;
    FillParams(launch.binding, inputs, outputs, constants->data(), scratch, &params);
    params.partials = reinterpret_cast<float*>(scratch);
    // Where every kernel leaves its counts at 0.
    params.done = reinterpret_cast<u32*>(scratch + partial_bytes_);
    return launcher_->Launch(*kernel, launch.blocks, &params, sizeof(params), place.stream);
  }

 private:
  const std::string device_;
  const std::vector<View> fills_;
  const std::vector<Kernel> kernels_;
  const std::shared_ptr<const Launcher> launcher_;
  size_t partial_bytes_ = 0, count_bytes_ = 0;
};

// A plan's launches, one after another.
template <typename Launch>
class Launches : public Executable {
 public:
  struct One {
    Launch launch;
    std::shared_ptr<const LoadedKernel> kernel;
    std::shared_ptr<const Constants> constants;
  };
  Launches(std::string kernel, size_t scratch_bytes, std::vector<One> all,
           std::shared_ptr<const Launcher> launcher)
      : kernel_(std::move(kernel)),
        scratch_bytes_(scratch_bytes),
        all_(std::move(all)),
        launcher_(std::move(launcher)) {}

  std::string kernel() const override { return kernel_; }
  size_t scratch_bytes(int) const override { return scratch_bytes_; }

  absl::Status Run(const ExecutionPlace& place, absl::Span<const void* const> inputs,
                   absl::Span<void* const> outputs, std::byte* scratch) const override {
    for (const auto& [launch, kernel, constants] : all_) {
      auto params = launch.params;
      FillParams(launch.binding, inputs, outputs, constants->data(), scratch, &params);
      KVANT_RETURN_IF_ERROR(
          launcher_->Launch(*kernel, launch.blocks, &params, sizeof(params), place.stream));
    }
    return absl::OkStatus();
  }

 private:
  const std::string kernel_;
  const size_t scratch_bytes_;
  const std::vector<One> all_;
  const std::shared_ptr<const Launcher> launcher_;
};

// `described`: of so many of the last kernels Executable::kernel tells.
template <typename Plan, typename Launch>
absl::StatusOr<std::unique_ptr<Executable>> Load(const Plan& plan,
                                                 KernelSpec (*spec_of)(const Launch&),
                                                 size_t described, const std::string& device,
                                                 std::shared_ptr<Launcher> launcher) {
  std::string text = absl::StrCat(device, " ", plan.ToString());
  std::vector<typename Launches<Launch>::One> all;
  for (const Launch& launch : plan.launches) {
    auto& one = all.emplace_back();
    one.launch = launch;
    KVANT_ASSIGN_OR_RETURN(one.kernel, launcher->Load(spec_of(launch)));
    KVANT_ASSIGN_OR_RETURN(one.constants,
                           Constants::Copy(launcher->memory(), launch.binding.constant_bytes));
    if (all.size() + described <= plan.launches.size()) continue;
    absl::StrAppend(&text, ", ", one.kernel->description());
  }
  return std::make_unique<Launches<Launch>>(std::move(text), plan.scratch_bytes, std::move(all),
                                            std::move(launcher));
}

class CudaBackend : public Backend {
 public:
  CudaBackend(std::string name, std::shared_ptr<Launcher> launcher)
      : name_(std::move(name)), launcher_(std::move(launcher)) {}

  std::string_view name() const override { return name_; }
  bool fused() const override { return true; }
  std::shared_ptr<DeviceMemory> memory() const override { return launcher_->memory(); }

  absl::StatusOr<std::unique_ptr<CacheKernels>> MakeCacheKernels() const override {
    return LoadCacheKernels(launcher_);
  }

  absl::StatusOr<std::unique_ptr<Executable>> Compile(const Partition& partition) const override {
    const std::string device = absl::StrCat(name_, "/", launcher_->properties().arch());
    if (partition.store() != nullptr) {
      KVANT_ASSIGN_OR_RETURN(const QuantizePlan plan,
                             PlanStore(*partition.store(), launcher_->properties()));
      return Load(plan, &MakeQuantizeKernel, plan.launches.size(), device, launcher_);
    }
    if (partition.merge() != nullptr) {
      KVANT_ASSIGN_OR_RETURN(const MergePlan plan, PlanMerge(*partition.merge()));
      return Load(plan, &MakeMergeKernel, 1, device, launcher_);
    }
    KVANT_RETURN_IF_ERROR(CheckAttention(partition));
    return CompileAttention(*partition.attention(), launcher_, device);
  }

 private:
  const std::string name_;
  const std::shared_ptr<Launcher> launcher_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Executable>> CompileAttention(const AttentionSpec& spec,
                                                             std::shared_ptr<Launcher> launcher,
                                                             std::string device) {
  KVANT_ASSIGN_OR_RETURN(std::vector<PlannedKernel> plans,
                         PlanKernels(spec, launcher->properties()));
  std::vector<FusedAttention::Kernel> kernels;
  for (PlannedKernel& plan : plans) {
    FusedAttention::Kernel& one = kernels.emplace_back();
    KVANT_ASSIGN_OR_RETURN(one.loaded, launcher->Load(plan.spec));
    one.planned = std::move(plan);
    KVANT_ASSIGN_OR_RETURN(
        one.constants,
        Constants::Copy(launcher->memory(), one.planned.launch.binding.constant_bytes));
  }
  return std::make_unique<FusedAttention>(std::move(device), HostFills(spec), std::move(kernels),
                                          std::move(launcher));
}

std::unique_ptr<Backend> MakeBackend(std::string name, std::shared_ptr<Launcher> launcher) {
  return std::make_unique<CudaBackend>(std::move(name), std::move(launcher));
}

absl::StatusOr<std::vector<KernelSpec>> KernelsOf(const Partition& partition,
                                                  const DeviceProperties& device) {
  std::vector<KernelSpec> kernels;
  if (partition.store() != nullptr) {
    KVANT_ASSIGN_OR_RETURN(const QuantizePlan plan, PlanStore(*partition.store(), device));
    for (const QuantizeLaunch& launch : plan.launches) {
      kernels.push_back(MakeQuantizeKernel(launch));
    }
    return kernels;
  }
  if (partition.merge() != nullptr) {
    KVANT_ASSIGN_OR_RETURN(const MergePlan plan, PlanMerge(*partition.merge()));
    for (const MergeLaunch& launch : plan.launches) kernels.push_back(MakeMergeKernel(launch));
    return kernels;
  }
  KVANT_RETURN_IF_ERROR(CheckAttention(partition));
  KVANT_ASSIGN_OR_RETURN(const std::vector<PlannedKernel> plans,
                         PlanKernels(*partition.attention(), device));
  for (const PlannedKernel& plan : plans) kernels.push_back(plan.spec);
  return kernels;
}

}  // namespace cuda

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(int device_index) {
  KVANT_ASSIGN_OR_RETURN(std::shared_ptr<cuda::Launcher> launcher,
                         cuda::MakeDriverLauncher(device_index, {}));
  return cuda::MakeBackend("cuda", std::move(launcher));
}

}  // namespace kvant
