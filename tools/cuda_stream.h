// CudaStream: a stream of a GPU's own, on which executions are captured, replayed and timed. For
// tests and benchmarks; kvant itself works on its caller's streams.
#ifndef KVANT_TOOLS_CUDA_STREAM_H_
#define KVANT_TOOLS_CUDA_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvant/backends/device_memory.h"

namespace kvant {

// Calls of libcuda that the library does without.
struct CudaStreamApi;

// What was put onto a stream while it was captured. Lives shorter than its stream.
class CudaGraph {
 public:
  CudaGraph(CudaGraph&& other) noexcept;
  CudaGraph& operator=(CudaGraph&&) = delete;
  ~CudaGraph();

 private:
  friend class CudaStream;
  CudaGraph(std::shared_ptr<const CudaStreamApi> api, void* executable)
      : api_(std::move(api)), executable_(executable) {}
  std::shared_ptr<const CudaStreamApi> api_;
  void* executable_;
};

// In the primary context of its device, which it makes the calling thread's current one for good.
// Used by one thread. Errors name the call and CUDA's error.
class CudaStream {
 public:
  // kUnimplemented: no driver, or no such device.
  static absl::StatusOr<CudaStream> Create(int device_index = 0);
  CudaStream(CudaStream&& other) noexcept;
  CudaStream& operator=(CudaStream&&) = delete;
  ~CudaStream();

  // For Stream(engine, native()).
  void* native() const { return stream_; }
  // Of the device.
  int64_t cache_bytes() const { return cache_bytes_; }
  absl::Status Synchronize() const;
  absl::Status CopyOnDevice(void* to, const void* from, size_t bytes) const;
  absl::Status CopyFromHost(void* to, const void* from, size_t bytes) const;

  // Captures what `work` puts onto this stream. Its error, or one of CUDA's where it did what a
  // stream under capture does not permit.
  absl::StatusOr<CudaGraph> Capture(const std::function<absl::Status()>& work) const;
  absl::Status Launch(const CudaGraph& graph) const;

  // How long what `work` puts onto the stream takes there, in microseconds.
  absl::StatusOr<double> Time(const std::function<absl::Status()>& work) const;

 private:
  CudaStream(std::shared_ptr<const CudaStreamApi> api, int device)
      : api_(std::move(api)), device_(device) {}
  std::shared_ptr<const CudaStreamApi> api_;
  int device_;
  int64_t cache_bytes_ = 0;
  void* stream_ = nullptr;
  void* events_[2] = {};
};

// Bytes read and written by a copy in device memory, the best of a few, of buffers that exceed the
// device's cache.
absl::StatusOr<double> MeasureCopyGbPerSecond(const CudaStream& stream, DeviceMemory& memory);

}  // namespace kvant

#endif  // KVANT_TOOLS_CUDA_STREAM_H_
