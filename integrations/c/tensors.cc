#include "kvant/integrations/c/tensors.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"
#include "kvant/integrations/c/call.h"

namespace kvant::c {
namespace {

// By which types are converted.
static_assert(static_cast<int>(kUndef) == KVANT_UNDEF && static_cast<int>(kF16) == KVANT_F16 &&
              static_cast<int>(kBF16) == KVANT_BF16 && static_cast<int>(kF32) == KVANT_F32 &&
              static_cast<int>(kS32) == KVANT_S32 && static_cast<int>(kS8) == KVANT_S8 &&
              static_cast<int>(kU8) == KVANT_U8 && static_cast<int>(kBoolean) == KVANT_BOOLEAN &&
              static_cast<int>(kF8E5M2) == KVANT_F8_E5M2 &&
              static_cast<int>(kF8E4M3) == KVANT_F8_E4M3 && static_cast<int>(kS4) == KVANT_S4 &&
              static_cast<int>(kU4) == KVANT_U4 && static_cast<int>(kS64) == KVANT_S64 &&
              static_cast<int>(kS2) == KVANT_S2 && static_cast<int>(kU2) == KVANT_U2);
static_assert(KVANT_UNKNOWN_DIM == kUnknownDim);

// DLPack's codes; those beyond kDLComplex are of DLPack 1.1 (include/dlpack/dlpack.h).
constexpr uint8_t kDlBool = 6, kDlF8E4M3 = 10, kDlF8E5M2 = 12;

DLDataType DlTypeOf(DataType type) {
  uint8_t code = kDLUInt;
  switch (type) {
    case kF16:
    case kF32:
      code = kDLFloat;
      break;
    case kBF16:
      code = kDLBfloat;
      break;
    case kF8E5M2:
      code = kDlF8E5M2;
      break;
    case kF8E4M3:
      code = kDlF8E4M3;
      break;
    case kBoolean:
      code = kDlBool;
      break;
    case kS64:
    case kS32:
    case kS8:
    case kS4:
    case kS2:
      code = kDLInt;
      break;
    default:
      break;
  }
  return {code, static_cast<uint8_t>(BitsOf(type)), 1};
}

bool operator==(const DLDataType& a, const DLDataType& b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

// What may stand for a type that a producer of tensors lacks.
bool HasBytesFor(DataType type) {
  return BitsOf(type) < 8 || type == kF8E4M3 || type == kF8E5M2 || type == kBoolean;
}

}  // namespace

std::string DeviceText(const DLDevice& device) {
  const std::string index = absl::StrCat(":", device.device_id);
  switch (device.device_type) {
    case kDLCPU:
      return "cpu";
    case kDLCUDA:
    case kDLCUDAManaged:
      return "cuda" + index;
    case kDLCUDAHost:
      return "pinned memory of the cpu";
    default:
      return absl::StrCat("DLPack device ", static_cast<int>(device.device_type), index);
  }
}

bool Reaches(const DLDevice& engine, const DLDevice& memory) {
  if (engine.device_type == kDLCPU) {
    return memory.device_type == kDLCPU || memory.device_type == kDLCUDAHost ||
           memory.device_type == kDLROCMHost;
  }
  return (memory.device_type == kDLCUDA || memory.device_type == kDLCUDAManaged) &&
         memory.device_id == engine.device_id;
}

absl::StatusOr<DataType> TypeOf(kvant_type type) {
  const auto number = static_cast<unsigned>(type);
  if (number <= KVANT_U2) return static_cast<DataType>(number);
  return MakeError(ErrorKind::kInvalidDataType, number, " is no data type");
}

absl::StatusOr<LogicalTensor> TensorOf(const kvant_tensor& given) {
  LogicalTensor tensor;
  tensor.id = given.id;
  if (given.name != nullptr) tensor.name = given.name;
  KVANT_ASSIGN_OR_RETURN(tensor.type, TypeOf(given.type));
  switch (given.property) {
    case KVANT_VARIABLE:
      tensor.property = Property::kVariable;
      break;
    case KVANT_CONSTANT:
      tensor.property = Property::kConstant;
      break;
    case KVANT_HOST_SCALAR:
      tensor.property = Property::kHostScalar;
      break;
    default:
      return InvalidArguments(static_cast<int>(given.property), " is no property of a tensor");
  }
  if (given.rank < 0) return tensor;
  if (given.rank > kMaxRank) {
    return InvalidArguments("a rank of ", given.rank, " is above ", kMaxRank);
  }
  if (given.rank > 0) KVANT_RETURN_IF_ERROR(NotNull({{"dims", given.dims}}));
  tensor.dims = Dims(given.dims, given.dims + given.rank);
  if (given.strides != nullptr) tensor.strides = Dims(given.strides, given.strides + given.rank);
  return tensor;
}

kvant_tensor Describe(const LogicalTensor& tensor) {
  kvant_tensor result = {};
  result.id = tensor.id;
  result.name = tensor.name.c_str();
  result.type = static_cast<kvant_type>(tensor.type);
  result.property = tensor.property == Property::kHostScalar ? KVANT_HOST_SCALAR
                    : tensor.property == Property::kConstant ? KVANT_CONSTANT
                                                             : KVANT_VARIABLE;
  result.rank = tensor.rank();
  if (tensor.dims) result.dims = tensor.dims->data();
  if (tensor.strides) result.strides = tensor.strides->data();
  if (tensor.has_shape()) result.bytes = tensor.memory_bytes();
  return result;
}

std::optional<DataType> TypeOf(const DLDataType& type) {
  for (int i = 1; i <= KVANT_U2; ++i) {
    if (DlTypeOf(static_cast<DataType>(i)) == type) return static_cast<DataType>(i);
  }
  return std::nullopt;
}

std::string Describe(const DLTensor& tensor) {
  const std::optional<DataType> type = TypeOf(tensor.dtype);
  const std::string dims =
      tensor.ndim > 0 ? DimsToString(absl::MakeConstSpan(tensor.shape, tensor.ndim)) : "";
  static constexpr std::string_view kCodes[] = {"s", "u", "f"};
  const bool plain = tensor.dtype.code <= kDLFloat && tensor.dtype.lanes == 1;
  const std::string name =
      type ? std::string(DataTypeName(*type))
      : plain
          ? absl::StrCat(std::string(kCodes[tensor.dtype.code]), tensor.dtype.bits)
          : absl::StrCat(
                "DLPack type ", tensor.dtype.code, " of ", tensor.dtype.bits, " bits",
                tensor.dtype.lanes == 1 ? "" : absl::StrCat(" and ", tensor.dtype.lanes, " lanes"),
                " ");
  return absl::StrCat(name, "[", dims, "]");
}

Port::Port(std::string name, const LogicalTensor& tensor, const DLDevice& device, bool of_graph)
    : name_(std::move(name)),
      type_(tensor.type),
      dims_(*tensor.dims),
      strides_(tensor.StridesOrDense()),
      dl_type_(DlTypeOf(tensor.type)),
      device_(tensor.property == Property::kHostScalar ? DLDevice{kDLCPU, 0} : device),
      bytes_(static_cast<size_t>(tensor.memory_bytes())),
      of_graph_(of_graph) {
  const int bits = BitsOf(type_);
  if (bits >= 8 || dims_.empty()) return;
  // Rows that begin within a byte cannot be said in bytes, unless the whole tensor is one row.
  const int64_t in_byte = 8 / bits;
  const size_t last = dims_.size() - 1;
  if (dims_[last] > 1 && strides_[last] != 1) return;
  Dims dims = dims_, strides = strides_;
  dims[last] = (dims[last] + in_byte - 1) / in_byte;
  for (size_t d = 0; d < last; ++d) {
    if (dims[d] > 1 && strides[d] % in_byte != 0) return;
    strides[d] /= in_byte;
  }
  strides[last] = 1;
  packed_dims_ = std::move(dims);
  packed_strides_ = std::move(strides);
}

bool Port::HasDims(const DLTensor& tensor, const Dims& dims, const Dims& strides) const {
  const auto rank = static_cast<size_t>(tensor.ndim);
  if (rank != dims.size()) {
    // One number may be given as [1].
    return dims.empty() && rank == 1 && tensor.shape[0] == 1;
  }
  bool same = true, empty = false;
  int64_t dense = 1;
  for (size_t d = rank; d-- > 0;) {
    if (tensor.shape[d] != dims[d]) return false;
    const int64_t stride = tensor.strides == nullptr ? dense : tensor.strides[d];
    same &= dims[d] == 1 || stride == strides[d];
    dense *= dims[d];
    empty |= dims[d] == 0;
  }
  return same || empty;
}

bool Port::IsBytes(const DLTensor& tensor) const {
  return tensor.dtype.bits == 8 && tensor.dtype.lanes == 1 &&
         (tensor.dtype.code == kDLUInt || tensor.dtype.code == kDLInt) && HasBytesFor(type_);
}

absl::Status Port::Mismatch(const DLTensor& tensor) const {
  const bool packed = IsBytes(tensor) && BitsOf(type_) < 8;
  const auto error = [&](auto... words) {
    return InvalidArguments(name_, " is ", Describe(tensor), ", but must ", words...);
  };
  std::string wanted =
      absl::StrCat(std::string(DataTypeName(type_)), "[", DimsToString(dims_), "]");
  if (packed_dims_) {
    absl::StrAppend(&wanted, ", or u8[", DimsToString(*packed_dims_), "] that hold it packed");
  }
  if (packed && !packed_dims_) {
    return error("be ", wanted, ": its rows do not begin at bytes");
  }
  if (!(tensor.dtype == dl_type_) && !IsBytes(tensor)) return error("be ", wanted);
  const Dims& dims = packed ? *packed_dims_ : dims_;
  if (absl::MakeConstSpan(tensor.shape, tensor.ndim) != absl::MakeConstSpan(dims)) {
    return error("be ", wanted);
  }
  return error("have strides [", DimsToString(packed ? *packed_strides_ : strides_), "], not [",
               tensor.strides == nullptr
                   ? DimsToString(DenseStrides(dims))
                   : DimsToString(absl::MakeConstSpan(tensor.strides, tensor.ndim)),
               "]; ", of_graph_ ? "compile the graph for these strides, or " : "", "make it dense");
}

absl::StatusOr<Tensor> Port::Take(const DLTensor* given) const {
  if (given == nullptr) return InvalidArguments(name_, " is null");
  const DLTensor& tensor = *given;
  if (tensor.ndim < 0 || (tensor.ndim > 0 && tensor.shape == nullptr)) {
    return InvalidArguments(name_, " has ", tensor.ndim, " dims and no shape");
  }
  // Checked before dims are read, for an error's text too: such a rank is garbage.
  if (tensor.ndim > kMaxRank) {
    return InvalidArguments(name_, " has ", tensor.ndim, " dims, and a tensor ", kMaxRank,
                            " at most");
  }
  const bool bytes = !(tensor.dtype == dl_type_) && IsBytes(tensor);
  const bool packed = bytes && BitsOf(type_) < 8;
  const bool fits = packed
                        ? packed_dims_ && HasDims(tensor, *packed_dims_, *packed_strides_)
                        : (bytes || tensor.dtype == dl_type_) && HasDims(tensor, dims_, strides_);
  if (!fits) return Mismatch(tensor);
  if (!Reaches(device_, tensor.device)) {
    return InvalidArguments(name_, " is in the memory of ", DeviceText(tensor.device),
                            ", but must be in that of ", DeviceText(device_));
  }
  if (tensor.data == nullptr && bytes_ > 0) return InvalidArguments(name_, " has no memory");
  return Tensor{tensor.data == nullptr ? nullptr : DataOf(tensor), bytes_};
}

extern "C" {

const char* kvant_type_name(kvant_type type) {
  const auto known = TypeOf(type);
  return known.ok() ? DataTypeName(*known).data() : nullptr;
}

kvant_type kvant_type_from_name(const char* name) {
  if (name == nullptr) return KVANT_UNDEF;
  return static_cast<kvant_type>(DataTypeFromName(name).value_or(kUndef));
}

int32_t kvant_type_bits(kvant_type type) {
  const auto known = TypeOf(type);
  return known.ok() ? BitsOf(*known) : 0;
}

}  // extern "C"
}  // namespace kvant::c
