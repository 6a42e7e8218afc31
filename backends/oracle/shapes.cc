// Ops that move elements, and reductions.
#include <cmath>
#include <limits>

#include "kvant/backends/oracle/ops.h"

namespace kvant::oracle {
namespace {

// Result element i is init combined with every element of the input that reduces to it, in
// row-major order.
template <typename Fn>
absl::Status Reduce(OpContext& context, double init, Fn combine, bool mean = false) {
  const Array& x = context.in(0);
  const int64_t rank = static_cast<int64_t>(x.dims.size());
  std::vector<bool> reduced(rank, false);
  for (int64_t axis : context.op.Get<Attr::kAxes>()) {
    const int64_t d = FromFront(axis, rank);
    if (d < 0 || d >= rank) {
      return context.Error(ErrorKind::kInvalidShape, "an axis is outside of the rank");
    }
    reduced[d] = true;
  }
  Dims kept_dims = x.dims;
  for (int64_t d = 0; d < rank; ++d) kept_dims[d] = reduced[d] ? 1 : x.dims[d];
  Array y(context.out_dims(0));
  std::fill(y.values.begin(), y.values.end(), init);
  const IndexMap map = GroupMap(kept_dims, x.dims);
  // Serially, because rows share results.
  ForEach<1>(*MakeSerialExecutor(), x.dims, {&map}, [&](int64_t i, const auto& at) {
    y.values[at[0]] = combine(y.values[at[0]], x.values[i]);
  });
  if (mean && y.size() > 0) {
    const double count = static_cast<double>(x.size()) / static_cast<double>(y.size());
    for (double& value : y.values) value /= count;
  }
  context.outputs[0] = std::move(y);
  return absl::OkStatus();
}

absl::Status Relabel(OpContext& context) {
  Array y = context.Take(0);
  if (y.size() != ElementsOf(context.out_dims(0))) {
    return context.Error(ErrorKind::kInvalidShape, "the number of elements changes");
  }
  y.dims = context.out_dims(0);
  context.outputs[0] = std::move(y);
  return absl::OkStatus();
}

}  // namespace

absl::Status EvalReduceSum(OpContext& context) {
  return Reduce(context, 0, [](double a, double b) { return a + b; });
}

absl::Status EvalReduceMean(OpContext& context) {
  return Reduce(
      context, 0, [](double a, double b) { return a + b; }, /*mean=*/true);
}

absl::Status EvalReduceMax(OpContext& context) {
  // A NaN stays.
  return Reduce(context, -std::numeric_limits<double>::infinity(),
                [](double a, double b) { return b > a || std::isnan(b) ? b : a; });
}

absl::Status EvalStaticReshape(OpContext& context) { return Relabel(context); }

// Only memory differs, and there is none inside.
absl::Status EvalReorder(OpContext& context) { return Relabel(context); }

absl::Status EvalStaticTranspose(OpContext& context) {
  const Array& x = context.in(0);
  const auto order = context.op.Get<Attr::kOrder>();
  const int64_t rank = static_cast<int64_t>(x.dims.size());
  const Dims dense = DenseStrides(x.dims);
  Dims strides;
  for (int64_t axis : order) strides.push_back(dense[FromFront(axis, rank)]);
  const Dims& dims = context.out_dims(0);
  context.outputs[0] = Gather(context.executor, x, dims, StridedMap(dims, strides));
  return absl::OkStatus();
}

absl::Status EvalSlice(OpContext& context) {
  const Array& x = context.in(0);
  Array y(context.out_dims(0));
  const int64_t axis =
      FromFront(context.op.Get<Attr::kAxis>(), static_cast<int64_t>(x.dims.size()));
  const int64_t outer = ElementsOf(absl::MakeSpan(y.dims).subspan(0, axis));
  const int64_t inner = ElementsOf(absl::MakeSpan(y.dims).subspan(axis + 1));
  const int64_t run = y.dims[axis] * inner, begin = context.op.Get<Attr::kBegin>() * inner;
  for (int64_t i = 0; i < outer; ++i) {
    std::copy_n(x.data() + i * x.dims[axis] * inner + begin, run, y.data() + i * run);
  }
  context.outputs[0] = std::move(y);
  return absl::OkStatus();
}

absl::Status EvalConcat(OpContext& context) {
  Array y(context.out_dims(0));
  const int64_t rank = static_cast<int64_t>(y.dims.size());
  const int64_t axis = FromFront(context.op.Get<Attr::kAxis>(), rank);
  if (axis < 0 || axis >= rank) {
    return context.Error(ErrorKind::kInvalidShape, "axis is outside of the rank");
  }
  // An input's part is one run of elements for each index of the axes before `axis`.
  const int64_t outer = ElementsOf(absl::MakeSpan(y.dims).subspan(0, axis));
  const int64_t inner = ElementsOf(absl::MakeSpan(y.dims).subspan(axis + 1));
  int64_t start = 0;
  for (const OpContext::Input& input : context.inputs) {
    const int64_t run = input.array->dims[axis] * inner;
    for (int64_t i = 0; i < outer; ++i) {
      std::copy_n(input.array->data() + i * run, run, y.data() + i * y.dims[axis] * inner + start);
    }
    start += run;
  }
  context.outputs[0] = std::move(y);
  return absl::OkStatus();
}

// Marks a value as wanted; there is nothing to compute.
absl::Status EvalEnd(OpContext&) { return absl::OkStatus(); }

absl::Status EvalWildcard(OpContext& context) {
  return context.Error(ErrorKind::kUnimplemented, "a wildcard has no meaning to evaluate");
}

}  // namespace kvant::oracle
