#include "kvant/integrations/onednn/names.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "kvant/graph/status.h"

namespace kvant::dnnl_abi {
namespace {

constexpr std::string_view kKindNames[] = {
#define KVANT_DNNL_OP(c_name, name) #name,
#include "kvant/integrations/onednn/op_kinds.inc"
};

struct Row {
  std::string_view name;
  int32_t number;
};
constexpr Row kAttrs[] = {
#define KVANT_DNNL_ATTR(name, number) {#name, number},
#include "kvant/integrations/onednn/attributes.inc"
};
constexpr Row kTypes[] = {
#define KVANT_DNNL_TYPE(name, number) {#name, number},
#include "kvant/integrations/onednn/data_types.inc"
};

template <size_t n>
std::string_view NameIn(const Row (&rows)[n], int32_t number) {
  for (const Row& row : rows) {
    if (row.number == number) return row.name;
  }
  return "";
}

absl::Status Lacks(std::string_view name) {
  return MakeError(ErrorKind::kUnimplemented, "oneDNN has no '", name, "'");
}

template <size_t n>
absl::StatusOr<int32_t> NumberIn(const Row (&rows)[n], std::string_view name) {
  for (const Row& row : rows) {
    if (row.name == name) return row.number;
  }
  return Lacks(name);
}

// By which layouts, properties and modes are converted.
static_assert(static_cast<int>(Layout::kUndef) == 0 && static_cast<int>(Layout::kAny) == 1 &&
              static_cast<int>(Layout::kStrided) == 2 && static_cast<int>(Layout::kOpaque) == 3);
static_assert(static_cast<int>(Property::kUndef) == 0 &&
              static_cast<int>(Property::kVariable) == 1 &&
              static_cast<int>(Property::kConstant) == 2 &&
              static_cast<int>(Property::kHostScalar) == 3);

}  // namespace

std::string_view NameOfKind(KindNumber kind) {
  const bool known = kind >= 0 && kind < static_cast<KindNumber>(std::size(kKindNames));
  return known ? kKindNames[kind] : "";
}

std::optional<OpKind> KindOf(KindNumber kind) { return OpKindFromName(NameOfKind(kind)); }

std::optional<Attr> AttrOf(AttrNumber attr) { return AttrFromName(NameIn(kAttrs, attr)); }

DataType TypeOf(TypeNumber type) {
  return DataTypeFromName(NameIn(kTypes, type)).value_or(DataType::kUndef);
}

absl::StatusOr<KindNumber> NumberOf(OpKind kind) {
  const auto found = std::find(std::begin(kKindNames), std::end(kKindNames), OpKindName(kind));
  if (found == std::end(kKindNames)) return Lacks(OpKindName(kind));
  return static_cast<KindNumber>(found - std::begin(kKindNames));
}

absl::StatusOr<AttrNumber> NumberOf(Attr attr) { return NumberIn(kAttrs, AttrName(attr)); }

absl::StatusOr<TypeNumber> NumberOf(DataType type) { return NumberIn(kTypes, DataTypeName(type)); }

size_t AttrTypeOf(AttrNumber attr) {
  static const AttrValue of_range[] = {
      float(), std::vector<float>(), int64_t(), std::vector<int64_t>(), bool(), std::string()};
  constexpr AttrNumber kEnds[] = {0x20, 0x30, 0x40, 0x60, 0x80};
  return of_range[std::upper_bound(std::begin(kEnds), std::end(kEnds), attr) - kEnds].index();
}

LogicalTensor TensorOf(const TensorDesc& desc) {
  LogicalTensor tensor;
  tensor.id = desc.id;
  tensor.type = TypeOf(desc.data_type);
  tensor.layout = static_cast<Layout>(desc.layout_type);
  tensor.property = static_cast<Property>(desc.property);
  if (desc.ndims < 0 || desc.ndims > kMostDims) return tensor;
  tensor.dims.emplace(desc.dims, desc.dims + desc.ndims);
  if (tensor.layout != Layout::kStrided) return tensor;
  const Dims strides(desc.layout.strides, desc.layout.strides + desc.ndims);
  if (std::count(strides.begin(), strides.end(), kUnknownDim) == 0) tensor.strides = strides;
  return tensor;
}

TensorDesc DescOf(const LogicalTensor& tensor) {
  TensorDesc desc = {};
  desc.id = tensor.id;
  desc.ndims = tensor.rank();
  desc.data_type = NumberOf(tensor.type).value_or(0);
  desc.property = static_cast<PropertyNumber>(tensor.property);
  desc.layout_type = static_cast<LayoutNumber>(Layout::kStrided);
  if (!tensor.dims) return desc;
  const Dims strides =
      tensor.has_shape() ? tensor.StridesOrDense() : Dims(tensor.dims->size(), kUnknownDim);
  std::copy(tensor.dims->begin(), tensor.dims->end(), desc.dims);
  std::copy(strides.begin(), strides.end(), desc.layout.strides);
  return desc;
}

}  // namespace kvant::dnnl_abi
