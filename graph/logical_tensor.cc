#include "kvant/graph/logical_tensor.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

// 64 bits per element at most, so that byte and bit counts fit too.
constexpr int64_t kMostElements = std::numeric_limits<int64_t>::max() / 64;

bool CompatibleDims(const std::optional<Dims>& a, const std::optional<Dims>& b) {
  return !a || !b || MayEqual(*a, *b);
}

// Span in elements, nothing on overflow and where dims are unknown.
std::optional<int64_t> CheckedSpan(const LogicalTensor& tensor) {
  if (!tensor.has_shape()) return std::nullopt;
  if (!tensor.strides) return CheckedProduct(*tensor.dims);
  int64_t span = 1;
  int64_t reach = 1;  // up to the last element
  for (size_t i = 0; i < tensor.dims->size(); ++i) {
    const int64_t dim = (*tensor.dims)[i];
    if (dim == 0) return 0;
    if (i == tensor.strides->size()) return std::nullopt;
    int64_t extent = 0;
    const int64_t stride = dim == 1 ? 1 : (*tensor.strides)[i];
    if (stride == kUnknownDim) return CheckedProduct(*tensor.dims);
    if (__builtin_mul_overflow(dim, stride, &extent)) return std::nullopt;
    span = std::max(span, extent);
    if (__builtin_add_overflow(reach, extent - stride, &reach)) return std::nullopt;
  }
  // Views that overlap themselves, such as sliding windows, reach beyond any extent.
  return std::max(span, reach);
}

}  // namespace

bool LogicalTensor::has_shape() const {
  return dims && std::ranges::count(*dims, kUnknownDim) == 0;
}

int64_t LogicalTensor::elements() const { return dims ? CheckedProduct(*dims).value_or(0) : 0; }

Dims LogicalTensor::StridesOrDense() const {
  if (strides && std::ranges::count(*strides, kUnknownDim) == 0) return *strides;
  return dims ? DenseStrides(*dims) : Dims();
}

int64_t LogicalTensor::span_elements() const { return CheckedSpan(*this).value_or(0); }

int64_t LogicalTensor::memory_bytes() const {
  const int64_t span = span_elements();
  return span > kMostElements ? 0 : BytesFor(type, span);
}

std::string LogicalTensor::Label() const {
  if (name.empty()) return absl::StrCat("tensor ", id);
  return absl::StrCat("tensor ", id, " '", Printable(name), "'");
}

std::string LogicalTensor::ToString() const {
  const std::string type_name(DataTypeName(type));
  if (value) return absl::StrCat(type_name, " ", value->ToString());
  return dims ? absl::StrCat(type_name, "[", DimsToString(*dims), "]") : type_name + "[*]";
}

const LogicalTensor& NoTensor() {
  static const LogicalTensor* const none = new LogicalTensor();
  return *none;
}

bool Compatible(const LogicalTensor& a, const LogicalTensor& b) {
  return a.type == b.type && CompatibleDims(a.dims, b.dims) &&
         CompatibleDims(a.strides, b.strides) && (!a.value || !b.value || a.value == b.value);
}

absl::Status ValidateTensor(const LogicalTensor& tensor) {
  const auto error = [&](const auto&... what) {
    return MakeError(ErrorKind::kInvalidShape, tensor.Label(), " ", tensor.ToString(), ": ",
                     what...);
  };
  if (DataTypeName(tensor.type).empty()) {
    return MakeError(ErrorKind::kInvalidDataType, tensor.Label(), " is of data type ",
                     static_cast<int>(tensor.type), ", which there is not");
  }
  if (tensor.value && (tensor.property != Property::kConstant || tensor.rank() != 0 ||
                       tensor.value->type() != tensor.type)) {
    return error("a value is that of a constant without dims, of its type");
  }
  if (tensor.property == Property::kHostScalar &&
      (tensor.rank() > 0 || (tensor.type != kF32 && tensor.type != kS32 && tensor.type != kS64))) {
    return error("a host scalar is f32, s32 or s64, without dims");
  }
  if (!tensor.dims) return absl::OkStatus();
  if (tensor.rank() > kMaxRank) {
    return error("rank ", tensor.rank(), " exceeds ", kMaxRank);
  }
  for (int64_t dim : *tensor.dims) {
    if (dim < 0 && dim != kUnknownDim) return error("negative dim ", dim);
  }
  if (tensor.strides) {
    if (tensor.strides->size() != tensor.dims->size()) {
      return error(tensor.strides->size(), " strides for ", tensor.rank(), " dims");
    }
    for (int64_t stride : *tensor.strides) {
      if (stride < 0 && stride != kUnknownDim) {
        return error("negative stride ", stride);
      }
    }
  }
  if (!tensor.has_shape()) return absl::OkStatus();
  const std::optional<int64_t> span = CheckedSpan(tensor);
  const std::optional<int64_t> elements = CheckedProduct(*tensor.dims);
  if (!span || !elements || *span > kMostElements || *elements > kMostElements) {
    return error("its size overflows 64 bits");
  }
  return absl::OkStatus();
}

int64_t ElementsOf(absl::Span<const int64_t> dims) {
  int64_t elements = 1;
  for (int64_t dim : dims) elements *= dim;
  return elements;
}

Dims DenseStrides(absl::Span<const int64_t> dims) {
  Dims strides(dims.size(), 1);
  for (size_t i = dims.size(); i-- > 1;) {
    strides[i - 1] = static_cast<int64_t>(static_cast<uint64_t>(strides[i]) *
                                          static_cast<uint64_t>(std::max<int64_t>(dims[i], 1)));
  }
  return strides;
}

bool MayEqual(absl::Span<const int64_t> a, absl::Span<const int64_t> b) {
  return std::ranges::equal(a, b, [](int64_t x, int64_t y) { return MayEqual(x, y); });
}

void Complete(Dims& dims, absl::Span<const int64_t> other) {
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] == kUnknownDim) dims[i] = other[i];
  }
}

std::string DimsToString(absl::Span<const int64_t> dims) {
  return absl::StrJoin(dims, ",", [](std::string* out, int64_t dim) {
    absl::StrAppend(out, dim == kUnknownDim ? "?" : absl::StrCat(dim));
  });
}

std::optional<int64_t> CheckedProduct(absl::Span<const int64_t> dims) {
  int64_t product = 1;
  bool zero = false;
  for (int64_t dim : dims) {
    if (dim == kUnknownDim) return std::nullopt;
    if (dim == 0) {
      zero = true;
    } else if (__builtin_mul_overflow(product, dim, &product)) {
      return std::nullopt;
    }
  }
  return zero ? 0 : product;
}

int BroadcastInto(Dims& dims, absl::Span<const int64_t> other) {
  if (other.size() > dims.size()) dims.insert(dims.begin(), other.size() - dims.size(), 1);
  const size_t offset = dims.size() - other.size();
  for (size_t i = 0; i < other.size(); ++i) {
    int64_t& mine = dims[offset + i];
    const int64_t theirs = other[i];
    if (mine == theirs || theirs == 1) continue;
    if (mine == 1 || mine == kUnknownDim) {
      mine = theirs;
    } else if (theirs != kUnknownDim) {
      return static_cast<int>(offset + i);
    }
  }
  return -1;
}

std::optional<Dims> Broadcast(absl::Span<const int64_t> a, absl::Span<const int64_t> b) {
  Dims result(a.begin(), a.end());
  if (BroadcastInto(result, b) >= 0) return std::nullopt;
  return result;
}

}  // namespace kvant
