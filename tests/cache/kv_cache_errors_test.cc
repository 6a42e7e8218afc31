// What a KvCache refuses, with which words, and that it is then as it was.
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

using cache_testing::Attend;
using cache_testing::Bench;
using cache_testing::Contents;
using cache_testing::MakeBench;
using cache_testing::SmallOptions;
using cache_testing::Stored;
using cache_testing::Tokens;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

void ExpectRefused(const absl::Status& status, const std::string& words) {
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(words));
}

TEST(KvCacheErrors, OptionsThatContradictThemselves) {
  const Engine engine = Engine::Create({.threads = 1}).value();
  const auto refused = [&](const std::string& words, auto change) {
    KvCacheOptions options = SmallOptions("int4_g32", 16);
    change(options);
    ExpectRefused(KvCache::Create(engine, options).status(), words);
    ExpectRefused(KvCache::BytesFor(options).status(), words);
  };
  refused("capacity of 0", [](KvCacheOptions& o) { o.capacity = 0; });
  refused("heads of -1", [](KvCacheOptions& o) { o.heads = -1; });
  refused("3 schemes for 2 layers", [](KvCacheOptions& o) { o.schemes.resize(3); });
  refused("layers, batch, heads, head size and capacity", [](KvCacheOptions& o) {
    o.batch = int64_t{1} << 30;
    o.heads = int64_t{1} << 20;
  });
  refused("a static scale is 65520, which is not above 0 or beyond f16", [](KvCacheOptions& o) {
    o.schemes = {*ParseCacheScheme("int8_tensor")};
    o.k_scales = {{1.f}, {65520.f}};
    o.v_scales = {{1.f}, {1.f}};
  });
  refused("for 3 layers of 2", [](KvCacheOptions& o) {
    o.schemes = {*ParseCacheScheme("int8_tensor")};
    o.k_scales = o.v_scales = {{1.f}, {1.f}, {1.f}};
  });
  refused("takes 64 static scales, but there are 128", [](KvCacheOptions& o) {
    o.v_head_size = 32;
    o.schemes = {*ParseCacheScheme("s8:channel")};
    o.k_scales = o.v_scales = {std::vector<float>(128, 1.f), std::vector<float>(128, 1.f)};
  });
  refused("static scales, which go without zero points", [](KvCacheOptions& o) {
    o.schemes = {*ParseCacheScheme("s8:tensor:zp")};
    o.k_scales = o.v_scales = {{1.f}, {1.f}};
  });
  refused("rollback of -1", [](KvCacheOptions& o) { o.rollback = -1; });
  refused("takes 1 static scales, but there are 0",
          [](KvCacheOptions& o) { o.schemes = {*ParseCacheScheme("int8_tensor")}; });
  refused("which no layer's scheme takes", [](KvCacheOptions& o) { o.k_scales = {{1.f}, {1.f}}; });
  refused("static scales, which ggml's formula would compute", [](KvCacheOptions& o) {
    o.schemes = {*ParseCacheScheme("s8:tensor:ggml")};
    o.k_scales = o.v_scales = {{1.f}, {1.f}};
  });
  refused("a static scale is 0", [](KvCacheOptions& o) {
    o.schemes = {*ParseCacheScheme("int8_tensor")};
    o.k_scales = {{1.f}, {0.f}};
    o.v_scales = {{1.f}, {1.f}};
  });
}

class KvCacheRefusals : public testing::Test {
 protected:
  KvCacheRefusals() : bench_(MakeBench(SmallOptions("int4_g64_R128_s4", 150), 160)) {
    EXPECT_TRUE(bench_.Append(0, 140).ok());
    for (int64_t row = 0; row < 2; ++row) before_.push_back(Contents(*bench_.cache, 0, row));
  }
  // Nothing has changed.
  ~KvCacheRefusals() override {
    for (int64_t row = 0; row < 2; ++row) {
      EXPECT_EQ(bench_.cache->length(0, row), 140);
      EXPECT_EQ(Contents(*bench_.cache, 0, row), before_[row]);
    }
  }

  Bench bench_;
  std::vector<std::string> before_;
};

