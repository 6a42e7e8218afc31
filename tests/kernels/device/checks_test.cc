// Each check of the SIMT executor finds the bug that it is for, and nothing in the same kernel
// without it.
#include <cstdint>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/tests/kernels/device/launch.h"

namespace kvant::simt {
namespace {

using device::BlockSync;
using device::CopyAsync;
using device::CopyAsyncCommit;
using device::CopyAsyncWait;
using device::LaneIndex;
using device::LoadShared32;
using device::SharedAddress;
using device::SharedBase;
using device::StoreShared128;
using device::StoreShared32;
using device::StoreShared8;
using device::ThreadIndex;
using device::u32;
using device::u8;
using device::WarpSync;
using testing::Contains;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

struct alignas(16) Source {
  u32 words[256];
  Source() {
    for (u32 i = 0; i < 256; ++i) words[i] = i;
  }
};

SharedAddress Word(int index) { return SharedBase() + 4 * static_cast<u32>(index); }

// Checked in the order of this seed.
Report LaunchSeeded(const LaunchShape& shape, uint64_t seed, const std::function<void()>& body) {
  return Launch(shape, {.seed = seed}, body);
}

enum class Barrier { kNone, kWarp, kBlock };
void Sync(Barrier barrier) {
  if (barrier == Barrier::kWarp) WarpSync();
  if (barrier == Barrier::kBlock) BlockSync();
}

// Each thread writes its word and reads the one of thread `index ^ mask`.
Report Exchange(int mask, Barrier barrier, uint64_t seed) {
  return LaunchSeeded({.threads = 64, .shared_bytes = 256}, seed, [=] {
    StoreShared32(Word(ThreadIndex()), 1);
    Sync(barrier);
    LoadShared32(Word(ThreadIndex() ^ mask));
  });
}

TEST(SimtChecksTest, ReadAfterWrite) {
  for (const uint64_t seed : {0, 1, 2}) {
    EXPECT_THAT(Exchange(1, Barrier::kNone, seed).errors, Not(IsEmpty()));
    EXPECT_THAT(Exchange(1, Barrier::kWarp, seed).errors, IsEmpty());
    EXPECT_THAT(Exchange(1, Barrier::kBlock, seed).errors, IsEmpty());
    EXPECT_THAT(Exchange(32, Barrier::kWarp, seed).errors, Not(IsEmpty()));
    EXPECT_THAT(Exchange(32, Barrier::kBlock, seed).errors, IsEmpty());
    EXPECT_THAT(Exchange(0, Barrier::kNone, seed).errors, IsEmpty());
  }
}

TEST(SimtChecksTest, RacesNameBothLines) {
  constexpr int kWrite = __LINE__ + 2;
  const Report report = Launch({.blocks = 3, .threads = 32, .shared_bytes = 128}, {}, [] {
    if (ThreadIndex() == 0) StoreShared32(Word(5), 1);
    if (ThreadIndex() == 7) LoadShared32(Word(5));
  });
  EXPECT_THAT(report.errors,
              ElementsAre(IsError(Check::kRace, "thread 7 of block 0 reads shared address 20 at " +
                                                    At(kWrite + 1) + ", which thread 0 wrote at " +
                                                    At(kWrite))));
}

// One thread overwrites what others have just read.
Report Overwrite(int readers, int writer, Barrier barrier, uint64_t seed) {
  return LaunchSeeded({.threads = 96, .shared_bytes = 16}, seed, [=] {
    if (ThreadIndex() == 0) StoreShared32(Word(0), 1);
    BlockSync();
    if (ThreadIndex() < readers) LoadShared32(Word(0));
    Sync(barrier);
    if (ThreadIndex() == writer) StoreShared32(Word(0), 2);
  });
}

TEST(SimtChecksTest, WriteAfterRead) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    // In the same warp, from two warps of which one is the writer's, and from three.
    for (const int readers : {2, 33, 64, 96}) {
      for (const int writer : {0, 1, 40, 95}) {
        // Which of an unordered pair runs first is open: reads after the write are found as well.
        EXPECT_THAT(Overwrite(readers, writer, Barrier::kNone, seed).errors, Not(IsEmpty()));
        EXPECT_THAT(Overwrite(readers, writer, Barrier::kBlock, seed).errors, IsEmpty());
        const bool one_warp = readers <= 32 && writer < 32;
        EXPECT_EQ(Overwrite(readers, writer, Barrier::kWarp, seed).errors.empty(), one_warp);
      }
    }
    EXPECT_THAT(Overwrite(1, 0, Barrier::kNone, seed).errors, IsEmpty()) << "its own reading";
  }
}

