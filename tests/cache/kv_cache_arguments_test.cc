// Indices, dims, handles and options that are not there: each is refused, or counts nothing, as the
// headers say.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "kvant/cache/import_export.h"
#include "kvant/cache/kv_attention.h"
#include "kvant/cache/kv_cache.h"
#include "kvant/graph/status.h"
#include "kvant/tests/cache/kv_cache_testing.h"

namespace kvant {
namespace {

using cache_testing::Bench;
using cache_testing::MakeBench;
using cache_testing::SmallOptions;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

void ExpectRefused(const absl::Status& status, const std::string& words) {
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(words));
}

int64_t TokensIn(const std::array<KvRange, kKvSegmentKinds>& ranges) {
  return ranges[0].tokens + ranges[1].tokens + ranges[2].tokens;
}

class KvCacheArguments : public testing::Test {
 protected:
  KvCacheArguments() : bench_(MakeBench(SmallOptions("int4_g64_R128_s4", 150), 160)) {
    EXPECT_TRUE(bench_.Append(0, 140).ok());
  }
  const KvCache& cache() const { return *bench_.cache; }
  Bench bench_;
};

TEST_F(KvCacheArguments, LayersThatAreNotThere) {
  const auto attention = bench_.cache->Attention({.query_heads = 2}).value();
  const Stream stream(cache().engine());
  std::vector<float> q(2 * 2 * 64), out(q.size());
  const size_t bytes = q.size() * sizeof(float);
  EXPECT_EQ(cache().scheme(1)->k.residual, 128);
  EXPECT_EQ(cache().tensor(1, true).value()->name(), "V");
  EXPECT_EQ(attention->compiled(1)->backend(), "cpu");
  for (const int64_t layer : {int64_t{2}, int64_t{-1}, int64_t{99}, kLeast, kMost}) {
    const std::string words = "there is no layer " + std::to_string(layer) + ": the cache has 2";
    ExpectRefused(cache().scheme(layer).status(), words);
    ExpectRefused(cache().tensor(layer, false).status(), words);
    ExpectRefused(attention->compiled(layer).status(), words);
    ExpectRefused(attention->Execute(stream, layer, {q.data(), bytes}, {out.data(), bytes}), words);
    ExpectRefused(bench_.cache->Append(layer, bench_.k.Slice(140, 1), bench_.v.Slice(140, 1)),
                  words);
    EXPECT_EQ(cache().length(layer), 0);
    EXPECT_EQ(TokensIn(cache().Ranges(layer, false, 0)), 0);
    EXPECT_EQ(cache().part(layer, true, KvPart::kCodes).data, nullptr);
    EXPECT_EQ(cache().part(layer, true, KvPart::kCodes).bytes, 0u);
  }
}

TEST_F(KvCacheArguments, RowsThatAreNotThere) {
  EXPECT_EQ(cache().length(0, 1), 140);
  EXPECT_EQ(TokensIn(cache().Ranges(0, true, 1)), 140);
  for (const int64_t row : {int64_t{2}, int64_t{-1}, int64_t{1000000000}, kLeast, kMost}) {
    EXPECT_EQ(cache().length(0, row), 0);
    EXPECT_EQ(TokensIn(cache().Ranges(0, true, row)), 0);
  }
}

TEST_F(KvCacheArguments, PartsThatAreNotThere) {
  const KvTensor& tensor = *cache().tensor(0, false).value();
  for (const int part : {kKvParts, 99, 255}) {
    EXPECT_FALSE(tensor.has(static_cast<KvPart>(part)));
    EXPECT_EQ(tensor.part(static_cast<KvPart>(part)).rank(), -1);
    EXPECT_EQ(cache().part(0, false, static_cast<KvPart>(part)).data, nullptr);
  }
  EXPECT_EQ(InfoOf(static_cast<GgmlBlock>(99)).elements, 0);
  EXPECT_TRUE(InfoOf(static_cast<GgmlBlock>(99)).name.empty());
}

TEST_F(KvCacheArguments, DimsThatNoMemoryHas) {
  const float x = 0;
  const KvInput v = bench_.v.Slice(140, 1);
  const Dims cases[] = {{2, 2, kUnknownDim, 64},
                        {kUnknownDim, kUnknownDim, kUnknownDim, kUnknownDim},
                        {2, 2, -1, 64},
                        {2, 2, kMost, 64},
                        {2, 2, int64_t{1} << 62, 64},
                        {kMost, kMost, kMost, kMost},
                        {kMost, kMost, 0, kMost},
                        Dims(13, 1)};
  for (const Dims& dims : cases) {
    SCOPED_TRACE(DimsToString(dims));
    const KvInput k = MakeKvInput(kF32, &x, dims);
    EXPECT_LE(k.data.bytes, sizeof(float));
    const absl::Status status = bench_.cache->Append(0, k, v);
    ExpectRefused(status, "K for layer 0 (f32[");
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("-9223372036854775808")));
    // Of V as of K.
    ExpectRefused(bench_.cache->Append(0, v, k), "V for layer 0 (f32[");
  }
  ExpectRefused(bench_.cache->Append(0, MakeKvInput(kF32, &x, cases[0]), v),
                "(f32[2,2,?,64]) has dims that are not known");
  EXPECT_EQ(MakeKvInput(kUndef, &x, {2, 2, 1, 64}).data.bytes, 0u);
  ExpectRefused(bench_.cache->Append(0, MakeKvInput(kUndef, &x, {2, 2, 1, 64}), v),
                "is not of f32, bf16 or f16");
  KvInput far = v;
  far.desc.strides = Dims{kMost, kMost, kMost, kMost};
  EXPECT_EQ(KvInputBytes(far.desc), 0);
  ExpectRefused(bench_.cache->Append(0, far, v), "overflows 64 bits");
  far.desc.strides = Dims{64};
  EXPECT_EQ(KvInputBytes(far.desc), 0);
  ExpectRefused(bench_.cache->Append(0, far, v), "1 strides for 4 dims");
}

