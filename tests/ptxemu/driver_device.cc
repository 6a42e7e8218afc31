// Calls on the driver itself, the device and its context.
#include <cstdio>
#include <cstdlib>
#include <map>

#include "kvant/tests/ptxemu/driver.h"
#include "kvant/tests/ptxemu/text.h"

namespace kvant::ptxemu {
namespace {

int context_token;
void* const kContext = &context_token;

int FromEnvironment(const char* name, int fallback) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : fallback;
}

}  // namespace

extern "C" {

CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}

CUresult cuInit(unsigned flags) {
  State& s = TheState();
  const std::lock_guard<std::recursive_mutex> lock(s.mutex);
  if (flags != 0) return Misuse(kInvalidValue, "cuInit with flags");
  if (!s.initialized) WriteLogAtExit();
  s.initialized = true;
  return kSuccess;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  static const auto* const names = new std::map<CUresult, const char*>{
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
      {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
      {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {kOutOfResources, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"},
      {kIllegalInstruction, "CUDA_ERROR_ILLEGAL_INSTRUCTION"},
      {kMisaligned, "CUDA_ERROR_MISALIGNED_ADDRESS"},
      {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"},
      {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
  const auto found = names->find(error);
  *name = found == names->end() ? "CUDA_ERROR" : found->second;
  return kSuccess;
}

CUresult cuGetErrorString(CUresult, const char** words) {
  *words = "said on standard error by ptxemu";
  return kSuccess;
}

CUresult cuDeviceGetCount(int* count) {
  return Anywhere("cuDeviceGetCount", [&] {
    *count = 1;
    return kSuccess;
  });
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return Anywhere("cuDeviceGet", [&] {
    *device = 0;
    return ordinal == 0 ? kSuccess : kInvalidDevice;
  });
}

CUresult cuDeviceGetName(char* name, int bytes, CUdevice) {
  return Anywhere("cuDeviceGetName", [&] {
    std::snprintf(name, static_cast<size_t>(bytes), "ptxemu %s", Device().name);
    return kSuccess;
  });
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
  return Anywhere("cuDeviceTotalMem_v2", [&] {
    *bytes = size_t{4} << 30;
    return kSuccess;
  });
}

CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice) {
  return Anywhere("cuDeviceGetAttribute", [&] {
    const Arch& device = Device();
    const std::map<int, int> attributes = {
        {16, FromEnvironment("PTXEMU_SMS", device.multiprocessors)},
        {38, FromEnvironment("PTXEMU_L2_MIB", device.l2_mib) << 20},
        {39, device.warps * kLanes},
        {75, device.major},
        {76, device.minor},
        {81, device.shared_kib_per_multiprocessor << 10},
        {97, device.shared_kib_per_block << 10}};
    const auto found = attributes.find(attribute);
    if (found == attributes.end()) {
      return Misuse(kInvalidValue, StrCat("device attribute ", attribute));
    }
    *value = found->second;
    return kSuccess;
  });
}

CUresult cuDevicePrimaryCtxRetain(void** context, CUdevice) {
  return Anywhere("cuDevicePrimaryCtxRetain", [&] {
    ++TheState().retained;
    *context = kContext;
    return kSuccess;
  });
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) {
  return Anywhere("cuDevicePrimaryCtxRelease_v2", [&] {
    State& s = TheState();
    if (s.retained == 0) {
      return Misuse(kInvalidContext, "the primary context released more often than retained");
    }
    if (--s.retained > 0) return kSuccess;
    // All goes with it.
    if (!s.pending.empty()) Note("the last release of the context with work under way");
    RunPending(nullptr);
    return kSuccess;
  });
}

CUresult cuCtxPushCurrent_v2(void* context) {
  return Anywhere("cuCtxPushCurrent_v2", [&] {
    if (context != kContext) return Misuse(kInvalidContext, "cuCtxPushCurrent of no context");
    if (TheState().retained <= 0) {
      return Misuse(kInvalidContext, "cuCtxPushCurrent of a released context");
    }
    ContextStack().push_back(context);
    return kSuccess;
  });
}

CUresult cuCtxPopCurrent_v2(void** context) {
  return Anywhere("cuCtxPopCurrent_v2", [&] {
    if (ContextStack().empty()) {
      return Misuse(kInvalidContext, "cuCtxPopCurrent of an empty stack");
    }
    if (context != nullptr) *context = ContextStack().back();
    ContextStack().pop_back();
    return kSuccess;
  });
}

CUresult cuCtxSynchronize() {
  return OutsideCapture("cuCtxSynchronize", [] { return RunPending(nullptr); });
}

CUresult cuCtxSetCurrent(void* context) {
  return Anywhere("cuCtxSetCurrent", [&] {
    if (!ContextStack().empty()) ContextStack().pop_back();
    if (context != nullptr) ContextStack().push_back(context);
    return kSuccess;
  });
}

}  // extern "C"

}  // namespace kvant::ptxemu
