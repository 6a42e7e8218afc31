#include "kvant/backends/cuda/simt/bodies.h"
#include "kvant/kernels/cuda/dequantize.h"
#include "kvant/kernels/cuda/hadamard.h"
#include "kvant/kernels/cuda/quantize.h"

namespace kvant::cuda {
namespace {

// Traits for the executor: variables, and the largest that register arrays are sized by.
struct RuntimeTraits {
  static thread_local QuantizeTraits k;
  static constexpr QuantizeTraits kMax = [] {
    QuantizeTraits most{};
    most.lane_runs = kMaxLaneRuns;
    return most;
  }();
};
thread_local QuantizeTraits RuntimeTraits::k{};

}  // namespace

SimtBody StoreBody(const KernelSpec& spec) {
#define KVANT_STORE_KERNEL(kind, Entry, Class, header) \
  if (spec.source.entry == #Entry)                     \
    return InstanceOf<RuntimeTraits>(spec, &Class<RuntimeTraits>::Run);
#include "kvant/backends/cuda/kernels.inc"
  return nullptr;
}

}  // namespace kvant::cuda
