#include "kvant/cache/kv_scratch.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kvant/graph/status.h"

namespace kvant {
namespace {

// Rounds to one of four sizes between powers of two. Otherwise blocks that grow little by little
// would be allocated again and again.
size_t RoundedUp(size_t bytes) {
  const size_t step = std::max<size_t>(std::bit_floor(bytes) / 4, 64);
  return (bytes + step - 1) / step * step;
}

}  // namespace

// The CUDA kernels count in their scratch, and expect there what they left themselves, or zeros.
KvScratch::KvScratch(const Engine& engine)
    : memory_(engine.shared_memory()), zeroes_(engine.device() != Device::kCpu) {}

KvScratch::~KvScratch() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const absl::Span<std::byte> block : free_) memory_->Free(block.data());
}

absl::StatusOr<KvScratch::Lease> KvScratch::Take(size_t bytes) {
  if (bytes == 0) return Lease(*this, {});
  const std::lock_guard<std::mutex> lock(mutex_);
  // The smallest block that will do: larger ones are left for who needs more.
  const auto found = std::lower_bound(free_.begin(), free_.end(), bytes,
                                      [](auto block, size_t size) { return block.size() < size; });
  if (found != free_.end()) {
    const absl::Span<std::byte> block = *found;
    free_.erase(found);
    if (zeroes_) std::memset(block.data(), 0, block.size());
    return Lease(*this, block);
  }
  // The new block replaces the largest free one, so that there are never more than run at once.
  if (!free_.empty()) {
    bytes_ -= static_cast<int64_t>(free_.back().size());
    memory_->Free(free_.back().data());
    free_.pop_back();
  }
  bytes = RoundedUp(bytes);
  KVANT_ASSIGN_OR_RETURN(void* memory, memory_->Allocate(bytes));
  bytes_ += static_cast<int64_t>(bytes);
  return Lease(*this, {static_cast<std::byte*>(memory), bytes});
}

void KvScratch::Return(absl::Span<std::byte> block) {
  if (block.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.insert(std::upper_bound(free_.begin(), free_.end(), block,
                                [](auto a, auto b) { return a.size() < b.size(); }),
               block);
}

int64_t KvScratch::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return bytes_;
}

}  // namespace kvant
