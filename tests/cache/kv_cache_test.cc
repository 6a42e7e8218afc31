// What a KvCache stores and attends to, for every named scheme, and what holds whatever happens to
// it.
#include "kvant/cache/kv_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "kvant/cache/kv_attention.h"
#include "kvant/tests/cache/kv_cache_testing.h"

namespace kvant {
namespace {

using cache_testing::Attend;
using cache_testing::AttendByDefinition;
using cache_testing::Bench;
using cache_testing::Contents;
using cache_testing::Difference;
using cache_testing::ErrorBound;
using cache_testing::MakeBench;
using cache_testing::Queries;
using cache_testing::Rotate;
using cache_testing::SmallOptions;
using cache_testing::Stored;
using cache_testing::Tokens;

constexpr int64_t kQueryHeads = 4;

std::vector<std::string> SchemeNames() {
  std::vector<std::string> names;
  for (const NamedCacheScheme& named : NamedCacheSchemes()) names.emplace_back(named.name);
  return names;
}

std::vector<float> QueriesFor(const KvCache& cache, uint64_t seed) {
  return Queries(seed, cache.options().batch * kQueryHeads * cache.options().head_size);
}

class KvCacheSchemeTest : public testing::TestWithParam<std::string> {};

TEST_P(KvCacheSchemeTest, StoresWhatWasAppendedInOrder) {
  const Bench bench = MakeBench(SmallOptions(GetParam(), 330), 330);
  ASSERT_TRUE(bench.Append(0, 330, 47).ok());
  for (const bool values : {false, true}) {
    const Tokens& tokens = values ? bench.v : bench.k;
    const KvTensor& tensor = **bench.cache->tensor(1, values);
    const double bound = ErrorBound(tensor.storage(), 25);
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t h = 0; h < 2; ++h) {
        std::vector<double> stored = Stored(*bench.cache, 1, values, b, h);
        ASSERT_EQ(stored.size(), 330u * 64);
        if (tensor.rotation() != 0) Rotate(tensor.rotation(), stored);
        for (int64_t i = 0; i < 330 * 64; ++i) {
          ASSERT_NEAR(stored[i], tokens.at(b, h, i / 64)[i % 64], bound)
              << (values ? "V " : "K ") << b << " " << h << " token " << i / 64 << " channel "
              << i % 64;
        }
      }
    }
  }
}

TEST_P(KvCacheSchemeTest, AttendsToWhatItStores) {
  KvCacheOptions options = SmallOptions(GetParam(), 420);
  const Bench bench = MakeBench(options, 420);
  int64_t from = 0;
  // Around every boundary: nothing, the sinks, before and after windows are full.
  for (const int64_t to : {1, 3, 4, 5, 31, 32, 33, 127, 128, 129, 132, 133, 255, 257, 300, 420}) {
    ASSERT_TRUE(bench.Append(from, to).ok());
    from = to;
    for (const int64_t layer : {0, 1}) {
      const std::vector<float> q = QueriesFor(*bench.cache, 7 + to);
      const double error = Difference(Attend(*bench.cache, layer, q, kQueryHeads),
                                      AttendByDefinition(*bench.cache, layer, q, kQueryHeads));
      EXPECT_LE(error, 5e-4) << to << " tokens, layer " << layer;
    }
  }
}

// Stored codes are the same on the oracle, which shares no arithmetic with the CPU's kernels, but
// where a quotient is nearly a tie.
TEST_P(KvCacheSchemeTest, StoresAsTheOracleDoes) {
  const Engine oracle = Engine::Create({.backends = {"oracle"}, .threads = 1}).value();
  const Bench cpu = MakeBench(SmallOptions(GetParam(), 200), 200);
  const Bench judge = MakeBench(SmallOptions(GetParam(), 200), 200, &oracle);
  ASSERT_TRUE(cpu.Append(0, 200, 67).ok());
  ASSERT_TRUE(judge.Append(0, 200, 67).ok());
  int64_t differing = 0, all = 0;
  for (const bool values : {false, true}) {
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t h = 0; h < 2; ++h) {
        const std::vector<double> got = Stored(*cpu.cache, 0, values, b, h);
        const std::vector<double> want = Stored(*judge.cache, 0, values, b, h);
        ASSERT_EQ(got.size(), want.size());
        for (size_t i = 0; i < got.size(); ++i) differing += got[i] != want[i];
        all += static_cast<int64_t>(got.size());
      }
    }
  }
  // Rotated numbers differ in their last bits, and so may the last bit of a scale, of a whole
  // group.
  const bool rotates = cpu.cache->tensor(0, false).value()->rotation() != 0;
  EXPECT_LE(differing, all / (rotates ? 500 : 5000)) << "of " << all;
}

