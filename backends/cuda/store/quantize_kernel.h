// The quantization kernels, specialised.
#ifndef KVANT_BACKENDS_CUDA_STORE_QUANTIZE_KERNEL_H_
#define KVANT_BACKENDS_CUDA_STORE_QUANTIZE_KERNEL_H_

#include "kvant/backends/cuda/runtime/launcher.h"
#include "kvant/backends/cuda/store/quantize_plan.h"

namespace kvant::cuda {

// The kernel that a launch of a plan asks for.
KernelSpec MakeQuantizeKernel(const QuantizeLaunch& launch);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_STORE_QUANTIZE_KERNEL_H_
