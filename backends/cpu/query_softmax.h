// Attention whose softmax is over the queries: two runs of the kernel, and no matrix of scores.
//
//   L[c]    = max and ln sum exp over r of s[r, c]      the transposed problem: keys ask queries
//   O[r, d] = sum_c exp(s[r, c] - L[c]) * V[c, d]
#ifndef KVANT_BACKENDS_CPU_QUERY_SOFTMAX_H_
#define KVANT_BACKENDS_CPU_QUERY_SOFTMAX_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "kvant/backends/backend.h"
#include "kvant/backends/cpu/attention_plan.h"
#include "kvant/kernels/cpu/kernels.h"
#include "kvant/patterns/attention_spec.h"

namespace kvant::cpu {

// Why not, in a sentence; empty if QuerySoftmax takes `spec`.
std::string WhyNotTwoPasses(const AttentionSpec& spec);

class QuerySoftmax : public Executable {
 public:
  // `spec` must be supported.
  QuerySoftmax(const AttentionSpec& spec, const KernelSet& kernels);

  std::string kernel() const override;
  double rounding() const override { return output_.rounding(); }
  size_t scratch_bytes(int max_concurrency) const override;
  bool keeps_scratch() const override { return false; }
  absl::Status Run(const ExecutionPlace& place, absl::Span<const void* const> inputs,
                   absl::Span<void* const> outputs, std::byte* scratch) const override;

 private:
  const char* const name_;
  const Plan output_;      // the second pass, whose products the first takes too
  const Plan statistics_;  // the first
  const int64_t statistics_floats_;
};

}  // namespace kvant::cpu

#endif  // KVANT_BACKENDS_CPU_QUERY_SOFTMAX_H_
