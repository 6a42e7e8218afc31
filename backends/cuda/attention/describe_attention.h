// An AttentionSpec in the words of the kernels: traits, parameters and which port each pointer is.
#ifndef KVANT_BACKENDS_CUDA_ATTENTION_DESCRIBE_ATTENTION_H_
#define KVANT_BACKENDS_CUDA_ATTENTION_DESCRIBE_ATTENTION_H_

#include <string>

#include "kvant/backends/cuda/attention/attention_plan.h"
#include "kvant/patterns/attention_spec.h"

namespace kvant::cuda {

// Why no kernel takes `spec`, in a sentence; empty if one does.
std::string WhyUnsupported(const AttentionSpec& spec);

// Fills in all of the plan that does not depend on the device. `spec` must be supported.
void DescribeAttention(const AttentionSpec& spec, AttentionPlan& plan);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_ATTENTION_DESCRIBE_ATTENTION_H_
