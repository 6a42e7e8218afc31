// What each operation of the vocabulary computes, on the SIMT executor.
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kvant/graph/data_type.h"
#include "kvant/tests/kernels/device/launch.h"

namespace kvant::device {
namespace {

using simt::LaunchCleanly;
using simt::Report;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

u32 Pair(double lo, double hi) {
  u16 halves[2];
  StoreElement(kF16, halves, 0, lo);
  StoreElement(kF16, halves, 1, hi);
  return halves[0] | u32{halves[1]} << 16;
}

TEST(DeviceOpsTest, Permute) {
  EXPECT_EQ(Permute(0x33221100, 0x77665544, 0x3210), 0x33221100u);
  EXPECT_EQ(Permute(0x33221100, 0x77665544, 0x7654), 0x77665544u);
  EXPECT_EQ(Permute(0x33221100, 0x77665544, 0x0246), 0x00224466u);
  // Bit 3 of a nibble: the byte's sign, eight times.
  EXPECT_EQ(Permute(0x00ff7f80, 0x80000000, 0xfa98), 0xffff00ffu);
  // Beyond the four nibbles nothing counts.
  EXPECT_EQ(Permute(0x33221100, 0, 0xabcd3210), 0x33221100u);
}

TEST(DeviceOpsTest, Bits) {
  EXPECT_EQ(AndXor(0xf0f0, 0xff00, 0x8001), ((0xf0f0u & 0xff00u) ^ 0x8001u));
  EXPECT_EQ(AndOr(0xf0f0, 0xff00, 0x8001), ((0xf0f0u & 0xff00u) | 0x8001u));
  EXPECT_EQ(Opaque(7), 7u);
  EXPECT_EQ(AsBits(1.0f), 0x3f800000u);
  EXPECT_EQ(AsFloat(0xc0000000u), -2.0f);
  EXPECT_EQ(MultiplyHigh(0xffffffffu, 0xffffffffu), 0xfffffffeu);
}

TEST(DeviceOpsTest, Arithmetic) {
  EXPECT_EQ(Fma(0x1.000002p0f, 0x1.000002p0f, -0x1.000004p0f), 0x1p-46f);
  EXPECT_EQ(Fma(0x1.0000000000001p0, 0x1.0000000000001p0, -0x1.0000000000002p0), 0x1p-104);
  EXPECT_EQ(Max(kNaN, 1.0f), 1.0f);
  EXPECT_EQ(Max(1.0f, kNaN), 1.0f);
  EXPECT_EQ(Min(-3.0f, 1.0f), -3.0f);
  EXPECT_EQ(Abs(-2.5f), 2.5f);
  EXPECT_EQ(Divide(1.0f, 3.0f), 1.0f / 3.0f);
  EXPECT_EQ(RoundEven(2.5f), 2.0f);
  EXPECT_EQ(RoundEven(-3.5f), -4.0f);
  EXPECT_EQ(Log(1.0f), 0.0f);
  EXPECT_EQ(Tanh(kInfinity), 1.0f);
}

TEST(DeviceOpsTest, Exp2) {
  EXPECT_EQ(Exp2(0.0f), 1.0f);
  EXPECT_EQ(Exp2(-126.0f), 0x1p-126f);
  EXPECT_EQ(Exp2(-126.5f), 0.0f) << "subnormals are flushed";
  EXPECT_EQ(Exp2(-kInfinity), 0.0f);
  EXPECT_EQ(Exp2(200.0f), kInfinity);
  EXPECT_TRUE(std::isnan(Exp2(kNaN)));
}

TEST(DeviceOpsTest, PacksRoundToNearestEven) {
  EXPECT_EQ(PackF16(1.0f, -2.0f), 0xc0003c00u);
  EXPECT_EQ(PackF16(2049.0f, 2051.0f), Pair(2048, 2052));
  EXPECT_EQ(PackF16(0x1p-24f, 0x1p-25f), 0x00000001u) << "subnormals, and a tie to zero";
  EXPECT_EQ(PackF16(65520.0f, 65519.0f), 0x7bff7c00u);
  EXPECT_EQ(PackBF16(1.0f, 0x1.01p0f), 0x3f803f80u);
  EXPECT_EQ(PackBF16(0x1.03p0f, -1.0f), 0xbf803f82u);
  EXPECT_EQ(F16Low(0x7c000001u), 0x1p-24f);
  EXPECT_EQ(F16High(0x7c000001u), kInfinity);
  EXPECT_EQ(BF16Low(0xbf803f82u), 0x1.04p0f);
  EXPECT_EQ(BF16High(0xbf803f82u), -1.0f);
}

TEST(DeviceOpsTest, PairsOfF16) {
  EXPECT_EQ(MultiplyF16x2(Pair(3, 0.5), Pair(5, 0x1p-24)), Pair(15, 0));
  EXPECT_EQ(AddF16x2(Pair(2048, 1), Pair(1, -1)), Pair(2048, 0));
  EXPECT_EQ(AddF16x2(Pair(0x1p-24, 65504), Pair(0x1p-24, 65504)), Pair(0x1p-23, 1e9));
  EXPECT_EQ(MaxAbsF16x2(Pair(-3, std::nan("")), Pair(2, -0x1p-24)), Pair(3, 0x1p-24));
  EXPECT_EQ(MultiplyByLowF16(Pair(3, 4), Pair(2, 100)), Pair(6, 8));
  EXPECT_EQ(MultiplyByHighF16(Pair(3, 4), Pair(100, 2)), Pair(6, 8));
  EXPECT_EQ(FmaF16x2(Pair(0x1p-24, 3), Pair(0x1p-24, 3), Pair(1, 1)), Pair(1, 10));
  EXPECT_EQ(FmsF16x2(Pair(2, 3), Pair(3, 3), Pair(1, 1)), Pair(5, 8));
  // A tie of f16 that a tail below the last bit of f64 breaks:
  // 32784 +- 2^-24 lies between 32768 and 32800.
  EXPECT_EQ(FmaF16x2(Pair(683, 683), Pair(48, 48), Pair(0x1p-24, -0x1p-24)), Pair(32800, 32768));
}

// All bytes, by the formats of the host.
TEST(DeviceOpsTest, PairsOfE4M3) {
  for (u32 byte = 0; byte < 256; ++byte) {
    const u8 code = static_cast<u8>(byte);
    const auto value = static_cast<float>(kvant::LoadElement(kF8E4M3, &code, 0));
    for (const float got : {F16Low(F16x2OfE4M3(byte)), F16High(F16x2OfE4M3(byte << 8))}) {
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(got)) << byte;
      } else {
        EXPECT_EQ(got, value) << byte;
        EXPECT_EQ(std::signbit(got), std::signbit(value)) << byte;
      }
    }
  }
}

