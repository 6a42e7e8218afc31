// MergeAttention: to merge is to attend to the parts, whose statistics are the scores and whose
// outputs are the values.
#include <algorithm>
#include <limits>
#include <vector>

#include "kvant/backends/reference/lowering.h"
#include "kvant/backends/reference/pieces.h"

namespace kvant::reference {

absl::StatusOr<Array> LowerMergeAttention(const Op& op, Lowering& lowering) {
  constexpr float kNegInf = -std::numeric_limits<float>::infinity();
  Plan& plan = lowering.plan;
  const Dims dims = lowering.OutputDims(op, 0);
  const int64_t channels = dims.back();
  const int64_t rows = ElementsOf(absl::MakeSpan(dims).first(dims.size() - 1));
  std::vector<Array> scores, values;
  for (int i = 0; i < static_cast<int>(op.inputs.size()); i += 2) {
    const Array score = Reshaped(lowering.Input(op, i + 1), {rows, 1});
    const Array value = Reshaped(lowering.Input(op, i), {rows, channels});
    // A weight of 0 must meet no NaN in what does not count.
    const Array counted = plan.NewArray({rows, channels});
    plan.AddStep({score, value}, {counted}, [=](const RunContext& context) {
      context.executor.ParallelFor(rows, [&](int64_t row, int) {
        const float* const from = context.data(value) + row * channels;
        float* const to = context.data(counted) + row * channels;
        if (context.data(score)[row] == kNegInf) {
          std::fill_n(to, channels, 0.f);
        } else {
          std::copy_n(from, channels, to);
        }
      });
    });
    scores.push_back(score);
    values.push_back(Reshaped(counted, {rows, 1, channels}));
  }
  const SoftMaxResult weights = SoftMax(
      plan, Concat(plan, scores, 1),
      {.inf_as_zero = true, .with_stats = lowering.HasOutput(op, 1), .stats_of_empty = kNegInf});
  const auto parts = static_cast<int64_t>(scores.size());
  const Array merged = MatMul(plan, Reshaped(weights.probs, {rows, 1, parts}),
                              Concat(plan, values, 1), false, false);
  if (weights.stats) lowering.SetOutput(op, 1, *weights.stats);
  return Reshaped(merged, dims);
}

}  // namespace kvant::reference