TEST_F(KvCacheRefusals, MoreThanTheCapacity) {
  ExpectRefused(bench_.cache->Append(0, bench_.k.Slice(140, 11), bench_.v.Slice(140, 11)),
                "batch row 0 has 140 tokens, and 11 more exceed the capacity of 150");
  const int64_t counts[] = {0, 11};
  ExpectRefused(bench_.cache->Append(0, bench_.k.Slice(140, 11), bench_.v.Slice(140, 11), counts),
                "batch row 1 has 140 tokens, and 11 more");
}

TEST_F(KvCacheRefusals, CountsThatAreNotThere) {
  const KvInput k = bench_.k.Slice(140, 3), v = bench_.v.Slice(140, 3);
  const int64_t three[] = {1, 1, 1}, four[] = {4, 0}, negative[] = {0, -1};
  ExpectRefused(bench_.cache->Append(0, k, v, three), "3 counts of tokens for a batch of 2");
  ExpectRefused(bench_.cache->Append(0, k, v, four), "takes 4 of 3 tokens");
  ExpectRefused(bench_.cache->Append(0, k, v, negative), "takes -1 of 3 tokens");
  ExpectRefused(bench_.cache->Append(2, k, v), "there is no layer 2: the cache has 2");
  ExpectRefused(bench_.cache->Append(-1, k, v), "there is no layer -1: the cache has 2");
}

TEST_F(KvCacheRefusals, StartsThatAreNotThere) {
  const KvInput k = bench_.k.Slice(140, 3), v = bench_.v.Slice(140, 3);
  const int64_t one[] = {0}, four[] = {0, 4}, negative[] = {-1, 0}, starts[] = {0, 1};
  const int64_t counts[] = {0, 3};
  ExpectRefused(bench_.cache->Append(0, k, v, {}, one), "1 starts of tokens for a batch of 2");
  ExpectRefused(bench_.cache->Append(0, k, v, {}, four), "row 1 begins at token 4 of 3");
  ExpectRefused(bench_.cache->Append(0, k, v, {}, negative), "row 0 begins at token -1 of 3");
  ExpectRefused(bench_.cache->Append(0, k, v, counts, starts), "row 1 takes 3 of 2 tokens");
}

TEST_F(KvCacheRefusals, MoreTokensAtOnceThanAnInt) {
  KvInput k = bench_.k.Slice(140, 1);
  k.desc.dims = Dims{2, 2, (int64_t{1} << 32) + 1, 64};
  k.desc.strides = Dims{0, 0, 0, 1};
  const int64_t counts[] = {1, 1};
  ExpectRefused(bench_.cache->Append(0, k, k, counts), "4294967297 tokens at once, of at most");
}

TEST_F(KvCacheRefusals, StreamsOfOtherEngines) {
  const Engine other = Engine::Create({.threads = 1}).value();
  ExpectRefused(
      bench_.cache->Append(Stream(other), 0, bench_.k.Slice(140, 1), bench_.v.Slice(140, 1)),
      "a stream of another engine");
}

TEST_F(KvCacheRefusals, ShapesAndTypesThatAreNotTheCaches) {
  const KvInput k = bench_.k.Slice(140, 3), v = bench_.v.Slice(140, 3);
  KvInput other = k;
  (*other.desc.dims)[1] = 3;
  ExpectRefused(bench_.cache->Append(0, other, v), "is not [2,2,3,64]");
  other = v;
  (*other.desc.dims)[2] = 2;
  ExpectRefused(bench_.cache->Append(0, k, other), "V for layer 0");
  other = k;
  other.desc.type = kS8;
  ExpectRefused(bench_.cache->Append(0, other, v), "is not of f32, bf16 or f16");
  other = k;
  other.data.bytes -= 1;
  ExpectRefused(bench_.cache->Append(0, other, v), "bytes, not");
  other.data.data = nullptr;
  ExpectRefused(bench_.cache->Append(0, other, v), "is null");
  ExpectRefused(bench_.cache->Append(0, KvInput{}, v), "K for layer 0");
}

TEST_F(KvCacheRefusals, NumbersThatAreNotFinite) {
  for (const float bad : {kNan, kInf, -kInf}) {
    Tokens k = bench_.k, v = bench_.v;
    k.at(1, 1, 142)[63] = bad;
    ExpectRefused(bench_.cache->Append(0, k.Slice(140, 3), v.Slice(140, 3)), "not finite");
    v.at(0, 0, 140)[0] = bad;
    ExpectRefused(bench_.cache->Append(0, bench_.k.Slice(140, 3), v.Slice(140, 3)), "not finite");
  }
  std::vector<uint16_t> half(2 * 2 * 64, 0x3c00);
  half[200] = 0x7c00;
  const Dims dims{2, 2, 1, 64};
  ExpectRefused(
      bench_.cache->Append(0, MakeKvInput(kF16, half.data(), dims), bench_.v.Slice(140, 1)),
      "not finite");
}