TEST(DeviceOpsTest, FmaOfBF16RoundsOnce) {
  // 2^-126 * 2^-7, the smallest subnormal, and 2^-8 - 2^-16 + (1 + 2^-7), just below a tie.
  EXPECT_EQ(FmaBF16x2(0x00803b80u, 0x3c003f7fu, 0x00003f81u), 0x00013f81u);
  // 300 - 3 and 129 * 2^120 * 2^7 beyond the largest.
  EXPECT_EQ(FmaBF16x2(0x43967f01u, 0x3f804301u, 0xc0400000u), 0x43947f80u);
}

// The sum of f16 in f64, and of f32 where it is exact, rounded once.
TEST(DeviceOpsTest, FmaOfRandomF16RoundsOnce) {
  std::mt19937 rng(1);
  for (int i = 0; i < 20000; ++i) {
    u16 x[3];
    for (u16& v : x) v = static_cast<u16>(rng());
    const long double exact =
        static_cast<long double>(F16ToF32(x[0])) * F16ToF32(x[1]) + F16ToF32(x[2]);
    if (!std::isfinite(exact)) continue;
    const u16 got = static_cast<u16>(FmaF16x2(x[0], x[1], x[2]));
    // Neither neighbour is nearer.
    const float value = F16ToF32(got);
    if (!std::isfinite(value)) continue;
    for (const int step : {-1, 1}) {
      const float neighbour = F16ToF32(static_cast<u16>(got + step));
      if (!std::isfinite(neighbour)) continue;
      EXPECT_LE(std::fabs(exact - value), std::fabs(exact - neighbour)) << x[0] << " " << x[1];
    }
  }
}

TEST(DeviceOpsTest, Positions) {
  std::vector<i32> seen(3 * 96);
  LaunchCleanly({.blocks = 3, .threads = 96}, [&] {
    const i64 i = BlockIndex() * BlockThreads() + ThreadIndex();
    Store(&seen[i], LaneIndex() + 100 * WarpIndex() + 1000 * static_cast<i32>(GridBlocks()));
  });
  for (int i = 0; i < 3 * 96; ++i) EXPECT_EQ(seen[i], i % 32 + 100 * (i % 96 / 32) + 3000);
}

TEST(DeviceOpsTest, ShufflesAndVotes) {
  std::vector<float> rotated(64);
  std::vector<u32> swapped(64);
  std::vector<i32> votes(64);
  const Report report = LaunchCleanly({.threads = 64}, [&] {
    const i32 i = ThreadIndex();
    Store(&rotated[i], Shuffle(static_cast<float>(i), (LaneIndex() + 1) % 32));
    Store(&swapped[i], ShuffleXor(static_cast<u32>(i), 5));
    Store(&votes[i], static_cast<i32>(Any(i == 40)));
  });
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(rotated[i], static_cast<float>(i / 32 * 32 + (i + 1) % 32));
    EXPECT_EQ(swapped[i], static_cast<u32>(i ^ 5));
    EXPECT_EQ(votes[i], i >= 32);
  }
  EXPECT_EQ(report.counters.shuffles, 2 * 2u);
  EXPECT_EQ(report.counters.votes, 2u);
}

