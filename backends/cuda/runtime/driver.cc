#include "kvant/backends/cuda/runtime/driver.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cuda/runtime/shared_library.h"
#include "kvant/graph/status.h"

namespace kvant::cuda {
namespace {

constexpr int kOldestMajor = 8;  // compute capability: cp.async, bf16, 16 x 8 x 16 products

absl::Status Unusable(const std::string& message) {
  return MakeError(ErrorKind::kUnimplemented, message);
}

// Whether all entries are there; else the name of the first that is not.
const char* Resolve(const SharedLibrary& library, DriverApi& api) {
#define KVANT_CUDA_RESOLVE(member, symbol, parameters)                            \
  api.member = reinterpret_cast<CUresult(*) parameters>(library.Symbol(#symbol)); \
  if (api.member == nullptr) return #symbol;
  KVANT_CUDA_DRIVER_ENTRIES(KVANT_CUDA_RESOLVE)
#undef KVANT_CUDA_RESOLVE
  return nullptr;
}

}  // namespace

std::string CudaVersionToString(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

absl::StatusOr<std::shared_ptr<const Driver>> Driver::Open() {
  absl::StatusOr<SharedLibrary> library =
      SharedLibrary::Open(NamesOrOverride("KVANT_LIBCUDA", {"libcuda.so.1", "libcuda.so"}));
  if (!library.ok()) {
    return Unusable(absl::StrCat("no NVIDIA driver: ", library.status().message()));
  }
  auto driver = std::make_shared<Driver>();
  driver->library_ = library->name();
  if (const char* missing = Resolve(*library, driver->api_)) {
    return Unusable(absl::StrCat("NVIDIA driver ", library->name(), " has no ", missing,
                                 "; one for CUDA ", CudaVersionToString(kOldestDriver),
                                 " or newer is needed"));
  }
  KVANT_RETURN_IF_ERROR(driver->Start());
  return driver;
}

absl::Status Driver::Start() {
  const auto unusable = [&](CUresult result, const char* call) {
    return Unusable(absl::StrCat("NVIDIA driver ", library_, " does not start: ", call, ": ",
                                 ErrorWords(result)));
  };
  if (const CUresult result = api_.DriverGetVersion(&version_); result != CUDA_SUCCESS) {
    return unusable(result, "cuDriverGetVersion");
  }
  if (version_ < kOldestDriver) {
    return Unusable(absl::StrCat("NVIDIA driver ", library_, " supports CUDA ",
                                 CudaVersionToString(version_), "; ",
                                 CudaVersionToString(kOldestDriver), " or newer is needed"));
  }
  if (const CUresult result = api_.Init(0); result != CUDA_SUCCESS) {
    return unusable(result, "cuInit");
  }
  if (const CUresult result = api_.DeviceGetCount(&device_count_); result != CUDA_SUCCESS) {
    return unusable(result, "cuDeviceGetCount");
  }
  if (device_count_ == 0) {
    return Unusable(absl::StrCat("NVIDIA driver ", library_, " sees no device"));
  }
  return absl::OkStatus();
}

std::string Driver::ErrorWords(CUresult result) const {
  const char* name = nullptr;
  const char* words = nullptr;
  api_.GetErrorName(result, &name);
  api_.GetErrorString(result, &words);
  return absl::StrCat(name ? name : absl::StrCat("error ", result), ", ",
                      words ? words : "which the driver has no words for");
}

absl::Status Driver::Failure(CUresult result, std::string_view call) const {
  const std::string message = absl::StrCat(std::string(call), ": ", ErrorWords(result));
  if (result == CUDA_ERROR_OUT_OF_MEMORY) return absl::ResourceExhaustedError(message);
  return absl::InternalError(message);
}

absl::StatusOr<CUdevice> Driver::Device(int index) const {
  if (index < 0 || index >= device_count_) {
    return InvalidArguments("there is no CUDA device ", index, ", only ", device_count_,
                            ", counted from 0");
  }
  CUdevice device = 0;
  KVANT_RETURN_IF_ERROR(Check(api_.DeviceGet(&device, index), "cuDeviceGet"));
  return device;
}

absl::StatusOr<DeviceProperties> Driver::Properties(int index) const {
  KVANT_ASSIGN_OR_RETURN(const CUdevice device, Device(index));
  DeviceProperties properties;
  char name[256] = "";
  KVANT_RETURN_IF_ERROR(Check(api_.DeviceGetName(name, sizeof(name), device), "cuDeviceGetName"));
  properties.name = name;
  KVANT_RETURN_IF_ERROR(
      Check(api_.DeviceTotalMem(&properties.memory_bytes, device), "cuDeviceTotalMem"));

  int shared_bytes_per_block = 0, shared_bytes_per_multiprocessor = 0, l2_bytes = 0;
  const std::pair<int, int*> attributes[] = {
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &properties.major},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &properties.minor},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &properties.multiprocessors},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &shared_bytes_per_block},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, &shared_bytes_per_multiprocessor},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, &properties.threads_per_multiprocessor},
      {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, &l2_bytes},
  };
  for (const auto& [attribute, value] : attributes) {
    KVANT_RETURN_IF_ERROR(
        Check(api_.DeviceGetAttribute(value, attribute, device), "cuDeviceGetAttribute"));
  }
  properties.shared_bytes_per_block = static_cast<size_t>(shared_bytes_per_block);
  properties.shared_bytes_per_multiprocessor = static_cast<size_t>(shared_bytes_per_multiprocessor);
  properties.l2_bytes = static_cast<size_t>(l2_bytes);
  if (properties.major < kOldestMajor) {
    return Unusable(absl::StrCat("device ", index, " (", properties.name,
                                 ") has compute capability ", properties.major, ".",
                                 properties.minor, "; ", kOldestMajor, ".0 or newer is needed"));
  }
  return properties;
}

}  // namespace kvant::cuda