// As Execute does.
TEST_F(KvCacheArguments, HandlesThatAreNotAligned) {
  const Dims dims{2, 2, 1, 64};
  std::vector<float> memory(2 * 2 * 64 + 1);
  const auto at = [&](DataType type, int offset) {
    return MakeKvInput(type, reinterpret_cast<const char*>(memory.data()) + offset, dims);
  };
  for (const auto& [type, offset, words] : {std::tuple(kF32, 2, "is not aligned to 4 bytes"),
                                            std::tuple(kF32, 1, "is not aligned to 4 bytes"),
                                            std::tuple(kF16, 1, "is not aligned to 2 bytes"),
                                            std::tuple(kBF16, 3, "is not aligned to 2 bytes")}) {
    ExpectRefused(bench_.cache->Append(0, at(type, offset), at(type, 0)), words);
    ExpectRefused(bench_.cache->Append(0, at(type, 0), at(type, offset)), words);
  }
  EXPECT_EQ(cache().length(0), 140);
  EXPECT_TRUE(bench_.cache->Append(0, at(kF16, 2), at(kF32, 4)).ok());
}

TEST_F(KvCacheArguments, QueriesBeyondAllBounds) {
  for (const int64_t heads : {kMost - 1, int64_t{1} << 62, kLeast, int64_t{-2}}) {
    const auto attention = bench_.cache->Attention({.query_heads = heads});
    EXPECT_FALSE(attention.ok()) << heads;
  }
  for (const int64_t tokens : {kMost, kLeast, int64_t{151}, int64_t{0}}) {
    ExpectRefused(bench_.cache->Attention({.query_heads = 2, .query_tokens = tokens}).status(),
                  "query tokens");
  }
  const auto attention = bench_.cache->Attention({.query_heads = 2}).value();
  const Stream stream(cache().engine());
  std::vector<float> q(2 * 2 * 64 + 1);
  const size_t bytes = 2 * 2 * 64 * sizeof(float);
  ExpectRefused(attention->Execute(stream, 0, {}, {q.data(), bytes}), "is null");
  ExpectRefused(attention->Execute(stream, 0, {q.data(), bytes}, {}), "is null");
  ExpectRefused(attention->Execute(stream, 0, {reinterpret_cast<char*>(q.data()) + 2, bytes},
                                   {q.data(), bytes}),
                "is not aligned to 4 bytes");
}

