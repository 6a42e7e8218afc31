// Codes to values and back: the static and the dynamic forms.
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kvant/backends/oracle/ops.h"

namespace kvant::oracle {
namespace {

// Rounding half to even comes before an integer zero point is added, so that which way a tie goes
// does not depend on it.
double Encode(double x, double scale, double zero_point, bool real_units, DataType type) {
  if (real_units) return RoundTo(type, (x + zero_point) / scale);
  if (IsFloat(type)) return RoundTo(type, x / scale + zero_point);
  return RoundTo(type, std::nearbyint(x / scale) + zero_point);
}

void QuantizeInPlace(Executor& executor, Array& x, const Array& scales, const Array* zero_points,
                     bool real_units, const QuantizationMaps& maps, DataType type) {
  ForEachRow<2>(executor, x.dims, {&maps.scales, &maps.zero_points},
                [&](int64_t first, const auto& bases) {
                  const auto& s = maps.scales.axes.back();
                  const auto& z = maps.zero_points.axes.back();
                  for (size_t j = 0; j < s.size(); ++j) {
                    double& value = x.values[first + j];
                    const double zp = zero_points ? zero_points->values[bases[1] + z[j]] : 0.0;
                    value = Encode(value, scales.values[bases[0] + s[j]], zp, real_units, type);
                  }
                });
}

// Which of `count` per-tensor or per-channel parameters goes with each element.
absl::StatusOr<IndexMap> ChannelMap(const OpContext& context, const Dims& dims, int64_t count,
                                    bool per_channel) {
  if (count == 1) return ConstantMap(dims);
  const int64_t rank = static_cast<int64_t>(dims.size());
  const int64_t axis = FromFront(context.op.attrs.GetOr<int64_t>(Attr::kAxis, 1), rank);
  if (!per_channel || axis < 0 || axis >= rank || dims[axis] != count) {
    return context.Error(ErrorKind::kInvalidArguments,
                         absl::StrCat(count, " scales or zero points do not fit its input"));
  }
  Dims strides(rank, 0);
  strides[axis] = 1;
  return StridedMap(dims, strides);
}

// Of a dynamic op's scales or zero points.
absl::StatusOr<IndexMap> ParameterMap(const OpContext& context, const Array& parameters) {
  const Dims& dims = context.in(0).dims;
  const std::string qtype = context.op.attrs.GetOr<std::string>(Attr::kQType, "per_tensor");
  if (qtype != "per_group" || parameters.size() == 1) {
    return ChannelMap(context, dims, parameters.size(), qtype == "per_channel");
  }
  const auto group = context.op.attrs.GetOr(Attr::kGroupShape, std::vector<int64_t>());
  bool fits = group.size() == dims.size() && parameters.dims.size() == dims.size();
  for (size_t d = 0; fits && d < dims.size(); ++d) {
    fits = group[d] > 0 && parameters.dims[d] * group[d] == dims[d];
  }
  if (!fits) {
    return context.Error(ErrorKind::kInvalidArguments,
                         "group_shape times the dims of scales or zero points is not its input");
  }
  return GroupMap(dims, group, parameters.dims);
}

struct Parameters {
  QuantizationMaps maps;
  const Array* zero_points = nullptr;
  bool real_units = false;
};

absl::StatusOr<Parameters> DynamicParameters(const OpContext& context) {
  Parameters parameters;
  KVANT_ASSIGN_OR_RETURN(parameters.maps.scales, ParameterMap(context, context.in(1)));
  if (context.has_input(2)) {
    parameters.zero_points = &context.in(2);
    parameters.real_units = IsFloat(context.in_desc(2).type);
    KVANT_ASSIGN_OR_RETURN(parameters.maps.zero_points, ParameterMap(context, context.in(2)));
  } else {
    parameters.maps.zero_points = ConstantMap(context.in(0).dims);
  }
  return parameters;
}

// The attributes of a static op as arrays.
struct StaticParameters {
  Array scales;
  Array zero_points;
  QuantizationMaps maps;
};

absl::StatusOr<StaticParameters> StaticParametersOf(const OpContext& context) {
  const Attributes& attrs = context.op.attrs;
  const auto scales = attrs.GetOr(Attr::kScales, std::vector<float>());
  auto zps = attrs.GetOr(Attr::kZps, std::vector<int64_t>());
  if (zps.empty()) zps.push_back(0);
  const bool per_channel = attrs.GetOr<std::string>(Attr::kQType, "per_tensor") == "per_channel";
  StaticParameters parameters;
  parameters.scales = Array({static_cast<int64_t>(scales.size())});
  std::copy(scales.begin(), scales.end(), parameters.scales.values.begin());
  parameters.zero_points = Array({static_cast<int64_t>(zps.size())});
  std::copy(zps.begin(), zps.end(), parameters.zero_points.values.begin());
  const Dims& dims = context.in(0).dims;
  KVANT_ASSIGN_OR_RETURN(parameters.maps.scales,
                         ChannelMap(context, dims, parameters.scales.size(), per_channel));
  KVANT_ASSIGN_OR_RETURN(parameters.maps.zero_points,
                         ChannelMap(context, dims, parameters.zero_points.size(), per_channel));
  return parameters;
}

}  // namespace

void DequantizeInPlace(Executor& executor, Array& x, const Array& scales, const Array* zero_points,
                       bool real_units, const QuantizationMaps& maps) {
  ForEachRow<2>(executor, x.dims, {&maps.scales, &maps.zero_points},
                [&](int64_t first, const auto& bases) {
                  const auto& s = maps.scales.axes.back();
                  const auto& z = maps.zero_points.axes.back();
                  for (size_t j = 0; j < s.size(); ++j) {
                    double& value = x.values[first + j];
                    const double scale = scales.values[bases[0] + s[j]];
                    const double zp = zero_points ? zero_points->values[bases[1] + z[j]] : 0.0;
                    value = real_units ? value * scale - zp : (value - zp) * scale;
                  }
                });
}

absl::Status EvalQuantize(OpContext& context) {
  KVANT_ASSIGN_OR_RETURN(const StaticParameters parameters, StaticParametersOf(context));
  Array x = context.Take(0);
  QuantizeInPlace(context.executor, x, parameters.scales, &parameters.zero_points,
                  /*real_units=*/false, parameters.maps, context.out_desc(0).type);
  context.outputs[0] = std::move(x);
  return absl::OkStatus();
}

absl::Status EvalDequantize(OpContext& context) {
  KVANT_ASSIGN_OR_RETURN(const StaticParameters parameters, StaticParametersOf(context));
  Array x = context.Take(0);
  DequantizeInPlace(context.executor, x, parameters.scales, &parameters.zero_points,
                    /*real_units=*/false, parameters.maps);
  context.outputs[0] = std::move(x);
  return absl::OkStatus();
}

absl::Status EvalDynamicQuantize(OpContext& context) {
  KVANT_ASSIGN_OR_RETURN(const Parameters parameters, DynamicParameters(context));
  Array x = context.Take(0);
  QuantizeInPlace(context.executor, x, context.in(1), parameters.zero_points, parameters.real_units,
                  parameters.maps, context.out_desc(0).type);
  context.outputs[0] = std::move(x);
  return absl::OkStatus();
}

absl::Status EvalDynamicDequantize(OpContext& context) {
  KVANT_ASSIGN_OR_RETURN(const Parameters parameters, DynamicParameters(context));
  Array x = context.Take(0);
  DequantizeInPlace(context.executor, x, context.in(1), parameters.zero_points,
                    parameters.real_units, parameters.maps);
  context.outputs[0] = std::move(x);
  return absl::OkStatus();
}

}  // namespace kvant::oracle
