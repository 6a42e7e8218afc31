// The counters of the SIMT executor against numbers worked out by hand.
#include <cstdint>
#include <sstream>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/tests/kernels/device/launch.h"

namespace kvant::simt {
namespace {

using device::CopyAsync;
using device::CopyAsyncCommit;
using device::CopyAsyncWait;
using device::LaneIndex;
using device::Load;
using device::LoadShared128;
using device::LoadShared32;
using device::LoadShared64;
using device::SharedBase;
using device::StoreShared128;
using device::StoreShared32;
using device::ThreadIndex;
using device::u32;
using device::WarpSync;
using device::Words4;

struct alignas(128) Page {
  u32 words[4096] = {};
};

Counters Count(int threads, const std::function<void()>& body) {
  return LaunchCleanly({.threads = threads, .shared_bytes = 32 * 1024}, body).counters;
}

TEST(SimtTrafficTest, GlobalSectors) {
  static const Page page;
  // Stride in words: dense, every other word, and a sector each.
  const auto run = [](int stride) {
    return Count(64, [=] { Load(&page.words[stride * ThreadIndex()]); });
  };
  EXPECT_EQ(run(1).global_loads, 2u);
  EXPECT_EQ(run(1).global_load_sectors, 8u);
  EXPECT_EQ(run(1).global_load_sectors_ideal, 8u);
  EXPECT_EQ(run(2).global_load_sectors, 16u);
  EXPECT_EQ(run(8).global_load_sectors, 64u);
  EXPECT_EQ(run(8).global_load_sectors_ideal, 8u);
  EXPECT_EQ(run(0).global_load_sectors, 2u);
  EXPECT_EQ(run(0).global_load_sectors_ideal, 2u);
}

TEST(SimtTrafficTest, StoresAndPredicates) {
  std::vector<Words4> to(32);
  const Counters counters = Count(32, [&] {
    for (int i = 0; i < 2; ++i) {
      if (LaneIndex() % 2 == i) device::Store(&to[LaneIndex()], {});
      WarpSync();
    }
  });
  EXPECT_EQ(counters.global_stores, 2u);
  EXPECT_EQ(counters.global_store_sectors_ideal, 16u);
  EXPECT_GE(counters.global_store_sectors, 2 * 16u);
  EXPECT_EQ(counters.warp_barriers, 2u);
}

TEST(SimtTrafficTest, BankConflicts) {
  const auto loads = [](int stride) {
    return Count(32, [=] {
      StoreShared32(SharedBase() + 4 * stride * LaneIndex(), 1);
      LoadShared32(SharedBase() + 4 * stride * LaneIndex());
    });
  };
  for (const int stride : {1, 2, 3, 8, 32, 33}) {
    const Counters counters = loads(stride);
    const uint64_t expected = stride == 2 ? 2 : stride == 8 ? 8 : stride == 32 ? 32 : 1;
    EXPECT_EQ(counters.shared_loads, 1u);
    EXPECT_EQ(counters.shared_load_wavefronts, expected) << stride;
    EXPECT_EQ(counters.shared_load_wavefronts_ideal, 1u);
    EXPECT_EQ(counters.shared_stores, 1u);
    EXPECT_EQ(counters.shared_store_wavefronts, expected) << stride;
  }
}

TEST(SimtTrafficTest, VectorsGoByPartsOfTheWarp) {
  const auto run = [](int row_bytes) {
    return Count(32, [=] {
      const u32 mine = SharedBase() + row_bytes * LaneIndex();
      StoreShared128(mine, {});
      LoadShared128(mine);
      LoadShared64(mine);
    });
  };
  // 16-byte loads: four quarters; 8-byte loads 16 bytes apart: two wavefronts per half.
  EXPECT_EQ(run(16).shared_store_wavefronts, 4u);
  EXPECT_EQ(run(16).shared_load_wavefronts, 4u + 4u);
  EXPECT_EQ(run(16).shared_load_wavefronts_ideal, 4u + 2u);
  // All in the same four banks.
  EXPECT_EQ(run(128).shared_store_wavefronts, 32u);
  // A broadcast is free.
  const Counters same = Count(32, [] {
    if (LaneIndex() == 0) StoreShared128(SharedBase(), {});
    WarpSync();
    LoadShared128(SharedBase());
    LoadShared32(SharedBase());
  });
  EXPECT_EQ(same.shared_load_wavefronts, 4u + 1u);
  EXPECT_EQ(same.shared_load_wavefronts_ideal, 4u + 1u);
}

// Rows of 128 bytes: read by columns of 16 bytes they collide unless swizzled.
TEST(SimtTrafficTest, SwizzledMatrices) {
  const auto run = [](bool swizzle) {
    return Count(32, [=] {
      const auto at = [=](int row, int chunk) {
        return SharedBase() + 128 * row + 16 * (swizzle ? chunk ^ (row % 8) : chunk);
      };
      for (int chunk = 0; chunk < 8; ++chunk) StoreShared128(at(LaneIndex(), chunk), {});
      WarpSync();
      for (int chunk = 0; chunk < 8; ++chunk) device::LoadMatrix4(at(LaneIndex(), chunk));
    });
  };
  EXPECT_EQ(run(true).load_matrices, 8u);
  EXPECT_EQ(run(true).load_matrix_wavefronts, 8 * 4u);
  EXPECT_EQ(run(true).load_matrix_wavefronts_ideal, 8 * 4u);
  EXPECT_EQ(run(false).load_matrix_wavefronts, 8 * 32u);
  EXPECT_EQ(run(true).shared_store_wavefronts, 8 * 4u);
  EXPECT_EQ(run(false).shared_store_wavefronts, 8 * 32u);
}

TEST(SimtTrafficTest, Copies) {
  static const Page page;
  const auto run = [](int stages, int valid) {
    return Count(64, [=] {
      for (int i = 0; i < 8; ++i) {
        CopyAsync(16, SharedBase() + 1024 * i + 16 * ThreadIndex(),
                  &page.words[256 * i + 4 * ThreadIndex()], valid);
        CopyAsyncCommit();
        stages == 1 ? CopyAsyncWait<0>() : CopyAsyncWait<2>();
      }
    });
  };
  EXPECT_EQ(run(1, 16).copies, 16u);
  EXPECT_EQ(run(1, 16).copy_sectors, 8 * 32u);
  EXPECT_EQ(run(1, 16).copy_sectors_ideal, 8 * 32u);
  EXPECT_EQ(run(1, 16).copy_wavefronts, 8 * 2 * 4u);
  EXPECT_EQ(run(1, 16).copy_wavefronts_ideal, 8 * 2 * 4u);
  EXPECT_EQ(run(1, 16).copy_bytes_in_flight, 1024u);
  EXPECT_EQ(run(3, 16).copy_bytes_in_flight, 3 * 1024u);
  EXPECT_EQ(run(1, 0).copy_sectors, 0u) << "zero fill reads nothing";
  EXPECT_EQ(run(1, 0).copy_wavefronts, 8 * 2 * 4u);
}

// Lanes that left a branch are in step again after a collective.
TEST(SimtTrafficTest, RequestsEndAtCollectives) {
  static const Page page;
  const Counters counters = Count(32, [] {
    for (int i = 0; i < 4; ++i) {
      if (LaneIndex() >= 8 * i) Load(&page.words[32 * i + LaneIndex()]);
      WarpSync();
    }
  });
  EXPECT_EQ(counters.global_loads, 4u);
  EXPECT_EQ(counters.global_load_sectors, 4 + 3 + 2 + 1u);
}

TEST(SimtTrafficTest, OperationsByKind) {
  const Counters counters = LaunchCleanly({.blocks = 2, .threads = 64}, [] {
                              float d[4] = {};
                              device::MmaF16K16(d, 0, 0, 0, 0, 0, 0);
                              device::MmaF16K8(d, 0, 0, 0);
                              device::MmaF16K8(d, 0, 0, 0);
                              device::MmaBF16K16(d, 0, 0, 0, 0, 0, 0);
                              device::MmaTF32K8(d, 0, 0, 0, 0, 0, 0);
                              device::BlockSync();
                              device::BlockSync();
                            }).counters;
  Counters expected;
  expected.mma_f16_k16 = 4;
  expected.mma_f16_k8 = 8;
  expected.mma_bf16_k16 = 4;
  expected.mma_tf32_k8 = 4;
  expected.block_barriers = 4;
  EXPECT_EQ(counters, expected);
}

TEST(SimtTrafficTest, CountersHaveNames) {
  std::ostringstream text;
  text << Counters{.atomics = 3, .votes = 5};
  EXPECT_EQ(text.str(), "atomics 3, votes 5");
}

TEST(SimtTrafficTest, WatchedBytes) {
  static const Page page;
  const Options options{.watches = {{page.words, 512}, {page.words + 128, 512}}};
  const Report report = LaunchCleanly(
      {.blocks = 2, .shared_bytes = 1024},
      [] {
        const int block = static_cast<int>(device::BlockIndex());
        const u32* mine = &page.words[64 * block];
        CopyAsync(8, SharedBase() + 8 * LaneIndex(), &mine[2 * LaneIndex()]);
        // The last word of what is watched, and one beyond the first range.
        if (LaneIndex() == 0) Load(&page.words[127 + block]);
      },
      options);
  ASSERT_EQ(report.reads.size(), 2u);
  for (int i = 0; i < 512; ++i) {
    EXPECT_EQ(report.reads[0][i], i < 508 ? 1u : 2u) << i;
    EXPECT_EQ(report.reads[1][i], i < 4 ? 1u : 0u) << i;
  }
}

TEST(SimtTrafficTest, CountingCanBeLeftOut) {
  static const Page page;
  const Report report = LaunchCleanly({}, [] { Load(&page.words[LaneIndex()]); }, {.count = false});
  EXPECT_EQ(report.counters, Counters{});
}

// The order of threads does not change what is counted.
TEST(SimtTrafficTest, SeedsDoNotMatter) {
  static const Page page;
  const auto run = [](uint64_t seed) {
    const Options options{.seed = seed};
    return LaunchCleanly(
               {.blocks = 3, .threads = 96, .shared_bytes = 8192},
               [] {
                 for (int i = 0; i < 5; ++i) {
                   CopyAsync(4, SharedBase() + 1024 * i + 4 * ThreadIndex(),
                             &page.words[(ThreadIndex() * 37 + i) % 4096]);
                   CopyAsyncCommit();
                   CopyAsyncWait<1>();
                   device::BlockSync();
                   if (i > 0)
                     LoadShared32(SharedBase() + 1024 * (i - 1) + 4 * (95 - ThreadIndex()));
                   if (ThreadIndex() % 3 == 0) Load(&page.words[i]);
                 }
               },
               options)
        .counters;
  };
  const Counters natural = run(0);
  for (uint64_t seed = 1; seed < 5; ++seed) EXPECT_EQ(run(seed), natural);
}

}  // namespace
}  // namespace kvant::simt
