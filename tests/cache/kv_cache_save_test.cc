// A KvCache's sequences as bytes; and attention over parts of the tokens, which is merged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kvant/cache/kv_attention.h"
#include "kvant/cache/kv_cache.h"
#include "kvant/graph/status.h"
#include "kvant/tests/cache/kv_cache_testing.h"

namespace kvant {
namespace {

using cache_testing::Contents;
using cache_testing::MakeBench;
using cache_testing::Queries;
using cache_testing::SmallOptions;
using cache_testing::Tokens;
using testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();
const int64_t kLengths[] = {37, 0};

std::vector<std::byte> Saved(const KvCache& cache, int64_t layer) {
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < cache.options().batch; ++b) lengths.push_back(cache.length(layer, b));
  std::vector<std::byte> bytes(cache.SavedBytes(layer, lengths).value());
  const absl::Status saved =
      cache.Save(Stream(cache.engine()), layer, {bytes.data(), bytes.size()});
  EXPECT_TRUE(saved.ok()) << saved;
  return bytes;
}

TEST(KvCacheSave, TakesWhatTheRowsHoldAndNoMore) {
  auto bench = MakeBench(SmallOptions("int8_th", 500), 64);
  ASSERT_TRUE(bench.Append(0, 64).ok());
  // 2 rows, K and V, 2 heads: codes of 64 tokens of 64, and scales of f16.
  EXPECT_EQ(*bench.cache->SavedBytes(0, {64, 64}), 2 * 2 * 2 * (64 * 64 + 64 * 2));
  EXPECT_EQ(*bench.cache->SavedBytes(0, {0, 0}), 0);
  // Scales that all sequences share stay the cache's.
  auto shared = MakeBench(SmallOptions("int8_channel", 500), 64);
  EXPECT_EQ(*shared.cache->SavedBytes(0, {64, 64}), 2 * 2 * 2 * 64 * 64);
  // A window of 128 slides: of 64 tokens all are in it.
  auto window = MakeBench(SmallOptions("u4:g32:zp+window128", 500), 64);
  EXPECT_LT(*window.cache->SavedBytes(0, {64, 64}), 2 * 2 * 2 * (64 * 64 * 2 + 1024));
}

TEST(KvCacheSave, GoesToAnotherRowCountLayerAndCapacity) {
  for (const char* scheme : {"f32", "int4_g32", "kivi2", "u4:g32:rzp+sinks2+window20", "q4_0"}) {
    SCOPED_TRACE(scheme);
    auto bench = MakeBench(SmallOptions(scheme, 90), 90);
    ASSERT_TRUE(bench.Append(0, 70).ok());
    const int64_t to[] = {37, 0};
    // Before anything left a window that is wanted back.
    auto from = MakeBench(SmallOptions(scheme, 90), 90);
    ASSERT_TRUE(from.Append(0, 37).ok());
    ASSERT_TRUE(from.cache->Crop(to).ok());
    const std::vector<std::byte> bytes = Saved(*from.cache, 1);
    KvCacheOptions options = SmallOptions(scheme, 61);
    options.layers = 1;
    auto loaded = MakeBench(options, 61);
    ASSERT_TRUE(loaded.Append(0, 61).ok());
    const Stream stream(loaded.cache->engine());
    const absl::Status status =
        loaded.cache->Load(stream, 0, kLengths, {bytes.data(), bytes.size()});
    ASSERT_TRUE(status.ok()) << status;
    for (int64_t row = 0; row < 2; ++row) {
      EXPECT_EQ(loaded.cache->length(0, row), kLengths[row]);
      EXPECT_EQ(Contents(*loaded.cache, 0, row), Contents(*from.cache, 1, row));
    }
  }
}

// Tokens that a layer no longer keeps still count where their block is quantized with what comes.
TEST(KvCacheSave, GrowsAsWhatWasSavedWhereALayerKeepsTheLastTokens) {
  constexpr int64_t kMost = 300;
  for (const char* scheme : {"k4ch32_v4g32", "kivi2", "kivi4", "int4_g32", "int4_g64_R128"}) {
    for (const int64_t tokens : {32, 45, 128, 140, 159}) {
      SCOPED_TRACE(testing::Message() << scheme << " " << tokens);
      KvCacheOptions options = SmallOptions(scheme, kMost);
      options.keep = {16, 16};
      auto from = MakeBench(options, kMost), loaded = MakeBench(options, kMost);
      ASSERT_TRUE(from.Append(0, tokens).ok());
      const std::vector<std::byte> bytes = Saved(*from.cache, 1);
      // What was there before is of other tokens, a hundred times as large.
      float* const k = loaded.k.at(0, 0, 0);
      for (int64_t i = 0; i < 2 * 2 * kMost * 64; ++i) k[i] *= 100;
      ASSERT_TRUE(loaded.Append(0, kMost).ok());
      const int64_t lengths[] = {tokens, tokens};
      const Stream stream(loaded.cache->engine());
      for (int64_t layer : {0, 1}) {
        ASSERT_TRUE(loaded.cache->Load(stream, layer, lengths, {bytes.data(), bytes.size()}).ok());
      }
      for (int64_t n = tokens; n < tokens + 130; n += 13) {
        ASSERT_TRUE(from.Append(n, n + 13).ok());
        for (int64_t layer : {0, 1}) {
          ASSERT_TRUE(loaded.cache->Append(layer, from.k.Slice(n, 13), from.v.Slice(n, 13)).ok());
        }
        for (int64_t row : {0, 1}) {
          ASSERT_EQ(Contents(*loaded.cache, 1, row), Contents(*from.cache, 1, row)) << n;
        }
      }
    }
  }
}

TEST(KvCacheSave, RefusesInWordsAndLeavesTheCacheAsItWas) {
  auto bench = MakeBench(SmallOptions("int4_g32", 50), 30);
  ASSERT_TRUE(bench.Append(0, 30).ok());
  KvCache& cache = *bench.cache;
  const Stream stream(cache.engine());
  const std::string before = Contents(cache, 0, 0);
  std::vector<std::byte> bytes(*cache.SavedBytes(0, {30, 30}));
  const auto expect = [](const absl::Status& status, const std::string& words) {
    EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments);
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  };
  const Tensor all{bytes.data(), bytes.size()}, few{bytes.data(), bytes.size() - 1};
  expect(cache.Save(stream, 2, all), "there is no layer 2: the cache has 2");
  expect(cache.Save(stream, 0, few), "layer 0: its sequences take");
  expect(cache.Save(stream, 0, {nullptr, bytes.size()}), "but 0 are given");
  const Engine other = Engine::Create({.threads = 1}).value();
  expect(cache.Save(Stream(other), 0, all), "a stream of another engine");
  expect(cache.Load(stream, -1, {30, 30}, {all.data, all.bytes}),
         "there is no layer -1: the cache has 2");
  expect(cache.Load(stream, 0, {30}, {all.data, all.bytes}), "1 lengths for a batch of 2");
  expect(cache.Load(stream, 0, {30, 51}, {all.data, all.bytes}),
         "layer 0: batch row 1 of 51 tokens, where the capacity is 50");
  expect(cache.Load(stream, 0, {-1, 30}, {all.data, all.bytes}), "batch row 0 of -1 tokens");
  expect(cache.Load(stream, 0, {30, 29}, {few.data, few.bytes}), "bytes, but");
  EXPECT_EQ(Contents(cache, 0, 0), before);
  EXPECT_EQ(cache.length(0, 1), 30);
}