TEST_F(KvCacheRefusals, NumbersBeyondWhatItsTypesHold) {
  Tokens k = bench_.k;
  k.at(1, 1, 142)[63] = -65505.f;
  ExpectRefused(bench_.cache->Append(0, k.Slice(140, 3), bench_.v.Slice(140, 3)),
                "has -65505 in batch row 1, head 1, token 2, channel 63, beyond the 65504");
  std::vector<uint16_t> bf16(2 * 2 * 64, 0x3f80);
  bf16[7] = F32ToBF16(65536.f);  // which 65504 rounds to
  ExpectRefused(bench_.cache->Append(0, MakeKvInput(kBF16, bf16.data(), {2, 2, 1, 64}),
                                     bench_.v.Slice(140, 1)),
                "batch row 0, head 0, token 0, channel 7, beyond");
}

// Whatever f32 holds, infinity of f16 is none of it.
TEST(KvCacheInputs, InfinityOfHalfTheBits) {
  const Bench bench = MakeBench(SmallOptions("f32", 10), 1);
  std::vector<uint16_t> half(2 * 2 * 64, 0x3c00);
  half[200] = 0x7c00;
  ExpectRefused(
      bench.cache->Append(0, MakeKvInput(kF16, half.data(), {2, 2, 1, 64}), bench.v.Slice(0, 1)),
      "not finite");
}

// A code times its scale, before its real zero point is subtracted, is up to a group's span.
TEST(KvCacheInputs, RealZeroPointsHaveHalfTheRoom) {
  Bench bench = MakeBench(SmallOptions("u4:g32:rzp:sf32", 10), 10);
  bench.k.at(0, 0, 3)[5] = 1.8e38f;
  ExpectRefused(bench.Append(0, 10), "beyond the 1.70141e+38");
  bench.k.at(0, 0, 3)[5] = 1.7e38f;
  EXPECT_TRUE(bench.Append(0, 10).ok());
}

// A rotation adds up the channels of a block.
TEST(KvCacheInputs, RotatedNumbersHaveLessRoom) {
  Bench bench = MakeBench(SmallOptions("rotKV4_g64_R128_s4", 10), 10);
  bench.k.at(0, 0, 3)[5] = 65504.f / 8 + 8;
  ExpectRefused(bench.Append(0, 10), "beyond the 8188");
  bench.k.at(0, 0, 3)[5] = 65504.f / 8 - 8;
  EXPECT_TRUE(bench.Append(0, 10).ok());
}

// Neither tokens that a row does not take nor what is between the rows of a view is looked at.
TEST(KvCacheInputs, OnlyWhatIsTakenIsLookedAt) {
  const Bench bench = MakeBench(SmallOptions("int4_g32", 16), 1);
  std::vector<float> memory(((2 * 2 - 1) * 9 + 3) * 64, kNan);  // tokens 6 to 8 of 9, to the end
  for (int64_t row = 0; row < 4; ++row) {
    for (int64_t i = 0; i < 2 * 64; ++i) memory[row * 9 * 64 + i] = 0.5f;
  }
  KvInput input;
  input.desc.type = kF32;
  input.desc.dims = Dims{2, 2, 3, 64};
  input.desc.strides = Dims{2 * 9 * 64, 9 * 64, 64, 1};
  input.data = {memory.data(), memory.size() * sizeof(float)};
  const int64_t counts[] = {2, 1};
  const absl::Status status = bench.cache->Append(0, input, input, counts);
  EXPECT_TRUE(status.ok()) << status;
  for (const double x : Stored(*bench.cache, 0, false, 1, 1)) EXPECT_NEAR(x, 0.5, 1e-3);
  ExpectRefused(bench.cache->Append(0, input, input), "batch row 0, head 0, token 2, channel 0");
}

