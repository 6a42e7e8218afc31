// KV caches by the C ABI.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kvant/tests/integrations/c_abi.h"

namespace kvant::c_abi {
namespace {

using testing::HasSubstr;

// One layer of [2, 3, tokens, 8], in f32, so that attention is exact.
struct F32Cache {
  static constexpr int64_t kBatch = 2, kHeads = 3, kSize = 8;
  Cache cache;

  explicit F32Cache(const kvant_engine* engine) {
    kvant_cache_options options = {};
    options.size = sizeof options;
    options.scheme = "f32";
    options.batch = kBatch;
    options.heads = kHeads;
    options.head_size = kSize;
    options.capacity = 16;
    kvant_cache* made = nullptr;
    EXPECT_OK(kvant_cache_create(engine, &options, &made));
    cache.reset(made);
  }
};

TEST(CAbiCacheTest, CacheAppendsAndAttends) {
  const F32Cache f32(MakeEngine().get());
  kvant_cache* const cache = f32.cache.get();
  Array<float> k({2, 3, 5, 8}, kDLFloat), v({2, 3, 5, 8}, kDLFloat);
  k.Fill([](double i) { return std::sin(i); });
  v.Fill([](double i) { return std::cos(i * 1.3); });
  const int64_t counts[] = {5, 3};
  ASSERT_OK(kvant_cache_append(cache, nullptr, 0, &k.dl, &v.dl, counts, nullptr));
  EXPECT_EQ(kvant_cache_length(cache, 0, 0), 5);
  EXPECT_EQ(kvant_cache_length(cache, 0, 1), 3);
  EXPECT_GT(kvant_cache_used_bytes(cache), 0);

  kvant_attention_options options = {};
  options.size = sizeof options;
  options.query_heads = 6;
  kvant_attention* made = nullptr;
  ASSERT_OK(kvant_cache_attention(cache, &options, &made));
  const Attention attention(made);
  Array<float> q({2, 6, 1, 8}, kDLFloat), o({2, 6, 1, 8}, kDLFloat);
  q.Fill([](double i) { return std::sin(i * 0.37); });
  ASSERT_OK(kvant_attention_execute(attention.get(), nullptr, 0, &q.dl, &o.dl, nullptr));
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 6; ++h) {
      std::vector<double> out(8);
      double sum = 0;
      for (int64_t t = 0; t < counts[b]; ++t) {
        const int64_t row = ((b * 3 + h / 2) * 5 + t) * 8;
        double score = 0;
        for (int64_t d = 0; d < 8; ++d) {
          score += double{q.data[(b * 6 + h) * 8 + d]} * k.data[row + d];
        }
        const double weight = std::exp(score / std::sqrt(8.0));
        sum += weight;
        for (int64_t d = 0; d < 8; ++d) out[d] += weight * v.data[row + d];
      }
      for (int64_t d = 0; d < 8; ++d) {
        EXPECT_NEAR(o.data[(b * 6 + h) * 8 + d], out[d] / sum, 1e-5);
      }
    }
  }
  const char* text = nullptr;
  ASSERT_OK(kvant_attention_explain(attention.get(), 0, &text));
  EXPECT_THAT(text, HasSubstr("fused"));
  ASSERT_OK(kvant_attention_kernel(attention.get(), 0, &text));
  EXPECT_THAT(text, testing::StartsWith("cpu/"));
  Array<float> wrong({2, 6, 8, 1}, kDLFloat);
  EXPECT_EQ(kvant_attention_execute(attention.get(), nullptr, 0, &wrong.dl, &o.dl, nullptr),
            KVANT_INVALID_ARGUMENTS);
  EXPECT_STREQ(kvant_error(), "q is f32[2,6,8,1], but must be f32[2,6,1,8]");
}

