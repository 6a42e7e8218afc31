// Codes to values and back: the static and the dynamic forms.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/backends/oracle/ops.h"
#include "kvant/graph/op_shapes.h"
#include "kvant/graph/round_scale.h"

namespace kvant::oracle {
namespace {

std::vector<float> CodebookOf(const OpContext& context) {
  return context.op.Get<Attr::kCodebook>();
}

// The entry nearest to x, the first of those that are as near; 0 for NaN.
double NearestEntry(const std::vector<float>& codebook, double x) {
  const auto [least, most] = std::minmax_element(codebook.begin(), codebook.end());
  x = std::min<double>(std::max<double>(x, *least), *most);  // of infinities all are as far
  size_t best = 0;
  for (size_t i = 1; i < codebook.size(); ++i) {
    if (std::abs(x - codebook[i]) < std::abs(x - codebook[best])) best = i;
  }
  return static_cast<double>(best);
}

// Rounding half to even comes before an integer zero point is added, so that which way a tie goes
// does not depend on it. Codes of finite numbers saturate.
double Encode(double x, double scale, double zero_point, bool real_units, DataType type) {
  if (real_units) return RoundTo(type, (x + zero_point) / scale);
  if (IsFloat(type)) {
    const double code = x / scale + zero_point, most = LargestOf(type);
    return RoundTo(type, std::isfinite(x) ? std::clamp(code, -most, most) : code);
  }
  return RoundTo(type, std::nearbyint(x / scale) + zero_point);
}

void QuantizeInPlace(const OpContext& context, Array& x, const Array& scales,
                     const Array* zero_points, bool real_units, const QuantizationMaps& maps) {
  const DataType type = context.out_desc(0).type;
  const std::vector<float> codebook = CodebookOf(context);
  ForEachRow<2>(context.executor, x.dims, {&maps.scales, &maps.zero_points},
                [&](int64_t first, const auto& bases) {
                  const auto& s = maps.scales.axes.back();
                  const auto& z = maps.zero_points.axes.back();
                  for (size_t j = 0; j < s.size(); ++j) {
                    double& value = x.values[first + j];
                    const double zp = zero_points ? zero_points->values[bases[1] + z[j]] : 0.0;
                    const double scale = scales.values[bases[0] + s[j]];
                    value = codebook.empty() ? Encode(value, scale, zp, real_units, type)
                                             : NearestEntry(codebook, value / scale);
                  }
                });
}

// Which of `count` per-tensor or per-channel parameters goes with each element.
absl::StatusOr<IndexMap> ChannelMap(const OpContext& context, const Dims& dims, int64_t count,
                                    bool per_channel) {
  if (count == 1) return ConstantMap(dims);
  const int64_t rank = static_cast<int64_t>(dims.size());
  const int64_t axis = FromFront(context.op.Get<Attr::kAxis>(), rank);
  if (!per_channel || axis < 0 || axis >= rank || dims[axis] != count) {
    return context.Error(ErrorKind::kInvalidArguments,
                         absl::StrCat(count, " scales or zero points do not fit its input"));
  }
  Dims strides(rank, 0);
  strides[axis] = 1;
  return StridedMap(dims, strides);
}

// Of scales or zero points of dims `parameters`, for numbers or codes of dims `dims`.
absl::StatusOr<IndexMap> ParameterMap(const OpContext& context, const Dims& dims,
                                      const Dims& parameters) {
  const std::string qtype = context.op.Get<Attr::kQType>();
  const int64_t count = ElementsOf(parameters);
  if (qtype != "per_group" || count == 1) {
    return ChannelMap(context, dims, count, qtype == "per_channel");
  }
  const auto group = context.op.Get<Attr::kGroupShape>();
  bool fits = group.size() == dims.size() && parameters.size() == dims.size();
  for (size_t d = 0; fits && d < dims.size(); ++d) {
    fits = group[d] > 0 && parameters[d] * group[d] == dims[d];
  }
  if (!fits) {
    return context.Error(ErrorKind::kInvalidArguments,
                         "group_shape times the dims of scales or zero points is not its input");
  }
  return GroupMap(dims, group, parameters);
}

struct Parameters {
  QuantizationMaps maps;
  const Array* zero_points = nullptr;
  bool real_units = false;
};

absl::StatusOr<Parameters> DynamicParameters(const OpContext& context) {
  Parameters parameters;
  const Dims& dims = context.in(0).dims;
  KVANT_ASSIGN_OR_RETURN(parameters.maps.scales, ParameterMap(context, dims, context.in(1).dims));
  if (context.has_input(2)) {
    parameters.zero_points = &context.in(2);
    parameters.real_units = IsFloat(context.in_desc(2).type);
    KVANT_ASSIGN_OR_RETURN(parameters.maps.zero_points,
                           ParameterMap(context, dims, context.in(2).dims));
  } else {
    parameters.maps.zero_points = ConstantMap(dims);
  }
  return parameters;
}

// The largest magnitude that a code stands for.
double HighestValue(const OpContext& context) {
  const std::vector<float> codebook = CodebookOf(context);
  if (!codebook.empty()) {
    const auto [least, most] = std::minmax_element(codebook.begin(), codebook.end());
    return std::max(std::abs(*least), std::abs(*most));
  }
  const DataType type = context.out_desc(0).type;
  return IsFloat(type) ? LargestOf(type) : static_cast<double>(HighestOf(type));
}

// As stored: rounded, finite and not zero, so that dividing by it is safe.
double StoredScale(const OpContext& context, double scale) {
  scale = std::max<double>(scale, context.op.Get<Attr::kScaleFloor>());
  const DataType type = context.out_desc(1).type;
  double largest = LargestOf(type);
  int exponent = 0;
  if (context.op.Get<Attr::kPowerOfTwoScales>()) {
    if (std::frexp(scale, &exponent) > 0.5) scale = std::ldexp(1, exponent);
    std::frexp(largest, &exponent);
    largest = std::ldexp(1, exponent - 1);
  }
  const double rounded = RoundScale(type, scale);
  if (rounded == 0) return 1;
  return std::min(rounded, largest);
}

struct Extremes {
  double min = std::numeric_limits<double>::infinity();
  double max = -std::numeric_limits<double>::infinity();
  bool finite = true;
};

// A scale for a group with these extremes and, in `zero_point`, its zero point.
double ScaleOf(const OpContext& context, Extremes range, double* zero_point) {
  if (!range.finite) return std::numeric_limits<double>::quiet_NaN();
  if (range.min > range.max) range.min = range.max = 0;  // a group of nothing
  const DataType codes = context.out_desc(0).type;
  const double highest = HighestValue(context);
  if (zero_point == nullptr) {
    return StoredScale(context, std::max(std::abs(range.min), std::abs(range.max)) / highest);
  }
  const double lowest = static_cast<double>(LowestOf(codes));
  const DataType type = context.out_desc(2).type;
  if (IsFloat(type)) {
    const double scale = StoredScale(context, (range.max - range.min) / (highest - lowest));
    const double largest = LargestOf(type);
    *zero_point = std::clamp(RoundTo(type, lowest * scale - range.min), -largest, largest);
    return scale;
  }
  const double min = std::min(range.min, 0.0), max = std::max(range.max, 0.0);
  const double scale = StoredScale(context, (max - min) / (highest - lowest));
  const double exact = std::clamp(lowest - min / scale, lowest, highest);
  *zero_point = RoundTo(type, std::nearbyint(exact));
  return scale;
}

// Outputs 1 and, if it is there, 2, of dims `groups_dims` from input 0; `maps` says which elements
// they are of.
void ComputeParameters(OpContext& context, const Dims& groups_dims, const QuantizationMaps& maps) {
  const Array& x = context.in(0);
  std::vector<Extremes> ranges(ElementsOf(groups_dims));
  ForEachRow<1>(*MakeSerialExecutor(), x.dims, {&maps.scales},
                [&](int64_t first, const auto& bases) {
                  const auto& groups = maps.scales.axes.back();
                  for (size_t j = 0; j < groups.size(); ++j) {
                    Extremes& range = ranges[bases[0] + groups[j]];
                    const double value = x.values[first + j];
                    range.finite &= std::isfinite(value);
                    range.min = std::min(range.min, value);
                    range.max = std::max(range.max, value);
                  }
                });
  for (size_t i = 1; i < context.outputs.size(); ++i) {
    context.outputs[i] = Array(groups_dims);
  }
  const bool has_zero_points = context.outputs.size() > 2;
  for (size_t group = 0; group < ranges.size(); ++group) {
    double* zero_point = has_zero_points ? &context.outputs[2].values[group] : nullptr;
    context.outputs[1].values[group] = ScaleOf(context, ranges[group], zero_point);
  }
}

// Where the rows of an Append go.
struct AppendedRows {
  AppendedTokens to;
  std::vector<int64_t> positions;  // by row