// Attention of queries that come after all tokens over caches that have parts of them, by their
// statistics.
struct Parts {
  std::string scheme;
  double bound;
};

class KvAttentionPartsTest : public testing::TestWithParam<Parts> {};

TEST_P(KvAttentionPartsTest, AreTheWhole) {
  constexpr int64_t kHeads = 4, kTokens = 3, kSize = 64, kBatch = 2;
  const KvCacheOptions options = SmallOptions(GetParam().scheme, 200);
  auto whole = MakeBench(options, 200);
  ASSERT_TRUE(whole.Append(0, 140).ok());
  const std::vector<float> q = Queries(9, kBatch * kHeads * kTokens * kSize);
  struct Result {
    std::vector<float> out, stats;
  };
  const auto attend = [&](KvCache& cache) {
    Result result{std::vector<float>(q.size()), std::vector<float>(q.size() / kSize)};
    const auto attention = cache.Attention({.query_heads = kHeads,
                                            .query_tokens = kTokens,
                                            .soft_cap = 20,
                                            .sees_all = true,
                                            .stats = true});
    EXPECT_TRUE(attention.ok()) << attention.status();
    const auto bytes = [](auto& values) { return values.size() * sizeof(float); };
    const absl::Status done = (*attention)
                                  ->Execute(Stream(cache.engine()), 1, {q.data(), bytes(q)},
                                            {result.out.data(), bytes(result.out)}, {},
                                            {result.stats.data(), bytes(result.stats)});
    EXPECT_TRUE(done.ok()) << done;
    return result;
  };
  const Result want = attend(*whole.cache);
  std::vector<Result> parts;
  const int64_t begins[] = {0, 50, 51, 128, 140};
  for (int i = 0; i < 4; ++i) {
    const auto cache = KvCache::Create(whole.cache->engine(), options).value();
    const int64_t count = begins[i + 1] - begins[i];
    ASSERT_TRUE(
        cache->Append(1, whole.k.Slice(begins[i], count), whole.v.Slice(begins[i], count)).ok());
    parts.push_back(attend(*cache));
  }
  parts.push_back(attend(*KvCache::Create(whole.cache->engine(), options).value()));
  for (const float stats : parts.back().stats) ASSERT_EQ(stats, -kInf);
  double error = 0, norm = 0;
  for (size_t row = 0; row < want.stats.size(); ++row) {
    double most = -kInf, sum = 0;
    for (const Result& part : parts) most = std::max(most, double{part.stats[row]});
    std::vector<double> out(kSize);
    for (const Result& part : parts) {
      const double weight = std::exp(part.stats[row] - most);
      sum += weight;
      for (int64_t d = 0; d < kSize; ++d) out[d] += weight * part.out[row * kSize + d];
    }
    EXPECT_NEAR(want.stats[row], most + std::log(sum), 1e-4 * std::abs(most) + GetParam().bound);
    for (int64_t d = 0; d < kSize; ++d) {
      error += std::pow(want.out[row * kSize + d] - out[d] / sum, 2);
      norm += std::pow(out[d] / sum, 2);
    }
  }
  EXPECT_LE(std::sqrt(error / norm), GetParam().bound);
}