TEST(SimtChecksTest, TwoWriters) {
  const auto run = [](bool same_word) {
    return Launch({.shared_bytes = 256}, {}, [=] {
      if (ThreadIndex() < 2) StoreShared32(Word(same_word ? 0 : ThreadIndex()), 1);
    });
  };
  EXPECT_THAT(run(true).errors, ElementsAre(IsError(Check::kRace, "writes shared address 0")));
  EXPECT_THAT(run(false).errors, IsEmpty());
}

TEST(SimtChecksTest, BytesOfOneWordAreApart) {
  const auto run = [](int stride) {
    return Launch({.shared_bytes = 256}, {}, [=] {
      StoreShared32(Word(32 + LaneIndex()), 0);
      WarpSync();
      StoreShared8(Word(0) + static_cast<u32>(stride * LaneIndex()) / 2, 1);
      WarpSync();
      if (LaneIndex() < 4 * stride) LoadShared32(Word(LaneIndex()));
    });
  };
  EXPECT_THAT(run(2).errors, IsEmpty());
  EXPECT_THAT(run(1).errors, Contains(IsError(Check::kRace, "writes shared address 0")));
}

TEST(SimtChecksTest, RacesCanBeLeftUnchecked) {
  const Report report = Launch({.threads = 64, .shared_bytes = 256}, {.races = false}, [] {
    StoreShared32(Word(ThreadIndex()), 1);
    LoadShared32(Word(ThreadIndex() ^ 1));
  });
  EXPECT_THAT(report.errors, IsEmpty());
}

TEST(SimtChecksTest, Uninitialised) {
  const auto run = [](int written) {
    return Launch({.blocks = 2, .shared_bytes = 128}, {}, [=] {
      // Only the first block writes the last word: what one block wrote, the next may not read.
      if (LaneIndex() < written || (LaneIndex() == 31 && device::BlockIndex() == 0)) {
        StoreShared32(Word(LaneIndex()), 1);
      }
      LoadShared32(Word(LaneIndex()));
    });
  };
  EXPECT_THAT(run(32).errors, IsEmpty());
  EXPECT_THAT(
      run(31).errors,
      ElementsAre(IsError(Check::kUninitialised, "thread 31 of block 1 reads shared address 124")));
}

// A ring of two stages, filled by copies of all threads and read by others.
struct Ring {
  bool wait = true;
  bool wait_for_all = true;
  bool commit = true;
  bool sync_after_wait = true;
  bool sync_before_refill = true;

  Report Run(std::vector<u32>* sums = nullptr, uint64_t seed = 0) const {
    const Source source;
    constexpr int kTiles = 4;
    return Launch({.threads = 64, .shared_bytes = 512}, {.seed = seed}, [&] {
      const int mine = ThreadIndex();
      const auto fill = [&](int tile) {
        CopyAsync(4, Word(tile % 2 * 64 + mine), &source.words[tile * 64 + mine]);
        if (commit) CopyAsyncCommit();
      };
      fill(0);
      u32 sum = 0;
      for (int tile = 0; tile < kTiles; ++tile) {
        if (tile > 0 && sync_before_refill) BlockSync();
        if (tile + 1 < kTiles) {
          fill(tile + 1);
        } else if (commit) {
          CopyAsyncCommit();
        }
        if (wait) wait_for_all ? CopyAsyncWait<1>() : CopyAsyncWait<2>();
        if (sync_after_wait) BlockSync();
        sum += LoadShared32(Word(tile % 2 * 64 + (mine ^ 33)));
      }
      if (sums != nullptr) (*sums)[mine] = sum;
    });
  }
};

TEST(SimtChecksTest, CopiesInOrderAreClean) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    std::vector<u32> sums(64);
    EXPECT_THAT(Ring{}.Run(&sums, seed).errors, IsEmpty());
    for (u32 i = 0; i < 64; ++i) EXPECT_EQ(sums[i], 4 * (i ^ 33) + 64 * 6);
  }
}

TEST(SimtChecksTest, CopiesWithoutWait) {
  std::vector<u32> sums(64);
  EXPECT_THAT(Ring{.wait = false}.Run(&sums).errors,
              Contains(IsError(Check::kPendingCopy, "reads shared address")));
  EXPECT_EQ(sums[0], 4 * 0xffffffffu) << "what has not arrived is not what it will be";
}

TEST(SimtChecksTest, CopiesWithWrongWaits) {
  EXPECT_THAT(Ring{.wait_for_all = false}.Run().errors,
              Contains(IsError(Check::kPendingCopy, "before that thread has waited")));
  EXPECT_THAT(Ring{.commit = false}.Run().errors,
              Contains(IsError(Check::kPendingCopy, "before that thread has waited")));
}