TEST_P(KvCacheSchemeTest, ChunksOfThePromptDoNotMatter) {
  const Bench whole = MakeBench(SmallOptions(GetParam(), 300), 300);
  const Bench pieces = MakeBench(SmallOptions(GetParam(), 300), 300);
  const Bench tokens = MakeBench(SmallOptions(GetParam(), 300), 300);
  ASSERT_TRUE(whole.Append(0, 300).ok());
  ASSERT_TRUE(pieces.Append(0, 300, 83).ok());
  ASSERT_TRUE(tokens.Append(0, 300, 1).ok());
  for (int64_t row = 0; row < 2; ++row) {
    const std::string want = Contents(*whole.cache, 1, row);
    EXPECT_EQ(Contents(*pieces.cache, 1, row), want);
    EXPECT_EQ(Contents(*tokens.cache, 1, row), want);
  }
}

TEST_P(KvCacheSchemeTest, TheRestOfTheBatchDoesNotMatter) {
  KvCacheOptions options = SmallOptions(GetParam(), 300);
  const Bench both = MakeBench(options, 300);
  // Rows take their tokens at different times.
  for (int64_t t = 0; t < 300; ++t) {
    const int64_t late[] = {t < 200 ? 1 : 0, t < 100 ? 0 : 1};
    ASSERT_TRUE(both.cache->Append(0, both.k.Slice(t, 1), both.v.Slice(t, 1), late).ok());
  }
  EXPECT_EQ(both.cache->length(0, 0), 200);
  EXPECT_EQ(both.cache->length(0, 1), 200);
  options.batch = 1;
  for (int64_t row = 0; row < 2; ++row) {
    Bench alone = MakeBench(options, 1);
    const Tokens k = both.k.Row(row), v = both.v.Row(row);
    const int64_t from = row == 0 ? 0 : 100;
    ASSERT_TRUE(alone.cache->Append(0, k.Slice(from, 200), v.Slice(from, 200)).ok());
    EXPECT_EQ(Contents(*both.cache, 0, row), Contents(*alone.cache, 0, 0)) << row;
  }
}

TEST_P(KvCacheSchemeTest, CropThenAppendIsNeverHavingGoneFurther) {
  KvCacheOptions options = SmallOptions(GetParam(), 320);
  options.rollback = 5;
  for (const int64_t turn : {1, 4, 6, 100, 128, 130, 133, 256, 259, 290}) {
    const Bench straight = MakeBench(options, 320);
    const Bench back = MakeBench(options, 320);
    ASSERT_TRUE(straight.Append(0, 300, 59).ok());
    ASSERT_TRUE(back.Append(0, turn, 59).ok());
    // Others' tokens, taken back.
    const Tokens other(99, 2, 2, 5, 64);
    for (const int64_t layer : {0, 1}) {
      ASSERT_TRUE(back.cache->Append(layer, other.Slice(0, 5), other.Slice(0, 5)).ok());
    }
    const absl::Status cropped = back.cache->Crop(turn);
    ASSERT_TRUE(cropped.ok()) << cropped;
    ASSERT_TRUE(back.Append(turn, 300, 59).ok());
    for (int64_t row = 0; row < 2; ++row) {
      EXPECT_EQ(Contents(*back.cache, 1, row), Contents(*straight.cache, 1, row)) << turn;
    }
  }
}

