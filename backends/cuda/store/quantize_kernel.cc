#include "kvant/backends/cuda/store/quantize_kernel.h"

#include "absl/strings/substitute.h"
#include "kvant/backends/cuda/kernel_traits.h"

namespace kvant::cuda {
namespace {

struct KernelRow {
  const char* entry;
  const char* name;  // of its class
  const char* header;
};
constexpr KernelRow kKernels[] = {
#define KVANT_STORE_KERNEL(kind, entry, Class, header) {#entry, #Class, #header},
#include "kvant/backends/cuda/kernels.inc"
};

constexpr char kText[] = R"(#include "kvant/kernels/cuda/$0.h"

namespace kvant::cuda {
struct Traits {
  static constexpr QuantizeTraits k = {$1};
  static constexpr QuantizeTraits kMax = k;
};
}  // namespace kvant::cuda

extern "C" __global__ void __launch_bounds__($2, 1)
$3(const __grid_constant__ kvant::cuda::QuantizeParams params) {
  kvant::cuda::$4<kvant::cuda::Traits>::Run(params);
}
)";

}  // namespace

KernelSpec MakeQuantizeKernel(const QuantizeLaunch& launch) {
  const KernelRow& kernel = kKernels[static_cast<int>(launch.kernel)];
  KernelSpec spec;
  spec.traits = WordsOf(launch.traits);
  spec.source.name = spec.source.entry = kernel.entry;
  spec.source.text = absl::Substitute(kText, kernel.header, InitializerOf(spec.traits),
                                      launch.threads, kernel.entry, kernel.name);
  spec.threads = launch.threads;
  spec.shared_bytes = launch.shared_bytes;
  return spec;
}

}  // namespace kvant::cuda