TEST(SimtChecksTest, CopiesWithoutBarriers) {
  // In the natural order thread 0 reads what thread 33 has not yet begun to copy.
  EXPECT_THAT(Ring{.sync_after_wait = false}.Run().errors, Not(IsEmpty()));
  EXPECT_THAT(Ring{.sync_before_refill = false}.Run().errors,
              Contains(IsError(Check::kRace, "without a barrier")));
}

TEST(SimtChecksTest, CopiesReadByOthersBeforeABarrier) {
  const Source source;
  const auto run = [&](bool sync) {
    return Launch({.shared_bytes = 128}, {}, [&] {
      CopyAsync(4, Word(LaneIndex()), &source.words[LaneIndex()]);
      CopyAsyncCommit();
      CopyAsyncWait<0>();
      if (sync) WarpSync();
      LoadShared32(Word(LaneIndex()));  // its own
      if (LaneIndex() > 0) LoadShared32(Word(LaneIndex() - 1));
    });
  };
  EXPECT_THAT(run(false).errors, ElementsAre(IsError(Check::kRace, "reads shared address 0")));
  EXPECT_THAT(run(true).errors, IsEmpty());
}

// A barrier between copy and wait is none between the data's arrival and another thread.
TEST(SimtChecksTest, CopiesNeedABarrierAfterTheWait) {
  const Source source;
  const Report report = Launch({.shared_bytes = 128}, {}, [&] {
    CopyAsync(4, Word(LaneIndex()), &source.words[LaneIndex()]);
    CopyAsyncCommit();
    BlockSync();
    CopyAsyncWait<0>();
    if (LaneIndex() > 0) LoadShared32(Word(LaneIndex() - 1));
  });
  EXPECT_THAT(report.errors, Contains(IsError(Check::kRace, "without a barrier")));
}

TEST(SimtChecksTest, CopiesArriveGroupByGroup) {
  const Source source;
  std::vector<u32> seen;
  Launch({.shared_bytes = 128}, {}, [&] {
    if (LaneIndex() != 0) return;
    const auto copy = [&](int i) {
      CopyAsync(4, Word(i), &source.words[i]);
      CopyAsyncCommit();
    };
    copy(0);
    for (int i = 1; i < 5; ++i) {
      copy(i);
      CopyAsyncWait<1>();
      seen.push_back(LoadShared32(Word(i - 1)));
      seen.push_back(LoadShared32(Word(i)));
    }
  });
  EXPECT_THAT(seen, ElementsAre(0, ~0u, 1, ~0u, 2, ~0u, 3, ~0u));
}

TEST(SimtChecksTest, CopiesArriveAtTheWait) {
  const Source source;
  u32 before = 0;
  u32 after = 0;
  const Report report = Launch({.shared_bytes = 128}, {}, [&] {
    if (LaneIndex() != 0) return;
    StoreShared32(Word(0), 5);
    CopyAsync(4, Word(0), &source.words[7]);
    CopyAsyncCommit();
    before = LoadShared32(Word(0));
    CopyAsyncWait<0>();
    after = LoadShared32(Word(0));
  });
  EXPECT_THAT(report.errors, ElementsAre(IsError(Check::kPendingCopy, "reads shared address 0")));
  EXPECT_EQ(before, 0xffffffffu);
  EXPECT_EQ(after, 7u);
}

TEST(SimtChecksTest, MatricesNeedABarrierEvenForOwnRows) {
  const auto run = [](bool sync) {
    return Launch({.shared_bytes = 512}, {}, [=] {
      StoreShared128(Word(4 * LaneIndex()), {{1, 2, 3, 4}});
      if (sync) WarpSync();
      device::LoadMatrix4(Word(4 * LaneIndex()));
    });
  };
  EXPECT_THAT(run(false).errors, ElementsAre(IsError(Check::kRace, "for its warp")));
  EXPECT_THAT(run(true).errors, IsEmpty());
}

TEST(SimtChecksTest, SharedBounds) {
  const auto run = [](u32 bytes) {
    return Launch({.shared_bytes = bytes}, {}, [=] {
      StoreShared32(Word(LaneIndex()), 1);
      LoadShared32(Word(LaneIndex()));
    });
  };
  EXPECT_THAT(run(128).errors, IsEmpty());
  EXPECT_THAT(run(127).errors, ElementsAre(IsError(Check::kBounds,
                                                   "thread 31 of block 0 writes 4 bytes at shared "
                                                   "address 124, outside of the block's 127 bytes"),
                                           IsError(Check::kBounds, "reads 4 bytes")));
  EXPECT_THAT(Launch({.shared_bytes = 64}, {}, [] { LoadShared32(SharedBase() - 4); }).errors,
              ElementsAre(IsError(Check::kBounds, "shared address -4")));
}

