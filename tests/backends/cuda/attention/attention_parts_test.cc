// Attention over sinks, codes and a window in parts, on the executor.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvant/backends/cuda_simt.h"
#include "kvant/cache/kv_attention.h"
#include "kvant/cache/kv_cache.h"
#include "kvant/tests/cache/kv_cache_testing.h"

namespace kvant {
namespace {

using cache_testing::Attend;
using cache_testing::AttendByDefinition;
using cache_testing::Bench;
using cache_testing::Difference;
using cache_testing::MakeBench;
using cache_testing::Queries;
using cache_testing::SmallOptions;

constexpr int64_t kQueryHeads = 6, kCapacity = 900;

std::string KernelOf(KvCache& cache, const KvAttentionOptions& options) {
  return cache.Attention(options).value()->compiled(0)->kernel();
}

TEST(AttentionPartsTest, OfEveryLengthAndSplitOfTokens) {
  EnableCudaSimt();
  const Engine engine = Engine::Create({.device = Device::kCudaSimt}).value();
  for (const char* scheme :
       {"int4_g64_R128_s4", "u4:g32:zp+sinks2+window5/u4:g32:zp+sinks7+window90", "s8:token+sinks4",
        "f16/s8:g32+window30+bf16", "rotKV4_g64_R128_s4"}) {
    SCOPED_TRACE(scheme);
    KvCacheOptions options = SmallOptions(scheme, kCapacity);
    options.layers = 1;
    const Bench bench = MakeBench(options, kCapacity, &engine);
    EXPECT_NE(KernelOf(*bench.cache, {.query_heads = kQueryHeads}).find("packed codes, 8 rows"),
              std::string::npos)
        << KernelOf(*bench.cache, {.query_heads = kQueryHeads});
    const std::vector<float> q = Queries(7, options.batch * kQueryHeads * 64);
    const double promised =
        bench.cache->Attention({.query_heads = kQueryHeads}).value()->compiled(0)->rounding();
    // Only sinks; no code yet; the first; rows of different lengths.
    int64_t length = 0;
    for (const int64_t to : {0, 1, 3, 5, 8, 40, 100, 135, 136, 700, 899}) {
      ASSERT_TRUE(bench.Append(length, to).ok());
      length = to;
      EXPECT_LE(Difference(Attend(*bench.cache, 0, q, kQueryHeads),
                           AttendByDefinition(*bench.cache, 0, q, kQueryHeads)),
                promised)
          << to << " tokens";
    }
    ASSERT_TRUE(
        bench.cache
            ->Append(0, bench.k.Slice(899, 1), bench.v.Slice(899, 1), std::vector<int64_t>{0, 1})
            .ok());
    EXPECT_LE(Difference(Attend(*bench.cache, 0, q, kQueryHeads),
                         AttendByDefinition(*bench.cache, 0, q, kQueryHeads)),
              promised);
  }
}

// Outputs of bf16 that lie between two of its numbers are rounded one way or the other.
TEST(AttentionPartsTest, PromisesWhatTheirOutputHolds) {
  EnableCudaSimt();
  const Engine engine = Engine::Create({.device = Device::kCudaSimt}).value();
  const Bench bench = MakeBench(SmallOptions("u4:g64:rzp+window16", kCapacity), 1, &engine);
  const auto promised = [&](DataType type) {
    const KvAttentionOptions options{.query_heads = kQueryHeads, .type = type};
    return bench.cache->Attention(options).value()->compiled(0)->rounding();
  };
  EXPECT_EQ(promised(kBF16), 9e-3);
  EXPECT_EQ(promised(kF16), 5e-3);
}

// Which kernel runs is told; what is not for parts goes by tiles.
TEST(AttentionPartsTest, NotWhereColumnsCountOrTokensAreFew) {
  EnableCudaSimt();
  const Engine engine = Engine::Create({.device = Device::kCudaSimt}).value();
  const auto in_parts = [&](const char* scheme, int64_t capacity, KvAttentionOptions attention) {
    KvCacheOptions options = SmallOptions(scheme, capacity);
    attention.query_heads = kQueryHeads;
    const Bench bench = MakeBench(options, 1, &engine);
    const std::string kernel = KernelOf(*bench.cache, attention);
    const bool joined = kernel.find("joined with those of other segments") != std::string::npos;
    EXPECT_NE(joined, kernel.find("products of packed codes") == std::string::npos) << kernel;
    EXPECT_NE(joined, kernel.find("; not in parts: ") != std::string::npos) << kernel;
    return joined;
  };
  EXPECT_TRUE(in_parts("int4_g64_R128_s4", kCapacity, {}));
  EXPECT_TRUE(in_parts("int4_g64_R128_s4", kCapacity, {.soft_cap = 20, .sinks = true}));
  // Slots of K make up for the window of V.
  EXPECT_TRUE(in_parts("s4:token/s4:token+window16", kCapacity, {}));
  EXPECT_FALSE(in_parts("int4_g64_R128_s4", 400, {}));
  EXPECT_FALSE(in_parts("int4_g64_R128_s4", kCapacity, {.window = 300}));
  EXPECT_FALSE(in_parts("int4_g64_R128_s4", kCapacity, {.query_tokens = 2}));
  EXPECT_FALSE(in_parts("kivi2", kCapacity, {}));
}

}  // namespace
}  // namespace kvant
