// The quantization ops in plain code: oneDNN has neither groups of any shape nor the narrow types.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvant/backends/reference/lowering.h"
#include "kvant/backends/reference/pieces.h"
#include "kvant/backends/reference/rows.h"
#include "kvant/graph/op_shapes.h"
#include "kvant/kernels/cpu/group_parameters.h"

namespace kvant::reference {
namespace {

// Operands: result, x, scales, zero points. Each dim becomes [groups, elements of a group], in
// which scales and zero points have ordinary strides, 0 along the group.
Walk GroupWalk(const Dims& dims, const QuantizationArrays& quantization) {
  const Dims& scale_dims = quantization.scales.dims;
  const Dims zp_dims =
      quantization.zero_points ? quantization.zero_points->dims : Dims(dims.size(), 1);
  const Dims dense = DenseStrides(dims), scale_dense = DenseStrides(scale_dims),
             zp_dense = DenseStrides(zp_dims);
  Dims split, data, scales, zps;
  for (size_t axis = 0; axis < dims.size(); ++axis) {
    const int64_t groups = std::max<int64_t>(1, std::max(scale_dims[axis], zp_dims[axis]));
    const int64_t length = dims[axis] / groups;
    split.insert(split.end(), {groups, length});
    data.insert(data.end(), {length * dense[axis], dense[axis]});
    scales.insert(scales.end(), {scale_dims[axis] == 1 ? 0 : scale_dense[axis], 0});
    zps.insert(zps.end(), {zp_dims[axis] == 1 ? 0 : zp_dense[axis], 0});
  }
  return Walk(split, {data, data, scales, zps});
}

// Calls fn(x, scale, zero point) for every element; what it gives is the result.
template <typename Fn>
Array ForEachCode(Plan& plan, const Array& x, const QuantizationArrays& quantization, Fn fn) {
  Array result = plan.NewArray(x.dims);
  const Array scales = quantization.scales;
  const std::optional<Array> zps = quantization.zero_points;
  std::vector<Array> reads{x, scales};
  if (zps) reads.push_back(*zps);
  plan.AddStep(
      reads, {result},
      [=, walk = GroupWalk(x.dims, quantization)](const RunContext& context) {
        const auto zero_point = [&](int64_t i) -> double {
          if (!zps) return 0;
          return zps->storage == Storage::kS32 ? context.data<int32_t>(*zps)[i]
                                               : context.data<float>(*zps)[i];
        };
        walk.ForEachRow(context.executor, [&](const Row& row) {
          const float* from = context.data(x) + row.offset[1];
          float* to = context.data(result) + row.offset[0];
          for (int64_t i = 0; i < row.count; ++i) {
            const double scale = context.data(scales)[row.offset[2] + i * row.stride[2]];
            const double value =
                fn(from[i * row.stride[1]], scale, zero_point(row.offset[3] + i * row.stride[3]));
            to[i * row.stride[0]] = static_cast<float>(value);
          }
        });
      },
      /*overwrites=*/0);
  return result;
}

// One value, or one per element of `axis`, as an array of x's rank.
Array AlongAxis(Array values, size_t rank, int64_t axis) {
  Dims dims(rank, 1);
  if (values.elements() != 1) dims[axis] = values.elements();
  return Reshaped(std::move(values), std::move(dims));
}

Array DynamicParameter(const Op& op, const Array& values, size_t rank) {
  const std::string qtype = op.Get<Attr::kQType>();
  if (qtype == "per_group" && values.dims.size() == rank) return values;
  return AlongAxis(values, rank, FromFront(op.Get<Attr::kAxis>(), rank));
}

QuantizationArrays DynamicParameters(const Op& op, Lowering& lowering) {
  const size_t rank = lowering.InputTensor(op, 0).dims->size();
  QuantizationArrays result;
  result.scales = DynamicParameter(op, lowering.Input(op, 1), rank);
  if (lowering.HasInput(op, 2)) {
    result.zero_points = DynamicParameter(op, lowering.Input(op, 2), rank);
    result.real_units = IsFloat(lowering.InputTensor(op, 2).type);
  }
  return result;
}

// The smallest and largest of the elements of a dense array with these dims and strides, from
// `first` on; 0 if there are none, NaN if any is NaN.
std::pair<float, float> RangeOf(const float* first, const Dims& dims, const Dims& strides) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const int64_t count = ElementsOf(dims);
  float min = kInfinity, max = -kInfinity;
  for (int64_t i = 0; i < count; ++i) {
    int64_t offset = 0, rest = i;
    for (size_t d = dims.size(); d-- > 0; rest /= dims[d]) offset += rest % dims[d] * strides[d];
    const float x = first[offset];
    if (std::isnan(x)) return {x, x};
    min = std::min(min, x);
    max = std::max(max, x);
  }
  return count == 0 ? std::pair(0.f, 0.f) : std::pair(min, max);
}

// Null without a codebook.
std::shared_ptr<const cpu::Codebook> CodebookOf(const Op& op, const Lowering& lowering) {
  const auto* values = op.Find<Attr::kCodebook>();
  if (values == nullptr) return nullptr;
  return std::make_shared<cpu::Codebook>(values->data(), BitsOf(lowering.OutputTensor(op, 0).type),
                                         cpu::CodebookTies::kLowerCode);
}

// Scales and zero points that the op computes from x, with x's rank.
QuantizationArrays ComputedParameters(const Op& op, const Array& x, Lowering& lowering) {
  const Dims group = QuantizationGroup(op, x.dims), strides = DenseStrides(x.dims);
  Dims groups = x.dims, steps = strides;
  for (size_t d = 0; d < groups.size(); ++d) {
    groups[d] = group[d] == 0 ? 1 : groups[d] / group[d];
    steps[d] *= group[d];
  }
  const bool has_zero_points = lowering.HasOutput(op, 2);
  const DataType zero_point_type = has_zero_points ? lowering.OutputTensor(op, 2).type : kUndef;
  const std::shared_ptr<const cpu::Codebook> codebook = CodebookOf(op, lowering);
  const cpu::ParameterRule rule = cpu::MakeParameterRule(
      lowering.OutputTensor(op, 0).type, lowering.OutputTensor(op, 1).type, zero_point_type,
      {.power_of_two = op.Get<Attr::kPowerOfTwoScales>(),
       .floor = op.Get<Attr::kScaleFloor>(),
       .codebook = codebook.get()});
  QuantizationArrays result;
  result.scales = lowering.plan.NewArray(groups);
  std::vector<Array> writes{result.scales};
  if (has_zero_points) {
    result.zero_points = lowering.plan.NewArray(groups, StorageOf(zero_point_type));
    result.real_units = IsFloat(zero_point_type);
    writes.push_back(*result.zero_points);
  }
  lowering.plan.AddStep({x}, writes, [=](const RunContext& context) {
    context.executor.ParallelFor(ElementsOf(groups), [&](int64_t i, int) {
      int64_t offset = 0, rest = i;
      for (size_t d = groups.size(); d-- > 0; rest /= groups[d]) {
        offset += rest % groups[d] * steps[d];
      }
      const auto [min, max] = RangeOf(context.data(x) + offset, group, strides);
      const cpu::GroupParameters parameters = cpu::ParametersOf(rule, min, max);
      context.data(result.scales)[i] = static_cast<float>(parameters.scale);
      if (!result.zero_points) return;
      if (result.zero_points->storage == Storage::kS32) {
        context.data<int32_t>(*result.zero_points)[i] = static_cast<int32_t>(parameters.zero_point);
      } else {
        context.data(*result.zero_points)[i] = static_cast<float>(parameters.zero_point);
      }
    });
  });
  return result;
}

QuantizationArrays StaticParameters(const Op& op, Lowering& lowering) {
  const size_t rank = lowering.InputTensor(op, 0).dims->size();
  const int64_t axis = FromFront(op.Get<Attr::kAxis>(), rank);
  const auto constant = [&](std::vector<float> values) {
    const auto count = static_cast<int64_t>(values.size());
    return AlongAxis(ConstantArray(lowering.plan, std::move(values), {count}), rank, axis);
  };
  QuantizationArrays result;
  result.scales = constant(op.Get<Attr::kScales>());
  const auto zps = op.Get<Attr::kZps>();
  if (!zps.empty()) result.zero_points = constant(std::vector<float>(zps.begin(), zps.end()));
  return result;
}

Array DequantizeEntries(Plan& plan, const Array& codes, const QuantizationArrays& quantization,
                        const std::vector<float>& codebook) {
  return ForEachCode(plan, codes, quantization, [codebook](double code, double scale, double) {
    return codebook[static_cast<size_t>(code)] * scale;
  });
}

}  // namespace