TEST(SimtChecksTest, CopyBounds) {
  const Source source;
  const auto run = [&](int valid) {
    return Launch({.shared_bytes = 512}, {.buffers = {{source.words, 500}}}, [&] {
      CopyAsync(16, Word(4 * LaneIndex()), &source.words[4 * LaneIndex()],
                LaneIndex() == 31 ? valid : 16);
    });
  };
  EXPECT_THAT(run(4).errors, IsEmpty());
  EXPECT_THAT(run(5).errors, ElementsAre(IsError(Check::kBounds, "copies 5 bytes at byte 496")));
  EXPECT_THAT(run(17).errors, ElementsAre(IsError(Check::kArgument, "copies 17 of 16 bytes")));
}

TEST(SimtChecksTest, Alignment) {
  const Source source;
  const auto run = [&](u32 offset) {
    return Launch({.shared_bytes = 2048}, {}, [&] {
      const auto* bytes = reinterpret_cast<const u8*>(source.words);
      const SharedAddress mine = SharedBase() + offset + 16 * LaneIndex();
      device::Load(reinterpret_cast<const device::Words4*>(bytes + offset));
      StoreShared128(mine, {});
      device::LoadShared128(mine);
      WarpSync();
      device::LoadMatrix4(mine);
      CopyAsync(16, SharedBase() + 1024 + 16 * LaneIndex(), bytes + offset);
    });
  };
  EXPECT_THAT(run(16).errors, IsEmpty());
  const Report report = run(8);
  EXPECT_THAT(report.errors, SizeIs(5));
  for (const Error& error : report.errors) EXPECT_EQ(error.check, Check::kAlignment) << error;
}

TEST(SimtChecksTest, DivergentShuffle) {
  constexpr int kFirst = __LINE__ + 4;
  constexpr int kSecond = kFirst + 2;
  const Report report = Launch({.threads = 64}, {}, [] {
    if (LaneIndex() < 9) {
      device::ShuffleXor(1.0f, 1);
    } else {
      device::ShuffleXor(1.0f, 1);
    }
  });
  EXPECT_THAT(report.errors,
              ElementsAre(IsError(Check::kDivergence,
                                  "thread 9 of block 0 comes to ShuffleXor at " + At(kSecond) +
                                      ", where others wait in ShuffleXor at " + At(kFirst))));
}

TEST(SimtChecksTest, ShuffleWithoutALane) {
  const auto run = [](bool all) {
    return Launch({}, {}, [=] {
      if (all || LaneIndex() != 3) device::Shuffle(1.0f, 0);
    });
  };
  EXPECT_THAT(run(true).errors, IsEmpty());
  EXPECT_THAT(run(false).errors,
              ElementsAre(IsError(Check::kDeadlock,
                                  "thread 3 exited; threads 0-2, 4-31 waiting in "
                                  "Shuffle at " __FILE__)));
}

TEST(SimtChecksTest, DifferentBlockBarriers) {
  const Report report = Launch({.threads = 64}, {}, [] {
    if (device::WarpIndex() == 0) {
      BlockSync();
    } else {
      BlockSync();
    }
  });
  EXPECT_THAT(report.errors, ElementsAre(IsError(Check::kDivergence, "comes to BlockSync")));
}

TEST(SimtChecksTest, EarlyExit) {
  for (const uint64_t seed : {0, 1}) {
    const Report report = LaunchSeeded({.blocks = 5, .threads = 64}, seed, [] {
      if (ThreadIndex() >= 40) return;
      BlockSync();
    });
    EXPECT_THAT(report.errors, ElementsAre(IsError(Check::kDeadlock, "threads 40-63 exited")));
    EXPECT_THAT(report.errors, ElementsAre(IsError(Check::kDeadlock, "threads 0-39 waiting")));
  }
}

TEST(SimtChecksTest, MixedBarriers) {
  const Report report = Launch({.threads = 64}, {}, [] {
    if (LaneIndex() == 0) {
      BlockSync();
    } else {
      WarpSync();
    }
  });
  EXPECT_THAT(report.errors,
              ElementsAre(IsError(Check::kDeadlock, "threads 0, 32 waiting in BlockSync")));
  EXPECT_THAT(report.errors,
              ElementsAre(IsError(Check::kDeadlock, "threads 1-31, 33-63 waiting in WarpSync")));
}

TEST(SimtChecksTest, LaunchesThatNoGpuAccepts) {
  const auto body = [] {};
  for (const LaunchShape& shape :
       {LaunchShape{.blocks = 0}, LaunchShape{.threads = 33}, LaunchShape{.threads = 0},
        LaunchShape{.threads = 2048}, LaunchShape{.shared_bytes = 1 << 20}}) {
    EXPECT_THAT(Launch(shape, {}, body).errors, ElementsAre(IsError(Check::kArgument, "launch")));
  }
}

}  // namespace
}  // namespace kvant::simt
