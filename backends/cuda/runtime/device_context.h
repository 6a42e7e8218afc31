// DeviceContext: a device's primary context, its memory, and what is done in it.
#ifndef KVANT_BACKENDS_CUDA_RUNTIME_DEVICE_CONTEXT_H_
#define KVANT_BACKENDS_CUDA_RUNTIME_DEVICE_CONTEXT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/backends/cuda/runtime/driver.h"
#include "kvant/backends/device_memory.h"

namespace kvant::cuda {

// The primary context is the one that frameworks use too, so their pointers and streams are good
// here. Every call makes it current for its own duration and leaves the thread's context as it was:
// several devices and several threads may be mixed freely. Streams: null is the default stream.
class DeviceContext : public DeviceMemory {
 public:
  static absl::StatusOr<std::shared_ptr<DeviceContext>> Retain(std::shared_ptr<const Driver> driver,
                                                               int device_index);
  ~DeviceContext() override;
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  const Driver& driver() const { return *driver_; }

  // `image`: a cubin.
  absl::StatusOr<CUmodule> LoadModule(const std::string& image) const;
  void UnloadModule(CUmodule module) const;
  absl::StatusOr<CUfunction> FindFunction(CUmodule module, const std::string& name) const;
  // Lets launches of `function` ask for that much dynamic shared memory.
  absl::Status AllowSharedBytes(CUfunction function, size_t bytes) const;

  struct LaunchShape {
    unsigned blocks = 0;
    unsigned threads = 0;
    unsigned shared_bytes = 0;
  };
  // One launch, its only parameter the `param_bytes` bytes at `params`.
  absl::Status Launch(CUfunction function, const LaunchShape& shape, const void* params,
                      size_t param_bytes, CUstream stream) const;

  // Pinned, of the same address on the device; for every context.
  absl::StatusOr<void*> AllocateOnHost(size_t bytes) override;
  void FreeOnHost(void* memory) override;
  absl::StatusOr<void*> Allocate(size_t bytes) override;
  void Free(void* memory) override;
  absl::Status CopyFromHost(void* to, const void* from, size_t bytes) override;
  absl::Status CopyToHost(void* to, const void* from, size_t bytes) override;
  absl::Status Synchronize(void* stream) override;
  bool asynchronous() const override { return true; }
  std::optional<Unreachable> FindUnreachable(absl::Span<const void* const> pointers) const override;
  absl::StatusOr<StreamOrder> OrderOf(void* stream) override;
  absl::StatusOr<bool> IsCaptured(void* stream) override;
  absl::Status SynchronizeAll() override;

 private:
  DeviceContext(std::shared_ptr<const Driver> driver, int device_index, CUdevice device,
                CUcontext context)
      : driver_(std::move(driver)),
        device_index_(device_index),
        device_(device),
        context_(context) {}

  // With the context current.
  absl::Status AskCaptured(CUstream stream, bool& captured) const;
  std::string WhyUnreachable(const void* pointer) const;

  // body() with the context current.
  template <class Body>
  absl::Status Within(Body body) const;
  // Check of that call, with the context current.
  template <class... Parameters, class... Arguments>
  absl::Status Call(const char* name, CUresult (*DriverApi::*entry)(Parameters...),
                    Arguments... arguments) const;

  std::shared_ptr<const Driver> driver_;
  int device_index_;
  CUdevice device_;
  CUcontext context_;
  std::mutex mutex_;
  absl::flat_hash_map<CUstream, std::optional<uint64_t>> last_ids_;  // that handles had
};

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_RUNTIME_DEVICE_CONTEXT_H_
