// What attention over a cache takes beside queries: keys and values of tokens that the cache does
// not have yet, biases; and layers that keep only the last tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "kvant/cache/kv_attention.h"
#include "kvant/cache/kv_cache.h"
#include "kvant/tests/cache/kv_cache_testing.h"

namespace kvant {
namespace {

using cache_testing::Queries;
using cache_testing::Tokens;
using testing::HasSubstr;

constexpr int64_t kBatch = 2, kHeads = 2, kQueryHeads = 6, kSize = 32, kCapacity = 300;
constexpr int64_t kAll = 200;  // tokens that there are

Tensor MemoryOf(std::vector<float>& values) {
  return {values.data(), values.size() * sizeof(float)};
}

// Tokens [from, from + count) of all rows, dense.
std::vector<float> Dense(const Tokens& tokens, int64_t from, int64_t count) {
  std::vector<float> out;
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t h = 0; h < kHeads; ++h) {
      const float* first = tokens.at(b, h, from);
      out.insert(out.end(), first, first + count * kSize);
    }
  }
  return out;
}

struct Case {
  std::string scheme;
  int64_t past, query_tokens, window;
  std::vector<int64_t> starts;  // of the new tokens; what comes before them is padding
  Dims bias;
  double bound;
};

class KvAttentionInputsTest : public testing::TestWithParam<Case> {
 protected:
  KvCacheOptions Options() const {
    KvCacheOptions options{
        .batch = kBatch, .heads = kHeads, .head_size = kSize, .capacity = kCapacity};
    options.schemes = {ParseCacheScheme(GetParam().scheme).value()};
    return options;
  }

  // In f64, by definition, from what was given.
  void CheckOn(const Engine& engine) const;
  double Expected(const std::vector<float>& q, const std::vector<float>& bias, int64_t b,
                  int64_t head, int64_t query, int64_t channel) const {
    const Case& c = GetParam();
    const int64_t start = c.starts.empty() ? 0 : c.starts[b];
    const int64_t kv_head = head / (kQueryHeads / kHeads);
    const float* row = q.data() + ((b * kQueryHeads + head) * c.query_tokens + query) * kSize;
    std::vector<double> scores, values;
    // Columns are past tokens, then new ones without padding.
    for (int64_t j = 0; j <= c.past + query - start; ++j) {
      if (c.window != 0 && j <= c.past + query - start - c.window) continue;
      const int64_t token = j < c.past ? j : j + start;
      double score = 0;
      for (int64_t d = 0; d < kSize; ++d) score += double{row[d]} * k_.at(b, kv_head, token)[d];
      score /= std::sqrt(double{kSize});
      if (!bias.empty()) {
        const int64_t at =
            ((c.bias[0] == 1 ? 0 : b) * c.bias[1] + (c.bias[1] == 1 ? 0 : head)) * c.query_tokens +
            query;
        score += bias[at * c.bias[3] + j];
      }
      scores.push_back(score);
      values.push_back(v_.at(b, kv_head, token)[channel]);
    }
    if (scores.empty()) return 0;
    const double most = *std::max_element(scores.begin(), scores.end());
    double sum = 0, out = 0;
    for (size_t j = 0; j < scores.size(); ++j) {
      const double weight = std::exp(scores[j] - most);
      sum += weight;
      out += weight * values[j];
    }
    return out / sum;
  }

  const Tokens k_{1, kBatch, kHeads, kAll, kSize}, v_{2, kBatch, kHeads, kAll, kSize};
};

