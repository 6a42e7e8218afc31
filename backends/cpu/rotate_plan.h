// Hadamard on the CPU, alone or before the op that stores what it has rotated.
#ifndef KVANT_BACKENDS_CPU_ROTATE_PLAN_H_
#define KVANT_BACKENDS_CPU_ROTATE_PLAN_H_

#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "kvant/backends/backend.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {

// Whether the partition begins with a Hadamard, and the rest, if any, has its result as src.
bool IsRotation(const Partition& partition);

// A partition of which that is so, with all shapes known, any strides. `compile_rest` compiles what
// follows, a partition that takes the rotated numbers in f32; its error is returned.
absl::StatusOr<std::unique_ptr<Executable>> CompileRotation(
    const Partition& partition, const KernelSet& kernels,
    absl::FunctionRef<absl::StatusOr<std::unique_ptr<Executable>>(const Partition&)> compile_rest);

}  // namespace kvant::cpu

#endif  // KVANT_BACKENDS_CPU_ROTATE_PLAN_H_