TEST_P(KvCacheSchemeTest, WindowsStayWithinTheirBoundAndDrain) {
  const Bench bench = MakeBench(SmallOptions(GetParam(), 400), 400);
  for (int64_t t = 0; t < 400; ++t) {
    ASSERT_TRUE(bench.Append(t, t + 1).ok());
    for (const bool values : {false, true}) {
      const auto ranges = bench.cache->Ranges(0, values, 0);
      const KvLayout& layout = bench.cache->tensor(0, values).value()->layout();
      // Every token is somewhere, once.
      ASSERT_EQ(ranges[0].tokens + ranges[1].tokens + ranges[2].tokens, t + 1);
      ASSERT_LE(ranges[0].tokens, layout.sinks());
      const int64_t residual = layout.residual();
      if (residual == 0) {
        ASSERT_EQ(ranges[2].tokens, 0);
      } else if (layout.bulk()) {
        // Of t tokens before this one, all whole windows are quantized.
        ASSERT_EQ(ranges[1].tokens, t / residual * residual);
      } else {
        ASSERT_EQ(ranges[1].tokens, std::max<int64_t>(0, t - layout.sinks() - residual));
        ASSERT_LE(ranges[2].tokens, residual + 1);
      }
    }
  }
}

TEST_P(KvCacheSchemeTest, FrozenTokensAreNeverRewritten) {
  const Bench bench = MakeBench(SmallOptions(GetParam(), 400), 400);
  ASSERT_TRUE(bench.Append(0, 260).ok());
  const auto frozen = bench.cache->Ranges(0, false, 0)[1].tokens;
  std::vector<double> before = Stored(*bench.cache, 0, false, 0, 1);
  const int64_t sinks = bench.cache->Ranges(0, false, 0)[0].tokens;
  before.resize((sinks + frozen) * 64);
  ASSERT_TRUE(bench.Append(260, 400, 1).ok());
  std::vector<double> after = Stored(*bench.cache, 0, false, 0, 1);
  after.resize(before.size());
  EXPECT_EQ(before, after);
}

TEST_P(KvCacheSchemeTest, ReorderAndForkCarryEverything) {
  // Of packed zero points, heads of 301 groups begin within a byte.
  KvCacheOptions options = SmallOptions(GetParam(), 301);
  options.batch = 5;
  const Bench bench = MakeBench(options, 300);
  const int64_t counts[] = {150, 3, 0, 140, 133};
  for (const int64_t layer : {0, 1}) {
    ASSERT_TRUE(
        bench.cache->Append(layer, bench.k.Slice(0, 150), bench.v.Slice(0, 150), counts).ok());
  }
  std::vector<std::string> rows;
  for (int64_t row = 0; row < 5; ++row) rows.push_back(Contents(*bench.cache, 1, row));
  const auto fork = bench.cache->Fork();
  ASSERT_TRUE(fork.ok()) << fork.status();
  // A cycle of three, one that stays, and copies.
  for (const std::vector<int64_t>& order :
       {std::vector<int64_t>{1, 2, 0, 3, 0}, {4, 4, 4, 0, 0}, {1, 0, 2, 4, 3}, {0, 0, 0, 0, 0}}) {
    ASSERT_TRUE(bench.cache->Reorder(order).ok());
    std::vector<std::string> moved;
    for (int64_t row = 0; row < 5; ++row) moved.push_back(rows[order[row]]);
    rows = moved;
    for (int64_t row = 0; row < 5; ++row) {
      EXPECT_EQ(Contents(*bench.cache, 1, row), rows[row]) << row;
    }
  }
  // The fork has not moved, and goes its own way.
  EXPECT_EQ((*fork)->length(1, 0), 150);
  EXPECT_EQ((*fork)->length(1, 1), 3);
  ASSERT_TRUE((*fork)->Append(1, bench.k.Slice(150, 9), bench.v.Slice(150, 9)).ok());
  EXPECT_EQ((*fork)->length(1, 2), 9);
  for (int64_t row = 0; row < 5; ++row) EXPECT_EQ(Contents(*bench.cache, 1, row), rows[row]);
}

INSTANTIATE_TEST_SUITE_P(Named, KvCacheSchemeTest, testing::ValuesIn(SchemeNames()),
                         [](const auto& info) { return info.param; });

