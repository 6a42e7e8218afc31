// Elementwise ops: floats through oneDNN; the rest, which it has none of, in plain code.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "kvant/backends/loops.h"
#include "kvant/backends/reference/lowering.h"
#include "kvant/backends/reference/onednn.h"
#include "kvant/backends/reference/pieces.h"
#include "kvant/backends/reference/rows.h"
#include "kvant/kernels/philox.h"

namespace kvant::reference {
namespace {

using dnnl::algorithm;

bool Commutes(algorithm op) {
  return op == algorithm::binary_add || op == algorithm::binary_mul ||
         op == algorithm::binary_max || op == algorithm::binary_min;
}

double Evaluate(algorithm op, double a, double b) {
  if (op == algorithm::binary_add) return a + b;
  if (op == algorithm::binary_sub) return a - b;
  if (op == algorithm::binary_mul) return a * b;
  if (op == algorithm::binary_div) return a / b;
  if (op == algorithm::binary_max) return std::max(a, b);
  if (op == algorithm::binary_min) return std::min(a, b);
  return a >= b ? 1 : 0;  // binary_ge
}

// Where an operand or the result is s32. f64 holds sums and differences of them exactly. A quotient
// of integers is cut towards zero, as in C, where it is one.
Array MixedBinary(Plan& plan, algorithm op, const Array& a, const Array& b, const Dims& dims,
                  Storage storage) {
  Array result = plan.NewArray(dims, storage);
  const bool to_integers = storage == Storage::kS32;
  const bool cuts = op == algorithm::binary_div && to_integers && a.storage == Storage::kS32 &&
                    b.storage == Storage::kS32;
  plan.AddStep(
      {a, b}, {result},
      [=, walk = Walk(dims, {DenseStrides(dims), BroadcastStrides(a.dims, dims),
                             BroadcastStrides(b.dims, dims)})](const RunContext& context) {
        walk.ForEachRow(context.executor, [&](const Row& row) {
          for (int64_t i = 0; i < row.count; ++i) {
            double value = Evaluate(op, context.value(a, row.offset[1] + i * row.stride[1]),
                                    context.value(b, row.offset[2] + i * row.stride[2]));
            if (cuts) value = std::trunc(value);
            const int64_t at = row.offset[0] + i * row.stride[0];
            if (to_integers) {
              context.data<int32_t>(result)[at] = static_cast<int32_t>(RoundTo(kS32, value));
            } else {
              context.data(result)[at] = static_cast<float>(value);
            }
          }
        });
      });
  return result;
}

Array FloatBinary(Plan& plan, algorithm op, const Array& a, const Array& b, const Dims& dims) {
  Array result = plan.NewArray(dims);
  if (result.elements() == 0) return result;
  const Walk walk(dims, {BroadcastStrides(a.dims, dims), BroadcastStrides(b.dims, dims)});
  const auto a_desc = DenseDesc(walk.extents(0)), b_desc = DenseDesc(walk.extents(1));
  const auto result_desc = DenseDesc(walk.dims());
  const dnnl::binary::primitive_desc description(CpuEngine(), op, a_desc, b_desc, result_desc,
                                                 UserScratchpad());
  AddPrimitive(plan, dnnl::binary(description), description.scratchpad_desc(),
               {{DNNL_ARG_SRC_0, a, a_desc}, {DNNL_ARG_SRC_1, b, b_desc}},
               {DNNL_ARG_DST, result, result_desc}, /*overwrites=*/0);
  return result;
}

// Elements of x, y (of the size of T) by condition.
template <typename T>
void SelectRow(const RunContext& context, const Row& row, const Array& result,
               const Array& condition, const Array& x, const Array& y) {
  T* to = context.data<T>(result) + row.offset[0];
  const float* c = context.data(condition) + row.offset[1];
  const T* a = context.data<T>(x) + row.offset[2];
  const T* b = context.data<T>(y) + row.offset[3];
  for (int64_t i = 0; i < row.count; ++i) {
    to[i * row.stride[0]] = c[i * row.stride[1]] != 0 ? a[i * row.stride[2]] : b[i * row.stride[3]];
  }
}

// Of a probability that is a constant now, and of one that comes through a port at each execution.
absl::Status CheckProbability(Lowering& lowering, int index) {
  const auto check = [op = lowering.op().ToString()](double value, std::string_view text) {
    if (value >= 0 && value <= 1) return absl::OkStatus();
    return InvalidArguments(op, ": probability ", text, " is not in [0, 1]");
  };
  const std::optional<Constant>& constant = lowering.InputTensor(index).value;
  if (constant) return check(constant->value(), constant->ToString());
  if (const int port = lowering.PortOf(index); port != kNoPort) {
    lowering.plan.AddCheck([=](absl::Span<const void* const> inputs) {
      const double value = LoadElement(kF32, inputs[port], 0);
      return check(value, absl::StrCat(value, " (element 0)"));
    });
  }
  return absl::OkStatus();
}

int64_t ScalarOf(const RunContext& context, const Array& array) {
  if (array.storage == Storage::kS64) return *context.data<int64_t>(array);
  return *context.data<int32_t>(array);
}

Array LowerEltwise(Lowering& lowering, algorithm kind, float alpha = 0, float beta = 0) {
  return Eltwise(lowering.plan, kind, lowering.CompactInput(0), alpha, beta);
}

Array LowerBinary(Lowering& lowering, algorithm kind) {
  return Binary(lowering.plan, kind, lowering.CompactInput(0), lowering.CompactInput(1),
                StorageOf(lowering.OutputTensor(0).type));
}

}  // namespace

Array Eltwise(Plan& plan, algorithm kind, const Array& x, float alpha, float beta) {
  Array result = plan.NewArray(x.dims);
  if (result.elements() == 0) return result;
  const auto desc = DenseDesc({x.elements()});
  const dnnl::eltwise_forward::primitive_desc description(
      CpuEngine(), dnnl::prop_kind::forward_inference, kind, desc, desc, alpha, beta,
      UserScratchpad());
  AddPrimitive(plan, dnnl::eltwise_forward(description), description.scratchpad_desc(),
               {{DNNL_ARG_SRC, x, desc}}, {DNNL_ARG_DST, result, desc}, /*overwrites=*/0);
  return result;
}

Array Binary(Plan& plan, algorithm kind, Array a, Array b, Storage result) {
  const Dims dims = *Broadcast(a.dims, b.dims);
  for (const Storage storage : {a.storage, b.storage, result}) {
    if (storage == Storage::kS32) return MixedBinary(plan, kind, a, b, dims, result);
  }
  // oneDNN wants the operand of the result's shape first.
  const int64_t elements = ElementsOf(dims);
  if (a.elements() != elements && b.elements() == elements && Commutes(kind)) std::swap(a, b);
  if (a.elements() != elements) a = Expanded(plan, a, dims);
  return FloatBinary(plan, kind, a, b, dims);
}

Array Select(Plan& plan, const Array& condition, const Array& x, const Array& y, const Dims& dims) {
  Array result = plan.NewArray(dims, x.storage);
  plan.AddStep(
      {condition, x, y}, {result},
      [=, walk = Walk(dims, {DenseStrides(dims), BroadcastStrides(condition.dims, dims),
                             BroadcastStrides(x.dims, dims), BroadcastStrides(y.dims, dims)})](
          const RunContext& context) {
        walk.ForEachRow(context.executor, [&](const Row& row) {
          if (BytesOf(result.storage) == 8) {
            SelectRow<int64_t>(context, row, result, condition, x, y);
          } else {
            SelectRow<int32_t>(context, row, result, condition, x, y);
          }
        });
      },
      /*overwrites=*/x.elements() == result.elements() ? 1 : 2);
  return result;
}

Array Expanded(Plan& plan, const Array& x, absl::Span<const int64_t> dims) {
  if (x.elements() == ElementsOf(dims)) return Reshaped(x, Dims(dims.begin(), dims.end()));
  return Gather(plan, x, Dims(dims.begin(), dims.end()), BroadcastStrides(x.dims, dims));
}

#define KVANT_ELTWISE(kind, ...)                          \
  absl::StatusOr<Array> Lower##kind(Lowering& lowering) { \
    return LowerEltwise(lowering, __VA_ARGS__);           \
  }
