// The checks of global memory: each finds the bug that it is for, and nothing in the same kernel
// without it.
#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/tests/kernels/device/launch.h"

namespace kvant::simt {
namespace {

using device::BlockSync;
using device::LaneIndex;
using device::SharedBase;
using device::ThreadIndex;
using device::u32;
using device::u8;
using testing::ElementsAre;
using testing::IsEmpty;

TEST(SimtGlobalTest, GlobalBounds) {
  constexpr int kLength = 100;
  std::vector<float> memory(4 * kLength, 1.0f);
  const float* from = &memory[0];
  float* to = &memory[2 * kLength];
  const auto run = [&](bool predicate) {
    const Options options{.buffers = {{from, kLength * 4}, {to, kLength * 4}}};
    return Launch({.threads = 128}, options, [&] {
      if (predicate && ThreadIndex() >= kLength) return;
      const float x = device::Load(from + ThreadIndex());
      device::Store(to + ThreadIndex(), x);
    });
  };
  EXPECT_THAT(run(true).errors, IsEmpty());
  EXPECT_THAT(run(false).errors,
              ElementsAre(IsError(Check::kBounds,
                                  "thread 100 of block 0 loads 4 bytes at byte "
                                  "400 of buffer 0, which has 400 bytes"),
                          IsError(Check::kBounds, "stores 4 bytes at byte 400 of buffer 1")));
}

TEST(SimtGlobalTest, OutputsOfTwoBlocks) {
  const auto run = [](int per_block) {
    std::vector<u8> out(128);
    return Launch({.blocks = 2}, {}, [&] {
      device::Store(&out[device::BlockIndex() * per_block + LaneIndex()], u8{1});
    });
  };
  EXPECT_THAT(run(32).errors, IsEmpty());
  EXPECT_THAT(
      run(31).errors,
      ElementsAre(IsError(Check::kRace, "thread 0 of block 1 stores to global memory at ")));
  EXPECT_THAT(run(31).errors, ElementsAre(IsError(Check::kRace, "thread 31 of block 0 stored at")));
}

// Each block stores partial results; the last one to finish adds them up.
struct Partials {
  bool fence = true;
  bool sync_before_atomic = true;
  bool coherent = true;
  bool all_threads_fence = true;

  Report Run(uint64_t seed, float* sum) const {
    constexpr int kBlocks = 4;
    std::vector<float> partials(kBlocks * 64);
    u32 finished = 0;
    return Launch({.blocks = kBlocks, .threads = 64, .shared_bytes = 4}, {.seed = seed}, [&] {
      device::Store(&partials[device::BlockIndex() * 64 + ThreadIndex()], 1.0f);
      if (fence && all_threads_fence) device::Fence();
      if (sync_before_atomic) BlockSync();
      if (ThreadIndex() == 0) {
        if (fence && !all_threads_fence) device::Fence();
        device::StoreShared32(SharedBase(), device::AtomicIncrement(&finished, kBlocks - 1));
      }
      BlockSync();
      if (device::LoadShared32(SharedBase()) != kBlocks - 1) return;
      if (ThreadIndex() != 63) return;
      float total = 0;
      for (int i = 0; i < kBlocks * 64; ++i) {
        total += coherent ? device::LoadCoherent(&partials[i]) : device::Load(&partials[i]);
      }
      *sum = total;
    });
  }
};

TEST(SimtGlobalTest, PartialsOfOtherBlocks) {
  float sum = 0;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    EXPECT_THAT(Partials{}.Run(seed, &sum).errors, IsEmpty());
    EXPECT_EQ(sum, 256.0f);
    EXPECT_THAT(Partials{.all_threads_fence = false}.Run(seed, &sum).errors, IsEmpty());
    EXPECT_THAT(Partials{.fence = false}.Run(seed, &sum).errors,
                ElementsAre(IsError(Check::kRace, "without a fence and an atomic after it")));
    EXPECT_THAT(Partials{.sync_before_atomic = false}.Run(seed, &sum).errors,
                ElementsAre(IsError(Check::kRace, "without a fence and an atomic after it")));
    EXPECT_THAT(Partials{.coherent = false}.Run(seed, &sum).errors,
                ElementsAre(IsError(Check::kRace, "Load is for what nobody writes")));
  }
}

TEST(SimtGlobalTest, PartialsOfTheSameBlock) {
  const auto run = [](bool sync) {
    std::vector<float> partials(64);
    return Launch({.threads = 64}, {}, [&] {
      device::Store(&partials[ThreadIndex()], 1.0f);
      if (sync) BlockSync();
      device::LoadCoherent(&partials[ThreadIndex() ^ 32]);
    });
  };
  EXPECT_THAT(run(true).errors, IsEmpty());
  EXPECT_THAT(run(false).errors, ElementsAre(IsError(Check::kRace, "without a barrier")));
}

TEST(SimtGlobalTest, PartialsNeedFenceAndAtomicsInOrder) {
  float partial = 0;
  u32 counter = 0;
  const auto run = [&](bool atomic, bool fence_after_store = true) {
    return Launch({.blocks = 2}, {}, [&] {
      if (LaneIndex() != 0) return;
      if (device::BlockIndex() == 0) {
        if (!fence_after_store) device::Fence();
        device::Store(&partial, 1.0f);
        if (fence_after_store) device::Fence();
        device::AtomicIncrement(&counter, 99);
      } else {
        if (atomic) device::AtomicIncrement(&counter, 99);
        device::LoadCoherent(&partial);
      }
    });
  };
  EXPECT_THAT(run(true).errors, IsEmpty());
  EXPECT_THAT(run(false).errors,
              ElementsAre(IsError(Check::kRace, "without an atomic of its own")));
  EXPECT_THAT(run(true, /*fence_after_store=*/false).errors,
              ElementsAre(IsError(Check::kRace, "without a fence and an atomic after it")));
}

}  // namespace
}  // namespace kvant::simt
