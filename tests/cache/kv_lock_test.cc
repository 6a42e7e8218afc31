#include "kvant/cache/kv_lock.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace kvant {
namespace {

using std::chrono::steady_clock;

TEST(KvLock, WritersAtOnceAreAloneAndReadersAreNot) {
  KvLock lock;
  int64_t sum = 0;
  std::atomic<int> readers = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        if (i % 10 == 0) {
          const std::unique_lock<KvLock> writing(lock);
          ASSERT_EQ(readers, 0);
          ++sum;
        } else {
          const std::shared_lock<KvLock> reading(lock);
          ++readers;
          ASSERT_GE(sum, 0);
          --readers;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(sum, 400);
  const std::shared_lock<KvLock> reading(lock);
  std::thread([&] { const std::shared_lock<KvLock> beside(lock); }).join();
}

// Each reader keeps the lock until another one has it too, or none comes: a lock that lets readers
// overtake is never free.
TEST(KvLock, AWriterThatWaitsIsNotOvertakenByThreadsThatRead) {
  KvLock lock;
  std::atomic<int64_t> reads = 0;
  std::atomic<bool> wrote = false;
  const auto end = steady_clock::now() + std::chrono::seconds(20);
  std::vector<std::thread> readers;
  for (int t = 0; t < 3; ++t) {
    readers.emplace_back([&] {
      while (!wrote && steady_clock::now() < end) {
        const std::shared_lock<KvLock> reading(lock);
        const int64_t mine = ++reads;
        const auto enough = steady_clock::now() + std::chrono::milliseconds(100);
        while (reads == mine && steady_clock::now() < enough) std::this_thread::yield();
      }
    });
  }
  while (reads < 10 && steady_clock::now() < end) std::this_thread::yield();
  {
    const std::unique_lock<KvLock> writing(lock);
    wrote = true;
  }
  EXPECT_LT(steady_clock::now(), end) << "the writer came when all readers had gone";
  for (std::thread& reader : readers) reader.join();
}

}  // namespace
}  // namespace kvant