TEST(KvCache, QueriesOfAPromptSeeNothingBehindThem) {
  for (const char* scheme : {"f16", "int4_g32", "kivi2", "int4_g64_R128_s4"}) {
    KvCacheOptions options = SmallOptions(scheme, 200);
    const Bench bench = MakeBench(options, 200);
    const int64_t counts[] = {190, 160};
    for (const int64_t layer : {0, 1}) {
      ASSERT_TRUE(
          bench.cache->Append(layer, bench.k.Slice(0, 190), bench.v.Slice(0, 190), counts).ok());
    }
    const auto attention = bench.cache->Attention({.query_heads = kQueryHeads, .query_tokens = 3});
    ASSERT_TRUE(attention.ok()) << attention.status();
    const std::vector<float> q = Queries(5, 2 * kQueryHeads * 3 * 64);
    std::vector<float> out(q.size());
    const size_t bytes = q.size() * sizeof(float);
    const absl::Status status =
        (*attention)
            ->Execute(Stream(bench.cache->engine()), 0, {q.data(), bytes}, {out.data(), bytes});
    ASSERT_TRUE(status.ok()) << status;
    // The last query of three sees everything, as one alone does.
    std::vector<float> last_q(2 * kQueryHeads * 64), last_out(last_q.size());
    for (int64_t row = 0; row < 2 * kQueryHeads; ++row) {
      std::copy_n(&q[(row * 3 + 2) * 64], 64, &last_q[row * 64]);
      std::copy_n(&out[(row * 3 + 2) * 64], 64, &last_out[row * 64]);
    }
    EXPECT_LE(Difference(last_out, AttendByDefinition(*bench.cache, 0, last_q, kQueryHeads)), 5e-4)
        << scheme;
    // The first of row 1 sees all but the last two.
    if (bench.cache->scheme(0)->k.residual > 0) continue;
    ASSERT_TRUE(bench.cache->Crop(158).ok());
    for (int64_t row = kQueryHeads; row < 2 * kQueryHeads; ++row) {
      std::copy_n(&q[row * 3 * 64], 64, &last_q[row * 64]);
      std::copy_n(&out[row * 3 * 64], 64, &last_out[row * 64]);
    }
    const std::vector<double> want = AttendByDefinition(*bench.cache, 0, last_q, kQueryHeads);
    const size_t half = last_out.size() / 2;
    EXPECT_LE(
        Difference({last_out.begin() + half, last_out.end()}, {want.begin() + half, want.end()}),
        5e-4)
        << scheme;
  }
}

TEST(KvCache, LayersHaveSchemesOfTheirOwn) {
  KvCacheOptions options = SmallOptions("kivi2", 200);
  options.layers = 3;
  options.schemes = {*ParseCacheScheme("f16"), *ParseCacheScheme("kivi2"),
                     *ParseCacheScheme("s8:token/u4:g32:zp")};
  const Bench bench = MakeBench(options, 200);
  ASSERT_TRUE(bench.Append(0, 200, 50).ok());
  for (int64_t layer = 0; layer < 3; ++layer) {
    const std::vector<float> q = QueriesFor(*bench.cache, 3);
    EXPECT_LE(Difference(Attend(*bench.cache, layer, q, kQueryHeads),
                         AttendByDefinition(*bench.cache, layer, q, kQueryHeads)),
              5e-4);
  }
  const auto attention = bench.cache->Attention({.query_heads = kQueryHeads});
  EXPECT_EQ(*attention, *bench.cache->Attention({.query_heads = kQueryHeads}));
  EXPECT_EQ((*attention)->compiled(0)->backend(), "cpu");
}

TEST(KvCache, HeadsOfManySizes) {
  for (const auto& [size, v_size] : {std::pair<int64_t, int64_t>{80, 80},
                                     {96, 96},
                                     {128, 64},
                                     {256, 256},
                                     {512, 512},
                                     {192, 128}}) {
    for (const char* scheme :
         {"u4:g16:rzp+window8", "s8:token", "u2:channel:g16:rzp+bulk32/u4:g16:zp"}) {
      KvCacheOptions options = SmallOptions(scheme, 100);
      options.head_size = size;
      options.v_head_size = v_size;
      const Bench bench = MakeBench(options, 100);
      ASSERT_TRUE(bench.Append(0, 100, 33).ok());
      const std::vector<float> q = QueriesFor(*bench.cache, 3);
      EXPECT_LE(Difference(Attend(*bench.cache, 0, q, kQueryHeads),
                           AttendByDefinition(*bench.cache, 0, q, kQueryHeads)),
                5e-4)
          << size << " " << scheme;
    }
  }
}

