// MergeAttention on a launcher's device.
#ifndef KVANT_BACKENDS_CUDA_MERGE_MERGE_H_
#define KVANT_BACKENDS_CUDA_MERGE_MERGE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvant/backends/backend.h"
#include "kvant/backends/cuda/runtime/launcher.h"
#include "kvant/patterns/merge_spec.h"

namespace kvant::cuda {

// As PlanMerge (merge_plan.h). `device` is what Executable::kernel begins with: "cuda/sm_90a".
absl::StatusOr<std::unique_ptr<Executable>> CompileMerge(const MergeSpec& spec,
                                                         std::shared_ptr<Launcher> launcher,
                                                         std::string device);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_MERGE_MERGE_H_
