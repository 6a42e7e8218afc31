// Codes to values and back: the static and the dynamic forms.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "kvant/backends/oracle/ops.h"
#include "kvant/graph/op_shapes.h"

namespace kvant::oracle {
namespace {

// The entry nearest to x, the first of those that are as near; 0 for NaN.
double NearestEntry(const std::vector<float>& codebook, double x) {
  const auto [least, most] = std::ranges::minmax(codebook);
  x = std::min<double>(std::max<double>(x, least), most);  // of infinities all are as far
  size_t best = 0;
  for (size_t i = 1; i < codebook.size(); ++i) {
    if (std::abs(x - codebook[i]) < std::abs(x - codebook[best])) best = i;
  }
  return static_cast<double>(best);
}

// Rounding half to even comes before an integer zero point is added, so that which way a tie goes
// does not depend on it. Codes of finite numbers saturate.
double Encode(double x, double scale, double zero_point, bool real_units, DataType type) {
  const double code = real_units ? (x + zero_point) / scale : x / scale + zero_point;
  if (IsFloat(type)) {
    const double most = LargestOf(type);
    return RoundTo(type, std::isfinite(x) ? std::clamp(code, -most, most) : code);
  }
  if (real_units) return RoundTo(type, code);
  return RoundTo(type, std::nearbyint(x / scale) + zero_point);
}

// Of numbers or codes: one for all of them, one for each along the attribute axis, or one for each
// group.
struct Parameters {
  Array scales;
  Array zero_points = Array(Dims());  // 0
  bool real_units = false;            // of the zero points
};

// Which of the scales or zero points of dims `parameters` goes with each element of an array of
// `dims`. Shape inference has checked that they fit.
IndexMap ParameterMap(const OpContext& context, const Dims& dims, const Dims& parameters) {
  if (ElementsOf(parameters) == 1 || parameters.size() == dims.size()) {
    return GroupMap(parameters, dims);
  }
  Dims channels(dims.size(), 1);
  channels[FromFront(context.op.Get<Attr::kAxis>(), dims.size())] = parameters[0];
  return GroupMap(channels, dims);
}

// Input 0 with fn(x, scale, zero point) for each element x.
template <typename Fn>
Array Convert(OpContext& context, const Parameters& parameters, Fn fn) {
  Array x = context.Take(0);
  const IndexMap scale_map = ParameterMap(context, x.dims, parameters.scales.dims);
  const IndexMap zero_point_map = ParameterMap(context, x.dims, parameters.zero_points.dims);
  ForEach<2>(
      context.executor, x.dims, {&scale_map, &zero_point_map}, [&](int64_t i, const auto& at) {
        x.values[i] =
            fn(x.values[i], parameters.scales.values[at[0]], parameters.zero_points.values[at[1]]);
      });
  return x;
}

Array Quantized(OpContext& context, const Parameters& parameters) {
  const DataType type = context.out_desc(0).type;
  const std::vector<float>& codebook = context.op.Get<Attr::kCodebook>();
  return Convert(context, parameters, [&](double x, double scale, double zero_point) {
    return codebook.empty() ? Encode(x, scale, zero_point, parameters.real_units, type)
                            : NearestEntry(codebook, x / scale);
  });
}

Array Dequantized(OpContext& context, const Parameters& parameters) {
  const std::vector<float>& codebook = context.op.Get<Attr::kCodebook>();
  return Convert(context, parameters, [&](double x, double scale, double zero_point) {
    if (!codebook.empty()) x = codebook[static_cast<size_t>(x)];
    return parameters.real_units ? x * scale - zero_point : (x - zero_point) * scale;
  });
}

// Scales at input `port` and, if it is there, zero points at the next.
Parameters GivenParameters(const OpContext& context, int port) {
  Parameters parameters{.scales = context.in(port)};
  if (context.has_input(port + 1)) {
    parameters.zero_points = context.in(port + 1);
    parameters.real_units = IsFloat(context.in_desc(port + 1).type);
  }
  return parameters;
}

// The largest magnitude that a code stands for.
double HighestValue(const OpContext& context) {
  const std::vector<float>& codebook = context.op.Get<Attr::kCodebook>();
  if (!codebook.empty()) {
    const auto [least, most] = std::ranges::minmax(codebook);
    return std::max(std::abs(least), std::abs(most));
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

// Outputs 1 and, if it is there, 2, of dims `groups_dims` from input 0; `groups` says which
// elements they are of.
void ComputeParameters(OpContext& context, const Dims& groups_dims, const IndexMap& groups) {
  const Array& x = context.in(0);
  std::vector<Extremes> ranges(ElementsOf(groups_dims));
  ForEach<1>(*MakeSerialExecutor(), x.dims, {&groups}, [&](int64_t i, const auto& at) {
    Extremes& range = ranges[at[0]];
    range.finite &= std::isfinite(x.values[i]);
    range.min = std::min(range.min, x.values[i]);
    range.max = std::max(range.max, x.values[i]);
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

  // Calls visit(i, to) with the dense index of an element of an array of `dims`, and where `map`
  // has it in dst, for all rows that go anywhere. `unit`: the tokens of an element.
  template <typename Visit>
  void ForEach(const Dims& dims, int64_t unit, const IndexMap& map, Visit visit) const {
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
      int64_t index = 0;
      for (size_t d = 0; d < at.size(); ++d) index += map.axes[d][at[d]];
      visit(i, index);
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

// All outputs from input 0, its scales and zero points having these dims. Returns output 0.
Array QuantizeWithOwnParameters(OpContext& context, const Dims& groups_dims) {
  const IndexMap groups = ParameterMap(context, context.in(0).dims, groups_dims);
  if (context.op.attrs.Find(Attr::kFormula) != nullptr) {
    return QuantizeByGgml(context, groups_dims, groups);
  }
  ComputeParameters(context, groups_dims, groups);
  Parameters parameters{.scales = context.outputs[1]};
  if (context.outputs.size() > 2) {
    parameters.zero_points = context.outputs[2];
    parameters.real_units = IsFloat(context.out_desc(2).type);
  }
  return Quantized(context, parameters);
}

// An array of src's dims with the parameter of each of its elements where those are in dst.
Array ParametersAt(const OpContext& context, const Array& parameters, const AppendedRows& rows) {
  const IndexMap map = ParameterMap(context, context.out_dims(0), parameters.dims);
  Array result(context.in(0).dims);
  rows.ForEach(result.dims, 1, map,
               [&](int64_t i, int64_t to) { result.values[i] = parameters.values[to]; });
  return result;
}

template <typename T>
Array ArrayOf(const std::vector<T>& values) {
  Array array({static_cast<int64_t>(values.size())});
  std::ranges::copy(values, array.values.begin());
  return array;
}

// The attributes of a static op as arrays.
Parameters StaticParameters(const Op& op) {
  Parameters parameters{.scales = ArrayOf(op.Get<Attr::kScales>())};
  const std::vector<int64_t>& zero_points = op.Get<Attr::kZps>();
  if (!zero_points.empty()) parameters.zero_points = ArrayOf(zero_points);
  return parameters;
}

}  // namespace

absl::StatusOr<Array> EvalQuantize(OpContext& context) {
  return Quantized(context, StaticParameters(context.op));
}

absl::StatusOr<Array> EvalDequantize(OpContext& context) {
  return Dequantized(context, StaticParameters(context.op));
}

absl::StatusOr<Array> EvalDynamicQuantize(OpContext& context) {
  if (context.has_input(1)) return Quantized(context, GivenParameters(context, 1));
  return QuantizeWithOwnParameters(context, context.out_dims(1));
}

absl::StatusOr<Array> EvalDynamicDequantize(OpContext& context) {
  return Dequantized(context, GivenParameters(context, 1));
}

absl::StatusOr<Array> EvalAppend(OpContext& context) {
  const AppendedRows rows = RowsOf(context);
  if (context.outputs.size() > 1) {
    Dims groups = context.out_dims(1);
    const int64_t tokens = QuantizationGroup(context.op, context.in(0).dims)[rows.to.axis];
    groups[0] = context.in(0).dims[0];
    groups[rows.to.axis] = rows.to.tokens / tokens;
    context.outputs[0] = QuantizeWithOwnParameters(context, groups);
  } else if (context.has_input(2)) {
    Parameters parameters = GivenParameters(context, 2);
    parameters.scales = ParametersAt(context, parameters.scales, rows);
    parameters.zero_points = ParametersAt(context, parameters.zero_points, rows);
    context.outputs[0] = Quantized(context, parameters);
  } else {
    context.outputs[0] = context.Take(0);
  }
  for (int port = 0; port < static_cast<int>(context.outputs.size()); ++port) {
    const Array part = std::move(context.outputs[port]);
    Array& whole = context.outputs[port] = Array(context.out_dims(port));
    whole.stored.resize(whole.values.size());
    const IndexMap map = StridedMap(whole.dims, DenseStrides(whole.dims));
    rows.ForEach(part.dims, port == 0 ? 1 : rows.to.group, map, [&](int64_t i, int64_t to) {
      whole.values[to] = part.values[i];
      whole.stored[to] = true;
    });
  }
  return std::move(context.outputs[0]);
}

absl::StatusOr<Array> EvalAppendPages(OpContext& context) {
  Array rows = context.Take(0);
  const int axis = AppendedTokensOf(context.op, context.in_desc(0), context.out_desc(0)).axis;
  rows.dims = *TokensAsRows(context.in_desc(0), axis).dims;
  context.inputs[0] = {&rows, /*last_use=*/true};
  return EvalAppend(context);
}

}  // namespace kvant::oracle
