// DynamicQuantize on the CPU: which loops run over which axes.
#ifndef KVANT_BACKENDS_CPU_QUANTIZE_PLAN_H_
#define KVANT_BACKENDS_CPU_QUANTIZE_PLAN_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvant/backends/backend.h"
#include "kvant/kernels/cpu/quantize.h"

namespace kvant::cpu {

// Whether the partition is one DynamicQuantize.
bool IsQuantize(const Partition& partition);

// A partition of which that is so, with all shapes known, either form of the op, any strides.
// kUnimplemented: formula ggml of groups that are no runs along the last axis.
absl::StatusOr<std::unique_ptr<Executable>> CompileQuantize(const Partition& partition,
                                                            const KernelSet& kernels);

}  // namespace kvant::cpu

#endif  // KVANT_BACKENDS_CPU_QUANTIZE_PLAN_H_