Array Dequantize(Plan& plan, const Array& codes, const QuantizationArrays& quantization) {
  if (quantization.real_units) {
    return ForEachCode(plan, codes, quantization,
                       [](double x, double scale, double zp) { return x * scale - zp; });
  }
  return ForEachCode(plan, codes, quantization,
                     [](double x, double scale, double zp) { return (x - zp) * scale; });
}

Array Quantize(Plan& plan, const Array& x, const QuantizationArrays& quantization, DataType type,
               const std::shared_ptr<const cpu::Codebook>& codebook) {
  cpu::ParameterRule rule;
  rule.codes = type;
  rule.zero_points = quantization.real_units ? cpu::ZeroPoints::kReal : cpu::ZeroPoints::kCodes;
  rule.codebook = codebook.get();
  return ForEachCode(plan, x, quantization,
                     [type, rule, codebook](double value, double scale, double zp) {
                       return RoundTo(type, cpu::CodeOf(rule, value, scale, zp));
                     });
}

Array ConstantArray(Plan& plan, std::vector<float> values, Dims dims) {
  Array result = plan.NewArray(std::move(dims));
  plan.AddStep({}, {result}, [=, values = std::move(values)](const RunContext& context) {
    std::copy(values.begin(), values.end(), context.data(result));
  });
  return result;
}

