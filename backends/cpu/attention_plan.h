// Plan: an AttentionSpec turned into what the CPU kernels take, with tiles and splits.
#ifndef KVANT_BACKENDS_CPU_ATTENTION_PLAN_H_
#define KVANT_BACKENDS_CPU_ATTENTION_PLAN_H_

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvant/backends/backend.h"
#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/kernels.h"
#include "kvant/patterns/attention_spec.h"

namespace kvant::cpu {

using Segments = absl::InlinedVector<Segment, 1>;

// Why the CPU kernels do not take `spec`, in a sentence; empty if they do.
std::string WhyUnsupported(const AttentionSpec& spec);

// A plan and how it runs; by itself, with SoftmaxPass::kOnline, all of attention. Immutable. The
// problem points into the plan, which therefore stays where it is.
class Plan : public Executable {
 public:
  // `spec` must be supported. most_rows: of a tile, where the plan is for so few.
  Plan(const AttentionSpec& spec, const KernelSet& kernels, SoftmaxPass pass = SoftmaxPass::kOnline,
       std::optional<int64_t> most_rows = std::nullopt);
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const AttentionSpec& spec() const { return spec_; }
  const AttentionProblem& problem() const { return problem_; }
  // In floats.
  int64_t scratch(int max_concurrency) const {
    return schedule_floats_ + max_concurrency * worker_floats_ + partial_floats_;
  }
  // `statistics`: see AttentionCall; null for kOnline.
  void Run(const Execution& run, float* statistics, float* scratch) const;

  std::string kernel() const override;
  double rounding() const override;
  size_t scratch_bytes(int max_concurrency) const override {
    return scratch(max_concurrency) * sizeof(float);
  }
  absl::Status Run(const Execution& run) const override;
  // "bf16 products, 128-row x 128-token tiles, 8 splits, 120 KiB scratch".
  std::string ToString() const;

 private:
  // Whether one of K or V is so.
  template <typename Is>
  bool AnySegment(Is is) const {
    return std::ranges::any_of(k_, is) || std::ranges::any_of(v_, is);
  }
  void Describe();
  void TakeWholeNumbers();
  void ChooseTiles();
  void CutRows(int64_t rows);
  void ChooseProducts();
  bool DescribeStoredRows();
  void DescribeCodes();
  double OwnRounding() const;
  std::string ProductsName() const;

  const AttentionSpec spec_;
  const KernelSet& kernels_;
  const std::optional<int64_t> most_rows_;
  Segments k_, v_;
  absl::InlinedVector<Step, 3> steps_;
  float scores_factor_ = 1.f;  // of whole numbers
  bool is_whole_ = false;      // all four tensors are taken as whole numbers
  bool has_bytes_ = false;     // and those of K and V are bytes, side by side
  AttentionProblem problem_;
  // Of a tile, at most, whose K and V are multiplied as they are stored.
  struct {
    int64_t of_codes = 0, others = 0, of_runs = 0;
  } stored_rows_;
  // Why codes of K or V are not multiplied as such; empty if they are or there are none.
  std::string k_reason_, v_reason_;
  std::unique_ptr<const Plan> few_;  // of ragged queries, for sequences of few rows
  const AttentionProblem* few_problem() const { return few_ ? &few_->problem_ : nullptr; }
  int64_t worker_floats_ = 0;   // of each worker
  int64_t partial_floats_ = 0;  // of all partial results
  int64_t schedule_floats_ = 0;
};

// Of a softmax over queries, which is two plans (query_softmax.cc). Why they do not take `spec`, in
// a sentence; empty if they do.
std::string WhyNotTwoPasses(const AttentionSpec& spec);
// `spec` must be supported.
std::unique_ptr<Executable> MakeTwoPasses(const AttentionSpec& spec, const KernelSet& kernels);

}  // namespace kvant::cpu

#endif  // KVANT_BACKENDS_CPU_ATTENTION_PLAN_H_
