// MergePlan: a MergeSpec turned into launches of the CUDA kernel. A pure function of the spec.
#ifndef KVANT_BACKENDS_CUDA_MERGE_MERGE_PLAN_H_
#define KVANT_BACKENDS_CUDA_MERGE_MERGE_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvant/backends/cuda/kernel_binding.h"
#include "kvant/backends/cuda/runtime/launcher.h"
#include "kvant/kernels/cuda/merge.h"
#include "kvant/patterns/merge_spec.h"

namespace kvant::cuda {

struct MergeLaunch {
  MergeTraits traits{};
  MergeParams params{};  // but for the pointers
  KernelBinding binding;
  int64_t blocks = 0;
};

struct MergePlan {
  int64_t parts = 0;
  // One after another, and what one leaves in the scratch is a part of the next; none where nothing
  // is to be written.
  std::vector<MergeLaunch> launches;
  size_t scratch_bytes = 0;

  // "merge of 3 parts"
  std::string ToString() const;
};

// kUnimplemented, with a sentence: constants and host scalars, too large, too many axes that no
// stride joins.
absl::StatusOr<MergePlan> PlanMerge(const MergeSpec& spec);

// The kernel that a launch asks for.
KernelSpec MakeMergeKernel(const MergeLaunch& launch);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_MERGE_MERGE_PLAN_H_
