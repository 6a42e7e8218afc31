#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
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
  return max + std::log(sum);
}

}  // namespace

absl::Status EvalSoftMax(OpContext& context) {
  const double* x = context.in(0).data();
  const Dims dims = context.in(0).dims;
  const int64_t rank = static_cast<int64_t>(dims.size());
  const int64_t axis = FromFront(context.op.Get<Attr::kAxis>(), rank);
  if (axis < 0 || axis >= rank) {
    return context.Error(ErrorKind::kInvalidShape,
                         absl::StrCat("axis ", axis, " is outside of rank ", rank));
  }
  const bool inf_as_zero = context.op.Get<Attr::kMode>() == "inf_as_zero";
  const int64_t length = dims[axis];
  const int64_t inner = ElementsOf(absl::MakeSpan(dims).subspan(axis + 1));
  const int64_t lines = ElementsOf(absl::MakeSpan(dims).subspan(0, axis)) * inner;
  Array y = context.NewOutput(dims);
  const bool with_stats = context.outputs.size() > 1;
  Array stats(with_stats ? context.out_dims(1) : Dims{0});
  constexpr int64_t kTask = 16;
  context.executor.ParallelFor((lines + kTask - 1) / kTask, [&](int64_t task, int) {
    for (int64_t i = task * kTask; i < std::min(lines, (task + 1) * kTask); ++i) {
      const int64_t first = i / inner * length * inner + i % inner;
      const Existing existing =
          ExistingOf(context.Find("lengths"), context.Find("first"), length, i * dims[0] / lines);
      const double stat =
          SoftMaxLine(x + first, y.data() + first, length, inner, existing, inf_as_zero);
      if (with_stats) stats.values[i] = stat;
    }
  });
  context.outputs[0] = std::move(y);
  if (with_stats) context.outputs[1] = std::move(stats);
  return absl::OkStatus();
}

// diff_src = dst * (diff_dst - sum(dst * diff_dst)), the sum along the axis.
absl::Status EvalSoftMaxBackward(OpContext& context) {
  const double* diff = context.in(0).data();
  const double* probs = context.in(1).data();
  const Dims dims = context.in(0).dims;
  const int64_t rank = static_cast<int64_t>(dims.size());
  const int64_t axis = FromFront(context.op.Get<Attr::kAxis>(), rank);
  const int64_t length = dims[axis];
  const int64_t inner = ElementsOf(absl::MakeSpan(dims).subspan(axis + 1));
  const int64_t lines = ElementsOf(absl::MakeSpan(dims).subspan(0, axis)) * inner;
  Array result = Array(dims);
  for (int64_t line = 0; line < lines; ++line) {
    const int64_t first = line / inner * length * inner + line % inner;
    double sum = 0;
    for (int64_t i = 0; i < length; ++i) {
      sum += probs[first + i * inner] * diff[first + i * inner];
    }
    for (int64_t i = 0; i < length; ++i) {
      const int64_t at = first + i * inner;
      result.values[at] = probs[at] * (diff[at] - sum);
    }
  }
  context.outputs[0] = std::move(result);
  return absl::OkStatus();
}

}  // namespace kvant::oracle
