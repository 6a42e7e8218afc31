// Lives of caches on the CPU.
#include "kvant/tests/cache/kv_cache_life.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "kvant/tests/cache/kv_cache_testing.h"

namespace kvant {
namespace {

using cache_testing::Live;
using cache_testing::SmallOptions;

class KvCacheLifeTest : public testing::TestWithParam<const char*> {};

TEST_P(KvCacheLifeTest, HoldsWhatItWasGiven) {
  for (uint64_t seed = 1; seed <= 2; ++seed) {
    SCOPED_TRACE(seed);
    KvCacheOptions options = SmallOptions(GetParam(), 61 + static_cast<int64_t>(seed) * 30);
    options.batch = static_cast<int64_t>(2 * seed - 1);
    options.rollback = static_cast<int64_t>(4 * seed) - 4;
    Live(options, seed, 120);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, KvCacheLifeTest,
    testing::Values("f32/bf16", "f16", "int8_tensor", "int4_channel", "int8_token", "fp8_th",
                    "s8:g16:sf32/u8:g32:zp", "int4zp_g64", "u4:g16:pzp+window3+f32", "q8_0", "q4_0",
                    "iq4_nl", "nf4_g32", "rotKV4_g32", "s8:token+sinks4", "u4:g32:rzp+window7",
                    "u4:g64:rzp+rot+sinks2+window5+bf16", "u2:g16:rzp+sinks3+bulk10",
                    "u2:channel:g4:rzp+bulk8/u2:g16:rzp+window9",
                    "u4:channel:g8:zp+sinks1+bulk16/s8:token+window11",
                    "u4:block:g8:rzp+bulk16/s8:block:g16+sinks2+rot+bulk32",
                    "u4:g16:rzp+bulk8/u4:g32:rzp+sinks5+bulk9", "u4:g32:rzp+window70/f16"),
    [](const auto& info) { return std::to_string(info.index); });

// Layers that keep only the last tokens, of every way to lie in memory.
TEST_P(KvCacheLifeTest, KeepsTheLast) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE(seed);
    KvCacheOptions options = SmallOptions(GetParam(), 150);
    options.batch = static_cast<int64_t>(seed);
    options.rollback = static_cast<int64_t>(3 * seed) - 3;
    options.keep = {seed == 1 ? 1 : static_cast<int64_t>(13 * seed), seed == 3 ? 0 : 40};
    Live(options, seed + 10, 120);
    if (HasFatalFailure()) return;
  }
}

TEST(KvCacheLife, OfLayersWithSchemesOfTheirOwn) {
  KvCacheOptions options = SmallOptions("f16", 90);
  options.layers = 3;
  options.rollback = 3;
  options.schemes = {*ParseCacheScheme("kivi4"), *ParseCacheScheme("u4:g32:rzp+sinks2+window20"),
                     *ParseCacheScheme("q4_1")};
  Live(options, 1, 80);
}

// What has left the window is of no account once nothing is left behind the sinks.
TEST(KvCacheLife, ACropToNothingIsAReset) {
  for (const char* scheme : {"kivi4", "int4_g64_R128_s4", "u4:g64:rzp+sinks4+bulk64"}) {
    for (const int64_t deep : {0, 3}) {
      KvCacheOptions options = SmallOptions(scheme, 600);
      options.rollback = 5;
      if (deep > options.schemes[0].k.sinks) continue;
      const cache_testing::Bench bench = cache_testing::MakeBench(options, 600);
      ASSERT_TRUE(bench.Append(0, 600).ok());
      EXPECT_FALSE(bench.cache->Crop(400).ok());
      ASSERT_TRUE(bench.cache->Crop(deep).ok());
      ASSERT_TRUE(bench.Append(deep, 200).ok());
      for (const int64_t to : {199, 197, 195}) {
        const absl::Status status = bench.cache->Crop(to);
        EXPECT_TRUE(status.ok()) << scheme << ": " << status;
      }
    }
  }
}

// A window that leaves in bulk takes its scales from all of it, also from tokens that the layer no
// longer keeps.
TEST(KvCacheLife, WhatGrowsAfterACropIsAsIfItHadGrownAlone) {
  for (const char* scheme :
       {"kivi2", "k4ch32_v4g32", "u4:channel:g8:zp+bulk16", "u4:g32:rzp+sinks4+window60"}) {
    KvCacheOptions options = SmallOptions(scheme, 300);
    options.keep = {16, 9};
    int taken = 0;
    for (const int64_t most : {131, 163, 230, 255, 256}) {
      for (int64_t to = most - 128; to < most; to += 7) {
        const auto cropped = cache_testing::MakeBench(options, 300);
        ASSERT_TRUE(cropped.Append(0, most).ok());
        if (!cropped.cache->Crop(to).ok()) continue;
        ++taken;
        const auto alone = cache_testing::MakeBench(options, 300);
        ASSERT_TRUE(alone.Append(0, to).ok());
        for (int64_t end = to, n = 0; n < 16; ++n, end += 2) {
          ASSERT_TRUE(cropped.Append(end, end + 2).ok());
          ASSERT_TRUE(alone.Append(end, end + 2).ok());
          for (const int64_t layer : {0, 1}) {
            ASSERT_EQ(cache_testing::Contents(*cropped.cache, layer, 0),
                      cache_testing::Contents(*alone.cache, layer, 0))
                << scheme << ": of " << most << " tokens, to " << to << ", then to " << end + 2;
          }
        }
      }
    }
    EXPECT_GT(taken, 0) << scheme;
  }
}

// Also where the row once had more tokens than the fork has room for.
TEST(KvCacheLife, AForkHasWhatACropLeft) {
  for (const char* scheme : {"f32", "int4_g32", "k4ch32_v4g32", "kivi2", "s8:token+sinks4"}) {
    KvCacheOptions options = SmallOptions(scheme, 300);
    options.rollback = 100;
    const cache_testing::Bench bench = cache_testing::MakeBench(options, 150);
    ASSERT_TRUE(bench.Append(0, 150).ok());
    ASSERT_TRUE(bench.cache->Crop(100).ok());
    for (const int64_t capacity : {100, 120, 149, 200}) {
      const auto fork = bench.cache->Fork(std::nullopt, capacity);
      ASSERT_TRUE(fork.ok()) << fork.status();
      for (const int64_t layer : {0, 1}) {
        EXPECT_EQ(cache_testing::Contents(**fork, layer, 1),
                  cache_testing::Contents(*bench.cache, layer, 1))
            << scheme << ", capacity " << capacity;
      }
    }
  }
}

}  // namespace
}  // namespace kvant
