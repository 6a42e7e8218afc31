#include "kvant/backends/quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

struct Codes {
  double lowest = 0;
  double highest = 0;
};

Codes CodesOf(DataType type) {
  if (type == kF8E4M3) return {-448, 448};
  if (type == kF8E5M2) return {-57344, 57344};
  return {static_cast<double>(LowestOf(type)), static_cast<double>(HighestOf(type))};
}

double LargestFinite(DataType type) {
  if (type == kF16) return 65504;
  if (type == kBF16) return BF16ToF32(0x7f7f);
  return std::numeric_limits<float>::max();
}

// As stored: rounded, finite and not zero, so that dividing by it is safe.
double StoredScale(DataType type, double scale) {
  if (scale == 0) return 1;
  const double rounded = RoundTo(type, scale);
  if (rounded == 0) return 1;
  return std::min(rounded, LargestFinite(type));
}

struct Range {
  double min = std::numeric_limits<double>::infinity();
  double max = -std::numeric_limits<double>::infinity();
};

// The smallest and largest value of each group, groups in row-major order.
std::vector<Range> GroupRanges(absl::Span<const float> src, absl::Span<const int64_t> dims,
                               absl::Span<const int64_t> group_shape) {
  const int rank = static_cast<int>(dims.size());
  Dims group_dims(rank);
  for (int d = 0; d < rank; ++d) group_dims[d] = dims[d] / group_shape[d];
  const Dims strides = DenseStrides(group_dims);
  int64_t groups = 1;
  for (int64_t dim : group_dims) groups *= dim;
  std::vector<Range> ranges(groups);
  Dims at(rank, 0);
  for (float value : src) {
    int64_t group = 0;
    for (int d = 0; d < rank; ++d) group += at[d] / group_shape[d] * strides[d];
    ranges[group].min = std::min<double>(ranges[group].min, value);
    ranges[group].max = std::max<double>(ranges[group].max, value);
    for (int d = rank - 1; d >= 0 && ++at[d] == dims[d]; --d) at[d] = 0;
  }
  return ranges;
}

absl::Status CheckArguments(absl::Span<const float> src, absl::Span<const int64_t> dims,
                            absl::Span<const int64_t> group_shape, DataType code_type,
                            DataType scale_type, const void* scale_data, DataType zero_point_type,
                            const void* zero_point_data) {
  const auto error = [](const std::string& message) {
    return MakeError(ErrorKind::kInvalidArguments, absl::StrCat("ComputeScales: ", message));
  };
  const auto name = [](DataType type) { return std::string(DataTypeName(type)); };
  if (dims.size() != group_shape.size()) {
    return error(
        absl::StrCat("group_shape has ", group_shape.size(), " dims, the data ", dims.size()));
  }
  int64_t elements = 1;
  for (size_t d = 0; d < dims.size(); ++d) {
    if (dims[d] < 0 || group_shape[d] <= 0 || dims[d] % group_shape[d] != 0) {
      return error(
          absl::StrCat("groups of ", group_shape[d], " do not divide dim ", d, " of ", dims[d]));
    }
    if (__builtin_mul_overflow(elements, dims[d], &elements)) return error("dims overflow");
  }
  if (elements != static_cast<int64_t>(src.size())) {
    return error(absl::StrCat("dims hold ", elements, " elements, the data ", src.size()));
  }
  const bool f8 = code_type == kF8E4M3 || code_type == kF8E5M2;
  if (!f8 && !IsInteger(code_type)) {
    return error(absl::StrCat(name(code_type), " is not a type of codes"));
  }
  if (!IsComputeFloat(scale_type)) {
    return error(absl::StrCat("scales cannot be ", name(scale_type)));
  }
  const bool has_zero_points = zero_point_type != kUndef;
  if (has_zero_points && !IsComputeFloat(zero_point_type) && !IsInteger(zero_point_type)) {
    return error(absl::StrCat("zero points cannot be ", name(zero_point_type)));
  }
  if (has_zero_points && f8) return error(name(code_type) + " codes take no zero points");
  if (elements > 0 && (scale_data == nullptr || (has_zero_points && zero_point_data == nullptr))) {
    return error("nowhere to put the scales or zero points");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ComputeScales(absl::Span<const float> src, absl::Span<const int64_t> dims,
                           absl::Span<const int64_t> group_shape, DataType code_type,
                           DataType scale_type, void* scale_data, DataType zero_point_type,
                           void* zero_point_data) {
  KVANT_RETURN_IF_ERROR(CheckArguments(src, dims, group_shape, code_type, scale_type, scale_data,
                                       zero_point_type, zero_point_data));
  for (size_t i = 0; i < src.size(); ++i) {
    if (!std::isfinite(src[i])) {
      return MakeError(ErrorKind::kInvalidArguments,
                       absl::StrCat("ComputeScales: element ", i, " is not finite"));
    }
  }
  const Codes codes = CodesOf(code_type);
  const std::vector<Range> ranges = GroupRanges(src, dims, group_shape);
  for (size_t group = 0; group < ranges.size(); ++group) {
    auto [min, max] = ranges[group];
    const int64_t index = static_cast<int64_t>(group);
    if (zero_point_type == kUndef) {
      const double scale = std::max(std::abs(min), std::abs(max)) / codes.highest;
      StoreElement(scale_type, scale_data, index, StoredScale(scale_type, scale));
      continue;
    }
    const bool real_units = IsFloat(zero_point_type);
    if (!real_units) {
      min = std::min(min, 0.0);
      max = std::max(max, 0.0);
    }
    const double scale = StoredScale(scale_type, (max - min) / (codes.highest - codes.lowest));
    const double zero_point = real_units ? codes.lowest * scale - min
                                         : std::clamp(std::nearbyint(codes.lowest - min / scale),
                                                      codes.lowest, codes.highest);
    StoreElement(scale_type, scale_data, index, scale);
    StoreElement(zero_point_type, zero_point_data, index, zero_point);
  }
  return absl::OkStatus();
}

}  // namespace kvant
