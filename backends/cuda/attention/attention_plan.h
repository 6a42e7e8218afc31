// AttentionPlan: an AttentionSpec turned into what the CUDA kernels take. Pure functions of the
// spec and the device's properties.
#ifndef KVANT_BACKENDS_CUDA_ATTENTION_ATTENTION_PLAN_H_
#define KVANT_BACKENDS_CUDA_ATTENTION_ATTENTION_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "kvant/backends/cuda/kernel_binding.h"
#include "kvant/backends/cuda/runtime/device_properties.h"
#include "kvant/backends/cuda/runtime/launcher.h"
#include "kvant/kernels/cuda/attention_params.h"
#include "kvant/patterns/attention_spec.h"

namespace kvant::cuda {

// What is launched, whichever kernel it is of.
struct AttentionLaunch {
  AttentionParams params{};  // but for the pointers
  KernelBinding binding;
  int64_t blocks = 0;
  // Of the scratch: partial states from 0 on, then a count per tile of the output.
  size_t partial_bytes = 0, scratch_bytes = 0;
};

struct AttentionPlan : AttentionLaunch {
  AttentionTraits traits{};
  int threads = 0;
  size_t shared_bytes = 0;
  // Of a multiprocessor, at once: what shared memory has room for, and registers are to.
  int blocks_per_multiprocessor = 1;
  // Of the blocks that the device has at once, how many splits are planned for: all but of parts.
  double slot_share = 1;
  // Why K and V are not multiplied as they are stored, where they are not.
  std::string why_not_codes;

  // Executable::rounding, of outputs of that type (ElementType).
  double rounding(i32 output) const;
  double rounding() const { return rounding(traits.output.type); }
  // "f16 products of packed codes, 8 rows, 64-token tiles of 4 warps, 8 splits, ...".
  std::string ToString() const;
};

// What every pointer of a port must be a multiple of: vectors are loaded as such, and copied
// asynchronously, 16 bytes at a time.
inline constexpr size_t kPointerAlignment = 16;

// Why no kernel takes `spec`, in a sentence; empty if one does.
std::string WhyUnsupported(const AttentionSpec& spec);

// Fills in all of the plan that does not depend on the device: the spec in the words of the
// kernels, traits, parameters and which port each pointer is. `spec` must be supported.
void DescribeAttention(const AttentionSpec& spec, AttentionPlan& plan);

// kUnimplemented, with a sentence: what of the spec the kernels do not take, or that its tiles
// exceed the device's shared memory.
absl::StatusOr<AttentionPlan> PlanAttention(const AttentionSpec& spec,
                                            const DeviceProperties& device);
// A launch has 2^31 - 1 blocks at most.
inline constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;

// A part of a spec that the kernels take, with ranges: spec.kv_len is how many tokens splits are
// planned for. By packed codes, or else the plan has why_not_codes, and no blocks; a multiprocessor
// has `most_blocks` of them.
absl::StatusOr<AttentionPlan> PlanCodesPart(const AttentionSpec& spec, double slot_share,
                                            int most_blocks, const DeviceProperties& device);
// By tiles, so small that a multiprocessor has room for so many blocks.
absl::StatusOr<AttentionPlan> PlanOthersPart(const AttentionSpec& spec, double slot_share,
                                             int blocks, const DeviceProperties& device);

// The kernel that a plan asks for.
KernelSpec MakeAttentionKernel(const AttentionPlan& plan);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_ATTENTION_ATTENTION_PLAN_H_
