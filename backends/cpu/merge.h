// MergeAttention on the CPU.
#ifndef KVANT_BACKENDS_CPU_MERGE_H_
#define KVANT_BACKENDS_CPU_MERGE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kvant/backends/backend.h"
#include "kvant/kernels/cpu/kernels.h"
#include "kvant/patterns/merge_spec.h"

namespace kvant::cpu {

std::unique_ptr<Executable> CompileMerge(const MergeSpec& spec, const KernelSet& kernels);

}  // namespace kvant::cpu

#endif  // KVANT_BACKENDS_CPU_MERGE_H_