TEST_F(KvCacheRefusals, CropsThatCannotBe) {
  ExpectRefused(bench_.cache->Crop(141), "has 140 tokens and cannot be cropped to 141");
  ExpectRefused(bench_.cache->Crop(-1), "cropped to -1");
  ExpectRefused(bench_.cache->Crop(139), "in full precision");
  const int64_t three[] = {1, 2, 3};
  ExpectRefused(bench_.cache->Crop(three), "3 lengths for a batch of 2");
  const int64_t none[] = {0, 0};
  ExpectRefused(bench_.cache->Crop(none, 2), "there is no layer 2: the cache has 2");
}

TEST_F(KvCacheRefusals, RowsThatAreNotThere) {
  const int64_t beyond[] = {0, 2}, negative[] = {-1, 0}, three[] = {0, 1, 0};
  ExpectRefused(bench_.cache->Reorder(beyond), "there is no batch row 2: the cache has 2");
  ExpectRefused(bench_.cache->Reorder(negative), "there is no batch row -1: the cache has 2");
  ExpectRefused(bench_.cache->Reorder(three), "3 rows for a batch of 2");
  const int64_t both[] = {1, 0};
  ExpectRefused(bench_.cache->Reorder(both, 2), "there is no layer 2: the cache has 2");
}

TEST_F(KvCacheRefusals, QueriesThatDoNotFit) {
  ExpectRefused(bench_.cache->Attention({.query_heads = 3}).status(), "3 query heads over 2");
  ExpectRefused(bench_.cache->Attention({.query_heads = 0}).status(), "0 query heads");
  ExpectRefused(bench_.cache->Attention({.query_heads = 2, .query_tokens = 0}).status(),
                "0 query tokens");
  ExpectRefused(bench_.cache->Attention({.query_heads = 2, .type = kS8}).status(), "type s8");
  const auto attention = bench_.cache->Attention({.query_heads = 2, .query_tokens = 141});
  ASSERT_TRUE(attention.ok()) << attention.status();
  std::vector<float> q(2 * 2 * 141 * 64), out(q.size(), 3.f);
  const size_t bytes = q.size() * sizeof(float);
  const Stream stream(bench_.cache->engine());
  ExpectRefused((*attention)->Execute(stream, 2, {q.data(), bytes}, {out.data(), bytes}),
                "there is no layer 2: the cache has 2");
  const auto one = bench_.cache->Attention({.query_heads = 2}).value();
  const size_t of_one = bytes / 141;
  ExpectRefused(one->Execute(stream, 0, {q.data(), of_one - 1}, {out.data(), of_one}),
                "bytes, not");
  for (const float x : out) EXPECT_EQ(x, 3.f);
}

// Stored if that is asked for: then only values of its own group turn to NaN.
TEST(KvCacheNonFinite, StaysWithinItsGroup) {
  for (const char* scheme : {"int4_g32", "int8_th", "kivi4", "nf4_g32", "int4zp_g32", "q8_0"}) {
    KvCacheOptions options = SmallOptions(scheme, 256);
    options.allow_non_finite = true;
    Bench bench = MakeBench(options, 256);
    bench.k.at(1, 0, 37)[3] = kNan;
    ASSERT_TRUE(bench.Append(0, 256).ok());
    const Dims group = bench.cache->tensor(0, false).value()->GroupShape();
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t h = 0; h < 2; ++h) {
        const std::vector<double> stored = Stored(*bench.cache, 0, false, b, h);
        for (int64_t i = 0; i < 256 * 64; ++i) {
          const int64_t t = i / 64, d = i % 64;
          const bool mate =
              b == 1 && h == 0 && t / group[2] == 37 / group[2] && d / group[3] == 3 / group[3];
          EXPECT_EQ(std::isnan(stored[i]), mate) << scheme << " token " << t << " channel " << d;
        }
      }
    }
  }
}

TEST(KvCacheZeros, GroupsWithoutARangeReadBackAsTheyWere) {
  for (const NamedCacheScheme& named : NamedCacheSchemes()) {
    Bench bench = MakeBench(SmallOptions(std::string(named.name), 140), 140);
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t t = 0; t < 140; ++t) std::fill_n(bench.k.at(b, 1, t), 64, 0.f);
    }
    ASSERT_TRUE(bench.Append(0, 140).ok()) << named.name;
    for (const double x : Stored(*bench.cache, 0, false, 1, 1)) ASSERT_EQ(x, 0) << named.name;
  }
}

}  // namespace
}  // namespace kvant
