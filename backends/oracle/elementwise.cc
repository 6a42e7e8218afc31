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
  ForEachRow<0>(context.executor, y.dims, {}, [&](int64_t first, const auto&) {
    const int64_t length = y.dims.empty() ? 1 : y.dims.back();
    for (int64_t i = first; i < first + length; ++i) y.values[i] = fn(x[i]);
  });
  context.outputs[0] = std::move(y);
  return absl::OkStatus();
}

template <typename Fn>
absl::Status Binary(OpContext& context, Fn fn) {
  const double* a = context.in(0).data();
  const double* b = context.in(1).data();
  const Dims dims = BroadcastDims(context.in(0).dims, context.in(1).dims);
  const IndexMap a_map = BroadcastMap(context.in(0).dims, dims);
  const IndexMap b_map = BroadcastMap(context.in(1).dims, dims);
  const std::vector<int64_t>& a_columns = a_map.axes.back();
  const std::vector<int64_t>& b_columns = b_map.axes.back();
  Array y = context.NewOutput(dims);
  const bool rounds = context.out_desc(0).type == kS32;
  ForEachRow<2>(context.executor, dims, {&a_map, &b_map}, [&](int64_t first, const auto& bases) {
    for (size_t j = 0; j < a_columns.size(); ++j) {
      const double value = fn(a[bases[0] + a_columns[j]], b[bases[1] + b_columns[j]]);
      y.values[first + j] = rounds ? RoundTo(kS32, value) : value;
    }
  });
  context.outputs[0] = std::move(y);
  return absl::OkStatus();
}

}  // namespace

absl::Status EvalAdd(OpContext& context) {
  return Binary(context, [](double a, double b) { return a + b; });
}

absl::Status EvalSubtract(OpContext& context) {
  return Binary(context, [](double a, double b) { return a - b; });
}

absl::Status EvalMultiply(OpContext& context) {
  return Binary(context, [](double a, double b) { return a * b; });
}

absl::Status EvalDivide(OpContext& context) {
  const auto is_integer = [](const LogicalTensor& desc) { return desc.type == kS32; };
  if (is_integer(context.in_desc(0)) && is_integer(context.in_desc(1)) &&
      is_integer(context.out_desc(0))) {
    return Binary(context, [](double a, double b) { return std::trunc(a / b); });
  }
  return Binary(context, [](double a, double b) { return a / b; });
}

absl::Status EvalMaximum(OpContext& context) {
  return Binary(context, [](double a, double b) { return a < b ? b : a; });
}

absl::Status EvalMinimum(OpContext& context) {
  return Binary(context, [](double a, double b) { return b < a ? b : a; });
}

absl::Status EvalGreaterEqual(OpContext& context) {
  return Binary(context, [](double a, double b) { return a >= b ? 1.0 : 0.0; });
}

absl::Status EvalExp(OpContext& context) {
  return Unary(context, [](double x) { return std::exp(x); });
}

absl::Status EvalTanh(OpContext& context) {
  return Unary(context, [](double x) { return std::tanh(x); });
}

absl::Status EvalReLU(OpContext& context) {
  return Unary(context, [](double x) { return x < 0 ? 0.0 : x; });
}

absl::Status EvalSigmoid(OpContext& context) {
  return Unary(context, [](double x) { return 1 / (1 + std::exp(-x)); });
}

absl::Status EvalSqrt(OpContext& context) {
  return Unary(context, [](double x) { return std::sqrt(x); });
}

absl::Status EvalSquare(OpContext& context) {
  return Unary(context, [](double x) { return x * x; });
}

absl::Status EvalAbs(OpContext& context) {
  return Unary(context, [](double x) { return std::abs(x); });
}

absl::Status EvalReciprocal(OpContext& context) {
  return Unary(context, [](double x) { return 1 / x; });
}

absl::Status EvalLog(OpContext& context) {
  return Unary(context, [](double x) { return std::log(x); });
}

absl::Status EvalGELU(OpContext& context) {
  if (context.op.attrs.GetOr(Attr::kMode, std::string()) == "gelu_tanh") {
    const double root = std::sqrt(2 / std::acos(-1.0));
    return Unary(context, [root](double x) {
      return 0.5 * x * (1 + std::tanh(root * (x + 0.044715 * x * x * x)));
    });
  }
  return Unary(context, [](double x) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))); });
}

// Values are kept in f64; they are rounded where they are stored.
absl::Status EvalTypeCast(OpContext& context) {
  context.outputs[0] = context.Take(0);
  return absl::OkStatus();
}

absl::Status EvalSelect(OpContext& context) {
  const Array& condition = context.in(0);
  const double* x = context.in(1).data();
  const double* y = context.in(2).data();
  const Dims dims =
      BroadcastDims(condition.dims, BroadcastDims(context.in(1).dims, context.in(2).dims));
  const IndexMap c_map = BroadcastMap(condition.dims, dims);
  const IndexMap x_map = BroadcastMap(context.in(1).dims, dims);
  const IndexMap y_map = BroadcastMap(context.in(2).dims, dims);
  const double* c = condition.data();
  Array z = context.NewOutput(dims);
  ForEachRow<3>(context.executor, dims, {&c_map, &x_map, &y_map},
                [&](int64_t first, const auto& bases) {
                  for (size_t j = 0; j < c_map.axes.back().size(); ++j) {
                    z.values[first + j] = c[bases[0] + c_map.axes.back()[j]] != 0
                                              ? x[bases[1] + x_map.axes.back()[j]]
                                              : y[bases[2] + y_map.axes.back()[j]];
                  }
                });
  context.outputs[0] = std::move(z);
  return absl::OkStatus();
}

absl::Status EvalGenIndex(OpContext& context) {
  const int64_t rank = static_cast<int64_t>(context.out_dims(0).size());
  const int64_t axis = FromFront(context.op.attrs.GetOr<int64_t>(Attr::kAxis, 0), rank);
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
  ForEachRow<0>(context.executor, dims, {}, [&](int64_t first, const auto&) {
    const int64_t length = dims.empty() ? 1 : dims.back();
    for (int64_t i = first; i < first + length; ++i) {
      const bool kept = DropoutKeeps(seed, offset, static_cast<uint64_t>(i), probability);
      y.values[i] = kept ? x[i] / (1 - probability) : 0.0;
      if (with_mask) mask.values[i] = kept;
    }
  });
  context.outputs[0] = std::move(y);
  if (with_mask) context.outputs[1] = std::move(mask);
  return absl::OkStatus();
}

}  // namespace kvant::oracle
