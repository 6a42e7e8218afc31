#include "kvant/backends/cuda/simt/launcher.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/backends/cuda/simt/bodies.h"
#include "kvant/backends/device_memory.h"
#include "kvant/graph/status.h"

namespace kvant::cuda {
namespace {

class SimtKernel : public LoadedKernel {
 public:
  SimtKernel(const KernelSpec& spec, SimtBody body) : spec_(spec), body_(std::move(body)) {}
  std::string description() const override { return "on the SIMT executor"; }
  const KernelSpec& spec() const { return spec_; }
  const SimtBody& body() const { return body_; }

 private:
  const KernelSpec spec_;
  const SimtBody body_;
};

// Of no particular GPU: few multiprocessors, so that small problems are split too, and the shared
// memory of compute capability 8.0.
DeviceProperties PropertiesOfExecutor() {
  DeviceProperties properties;
  properties.name = "SIMT executor";
  properties.major = 8;
  properties.minor = 0;
  properties.multiprocessors = 4;
  properties.shared_bytes_per_block = 163 << 10;
  properties.shared_bytes_per_multiprocessor = 164 << 10;
  properties.threads_per_multiprocessor = 2048;
  properties.l2_bytes = 40 << 20;
  properties.memory_bytes = size_t{40} << 30;
  return properties;
}

class SimtLauncher : public Launcher {
 public:
  explicit SimtLauncher(const simt::Options& options) : options_(options) {}

  const DeviceProperties& properties() const override { return properties_; }

  absl::StatusOr<std::shared_ptr<const LoadedKernel>> Load(const KernelSpec& spec) override {
    if (spec.shared_bytes > properties_.shared_bytes_per_block) {
      return InvalidArguments("kernel '", spec.source.name, "' needs ", spec.shared_bytes,
                              " bytes of shared memory; a block has ",
                              properties_.shared_bytes_per_block);
    }
    SimtBody body = BodyOf(spec);
    if (body == nullptr) {
      return absl::InternalError(
          absl::StrCat("no kernel of the SIMT executor has the name '", spec.source.entry, "'"));
    }
    return std::make_shared<SimtKernel>(spec, std::move(body));
  }

  absl::Status Launch(const LoadedKernel& kernel, int64_t blocks, const void* params, size_t,
                      void*) const override {
    const auto& simt_kernel = static_cast<const SimtKernel&>(kernel);
    const KernelSpec& spec = simt_kernel.spec();
    const simt::Report report = simt::Launch({blocks, spec.threads, spec.shared_bytes}, options_,
                                             [&] { simt_kernel.body()(params); });
    if (report.errors.empty()) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(
        "kernel '", spec.source.name,
        "': ", absl::StrJoin(report.errors, " ", [](std::string* out, const simt::Error& e) {
          out->append(e.message);
        })));
  }

  std::shared_ptr<DeviceMemory> memory() const override { return memory_; }

 private:
  const simt::Options options_;
  const DeviceProperties properties_ = PropertiesOfExecutor();
  const std::shared_ptr<DeviceMemory> memory_ = MakeHostMemory();
};

}  // namespace

std::shared_ptr<Launcher> MakeSimtLauncher(const simt::Options& options) {
  return std::make_shared<SimtLauncher>(options);
}

}  // namespace kvant::cuda
