// Tensor: memory handed to an execution. Not owned.
#ifndef KVANT_BACKENDS_TENSOR_H_
#define KVANT_BACKENDS_TENSOR_H_

#include <cstddef>

namespace kvant {

// Laid out by the strides of the port it is given for, dense row-major if the
// port has none. `bytes` is what may be read or written from `data`; it must be
// at least the port's memory_bytes().
struct Tensor {
  void* data = nullptr;
  size_t bytes = 0;
};
struct ConstTensor {
  const void* data = nullptr;
  size_t bytes = 0;

  ConstTensor() = default;
  ConstTensor(const void* data, size_t bytes) : data(data), bytes(bytes) {}
  ConstTensor(const Tensor& tensor) : data(tensor.data), bytes(tensor.bytes) {}  // NOLINT
};

// Of the memory that an execution is given as scratch, in bytes.
inline constexpr size_t kScratchAlignment = 64;

}  // namespace kvant

#endif  // KVANT_BACKENDS_TENSOR_H_
