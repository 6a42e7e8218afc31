// KvBlock: a piece of an engine's memory.
#ifndef KVANT_CACHE_KV_BLOCK_H_
#define KVANT_CACHE_KV_BLOCK_H_

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/backends/device_memory.h"
#include "kvant/graph/status.h"

namespace kvant {

class KvBlock {
 public:
  KvBlock() = default;
  // Zeroed. kResourceExhausted.
  static absl::StatusOr<KvBlock> Allocate(const std::shared_ptr<DeviceMemory>& memory,
                                          size_t bytes) {
    KvBlock block;
    KVANT_ASSIGN_OR_RETURN(void* data, memory->Allocate(bytes));
    block.memory_ = memory;
    block.bytes_ = {static_cast<std::byte*>(data), bytes};
    return block;
  }
  KvBlock(KvBlock&& other) noexcept
      : memory_(std::move(other.memory_)), bytes_(std::exchange(other.bytes_, {})) {}
  KvBlock& operator=(KvBlock&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~KvBlock() {
    if (memory_ != nullptr) memory_->Free(bytes_.data());
  }
  absl::Span<std::byte> bytes() const { return bytes_; }

 private:
  std::shared_ptr<DeviceMemory> memory_;
  absl::Span<std::byte> bytes_;
};

}  // namespace kvant

#endif  // KVANT_CACHE_KV_BLOCK_H_
