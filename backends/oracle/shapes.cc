// Ops that move elements, and reductions.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "kvant/backends/oracle/ops.h"

namespace kvant::oracle {
namespace {

// Result element i is init combined with every element of the input that reduces to it, in
// row-major order.
template <typename Fn>
Array Reduce(OpContext& context, double init, Fn combine) {
  const Array& x = context.in(0);
  Dims kept_dims = x.dims;
  for (int64_t axis : context.op.Get<Attr::kAxes>()) {
    kept_dims[FromFront(axis, x.dims.size())] = 1;
  }
  Array y(context.out_dims(0));
  std::ranges::fill(y.values, init);
  const IndexMap map = GroupMap(kept_dims, x.dims);
  // Serially, because rows share results.
  ForEach<1>(*MakeSerialExecutor(), x.dims, {&map}, [&](int64_t i, const auto& at) {
    y.values[at[0]] = combine(y.values[at[0]], x.values[i]);
  });
  return y;
}

}  // namespace

absl::StatusOr<Array> EvalReduceSum(OpContext& context) {
  return Reduce(context, 0, std::plus<>());
}

absl::StatusOr<Array> EvalReduceMean(OpContext& context) {
  Array y = Reduce(context, 0, std::plus<>());
  const double count = static_cast<double>(context.in(0).size()) / static_cast<double>(y.size());
  for (double& value : y.values) value /= count;
  return y;
}

absl::StatusOr<Array> EvalReduceMax(OpContext& context) {
  // A NaN stays.
  return Reduce(context, -std::numeric_limits<double>::infinity(),
                [](double a, double b) { return b > a || std::isnan(b) ? b : a; });
}

// Their elements are in the same order, of other dims or types. Values are kept in f64; they are
// rounded where they are stored.
absl::StatusOr<Array> EvalStaticReshape(OpContext& context) { return context.Take(0); }
absl::StatusOr<Array> EvalReorder(OpContext& context) { return context.Take(0); }
absl::StatusOr<Array> EvalTypeCast(OpContext& context) { return context.Take(0); }

absl::StatusOr<Array> EvalStaticTranspose(OpContext& context) {
  const Array& x = context.in(0);
  const auto order = context.op.Get<Attr::kOrder>();
  const Dims dense = DenseStrides(x.dims);
  Dims strides;
  for (int64_t axis : order) strides.push_back(dense[FromFront(axis, x.dims.size())]);
  const Dims& dims = context.out_dims(0);
  return Gather(context.executor, x, dims, StridedMap(dims, strides));
}

absl::StatusOr<Array> EvalSlice(OpContext& context) {
  const Array& x = context.in(0);
  Array y(context.out_dims(0));
  const int64_t axis = context.op.Get<Attr::kAxis>();
  const AxisView from(x.dims, axis), to(y.dims, axis);
  for (int64_t i = 0; i < to.outer; ++i) {
    const int64_t first = i * from.length + context.op.Get<Attr::kBegin>();
    std::copy_n(x.data() + first * to.inner, to.length * to.inner,
                y.data() + i * to.length * to.inner);
  }
  return y;
}

absl::StatusOr<Array> EvalConcat(OpContext& context) {
  Array y(context.out_dims(0));
  const int64_t axis = context.op.Get<Attr::kAxis>();
  const int64_t outer = AxisView(y.dims, axis).outer;
  double* to = y.data();
  for (int64_t i = 0; i < outer; ++i) {
    for (const OpContext::Input& input : context.inputs) {
      const AxisView from(input.array->dims, axis);
      const int64_t run = from.length * from.inner;
      to = std::copy_n(input.array->data() + i * run, run, to);
    }
  }
  return y;
}

// They compute nothing: End marks a value as wanted, and no Wildcard is compiled.
absl::StatusOr<Array> EvalEnd(OpContext&) { return Array(); }
absl::StatusOr<Array> EvalWildcard(OpContext&) { return Array(); }

}  // namespace kvant::oracle
