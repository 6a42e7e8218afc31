// When attention runs on packed codes (kernels/cuda/attention_codes.h), and how it is laid out.
#ifndef KVANT_BACKENDS_CUDA_ATTENTION_CODES_PLAN_H_
#define KVANT_BACKENDS_CUDA_ATTENTION_CODES_PLAN_H_

#include <limits>
#include <string>

#include "kvant/backends/cuda/attention/attention_plan.h"
#include "kvant/backends/cuda/runtime/device_properties.h"

namespace kvant::cuda {

// Why the kernel does not take these; empty if it does. What planning sets does not matter, and
// ports' memory counts as aligned.
std::string WhyNotCodes(const AttentionTraits& traits, const AttentionParams& params);

inline constexpr int kAnyBlocks = std::numeric_limits<int>::max();

// Plans a launch of the kernel, which must take what the plan describes: all that is its own, row
// tiles and splits included. Splits are planned for params.kv_len tokens, and a multiprocessor has
// `most_blocks` at most.
void PlanCodes(const DeviceProperties& device, int most_blocks, AttentionPlan& plan);

// Sets what follows from the traits and splits of a plan: blocks, threads, and memory.
void SizeCodes(AttentionPlan& plan);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_ATTENTION_CODES_PLAN_H_