void KvAttentionInputsTest::CheckOn(const Engine& engine) const {
  const Case& c = GetParam();
  const auto cache = KvCache::Create(engine, Options()).value();
  ASSERT_TRUE(cache->Append(0, k_.Slice(0, c.past), v_.Slice(0, c.past)).ok());
  KvAttentionOptions options{.query_heads = kQueryHeads,
                             .query_tokens = c.query_tokens,
                             .window = c.window,
                             .new_tokens = true,
                             .bias = c.bias};
  const auto attention = cache->Attention(options);
  ASSERT_TRUE(attention.ok()) << attention.status();
  EXPECT_TRUE((*attention)->compiled(0)->fused());
  std::vector<float> q = Queries(3, kBatch * kQueryHeads * c.query_tokens * kSize), out(q.size());
  std::vector<float> k = Dense(k_, c.past, c.query_tokens), v = Dense(v_, c.past, c.query_tokens);
  for (int64_t b = 0; b < kBatch && !c.starts.empty(); ++b) {
    for (int64_t i = 0; i < kHeads * c.query_tokens * kSize; ++i) {
      if (i / kSize % c.query_tokens >= c.starts[b]) continue;
      // Padding is not read.
      k[b * kHeads * c.query_tokens * kSize + i] = std::numeric_limits<float>::quiet_NaN();
      v[b * kHeads * c.query_tokens * kSize + i] = std::numeric_limits<float>::quiet_NaN();
    }
  }
  std::vector<float> bias;
  if (!c.bias.empty()) bias = Queries(4, c.bias[0] * c.bias[1] * c.bias[2] * c.bias[3]);
  for (float& x : bias) x *= 3;
  KvAttentionInputs inputs{.k = MemoryOf(k), .v = MemoryOf(v), .starts = c.starts};
  if (!bias.empty()) inputs.bias = MemoryOf(bias);
  for (int repeat = 0; repeat < 2; ++repeat) {
    std::fill(out.begin(), out.end(), -7.f);
    const absl::Status status =
        (*attention)->Execute(Stream(engine), 0, MemoryOf(q), MemoryOf(out), inputs);
    ASSERT_TRUE(status.ok()) << status;
    for (int64_t i = 0; i < static_cast<int64_t>(out.size()); ++i) {
      const int64_t row = i / kSize, b = row / c.query_tokens / kQueryHeads;
      const double want =
          Expected(q, bias, b, row / c.query_tokens % kQueryHeads, row % c.query_tokens, i % kSize);
      ASSERT_NEAR(out[i], want, c.bound) << i;
    }
  }
  EXPECT_EQ(cache->length(0, 1), c.past);
}

TEST_P(KvAttentionInputsTest, IsByItsDefinition) {
  CheckOn(Engine::Create({.threads = 2}).value());
}

TEST_P(KvAttentionInputsTest, IsByItsDefinitionOfTheCudaKernels) {
  CheckOn(Engine::Create({.device = Device::kCudaSimt, .threads = 2}).value());
}

INSTANTIATE_TEST_SUITE_P(
    Cases, KvAttentionInputsTest,
    testing::Values(
        Case{"f32", 130, 5, 0, {}, {}, 1e-5}, Case{"f32", 130, 1, 0, {}, {}, 1e-5},
        Case{"f32", 130, 7, 20, {0, 3}, {}, 1e-5}, Case{"f32", 0, 64, 0, {40, 0}, {}, 1e-5},
        Case{"f32", 130, 3, 0, {3, 1}, {}, 1e-5},
        // What is not there has no say in how exact new tokens are.
        Case{"u2:g32:rzp", 0, 70, 0, {0, 69}, {}, 1e-5},
        Case{"u2:g32:rzp+rot+sinks3+window16", 0, 70, 9, {11, 0}, {}, 1e-5},
        Case{"u2:channel:g32:rzp+bulk32/u2:g32:rzp+rot+window40", 0, 33, 0, {}, {}, 1e-5},
        Case{"s8:token+rot+sinks4+window16", 129, 9, 0, {2, 0}, {}, 0.3},
        Case{"s8:token", 100, 9, 50, {0, 9}, {}, 0.3},
        Case{"f32", 90, 4, 0, {0, 2}, {kBatch, kQueryHeads, 4, 304}, 1e-5},
        Case{"f32", 90, 4, 30, {}, {1, kQueryHeads, 4, 320}, 1e-5},
        Case{"f32", 90, 1, 0, {}, {kBatch, 1, 1, 301}, 1e-5}),
    [](const auto& info) { return std::to_string(info.index); });

