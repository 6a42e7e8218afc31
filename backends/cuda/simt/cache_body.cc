#include "kvant/backends/cuda/simt/bodies.h"
#include "kvant/kernels/cuda/cache.h"

namespace kvant::cuda {

SimtBody CacheBody(const KernelSpec& spec) {
#define KVANT_CACHE_KERNEL(Task, Entry) \
  if (spec.source.entry == #Entry)      \
    return [](const void* params) { Task##Kernel::Run(*static_cast<const Task*>(params)); };
#include "kvant/backends/cuda/kernels.inc"
  return nullptr;
}

}  // namespace kvant::cuda
