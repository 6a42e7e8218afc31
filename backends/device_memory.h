// DeviceMemory: where the tensors and the scratch of an engine lie.
#ifndef KVANT_BACKENDS_DEVICE_MEMORY_H_
#define KVANT_BACKENDS_DEVICE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvant {

// All methods may be called from several threads at once.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  // Zeroed, aligned to 256 bytes; null for 0 bytes, which Free takes. kResourceExhausted with the
  // bytes asked for.
  virtual absl::StatusOr<void*> Allocate(size_t bytes) = 0;
  virtual void Free(void* memory) = 0;

  // The host's memory, zeroed, that kernels of this device write too, each element of 64 bits at
  // once: what the host may look at without waiting. kResourceExhausted.
  virtual absl::StatusOr<void*> AllocateOnHost(size_t bytes) = 0;
  virtual void FreeOnHost(void* memory) = 0;

  // Between this memory and the host's; done when they return. What is under way on a stream that
  // does not wait for the default one may come before or after: SynchronizeAll orders it.
  virtual absl::Status CopyFromHost(void* to, const void* from, size_t bytes) = 0;
  virtual absl::Status CopyToHost(void* to, const void* from, size_t bytes) = 0;
  // Waits for what was put onto `stream` (Stream::native()).
  virtual absl::Status Synchronize(void* stream) = 0;

  // Whether executions are only put onto a stream by Execute, and run later, in its order.
  virtual bool asynchronous() const = 0;
  // The first of the pointers that kernels cannot reach, and why, to follow a tensor's name. Null
  // is passed over.
  struct Unreachable {
    size_t index;
    std::string why;
  };
  virtual std::optional<Unreachable> FindUnreachable(
      absl::Span<const void* const> pointers) const = 0;
  // A stream by a number that no other ever has, while a handle may stand for another stream in
  // each thread, or for a new one after the old is gone. While it is captured, what is put onto it
  // runs whenever the graph does; its number is then the last that its handle had, and
  // kInvalidArguments says that there is none. (So of two streams with one handle, the second may
  // not be captured before anything was executed on it.)
  struct StreamOrder {
    uint64_t id = 0;
    bool captured = false;
  };
  virtual absl::StatusOr<StreamOrder> OrderOf(void* stream) = 0;
  // Whether what is put onto it only becomes part of a graph.
  virtual absl::StatusOr<bool> IsCaptured(void* stream) = 0;
  // Waits for what was put onto any stream.
  virtual absl::Status SynchronizeAll() = 0;
};

// The host's own.
std::shared_ptr<DeviceMemory> MakeHostMemory();

}  // namespace kvant

#endif  // KVANT_BACKENDS_DEVICE_MEMORY_H_
