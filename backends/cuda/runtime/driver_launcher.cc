#include "kvant/backends/cuda/runtime/driver_launcher.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cuda/runtime/device_context.h"
#include "kvant/graph/status.h"

namespace kvant::cuda {
namespace {

constexpr int kMaxThreads = 1024;

class DriverKernel : public LoadedKernel {
 public:
  DriverKernel(std::shared_ptr<const DeviceContext> context, CUmodule module, CUfunction function,
               const KernelSpec& spec, const Cubin& cubin)
      : context_(std::move(context)),
        module_(module),
        function_(function),
        name_(spec.source.name),
        threads_(spec.threads),
        shared_bytes_(spec.shared_bytes),
        description_(absl::StrCat(name_, " for ", cubin.arch)) {
    if (cubin.stats) {
      absl::StrAppend(&description_, ", ", cubin.stats->registers, " registers");
      if (const int64_t spilled = cubin.stats->spill_store_bytes; spilled > 0) {
        absl::StrAppend(&description_, ", ", spilled, " bytes spilled");
      }
    }
  }
  ~DriverKernel() override { context_->UnloadModule(module_); }
  DriverKernel(const DriverKernel&) = delete;
  DriverKernel& operator=(const DriverKernel&) = delete;

  std::string description() const override { return description_; }

  absl::Status Launch(int64_t blocks, const void* params, size_t param_bytes,
                      CUstream stream) const {
    if (blocks < 1 || blocks > std::numeric_limits<int>::max() || param_bytes > kMaxParamBytes) {
      return InvalidArguments("kernel '", name_, "': a launch of ", blocks, " blocks with ",
                              param_bytes, " bytes of parameters; 1 to ",
                              std::numeric_limits<int>::max(), " blocks and at most ",
                              kMaxParamBytes, " bytes can be");
    }
    const DeviceContext::LaunchShape shape = {static_cast<unsigned>(blocks),
                                              static_cast<unsigned>(threads_),
                                              static_cast<unsigned>(shared_bytes_)};
    absl::Status status = context_->Launch(function_, shape, params, param_bytes, stream);
    if (status.ok()) return status;
    return absl::Status(status.code(), absl::StrCat("kernel '", name_, "', ", blocks, " blocks of ",
                                                    threads_, " threads, ", shared_bytes_,
                                                    " shared bytes each: ", status.message()));
  }

 private:
  std::shared_ptr<const DeviceContext> context_;
  CUmodule module_;
  CUfunction function_;
  std::string name_;
  int threads_;
  size_t shared_bytes_;
  std::string description_;
};

class DriverLauncher : public Launcher {
 public:
  DriverLauncher(std::shared_ptr<DeviceContext> context, DeviceProperties properties,
                 const JitOptions& options)
      : context_(std::move(context)), properties_(std::move(properties)), jit_(options) {}

  const DeviceProperties& properties() const override { return properties_; }

  absl::StatusOr<std::shared_ptr<const LoadedKernel>> Load(const KernelSpec& spec) override {
    if (spec.threads < 1 || spec.threads > kMaxThreads ||
        spec.shared_bytes > properties_.shared_bytes_per_block) {
      return InvalidArguments("kernel '", spec.source.name, "': blocks of ", spec.threads,
                              " threads with ", spec.shared_bytes, " bytes of shared memory; ",
                              properties_.name, " has at most ", kMaxThreads, " threads and ",
                              properties_.shared_bytes_per_block, " bytes");
    }
    KVANT_ASSIGN_OR_RETURN(const std::shared_ptr<const Cubin> cubin,
                           jit_.Get(spec.source, properties_.arch()));
    KVANT_ASSIGN_OR_RETURN(const CUmodule module, LoadModule(*cubin, spec.source.name));
    const absl::StatusOr<CUfunction> function = Prepare(module, spec);
    if (!function.ok()) {
      context_->UnloadModule(module);
      return function.status();
    }
    return std::make_shared<const DriverKernel>(context_, module, *function, spec, *cubin);
  }

  absl::Status Launch(const LoadedKernel& kernel, int64_t blocks, const void* params,
                      size_t param_bytes, void* stream) const override {
    return static_cast<const DriverKernel&>(kernel).Launch(blocks, params, param_bytes,
                                                           static_cast<CUstream>(stream));
  }

  std::shared_ptr<DeviceMemory> memory() const override { return context_; }

 private:
  absl::StatusOr<CUmodule> LoadModule(const Cubin& cubin, const std::string& name) const {
    absl::StatusOr<CUmodule> module = context_->LoadModule(cubin.bytes);
    if (module.ok()) return module;
    // A code that is too new for the driver, or not for this device, is told by these numbers.
    return absl::Status(
        module.status().code(),
        absl::StrCat("kernel '", name, "', compiled for ", cubin.arch, " by NVRTC ",
                     cubin.nvrtc_major, ".", cubin.nvrtc_minor, ", onto ", properties_.name,
                     " by a driver of CUDA ", CudaVersionToString(context_->driver().version()),
                     ": ", module.status().message()));
  }

  absl::StatusOr<CUfunction> Prepare(CUmodule module, const KernelSpec& spec) const {
    KVANT_ASSIGN_OR_RETURN(const CUfunction function,
                           context_->FindFunction(module, spec.source.entry));
    if (spec.shared_bytes > 0) {
      KVANT_RETURN_IF_ERROR(context_->AllowSharedBytes(function, spec.shared_bytes));
    }
    return function;
  }

  const std::shared_ptr<DeviceContext> context_;
  const DeviceProperties properties_;
  Jit jit_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<Launcher>> MakeDriverLauncher(int device_index,
                                                             const JitOptions& options) {
  KVANT_ASSIGN_OR_RETURN(std::shared_ptr<const Driver> driver, Driver::Open());
  KVANT_ASSIGN_OR_RETURN(DeviceProperties properties, driver->Properties(device_index));
  JitOptions jit_options = options;
  if (jit_options.driver_version == 0) jit_options.driver_version = driver->version();
  KVANT_ASSIGN_OR_RETURN(std::shared_ptr<DeviceContext> context,
                         DeviceContext::Retain(std::move(driver), device_index));
  return std::make_shared<DriverLauncher>(std::move(context), std::move(properties), jit_options);
}

}  // namespace kvant::cuda
