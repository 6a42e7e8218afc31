// Plan: an AttentionSpec turned into what the CPU kernels take, with tiles and splits.
#ifndef KVANT_BACKENDS_CPU_PLAN_H_
#define KVANT_BACKENDS_CPU_PLAN_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "kvant/backends/backend.h"
#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/kernels.h"
#include "kvant/patterns/attention_spec.h"

namespace kvant::cpu {

// Why the CPU kernels do not take `spec`, in a sentence; empty if they do.
std::string WhyUnsupported(const AttentionSpec& spec);

// Immutable. The problem points into the plan, which therefore stays where it is.
class Plan {
 public:
  // `spec` must be supported.
  Plan(const AttentionSpec& spec, const KernelSet& kernels);
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const AttentionSpec& spec() const { return spec_; }
  const AttentionProblem& problem() const { return problem_; }
  // Scratch of one concurrent unit, and of all partial results, in floats.
  int64_t unit_floats() const { return unit_floats_; }
  int64_t partial_floats() const { return partial_floats_; }
  // Executable::rounding.
  double rounding() const;
  // "bf16 products, 128-row x 64-token tiles, 8 splits, 120 KiB scratch".
  std::string ToString() const;

 private:
  void Describe();
  void ChooseTiles();
  void ChooseProducts(const KernelSet& kernels);
  void DescribeCodes(const KernelSet& kernels);
  std::string ProductsName() const;

  const AttentionSpec spec_;
  absl::InlinedVector<Segment, 1> k_;
  absl::InlinedVector<Segment, 1> v_;
  absl::InlinedVector<Step, 3> steps_;
  AttentionProblem problem_;
  // Why codes of K or V are not multiplied as such; empty if they are or there are none.
  std::string k_reason_, v_reason_;
  int64_t unit_floats_ = 0;
  int64_t partial_floats_ = 0;
};

// The cpu backend, from a spec alone. kUnimplemented with WhyUnsupported's sentence.
absl::StatusOr<std::unique_ptr<Executable>> CompileAttention(const AttentionSpec& spec,
                                                             const KernelSet& kernels);

}  // namespace kvant::cpu

#endif  // KVANT_BACKENDS_CPU_PLAN_H_
