// Stores on a launcher's device.
#ifndef KVANT_BACKENDS_CUDA_STORE_STORE_H_
#define KVANT_BACKENDS_CUDA_STORE_STORE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvant/backends/backend.h"
#include "kvant/backends/cuda/runtime/launcher.h"
#include "kvant/patterns/store_spec.h"

namespace kvant::cuda {

// As PlanStore (quantize_plan.h). `device` is what Executable::kernel
// begins with: "cuda/sm_90a". A row whose position is bad is written nowhere.
absl::StatusOr<std::unique_ptr<Executable>> CompileStore(const StoreSpec& spec,
                                                         std::shared_ptr<Launcher> launcher,
                                                         std::string device);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_STORE_STORE_H_
