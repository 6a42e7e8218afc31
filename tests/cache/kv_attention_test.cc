// What attention over a cache can be asked for beside its shape: windows, caps and sinks.
#include "kvant/cache/kv_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "kvant/cache/kv_cache.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant {
namespace {

using testing::HasSubstr;

constexpr int64_t kBatch = 2, kHeads = 2, kQueryHeads = 6, kSize = 32, kCapacity = 150;

// Numbers that differ in every row.
std::vector<float> Numbers(int64_t count, double step) {
  std::vector<float> numbers(static_cast<size_t>(count));
  for (size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = static_cast<float>(std::sin(static_cast<double>(i) * step) * 1.5);
  }
  return numbers;
}

// A cache whose rows hold `lengths` tokens, and what it was given.
struct Filled {
  Engine engine = Engine::Create({.threads = 2}).value();
  std::unique_ptr<KvCache> cache;
  std::vector<float> k = Numbers(kBatch * kHeads * kCapacity * kSize, 0.731);
  std::vector<float> v = Numbers(kBatch * kHeads * kCapacity * kSize, 0.377);
  std::vector<int64_t> lengths = {141, 97};

  explicit Filled(const std::string& scheme, FpMath fpmath = FpMath::kStrict) {
    KvCacheOptions options{.batch = kBatch,
                           .heads = kHeads,
                           .head_size = kSize,
                           .capacity = kCapacity,
                           .fpmath = fpmath};
    options.schemes = {ParseCacheScheme(scheme).value()};
    cache = KvCache::Create(engine, options).value();
    const Dims dims = {kBatch, kHeads, kCapacity, kSize};
    EXPECT_TRUE(cache
                    ->Append(0, MakeKvInput(kF32, k.data(), dims),
                             MakeKvInput(kF32, v.data(), dims), lengths)
                    .ok());
  }
};

// In f64, by definition. sinks: [query heads] or none.
double Expected(const Filled& filled, const KvAttentionOptions& options,
                const std::vector<float>& q, const std::vector<float>& sinks, int64_t b,
                int64_t head, int64_t query, int64_t channel) {
  const int64_t token = filled.lengths[b] - options.query_tokens + query;
  const int64_t first = options.window == 0 ? 0 : std::max<int64_t>(0, token - options.window + 1);
  const float* const row =
      q.data() + ((b * kQueryHeads + head) * options.query_tokens + query) * kSize;
  double most = sinks.empty() ? -std::numeric_limits<double>::infinity() : sinks[head];
  std::vector<double> scores;
  const int64_t kv_row = (b * kHeads + head / (kQueryHeads / kHeads)) * kCapacity;
  for (int64_t t = first; t <= token; ++t) {
    double score = 0;
    for (int64_t d = 0; d < kSize; ++d) {
      score += double{row[d]} * filled.k[(kv_row + t) * kSize + d];
    }
    score *= options.scale != 0 ? options.scale : 1 / std::sqrt(double{kSize});
    if (options.soft_cap != 0) score = options.soft_cap * std::tanh(score / options.soft_cap);
    most = std::max(most, score);
    scores.push_back(score);
  }
  double sum = sinks.empty() ? 0 : std::exp(sinks[head] - most), out = 0;
  for (int64_t t = first; t <= token; ++t) {
    const double weight = std::exp(scores[t - first] - most);
    sum += weight;
    out += weight * filled.v[(kv_row + t) * kSize + channel];
  }
  return out / sum;
}

// A scheme, its bound; a soft cap, a window, sinks; query tokens.
using Case = std::tuple<std::pair<const char*, double>, float, int64_t, bool, int64_t>;
class KvAttentionTest : public testing::TestWithParam<Case> {};

TEST_P(KvAttentionTest, IsByItsDefinition) {
  const auto& [scheme, soft_cap, window, with_sinks, query_tokens] = GetParam();
  const Filled filled(scheme.first);
  const KvAttentionOptions options{.query_heads = kQueryHeads,
                                   .query_tokens = query_tokens,
                                   .soft_cap = soft_cap,
                                   .window = window,
                                   .sinks = with_sinks};
  const auto attention = filled.cache->Attention(options);
  ASSERT_TRUE(attention.ok()) << attention.status();
  EXPECT_TRUE((*attention)->compiled(0)->fused());
  const std::vector<float> q = Numbers(kBatch * kQueryHeads * query_tokens * kSize, 1.213);
  const std::vector<float> sinks =
      with_sinks ? std::vector<float>{3.f, -1.f, 0.5f, 6.f, 2.f, -40.f} : std::vector<float>{};
  std::vector<float> out(q.size());
  ASSERT_TRUE((*attention)
                  ->Execute(Stream(filled.engine), 0, {q.data(), q.size() * sizeof(float)},
                            {out.data(), out.size() * sizeof(float)},
                            {.sinks = {sinks.data(), sinks.size() * sizeof(float)}})
                  .ok());
  for (int64_t i = 0; i < static_cast<int64_t>(out.size()); ++i) {
    const int64_t row = i / kSize, head = row / query_tokens;
    ASSERT_NEAR(out[i],
                Expected(filled, options, q, sinks, head / kQueryHeads, head % kQueryHeads,
                         row % query_tokens, i % kSize),
                scheme.second)
        << "element " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Options, KvAttentionTest,
    testing::Combine(testing::Values(std::pair("f32", 1e-5), std::pair("int8_th", 0.02),
                                     std::pair("s8:g32+rot+sinks4+window16", 0.02)),
                     testing::Values(0.f, 0.8f), testing::Values(0, 1, 33), testing::Bool(),
                     testing::Values(1, 5)));

// A batch whose rows begin at different places has queries in front of the shorter ones.
TEST(KvAttentionOptionsTest, QueriesBeforeTheFirstTokenGiveZero) {
  for (const char* scheme : {"f32", "int8_th"}) {
    Filled filled(scheme);
    const int64_t lengths[] = {141, 2};
    ASSERT_TRUE(filled.cache->Crop(lengths).ok());
    filled.lengths = {141, 2};
    const KvAttentionOptions options{.query_heads = kQueryHeads, .query_tokens = 5};
    const auto attention = filled.cache->Attention(options).value();
    const std::vector<float> q = Numbers(kBatch * kQueryHeads * 5 * kSize, 1.213);
    std::vector<float> out(q.size(), 99.f);
    const size_t bytes = q.size() * sizeof(float);
    ASSERT_TRUE(
        attention->Execute(Stream(filled.engine), 0, {q.data(), bytes}, {out.data(), bytes}).ok());
    for (int64_t i = 0; i < static_cast<int64_t>(out.size()); ++i) {
      const int64_t row = i / kSize, head = row / 5, b = head / kQueryHeads, query = row % 5;
      const double want = b == 1 && query < 3 ? 0
                                              : Expected(filled, options, q, {}, b,
                                                         head % kQueryHeads, query, i % kSize);
      ASSERT_NEAR(out[i], want, 0.02) << scheme << " element " << i;
    }
  }
}

// Where the CPU has bf16 products a permission is made use of, by many queries only.
TEST(KvAttentionOptionsTest, MayBeComputedInBF16) {
  const cpu::KernelSet& kernels = *cpu::ChosenKernels();
  for (const char* scheme : {"int8_g32", "rotKV4_g32", "f16"}) {
    const Filled strict(scheme), filled(scheme, FpMath::kBF16);
    const KvAttentionOptions options{.query_heads = kQueryHeads, .query_tokens = 40};
    const std::vector<float> q = Numbers(kBatch * kQueryHeads * 40 * kSize, 1.213);
    std::vector<float> exact(q.size()), out(q.size());
    const auto attend = [&](const Filled& from, std::vector<float>& to) {
      const auto attention = from.cache->Attention(options).value();
      const size_t bytes = q.size() * sizeof(float);
      EXPECT_TRUE(
          attention->Execute(Stream(from.engine), 0, {q.data(), bytes}, {to.data(), bytes}).ok());
      return attention->compiled(0)->rounding();
    };
    EXPECT_EQ(attend(strict, exact), 0) << scheme;
    EXPECT_EQ(attend(filled, out), kernels.pairs == nullptr ? 0 : 1e-2) << scheme;
    double error = 0;
    for (size_t i = 0; i < out.size(); ++i) error += std::pow(out[i] - exact[i], 2);
    // Values cancel. Without their signs outputs would be some 0.9.
    EXPECT_LE(std::sqrt(error / static_cast<double>(out.size())), 1e-2 * 0.9) << scheme;
    EXPECT_EQ(error > 0, kernels.pairs != nullptr) << scheme;
    // A fork has the permission as well.
    const auto fork = filled.cache->Fork().value();
    EXPECT_EQ(fork->Attention(options).value()->compiled(0)->rounding(),
              kernels.pairs == nullptr ? 0 : 1e-2);
    const auto decode = [](const Filled& from) {
      return from.cache->Attention({.query_heads = kQueryHeads}).value()->compiled(0)->kernel();
    };
    EXPECT_EQ(decode(filled), decode(strict));
  }
}

TEST(KvAttentionOptionsTest, AreDifferentAttentions) {
  const Filled filled("f16");
  const auto plain = filled.cache->Attention({.query_heads = kQueryHeads}).value();
  EXPECT_NE(filled.cache->Attention({.query_heads = kQueryHeads, .soft_cap = 30}).value(), plain);
  EXPECT_NE(filled.cache->Attention({.query_heads = kQueryHeads, .window = 8}).value(), plain);
  EXPECT_NE(filled.cache->Attention({.query_heads = kQueryHeads, .sinks = true}).value(), plain);
  EXPECT_EQ(filled.cache->Attention({.query_heads = kQueryHeads}).value(), plain);
}

TEST(KvAttentionOptionsTest, AreChecked) {
  const Filled filled("f16");
  const auto error = [&](const KvAttentionOptions& options) {
    return std::string(filled.cache->Attention(options).status().message());
  };
  EXPECT_THAT(error({.query_heads = kQueryHeads, .soft_cap = -1}), HasSubstr("a soft cap of -1"));
  EXPECT_THAT(error({.query_heads = kQueryHeads, .soft_cap = std::nanf("")}), HasSubstr("nan"));
  EXPECT_THAT(error({.query_heads = kQueryHeads, .soft_cap = HUGE_VALF}), HasSubstr("cap of inf"));
  EXPECT_THAT(error({.query_heads = kQueryHeads, .scale = HUGE_VALF}), HasSubstr("a scale of inf"));
  EXPECT_THAT(error({.query_heads = kQueryHeads, .window = -3}), HasSubstr("window of -3 tokens"));
  std::vector<float> q(kBatch * kQueryHeads * kSize), sinks(kQueryHeads);
  const auto run = [&](bool with, ConstTensor given) {
    const auto attention =
        filled.cache->Attention({.query_heads = kQueryHeads, .sinks = with}).value();
    Tensor out{q.data(), q.size() * sizeof(float)};
    return std::string(
        attention->Execute(Stream(filled.engine), 0, out, out, {.sinks = given}).message());
  };
  EXPECT_THAT(run(true, {}), HasSubstr("with sinks is executed without them"));
  EXPECT_THAT(run(false, {sinks.data(), sinks.size() * 4}), HasSubstr("without sinks is executed"));
  EXPECT_THAT(run(true, {sinks.data(), 8}), HasSubstr("'sinks'"));
}

}  // namespace
}  // namespace kvant
