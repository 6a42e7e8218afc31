// Hadamard on CUDA devices.
#ifndef KVANT_BACKENDS_CUDA_STORE_ROTATE_PLAN_H_
#define KVANT_BACKENDS_CUDA_STORE_ROTATE_PLAN_H_

#include <optional>

#include "absl/status/status.h"
#include "kvant/backends/cuda/store/quantize_launch.h"

namespace kvant::cuda {

// Adds the launch of the spec's rotation, from its values to `to`, which is in the scratch or has a
// port. kUnimplemented, with a sentence: too large, blocks of more than 32768 elements.
absl::Status AddRotation(const StoreSpec& spec, const PortArray& to, std::optional<InScratch> place,
                         QuantizePlan& plan);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_STORE_ROTATE_PLAN_H_
