// What is left to fill in when a kernel is launched: the pointers in its parameters.
#ifndef KVANT_BACKENDS_CUDA_KERNEL_BINDING_H_
#define KVANT_BACKENDS_CUDA_KERNEL_BINDING_H_

#include <cstddef>
#include <vector>

namespace kvant::cuda {

// The pointer at `offset` of the parameters is that of a port.
struct PortPointer {
  size_t offset = 0;
  int port = 0;
  bool output = false;
};

// The pointer at `offset` of the parameters is so far into the partition's constants.
struct ConstantPointer {
  size_t offset = 0;
  size_t at = 0;
};

struct KernelBinding {
  std::vector<PortPointer> ports;
  std::vector<ConstantPointer> constants;
  // Copied to the device when the partition is compiled.
  std::vector<std::byte> constant_bytes;
};

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_KERNEL_BINDING_H_
