// Ops that make each element of the result from one element of each input.
#include <cmath>

#include "kvant/backends/oracle/ops.h"
#include "kvant/kernels/philox.h"

namespace kvant::oracle {
namespace {

template <typename Fn>
Array Unary(OpContext& context, Fn fn) {
  const double* x = context.in(0).data();
  Array y = context.NewOutput(context.in(0).dims);
  ForEach<0>(context.executor, y.dims, {}, [&](int64_t i, const auto&) { y.values[i] = fn(x[i]); });
  return y;
}

template <typename Fn>
Array Binary(OpContext& context, Fn fn) {
  const double* a = context.in(0).data();
  const double* b = context.in(1).data();
  const Dims dims = *Broadcast(context.in(0).dims, context.in(1).dims);
  const IndexMap a_map = GroupMap(context.in(0).dims, dims);
  const IndexMap b_map = GroupMap(context.in(1).dims, dims);
  Array y = context.NewOutput(dims);
  const bool rounds = context.out_desc(0).type == kS32;
  ForEach<2>(context.executor, dims, {&a_map, &b_map}, [&](int64_t i, const auto& at) {
    const double value = fn(a[at[0]], b[at[1]]);
    y.values[i] = rounds ? RoundTo(kS32, value) : value;
  });
  return y;
}

}  // namespace

#define KVANT_OF_ONE(kind, formula)                          \
  absl::StatusOr<Array> Eval##kind(OpContext& context) {     \
    return Unary(context, [](double x) { return formula; }); \
  }
KVANT_OF_ONE(Exp, std::exp(x))
KVANT_OF_ONE(Tanh, std::tanh(x))
KVANT_OF_ONE(ReLU, x < 0 ? 0.0 : x)
KVANT_OF_ONE(Sigmoid, 1 / (1 + std::exp(-x)))
KVANT_OF_ONE(Sqrt, std::sqrt(x))
KVANT_OF_ONE(Square, x* x)
KVANT_OF_ONE(Abs, std::abs(x))
KVANT_OF_ONE(Reciprocal, 1 / x)
KVANT_OF_ONE(Log, std::log(x))
#undef KVANT_OF_ONE

absl::StatusOr<Array> EvalGELU(OpContext& context) {
  if (context.op.Get<Attr::kMode>() == "gelu_erf") {
    return Unary(context, [](double x) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))); });
  }
  return Unary(context, [root = std::sqrt(2 / std::acos(-1.0))](double x) {
    return 0.5 * x * (1 + std::tanh(root * (x + 0.044715 * x * x * x)));
  });
}

#define KVANT_OF_TWO(kind, formula)                                     \
  absl::StatusOr<Array> Eval##kind(OpContext& context) {                \
    return Binary(context, [](double a, double b) { return formula; }); \
  }
KVANT_OF_TWO(Add, a + b)
KVANT_OF_TWO(Subtract, a - b)
KVANT_OF_TWO(Multiply, a* b)
KVANT_OF_TWO(Maximum, a < b || std::isnan(b) ? b : a)
KVANT_OF_TWO(Minimum, b < a || std::isnan(b) ? b : a)
KVANT_OF_TWO(GreaterEqual, a >= b ? 1.0 : 0.0)
#undef KVANT_OF_TWO

absl::StatusOr<Array> EvalDivide(OpContext& context) {
  const auto is_integer = [](const LogicalTensor& desc) { return desc.type == kS32; };
  if (is_integer(context.in_desc(0)) && is_integer(context.in_desc(1)) &&
      is_integer(context.out_desc(0))) {
    return Binary(context, [](double a, double b) { return std::trunc(a / b); });
  }
  return Binary(context, [](double a, double b) { return a / b; });
}

absl::StatusOr<Array> EvalSelect(OpContext& context) {
  const double* condition = context.in(0).data();
  const double* x = context.in(1).data();
  const double* y = context.in(2).data();
  const Dims dims =
      *Broadcast(context.in(0).dims, *Broadcast(context.in(1).dims, context.in(2).dims));
  const IndexMap condition_map = GroupMap(context.in(0).dims, dims);
  const IndexMap x_map = GroupMap(context.in(1).dims, dims);
  const IndexMap y_map = GroupMap(context.in(2).dims, dims);
  Array z = context.NewOutput(dims);
  ForEach<3>(context.executor, dims, {&condition_map, &x_map, &y_map},
             [&](int64_t i, const auto& at) {
               z.values[i] = condition[at[0]] != 0 ? x[at[1]] : y[at[2]];
             });
  return z;
}

absl::StatusOr<Array> EvalGenIndex(OpContext& context) {
  const size_t rank = context.out_dims(0).size();
  const int64_t axis = FromFront(context.op.Get<Attr::kAxis>(), rank);
  Dims dims(rank, 1);
  dims[axis] = context.out_dims(0)[axis];
  Array y(dims);
  for (int64_t i = 0; i < y.size(); ++i) y.values[i] = static_cast<double>(i);
  return y;
}

absl::StatusOr<Array> EvalDropout(OpContext& context) {
  const auto integer = [&](int port) {
    const Array& scalar = context.in(port);
    return static_cast<uint64_t>(
        scalar.exact.value_or(static_cast<int64_t>(scalar.values.front())));
  };
  const uint64_t seed = integer(1);
  const uint64_t offset = integer(2);
  const double probability = context.in(3).values.front();
  if (!(probability >= 0 && probability <= 1)) {
    return ArgumentsError(context.op, "probability ", probability, " is not in [0, 1]");
  }
  const double* x = context.in(0).data();
  const Dims dims = context.in(0).dims;
  Array y = context.NewOutput(dims);
  Array* const mask = context.Output(1);
  ForEach<0>(context.executor, dims, {}, [&](int64_t i, const auto&) {
    const bool kept = DropoutKeeps(seed, offset, static_cast<uint64_t>(i), probability);
    y.values[i] = kept ? x[i] / (1 - probability) : 0.0;
    if (mask) mask->values[i] = kept;
  });
  return y;
}

}  // namespace kvant::oracle
