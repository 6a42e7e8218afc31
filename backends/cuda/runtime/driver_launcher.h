// The launcher of a GPU: libcuda, and kernels compiled by NVRTC.
#ifndef KVANT_BACKENDS_CUDA_RUNTIME_DRIVER_LAUNCHER_H_
#define KVANT_BACKENDS_CUDA_RUNTIME_DRIVER_LAUNCHER_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kvant/backends/cuda/runtime/jit.h"
#include "kvant/backends/cuda/runtime/launcher.h"

namespace kvant::cuda {

// Of device `device_index` as CUDA counts them (CUDA_VISIBLE_DEVICES applies), in its primary
// context. kUnimplemented with a sentence: no driver, one too old, no device, or one of compute
// capability below 8.0. kInvalidArguments: no device of that index. options.driver_version is the
// driver's where it is 0.
absl::StatusOr<std::shared_ptr<Launcher>> MakeDriverLauncher(int device_index,
                                                             const JitOptions& options = {});

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_RUNTIME_DRIVER_LAUNCHER_H_
