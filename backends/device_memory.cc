#include "kvant/backends/device_memory.h"

#include <cstring>
#include <new>

#include "absl/strings/str_cat.h"

namespace kvant {
namespace {

constexpr std::align_val_t kAlignment{256};

class HostMemory : public DeviceMemory {
 public:
  absl::StatusOr<void*> Allocate(size_t bytes) override {
    if (bytes == 0) return nullptr;
    void* memory = ::operator new(bytes, kAlignment, std::nothrow);
    if (memory == nullptr) {
      return absl::ResourceExhaustedError(absl::StrCat("no memory for ", bytes, " bytes"));
    }
    std::memset(memory, 0, bytes);
    return memory;
  }
  void Free(void* memory) override { ::operator delete(memory, kAlignment); }

  absl::Status CopyFromHost(void* to, const void* from, size_t bytes) override {
    return CopyToHost(to, from, bytes);
  }
  absl::Status CopyToHost(void* to, const void* from, size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }
  absl::Status Synchronize(void*) override { return absl::OkStatus(); }
  bool asynchronous() const override { return false; }
  std::string WhyUnreachable(const void*) const override { return ""; }
};

}  // namespace

std::shared_ptr<DeviceMemory> MakeHostMemory() { return std::make_shared<HostMemory>(); }

}  // namespace kvant
