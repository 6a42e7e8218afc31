// Attention over segments of which one is packed codes, in parts (kernels/cuda/attention_parts.h):
// of one launch, some blocks have the tokens that K and V both have there, and the others the rest.
#ifndef KVANT_BACKENDS_CUDA_ATTENTION_ATTENTION_PARTS_H_
#define KVANT_BACKENDS_CUDA_ATTENTION_ATTENTION_PARTS_H_

#include <optional>
#include <string>

#include "kvant/backends/cuda/attention/attention_plan.h"
#include "kvant/backends/cuda/runtime/device_properties.h"

namespace kvant::cuda {

// One launch of both, bound as the others' is, which has all segments.
struct PartsPlan : AttentionLaunch {
  AttentionPlan codes, others;

  double rounding() const;
  std::string ToString() const;
};

// Nothing where the kernels take no such spec, or it is not worth it; of several segments why_not
// says why.
std::optional<PartsPlan> PlanParts(const AttentionSpec& spec, const DeviceProperties& device,
                                   std::string& why_not);

// The kernel that a plan asks for. Its round is that of codes.
KernelSpec MakePartsKernel(const PartsPlan& plan);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_ATTENTION_ATTENTION_PARTS_H_