TEST(DeviceOpsTest, GlobalElementsOfAllSizes) {
  struct {
    u8 a = 1;
    u16 b = 2;
    u32 c = 3;
    i64 d = -4;
    float e = 5;
    Words2 f = {{6, 7}};
    Words4 g = {{8, 9, 10, 11}};
  } from, to;
  LaunchCleanly({}, [&] {
    if (ThreadIndex() != 0) return;
    Store(&to.a, static_cast<u8>(Load(&from.a) + 1));
    Store(&to.b, static_cast<u16>(Load(&from.b) + 1));
    Store(&to.c, Load(&from.c) + 1);
    Store(&to.d, Load(&from.d) + 1);
    Store(&to.e, LoadCoherent(&from.e) + 1);
    Store(&to.f, Words2{{Load(&from.f).v[1], 0}});
    Store(&to.g, Words4{{LoadCoherent(&from.g).v[3], 0, 0, Load(&from.g).v[0]}});
  });
  EXPECT_EQ(to.a, 2);
  EXPECT_EQ(to.b, 3);
  EXPECT_EQ(to.c, 4u);
  EXPECT_EQ(to.d, -3);
  EXPECT_EQ(to.e, 6.0f);
  EXPECT_EQ(to.f.v[0], 7u);
  EXPECT_EQ(to.g.v[0], 11u);
  EXPECT_EQ(to.g.v[3], 8u);
}

TEST(DeviceOpsTest, AtomicIncrementWraps) {
  u32 counter = 0;
  std::vector<u32> old(8 * 32);
  const Report report = LaunchCleanly({.blocks = 8}, [&] {
    Fence();
    Store(&old[BlockIndex() * 32 + ThreadIndex()], AtomicIncrement(&counter, 99));
  });
  EXPECT_EQ(counter, 256 % 100u);
  EXPECT_EQ(old[0], 0u);
  EXPECT_EQ(old[99], 99u);
  EXPECT_EQ(old[100], 0u);
  EXPECT_EQ(report.counters.atomics, 256u);
  EXPECT_EQ(report.counters.fences, 256u);
}

TEST(DeviceOpsTest, SharedElementsOfAllSizes) {
  std::vector<u32> out(32);
  LaunchCleanly({.shared_bytes = 32 * 32}, [&] {
    const SharedAddress mine = SharedBase() + 32 * ThreadIndex();
    StoreShared8(mine, 0x1234);
    StoreShared8(mine + 1, 0x56);
    StoreShared16(mine + 2, 0x12789a);
    StoreShared32(mine + 4, 1);
    StoreShared64(mine + 8, {{2, 3}});
    StoreShared128(mine + 16, {{4, 5, 6, 7}});
    u32 sum = LoadShared8(mine + 1) << 16 ^ LoadShared16(mine + 2) ^ LoadShared32(mine);
    sum += LoadShared64(mine).v[1] + 10 * LoadShared128(mine).v[2] + LoadShared128(mine).v[3];
    Store(&out[ThreadIndex()], sum + 100 * LoadShared64(mine + 24).v[1]);
  });
  EXPECT_EQ(out[9], (0x560000u ^ 0x789au ^ 0x789a5634u) + 1 + 20 + 3 + 700);
}

TEST(DeviceOpsTest, CopiesFillWithZeros) {
  const std::vector<u8> from(64, 7);
  alignas(16) u8 aligned[64];
  memcpy(aligned, from.data(), 64);
  std::vector<u32> out(32 * 4);
  LaunchCleanly({.shared_bytes = 512}, [&] {
    const SharedAddress mine = SharedBase() + 16 * ThreadIndex();
    const int width = ThreadIndex() < 16 ? 16 : ThreadIndex() < 24 ? 8 : 4;
    StoreShared128(mine, {{1, 2, 3, 4}});
    CopyAsync(width, mine, aligned, ThreadIndex() == 31 ? 4 : ThreadIndex() % width);
    CopyAsyncCommit();
    CopyAsyncWait<0>();
    const Words4 got = LoadShared128(mine);
    for (int i = 0; i < 4; ++i) Store(&out[4 * ThreadIndex() + i], got.v[i]);
  });
  EXPECT_EQ(out[4 * 0 + 0], 0u);
  EXPECT_EQ(out[4 * 5 + 0], 0x07070707u);
  EXPECT_EQ(out[4 * 5 + 1], 0x7u);
  EXPECT_EQ(out[4 * 5 + 3], 0u);
  EXPECT_EQ(out[4 * 17 + 0], 0x7u);
  EXPECT_EQ(out[4 * 17 + 2], 3u) << "beyond the copy nothing changes";
  EXPECT_EQ(out[4 * 26 + 0], 0x0707u);
  EXPECT_EQ(out[4 * 31 + 0], 0x07070707u);
}

}  // namespace
}  // namespace kvant::device