KVANT_ELTWISE(Exp, algorithm::eltwise_exp)
KVANT_ELTWISE(Tanh, algorithm::eltwise_tanh)
KVANT_ELTWISE(ReLU, algorithm::eltwise_relu)
KVANT_ELTWISE(Sigmoid, algorithm::eltwise_logistic)
KVANT_ELTWISE(Sqrt, algorithm::eltwise_sqrt)
KVANT_ELTWISE(Square, algorithm::eltwise_square)
KVANT_ELTWISE(Abs, algorithm::eltwise_abs)
KVANT_ELTWISE(Reciprocal, algorithm::eltwise_pow, 1.f, -1.f)
KVANT_ELTWISE(Log, algorithm::eltwise_log)
KVANT_ELTWISE(GELU, lowering.op().Get<Attr::kMode>() == "gelu_tanh" ? algorithm::eltwise_gelu_tanh
                                                                    : algorithm::eltwise_gelu_erf)
#undef KVANT_ELTWISE

#define KVANT_TWO(kind, how)                               \
  absl::StatusOr<Array> Lower##kind(Lowering& lowering) {  \
    return LowerBinary(lowering, algorithm::binary_##how); \
  }
KVANT_TWO(Add, add)
KVANT_TWO(Subtract, sub)
KVANT_TWO(Multiply, mul)
KVANT_TWO(Divide, div)
KVANT_TWO(Maximum, max)
KVANT_TWO(Minimum, min)
KVANT_TWO(GreaterEqual, ge)
#undef KVANT_TWO

