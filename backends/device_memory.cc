#include "kvant/backends/device_memory.h"

#include <cstdint>
#include <cstring>
#include <new>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

#include "absl/strings/str_cat.h"

namespace kvant {
namespace {

constexpr std::align_val_t kAlignment{256};

// Attention over a cache in memory pages of 2 MiB takes up to 12 % less, see docs/kv_cache.md.
// Where they cannot be had, nothing is lost.
void AskForLargePages(void* memory, size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kLargePage = uintptr_t{1} << 21;
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t from = (begin + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t to = (begin + bytes) / kLargePage * kLargePage;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#endif
}

class HostMemory : public DeviceMemory {
 public:
  absl::StatusOr<void*> Allocate(size_t bytes) override {
    if (bytes == 0) return nullptr;
    void* memory = ::operator new(bytes, kAlignment, std::nothrow);
    if (memory == nullptr) {
      return absl::ResourceExhaustedError(absl::StrCat("no memory for ", bytes, " bytes"));
    }
    AskForLargePages(memory, bytes);
    std::memset(memory, 0, bytes);
    return memory;
  }
  void Free(void* memory) override { ::operator delete(memory, kAlignment); }
  absl::StatusOr<void*> AllocateOnHost(size_t bytes) override { return Allocate(bytes); }
  void FreeOnHost(void* memory) override { Free(memory); }

  absl::Status CopyFromHost(void* to, const void* from, size_t bytes) override {
    return CopyToHost(to, from, bytes);
  }
  absl::Status CopyToHost(void* to, const void* from, size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }
  absl::Status Synchronize(void*) override { return absl::OkStatus(); }
  bool asynchronous() const override { return false; }
  std::optional<Unreachable> FindUnreachable(absl::Span<const void* const>) const override {
    return std::nullopt;
  }
  absl::StatusOr<StreamOrder> OrderOf(void*) override { return StreamOrder(); }
  absl::StatusOr<bool> IsCaptured(void*) override { return false; }
  absl::Status SynchronizeAll() override { return absl::OkStatus(); }
};

}  // namespace

std::shared_ptr<DeviceMemory> MakeHostMemory() { return std::make_shared<HostMemory>(); }

}  // namespace kvant
