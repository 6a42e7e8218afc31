// When attention runs on packed codes (kernels/cuda/attention_codes.h), and how it is laid out.
#ifndef KVANT_BACKENDS_CUDA_ATTENTION_CODES_PLAN_H_
#define KVANT_BACKENDS_CUDA_ATTENTION_CODES_PLAN_H_

#include <cstdint>
#include <limits>
#include <string>

#include "kvant/kernels/cuda/attention_params.h"

namespace kvant::cuda {

// Why the kernel does not take these; empty if it does. What planning sets does not matter, and
// ports' memory counts as aligned.
std::string WhyNotCodes(const AttentionTraits& traits, const AttentionParams& params);

inline constexpr int kAnyBlocks = std::numeric_limits<int>::max();

struct CodesDevice {
  int multiprocessors = 0;
  int shared_bytes = 0;  // of a multiprocessor
  bool converts_e4m3 = false;
  double slot_share = 1;         // as AttentionPlan's
  int most_blocks = kAnyBlocks;  // of a multiprocessor
};

struct CodesLaunch {
  int64_t blocks = 0;
  int threads = 0;
  int shared_bytes = 0;               // of a block
  int blocks_per_multiprocessor = 0;  // that registers must leave room for
  int64_t partials = 0;               // floats of AttentionParams::partials
  int64_t counters = 0;               // of AttentionParams::done
};

// Sets what is the kernel's own in `traits` and `params` (row tiles and splits included), which it
// must take. Splits are planned for params.kv_len tokens.
CodesLaunch PlanCodes(const CodesDevice& device, AttentionTraits& traits, AttentionParams& params);

// The launch of what is planned, as PlanCodes returns it.
CodesLaunch LaunchOf(const AttentionTraits& traits, const AttentionParams& params);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_ATTENTION_CODES_PLAN_H_