// Two caches of which the second has what the first saved, and attention of later queries over
// them: its statistics are the logarithm of how many tokens there are where all scores are 0.
TEST(CAbiCacheTest, SavesLoadsAndGivesStatistics) {
  const Engine engine = MakeEngine();
  const F32Cache first(engine.get()), second(engine.get());
  kvant_cache *const from = first.cache.get(), *const to = second.cache.get();
  Array<float> k({2, 3, 5, 8}, kDLFloat), v({2, 3, 5, 8}, kDLFloat);
  v.Fill([](double i) { return std::floor(i / 8); });
  const int64_t counts[] = {5, 0};
  ASSERT_OK(kvant_cache_append(from, nullptr, 0, &k.dl, &v.dl, counts, nullptr));
  int64_t bytes = 0;
  ASSERT_OK(kvant_cache_saved_bytes(from, 0, counts, &bytes));
  EXPECT_EQ(bytes, 2 * 512);  // 3 * 5 * 8 of f32, to whole lines
  Array<uint8_t> saved({bytes}, kDLUInt), few({bytes - 1}, kDLUInt);
  ASSERT_OK(kvant_cache_save(from, nullptr, 0, &saved.dl));
  EXPECT_EQ(kvant_cache_save(from, nullptr, 0, &few.dl), KVANT_INVALID_ARGUMENTS);
  EXPECT_THAT(kvant_error(), HasSubstr("its sequences take 1024 bytes, but 1023 are given"));
  EXPECT_EQ(kvant_cache_save(from, nullptr, 0, &k.dl), KVANT_INVALID_ARGUMENTS);
  EXPECT_THAT(kvant_error(), HasSubstr("out has 4 dims, but bytes have one"));
  EXPECT_EQ(kvant_cache_load(to, nullptr, 0, counts, &k.dl), KVANT_INVALID_ARGUMENTS);
  EXPECT_THAT(kvant_error(), HasSubstr("data has 4 dims, but bytes have one"));
  ASSERT_OK(kvant_cache_load(to, nullptr, 0, counts, &saved.dl));
  EXPECT_EQ(kvant_cache_length(to, 0, 0), 5);

  kvant_attention_options options = {};
  options.size = sizeof options;
  options.query_heads = 3;
  options.query_tokens = 2;
  options.sees_all = options.stats = true;
  kvant_attention* made = nullptr;
  ASSERT_OK(kvant_cache_attention(to, &options, &made));
  const Attention attention(made);
  Array<float> q({2, 3, 2, 8}, kDLFloat), o({2, 3, 2, 8}, kDLFloat), stats({2, 3, 2, 1}, kDLFloat);
  kvant_attention_inputs inputs = {};
  inputs.size = sizeof inputs;
  EXPECT_EQ(kvant_attention_execute(made, nullptr, 0, &q.dl, &o.dl, &inputs),
            KVANT_INVALID_ARGUMENTS);
  inputs.stats = &stats.dl;
  ASSERT_OK(kvant_attention_execute(made, nullptr, 0, &q.dl, &o.dl, &inputs));
  EXPECT_NEAR(o.data[0], 2, 1e-6);
  EXPECT_NEAR(stats.data[0], std::log(5.0), 1e-6);
  EXPECT_EQ(o.data[3 * 2 * 8], 0);
  EXPECT_EQ(stats.data[3 * 2], -std::numeric_limits<float>::infinity());
}

