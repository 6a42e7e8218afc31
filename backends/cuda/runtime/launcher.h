// Launcher: one device that kernels are loaded onto and launched on. The driver's is a GPU; the
// SIMT executor's runs the same kernels as host functions, for tests.
#ifndef KVANT_BACKENDS_CUDA_RUNTIME_LAUNCHER_H_
#define KVANT_BACKENDS_CUDA_RUNTIME_LAUNCHER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvant/backends/cuda/runtime/device_properties.h"
#include "kvant/backends/cuda/runtime/kernel_source.h"
#include "kvant/backends/device_memory.h"

namespace kvant::cuda {

// One round of a kernel's steady loop over tokens, for tools that count its instructions.
struct KernelRound {
  int64_t elements = 0;  // of K and V that a block takes in; 0: there is no such loop
  // How often each loop within the round is gone through, in the order of the source.
  std::vector<int> loops;
};

// One specialisation of a kernel.
struct KernelSpec {
  KernelSource source;
  // What is constant in the source, kernel_traits.h: by it the SIMT executor finds its own.
  std::vector<int32_t> traits;
  // Of every launch. Shared memory is the dynamic part.
  int threads = 0;
  size_t shared_bytes = 0;
  // Blocks of a multiprocessor that the source has the compiler leave registers for.
  int blocks_per_multiprocessor = 1;
  KernelRound round;
};

// A kernel on a device. May outlive its launcher.
class LoadedKernel {
 public:
  virtual ~LoadedKernel() = default;
  // For people: registers, shared memory, where the code came from.
  virtual std::string description() const = 0;
};

// Of a launch's parameters. What every driver and compiler takes; newer ones take more.
inline constexpr size_t kMaxParamBytes = 4096;

// All methods may be called from several threads at once.
class Launcher {
 public:
  virtual ~Launcher() = default;
  virtual const DeviceProperties& properties() const = 0;

  // Compiles, or takes from a cache, and puts it onto the device: at compile time of a partition,
  // not while a stream is captured. kInvalidArguments: more threads or shared memory than a block
  // may have.
  virtual absl::StatusOr<std::shared_ptr<const LoadedKernel>> Load(const KernelSpec& spec) = 0;

  // Puts one launch onto `stream` (a CUstream of this device's primary context, or null for the
  // default stream), with the struct `params` by value. Neither allocates nor synchronises, so a
  // stream may be captured; an error of the kernel itself shows in a later call. `kernel` is one
  // that this launcher loaded.
  virtual absl::Status Launch(const LoadedKernel& kernel, int64_t blocks, const void* params,
                              size_t param_bytes, void* stream) const = 0;

  // The device's; it may outlive the launcher.
  virtual std::shared_ptr<DeviceMemory> memory() const = 0;
};

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_RUNTIME_LAUNCHER_H_
