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

// Executions take a block for as long as they run. There come to be as many blocks as run at once.
// None is larger by more than a quarter than what the largest execution has asked for. All methods
// may be called from several threads at once.
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
  // A block of at least so many bytes. Allocates nothing where a free one has as many.
  // kResourceExhausted.
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
