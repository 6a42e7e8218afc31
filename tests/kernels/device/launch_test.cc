// How the SIMT executor runs blocks and threads.
#include "kvant/tests/kernels/device/launch.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/kernels/device/sanitizer.h"

namespace kvant::simt {
namespace {

using device::BlockIndex;
using device::BlockSync;
using device::i64;
using device::LoadShared32;
using device::SharedBase;
using device::StoreShared32;
using device::ThreadIndex;
using device::u32;
using testing::ElementsAre;

// Which (block, thread) ran, in turn, up to each one's first wait.
std::vector<int> OrderOf(uint64_t seed) {
  std::vector<int> order;
  LaunchCleanly({.blocks = 3, .threads = 64},
                [&] {
                  order.push_back(static_cast<int>(BlockIndex()) * 64 + ThreadIndex());
                  BlockSync();
                },
                {.seed = seed});
  return order;
}

TEST(SimtLaunchTest, SeedsChangeTheOrder) {
  std::vector<int> natural(3 * 64);
  std::iota(natural.begin(), natural.end(), 0);
  EXPECT_EQ(OrderOf(0), natural);
  std::set<std::vector<int>> orders;
  for (uint64_t seed = 1; seed < 6; ++seed) {
    std::vector<int> order = OrderOf(seed);
    EXPECT_EQ(order, OrderOf(seed)) << "a seed is an order";
    orders.insert(order);
    std::sort(order.begin(), order.end());
    EXPECT_EQ(order, natural);
  }
  EXPECT_EQ(orders.size(), 5u);
}

// The sum of `count` numbers by a tree in shared memory; `out` per block.
void Reduce(const std::vector<u32>& in, std::vector<u32>* out) {
  const i64 first = BlockIndex() * 128;
  const auto at = [](int i) { return SharedBase() + 4 * static_cast<u32>(i); };
  StoreShared32(at(ThreadIndex()), device::Load(&in[first + ThreadIndex()]));
  for (int step = 64; step > 0; step /= 2) {
    BlockSync();
    if (ThreadIndex() < step) {
      StoreShared32(at(ThreadIndex()),
                    LoadShared32(at(ThreadIndex())) + LoadShared32(at(ThreadIndex() + step)));
    }
  }
  BlockSync();
  if (ThreadIndex() == 0) device::Store(&(*out)[BlockIndex()], LoadShared32(at(0)));
}

std::vector<u32> ReduceAll(uint64_t seed) {
  std::vector<u32> in(5 * 128);
  std::iota(in.begin(), in.end(), 1);
  std::vector<u32> out(5);
  LaunchCleanly({.blocks = 5, .threads = 128, .shared_bytes = 512}, [&] { Reduce(in, &out); },
                {.seed = seed});
  return out;
}

TEST(SimtLaunchTest, RightKernelsDoNotDependOnTheOrder) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    const std::vector<u32> sums = ReduceAll(seed);
    for (u32 b = 0; b < 5; ++b) EXPECT_EQ(sums[b], 128 * 128 * b + 128 * 129 / 2);
  }
}

TEST(SimtLaunchTest, FromSeveralOsThreads) {
  std::vector<std::thread> threads;
  std::vector<std::vector<u32>> sums(4);
  for (size_t i = 0; i < sums.size(); ++i) {
    threads.emplace_back([&sums, i] {
      for (int repeat = 0; repeat < 5; ++repeat) sums[i] = ReduceAll(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<u32>& s : sums) EXPECT_EQ(s, sums[0]);
}

// A launch that ended early leaves nothing behind that hurts the next one.
TEST(SimtLaunchTest, AfterADeadlock) {
  for (int i = 0; i < 3; ++i) {
    const Report report = Launch({.blocks = 2, .threads = 64}, {}, [] {
      volatile char frame[4096];
      frame[ThreadIndex()] = 0;
      if (ThreadIndex() > frame[ThreadIndex()]) BlockSync();
    });
    EXPECT_EQ(report.errors.size(), 1u);
    EXPECT_EQ(ReduceAll(0)[0], 128 * 129 / 2u);
  }
}

TEST(SimtLaunchTest, NotFromWithinAKernel) {
  Report inner;
  LaunchCleanly({}, [&] { inner = Launch({}, {}, [] {}); });
  EXPECT_THAT(inner.errors, ElementsAre(IsError(Check::kArgument, "from within a kernel")));
}

TEST(SimtLaunchTest, TheLargestBlock) {
  u32 count = 0;
  const Report report = LaunchCleanly({.threads = 1024, .shared_bytes = 227 * 1024}, [&] {
    device::AtomicIncrement(&count, 0xffffffff);
    BlockSync();
    device::AtomicIncrement(&count, 0xffffffff);
  });
  EXPECT_EQ(count, 2048u);
  EXPECT_EQ(report.counters.block_barriers, 1u);
}

#if defined(KVANT_ADDRESS_SANITIZER)
// The sanitizer stands in for Options::buffers where a test gives none.
TEST(SimtLaunchDeathTest, SanitizerSeesKernels) {
  std::vector<u32> data(32);
  u32 sum = 0;
  EXPECT_DEATH(Launch({.threads = 64}, {}, [&] { sum += device::Load(&data[0] + ThreadIndex()); }),
               "heap-buffer-overflow");
  EXPECT_DEATH(
      Launch({.shared_bytes = 4}, {}, [&] { device::CopyAsync(4, SharedBase(), &data[0] + 32); }),
      "heap-buffer-overflow");
}
#endif

}  // namespace
}  // namespace kvant::simt
