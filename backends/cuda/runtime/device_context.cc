#include "kvant/backends/cuda/runtime/device_context.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"

namespace kvant::cuda {
namespace {

// `status` with more of what was asked for: the call alone does not tell.
absl::Status Detail(const absl::Status& status, const std::string& detail) {
  return absl::Status(status.code(), absl::StrCat(detail, ": ", status.message()));
}

}  // namespace

template <class Body>
absl::Status DeviceContext::Within(Body body) const {
  const DriverApi& api = driver_->api();
  KVANT_RETURN_IF_ERROR(driver_->Check(api.CtxPushCurrent(context_), "cuCtxPushCurrent"));
  absl::Status status = body();
  // What was just pushed can be popped.
  CUcontext popped;
  api.CtxPopCurrent(&popped);
  return status;
}

template <class... Parameters, class... Arguments>
absl::Status DeviceContext::Call(const char* name, CUresult (*DriverApi::*entry)(Parameters...),
                                 Arguments... arguments) const {
  return Within([&] { return driver_->Check((driver_->api().*entry)(arguments...), name); });
}

absl::StatusOr<std::shared_ptr<DeviceContext>> DeviceContext::Retain(
    std::shared_ptr<const Driver> driver, int device_index) {
  KVANT_ASSIGN_OR_RETURN(const CUdevice device, driver->Device(device_index));
  CUcontext context = nullptr;
  if (absl::Status status = driver->Check(driver->api().DevicePrimaryCtxRetain(&context, device),
                                          "cuDevicePrimaryCtxRetain");
      !status.ok()) {
    return Detail(status, absl::StrCat("device ", device_index));
  }
  return std::shared_ptr<DeviceContext>(
      new DeviceContext(std::move(driver), device_index, device, context));
}

DeviceContext::~DeviceContext() {
  // Fails where the process is ending and the driver was first to go: all is released then.
  driver_->api().DevicePrimaryCtxRelease(device_);
}

absl::StatusOr<CUmodule> DeviceContext::LoadModule(const std::string& image) const {
  CUmodule module = nullptr;
  KVANT_RETURN_IF_ERROR(
      Call("cuModuleLoadData", &DriverApi::ModuleLoadData, &module, image.data()));
  return module;
}

void DeviceContext::UnloadModule(CUmodule module) const {
  // As in the destructor, there is nothing to be done about an error.
  Call("cuModuleUnload", &DriverApi::ModuleUnload, module).IgnoreError();
}

absl::StatusOr<CUfunction> DeviceContext::FindFunction(CUmodule module,
                                                       const std::string& name) const {
  CUfunction function = nullptr;
  const absl::Status status =
      Call("cuModuleGetFunction", &DriverApi::ModuleGetFunction, &function, module, name.c_str());
  if (!status.ok()) return Detail(status, absl::StrCat("kernel '", name, "'"));
  return function;
}

absl::Status DeviceContext::AllowSharedBytes(CUfunction function, size_t bytes) const {
  const auto set = [&](int attribute, int value) {
    return Call("cuFuncSetAttribute", &DriverApi::FuncSetAttribute, function, attribute, value);
  };
  KVANT_RETURN_IF_ERROR(
      set(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(bytes)));
  // Kernels that stage tiles in shared memory read them once: L1 has nothing to give them, and as
  // many blocks as fit are to be resident.
  return set(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, CU_SHAREDMEM_CARVEOUT_MAX_SHARED);
}

absl::Status DeviceContext::Launch(CUfunction function, const LaunchShape& shape,
                                   const void* params, size_t param_bytes, CUstream stream) const {
  // A buffer instead of a pointer per parameter: the driver learns its size, and reads no further.
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, const_cast<void*>(params),
                   CU_LAUNCH_PARAM_BUFFER_SIZE, &param_bytes, CU_LAUNCH_PARAM_END};
  return Call("cuLaunchKernel", &DriverApi::LaunchKernel, function, shape.blocks, 1, 1,
              shape.threads, 1, 1, shape.shared_bytes, stream, nullptr, extra);
}

absl::StatusOr<void*> DeviceContext::Allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  CUdeviceptr memory = 0;
  const absl::Status status = Call("cuMemAlloc", &DriverApi::MemAlloc, &memory, bytes);
  if (!status.ok()) return Detail(status, absl::StrCat(bytes, " bytes on device ", device_index_));
  absl::Status zeroed =
      Call("cuMemsetD8Async", &DriverApi::MemsetD8Async, memory, 0, bytes, nullptr);
  // A stream that does not wait for the default one may use the memory at once.
  if (zeroed.ok()) zeroed = Synchronize(nullptr);
  if (zeroed.ok()) return reinterpret_cast<void*>(memory);
  Free(reinterpret_cast<void*>(memory));
  return zeroed;
}

void DeviceContext::Free(void* memory) {
  if (memory == nullptr) return;
  Call("cuMemFree", &DriverApi::MemFree, reinterpret_cast<CUdeviceptr>(memory)).IgnoreError();
}

