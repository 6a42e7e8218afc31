// Scratch for executions that bring none.
#ifndef KVANT_BACKENDS_SCRATCH_POOL_H_
#define KVANT_BACKENDS_SCRATCH_POOL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "kvant/backends/device_memory.h"
#include "kvant/graph/status.h"

namespace kvant {

// Blocks of scratch. On the host those that are not in use: as many come to exist as executions
// ever run at once. Where executions run later, one per stream: what is put onto a stream runs in
// order and may share it.
class ScratchPool {
 public:
  explicit ScratchPool(std::shared_ptr<DeviceMemory> memory) : memory_(std::move(memory)) {}
  ScratchPool(const ScratchPool&) = delete;
  ScratchPool& operator=(const ScratchPool&) = delete;
  ~ScratchPool() {
    for (void* block : blocks_) memory_->Free(block);
    for (const auto& [id, block] : of_stream_) memory_->Free(block.data);
  }

  // Calls `body` with `bytes` of scratch, always the same number, zeroed before their first use.
  // What throws leaves its block to no one.
  absl::Status Use(size_t bytes, void* stream, absl::FunctionRef<absl::Status(std::byte*)> body) {
    KVANT_ASSIGN_OR_RETURN(void* block, Take(bytes, stream));
    bool intact = false;
    const absl::Cleanup give_back = [&] { Return(block, intact); };
    absl::Status done = body(static_cast<std::byte*>(block));
    intact = true;
    return done;
  }

 private:
  struct OfOneStream {
    void* data;
    uint64_t used = 0;  // when
    bool captured = false;
  };
  static constexpr size_t kMostStreams = 64;

  absl::StatusOr<void*> Take(size_t bytes, void* stream) {
    if (memory_->asynchronous()) return OfStream(bytes, stream);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (blocks_.empty()) {
      blocks_.reserve(lent_ + 1);  // so that there is room for all that come back
      KVANT_ASSIGN_OR_RETURN(void* block, memory_->Allocate(bytes));
      ++lent_;
      return block;
    }
    void* block = blocks_.back();
    blocks_.pop_back();
    ++lent_;
    return block;
  }

  absl::StatusOr<void*> OfStream(size_t bytes, void* stream) {
    KVANT_ASSIGN_OR_RETURN(const DeviceMemory::StreamOrder order, memory_->OrderOf(stream));
    const std::lock_guard<std::mutex> lock(mutex_);
    auto found = of_stream_.find(order.id);
    if (found == of_stream_.end()) {
      KVANT_RETURN_IF_ERROR(MakeRoom());
      of_stream_.reserve(of_stream_.size() + 1);
      KVANT_ASSIGN_OR_RETURN(void* block, memory_->Allocate(bytes));
      found = of_stream_.emplace(order.id, OfOneStream{block}).first;
    }
    found->second.used = ++uses_;
    found->second.captured |= order.captured;
    return found->second.data;
  }

  // Streams come and go, and nobody tells: the block that was not used for longest makes room. What
  // a graph was captured with is kept as long as the graph may run.
  absl::Status MakeRoom() {
    auto oldest = of_stream_.end();
    size_t streams = 0;
    for (auto it = of_stream_.begin(); it != of_stream_.end(); ++it) {
      if (it->second.captured) continue;
      ++streams;
      if (oldest == of_stream_.end() || it->second.used < oldest->second.used) oldest = it;
    }
    if (streams < kMostStreams) return absl::OkStatus();
    KVANT_RETURN_IF_ERROR(memory_->SynchronizeAll());
    memory_->Free(oldest->second.data);
    of_stream_.erase(oldest);
    return absl::OkStatus();
  }

  // A block that an execution left as the next one expects it, or not.
  void Return(void* block, bool intact) {
    if (memory_->asynchronous()) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    --lent_;
    if (intact) {
      blocks_.push_back(block);
    } else {
      memory_->Free(block);
    }
  }

  const std::shared_ptr<DeviceMemory> memory_;
  std::mutex mutex_;  // of what follows
  std::vector<void*> blocks_;
  size_t lent_ = 0;
  absl::flat_hash_map<uint64_t, OfOneStream> of_stream_;  // by its id
  uint64_t uses_ = 0;
};

}  // namespace kvant

#endif  // KVANT_BACKENDS_SCRATCH_POOL_H_
