// The cuda backend over any launcher.
#ifndef KVANT_BACKENDS_CUDA_CUDA_BACKEND_H_
#define KVANT_BACKENDS_CUDA_CUDA_BACKEND_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvant/backends/backend.h"
#include "kvant/backends/cuda/runtime/launcher.h"

namespace kvant::cuda {

std::unique_ptr<Backend> MakeBackend(std::string name, std::shared_ptr<Launcher> launcher);

// Fused attention on the launcher's device, which kernel() calls `device`. Declines as
// PlanAttention does.
absl::StatusOr<std::unique_ptr<Executable>> CompileAttention(const AttentionSpec& spec,
                                                             std::shared_ptr<Launcher> launcher,
                                                             std::string device);

// The kernels that a partition would be launched with on such a device. Errors as
// Backend::Compile's.
absl::StatusOr<std::vector<KernelSpec>> KernelsOf(const Partition& partition,
                                                  const DeviceProperties& device);

// The kernels of kernels/cuda/cache.h. Errors as Launcher::Load.
absl::StatusOr<std::unique_ptr<CacheKernels>> LoadCacheKernels(std::shared_ptr<Launcher> launcher);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_CUDA_BACKEND_H_
