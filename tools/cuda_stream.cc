#include "kvant/tools/cuda_stream.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cuda/runtime/driver.h"
#include "kvant/backends/cuda/runtime/shared_library.h"
#include "kvant/graph/status.h"

namespace kvant {

using cuda::CUdeviceptr;
using cuda::CUresult;

// As in cuda.h; handles are pointers to what only the driver knows.
#define KVANT_CUDA_STREAM_ENTRIES(ENTRY)                                                     \
  ENTRY(CtxSetCurrent, cuCtxSetCurrent, (void* context))                                     \
  ENTRY(StreamCreate, cuStreamCreate, (void** stream, unsigned flags))                       \
  ENTRY(StreamDestroy, cuStreamDestroy_v2, (void* stream))                                   \
  ENTRY(StreamBeginCapture, cuStreamBeginCapture_v2, (void* stream, int mode))               \
  ENTRY(StreamEndCapture, cuStreamEndCapture, (void* stream, void** graph))                  \
  ENTRY(GraphInstantiate, cuGraphInstantiateWithFlags,                                       \
        (void** executable, void* graph, unsigned long long flags))                          \
  ENTRY(GraphDestroy, cuGraphDestroy, (void* graph))                                         \
  ENTRY(GraphExecDestroy, cuGraphExecDestroy, (void* executable))                            \
  ENTRY(GraphLaunch, cuGraphLaunch, (void* executable, void* stream))                        \
  ENTRY(EventCreate, cuEventCreate, (void** event, unsigned flags))                          \
  ENTRY(EventDestroy, cuEventDestroy_v2, (void* event))                                      \
  ENTRY(EventRecord, cuEventRecord, (void* event, void* stream))                             \
  ENTRY(EventSynchronize, cuEventSynchronize, (void* event))                                 \
  ENTRY(EventElapsedTime, cuEventElapsedTime, (float* milliseconds, void* start, void* end)) \
  ENTRY(MemcpyDtoDAsync, cuMemcpyDtoDAsync_v2,                                               \
        (CUdeviceptr to, CUdeviceptr from, size_t bytes, void* stream))

struct CudaStreamApi {
  std::shared_ptr<const cuda::Driver> driver;
#define KVANT_CUDA_MEMBER(member, symbol, parameters) CUresult(*member) parameters = nullptr;
  KVANT_CUDA_STREAM_ENTRIES(KVANT_CUDA_MEMBER)
#undef KVANT_CUDA_MEMBER
};

namespace {

constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
// CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: calls of this thread that capturing does not permit fail.
constexpr int kThreadLocal = 1;

absl::StatusOr<std::shared_ptr<const CudaStreamApi>> OpenApi() {
  auto api = std::make_shared<CudaStreamApi>();
  KVANT_ASSIGN_OR_RETURN(api->driver, cuda::Driver::Open());
  // The driver is open already; this finds the same library again.
  KVANT_ASSIGN_OR_RETURN(const cuda::SharedLibrary library,
                         cuda::SharedLibrary::Open(cuda::NamesOrOverride(
                             "KVANT_LIBCUDA", {"libcuda.so.1", "libcuda.so"})));
#define KVANT_CUDA_RESOLVE(member, symbol, parameters)                                    \
  api->member = reinterpret_cast<CUresult(*) parameters>(library.Symbol(#symbol));        \
  if (api->member == nullptr) {                                                           \
    return MakeError(ErrorKind::kUnimplemented,                                           \
                     absl::StrCat("NVIDIA driver ", library.name(), " has no " #symbol)); \
  }
  KVANT_CUDA_STREAM_ENTRIES(KVANT_CUDA_RESOLVE)
#undef KVANT_CUDA_RESOLVE
  return api;
}

}  // namespace

#define KVANT_CUDA_CALL(member, ...) \
  KVANT_RETURN_IF_ERROR(api_->driver->Check(api_->member(__VA_ARGS__), "cu" #member))

CudaGraph::CudaGraph(CudaGraph&& other) noexcept
    : api_(std::move(other.api_)), executable_(std::exchange(other.executable_, nullptr)) {}

CudaGraph::~CudaGraph() {
  if (executable_ != nullptr) api_->GraphExecDestroy(executable_);
}

absl::StatusOr<CudaStream> CudaStream::Create(int device_index) {
  KVANT_ASSIGN_OR_RETURN(std::shared_ptr<const CudaStreamApi> api, OpenApi());
  const cuda::Driver& driver = *api->driver;
  KVANT_ASSIGN_OR_RETURN(const cuda::CUdevice device, driver.Device(device_index));
  cuda::CUcontext context = nullptr;
  KVANT_RETURN_IF_ERROR(driver.Check(driver.api().DevicePrimaryCtxRetain(&context, device),
                                     "cuDevicePrimaryCtxRetain"));
  CudaStream stream(std::move(api), device);
  const auto& api_ = stream.api_;
  KVANT_ASSIGN_OR_RETURN(const cuda::DeviceProperties properties,
                         api_->driver->Properties(device_index));
  stream.cache_bytes_ = static_cast<int64_t>(properties.l2_bytes);
  KVANT_CUDA_CALL(CtxSetCurrent, context);
  KVANT_CUDA_CALL(StreamCreate, &stream.stream_, kNonBlocking);
  for (void*& event : stream.events_) KVANT_CUDA_CALL(EventCreate, &event, 0);
  return stream;
}

CudaStream::CudaStream(CudaStream&& other) noexcept
    : api_(std::move(other.api_)),
      device_(other.device_),
      cache_bytes_(other.cache_bytes_),
      stream_(std::exchange(other.stream_, nullptr)),
      events_{std::exchange(other.events_[0], nullptr), std::exchange(other.events_[1], nullptr)} {}

CudaStream::~CudaStream() {
  if (api_ == nullptr) return;
  for (void* event : events_) {
    if (event != nullptr) api_->EventDestroy(event);
  }
  if (stream_ != nullptr) api_->StreamDestroy(stream_);
  api_->driver->api().DevicePrimaryCtxRelease(device_);
}

absl::Status CudaStream::Synchronize() const {
  const cuda::Driver& driver = *api_->driver;
  return driver.Check(driver.api().StreamSynchronize(static_cast<cuda::CUstream>(stream_)),
                      "cuStreamSynchronize");
}

absl::Status CudaStream::CopyOnDevice(void* to, const void* from, size_t bytes) const {
  KVANT_CUDA_CALL(MemcpyDtoDAsync, reinterpret_cast<CUdeviceptr>(to),
                  reinterpret_cast<CUdeviceptr>(from), bytes, stream_);
  return absl::OkStatus();
}

absl::Status CudaStream::CopyFromHost(void* to, const void* from, size_t bytes) const {
  const cuda::Driver& driver = *api_->driver;
  KVANT_RETURN_IF_ERROR(
      driver.Check(driver.api().MemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(to), from, bytes,
                                                static_cast<cuda::CUstream>(stream_)),
                   "cuMemcpyHtoDAsync"));
  return Synchronize();
}

absl::StatusOr<CudaGraph> CudaStream::Capture(const std::function<absl::Status()>& work) const {
  KVANT_CUDA_CALL(StreamBeginCapture, stream_, kThreadLocal);
  const absl::Status done = work();
  void* graph = nullptr;
  const CUresult ended = api_->StreamEndCapture(stream_, &graph);
  if (!done.ok()) {
    if (graph != nullptr) api_->GraphDestroy(graph);
    return done;
  }
  KVANT_RETURN_IF_ERROR(api_->driver->Check(ended, "cuStreamEndCapture"));
  void* executable = nullptr;
  const CUresult made = api_->GraphInstantiate(&executable, graph, 0);
  api_->GraphDestroy(graph);
  KVANT_RETURN_IF_ERROR(api_->driver->Check(made, "cuGraphInstantiateWithFlags"));
  return CudaGraph(api_, executable);
}

absl::Status CudaStream::Launch(const CudaGraph& graph) const {
  KVANT_CUDA_CALL(GraphLaunch, graph.executable_, stream_);
  return absl::OkStatus();
}

absl::StatusOr<double> CudaStream::Time(const std::function<absl::Status()>& work) const {
  KVANT_CUDA_CALL(EventRecord, events_[0], stream_);
  KVANT_RETURN_IF_ERROR(work());
  KVANT_CUDA_CALL(EventRecord, events_[1], stream_);
  KVANT_CUDA_CALL(EventSynchronize, events_[1]);
  float milliseconds = 0;
  KVANT_CUDA_CALL(EventElapsedTime, &milliseconds, events_[0], events_[1]);
  return milliseconds * 1e3;
}

absl::StatusOr<double> MeasureCopyGbPerSecond(const CudaStream& stream, DeviceMemory& memory) {
  constexpr int kCaches = 8, kCopies = 10;
  const auto bytes = static_cast<size_t>(kCaches * stream.cache_bytes());
  KVANT_ASSIGN_OR_RETURN(void* both, memory.Allocate(2 * bytes));
  const std::unique_ptr<void, std::function<void(void*)>> freed(
      both, [&](void* data) { memory.Free(data); });
  double best = 0;
  for (int i = 0; i < kCopies; ++i) {
    KVANT_ASSIGN_OR_RETURN(const double us, stream.Time([&] {
      return stream.CopyOnDevice(both, static_cast<std::byte*>(both) + bytes, bytes);
    }));
    best = std::max(best, 2 * static_cast<double>(bytes) / us * 1e-3);
  }
  return best;
}

}  // namespace kvant