// One group in each head, of several heads that are quantized together.
TEST(KvCache, AHeadThatIsOneGroup) {
  const Engine oracle = Engine::Create({.backends = {"oracle"}, .threads = 1}).value();
  for (const char* scheme :
       {"q8_0", "q4_0", "q4_1", "iq4_nl", "int4_g32", "int4zp_g32", "nf4_g32"}) {
    KvCacheOptions options = SmallOptions(scheme, 20);
    options.heads = 5;
    options.head_size = 32;
    const Bench cpu = MakeBench(options, 20), judge = MakeBench(options, 20, &oracle);
    ASSERT_TRUE(cpu.Append(0, 20, 3).ok());
    ASSERT_TRUE(judge.Append(0, 20, 3).ok());
    for (int64_t h = 0; h < 5; ++h) {
      const std::vector<double> got = Stored(*cpu.cache, 0, false, 1, h);
      const std::vector<double> want = Stored(*judge.cache, 0, false, 1, h);
      for (size_t i = 0; i < want.size(); ++i) {
        ASSERT_NEAR(got[i], want[i], 1e-6) << scheme << " head " << h << " element " << i;
      }
    }
  }
}

TEST(KvCache, WindowsOfAnyLength) {
  for (const char* scheme :
       {"u4:g32:rzp+window1", "u4:g32:rzp+window3", "u4:g32:rzp+sinks1+window6", "u4:g32:rzp+bulk7",
        "u2:channel:g3:rzp+bulk6", "s8:token+sinks9",
        "u4:channel:g5:zp+sinks2+bulk5/u4:g64:rzp+window2+f32"}) {
    const Bench bench = MakeBench(SmallOptions(scheme, 90), 90);
    for (int64_t t = 0; t < 90; t += 2) {
      ASSERT_TRUE(bench.Append(t, t + 2, 1 + t % 2).ok());
      const std::vector<float> q = QueriesFor(*bench.cache, t);
      ASSERT_LE(Difference(Attend(*bench.cache, 0, q, kQueryHeads),
                           AttendByDefinition(*bench.cache, 0, q, kQueryHeads)),
                5e-4)
          << scheme << " " << t;
    }
  }
}

TEST(KvCache, ReadersAndAWriterAtTheSameTime) {
  const Bench bench = MakeBench(SmallOptions("kivi4", 300), 300);
  ASSERT_TRUE(bench.Append(0, 100).ok());
  const auto attention = bench.cache->Attention({.query_heads = kQueryHeads});
  ASSERT_TRUE(attention.ok());
  const std::vector<float> q = QueriesFor(*bench.cache, 1);
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      std::vector<float> out(q.size());
      const size_t bytes = q.size() * sizeof(float);
      for (int j = 0; j < 50; ++j) {
        const absl::Status status =
            (*attention)
                ->Execute(Stream(bench.cache->engine()), 0, {q.data(), bytes}, {out.data(), bytes});
        EXPECT_TRUE(status.ok()) << status;
        for (const float x : out) ASSERT_TRUE(std::isfinite(x));
      }
    });
  }
  EXPECT_TRUE(bench.Append(100, 300, 1).ok());
  for (std::thread& reader : readers) reader.join();
  EXPECT_LE(Difference(Attend(*bench.cache, 0, q, kQueryHeads),
                       AttendByDefinition(*bench.cache, 0, q, kQueryHeads)),
            5e-4);
}

