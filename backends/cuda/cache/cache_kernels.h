// The kernels of kernels/cuda/cache.h, loaded.
#ifndef KVANT_BACKENDS_CUDA_CACHE_CACHE_KERNELS_H_
#define KVANT_BACKENDS_CUDA_CACHE_CACHE_KERNELS_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kvant/backends/cache_kernels.h"
#include "kvant/backends/cuda/runtime/launcher.h"

namespace kvant::cuda {

// In the order of kernels.inc.
enum class CacheKernel {
#define KVANT_CACHE_KERNEL(Task, entry) k##Task,
#include "kvant/backends/cuda/kernels.inc"
};

KernelSpec MakeCacheKernel(CacheKernel kernel);

// Errors as Launcher::Load.
absl::StatusOr<std::unique_ptr<CacheKernels>> LoadCacheKernels(std::shared_ptr<Launcher> launcher);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_CACHE_CACHE_KERNELS_H_