TEST(CAbiCacheTest, NewTokensAndForks) {
  const F32Cache f32(MakeEngine().get());
  kvant_cache* const cache = f32.cache.get();
  Array<float> k({2, 3, 4, 8}, kDLFloat), v({2, 3, 4, 8}, kDLFloat), q({2, 3, 4, 8}, kDLFloat);
  Array<float> o({2, 3, 4, 8}, kDLFloat);
  v.Fill([](double i) { return std::floor(i / 8); });  // the token's number
  kvant_attention_options options = {};
  options.size = sizeof options;
  options.query_heads = 3;
  options.query_tokens = 4;
  options.new_tokens = true;
  const int64_t columns = kvant_cache_columns(cache) + 4;
  Array<float> bias({1, 1, 4, columns}, kDLFloat);
  std::copy_n(bias.dims.begin(), 4, options.bias);
  kvant_attention* made = nullptr;
  ASSERT_OK(kvant_cache_attention(cache, &options, &made));
  const Attention attention(made);
  const int64_t starts[] = {0, 2};
  kvant_attention_inputs inputs = {};
  inputs.size = sizeof inputs;
  inputs.k = &k.dl;
  inputs.v = &v.dl;
  inputs.bias = &bias.dl;
  inputs.starts = starts;
  bias.data[3 * columns] = std::log(2.f);  // of the last query for the first token
  ASSERT_OK(kvant_attention_execute(made, nullptr, 0, &q.dl, &o.dl, &inputs));
  // Scores are 0: means of the tokens that a query sees, the first of them twice.
  EXPECT_NEAR(o.data[3 * 8], (0. + 0 + 1 + 2 + 3) / 5, 1e-6);
  EXPECT_NEAR(o.data[(12 + 3) * 8], (14. + 14 + 15) / 3, 1e-5);
  EXPECT_NEAR(o.data[(12 + 2) * 8], 14, 1e-5);
  ASSERT_OK(kvant_cache_append(cache, nullptr, 0, &k.dl, &v.dl, nullptr, starts));
  EXPECT_EQ(kvant_cache_length(cache, 0, 1), 2);
  const int64_t rows[] = {1, 1, 0};
  kvant_cache* forked = nullptr;
  ASSERT_OK(kvant_cache_fork(cache, rows, 3, 50, &forked));
  const Cache fork(forked);
  EXPECT_EQ(kvant_cache_length(forked, 0, 1), 2);
  EXPECT_EQ(kvant_cache_length(forked, 0, 2), 4);
  EXPECT_EQ(kvant_cache_columns(forked), 50);
  const int64_t one = 1;
  EXPECT_EQ(kvant_cache_crop(forked, 9, &one, 1), KVANT_INVALID_ARGUMENTS);
  ASSERT_OK(kvant_cache_crop(forked, 0, &one, 1));
  EXPECT_EQ(kvant_cache_length(forked, 0, 2), 1);
}

TEST(CAbiCacheTest, SinksAreTakenWhereTheyAreWanted) {
  const F32Cache f32(MakeEngine().get());
  kvant_cache* const cache = f32.cache.get();
  Array<float> k({2, 3, 5, 8}, kDLFloat), q({2, 3, 1, 8}, kDLFloat), o({2, 3, 1, 8}, kDLFloat);
  k.Fill([](double) { return 1; });
  ASSERT_OK(kvant_cache_append(cache, nullptr, 0, &k.dl, &k.dl, nullptr, nullptr));
  kvant_attention_options options = {};
  options.size = sizeof options;
  options.query_heads = 3;
  options.window = 3;
  options.sinks = true;
  kvant_attention* made = nullptr;
  ASSERT_OK(kvant_cache_attention(cache, &options, &made));
  const Attention attention(made);
  // Scores are 0: of e^0 three times and e^sink, the former count.
  Array<float> sinks({3}, kDLFloat);
  sinks.data = {0, std::log(3.f), -1000};
  kvant_attention_inputs inputs = {};
  inputs.size = sizeof inputs;
  inputs.sinks = &sinks.dl;
  ASSERT_OK(kvant_attention_execute(made, nullptr, 0, &q.dl, &o.dl, &inputs));
  for (int64_t b = 0; b < 2; ++b) {
    EXPECT_NEAR(o.data[(b * 3 + 0) * 8], 0.75, 1e-6);
    EXPECT_NEAR(o.data[(b * 3 + 1) * 8], 0.5, 1e-6);
    EXPECT_NEAR(o.data[(b * 3 + 2) * 8], 1, 1e-6);
  }
  EXPECT_EQ(kvant_attention_execute(made, nullptr, 0, &q.dl, &o.dl, nullptr),
            KVANT_INVALID_ARGUMENTS);
  inputs.sinks = &q.dl;
  EXPECT_EQ(kvant_attention_execute(made, nullptr, 0, &q.dl, &o.dl, &inputs),
            KVANT_INVALID_ARGUMENTS);
  EXPECT_STREQ(kvant_error(), "sinks is f32[2,3,1,8], but must be f32[3]");
  inputs.sinks = &sinks.dl;
  inputs.bias = &q.dl;
  EXPECT_EQ(kvant_attention_execute(made, nullptr, 0, &q.dl, &o.dl, &inputs),
            KVANT_INVALID_ARGUMENTS);
  EXPECT_STREQ(kvant_error(), "attention without biases is executed with them");
}

