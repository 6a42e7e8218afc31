// Structs of the C ABI as Python's tuples, and the other way round.
#ifndef KVANT_PYTHON_CORE_DESCRIBE_H_
#define KVANT_PYTHON_CORE_DESCRIBE_H_

#include <kvant/integrations/c/kvant_c.h>
#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvant_python {

namespace nb = nanobind;

// One zeroed, with its size set.
template <typename T>
T Sized() {
  T result = {};
  result.size = sizeof(T);
  return result;
}

// Dims as Python says them: None is a dim that is not known.
std::vector<int64_t> DimsOf(nb::handle dims);

// (name, id, type, property, dims, strides, bytes): dims and strides are tuples, or None where they
// are not known.
nb::tuple Describe(const kvant_tensor& tensor);

// What a kvant_tensor points to.
struct TensorText {
  std::string name;
  std::optional<std::vector<int64_t>> dims, strides;

  // Points to this.
  kvant_tensor Tensor(kvant_type type) const;
};

// Throws kvant.Error for a name that is no type's.
kvant_type TypeOf(const char* name);

}  // namespace kvant_python

#endif  // KVANT_PYTHON_CORE_DESCRIBE_H_
