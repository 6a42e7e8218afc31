// The cpu backend, a spec at a time.
#ifndef KVANT_BACKENDS_CPU_CPU_BACKEND_H_
#define KVANT_BACKENDS_CPU_CPU_BACKEND_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kvant/backends/backend.h"
#include "kvant/kernels/cpu/kernels.h"
#include "kvant/patterns/attention_spec.h"
#include "kvant/patterns/merge_spec.h"
#include "kvant/patterns/store_spec.h"

namespace kvant::cpu {

// Executable::rounding of products on codes, for data of any magnitudes that are not made against
// the dither: four standard deviations of what rounding queries and weights to 15 bits may cost
// (kernels/cpu/code_parameters.h). On most data the error is 4e-5.
inline constexpr double kRoundingOfCodes = 3e-3;
// The same where Q, K and V are bf16: only probabilities are rounded, to the sum of two bf16
// numbers, by 2^-17 of each at most.
inline constexpr double kRoundingOfSplitProbs = 8e-6;

// kUnimplemented with WhyUnsupported's sentence.
absl::StatusOr<std::unique_ptr<Executable>> CompileAttention(const AttentionSpec& spec,
                                                             const KernelSet& kernels);
// Rotation, quantization and conversion, into a tensor or a part of one. Positions are trusted.
// kUnimplemented, in a sentence: it dequantizes; formula ggml of groups that are no runs along the
// last axis.
absl::StatusOr<std::unique_ptr<Executable>> CompileStore(const StoreSpec& spec,
                                                         const KernelSet& kernels);
std::unique_ptr<Executable> CompileMerge(const MergeSpec& spec, const KernelSet& kernels);

}  // namespace kvant::cpu

#endif  // KVANT_BACKENDS_CPU_CPU_BACKEND_H_
