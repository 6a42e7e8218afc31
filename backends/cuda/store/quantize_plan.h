// QuantizePlan: a StoreSpec turned into launches of the CUDA kernels. Pure functions of the spec
// and the device's properties.
#ifndef KVANT_BACKENDS_CUDA_STORE_QUANTIZE_PLAN_H_
#define KVANT_BACKENDS_CUDA_STORE_QUANTIZE_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvant/backends/cuda/kernel_binding.h"
#include "kvant/backends/cuda/runtime/launcher.h"
#include "kvant/kernels/cuda/quantize_params.h"
#include "kvant/patterns/store_spec.h"

namespace kvant::cuda {

// The classes of kernels/cuda/quantize.h, dequantize.h and hadamard.h.
enum class QuantizeKernel {
#define KVANT_STORE_KERNEL(kind, ...) k##kind,
#include "kvant/backends/cuda/kernels.inc"
};

struct QuantizeLaunch {
  QuantizeKernel kernel{};
  QuantizeTraits traits{};
  QuantizeParams params{};  // but for the pointers
  KernelBinding binding;

  int64_t blocks = 0;
  int threads = 0;
  size_t shared_bytes = 0;
};

struct QuantizePlan {
  // One after another; none where nothing is to be written.
  std::vector<QuantizeLaunch> launches;
  size_t scratch_bytes = 0;

  // Where so much more of the scratch begins.
  size_t ReserveScratch(int64_t bytes);

  // "quantize: runs of 32 elements by 4 lanes"
  std::string ToString() const;
};

// kUnimplemented, with a sentence: host scalars, too large, codes of less than a byte whose rows
// interleave, Hadamard blocks of more than 32768 elements, formula ggml of groups that are no short
// runs.
absl::StatusOr<QuantizePlan> PlanStore(const StoreSpec& spec, const DeviceProperties& device);

// The kernel that a launch asks for.
KernelSpec MakeQuantizeKernel(const QuantizeLaunch& launch);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_STORE_QUANTIZE_PLAN_H_
