// DynamicQuantize, DynamicDequantize, Append and Hadamard on a launcher's device.
#ifndef KVANT_BACKENDS_CUDA_QUANTIZE_H_
#define KVANT_BACKENDS_CUDA_QUANTIZE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvant/backends/backend.h"
#include "kvant/backends/cuda/launcher.h"

namespace kvant::cuda {

// Of a partition of which IsQuantization (quantize_plan.h), with all shapes known. `memory`: the
// launcher's. `device` is what Executable::kernel begins with: "cuda/sm_90a".
//
// Bad positions are refused with kInvalidArguments, and nothing is written, where the host reads
// that memory. Else the kernel reads them, and a row whose position is bad is written nowhere.
absl::StatusOr<std::unique_ptr<Executable>> CompileQuantization(
    const Partition& partition, std::shared_ptr<Launcher> launcher,
    const std::shared_ptr<DeviceMemory>& memory, std::string device);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_QUANTIZE_H_
