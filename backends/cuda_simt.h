// The SIMT executor: the CUDA kernels on the host, each thread a fiber, checked for races and the
// like while they run. For tests; slow. It is in a library of its own, kvant::simt.
#ifndef KVANT_BACKENDS_CUDA_SIMT_H_
#define KVANT_BACKENDS_CUDA_SIMT_H_

#include <memory>

#include "kvant/backends/backend.h"

namespace kvant {

// From now on Engine::Create takes Device::kCudaSimt. Any thread may call it, at any time.
void EnableCudaSimt();

std::unique_ptr<Backend> MakeCudaSimtBackend();

}  // namespace kvant

#endif  // KVANT_BACKENDS_CUDA_SIMT_H_
