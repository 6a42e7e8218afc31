// DeviceProperties: what kernels are chosen and sized by.
#ifndef KVANT_BACKENDS_CUDA_RUNTIME_DEVICE_PROPERTIES_H_
#define KVANT_BACKENDS_CUDA_RUNTIME_DEVICE_PROPERTIES_H_

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace kvant::cuda {

struct DeviceProperties {
  std::string name;          // "NVIDIA H100 80GB HBM3"
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  size_t shared_bytes_per_block = 0;  // the most that a kernel can ask for
  size_t shared_bytes_per_multiprocessor = 0;
  int threads_per_multiprocessor = 0;
  size_t l2_bytes = 0;
  size_t memory_bytes = 0;

  // The target to compile for: "sm_90a" for 9.0 and "sm_100a" for 10.0, whose own instructions
  // are worth having; else the compute capability, "sm_86".
  std::string arch() const;
};

// Of a GPU with that target, where there is none to ask: compute capability and shared memory by
// CUDA's programming guide (table of technical specifications), multiprocessors of the largest.
// kInvalidArguments: a target that is not known, with those that are.
absl::StatusOr<DeviceProperties> PropertiesOf(std::string_view arch);

// The registers that a thread may have where `blocks` blocks of `threads` threads are to be on a
// multiprocessor at once: it has 64 Ki, and a warp gets them by 256. (CUDA's programming guide,
// table of technical specifications; all architectures from 8.0 on.)
int RegisterLimit(int threads, int blocks);

// How many blocks are on a multiprocessor at once, so far as shared memory, registers and threads
// go. shared_bytes: that a block asks for.
int BlocksPerMultiprocessor(const DeviceProperties& device, int threads, int registers,
                            size_t shared_bytes);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_RUNTIME_DEVICE_PROPERTIES_H_
