#include "kvant/backends/cuda/cuda_backend.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cuda/attention/attention_parts.h"
#include "kvant/backends/cuda/attention/attention_plan.h"
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
// known when they are made: so there is a kernel for that, and one for the rest.
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

// What a partition's kernels read beside its ports, on the device.
class Constants {
 public:
  static absl::StatusOr<std::shared_ptr<const Constants>> Copy(
      std::shared_ptr<DeviceMemory> memory, const std::vector<std::byte>& bytes) {
    KVANT_ASSIGN_OR_RETURN(void* data, memory->Allocate(bytes.size()));
    auto constants = std::make_shared<Constants>(memory, static_cast<std::byte*>(data));
    KVANT_RETURN_IF_ERROR(memory->CopyFromHost(data, bytes.data(), bytes.size()));
    return constants;
  }
  Constants(std::shared_ptr<DeviceMemory> memory, std::byte* data)
      : memory_(std::move(memory)), data_(data) {}
  Constants(const Constants&) = delete;
  Constants& operator=(const Constants&) = delete;
  ~Constants() { memory_->Free(data_); }
  const std::byte* data() const { return data_; }

 private:
  const std::shared_ptr<DeviceMemory> memory_;
  std::byte* const data_;
};

// A kernel and how it is launched, whatever it is of.
struct PlannedLaunch {
  KernelSpec kernel;
  KernelBinding binding;
  std::vector<std::byte> params;  // but for what is bound
  int64_t blocks = 0;
  bool described = true;  // by Executable::kernel
  // On the device, once they are there.
  std::shared_ptr<const LoadedKernel> loaded;
  std::shared_ptr<const Constants> constants;
};

template <typename Launch>
PlannedLaunch Planned(KernelSpec kernel, const Launch& launch, bool described) {
  static_assert(sizeof(launch.params) <= kMaxParamBytes);
  const auto* const params = reinterpret_cast<const std::byte*>(&launch.params);
  return {std::move(kernel),
          launch.binding,
          {params, params + sizeof(launch.params)},
          launch.blocks,
          described};
}

// What a partition becomes, but for what is on the device.
struct PartitionPlan {
  std::string text;
  std::vector<PlannedLaunch> launches;  // one after another
  // As Executable's.
  size_t scratch_bytes = 0, alignment = 1;
  bool keeps_scratch = false;
  double rounding = 0;
  // HostFills. Where there are any, one of two launches is made: the first if all are -inf.
  std::vector<View> fills;
};

absl::StatusOr<PartitionPlan> Plan(const AttentionSpec& spec, const DeviceProperties& device) {
  PartitionPlan all;
  all.alignment = kPointerAlignment;
  size_t partial_bytes = 0, count_bytes = 0;
  const auto add = [&](const auto& plan, KernelSpec kernel) {
    const bool first = all.launches.empty();
    if (first) all.text = absl::StrCat("online softmax, ", plan.ToString());
    all.launches.push_back(Planned(std::move(kernel), plan, first));
    const AttentionParams& params = plan.params;
    all.launches.back().binding.scratch = {{OffsetIn(params, params.partials), 0},
                                           {OffsetIn(params, params.done), 0}};
    all.rounding = std::max(all.rounding, plan.rounding());
    partial_bytes = std::max(partial_bytes, plan.partial_bytes);
    count_bytes = std::max(count_bytes, plan.scratch_bytes - plan.partial_bytes);
  };
  std::string why_not_parts;
  const auto add_whole = [&](const AttentionSpec& of) -> absl::Status {
    KVANT_ASSIGN_OR_RETURN(AttentionPlan plan, PlanAttention(of, device));
    if (!why_not_parts.empty()) {
      absl::StrAppend(&plan.why_not_codes, "; not in parts: ", why_not_parts);
    }
    add(plan, MakeAttentionKernel(plan));
    return absl::OkStatus();
  };
  if (const std::optional<PartsPlan> parts = PlanParts(spec, device, why_not_parts)) {
    add(*parts, MakePartsKernel(*parts));
  } else {
    all.fills = HostFills(spec);
    if (!all.fills.empty()) KVANT_RETURN_IF_ERROR(add_whole(WithNegInfFills(spec)));
    KVANT_RETURN_IF_ERROR(add_whole(spec));
  }
  all.scratch_bytes = partial_bytes + count_bytes;
  all.keeps_scratch = count_bytes > 0;
  for (PlannedLaunch& launch : all.launches) {
    // Where every kernel leaves its counts at 0.
    launch.binding.scratch.back().at = partial_bytes;
  }
  return all;
}

// Of a store or merge. described: so many of the last launches are.
template <typename Launch>
PartitionPlan Plan(const auto& from, KernelSpec (*kernel_of)(const Launch&), size_t described) {
  PartitionPlan all;
  all.text = from.ToString();
  all.scratch_bytes = from.scratch_bytes;
  for (const Launch& launch : from.launches) {
    const bool last = all.launches.size() + described >= from.launches.size();
    all.launches.push_back(Planned(kernel_of(launch), launch, last));
  }
  return all;
}