INSTANTIATE_TEST_SUITE_P(Schemes, KvAttentionPartsTest,
                         testing::Values(Parts{"f32", 1e-6}, Parts{"f16", 1e-6},
                                         Parts{"int8_th", 2e-3}, Parts{"int4_g32", 2e-3},
                                         Parts{"rotKV4_g32", 2e-3}),
                         [](const auto& info) { return info.param.scheme; });

TEST(KvAttentionParts, RefusesInWords) {
  auto bench = MakeBench(SmallOptions("f16", 50), 30);
  ASSERT_TRUE(bench.Append(0, 30).ok());
  const auto expect = [&](const KvAttentionOptions& options, const std::string& words) {
    EXPECT_THAT(std::string(bench.cache->Attention(options).status().message()), HasSubstr(words));
  };
  expect({.query_heads = 4, .new_tokens = true, .sees_all = true},
         "attention that sees all tokens with new tokens");
  expect({.query_heads = 4, .window = 3, .sees_all = true},
         "attention that sees all tokens with a window");
  std::vector<float> q(2 * 4 * 64), stats(2 * 4);
  const Tensor rows{q.data(), q.size() * sizeof(float)}, numbers{stats.data(), stats.size() * 4};
  const Stream stream(bench.cache->engine());
  const auto with = *bench.cache->Attention({.query_heads = 4, .stats = true});
  const auto without = *bench.cache->Attention({.query_heads = 4});
  EXPECT_THAT(std::string(with->Execute(stream, 0, {rows.data, rows.bytes}, rows).message()),
              HasSubstr("attention with statistics is executed without them"));
  EXPECT_THAT(
      std::string(
          without->Execute(stream, 0, {rows.data, rows.bytes}, rows, {}, numbers).message()),
      HasSubstr("attention without statistics is executed with them"));
}

}  // namespace
}  // namespace kvant
