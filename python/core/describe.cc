#include "describe.h"

#include "call.h"

namespace kvant_python {
namespace {

nb::object TupleOf(const int64_t* numbers, int32_t count) {
  nb::list result;
  for (int32_t i = 0; i < count; ++i) {
    result.append(numbers[i] == KVANT_UNKNOWN_DIM ? nb::none() : nb::object(nb::int_(numbers[i])));
  }
  return nb::tuple(result);
}

const char* NameOf(kvant_property property) {
  switch (property) {
    case KVANT_CONSTANT:
      return "constant";
    case KVANT_HOST_SCALAR:
      return "host_scalar";
    default:
      return "variable";
  }
}

}  // namespace

std::vector<int64_t> DimsOf(nb::handle dims) {
  std::vector<int64_t> result;
  for (nb::handle dim : dims) {
    result.push_back(dim.is_none() ? KVANT_UNKNOWN_DIM : nb::cast<int64_t>(dim));
  }
  return result;
}

nb::tuple Describe(const kvant_tensor& tensor) {
  const nb::object dims = tensor.rank < 0 ? nb::none() : TupleOf(tensor.dims, tensor.rank);
  const nb::object strides = tensor.rank < 0 || tensor.strides == nullptr
                                 ? nb::none()
                                 : TupleOf(tensor.strides, tensor.rank);
  const char* type = kvant_type_name(tensor.type);
  return nb::make_tuple(tensor.name, tensor.id, type, NameOf(tensor.property), dims, strides,
                        tensor.bytes);
}

kvant_tensor TensorText::Tensor(kvant_type type) const {
  auto tensor = Sized<kvant_tensor>();
  tensor.name = name.c_str();
  tensor.type = type;
  tensor.rank = dims ? static_cast<int32_t>(dims->size()) : -1;
  if (dims) tensor.dims = dims->data();
  if (strides) tensor.strides = strides->data();
  return tensor;
}

kvant_type TypeOf(const char* name) {
  const kvant_type type = kvant_type_from_name(name);
  if (type == KVANT_UNDEF) {
    Fail(KVANT_INVALID_DATA_TYPE, std::string("'") + name + "' is no data type");
  }
  return type;
}

}  // namespace kvant_python
