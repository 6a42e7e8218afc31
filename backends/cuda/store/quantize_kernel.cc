#include "kvant/backends/cuda/store/quantize_kernel.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/substitute.h"
#include "kvant/backends/cuda/traits_text.h"
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

struct Kernel {
  const char* name;  // of the entry
  const char* class_name;
  const char* header;
  void (*run)(const QuantizeParams&);
};

const Kernel& KernelOf(QuantizeKernel kernel) {
  static constexpr Kernel kKernels[] = {
      {"quantize_rows", "QuantizeRows", "quantize", QuantizeRows<RuntimeTraits>::Run},
      {"quantize_tiles", "QuantizeTiles", "quantize", QuantizeTiles<RuntimeTraits>::Run},
      {"quantize_elements", "QuantizeElements", "quantize", QuantizeElements<RuntimeTraits>::Run},
      {"dequantize_elements", "DequantizeElements", "dequantize",
       DequantizeElements<RuntimeTraits>::Run},
      {"rotate_runs", "RotateRuns", "hadamard", RotateRuns<RuntimeTraits>::Run},
      {"rotate_blocks", "RotateBlocks", "hadamard", RotateBlocks<RuntimeTraits>::Run},
  };
  return kKernels[static_cast<int>(kernel)];
}

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
  const Kernel& kernel = KernelOf(launch.kernel);
  KernelSpec spec;
  spec.source.name = kernel.name;
  spec.source.text = absl::Substitute(kText, kernel.header, TraitsText(launch.traits),
                                      launch.threads, kernel.name, kernel.class_name);
  spec.source.entry = kernel.name;
  spec.threads = launch.threads;
  spec.shared_bytes = launch.shared_bytes;
  spec.simt_body = [traits = launch.traits, run = kernel.run](const void* params) {
    // By every thread: whichever is first must find it, and all write the same.
    RuntimeTraits::k = traits;
    run(*static_cast<const QuantizeParams*>(params));
  };
  return spec;
}

}  // namespace kvant::cuda
