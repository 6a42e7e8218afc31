#include "kvant/backends/cuda/simt/bodies.h"
#include "kvant/kernels/cuda/merge.h"

namespace kvant::cuda {
namespace {

// Traits for the executor: variables.
struct RuntimeTraits {
  static thread_local MergeTraits k;
};
thread_local MergeTraits RuntimeTraits::k{};

}  // namespace

SimtBody MergeBody(const KernelSpec& spec) {
#define KVANT_MERGE_KERNEL(Entry, Class) \
  if (spec.source.entry == #Entry)       \
    return InstanceOf<RuntimeTraits>(spec, &Class<RuntimeTraits>::Run);
#include "kvant/backends/cuda/kernels.inc"
  return nullptr;
}

}  // namespace kvant::cuda
