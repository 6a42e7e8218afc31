#include "kvant/backends/cuda/simt/bodies.h"

#include "kvant/kernels/cuda/cache.h"
#include "kvant/kernels/cuda/dequantize.h"
#include "kvant/kernels/cuda/hadamard.h"
#include "kvant/kernels/cuda/merge.h"
#include "kvant/kernels/cuda/quantize.h"

namespace kvant::cuda {
namespace {

// Traits for the executor: variables, and the largest that register arrays are sized by.
struct RuntimeQuantizeTraits {
  static thread_local QuantizeTraits k;
  static constexpr QuantizeTraits kMax = [] {
    QuantizeTraits most{};
    most.lane_runs = kMaxLaneRuns;
    return most;
  }();
};
thread_local QuantizeTraits RuntimeQuantizeTraits::k{};

struct RuntimeMergeTraits {
  static thread_local MergeTraits k;
};
thread_local MergeTraits RuntimeMergeTraits::k{};

}  // namespace

SimtBody BodyOf(const KernelSpec& spec) {
#define KVANT_STORE_KERNEL(kind, Entry, Class, header) \
  if (spec.source.entry == #Entry)                     \
    return InstanceOf<RuntimeQuantizeTraits>(spec, &Class<RuntimeQuantizeTraits>::Run);
#define KVANT_MERGE_KERNEL(Entry, Class) \
  if (spec.source.entry == #Entry)       \
    return InstanceOf<RuntimeMergeTraits>(spec, &Class<RuntimeMergeTraits>::Run);
#define KVANT_CACHE_KERNEL(Task, Entry) \
  if (spec.source.entry == #Entry)      \
    return [](const void* params) { Task##Kernel::Run(*static_cast<const Task*>(params)); };
#include "kvant/backends/cuda/kernels.inc"
  return AttentionBody(spec);
}

}  // namespace kvant::cuda
