// DynamicQuantize and DynamicDequantize on a launcher's device.
#ifndef KVANT_BACKENDS_CUDA_QUANTIZE_H_
#define KVANT_BACKENDS_CUDA_QUANTIZE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvant/backends/backend.h"
#include "kvant/backends/cuda/launcher.h"

namespace kvant::cuda {

// Of a partition of which IsQuantization (quantize_plan.h), with all shapes known. `device` is what
// Executable::kernel begins with: "cuda/sm_90a".
absl::StatusOr<std::unique_ptr<Executable>> CompileQuantization(const Partition& partition,
                                                                std::shared_ptr<Launcher> launcher,
                                                                std::string device);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_QUANTIZE_H_
