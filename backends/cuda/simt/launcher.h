// A launcher on the SIMT executor: the kernels as host functions, checked while they run.
#ifndef KVANT_BACKENDS_CUDA_SIMT_LAUNCHER_H_
#define KVANT_BACKENDS_CUDA_SIMT_LAUNCHER_H_

#include <memory>

#include "kvant/backends/cuda/runtime/launcher.h"
#include "kvant/kernels/device/simt.h"

namespace kvant::cuda {

// A launch that the executor finds a fault in is kInternal, with its sentences; outputs have been
// written by then. Device memory is the host's.
std::shared_ptr<Launcher> MakeSimtLauncher(const simt::Options& options = {});

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_SIMT_LAUNCHER_H_
