// SoftMax through oneDNN. It gives NaN for a row of -inf whatever the mode, so such rows are found
// before and written after it; statistics are computed here.
#include <cmath>
#include <limits>

#include "kvant/backends/loops.h"
#include "kvant/backends/reference/lowering.h"
#include "kvant/backends/reference/onednn.h"
#include "kvant/backends/reference/pieces.h"

namespace kvant::reference {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kLinesPerTask = 16;

// -inf for a line of nothing but -inf, whatever else for others: their largest element, or NaN.
float MaxOf(const float* x, const AxisView& lines) {
  float max = -kInf;
  for (int64_t i = 0; i < lines.length; ++i) {
    const float value = x[i * lines.inner];
    if (value > max || std::isnan(value)) max = value;
  }
  return max;
}

float StatOf(const float* x, const AxisView& lines, float max) {
  double sum = 0;
  for (int64_t i = 0; i < lines.length; ++i) sum += std::exp(x[i * lines.inner] - max);
  // Of nothing it is NaN, not -inf.
  return sum == 0 ? std::numeric_limits<float>::quiet_NaN()
                  : static_cast<float>(max + std::log(sum));
}

// The largest element of each line, and the statistics if asked for.
Array MaxAndStats(Plan& plan, const Array& x, const AxisView& lines, const SoftMaxOptions& options,
                  const Array& stats) {
  Array max = plan.NewArray({lines.vectors()});
  plan.AddStep({x}, {max, stats}, [=](const RunContext& context) {
    ForEachInTasks(context.executor, lines.vectors(), kLinesPerTask, [&](int64_t line) {
      const float* row = context.data(x) + lines.Begin(line);
      const float row_max = MaxOf(row, lines);
      context.data(max)[line] = row_max;
      if (!stats) return;
      const bool masked = row_max == -kInf && options.inf_as_zero;
      context.data(stats)[line] = masked ? options.stats_of_empty : StatOf(row, lines, row_max);
    });
  });
  return max;
}

// `y` with the lines of -inf written as the mode wants.
Array WriteMaskedLines(Plan& plan, const Array& y, const Array& max, const AxisView& lines,
                       bool inf_as_zero) {
  Array result = plan.NewArray(y.dims);
  const float value = inf_as_zero ? 0.f : std::numeric_limits<float>::quiet_NaN();
  plan.AddStep(
      {y, max}, {result},
      [=](const RunContext& context) {
        const float* from = context.data(y);
        float* to = context.data(result);
        ForEachInTasks(context.executor, lines.vectors(), kLinesPerTask, [&](int64_t line) {
          const bool masked = context.data(max)[line] == -kInf;
          if (from == to && !masked) return;
          const int64_t begin = lines.Begin(line);
          for (int64_t i = 0; i < lines.length; ++i) {
            const int64_t at = begin + i * lines.inner;
            to[at] = masked ? value : from[at];
          }
        });
      },
      /*overwrites=*/0);
  return result;
}

}  // namespace

SoftMaxResult SoftMax(Plan& plan, const Array& x, const SoftMaxOptions& options) {
  SoftMaxResult result;
  const int64_t axis = FromFront(options.axis, x.dims.size());
  const AxisView lines(x.dims, axis);
  if (options.with_stats) {
    Dims dims = x.dims;
    dims[axis] = 1;
    result.stats = plan.NewArray(dims);
  }
  const Array max = MaxAndStats(plan, x, lines, options, result.stats);
  const Array y = plan.NewArray(x.dims);
  result.probs = y;
  if (y.elements() == 0) return result;
  const auto desc = DenseDesc({lines.outer, lines.length, lines.inner});
  const dnnl::softmax_forward::primitive_desc description(
      CpuEngine(), dnnl::prop_kind::forward_inference, dnnl::algorithm::softmax_accurate, desc,
      desc, /*axis=*/1, UserScratchpad());
  AddPrimitive(plan, dnnl::softmax_forward(description), description.scratchpad_desc(),
               {{DNNL_ARG_SRC, x, desc}}, {DNNL_ARG_DST, y, desc}, /*overwrites=*/0);
  result.probs = WriteMaskedLines(plan, y, max, lines, options.inf_as_zero);
  return result;
}

absl::StatusOr<Array> LowerSoftMax(Lowering& lowering) {
  const SoftMaxOptions options{.axis = lowering.op().Get<Attr::kAxis>(),
                               .inf_as_zero = lowering.op().Get<Attr::kMode>() == "inf_as_zero",
                               .with_stats = lowering.HasOutput(1)};
  Array scores = lowering.Input(0);
  if (const auto lengths = lowering.FindInput("lengths")) {
    scores = KeepExisting(lowering.plan, scores, {lengths, lowering.FindInput("first")},
                          options.axis, -kInf);
  }
  const SoftMaxResult result = SoftMax(lowering.plan, scores, options);
  if (result.stats) lowering.SetOutput(1, result.stats);
  return result.probs;
}

absl::StatusOr<Array> LowerSoftMaxBackward(Lowering& lowering) {
  const Array diff = lowering.Input(0);
  const Array probs = lowering.Input(1);
  const size_t rank = diff.dims.size();
  const int64_t axis = FromFront(lowering.op().Get<Attr::kAxis>(), rank);
  Plan& plan = lowering.plan;
  // dst * (diff_dst - sum(dst * diff_dst)): the primitive of oneDNN has no scratch of the caller's
  // and no types beyond these pieces.
  const Array product = Binary(plan, dnnl::algorithm::binary_mul, probs, diff);
  const Array sum = Reduce(plan, dnnl::algorithm::reduction_sum, product, {axis});
  const Array centred = Binary(plan, dnnl::algorithm::binary_sub, diff, sum);
  return Binary(plan, dnnl::algorithm::binary_mul, probs, centred);
}

}  // namespace kvant::reference
