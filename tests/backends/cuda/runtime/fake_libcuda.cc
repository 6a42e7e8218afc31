#include "kvant/tests/backends/cuda/runtime/fake_libcuda.h"

#include <cstdlib>
#include <cstring>

#include "kvant/backends/cuda/runtime/driver_api.h"

namespace kvant::cuda {
namespace {

constexpr CUresult kInvalidValue = 1, kInvalidDevice = 101, kInvalidImage = 200,
                   kInvalidContext = 201, kNotFound = 500, kCaptureUnsupported = 900;

struct FakeModule {
  std::string image;
};
struct FakeFunction {
  std::string name;
};

// KVANT_FAKE_DEVICES in the environment: how many there are, for programs that cannot ask for them.
// Their cache is small, so that what is sized by it is too.
FakeCuda* NewState() {
  auto* state = new FakeCuda;
  FakeDevice device;
  device.l2_bytes = 1 << 20;
  const char* devices = std::getenv("KVANT_FAKE_DEVICES");
  state->devices.assign(devices ? std::strtoul(devices, nullptr, 10) : 0, device);
  return state;
}

FakeCuda& State() {
  static FakeCuda* const state = NewState();
  return *state;
}

// Devices as handles of their contexts, counted from 1 so that none is null.
std::vector<CUcontext>& ContextStack() {
  static thread_local std::vector<CUcontext> stack;
  return stack;
}

CUcontext ContextOf(int device) { return reinterpret_cast<CUcontext>(size_t(device) + 1); }

// Functions live as long as the process, as handles that a bad caller kept would.
FakeFunction* FunctionNamed(const std::string& name) {
  static auto* functions = new std::map<std::string, FakeFunction>;
  FakeFunction& function = (*functions)[name];
  function.name = name;
  return &function;
}

// One call: locked, counted, and failed if it is to fail.
class Call {
 public:
  explicit Call(const char* symbol, bool needs_context = false) : lock_(State().mutex) {
    ++State().calls[symbol];
    const auto failure = State().failures.find(symbol);
    if (failure != State().failures.end()) {
      result_ = failure->second;
    } else if (needs_context && ContextStack().empty()) {
      result_ = kInvalidContext;
    }
  }
  CUresult result() const { return result_; }
  static int device() {
    return static_cast<int>(reinterpret_cast<size_t>(ContextStack().back())) - 1;
  }

 private:
  std::lock_guard<std::mutex> lock_;
  CUresult result_ = CUDA_SUCCESS;
};

#define FAKE_CALL(symbol)  \
  const Call call(symbol); \
  if (call.result() != CUDA_SUCCESS) return call.result()
#define FAKE_CALL_IN_CONTEXT(symbol) \
  const Call call(symbol, true);     \
  if (call.result() != CUDA_SUCCESS) return call.result()

bool IsDevice(int device) {
  return device >= 0 && device < static_cast<int>(State().devices.size());
}

// The block that holds all of [p, p + bytes), or null.
const FakeBlock* BlockAt(CUdeviceptr p, size_t bytes) {
  char* const at = reinterpret_cast<char*>(p);
  auto block = State().memory.upper_bound(at);
  if (block == State().memory.begin()) return nullptr;
  --block;
  return at + bytes <= block->first + block->second.bytes ? &block->second : nullptr;
}

}  // namespace
}  // namespace kvant::cuda

using namespace kvant::cuda;  // NOLINT: the exported functions are libcuda's, in no namespace

