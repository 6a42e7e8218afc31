// The attention kernels, specialised.
#ifndef KVANT_BACKENDS_CUDA_ATTENTION_ATTENTION_KERNEL_H_
#define KVANT_BACKENDS_CUDA_ATTENTION_ATTENTION_KERNEL_H_

#include "kvant/backends/cuda/attention/attention_parts.h"
#include "kvant/backends/cuda/attention/attention_plan.h"
#include "kvant/backends/cuda/runtime/launcher.h"

namespace kvant::cuda {

// The kernel that a plan asks for. Its round is that of codes, where there are parts.
KernelSpec MakeAttentionKernel(const AttentionPlan& plan);
KernelSpec MakePartsKernel(const PartsPlan& plan);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_ATTENTION_ATTENTION_KERNEL_H_