TEST(CAbiCacheTest, CacheLivesAsKvCacheDoes) {
  const F32Cache f32(MakeEngine().get());
  kvant_cache* const cache = f32.cache.get();
  Array<float> k({2, 3, 5, 8}, kDLFloat);
  k.Fill([](double i) { return i; });
  // [tokens, batch, heads, channels] seen as [batch, heads, tokens, channels].
  Array<float> turned({2, 3, 5, 8}, kDLFloat);
  int64_t strides[] = {24, 8, 48, 1};
  turned.dl.strides = strides;
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 3; ++h) {
      for (int64_t t = 0; t < 5; ++t) {
        for (int64_t d = 0; d < 8; ++d) {
          turned.data[b * 24 + h * 8 + t * 48 + d] = k.data[((b * 3 + h) * 5 + t) * 8 + d];
        }
      }
    }
  }
  ASSERT_OK(kvant_cache_append(cache, nullptr, 0, &k.dl, &turned.dl, nullptr, nullptr));
  const auto stored = [&](const kvant_cache* of, bool values, int64_t b, int64_t h, int64_t t) {
    kvant_tensor tensor = {};
    tensor.size = sizeof tensor;
    const void* data = nullptr;
    EXPECT_OK(kvant_cache_part(of, 0, values, KVANT_PART_CODES, &tensor, &data));
    EXPECT_EQ(tensor.type, KVANT_F32);
    return static_cast<const float*>(data)[((b * 3 + h) * tensor.dims[2] + t) * 8];
  };
  EXPECT_EQ(stored(cache, false, 1, 2, 4), k.data[((1 * 3 + 2) * 5 + 4) * 8]);
  EXPECT_EQ(stored(cache, true, 1, 2, 4), k.data[((1 * 3 + 2) * 5 + 4) * 8]);
  kvant_cache* forked = nullptr;
  ASSERT_OK(kvant_cache_fork(cache, nullptr, 0, 0, &forked));
  const Cache fork(forked);
  const int64_t rows[] = {1, 1}, three = 3, lengths[] = {2, 1};
  ASSERT_OK(kvant_cache_reorder(cache, KVANT_ALL_LAYERS, rows, 2));
  EXPECT_EQ(stored(cache, false, 0, 2, 4), stored(cache, false, 1, 2, 4));
  EXPECT_NE(stored(fork.get(), false, 0, 2, 4), stored(fork.get(), false, 1, 2, 4));
  ASSERT_OK(kvant_cache_crop(cache, KVANT_ALL_LAYERS, &three, 1));
  EXPECT_EQ(kvant_cache_length(cache, 0, 1), 3);
  ASSERT_OK(kvant_cache_crop(cache, KVANT_ALL_LAYERS, lengths, 2));
  EXPECT_EQ(kvant_cache_length(cache, 0, 1), 1);
  kvant_range ranges[3];
  ASSERT_OK(kvant_cache_ranges(cache, 0, false, 0, ranges));
  EXPECT_EQ(ranges[1].tokens, 2);
  EXPECT_EQ(kvant_cache_ranges(cache, 0, false, 7, ranges), KVANT_INVALID_ARGUMENTS);
  EXPECT_STREQ(kvant_error(), "there is no batch row 7: the cache has 2");
  ASSERT_OK(kvant_cache_reset(cache));
  EXPECT_EQ(kvant_cache_length(cache, 0, 0), 0);
  EXPECT_EQ(kvant_cache_length(fork.get(), 0, 0), 5);
  // A cache outlives neither what it was made from nor what was made of it.
  kvant_attention_options options = {};
  options.size = sizeof options;
  options.query_heads = 3;
  kvant_attention* attention = nullptr;
  ASSERT_OK(kvant_cache_attention(forked, &options, &attention));
  const Attention kept(attention);
}

