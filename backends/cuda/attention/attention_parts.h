// Attention over segments of which one is packed codes, in parts: the kernel on packed codes has
// the tokens that K and V both have there; then tiles have the others (sinks, windows), and join
// what codes gave. A launch more, and the time of codes instead of that of tiles.
#ifndef KVANT_BACKENDS_CUDA_ATTENTION_ATTENTION_PARTS_H_
#define KVANT_BACKENDS_CUDA_ATTENTION_ATTENTION_PARTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "kvant/backends/backend.h"
#include "kvant/backends/cuda/attention/attention_plan.h"
#include "kvant/backends/cuda/runtime/launcher.h"

namespace kvant::cuda {

struct PartsPlan {
  // Output ports of `codes` are AttentionParams::codes_outputs and codes_states.
  AttentionPlan codes, others;
  int64_t rows = 0;  // of queries, in all
  // Into the scratch: of codes, of others, what codes leave for others.
  size_t codes_at = 0, others_at = 0, left_at = 0, scratch_bytes = 0;

  double rounding() const;
  std::string ToString() const;
};

// Nothing where the kernels take no such spec, or it is not worth it; of several segments why_not
// says why.
std::optional<PartsPlan> PlanParts(const AttentionSpec& spec, const DeviceProperties& device,
                                   std::string& why_not);

absl::StatusOr<std::unique_ptr<Executable>> CompileParts(
    PartsPlan plan, std::shared_ptr<Launcher> launcher, const std::shared_ptr<DeviceMemory>& memory,
    std::string device);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_ATTENTION_ATTENTION_PARTS_H_
