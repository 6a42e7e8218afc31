#include "kvant/backends/executor.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "oneapi/tbb/global_control.h"

namespace kvant {
namespace {

// Runs n bodies and checks that each index comes once and that no slot is used twice at a time.
void ExpectExact(Executor& executor, int64_t n) {
  std::vector<std::atomic<int>> calls(n);
  std::vector<std::atomic<int>> busy(executor.max_concurrency());
  std::atomic<int> violations = 0;
  executor.ParallelFor(n, [&](int64_t i, int slot) {
    if (slot < 0 || slot >= executor.max_concurrency()) {
      ++violations;
      return;
    }
    if (busy[slot].fetch_add(1) != 0) ++violations;
    ++calls[i];
    for (int spin = 0; spin < 50; ++spin) std::this_thread::yield();
    busy[slot].fetch_sub(1);
  });
  EXPECT_EQ(violations, 0);
  for (int64_t i = 0; i < n; ++i) ASSERT_EQ(calls[i], 1) << "index " << i << " of " << n;
}

// Threads of oneTBB; below 0, of OpenMP; 0: the caller's own.
class ExecutorTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    const int threads = GetParam();
    // Once loaded it stays, as where PyTorch is. GCC, which builds this, brings it.
    if (threads < 0) {
      ASSERT_NE(dlopen("libgomp.so.1", RTLD_NOW), nullptr) << dlerror();
    }
    executor_ = threads == 0  ? MakeSerialExecutor()
                : threads > 0 ? MakeTbbExecutor(threads)
                              : MakeOpenMpExecutor(-threads);
    ASSERT_NE(executor_, nullptr);
  }
  // More threads than this machine may have.
  tbb::global_control threads_{tbb::global_control::max_allowed_parallelism, 8};
  std::unique_ptr<Executor> executor_;
};

TEST_P(ExecutorTest, HasTheConcurrencyAskedFor) {
  EXPECT_EQ(executor_->max_concurrency(), std::max(1, std::abs(GetParam())));
}

TEST_P(ExecutorTest, CallsEachIndexOnce) {
  for (const int64_t n : {0, 1, 2, 3, 7, 64, 1000}) ExpectExact(*executor_, n);
}

TEST_P(ExecutorTest, TakesManyExternalThreadsAtOnce) {
  std::vector<std::thread> threads;
  threads.reserve(16);
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 20; ++round) ExpectExact(*executor_, 5 + t + round);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(ExecutorTest, NestsWithoutSharingASlot) {
  std::vector<std::atomic<int>> busy(executor_->max_concurrency());
  std::atomic<int> violations = 0;
  std::atomic<int64_t> inner = 0;
  executor_->ParallelFor(40, [&](int64_t, int slot) {
    if (busy[slot].fetch_add(1) != 0) ++violations;
    executor_->ParallelFor(30, [&](int64_t, int) {
      ++inner;
      std::this_thread::yield();
    });
    busy[slot].fetch_sub(1);
  });
  EXPECT_EQ(violations, 0);
  EXPECT_EQ(inner, 40 * 30);
}

INSTANTIATE_TEST_SUITE_P(Threads, ExecutorTest, ::testing::Values(0, 1, 2, 3, 8));
// The thread sanitizer does not know how libgomp orders threads.
#ifndef __SANITIZE_THREAD__
INSTANTIATE_TEST_SUITE_P(OpenMpThreads, ExecutorTest, ::testing::Values(-1, -2, -5));
#endif

TEST(TbbExecutorTest, TakesNoMoreThreadsThanRunWithoutAWarning) {
  const auto most = static_cast<int>(
      tbb::global_control::active_value(tbb::global_control::max_allowed_parallelism));
  for (const int threads : {-1, 0, most, most + 1, 4096, 1 << 30}) {
    ::testing::internal::CaptureStderr();
    const std::unique_ptr<Executor> executor = MakeTbbExecutor(threads);
    ExpectExact(*executor, 100);
    EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << threads;
    EXPECT_EQ(executor->max_concurrency(), most) << threads;
  }
}

TEST(TbbExecutorTest, TakesAllHardwareThreadsByDefault) {
  EXPECT_GE(MakeTbbExecutor()->max_concurrency(), 1);
  ExpectExact(*MakeTbbExecutor(), 100);
}

TEST(TbbExecutorTest, ExecutorsMayCallEachOther) {
  const tbb::global_control threads(tbb::global_control::max_allowed_parallelism, 8);
  const std::unique_ptr<Executor> outer = MakeTbbExecutor(3);
  const std::unique_ptr<Executor> inner = MakeTbbExecutor(2);
  outer->ParallelFor(12, [&](int64_t, int) { ExpectExact(*inner, 9); });
}

}  // namespace
}  // namespace kvant
