// The kernels of kernels/cuda/cache.h, loaded.
#ifndef KVANT_BACKENDS_CUDA_CACHE_CACHE_KERNELS_H_
#define KVANT_BACKENDS_CUDA_CACHE_CACHE_KERNELS_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kvant/backends/cache_kernels.h"
#include "kvant/backends/cuda/runtime/launcher.h"

namespace kvant::cuda {

// Errors as Launcher::Load.
absl::StatusOr<std::unique_ptr<CacheKernels>> LoadCacheKernels(std::shared_ptr<Launcher> launcher);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_CACHE_CACHE_KERNELS_H_
