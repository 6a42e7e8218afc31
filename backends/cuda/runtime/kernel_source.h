// What the run-time compiler takes and gives: a unit of CUDA C++ and the machine code of it.
#ifndef KVANT_BACKENDS_CUDA_RUNTIME_KERNEL_SOURCE_H_
#define KVANT_BACKENDS_CUDA_RUNTIME_KERNEL_SOURCE_H_

#include <cstdint>
#include <optional>
#include <string>

namespace kvant::cuda {

struct KernelSource {
  // For people, error messages and file names: "decode_u4_d128_g32".
  std::string name;
  // The unit to compile. It includes embedded headers by their names in the tree:
  // "kvant/kernels/device/device.h"; there are no others.
  std::string text;
  // The kernel in it, extern "C" __global__, with one parameter: a struct by value.
  std::string entry;
};

// What ptxas says of the entry, calls that it could not inline included.
struct KernelStats {
  int registers = 0;  // per thread
  int64_t spill_store_bytes = 0;
  int64_t spill_load_bytes = 0;
  int64_t stack_bytes = 0;
  int64_t static_shared_bytes = 0;
};

struct Cubin {
  std::string bytes;  // an ELF file, what cuModuleLoadData takes
  std::string arch;   // "sm_90a"
  // Absent where NVRTC's log was not understood: nothing but checks and descriptions need it.
  std::optional<KernelStats> stats;
  // The NVRTC that made it. A driver of an older major version does not load it.
  int nvrtc_major = 0, nvrtc_minor = 0;
};

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_RUNTIME_KERNEL_SOURCE_H_
