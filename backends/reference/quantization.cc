// The quantization ops in plain code: oneDNN has neither groups of any shape nor the narrow types.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "kvant/backends/reference/lowering.h"
#include "kvant/backends/reference/pieces.h"
#include "kvant/backends/reference/rows.h"
#include "kvant/graph/op_shapes.h"
#include "kvant/kernels/cpu/group_parameters.h"

namespace kvant::reference {
namespace {

// Scales (and zero points) have x's rank and divide its dims.
struct QuantizationArrays {
  Array scales;
  Array zero_points;        // of none: 0
  bool real_units = false;  // of the zero points
};

// Operands: result, x, scales, zero points. Each dim becomes [groups, elements of a group], in
// which scales and zero points have ordinary strides, 0 along the group.
Walk GroupWalk(const Dims& dims, const QuantizationArrays& quantization) {
  const Dims& scale_dims = quantization.scales.dims;
  const Dims zp_dims =
      quantization.zero_points ? quantization.zero_points.dims : Dims(dims.size(), 1);
  const Dims dense = DenseStrides(dims), scale_strides = BroadcastStrides(scale_dims, dims),
             zp_strides = BroadcastStrides(zp_dims, dims);
  Dims split, data, scales, zps;
  for (size_t axis = 0; axis < dims.size(); ++axis) {
    const int64_t groups = std::max<int64_t>(1, std::max(scale_dims[axis], zp_dims[axis]));
    const int64_t length = dims[axis] / groups;
    split.insert(split.end(), {groups, length});
    data.insert(data.end(), {length * dense[axis], dense[axis]});
    scales.insert(scales.end(), {scale_strides[axis], 0});
    zps.insert(zps.end(), {zp_strides[axis], 0});
  }
  return Walk(split, {data, data, scales, zps});
}

// Calls fn(x, scale, zero point) for every element; what it gives is the result.
template <typename Fn>
Array ForEachCode(Plan& plan, const Array& x, const QuantizationArrays& quantization, Fn fn) {
  Array result = plan.NewArray(x.dims);
  const Array scales = quantization.scales, zps = quantization.zero_points;
  plan.AddStep(
      {x, scales, zps}, {result},
      [=, walk = GroupWalk(x.dims, quantization)](const RunContext& context) {
        walk.ForEachRow(context.executor, [&](const Row& row) {
          const float* from = context.data(x) + row.offset[1];
          float* to = context.data(result) + row.offset[0];
          for (int64_t i = 0; i < row.count; ++i) {
            const double scale = context.data(scales)[row.offset[2] + i * row.stride[2]];
            const double zero_point =
                zps ? context.value(zps, row.offset[3] + i * row.stride[3]) : 0;
            to[i * row.stride[0]] =
                static_cast<float>(fn(from[i * row.stride[1]], scale, zero_point));
          }
        });
      },
      /*overwrites=*/0);
  return result;
}

// One value, one per element of the attribute axis, or one per group, as an array of x's rank.
Array OfRank(const Lowering& lowering, const Array& values) {
  const size_t rank = lowering.InputTensor(0).dims->size();
  if (values.dims.size() == rank) return values;
  Dims dims(rank, 1);
  const int64_t axis = FromFront(lowering.op().Get<Attr::kAxis>(), rank);
  if (values.elements() != 1) dims[axis] = values.elements();
  return Reshaped(values, dims);
}

QuantizationArrays DynamicParameters(Lowering& lowering) {
  QuantizationArrays result{.scales = OfRank(lowering, lowering.Input(1))};
  if (lowering.HasInput(2)) {
    result.zero_points = OfRank(lowering, lowering.Input(2));
    result.real_units = IsFloat(lowering.InputTensor(2).type);
  }
  return result;
}

// Where element i of a dense array of these dims lies with these strides.
int64_t OffsetOf(int64_t i, const Dims& dims, const Dims& strides) {
  int64_t offset = 0;
  for (size_t d = dims.size(); d-- > 0; i /= dims[d]) offset += i % dims[d] * strides[d];
  return offset;
}

// The smallest and largest of the elements of a dense array with these dims and strides, from
// `first` on; 0 if there are none, NaN if any is NaN.
std::pair<float, float> RangeOf(const float* first, const Dims& dims, const Dims& strides) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const int64_t count = ElementsOf(dims);
  float min = kInfinity, max = -kInfinity;
  for (int64_t i = 0; i < count; ++i) {
    const float x = first[OffsetOf(i, dims, strides)];
    if (std::isnan(x)) return {x, x};
    min = std::min(min, x);
    max = std::max(max, x);
  }
  return count == 0 ? std::pair(0.f, 0.f) : std::pair(min, max);
}

// Null without a codebook.
std::shared_ptr<const cpu::Codebook> CodebookOf(const Lowering& lowering) {
  const auto* values = lowering.op().Find<Attr::kCodebook>();
  if (values == nullptr) return nullptr;
  return std::make_shared<cpu::Codebook>(values->data(), BitsOf(lowering.OutputTensor(0).type),
                                         cpu::CodebookTies::kLowerCode);
}

// Scales and zero points that the op computes from x, with x's rank.
QuantizationArrays ComputedParameters(Lowering& lowering) {
  const Array x = lowering.Input(0);
  const Dims group = QuantizationGroup(lowering.op(), x.dims), strides = DenseStrides(x.dims);
  Dims groups = x.dims, steps = strides;
  for (size_t d = 0; d < groups.size(); ++d) {
    groups[d] = group[d] == 0 ? 1 : groups[d] / group[d];
    steps[d] *= group[d];
  }
  const bool has_zero_points = lowering.HasOutput(2);
  const DataType zero_point_type = has_zero_points ? lowering.OutputTensor(2).type : kUndef;
  const std::shared_ptr<const cpu::Codebook> codebook = CodebookOf(lowering);
  const cpu::ParameterRule rule = cpu::MakeParameterRule(
      lowering.OutputTensor(0).type, lowering.OutputTensor(1).type, zero_point_type,
      {.power_of_two = lowering.op().Get<Attr::kPowerOfTwoScales>(),
       .floor = lowering.op().Get<Attr::kScaleFloor>(),
       .codebook = codebook.get()});
  QuantizationArrays result;
  result.scales = lowering.plan.NewArray(groups);
  if (has_zero_points) {
    result.zero_points = lowering.plan.NewArray(groups, StorageOf(zero_point_type));
    result.real_units = IsFloat(zero_point_type);
  }
  const Array zero_points = result.zero_points;
  lowering.plan.AddStep({x}, {result.scales, zero_points}, [=](const RunContext& context) {
    context.executor.ParallelFor(ElementsOf(groups), [&](int64_t i, int) {
      const auto [min, max] = RangeOf(context.data(x) + OffsetOf(i, groups, steps), group, strides);
      const cpu::GroupParameters parameters = cpu::ParametersOf(rule, min, max);
      context.data(result.scales)[i] = static_cast<float>(parameters.scale);
      if (!zero_points) return;
      if (zero_points.storage == Storage::kS32) {
        context.data<int32_t>(zero_points)[i] = static_cast<int32_t>(parameters.zero_point);
      } else {
        context.data(zero_points)[i] = static_cast<float>(parameters.zero_point);
      }
    });
  });
  return result;
}

QuantizationArrays StaticParameters(Lowering& lowering) {
  const auto constant = [&](std::vector<float> values) {
    const auto count = static_cast<int64_t>(values.size());
    return OfRank(lowering, ConstantArray(lowering.plan, std::move(values), {count}));
  };
  QuantizationArrays result{.scales = constant(lowering.op().Get<Attr::kScales>())};
  const auto& zps = lowering.op().Get<Attr::kZps>();
  if (!zps.empty()) result.zero_points = constant(std::vector<float>(zps.begin(), zps.end()));
  return result;
}

// (x - zp) * scale, or x * scale - zp in real units, x being what the codebook has for the code if
// there is one.
Array Dequantize(Lowering& lowering, const QuantizationArrays& quantization) {
  return ForEachCode(lowering.plan, lowering.Input(0), quantization,
                     [codebook = lowering.op().Get<Attr::kCodebook>(),
                      real_units = quantization.real_units](double x, double scale, double zp) {
                       if (!codebook.empty()) x = codebook[static_cast<size_t>(x)];
                       return real_units ? x * scale - zp : (x - zp) * scale;
                     });
}

// round(x / scale) + zp, or round((x + zp) / scale) in real units; ties to even, saturated. With a
// codebook, positions in it.
Array Quantize(Lowering& lowering, const QuantizationArrays& quantization) {
  const DataType type = lowering.OutputTensor(0).type;
  const std::shared_ptr<const cpu::Codebook> codebook = CodebookOf(lowering);
  cpu::ParameterRule rule;
  rule.codes = type;
  rule.zero_points = quantization.real_units ? cpu::ZeroPoints::kReal : cpu::ZeroPoints::kCodes;
  rule.codebook = codebook.get();
  return ForEachCode(lowering.plan, lowering.Input(0), quantization,
                     [type, rule, codebook](double value, double scale, double zp) {
                       return RoundTo(type, cpu::CodeOf(rule, value, scale, zp));
                     });
}

}  // namespace