absl::StatusOr<Array> LowerSelect(Lowering& lowering) {
  return Select(lowering.plan, lowering.CompactInput(0), lowering.CompactInput(1),
                lowering.CompactInput(2), lowering.OutputDims(0));
}

// 0, 1, ..., of dims that are 1 along the other axes.
absl::StatusOr<Array> LowerGenIndex(Lowering& lowering) {
  const Dims& dims = lowering.OutputDims(0);
  const int64_t axis = FromFront(lowering.op().Get<Attr::kAxis>(), dims.size());
  Dims compact(dims.size(), 1);
  compact[axis] = dims[axis];
  const Array result = lowering.plan.NewArray(compact, Storage::kS32);
  lowering.plan.AddStep({}, {result}, [=](const RunContext& context) {
    std::iota(context.data<int32_t>(result), context.data<int32_t>(result) + result.elements(), 0);
  });
  return result;
}

absl::StatusOr<Array> LowerDropout(Lowering& lowering) {
  const Array x = lowering.Input(0);
  const Array seed = lowering.Input(1), offset = lowering.Input(2);
  const Array probability = lowering.Input(3);
  KVANT_RETURN_IF_ERROR(CheckProbability(lowering, 3));
  const Array y = lowering.plan.NewArray(x.dims);
  Array mask;
  if (lowering.HasOutput(1)) mask = lowering.plan.NewArray(x.dims);
  lowering.plan.AddStep(
      {x, seed, offset, probability}, {y, mask},
      [=](const RunContext& context) {
        const auto key = static_cast<uint64_t>(ScalarOf(context, seed));
        const auto start = static_cast<uint64_t>(ScalarOf(context, offset));
        const double p = *context.data(probability);
        ForEachInTasks(context.executor, x.elements(), /*of_task=*/4096, [&](int64_t i) {
          const bool keep = DropoutKeeps(key, start, static_cast<uint64_t>(i), p);
          const float value = context.data(x)[i];
          context.data(y)[i] = keep ? static_cast<float>(value / (1 - p)) : 0.f;
          if (mask) context.data(mask)[i] = keep ? 1.f : 0.f;
        });
      },
      /*overwrites=*/0);
  if (mask) lowering.SetOutput(1, mask);
  return y;
}

}  // namespace kvant::reference