absl::StatusOr<void*> DeviceContext::AllocateOnHost(size_t bytes) {
  void* memory = nullptr;
  const absl::Status status = Call("cuMemHostAlloc", &DriverApi::MemHostAlloc, &memory, bytes,
                                   CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
  if (!status.ok()) return Detail(status, absl::StrCat(bytes, " bytes on the host"));
  std::memset(memory, 0, bytes);
  return memory;
}

void DeviceContext::FreeOnHost(void* memory) {
  if (memory == nullptr) return;
  Call("cuMemFreeHost", &DriverApi::MemFreeHost, memory).IgnoreError();
}

absl::Status DeviceContext::CopyFromHost(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  KVANT_RETURN_IF_ERROR(Call("cuMemcpyHtoDAsync", &DriverApi::MemcpyHtoDAsync,
                             reinterpret_cast<CUdeviceptr>(to), from, bytes, nullptr));
  return Synchronize(nullptr);
}

absl::Status DeviceContext::CopyToHost(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  KVANT_RETURN_IF_ERROR(Call("cuMemcpyDtoHAsync", &DriverApi::MemcpyDtoHAsync, to,
                             reinterpret_cast<CUdeviceptr>(from), bytes, nullptr));
  return Synchronize(nullptr);
}

absl::Status DeviceContext::Synchronize(void* stream) {
  return Call("cuStreamSynchronize", &DriverApi::StreamSynchronize, static_cast<CUstream>(stream));
}

std::optional<DeviceMemory::Unreachable> DeviceContext::FindUnreachable(
    absl::Span<const void* const> pointers) const {
  std::optional<DeviceMemory::Unreachable> found;
  const absl::Status status = Within([&] {
    for (size_t i = 0; i < pointers.size() && !found; ++i) {
      if (std::string why = WhyUnreachable(pointers[i]); !why.empty()) found = {i, std::move(why)};
    }
    return absl::OkStatus();
  });
  if (!status.ok()) return {{0, absl::StrCat("cannot be looked up: ", status.message())}};
  return found;
}

std::string DeviceContext::WhyUnreachable(const void* pointer) const {
  if (pointer == nullptr) return "";
  // Defaults as the driver gives them for a pointer that it does not know.
  unsigned type = 0, managed = 0;
  int device = -1;
  int attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                      CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  void* data[] = {&type, &managed, &device};
  const absl::Status status =
      driver_->Check(driver_->api().PointerGetAttributes(3, attributes, data,
                                                         reinterpret_cast<CUdeviceptr>(pointer)),
                     "cuPointerGetAttributes");
  if (!status.ok()) return absl::StrCat("cannot be looked up: ", status.message());
  if (managed != 0) return "";
  if (type != CU_MEMORYTYPE_DEVICE) return "points to host memory";
  if (device != device_) {
    return absl::StrCat("points to memory of device ", device, ", not of device ", device_index_);
  }
  return "";
}

absl::Status DeviceContext::AskCaptured(CUstream stream, bool& captured) const {
  int status = CU_STREAM_CAPTURE_STATUS_NONE;
  KVANT_RETURN_IF_ERROR(
      driver_->Check(driver_->api().StreamIsCapturing(stream, &status), "cuStreamIsCapturing"));
  captured = status != CU_STREAM_CAPTURE_STATUS_NONE;
  return absl::OkStatus();
}

// A captured stream is not asked for its id, which drivers may refuse: it is what it was before.
absl::StatusOr<DeviceMemory::StreamOrder> DeviceContext::OrderOf(void* handle) {
  auto* const stream = static_cast<CUstream>(handle);
  bool captured = false;
  unsigned long long id = 0;
  KVANT_RETURN_IF_ERROR(Within([&] {
    KVANT_RETURN_IF_ERROR(AskCaptured(stream, captured));
    if (captured) return absl::OkStatus();
    return driver_->Check(driver_->api().StreamGetId(stream, &id), "cuStreamGetId");
  }));
  // That of CU_STREAM_PER_THREAD, by context.
  thread_local absl::flat_hash_map<CUcontext, std::optional<uint64_t>> ids_of_thread;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::optional<uint64_t>& last =
      stream == CU_STREAM_PER_THREAD ? ids_of_thread[context_] : last_ids_[stream];
  if (!captured) {
    last = id;
    return DeviceMemory::StreamOrder{id, false};
  }
  if (last) return DeviceMemory::StreamOrder{*last, true};
  return InvalidArguments(
      "the stream is being captured, and nothing was executed on it before: execute "
      "once before the capture, or bring scratch");
}

absl::StatusOr<bool> DeviceContext::IsCaptured(void* stream) {
  bool captured = false;
  KVANT_RETURN_IF_ERROR(
      Within([&] { return AskCaptured(static_cast<CUstream>(stream), captured); }));
  return captured;
}

absl::Status DeviceContext::SynchronizeAll() {
  return Call("cuCtxSynchronize", &DriverApi::CtxSynchronize);
}

}  // namespace kvant::cuda