Array ConstantArray(Plan& plan, std::vector<float> values, Dims dims) {
  Array result = plan.NewArray(std::move(dims));
  plan.AddStep({}, {result}, [=, values = std::move(values)](const RunContext& context) {
    std::ranges::copy(values, context.data(result));
  });
  return result;
}

absl::StatusOr<Array> LowerQuantize(Lowering& lowering) {
  return Quantize(lowering, StaticParameters(lowering));
}

absl::StatusOr<Array> LowerDequantize(Lowering& lowering) {
  return Dequantize(lowering, StaticParameters(lowering));
}

absl::StatusOr<Array> LowerDynamicQuantize(Lowering& lowering) {
  if (lowering.op().attrs.Find(Attr::kFormula) != nullptr) {
    return OpError(ErrorKind::kUnimplemented, lowering.op(),
                   "formula ggml, which op by op execution has not");
  }
  if (lowering.HasInput(1)) return Quantize(lowering, DynamicParameters(lowering));
  const QuantizationArrays parameters = ComputedParameters(lowering);
  lowering.SetOutput(1, parameters.scales);
  if (parameters.zero_points) lowering.SetOutput(2, parameters.zero_points);
  return Quantize(lowering, parameters);
}

absl::StatusOr<Array> LowerAppend(Lowering& lowering) {
  return OpError(ErrorKind::kUnimplemented, lowering.op(),
                 "writes into a part of its outputs, which op by op "
                 "execution does not");
}

absl::StatusOr<Array> LowerAppendPages(Lowering& lowering) { return LowerAppend(lowering); }

absl::StatusOr<Array> LowerDynamicDequantize(Lowering& lowering) {
  return Dequantize(lowering, DynamicParameters(lowering));
}

}  // namespace kvant::reference
