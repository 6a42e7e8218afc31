// KvScratch: the memory that the attentions of a cache compute in, which they share.
#ifndef KVANT_CACHE_KV_SCRATCH_H_
#define KVANT_CACHE_KV_SCRATCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/backends/engine.h"

namespace kvant {

// Blocks that executions take for as long as they run. There come to be as many as run at once, and
// none is larger, by more than a quarter, than what the largest execution so far asked for. All
// methods may be called from several threads at once.
class KvScratch {
 public:
  explicit KvScratch(const Engine& engine);
  ~KvScratch();
  KvScratch(const KvScratch&) = delete;
  KvScratch& operator=(const KvScratch&) = delete;

  // A block that is handed back when this is gone.
  class Lease {
   public:
    Lease(KvScratch& from, absl::Span<std::byte> block) : from_(&from), block_(block) {}
    Lease(Lease&& other) noexcept : from_(other.from_), block_(std::exchange(other.block_, {})) {}
    Lease& operator=(Lease&&) = delete;
    ~Lease() { from_->Return(block_); }
    absl::Span<std::byte> block() const { return block_; }

   private:
    KvScratch* from_;
    absl::Span<std::byte> block_;
  };
  // At least so many bytes, as Execute takes them. Allocates nothing where a free block has as
  // many; kResourceExhausted.
  absl::StatusOr<Lease> Take(size_t bytes);

  // Of all blocks, taken or not.
  int64_t bytes() const;

 private:
  void Return(absl::Span<std::byte> block);

  const std::shared_ptr<DeviceMemory> memory_;
  const bool zeroes_;
  mutable std::mutex mutex_;  // of what follows
  std::vector<absl::Span<std::byte>> free_;
  int64_t bytes_ = 0;
};

}  // namespace kvant

#endif  // KVANT_CACHE_KV_SCRATCH_H_
