// Hadamard on CUDA devices.
#ifndef KVANT_BACKENDS_CUDA_ROTATE_PLAN_H_
#define KVANT_BACKENDS_CUDA_ROTATE_PLAN_H_

#include "absl/status/status.h"
#include "kvant/backends/cuda/quantize_launch.h"

namespace kvant::cuda {

// Adds the launch of `op`, which gives `dst`. kUnimplemented, with a sentence: too large, blocks of
// more than 32768 elements.
absl::Status AddRotation(const Op& op, const LogicalTensor& src, const LogicalTensor& dst,
                         const OperandFinder& find, QuantizePlan& plan);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_ROTATE_PLAN_H_