// Types of queries are those of new tokens.
TEST(KvAttentionInputs, InF16OfACacheThatIsRotated) {
  const Engine engine = Engine::Create({.threads = 1}).value();
  KvCacheOptions options{.heads = 1, .head_size = 32, .capacity = 40};
  options.schemes = {ParseCacheScheme("u2:g32:rzp+rot").value()};
  const auto cache = KvCache::Create(engine, options).value();
  const auto attention =
      cache->Attention({.query_heads = 1, .query_tokens = 1, .type = kF16, .new_tokens = true});
  ASSERT_TRUE(attention.ok()) << attention.status();
  std::vector<uint16_t> x(32), out(32);
  for (int i = 0; i < 32; ++i) x[i] = F32ToF16(static_cast<float>(i - 9) / 8);
  const Tensor in{x.data(), 64};
  ASSERT_TRUE(
      (*attention)->Execute(Stream(engine), 0, in, {out.data(), 64}, {.k = in, .v = in}).ok());
  for (int i = 0; i < 32; ++i) EXPECT_NEAR(F16ToF32(out[i]), F16ToF32(x[i]), 2e-3);
}

class KeepTest : public testing::Test {
 protected:
  KeepTest() {
    KvCacheOptions options{
        .layers = 2, .batch = 2, .heads = 1, .head_size = 32, .capacity = 400, .keep = {50, 0}};
    options.schemes = {ParseCacheScheme("f32").value()};
    cache_ = KvCache::Create(engine_, options).value();
  }
  std::string Error(const KvAttentionOptions& options) const {
    const auto attention = cache_->Attention(options).value();
    std::vector<float> q(2 * options.query_heads * options.query_tokens * 32, 1.f), out(q.size());
    KvAttentionInputs inputs;
    if (options.new_tokens) inputs = {.k = MemoryOf(q), .v = MemoryOf(q)};
    return std::string(
        attention->Execute(Stream(engine_), 0, MemoryOf(q), MemoryOf(out), inputs).message());
  }
  const Engine engine_ = Engine::Create({.threads = 1}).value();
  std::unique_ptr<KvCache> cache_;
};

TEST_F(KeepTest, WhatIsNotKeptIsNotAskedFor) {
  const Tokens tokens(1, 2, 1, 60, 32);
  const int64_t counts[] = {50, 20}, more[] = {1, 1};
  ASSERT_TRUE(cache_->Append(0, tokens.Slice(0, 60), tokens.Slice(0, 60), counts).ok());
  EXPECT_EQ(Error({.query_heads = 1}), "");
  EXPECT_EQ(Error({.query_heads = 1, .query_tokens = 9, .window = 50}), "");
  ASSERT_TRUE(cache_->Append(0, tokens.Slice(0, 60), tokens.Slice(0, 60), more).ok());
  EXPECT_EQ(Error({.query_heads = 1, .window = 50}), "");
  EXPECT_EQ(Error({.query_heads = 1, .query_tokens = 9, .window = 51, .new_tokens = true}), "");
  EXPECT_THAT(Error({.query_heads = 1}),
              HasSubstr("of the 51 tokens of batch row 0 the last 50 are kept, and attention of 1 "
                        "query tokens sees all"));
  EXPECT_THAT(Error({.query_heads = 1, .query_tokens = 2, .window = 50}), HasSubstr("sees 51"));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_THAT(Error({.query_heads = 1, .query_tokens = 2, .window = kMost}),
              HasSubstr("the last 50 are kept"));
  EXPECT_THAT(Error({.query_heads = 1, .window = 52, .new_tokens = true}), HasSubstr("sees 51"));
}

TEST_F(KeepTest, CropsToWhatIsLeftOrToNothing) {
  const Tokens tokens(1, 2, 1, 60, 32);
  ASSERT_TRUE(cache_->Append(0, tokens.Slice(0, 60), tokens.Slice(0, 60)).ok());
  const int64_t fewer[] = {55, 60}, none[] = {0, 60};
  EXPECT_THAT(std::string(cache_->Crop(fewer, 0).message()),
              HasSubstr("cropped to 55 tokens needs token 5 of K, of which only those from 10 on "
                        "are left, as the layer keeps 50; a rollback keeps more"));
  EXPECT_EQ(cache_->length(0, 0), 60);
  EXPECT_TRUE(cache_->Crop(none, 0).ok());
  EXPECT_EQ(cache_->length(0, 0), 0);
}

