// Scratch where executions run later, in the order of their streams.
#include "kvant/backends/scratch_pool.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace kvant {
namespace {

// A stream's handle is its order. Threads that are all a stream's first allocate at once.
class LaterMemory : public DeviceMemory {
 public:
  absl::StatusOr<void*> Allocate(size_t bytes) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return *blocks.insert(::operator new(bytes)).first;
  }
  void Free(void* memory) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    EXPECT_EQ(blocks.erase(memory), 1);
    if (running) {
      EXPECT_GT(synchronized, freed);
    }
    ++freed;
    ::operator delete(memory);
  }
  absl::StatusOr<void*> AllocateOnHost(size_t) override { return nullptr; }
  void FreeOnHost(void*) override {}
  absl::Status CopyFromHost(void*, const void*, size_t) override { return absl::OkStatus(); }
  absl::Status CopyToHost(void*, const void*, size_t) override { return absl::OkStatus(); }
  absl::Status Synchronize(void*) override { return absl::OkStatus(); }
  bool asynchronous() const override { return true; }
  std::optional<Unreachable> FindUnreachable(absl::Span<const void* const>) const override {
    return std::nullopt;
  }
  absl::StatusOr<StreamOrder> OrderOf(void* stream) override {
    return StreamOrder{reinterpret_cast<uint64_t>(stream), captured};
  }
  absl::StatusOr<bool> IsCaptured(void*) override { return captured; }
  absl::Status SynchronizeAll() override {
    ++synchronized;
    return waits;
  }

  bool captured = false, running = true;
  absl::Status waits;
  int synchronized = 0, freed = 0;
  std::set<void*> blocks;

 private:
  std::mutex mutex_;
};

class ScratchPoolTest : public testing::Test {
 protected:
  ~ScratchPoolTest() override {
    memory_->running = false;
    pool_.reset();
    EXPECT_TRUE(memory_->blocks.empty());
  }
  std::byte* Of(uint64_t stream) {
    std::byte* block = nullptr;
    const absl::Status done = pool_->Use(16, reinterpret_cast<void*>(stream), [&](std::byte* one) {
      block = one;
      return absl::OkStatus();
    });
    EXPECT_TRUE(done.ok()) << done;
    return block;
  }
  const std::shared_ptr<LaterMemory> memory_ = std::make_shared<LaterMemory>();
  std::optional<ScratchPool> pool_{memory_};
};

TEST_F(ScratchPoolTest, AStreamHasABlockOfItsOwn) {
  std::byte* const one = Of(1);
  EXPECT_NE(Of(2), one);
  EXPECT_EQ(Of(1), one);
}

TEST_F(ScratchPoolTest, StreamsThatAreGoneMakeRoomOnceAllHasRun) {
  std::byte* const kept = Of(1);
  for (uint64_t stream = 2; stream < 1000; ++stream) {
    Of(stream);
    EXPECT_EQ(Of(1), kept) << "it is in use, stream " << stream;
    ASSERT_LE(memory_->blocks.size(), 64);
  }
  EXPECT_EQ(memory_->freed, 999 - 64);
}

// An execution has its block before anything of it is on the stream.
TEST_F(ScratchPoolTest, WhatIsLentStays) {
  const absl::Status done = pool_->Use(16, reinterpret_cast<void*>(1), [&](std::byte* block) {
    for (uint64_t stream = 2; stream < 200; ++stream) Of(stream);
    EXPECT_EQ(memory_->blocks.count(block), 1);
    return absl::OkStatus();
  });
  EXPECT_TRUE(done.ok()) << done;
}

TEST_F(ScratchPoolTest, ThreadsPutTheirsOntoAStreamOneAfterAnother) {
  std::atomic<int> putting = 0, together = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        const absl::Status done = pool_->Use(16, reinterpret_cast<void*>(1), [&](std::byte*) {
          if (++putting > 1) ++together;
          std::this_thread::yield();
          --putting;
          return absl::OkStatus();
        });
        EXPECT_TRUE(done.ok()) << done;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(together, 0);
}

TEST_F(ScratchPoolTest, WhereNothingCanBeWaitedForThePoolGrows) {
  memory_->waits = absl::InternalError("a stream is being captured");
  for (uint64_t stream = 1; stream < 200; ++stream) Of(stream);
  EXPECT_EQ(memory_->freed, 0);
}

TEST_F(ScratchPoolTest, ACaptureNeedsABlockFromBefore) {
  memory_->captured = true;
  const absl::Status done = pool_->Use(16, reinterpret_cast<void*>(1), [](std::byte*) {
    ADD_FAILURE() << "it has nothing to run with";
    return absl::OkStatus();
  });
  EXPECT_EQ(done.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(memory_->blocks.empty());
}

TEST_F(ScratchPoolTest, WhatAGraphWasCapturedWithStays) {
  Of(1);
  memory_->captured = true;
  std::byte* const captured = Of(1);
  memory_->captured = false;
  for (uint64_t stream = 2; stream < 200; ++stream) Of(stream);
  EXPECT_EQ(memory_->blocks.count(captured), 1);
  EXPECT_EQ(Of(1), captured);
}

}  // namespace
}  // namespace kvant
