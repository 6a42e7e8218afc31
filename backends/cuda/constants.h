// What a partition's kernels read beside its ports, on the device.
#ifndef KVANT_BACKENDS_CUDA_CONSTANTS_H_
#define KVANT_BACKENDS_CUDA_CONSTANTS_H_

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kvant/backends/device_memory.h"
#include "kvant/graph/status.h"

namespace kvant::cuda {

class Constants {
 public:
  static absl::StatusOr<std::shared_ptr<const Constants>> Copy(
      std::shared_ptr<DeviceMemory> memory, const std::vector<std::byte>& bytes) {
    KVANT_ASSIGN_OR_RETURN(void* data, memory->Allocate(bytes.size()));
    auto constants = std::make_shared<Constants>(memory, static_cast<std::byte*>(data));
    KVANT_RETURN_IF_ERROR(memory->CopyFromHost(data, bytes.data(), bytes.size()));
    return constants;
  }
  Constants(std::shared_ptr<DeviceMemory> memory, std::byte* data)
      : memory_(std::move(memory)), data_(data) {}
  Constants(const Constants&) = delete;
  Constants& operator=(const Constants&) = delete;
  ~Constants() { memory_->Free(data_); }
  const std::byte* data() const { return data_; }

 private:
  const std::shared_ptr<DeviceMemory> memory_;
  std::byte* const data_;
};

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_CONSTANTS_H_