TEST_F(KeepTest, TakesTheMemoryOfWhatIsKept) {
  KvCacheOptions options = cache_->options();
  const KvTensor &kept = **cache_->tensor(0, false), &all = **cache_->tensor(1, false);
  EXPECT_EQ((*kept.part(KvPart::kCodes).dims)[2], 50);
  EXPECT_EQ((*all.part(KvPart::kCodes).dims)[2], 400);
  EXPECT_EQ(cache_->columns(), 400);
  options.keep = {60};
  const auto alike = KvCache::Create(engine_, options).value();
  for (const int64_t layer : {0, 1}) {
    EXPECT_EQ((*(*alike->tensor(layer, true))->part(KvPart::kCodes).dims)[2], 60);
  }
  options.keep = {1, 2, 3};
  EXPECT_THAT(std::string(KvCache::Create(engine_, options).status().message()),
              HasSubstr("3 numbers of tokens to keep for 2 layers"));
  options.keep = {-1};
  EXPECT_FALSE(KvCache::Create(engine_, options).ok());
}

TEST(KvAttentionInputs, AreChecked) {
  const Engine engine = Engine::Create({.threads = 1}).value();
  KvCacheOptions options{.batch = 2, .heads = 1, .head_size = 32, .capacity = 40};
  const auto cache = KvCache::Create(engine, options).value();
  std::vector<float> x(2 * 3 * 32, 1.f);
  const Tensor memory = MemoryOf(x);
  const auto run = [&](bool new_tokens, const KvAttentionInputs& inputs) {
    const auto attention =
        cache->Attention({.query_heads = 1, .query_tokens = 3, .new_tokens = new_tokens}).value();
    std::vector<float> out(x.size());
    return std::string(
        attention->Execute(Stream(engine), 0, memory, MemoryOf(out), inputs).message());
  };
  const std::vector<int64_t> one = {1}, beyond = {0, 4}, before = {-1, 0}, fine = {3, 0};
  EXPECT_THAT(run(true, {}), HasSubstr("keys of new tokens is executed without them"));
  EXPECT_THAT(run(true, {.k = memory}), HasSubstr("values of new tokens is executed without"));
  EXPECT_THAT(run(false, {.k = memory}), HasSubstr("without keys of new tokens is executed with"));
  EXPECT_THAT(run(false, {.starts = fine}), HasSubstr("executed with starts"));
  EXPECT_THAT(run(true, {.k = memory, .v = memory, .starts = one}), HasSubstr("1 starts"));
  EXPECT_THAT(run(true, {.k = memory, .v = memory, .starts = beyond}),
              HasSubstr("batch row 1 begins at token 4 of 3"));
  EXPECT_THAT(run(true, {.k = memory, .v = memory, .starts = before}),
              HasSubstr("row 0 begins at token -1 of 3"));
  EXPECT_THAT(run(true, {.k = {x.data(), 8}, .v = memory}), HasSubstr("'new K'"));
  EXPECT_EQ(run(true, {.k = memory, .v = memory, .starts = fine}), "");
  const auto attention = [&](bool new_tokens, const Dims& bias) {
    return cache
        ->Attention({.query_heads = 1, .query_tokens = 3, .new_tokens = new_tokens, .bias = bias})
        .status();
  };
  for (const Dims& bias : {Dims{2, 1, 3, 39}, Dims{3, 1, 3, 40}, Dims{1, 2, 3, 40},
                           Dims{2, 1, 2, 40}, Dims{3, 40}, Dims{2, 1, 3, 40, 1}}) {
    EXPECT_THAT(std::string(attention(false, bias).message()), HasSubstr("a bias of ["));
  }
  // New tokens have columns too.
  EXPECT_THAT(std::string(attention(true, {2, 1, 3, 42}).message()), HasSubstr("at least 43]"));
  EXPECT_TRUE(attention(true, {2, 1, 3, 43}).ok());
}

}  // namespace
}  // namespace kvant
