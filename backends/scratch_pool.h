// Scratch for executions that bring none.
#ifndef KVANT_BACKENDS_SCRATCH_POOL_H_
#define KVANT_BACKENDS_SCRATCH_POOL_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
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
  // On the host, what throws or fails leaves its block to no one. kInvalidArguments: the stream is
  // being captured, and has no block yet.
  absl::Status Use(size_t bytes, void* stream, absl::FunctionRef<absl::Status(std::byte*)> body) {
    if (memory_->asynchronous()) return UseOfStream(bytes, stream, body);
    KVANT_ASSIGN_OR_RETURN(void* block, Take(bytes));
    bool intact = false;  // left as the next execution expects it
    const absl::Cleanup give_back = [&] {
      const std::lock_guard<std::mutex> lock(mutex_);
      --lent_;
      if (intact) {
        blocks_.push_back(block);
      } else {
        memory_->Free(block);
      }
    };
    absl::Status done = body(static_cast<std::byte*>(block));
    intact = done.ok();
    return done;
  }

 private:
  struct OfOneStream {
    void* data = nullptr;
    uint64_t used = 0;  // when
    int lent = 0;       // to executions that have not put all of theirs onto the stream
    bool captured = false;
    std::mutex turn;  // held while one execution puts all of its own onto the stream
  };
  static constexpr size_t kMostStreams = 64;

  absl::StatusOr<void*> Take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (blocks_.empty()) {
      blocks_.reserve(lent_ + 1);  // so that there is room for all that come back
      KVANT_ASSIGN_OR_RETURN(void* block, memory_->Allocate(bytes));
      blocks_.push_back(block);
    }
    ++lent_;
    void* block = blocks_.back();
    blocks_.pop_back();
    return block;
  }

  absl::Status UseOfStream(size_t bytes, void* stream,
                           absl::FunctionRef<absl::Status(std::byte*)> body) {
    KVANT_ASSIGN_OR_RETURN(const DeviceMemory::StreamOrder order, memory_->OrderOf(stream));
    OfOneStream* own = Lend(order);
    if (own == nullptr) {
      if (order.captured) {
        return InvalidArguments(
            "the stream is being captured, and this was not executed on it before: "
            "execute once before the capture, or bring scratch");
      }
      MakeRoom();
      KVANT_ASSIGN_OR_RETURN(void* block, memory_->Allocate(bytes));
      own = Lend(order, block);
    }
    const absl::Cleanup give_back = [&] {
      const std::lock_guard<std::mutex> lock(mutex_);
      --own->lent;
    };
    const std::lock_guard<std::mutex> turn(own->turn);
    return body(static_cast<std::byte*>(own->data));
  }

  // The stream's block, which is `block` where it has none; null if that is null too.
  OfOneStream* Lend(const DeviceMemory::StreamOrder& order, void* block = nullptr) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (block == nullptr && !of_stream_.contains(order.id)) return nullptr;
    const auto [found, added] = of_stream_.try_emplace(order.id);
    OfOneStream& own = found->second;
    if (added) {
      own.data = block;
    } else if (block != nullptr) {
      blocks_.push_back(block);  // another thread was first
    }
    own.used = ++uses_;
    own.captured |= order.captured;
    ++own.lent;
    return &own;
  }

  // Streams come and go, and nobody tells: the block that was not used for longest makes room. What
  // is lent stays, and what a graph was captured with, which may run at any time.
  void MakeRoom() {
    void* block = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      auto oldest = of_stream_.end();
      size_t streams = 0;
      for (auto it = of_stream_.begin(); it != of_stream_.end(); ++it) {
        if (it->second.captured) continue;
        ++streams;
        if (it->second.lent > 0) continue;
        if (oldest == of_stream_.end() || it->second.used < oldest->second.used) oldest = it;
      }
      if (streams < kMostStreams || oldest == of_stream_.end()) return;
      block = oldest->second.data;
      of_stream_.erase(oldest);
    }
    // Without the lock: what is waited for may need another execution.
    if (memory_->SynchronizeAll().ok()) return memory_->Free(block);
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_.push_back(block);  // until the end
  }

  const std::shared_ptr<DeviceMemory> memory_;
  std::mutex mutex_;  // of what follows
  std::vector<void*> blocks_;
  size_t lent_ = 0;
  std::map<uint64_t, OfOneStream> of_stream_;  // by its id; entries stay where they are
  uint64_t uses_ = 0;
};

}  // namespace kvant

#endif  // KVANT_BACKENDS_SCRATCH_POOL_H_
