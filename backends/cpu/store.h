// Stores on the CPU: rotation, quantization and conversion, into a tensor or a part of one.
#ifndef KVANT_BACKENDS_CPU_STORE_H_
#define KVANT_BACKENDS_CPU_STORE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kvant/backends/backend.h"
#include "kvant/kernels/cpu/kernels.h"
#include "kvant/patterns/store_spec.h"

namespace kvant::cpu {

// Positions are trusted. kUnimplemented, in a sentence: it dequantizes; formula ggml of groups that
// are no runs along the last axis.
absl::StatusOr<std::unique_ptr<Executable>> CompileStore(const StoreSpec& spec,
                                                         const KernelSet& kernels);

}  // namespace kvant::cpu

#endif  // KVANT_BACKENDS_CPU_STORE_H_