  // Calls visit(i, at) with the dense index of an element of an array of `dims`, and where it goes,
  // for all rows that go anywhere. `unit`: the tokens of an element.
  template <typename Visit>
  void ForEach(const Dims& dims, int64_t unit, Visit visit) const {
    Dims at(dims.size());
    for (int64_t i = 0; i < ElementsOf(dims); ++i) {
      int64_t rest = i;
      for (size_t d = dims.size(); d-- > 0; rest /= dims[d]) at[d] = rest % dims[d];
      const int64_t position = positions[at[0]];
      if (position < 0) continue;
      if (to.page > 0) {
        at[0] = position / to.page;
        at[to.axis] = position % to.page;
      } else {
        at[to.axis] += position / unit;
      }
      visit(i, at);
    }
  }
};

AppendedRows RowsOf(const OpContext& context) {
  AppendedRows rows;
  rows.to = AppendedTokensOf(context.op, context.in_desc(0), context.out_desc(0));
  const Array& positions = context.in(1);
  for (int64_t row = 0; row < context.in(0).dims[0]; ++row) {
    const auto position = static_cast<int64_t>(positions.values[positions.size() > 1 ? row : 0]);
    rows.positions.push_back(position);
  }
  return rows;
}

// All outputs from input 0, its scales and zero points having these dims.
absl::Status QuantizeWithOwnParameters(OpContext& context, const Dims& groups) {
  QuantizationMaps maps;
  KVANT_ASSIGN_OR_RETURN(maps.scales, ParameterMap(context, context.in(0).dims, groups));
  maps.zero_points = maps.scales;
  if (context.op.attrs.Find(Attr::kFormula) != nullptr) {
    QuantizeByGgml(context, groups, maps.scales);
    return absl::OkStatus();
  }
  ComputeParameters(context, groups, maps);
  const bool has_zero_points = context.outputs.size() > 2;
  const bool real_units = has_zero_points && IsFloat(context.out_desc(2).type);
  Array x = context.Take(0);
  QuantizeInPlace(context, x, context.outputs[1], has_zero_points ? &context.outputs[2] : nullptr,
                  real_units, maps);
  context.outputs[0] = std::move(x);
  return absl::OkStatus();
}

// An array of src's dims with the parameter of each of its elements where those are in dst.
absl::StatusOr<Array> ParametersAt(const OpContext& context, const Array& parameters,
                                   const AppendedRows& rows) {
  KVANT_ASSIGN_OR_RETURN(const IndexMap map,
                         ParameterMap(context, context.out_dims(0), parameters.dims));
  Array result(context.in(0).dims);
  rows.ForEach(result.dims, 1, [&](int64_t i, const Dims& at) {
    int64_t index = 0;
    for (size_t d = 0; d < at.size(); ++d) index += map.axes[d][at[d]];
    result.values[i] = parameters.values[index];
  });
  return result;
}

// The attributes of a static op as arrays.
struct StaticParameters {
  Array scales;
  Array zero_points;
  QuantizationMaps maps;
};

absl::StatusOr<StaticParameters> StaticParametersOf(const OpContext& context) {
  const Op& op = context.op;
  const std::vector<float>& scales = op.Get<Attr::kScales>();
  std::vector<int64_t> zps = op.Get<Attr::kZps>();
  if (zps.empty()) zps.push_back(0);
  const bool per_channel = op.Get<Attr::kQType>() == "per_channel";
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
  QuantizeInPlace(context, x, parameters.scales, &parameters.zero_points,
                  /*real_units=*/false, parameters.maps);
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
  if (!context.has_input(1)) return QuantizeWithOwnParameters(context, context.out_dims(1));
  KVANT_ASSIGN_OR_RETURN(const Parameters parameters, DynamicParameters(context));
  Array x = context.Take(0);
  QuantizeInPlace(context, x, context.in(1), parameters.zero_points, parameters.real_units,
                  parameters.maps);
  context.outputs[0] = std::move(x);
  return absl::OkStatus();
}

absl::Status EvalAppend(OpContext& context) {
  const AppendedRows rows = RowsOf(context);
  const bool takes = context.has_input(2), computes = context.outputs.size() > 1;
  if (computes) {
    Dims groups = context.out_dims(1);
    const int64_t tokens = QuantizationGroup(context.op, context.in(0).dims)[rows.to.axis];
    groups[0] = context.in(0).dims[0];
    groups[rows.to.axis] = rows.to.tokens / tokens;
    KVANT_RETURN_IF_ERROR(QuantizeWithOwnParameters(context, groups));
  } else if (takes) {
    const bool has_zero_points = context.has_input(3);
    Array zero_points;
    KVANT_ASSIGN_OR_RETURN(const Array scales, ParametersAt(context, context.in(2), rows));
    if (has_zero_points) {
      KVANT_ASSIGN_OR_RETURN(zero_points, ParametersAt(context, context.in(3), rows));
    }
    Array x = context.Take(0);
    const IndexMap own = StridedMap(x.dims, DenseStrides(x.dims));
    QuantizeInPlace(context, x, scales, has_zero_points ? &zero_points : nullptr,
                    has_zero_points && IsFloat(context.in_desc(3).type), {own, own});
    context.outputs[0] = std::move(x);
  } else {
    context.outputs[0] = context.Take(0);
  }
  for (int port = 0; port < static_cast<int>(context.outputs.size()); ++port) {
    const Array part = std::move(context.outputs[port]);
    Array& whole = context.outputs[port] = Array(context.out_dims(port));
    whole.stored.resize(whole.values.size());
    const Dims strides = DenseStrides(whole.dims);
    rows.ForEach(part.dims, port == 0 ? 1 : rows.to.group, [&](int64_t i, const Dims& at) {
      int64_t index = 0;
      for (size_t d = 0; d < at.size(); ++d) index += at[d] * strides[d];
      whole.values[index] = part.values[i];
      whole.stored[index] = true;
    });
  }
  return absl::OkStatus();
}

absl::Status EvalAppendPages(OpContext& context) {
  Array rows = context.Take(0);
  const int axis = AppendedTokensOf(context.op, context.in_desc(0), context.out_desc(0)).axis;
  rows.dims = *TokensAsRows(context.in_desc(0), axis).dims;
  context.inputs[0] = {&rows, /*last_use=*/true};
  return EvalAppend(context);
}

absl::Status EvalDynamicDequantize(OpContext& context) {
  KVANT_ASSIGN_OR_RETURN(const Parameters parameters, DynamicParameters(context));
  Array x = context.Take(0);
  if (const std::vector<float> codebook = CodebookOf(context); !codebook.empty()) {
    for (double& code : x.values) code = codebook[static_cast<size_t>(code)];
  }
  DequantizeInPlace(context.executor, x, context.in(1), parameters.zero_points,
                    parameters.real_units, parameters.maps);
  context.outputs[0] = std::move(x);
  return absl::OkStatus();
}

}  // namespace kvant::oracle