extern "C" {

FakeCuda* KvantFakeCuda() { return &State(); }
size_t KvantFakeContextDepth() { return ContextStack().size(); }

CUresult cuDriverGetVersion(int* version) {
  FAKE_CALL("cuDriverGetVersion");
  *version = State().version;
  return CUDA_SUCCESS;
}
CUresult cuInit(unsigned) {
  FAKE_CALL("cuInit");
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == 2     ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == 719 ? "CUDA_ERROR_LAUNCH_FAILED"
                         : nullptr;
  return *name ? CUDA_SUCCESS : kInvalidValue;
}
CUresult cuGetErrorString(CUresult error, const char** words) {
  *words = error == 2 ? "out of memory" : error == 719 ? "unspecified launch failure" : nullptr;
  return *words ? CUDA_SUCCESS : kInvalidValue;
}
CUresult cuDeviceGetCount(int* count) {
  FAKE_CALL("cuDeviceGetCount");
  *count = static_cast<int>(State().devices.size());
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  FAKE_CALL("cuDeviceGet");
  if (!IsDevice(ordinal)) return kInvalidDevice;
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
  FAKE_CALL("cuDeviceGetName");
  std::strncpy(name, State().devices[device].name.c_str(), static_cast<size_t>(bytes) - 1);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice index) {
  FAKE_CALL("cuDeviceGetAttribute");
  const FakeDevice& device = State().devices[index];
  const std::map<int, int> values = {
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device.major},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device.minor},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device.multiprocessors},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device.shared_bytes_per_block},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
       device.shared_bytes_per_multiprocessor},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device.threads_per_multiprocessor},
      {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, device.l2_bytes}};
  const auto found = values.find(attribute);
  if (found == values.end()) return kInvalidValue;
  *value = found->second;
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  FAKE_CALL("cuDeviceTotalMem_v2");
  *bytes = State().devices[device].memory_bytes;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  FAKE_CALL("cuDevicePrimaryCtxRetain");
  ++State().devices[device].retained;
  *context = ContextOf(device);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  FAKE_CALL("cuDevicePrimaryCtxRelease_v2");
  --State().devices[device].retained;
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  FAKE_CALL("cuCtxPushCurrent_v2");
  ContextStack().push_back(context);
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  FAKE_CALL_IN_CONTEXT("cuCtxPopCurrent_v2");
  *context = ContextStack().back();
  ContextStack().pop_back();
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  FAKE_CALL_IN_CONTEXT("cuModuleLoadData");
  if (std::memcmp(image, "\177ELF", 4) != 0) return kInvalidImage;
  auto* const made = new FakeModule;
  *module = reinterpret_cast<CUmodule>(made);
  State().held.insert(made);
  ++State().modules;
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) {
  FAKE_CALL_IN_CONTEXT("cuModuleUnload");
  State().held.erase(reinterpret_cast<FakeModule*>(module));
  delete reinterpret_cast<FakeModule*>(module);
  --State().modules;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  FAKE_CALL_IN_CONTEXT("cuModuleGetFunction");
  if (State().missing_kernel == name) return kNotFound;
  *function = reinterpret_cast<CUfunction>(FunctionNamed(name));
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value) {
  FAKE_CALL_IN_CONTEXT("cuFuncSetAttribute");
  State().kernel_attributes[reinterpret_cast<FakeFunction*>(function)->name][attribute] = value;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CUstream stream, void** params, void** extra) {
  FAKE_CALL_IN_CONTEXT("cuLaunchKernel");
  const bool one_dimensional = grid_y == 1 && grid_z == 1 && block_y == 1 && block_z == 1;
  if (!one_dimensional || params != nullptr || extra[0] != CU_LAUNCH_PARAM_BUFFER_POINTER ||
      extra[2] != CU_LAUNCH_PARAM_BUFFER_SIZE || extra[4] != CU_LAUNCH_PARAM_END) {
    return kInvalidValue;
  }
  State().launches.push_back(
      {Call::device(), reinterpret_cast<FakeFunction*>(function)->name, grid_x, block_x,
       shared_bytes, stream,
       std::string(static_cast<const char*>(extra[1]), *static_cast<const size_t*>(extra[3]))});
  return CUDA_SUCCESS;
}
CUresult cuMemAlloc_v2(CUdeviceptr* memory, size_t bytes) {
  FAKE_CALL_IN_CONTEXT("cuMemAlloc_v2");
  if (bytes == 0) return kInvalidValue;
  // Aligned as the driver promises.
  auto* block = static_cast<char*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  std::memset(block, 0xcd, bytes);
  State().memory[block] = {bytes, Call::device(), FakeMemory::kDevice};
  *memory = reinterpret_cast<CUdeviceptr>(block);
  return CUDA_SUCCESS;
}
CUresult cuMemFree_v2(CUdeviceptr memory) {
  FAKE_CALL_IN_CONTEXT("cuMemFree_v2");
  auto* block = reinterpret_cast<char*>(memory);
  if (State().memory.erase(block) == 0) return kInvalidValue;
  std::free(block);
  return CUDA_SUCCESS;
}
CUresult cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  FAKE_CALL_IN_CONTEXT("cuMemHostAlloc");
  if (bytes == 0 || flags != 3) return kInvalidValue;
  *memory = std::malloc(bytes);
  std::memset(*memory, 0xcd, bytes);
  State().held.insert(*memory);
  return CUDA_SUCCESS;
}
CUresult cuMemFreeHost(void* memory) {
  FAKE_CALL_IN_CONTEXT("cuMemFreeHost");
  if (State().held.erase(memory) == 0) return kInvalidValue;
  std::free(memory);
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream) {
  FAKE_CALL_IN_CONTEXT("cuMemsetD8Async");
  if (!BlockAt(to, bytes)) return kInvalidValue;
  std::memset(reinterpret_cast<void*>(to), value, bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream) {
  FAKE_CALL_IN_CONTEXT("cuMemcpyHtoDAsync_v2");
  if (!BlockAt(to, bytes)) return kInvalidValue;
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream) {
  FAKE_CALL_IN_CONTEXT("cuMemcpyDtoHAsync_v2");
  if (!BlockAt(from, bytes)) return kInvalidValue;
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize() {
  FAKE_CALL_IN_CONTEXT("cuCtxSynchronize");
  return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream) {
  FAKE_CALL_IN_CONTEXT("cuStreamSynchronize");
  return CUDA_SUCCESS;
}
// Streams, events and graphs: the work of a graph is done when it is captured, and takes a
// millisecond when it is replayed.
CUresult cuCtxSetCurrent(CUcontext context) {
  FAKE_CALL("cuCtxSetCurrent");
  if (!ContextStack().empty()) ContextStack().pop_back();
  ContextStack().push_back(context);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) {
  FAKE_CALL_IN_CONTEXT("cuMemcpyDtoDAsync_v2");
  if (!BlockAt(to, bytes) || !BlockAt(from, bytes)) return kInvalidValue;
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  return CUDA_SUCCESS;
}
#define FAKE_HANDLE(symbol, ...)                  \
  CUresult symbol(void** handle, ##__VA_ARGS__) { \
    FAKE_CALL_IN_CONTEXT(#symbol);                \
    *handle = new int;                            \
    return CUDA_SUCCESS;                          \
  }
#define FAKE_DELETE(symbol)           \
  CUresult symbol(void* handle) {     \
    FAKE_CALL_IN_CONTEXT(#symbol);    \
    delete static_cast<int*>(handle); \
    return CUDA_SUCCESS;              \
  }
#define FAKE_NOTHING(symbol, ...)                            \
  CUresult symbol(void* handle, ##__VA_ARGS__) {             \
    FAKE_CALL_IN_CONTEXT(#symbol);                           \
    return handle != nullptr ? CUDA_SUCCESS : kInvalidValue; \
  }
FAKE_HANDLE(cuEventCreate, unsigned)
FAKE_HANDLE(cuGraphInstantiateWithFlags, void*, unsigned long long)
FAKE_DELETE(cuEventDestroy_v2)
FAKE_DELETE(cuGraphDestroy)
FAKE_DELETE(cuGraphExecDestroy)
FAKE_NOTHING(cuGraphLaunch, void*)
FAKE_NOTHING(cuEventRecord, void*)
FAKE_NOTHING(cuEventSynchronize)
CUresult cuStreamCreate(void** stream, unsigned) {
  FAKE_CALL_IN_CONTEXT("cuStreamCreate");
  *stream = new int;
  State().streams[*stream].id = ++State().last_id;
  return CUDA_SUCCESS;
}
CUresult cuStreamDestroy_v2(void* stream) {
  FAKE_CALL_IN_CONTEXT("cuStreamDestroy_v2");
  State().streams.erase(stream);
  delete static_cast<int*>(stream);
  return CUDA_SUCCESS;
}
CUresult cuStreamGetId(CUstream stream, unsigned long long* id) {
  FAKE_CALL_IN_CONTEXT("cuStreamGetId");
  static thread_local FakeStream own;
  FakeStream& one = stream == CU_STREAM_PER_THREAD ? own : State().streams[stream];
  if (one.captured) return kCaptureUnsupported;
  if (one.id == 0) one.id = ++State().last_id;
  *id = one.id;
  return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, int* status) {
  FAKE_CALL_IN_CONTEXT("cuStreamIsCapturing");
  *status = State().streams[stream].captured ? 1 : 0;
  return CUDA_SUCCESS;
}
CUresult cuStreamBeginCapture_v2(void* stream, int) {
  FAKE_CALL_IN_CONTEXT("cuStreamBeginCapture_v2");
  State().streams[stream].captured = true;
  return CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(void* stream, void** graph) {
  FAKE_CALL_IN_CONTEXT("cuStreamEndCapture");
  State().streams[stream].captured = false;
  *graph = new int;
  return CUDA_SUCCESS;
}
CUresult cuEventElapsedTime(float* milliseconds, void*, void*) {
  FAKE_CALL_IN_CONTEXT("cuEventElapsedTime");
  *milliseconds = 1;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(unsigned count, int* attributes, void** data, CUdeviceptr pointer) {
  FAKE_CALL_IN_CONTEXT("cuPointerGetAttributes");
  const FakeBlock* block = BlockAt(pointer, 1);
  for (unsigned i = 0; i < count; ++i) {
    switch (attributes[i]) {
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        // CU_MEMORYTYPE_HOST is 1; what the driver does not know is left at its default.
        *static_cast<unsigned*>(data[i]) = !block ? 0
                                           : block->kind == FakeMemory::kPinnedHost
                                               ? 1
                                               : CU_MEMORYTYPE_DEVICE;
        break;
      case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *static_cast<unsigned*>(data[i]) = block && block->kind == FakeMemory::kManaged;
        break;
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *static_cast<int*>(data[i]) = block ? block->device : -2;
        break;
      default:
        return kInvalidValue;
    }
  }
  return CUDA_SUCCESS;
}

}  // extern "C"
