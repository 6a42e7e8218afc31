// The CUDA kernels as host functions. One instance of each serves all specialisations: what NVRTC
// is told as constants are variables here.
#ifndef KVANT_BACKENDS_CUDA_SIMT_BODIES_H_
#define KVANT_BACKENDS_CUDA_SIMT_BODIES_H_

#include <functional>

#include "kvant/backends/cuda/kernel_traits.h"
#include "kvant/backends/cuda/runtime/launcher.h"

namespace kvant::cuda {

// What one thread of a block does; `params` as given to Launch.
using SimtBody = std::function<void(const void* params)>;

// Of a kernel over Runtime::k, which is a variable of each thread here.
template <typename Runtime, typename Params>
SimtBody InstanceOf(const KernelSpec& spec, void (*run)(const Params&)) {
  return [traits = TraitsOf<decltype(Runtime::k)>(spec.traits), run](const void* params) {
    // By every thread: whichever is first must find it, and all write the same.
    Runtime::k = traits;
    run(*static_cast<const Params*>(params));
  };
}

// With the spec's traits; null if kernels.inc has no such entry, or none of attention.
SimtBody BodyOf(const KernelSpec& spec);
// In a file of its own, which takes long to compile.
SimtBody AttentionBody(const KernelSpec& spec);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_SIMT_BODIES_H_