TEST(KvCacheOptionsArguments, SizesBeyondAllBounds) {
  const auto refused = [](const std::string& words, auto change) {
    KvCacheOptions options = SmallOptions("int4_g32", 16);
    change(options);
    ExpectRefused(KvCache::BytesFor(options).status(), words);
  };
  refused("v_head_size of -3", [](KvCacheOptions& o) { o.v_head_size = -3; });
  refused("layers, of at most 65536", [](KvCacheOptions& o) {
    o.layers = int64_t{1} << 40;
    o.batch = o.heads = o.capacity = 1;
  });
  for (int64_t KvCacheOptions::*field : {&KvCacheOptions::capacity, &KvCacheOptions::batch}) {
    refused("1073741825", [field](KvCacheOptions& o) {
      o.layers = o.batch = o.heads = o.capacity = 1;
      o.*field = (int64_t{1} << 30) + 1;
    });
  }
  for (int64_t KvCacheOptions::*field :
       {&KvCacheOptions::layers, &KvCacheOptions::batch, &KvCacheOptions::heads,
        &KvCacheOptions::head_size, &KvCacheOptions::capacity}) {
    for (const int64_t bad : {kLeast, int64_t{-1}, int64_t{0}, kMost}) {
      refused("a cache ", [&, field = field](KvCacheOptions& o) { o.*field = bad; });
    }
  }
  // One group takes 2^30 tokens, of a sequence of 1.
  refused("layers, batch, heads, head size and capacity", [](KvCacheOptions& o) {
    o.layers = o.batch = o.capacity = 1;
    o.heads = int64_t{1} << 22;
    o.head_size = int64_t{1} << 20;
    o.schemes = {*ParseCacheScheme("u4:channel:g1073741824:rzp+bulk1073741824")};
  });
  refused("0 schemes", [](KvCacheOptions& o) { o.schemes.clear(); });
}

// Schemes that no text says.
TEST(KvCacheOptionsArguments, SchemesThatContradictThemselves) {
  const auto refused = [](const std::string& words, auto change) {
    KvCacheOptions options = SmallOptions("int4_g32", 16);
    change(options.schemes[0].v);
    ExpectRefused(KvCache::BytesFor(options).status(), words);
    ExpectRefused(options.schemes[0].v.Check(64), words);
  };
  refused("is none that K and V have", [](KvStorage& s) { s.format.type = kS32; });
  refused("is none that K and V have", [](KvStorage& s) { s.format.type = kUndef; });
  refused("its scales are not", [](KvStorage& s) { s.format.scale_type = kS8; });
  refused("no other group but channel",
          [](KvStorage& s) { s.format.groups = NumberFormat::Groups::kHead; });
  for (const auto integers :
       {NumberFormat::ZeroPoints::kBytes, NumberFormat::ZeroPoints::kPacked}) {
    refused("codes of f8_e4m3 have no integers as zero points", [&](KvStorage& s) {
      s.format.type = kF8E4M3;
      s.format.zero_points = integers;
    });
  }
  refused("nf4 has 16 entries",
          [](KvStorage& s) { s.format = {.type = kU8, .codebook = FindCodebook("nf4")}; });
  refused("nf4 has 16 entries",
          [](KvStorage& s) { s.format = {.type = kS4, .codebook = FindCodebook("nf4")}; });
  refused("no zero points", [](KvStorage& s) { s.format.codebook = FindCodebook("nf4"); });
  for (const int64_t tokens : {int64_t{-1}, (int64_t{1} << 30) + 1}) {
    const std::string number = std::to_string(tokens);
    refused("sinks of " + number, [=](KvStorage& s) { s.sinks = tokens; });
    refused("a window of " + number, [=](KvStorage& s) { s.residual = tokens; });
  }
  refused("type f8_e5m2", [](KvStorage& s) { s.window_type = kF8E5M2; });
  const KvStorage storage = *ParseKvStorage("u4:g32:rzp");
  for (const int64_t size : {int64_t{0}, int64_t{-64}, kLeast}) {
    ExpectRefused(storage.Check(size), "for heads of");
  }
  EXPECT_TRUE(storage.Check(int64_t{1} << 62).ok());
}

}  // namespace
}  // namespace kvant