absl::StatusOr<Array> LowerQuantize(const Op& op, Lowering& lowering) {
  const QuantizationArrays parameters = StaticParameters(op, lowering);
  return Quantize(lowering.plan, lowering.Input(op, 0), parameters,
                  lowering.OutputTensor(op, 0).type, nullptr);
}

absl::StatusOr<Array> LowerDequantize(const Op& op, Lowering& lowering) {
  const QuantizationArrays parameters = StaticParameters(op, lowering);
  return Dequantize(lowering.plan, lowering.Input(op, 0), parameters);
}

absl::StatusOr<Array> LowerDynamicQuantize(const Op& op, Lowering& lowering) {
  if (op.attrs.Find(Attr::kFormula) != nullptr) {
    return MakeError(
        ErrorKind::kUnimplemented,
        absl::StrCat(op.ToString(), ": formula ggml, which op by op execution has not"));
  }
  const bool computes = !lowering.HasInput(op, 1);
  const Array x = lowering.Input(op, 0);
  const QuantizationArrays parameters =
      computes ? ComputedParameters(op, x, lowering) : DynamicParameters(op, lowering);
  if (computes) {
    lowering.SetOutput(op, 1, parameters.scales);
    if (parameters.zero_points) lowering.SetOutput(op, 2, *parameters.zero_points);
  }
  return Quantize(lowering.plan, x, parameters, lowering.OutputTensor(op, 0).type,
                  CodebookOf(op, lowering));
}

absl::StatusOr<Array> LowerAppend(const Op& op, Lowering&) {
  return MakeError(ErrorKind::kUnimplemented,
                   absl::StrCat(op.ToString(),
                                ": writes into a part of its outputs, which op by op "
                                "execution does not"));
}

absl::StatusOr<Array> LowerAppendPages(const Op& op, Lowering& lowering) {
  return LowerAppend(op, lowering);
}

absl::StatusOr<Array> LowerDynamicDequantize(const Op& op, Lowering& lowering) {
  const QuantizationArrays parameters = DynamicParameters(op, lowering);
  const Array codes = lowering.Input(op, 0);
  const auto* codebook = op.Find<Attr::kCodebook>();
  return codebook == nullptr ? Dequantize(lowering.plan, codes, parameters)
                             : DequantizeEntries(lowering.plan, codes, parameters, *codebook);
}

}  // namespace kvant::reference
