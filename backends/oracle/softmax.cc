#include <cmath>
#include <limits>

#include "kvant/backends/oracle/ops.h"

namespace kvant::oracle {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// One line of `length` elements, `step` apart, of which some exist. Returns its statistics.
double SoftMaxLine(const double* x, double* y, int64_t length, int64_t step,
                   const Existing& existing, bool inf_as_zero) {
  double max = -kInf;
  bool masked = true;  // every element is -inf
  for (int64_t i = existing.first; i < existing.end; ++i) {
    const double value = x[i * step];
    if (value > max) max = value;
    if (value != -kInf) masked = false;
  }
  if (masked && inf_as_zero) {
    for (int64_t i = 0; i < length; ++i) y[i * step] = 0;
    return 0;
  }
  double sum = 0;
  for (int64_t i = 0; i < length; ++i) {
    const bool exists = existing.first <= i && i < existing.end;
    y[i * step] = std::exp((exists ? x[i * step] : -kInf) - max);
    sum += y[i * step];
  }
  for (int64_t i = 0; i < length; ++i) y[i * step] /= sum;
  return sum == 0 ? std::numeric_limits<double>::quiet_NaN() : max + std::log(sum);  // of nothing
}

}  // namespace

absl::StatusOr<Array> EvalSoftMax(OpContext& context) {
  const double* x = context.in(0).data();
  const Dims dims = context.in(0).dims;
  const AxisView axis(dims, context.op.Get<Attr::kAxis>());
  const bool inf_as_zero = context.op.Get<Attr::kMode>() == "inf_as_zero";
  Array y = context.NewOutput(dims);
  Array* const stats = context.Output(1);
  ForEachInTasks(context.executor, axis.vectors(), /*of_task=*/16, [&](int64_t i) {
    const int64_t first = axis.Begin(i), row = i * dims[0] / axis.vectors();
    const Existing existing =
        ExistingOf(context.Find("lengths"), context.Find("first"), axis.length, row);
    const double stat =
        SoftMaxLine(x + first, y.data() + first, axis.length, axis.inner, existing, inf_as_zero);
    if (stats) stats->values[i] = stat;
  });
  return y;
}

// diff_src = dst * (diff_dst - sum(dst * diff_dst)), the sum along the axis.
absl::StatusOr<Array> EvalSoftMaxBackward(OpContext& context) {
  const double* diff = context.in(0).data();
  const double* probs = context.in(1).data();
  Array result(context.in(0).dims);
  const AxisView axis(result.dims, context.op.Get<Attr::kAxis>());
  for (int64_t line = 0; line < axis.vectors(); ++line) {
    const int64_t first = axis.Begin(line), end = first + axis.length * axis.inner;
    double sum = 0;
    for (int64_t i = first; i < end; i += axis.inner) sum += probs[i] * diff[i];
    for (int64_t i = first; i < end; i += axis.inner) {
      result.values[i] = probs[i] * (diff[i] - sum);
    }
  }
  return result;
}

}  // namespace kvant::oracle
