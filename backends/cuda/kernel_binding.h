// What is left to fill in when a kernel is launched: the pointers in its parameters.
#ifndef KVANT_BACKENDS_CUDA_KERNEL_BINDING_H_
#define KVANT_BACKENDS_CUDA_KERNEL_BINDING_H_

#include <cstddef>
#include <cstring>
#include <vector>

#include "absl/types/span.h"

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

inline void SetPointer(void* params, size_t offset, const void* pointer) {
  std::memcpy(static_cast<std::byte*>(params) + offset, &pointer, sizeof(pointer));
}

inline void FillPointers(const KernelBinding& binding, absl::Span<const void* const> inputs,
                         absl::Span<void* const> outputs, const std::byte* constants,
                         void* params) {
  for (const PortPointer& pointer : binding.ports) {
    SetPointer(params, pointer.offset,
               pointer.output ? outputs[pointer.port] : inputs[pointer.port]);
  }
  for (const ConstantPointer& pointer : binding.constants) {
    SetPointer(params, pointer.offset, constants + pointer.at);
  }
}

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_KERNEL_BINDING_H_
