#include "kvant/backends/cuda/cuda_backend.h"

#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/backends/cuda/attention_kernel.h"
#include "kvant/backends/cuda/attention_plan.h"
#include "kvant/backends/cuda/constants.h"
#include "kvant/backends/cuda/driver_launcher.h"
#include "kvant/backends/cuda/quantize.h"
#include "kvant/backends/cuda/quantize_kernel.h"
#include "kvant/backends/cuda/quantize_plan.h"
#include "kvant/backends/cuda/simt_launcher.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace cuda {
namespace {

// Vectors are loaded as such, and copied asynchronously, 16 bytes at a time.
constexpr size_t kPointerAlignment = 16;

class LauncherMemory : public DeviceMemory {
 public:
  LauncherMemory(std::shared_ptr<Launcher> launcher, bool asynchronous)
      : launcher_(std::move(launcher)), asynchronous_(asynchronous) {}

  absl::StatusOr<void*> Allocate(size_t bytes) override { return launcher_->Allocate(bytes); }
  void Free(void* memory) override { launcher_->Free(memory); }
  absl::Status CopyFromHost(void* to, const void* from, size_t bytes) override {
    return launcher_->CopyToDevice(to, from, bytes);
  }
  absl::Status CopyToHost(void* to, const void* from, size_t bytes) override {
    return launcher_->CopyToHost(to, from, bytes);
  }
  absl::Status Synchronize(void* stream) override { return launcher_->Synchronize(stream); }
  bool asynchronous() const override { return asynchronous_; }
  std::string WhyUnreachable(const void* pointer) const override {
    return launcher_->WhyNotDevicePointer(pointer);
  }

 private:
  const std::shared_ptr<Launcher> launcher_;
  const bool asynchronous_;
};

class FusedAttention : public Executable {
 public:
  FusedAttention(std::string device, AttentionPlan plan, std::shared_ptr<const Launcher> launcher,
                 std::shared_ptr<const LoadedKernel> kernel,
                 std::shared_ptr<const Constants> constants)
      : device_(std::move(device)),
        plan_(std::move(plan)),
        launcher_(std::move(launcher)),
        kernel_(std::move(kernel)),
        constants_(std::move(constants)) {}

  std::string kernel() const override {
    return absl::StrCat(device_, " online softmax, ", plan_.ToString(), ", ",
                        kernel_->description());
  }
  double rounding() const override { return plan_.rounding(); }
  size_t scratch_bytes(int) const override { return plan_.scratch_bytes; }
  size_t alignment() const override { return kPointerAlignment; }

  absl::Status Run(const ExecutionPlace& place, absl::Span<const void* const> inputs,
                   absl::Span<void* const> outputs, std::byte* scratch) const override {
    if (plan_.blocks == 0) return absl::OkStatus();
    AttentionParams params = plan_.params;
    FillPointers(plan_.binding, inputs, outputs, constants_->data(), &params);
    params.partials = reinterpret_cast<float*>(scratch);
    params.done = reinterpret_cast<u32*>(scratch + plan_.partial_bytes);
    return launcher_->Launch(*kernel_, plan_.blocks, &params, sizeof(params), place.stream);
  }

 private:
  const std::string device_;
  const AttentionPlan plan_;
  const std::shared_ptr<const Launcher> launcher_;
  const std::shared_ptr<const LoadedKernel> kernel_;
  const std::shared_ptr<const Constants> constants_;
};

absl::Status CheckAttention(const Partition& partition) {
  if (partition.attention() != nullptr) return absl::OkStatus();
  std::string why =
      absl::StrCat("neither attention nor an op that quantizes or rotates: ", partition.pattern());
  if (partition.kind() == Partition::Kind::kAttentionBackward) {
    why = "attention backward is not fused";
  } else if (partition.kind() == Partition::Kind::kAttention) {
    why = absl::StrCat("its layout has no strided form: ", absl::StrJoin(partition.notes(), "; "));
  }
  return MakeError(ErrorKind::kUnimplemented, why);
}

class CudaBackend : public Backend {
 public:
  CudaBackend(std::string name, std::shared_ptr<Launcher> launcher, bool asynchronous)
      : name_(std::move(name)),
        launcher_(std::move(launcher)),
        memory_(std::make_shared<LauncherMemory>(launcher_, asynchronous)) {}

  std::string_view name() const override { return name_; }
  bool fused() const override { return true; }
  std::shared_ptr<DeviceMemory> memory() const override { return memory_; }

  absl::StatusOr<std::unique_ptr<Executable>> Compile(const Partition& partition) const override {
    const std::string device = absl::StrCat(name_, "/", launcher_->properties().arch());
    if (IsQuantization(partition)) {
      return CompileQuantization(partition, launcher_, memory_, device);
    }
    KVANT_RETURN_IF_ERROR(CheckAttention(partition));
    return CompileAttention(*partition.attention(), launcher_, memory_, device);
  }

 private:
  const std::string name_;
  const std::shared_ptr<Launcher> launcher_;
  const std::shared_ptr<DeviceMemory> memory_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Executable>> CompileAttention(const AttentionSpec& spec,
                                                             std::shared_ptr<Launcher> launcher,
                                                             std::shared_ptr<DeviceMemory> memory,
                                                             std::string device) {
  KVANT_ASSIGN_OR_RETURN(AttentionPlan plan, PlanAttention(spec, launcher->properties()));
  KVANT_ASSIGN_OR_RETURN(std::shared_ptr<const LoadedKernel> kernel,
                         launcher->Load(MakeAttentionKernel(plan)));
  KVANT_ASSIGN_OR_RETURN(std::shared_ptr<const Constants> constants,
                         Constants::Copy(std::move(memory), plan.binding.constant_bytes));
  return std::make_unique<FusedAttention>(std::move(device), std::move(plan), std::move(launcher),
                                          std::move(kernel), std::move(constants));
}

std::unique_ptr<Backend> MakeBackend(std::string name, std::shared_ptr<Launcher> launcher,
                                     bool asynchronous) {
  return std::make_unique<CudaBackend>(std::move(name), std::move(launcher), asynchronous);
}

absl::StatusOr<std::vector<KernelSpec>> KernelsOf(const Partition& partition,
                                                  const DeviceProperties& device) {
  std::vector<KernelSpec> kernels;
  if (IsQuantization(partition)) {
    KVANT_ASSIGN_OR_RETURN(const QuantizePlan plan, PlanQuantization(partition, device));
    for (const QuantizeLaunch& launch : plan.launches) {
      kernels.push_back(MakeQuantizeKernel(launch));
    }
    return kernels;
  }
  KVANT_RETURN_IF_ERROR(CheckAttention(partition));
  KVANT_ASSIGN_OR_RETURN(const AttentionPlan plan, PlanAttention(*partition.attention(), device));
  kernels.push_back(MakeAttentionKernel(plan));
  return kernels;
}

}  // namespace cuda

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(int device_index) {
  KVANT_ASSIGN_OR_RETURN(std::shared_ptr<cuda::Launcher> launcher,
                         cuda::MakeDriverLauncher(device_index, {}));
  return cuda::MakeBackend("cuda", std::move(launcher), /*asynchronous=*/true);
}

std::unique_ptr<Backend> MakeCudaSimtBackend() {
  return cuda::MakeBackend("cuda_simt", cuda::MakeSimtLauncher(), /*asynchronous=*/false);
}

}  // namespace kvant