// Zero points of 4 bits, of odd numbers of tokens too.
TEST(KvCache, RowsThatShareBytesAreMovedApart) {
  KvCacheOptions options = SmallOptions("u4:g64:pzp", 33);
  options.batch = 3;
  options.heads = 1;
  for (const auto& [keep, tokens] : {std::pair(0, 20), std::pair(0, 21), std::pair(20, 33)}) {
    options.keep = {keep};
    const Bench bench = MakeBench(options, 33);
    ASSERT_TRUE(bench.Append(0, tokens).ok());
    std::vector<std::string> rows;
    for (int64_t row = 0; row < 3; ++row) rows.push_back(Contents(*bench.cache, 0, row));
    for (const std::vector<int64_t>& order :
         std::vector<std::vector<int64_t>>{{2, 0, 1}, {0, 2, 1}, {1, 0, 2}, {1, 1, 0}, {2, 0, 0}}) {
      ASSERT_TRUE(bench.cache->Reorder(order).ok());
      std::vector<std::string> moved;
      for (const int64_t row : order) moved.push_back(rows[row]);
      rows = std::move(moved);
      for (int64_t row = 0; row < 3; ++row) EXPECT_EQ(Contents(*bench.cache, 0, row), rows[row]);
    }
  }
}

// As the same numbers of f32 are.
TEST(KvCache, TokensOfHalfTheBitsAreStored) {
  const KvCacheOptions options = SmallOptions("int4_g64_R128_s4", 150);
  for (const DataType type : {kF16, kBF16}) {
    SCOPED_TRACE(std::string(DataTypeName(type)));
    Bench floats = MakeBench(options, 150);
    const Bench halves = MakeBench(options, 0);
    std::vector<uint16_t> memory[2];
    const auto take = [&](Tokens& tokens, std::vector<uint16_t>& to) {
      to.resize(2 * 2 * 150 * 64);
      float* const x = tokens.at(0, 0, 0);
      for (size_t i = 0; i < to.size(); ++i) {
        to[i] = type == kF16 ? F32ToF16(x[i]) : F32ToBF16(x[i]);
        x[i] = type == kF16 ? F16ToF32(to[i]) : BF16ToF32(to[i]);
      }
      return MakeKvInput(type, to.data(), {2, 2, 150, 64});
    };
    const KvInput k = take(floats.k, memory[0]), v = take(floats.v, memory[1]);
    ASSERT_TRUE(floats.Append(0, 150).ok());
    ASSERT_TRUE(halves.cache->Append(1, k, v).ok());
    EXPECT_EQ(Contents(*halves.cache, 1, 1), Contents(*floats.cache, 1, 1));
  }
}

// Append and attention of caches on the CUDA backend's kernels, by the executor. Queries of f16,
// for which packed codes are multiplied where K and V are one segment each.
TEST(KvCacheOnCudaSimtTest, AttendsToWhatItStores) {
  const struct {
    const char* scheme;
    const char* kernel;
  } cases[] = {{"int4_g32", "products of packed codes"},
               {"rotKV4_g32", "products of packed codes"},
               {"nf4_g32", "products of packed codes"},
               {"int4_g64_R128_s4", "K or V is of several segments: 3 and 3"},
               {"rotKV4_g64_R128_s4", "K or V is of several segments: 3 and 3"},
               {"kivi2", "K or V is of several segments: 2 and 2"}};
  const Engine engine = Engine::Create({.device = Device::kCudaSimt}).value();
  for (const auto& [scheme, kernel] : cases) {
    SCOPED_TRACE(scheme);
    KvCacheOptions options = SmallOptions(scheme, 300);
    options.head_size = 128;
    const Bench bench = MakeBench(options, 300, &engine);
    int64_t from = 0;
    for (const int64_t to : {3, 131, 300}) {
      ASSERT_TRUE(bench.Append(from, to).ok());
      from = to;
      const std::vector<float> q = QueriesFor(*bench.cache, 7 + to);
      const double error = Difference(Attend(*bench.cache, 1, q, kQueryHeads),
                                      AttendByDefinition(*bench.cache, 1, q, kQueryHeads));
      EXPECT_LE(error, 5e-4) << to << " tokens";
    }
    const auto attention = bench.cache->Attention({.query_heads = kQueryHeads, .type = kF16});
    ASSERT_TRUE(attention.ok()) << attention.status();
    const std::string description((*attention)->compiled(1)->kernel());
    EXPECT_NE(description.find("cuda_simt"), std::string::npos) << description;
    EXPECT_NE(description.find(kernel), std::string::npos) << description;
  }
}

}  // namespace
}  // namespace kvant
