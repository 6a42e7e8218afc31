// The part of libcuda that kvant calls, declared here so that nobody needs CUDA's headers to build.
// Names, values and signatures are those of cuda.h; the ABI has been stable since CUDA 4.
#ifndef KVANT_BACKENDS_CUDA_RUNTIME_DRIVER_API_H_
#define KVANT_BACKENDS_CUDA_RUNTIME_DRIVER_API_H_

#include <cstddef>

namespace kvant::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;

inline constexpr CUresult CUDA_SUCCESS = 0;
inline constexpr CUresult CUDA_ERROR_OUT_OF_MEMORY = 2;

// CUstreamCaptureStatus, and the handle of a stream that each thread has for itself
inline constexpr int CU_STREAM_CAPTURE_STATUS_NONE = 0;
inline const CUstream CU_STREAM_PER_THREAD = reinterpret_cast<CUstream>(2);

// CUdevice_attribute
inline constexpr int CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16;
inline constexpr int CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38;
inline constexpr int CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR = 39;
inline constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75;
inline constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76;
inline constexpr int CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81;
inline constexpr int CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97;

// CUfunction_attribute
inline constexpr int CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;
inline constexpr int CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9;
inline constexpr int CU_SHAREDMEM_CARVEOUT_MAX_SHARED = 100;

// CUpointer_attribute, CUmemorytype
inline constexpr int CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2;
inline constexpr int CU_POINTER_ATTRIBUTE_IS_MANAGED = 8;
inline constexpr int CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9;
inline constexpr unsigned CU_MEMORYTYPE_DEVICE = 2;

inline constexpr unsigned CU_MEMHOSTALLOC_PORTABLE = 1;
inline constexpr unsigned CU_MEMHOSTALLOC_DEVICEMAP = 2;

// cuLaunchKernel's `extra`
inline void* const CU_LAUNCH_PARAM_END = nullptr;
inline void* const CU_LAUNCH_PARAM_BUFFER_POINTER = reinterpret_cast<void*>(1);
inline void* const CU_LAUNCH_PARAM_BUFFER_SIZE = reinterpret_cast<void*>(2);

// ENTRY(member of DriverApi, exported symbol, parameters). All return a CUresult.
#define KVANT_CUDA_DRIVER_ENTRIES(ENTRY)                                                           \
  ENTRY(DriverGetVersion, cuDriverGetVersion, (int* version))                                      \
  ENTRY(Init, cuInit, (unsigned flags))                                                            \
  ENTRY(GetErrorName, cuGetErrorName, (CUresult error, const char** name))                         \
  ENTRY(GetErrorString, cuGetErrorString, (CUresult error, const char** words))                    \
  ENTRY(DeviceGetCount, cuDeviceGetCount, (int* count))                                            \
  ENTRY(DeviceGet, cuDeviceGet, (CUdevice * device, int ordinal))                                  \
  ENTRY(DeviceGetName, cuDeviceGetName, (char* name, int bytes, CUdevice device))                  \
  ENTRY(DeviceGetAttribute, cuDeviceGetAttribute, (int* value, int attribute, CUdevice device))    \
  ENTRY(DeviceTotalMem, cuDeviceTotalMem_v2, (size_t * bytes, CUdevice device))                    \
  ENTRY(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))  \
  ENTRY(DevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (CUdevice device))                  \
  ENTRY(CtxPushCurrent, cuCtxPushCurrent_v2, (CUcontext context))                                  \
  ENTRY(CtxPopCurrent, cuCtxPopCurrent_v2, (CUcontext * context))                                  \
  ENTRY(ModuleLoadData, cuModuleLoadData, (CUmodule * module, const void* image))                  \
  ENTRY(ModuleUnload, cuModuleUnload, (CUmodule module))                                           \
  ENTRY(ModuleGetFunction, cuModuleGetFunction,                                                    \
        (CUfunction * function, CUmodule module, const char* name))                                \
  ENTRY(FuncSetAttribute, cuFuncSetAttribute, (CUfunction function, int attribute, int value))     \
  ENTRY(LaunchKernel, cuLaunchKernel,                                                              \
        (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, \
         unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream,               \
         void** params, void** extra))                                                             \
  ENTRY(MemAlloc, cuMemAlloc_v2, (CUdeviceptr * memory, size_t bytes))                             \
  ENTRY(MemFree, cuMemFree_v2, (CUdeviceptr memory))                                               \
  ENTRY(MemHostAlloc, cuMemHostAlloc, (void** memory, size_t bytes, unsigned flags))               \
  ENTRY(MemFreeHost, cuMemFreeHost, (void* memory))                                                \
  ENTRY(MemsetD8Async, cuMemsetD8Async,                                                            \
        (CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream))                      \
  ENTRY(MemcpyHtoDAsync, cuMemcpyHtoDAsync_v2,                                                     \
        (CUdeviceptr to, const void* from, size_t bytes, CUstream stream))                         \
  ENTRY(MemcpyDtoHAsync, cuMemcpyDtoHAsync_v2,                                                     \
        (void* to, CUdeviceptr from, size_t bytes, CUstream stream))                               \
  ENTRY(CtxSynchronize, cuCtxSynchronize, (void))                                                  \
  ENTRY(StreamSynchronize, cuStreamSynchronize, (CUstream stream))                                 \
  ENTRY(StreamIsCapturing, cuStreamIsCapturing, (CUstream stream, int* status))                    \
  ENTRY(StreamGetId, cuStreamGetId, (CUstream stream, unsigned long long* id))                     \
  ENTRY(PointerGetAttributes, cuPointerGetAttributes,                                              \
        (unsigned count, int* attributes, void** data, CUdeviceptr pointer))

struct DriverApi {
#define KVANT_CUDA_MEMBER(member, symbol, parameters) CUresult(*member) parameters = nullptr;
  KVANT_CUDA_DRIVER_ENTRIES(KVANT_CUDA_MEMBER)
#undef KVANT_CUDA_MEMBER
};

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_RUNTIME_DRIVER_API_H_
