// Driver: libcuda, opened at run time, and the devices that it knows.
#ifndef KVANT_BACKENDS_CUDA_RUNTIME_DRIVER_H_
#define KVANT_BACKENDS_CUDA_RUNTIME_DRIVER_H_

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvant/backends/cuda/runtime/device_properties.h"
#include "kvant/backends/cuda/runtime/driver_api.h"

namespace kvant::cuda {

// CUDA 12.0, the first whose drivers know sm_90a and load code of every NVRTC that compiles C++20.
inline constexpr int kOldestDriver = 12000;

// Immutable; may be used from several threads at once.
class Driver {
 public:
  // "libcuda.so.1" or "libcuda.so", or what the environment's KVANT_LIBCUDA names. kUnimplemented
  // with a sentence: none, one that lacks a function, one too old, one that does not start, no
  // device.
  static absl::StatusOr<std::shared_ptr<const Driver>> Open();

  // The CUDA version that it supports, 12040 for 12.4.
  int version() const { return version_; }
  int device_count() const { return device_count_; }

  // Of device `index`, of device_count(). kInvalidArguments: there is no such device.
  // kUnimplemented: its compute capability is below 8.0.
  absl::StatusOr<DeviceProperties> Properties(int index) const;
  absl::StatusOr<CUdevice> Device(int index) const;

  const DriverApi& api() const { return api_; }

  // OK for CUDA_SUCCESS; else "<call>: <CUDA's name of the error>, <its words>".
  // kResourceExhausted where memory ran out, else kInternal.
  absl::Status Check(CUresult result, const char* call) const {
    return result == CUDA_SUCCESS ? absl::OkStatus() : Failure(result, call);
  }
  // "CUDA_ERROR_NO_DEVICE, no CUDA-capable device is detected".
  std::string ErrorWords(CUresult result) const;

 private:
  absl::Status Failure(CUresult result, std::string_view call) const;
  absl::Status Start();

  DriverApi api_;
  std::string library_;
  int version_ = 0;
  int device_count_ = 0;
};

// 12040 as "12.4".
std::string CudaVersionToString(int version);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_RUNTIME_DRIVER_H_
