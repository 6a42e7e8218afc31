// DynamicQuantize and Append on the CPU.
#ifndef KVANT_BACKENDS_CPU_QUANTIZE_PLAN_H_
#define KVANT_BACKENDS_CPU_QUANTIZE_PLAN_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvant/backends/backend.h"
#include "kvant/kernels/cpu/quantize.h"

namespace kvant::cpu {

// Whether the partition is one DynamicQuantize or Append.
bool IsQuantize(const Partition& partition);

// A partition of which that is so, with all shapes known, any form of the op, any strides. The
// executable refuses bad positions with kInvalidArguments and writes nothing then. kUnimplemented:
// formula ggml of groups that are no runs along the last axis.
absl::StatusOr<std::unique_ptr<Executable>> CompileQuantize(const Partition& partition,
                                                            const KernelSet& kernels);

}  // namespace kvant::cpu

#endif  // KVANT_BACKENDS_CPU_QUANTIZE_PLAN_H_
