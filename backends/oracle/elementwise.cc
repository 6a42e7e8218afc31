// Ops that make each element of the result from one element of each input.
#include <cmath>

#include "kvant/backends/oracle/ops.h"
#include "kvant/kernels/philox.h"

namespace kvant::oracle {
namespace {

template <typename Fn>
absl::Status Unary(OpContext& context, Fn fn) {
  const double* x = context.in(0).data();
  Array y = context.NewOutput(Dims(context.in(0).dims));
  ForEach<0>(context.executor, y.dims, {}, [&](int64_t i, const auto&) { y.values[i] = fn(x[i]); });
  context.outputs[0] = std::move(y);
  return absl::OkStatus();
}

template <typename Fn>
absl::Status Binary(OpContext& context, Fn fn) {
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
  context.outputs[0] = std::move(y);
  return absl::OkStatus();
}

// What an element becomes; an op without a formula does not compile.
template <OpKind kind>
double Formula(double x) = delete;
template <OpKind kind>
double Formula(double a, double b) = delete;

#define KVANT_FORMULA(kind, formula)          \
  template <>                                 \
  double Formula<OpKind::k##kind>(double x) { \
    return formula;                           \
  }
KVANT_FORMULA(Exp, std::exp(x))
KVANT_FORMULA(Tanh, std::tanh(x))
KVANT_FORMULA(ReLU, x < 0 ? 0.0 : x)
KVANT_FORMULA(Sigmoid, 1 / (1 + std::exp(-x)))
KVANT_FORMULA(Sqrt, std::sqrt(x))
KVANT_FORMULA(Square, x* x)
KVANT_FORMULA(Abs, std::abs(x))
KVANT_FORMULA(Reciprocal, 1 / x)
KVANT_FORMULA(Log, std::log(x))
KVANT_FORMULA(GELU, 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))))
#undef KVANT_FORMULA

double GeluByTanh(double x) {
  static const double root = std::sqrt(2 / std::acos(-1.0));
  return 0.5 * x * (1 + std::tanh(root * (x + 0.044715 * x * x * x)));
}

#define KVANT_FORMULA(kind, formula)                    \
  template <>                                           \
  double Formula<OpKind::k##kind>(double a, double b) { \
    return formula;                                     \
  }
KVANT_FORMULA(Add, a + b)
KVANT_FORMULA(Subtract, a - b)
KVANT_FORMULA(Multiply, a* b)
KVANT_FORMULA(Divide, a / b)
KVANT_FORMULA(Maximum, a < b ? b : a)
KVANT_FORMULA(Minimum, b < a ? b : a)
#undef KVANT_FORMULA

}  // namespace

absl::Status EvalElementwise(OpContext& context) {
  if (context.op.Get<Attr::kMode>() == "gelu_tanh") return Unary(context, GeluByTanh);
  switch (context.op.kind) {
#define KVANT_OP(...)
#define KVANT_BINARY(kind)
#define KVANT_ELEMENTWISE(kind, attributes) \
  case OpKind::k##kind:                     \
    return Unary(context, [](double x) { return Formula<OpKind::k##kind>(x); });
#include "kvant/graph/ops.inc"
#undef KVANT_OP
    default:
      return absl::OkStatus();
  }
}

absl::Status EvalBinary(OpContext& context) {
  const auto is_integer = [](const LogicalTensor& desc) { return desc.type == kS32; };
  if (context.op.kind == OpKind::kDivide && is_integer(context.in_desc(0)) &&
      is_integer(context.in_desc(1)) && is_integer(context.out_desc(0))) {
    return Binary(context, [](double a, double b) { return std::trunc(a / b); });
  }
  switch (context.op.kind) {
#define KVANT_OP(...)
#define KVANT_ELEMENTWISE(kind, attributes)
#define KVANT_BINARY(kind) \
  case OpKind::k##kind:    \
    return Binary(context, [](double a, double b) { return Formula<OpKind::k##kind>(a, b); });
#include "kvant/graph/ops.inc"
#undef KVANT_OP
    default:
      return absl::OkStatus();
  }
}

absl::Status EvalGreaterEqual(OpContext& context) {
  return Binary(context, [](double a, double b) { return a >= b ? 1.0 : 0.0; });
}

// Values are kept in f64; they are rounded where they are stored.
absl::Status EvalTypeCast(OpContext& context) {
  context.outputs[0] = context.Take(0);
  return absl::OkStatus();
}

absl::Status EvalSelect(OpContext& context) {
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
  context.outputs[0] = std::move(z);
  return absl::OkStatus();
}

absl::Status EvalGenIndex(OpContext& context) {
  const int64_t rank = static_cast<int64_t>(context.out_dims(0).size());
  const int64_t axis = FromFront(context.op.Get<Attr::kAxis>(), rank);
  if (axis < 0 || axis >= rank) {
    return context.Error(ErrorKind::kInvalidShape, "axis is outside of the rank");
  }
  Dims dims(rank, 1);
  dims[axis] = context.out_dims(0)[axis];
  Array y(dims);
  for (int64_t i = 0; i < y.size(); ++i) y.values[i] = static_cast<double>(i);
  context.outputs[0] = std::move(y);
  return absl::OkStatus();
}

absl::Status EvalDropout(OpContext& context) {
  for (int port = 1; port <= 3; ++port) {
    if (context.in(port).size() == 1) continue;
    return context.Error(ErrorKind::kInvalidShape, "seed, offset and probability are scalars");
  }
  const auto integer = [&](int port) {
    const Array& scalar = context.in(port);
    return static_cast<uint64_t>(
        scalar.exact.value_or(static_cast<int64_t>(scalar.values.front())));
  };
  const uint64_t seed = integer(1);
  const uint64_t offset = integer(2);
  const double probability = context.in(3).values.front();
  if (!(probability >= 0 && probability <= 1)) {
    return context.Error(ErrorKind::kInvalidArguments, "the probability is not in [0, 1]");
  }
  const bool with_mask = context.outputs.size() > 1;
  const double* x = context.in(0).data();
  const Dims dims = context.in(0).dims;
  Array y = context.NewOutput(dims);
  Array mask(with_mask ? dims : Dims{0});
  ForEach<0>(context.executor, dims, {}, [&](int64_t i, const auto&) {
    const bool kept = DropoutKeeps(seed, offset, static_cast<uint64_t>(i), probability);
    y.values[i] = kept ? x[i] / (1 - probability) : 0.0;
    if (with_mask) mask.values[i] = kept;
  });
  context.outputs[0] = std::move(y);
  if (with_mask) context.outputs[1] = std::move(mask);
  return absl::OkStatus();
}

}  // namespace kvant::oracle