TEST(CAbiCacheTest, CacheRefusesInWords) {
  const F32Cache f32(MakeEngine().get());
  kvant_cache* const cache = f32.cache.get();
  Array<float> k({2, 3, 17, 8}, kDLFloat);
  const auto error = [&](const DLTensor& key, const DLTensor& value) {
    EXPECT_EQ(kvant_cache_append(cache, nullptr, 0, &key, &value, nullptr, nullptr),
              KVANT_INVALID_ARGUMENTS);
    return std::string(kvant_error());
  };
  EXPECT_THAT(error(k.dl, k.dl), HasSubstr("16"));
  DLTensor wrong = k.dl;
  wrong.ndim = 3;
  EXPECT_EQ(error(wrong, k.dl), "k has 3 dims, but must be [batch, heads, tokens, head size]");
  wrong = k.dl;
  wrong.dtype = {kDLInt, 32, 1};
  EXPECT_EQ(error(k.dl, wrong), "v is s32[2,3,17,8], but must be f32, f16 or bf16");
  wrong.device = {kDLCUDA, 0};
  EXPECT_THAT(error(wrong, k.dl), HasSubstr("on cuda:0, and the cache is on cpu"));
  k.dims[2] = 2;
  wrong = k.dl;
  wrong.data = nullptr;
  EXPECT_THAT(error(wrong, k.dl), HasSubstr("K"));
  EXPECT_EQ(kvant_cache_length(cache, 0, 0), 0);
  kvant_cache_options options = {};
  options.size = sizeof options;
  options.scheme = "int5";
  kvant_cache* made = nullptr;
  EXPECT_EQ(kvant_cache_create(MakeEngine().get(), &options, &made), KVANT_INVALID_ARGUMENTS);
  EXPECT_THAT(kvant_error(), HasSubstr("int5"));
  options.scheme = "int8_g32";
  options.fpmath = "fp8";
  EXPECT_EQ(kvant_cache_create(MakeEngine().get(), &options, &made), KVANT_INVALID_ARGUMENTS);
  EXPECT_STREQ(kvant_error(), "there is no fpmath mode 'fp8'");
}

TEST(CAbiCacheTest, SchemesAreListed) {
  ASSERT_GT(kvant_schemes(), 10);
  for (size_t i = 0; i < kvant_schemes(); ++i) {
    const char *name = nullptr, *what = nullptr;
    ASSERT_OK(kvant_scheme_at(i, &name, &what));
    double bits = 0;
    ASSERT_OK(kvant_scheme_bits(name, 128, 8, &bits)) << name;
    EXPECT_GT(bits, 1) << name;
    EXPECT_GT(std::strlen(what), 3) << name;
  }
  const char* text = nullptr;
  ASSERT_OK(kvant_scheme_text("hqq4", &text));
  EXPECT_STREQ(text, "quanto4");
  ASSERT_OK(kvant_scheme_text("s8:token+rot/u4:g32:zp", &text));
  EXPECT_STREQ(text, "s8:token+rot/u4:g32:zp");
  EXPECT_EQ(kvant_scheme_text("int5", &text), KVANT_INVALID_ARGUMENTS);
  EXPECT_THAT(kvant_error(), HasSubstr("int5"));
  double bits = 0;
  ASSERT_OK(kvant_scheme_bits("f16", 128, 8, &bits));
  EXPECT_EQ(bits, 16);
  EXPECT_EQ(kvant_scheme_bits("int4_g32", 48, 8, &bits), KVANT_INVALID_ARGUMENTS);
  EXPECT_THAT(kvant_error(), HasSubstr("groups of 32 do not divide the head size 48"));
}

}  // namespace
}  // namespace kvant::c_abi