absl::StatusOr<PartitionPlan> Plan(const Partition& partition, const DeviceProperties& device) {
  if (partition.store() != nullptr) {
    KVANT_ASSIGN_OR_RETURN(const QuantizePlan plan, PlanStore(*partition.store(), device));
    return Plan(plan, &MakeQuantizeKernel, plan.launches.size());
  }
  if (partition.merge() != nullptr) {
    KVANT_ASSIGN_OR_RETURN(const MergePlan plan, PlanMerge(*partition.merge()));
    return Plan(plan, &MakeMergeKernel, 1);
  }
  KVANT_RETURN_IF_ERROR(CheckAttention(partition));
  return Plan(*partition.attention(), device);
}

class LoadedPlan : public Executable {
 public:
  LoadedPlan(PartitionPlan plan, std::shared_ptr<const Launcher> launcher)
      : plan_(std::move(plan)), launcher_(std::move(launcher)) {}

  std::string kernel() const override { return plan_.text; }
  double rounding() const override { return plan_.rounding; }
  size_t scratch_bytes(int) const override { return plan_.scratch_bytes; }
  bool keeps_scratch() const override { return plan_.keeps_scratch; }
  size_t alignment() const override { return plan_.alignment; }

  absl::Status Run(const Execution& run) const override {
    size_t first = 0, end = plan_.launches.size();
    if (!plan_.fills.empty()) {
      const bool hides = std::all_of(plan_.fills.begin(), plan_.fills.end(), [&](const View& fill) {
        return LoadElement(fill.type, run.inputs[fill.port], 0) == kNegInf;
      });
      first = hides ? 0 : 1;
      end = first + 1;
    }
    for (size_t i = first; i < end; ++i) {
      const PlannedLaunch& launch = plan_.launches[i];
      if (launch.blocks == 0) continue;
      alignas(std::max_align_t) std::byte params[kMaxParamBytes];
      std::memcpy(params, launch.params.data(), launch.params.size());
      FillParams(launch.binding, run.inputs, run.outputs, launch.constants->data(), run.scratch,
                 params);
      KVANT_RETURN_IF_ERROR(launcher_->Launch(*launch.loaded, launch.blocks, params,
                                              launch.params.size(), run.stream));
    }
    return absl::OkStatus();
  }

 private:
  const PartitionPlan plan_;
  const std::shared_ptr<const Launcher> launcher_;
};

absl::StatusOr<std::unique_ptr<Executable>> Load(PartitionPlan plan, const std::string& device,
                                                 std::shared_ptr<Launcher> launcher) {
  plan.text = absl::StrCat(device, " ", plan.text);
  for (PlannedLaunch& launch : plan.launches) {
    KVANT_ASSIGN_OR_RETURN(launch.loaded, launcher->Load(launch.kernel));
    KVANT_ASSIGN_OR_RETURN(launch.constants,
                           Constants::Copy(launcher->memory(), launch.binding.constant_bytes));
    if (launch.described) absl::StrAppend(&plan.text, ", ", launch.loaded->description());
  }
  if (!plan.fills.empty()) {
    absl::StrAppend(&plan.text, ", and another kernel where masks do not write -inf");
  }
  return std::make_unique<LoadedPlan>(std::move(plan), std::move(launcher));
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
    KVANT_ASSIGN_OR_RETURN(PartitionPlan plan, Plan(partition, launcher_->properties()));
    return Load(std::move(plan), absl::StrCat(name_, "/", launcher_->properties().arch()),
                launcher_);
  }

 private:
  const std::string name_;
  const std::shared_ptr<Launcher> launcher_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Executable>> CompileAttention(const AttentionSpec& spec,
                                                             std::shared_ptr<Launcher> launcher,
                                                             std::string device) {
  KVANT_ASSIGN_OR_RETURN(PartitionPlan plan, Plan(spec, launcher->properties()));
  return Load(std::move(plan), device, std::move(launcher));
}

std::unique_ptr<Backend> MakeBackend(std::string name, std::shared_ptr<Launcher> launcher) {
  return std::make_unique<CudaBackend>(std::move(name), std::move(launcher));
}

absl::StatusOr<std::vector<KernelSpec>> KernelsOf(const Partition& partition,
                                                  const DeviceProperties& device) {
  KVANT_ASSIGN_OR_RETURN(PartitionPlan plan, Plan(partition, device));
  std::vector<KernelSpec> kernels;
  for (PlannedLaunch& launch : plan.launches) kernels.push_back(std::move(launch.kernel));
  return kernels;
}

}  // namespace cuda

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(int device_index) {
  KVANT_ASSIGN_OR_RETURN(std::shared_ptr<cuda::Launcher> launcher,
                         cuda::MakeDriverLauncher(device_index, {}));
  return cuda::MakeBackend("cuda", std::move(launcher));
}

}  // namespace kvant
