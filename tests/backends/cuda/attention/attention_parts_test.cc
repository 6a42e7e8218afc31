// Attention over sinks, codes and a window in parts, on the executor.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kvant/backends/cuda_simt.h"
#include "kvant/cache/kv_attention.h"
#include "kvant/cache/kv_cache.h"
#include "kvant/graph/builder.h"
#include "kvant/tests/cache/kv_cache_testing.h"
#include "kvant/tools/acceptance.h"
#include "kvant/tools/graph_runner.h"
#include "kvant/tools/random_data.h"

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

// {first, tokens} of sinks, codes and window.
struct RowRanges {
  int32_t k[3][2], v[3][2];
};
// Rows whose codes of K and of V are other columns.
constexpr RowRanges kRanges[] = {
    {{{0, 4}, {650, 300}, {20, 10}}, {{0, 4}, {100, 286}, {3, 24}}},  // the ring's end; V fewer
    {{{0, 0}, {0, 0}, {0, 0}}, {{0, 0}, {0, 0}, {0, 0}}},             // no token at all
    {{{0, 0}, {10, 200}, {0, 0}}, {{0, 0}, {690, 200}, {0, 0}}},      // codes alone
    {{{0, 4}, {0, 0}, {5, 20}}, {{0, 0}, {0, 0}, {0, 24}}},           // no code
    {{{1, 1}, {5, 600}, {0, 3}}, {{0, 4}, {300, 580}, {2, 20}}},      // V's within K's
    {{{0, 4}, {699, 301}, {7, 19}}, {{0, 2}, {400, 320}, {23, 2}}},   // K's within V's
    {{{0, 0}, {3, 3}, {1, 24}}, {{0, 4}, {0, 20}, {0, 3}}},           // K's before V's
    {{{0, 4}, {7, 22}, {0, 0}}, {{0, 0}, {9, 2}, {1, 24}}},           // V's before K's
};
constexpr int64_t kRows = std::size(kRanges), kHeads = 2, kSize = 64, kCodes = 700;

// How a row ends, and whose ranges there are.
struct End {
  DataType type = kF32;  // of Q, sinks, windows and the output
  bool logits = false;   // sinks of the softmax, and statistics
  int64_t hadamard = 0;
  int64_t ratio = 2;       // heads of queries that share K and V
  bool rounds = false;     // the output is codes; keys differ between queries' heads
  bool one_range = false;  // of K, for all rows
};

class Segmented {
 public:
  explicit Segmented(const End& end) {
    GraphBuilder g;
    Value q = g.Input(
        "q", end.type,
        end.rounds ? Dims{kRows, kHeads, 2, 1, kSize} : Dims{kRows, end.ratio * kHeads, 1, kSize});
    if (end.hadamard != 0) q = g.Hadamard(q, end.hadamard);
    const auto segments = [&](const std::string& name, DataType type) {
      const auto input = [&](const char* what, DataType of, int64_t tokens, int64_t channels) {
        const Dims dims = {kRows, kHeads, tokens, channels};
        const Dims of_queries = {kRows, kHeads, name == "k" ? 2 : 1, tokens, channels};
        return g.Input(name + what, of, end.rounds ? of_queries : dims);
      };
      const Dims group = {1, 1, 1, 32}, group_of_queries = {1, 1, 1, 1, 32};
      const Value codes = g.DynamicDequantize(
          input("_codes", type, kCodes, kSize), input("_scales", kF16, kCodes, 2),
          {.group_shape = end.rounds ? group_of_queries : group, .type = end.type});
      return std::vector<Value>{input("_sinks", end.type, 4, kSize), codes,
                                input("_window", end.type, 24, kSize)};
    };
    const Value k_ranges = g.Input("k_ranges", kS32, {end.one_range ? 1 : kRows, 3, 2});
    const Value v_ranges = g.Input("v_ranges", kS32, {kRows, 3, 2});
    const auto [k, lengths] = g.LoadRangesWithLengths(segments("k", kU4), k_ranges);
    const Value v = g.LoadRanges(segments("v", kS8), v_ranges);
    g.Output("o", end.rounds ? Rounded(g, q, k, v, lengths) : Direct(g, end, q, k, v, lengths));
    graph_ = std::move(g).Build().value();
    inputs_ = MakeRandomInputs(graph_, {.kind = DataKind::kReal}, *MakeSerialExecutor()).value();
    for (int32_t row = 0; row < kRows; ++row) SetRanges(row, end.one_range);
  }

  void Set(const std::string& name, int64_t at, double value) {
    for (const TensorId id : graph_.inputs()) {
      const LogicalTensor& tensor = graph_.tensor(id);
      if (tensor.name == name) return StoreElement(tensor.type, inputs_.at(id).data(), at, value);
    }
    FAIL() << name;
  }

  // In parts, and as the oracle has it.
  void ExpectAsDefined() const {
    EnableCudaSimt();
    BufferMap expected = Inputs(), got = Inputs();
    const GraphRunner oracle = On("oracle"), simt = On("cuda_simt");
    ASSERT_EQ(simt.partitions().size(), 1U);
    EXPECT_NE(simt.kernels().find("joined with those of other segments"), std::string::npos)
        << simt.kernels();
    ASSERT_TRUE(oracle.Run(expected).ok());
    const absl::Status done = simt.Run(got);
    ASSERT_TRUE(done.ok()) << done;
    for (const TensorId id : graph_.outputs()) {
      const LogicalTensor& tensor = graph_.tensor(id);
      const Comparison found =
          Compare(tensor, expected.at(id).data(), got.at(id).data(), simt.rounding());
      EXPECT_TRUE(found.passed) << tensor.name << ": " << found.failing << " of " << found.total
                                << " points, rel l2 " << found.rel_l2;
      // Of numbers; codes may differ by one.
      if (IsFloat(tensor.type)) {
        EXPECT_LE(found.rel_l2, std::max(simt.rounding(), 1e-5)) << tensor.name;
      }
    }
  }

 private:
  static Value Direct(GraphBuilder& g, const End& end, Value q, Value k, Value v, Value lengths) {
    GraphBuilder::AttentionOptions options{.soft_cap = 30, .kv_lengths = lengths};
    if (end.logits) options.sinks = g.Input("logits", kF32, {end.ratio * kHeads});
    options.stats = end.logits;
    const auto [o, stats] = g.ScaledDotProductAttention(q, k, v, options);
    if (stats) g.Output("stats", *stats);
    return end.hadamard == 0 ? o : g.Hadamard(o, end.hadamard);
  }
  // Nothing rounds what the op for attention gives.
  static Value Rounded(GraphBuilder& g, Value q, Value k, Value v, Value lengths) {
    const Value scores = g.MatMul(q, k, {.transpose_b = true});
    const Value scaled = g.Multiply(scores, g.Scalar(0.125));
    const Value o = g.MatMul(g.SoftMax(scaled, {.lengths = lengths}), v);
    return g.AddOp(
        OpKind::kQuantize, "", {o}, {kS8},
        {{Attr::kScales, std::vector<float>{0.02f}}, {Attr::kZps, std::vector<int64_t>{3}}})[0];
  }

  void SetRanges(int32_t row, bool one_range) {
    RowRanges ranges = kRanges[row];
    if (one_range) {
      // As many tokens as K's, elsewhere in every row.
      ranges = kRanges[5];
      const int32_t sinks = row % 5, window = 3 * row;
      const int32_t v[3][2] = {{0, sinks}, {97 * row, 324 - sinks - window}, {row, window}};
      std::copy(&v[0][0], &v[0][0] + 6, &ranges.v[0][0]);
    }
    for (int64_t i = 0; i < 6; ++i) {
      if (!one_range || row == 0) Set("k_ranges", row * 6 + i, ranges.k[i / 2][i % 2]);
      Set("v_ranges", row * 6 + i, ranges.v[i / 2][i % 2]);
    }
  }
  BufferMap Inputs() const {
    BufferMap copies;
    for (const auto& [id, buffer] : inputs_) copies.emplace(id, buffer.Copy());
    return copies;
  }
  GraphRunner On(const std::string& backend) const {
    return GraphRunner::Create(graph_, Engine::Create(EngineOptionsFor(backend, 1)).value())
        .value();
  }

  Graph graph_;
  BufferMap inputs_;
};

TEST(AttentionPartsTest, RowsEndAsWithoutParts) {
  for (const End& end : {End{}, End{.logits = true}, End{.logits = true, .hadamard = 64},
                         End{.type = kF16}, End{.type = kF16, .logits = true, .hadamard = 32},
                         End{.logits = true, .ratio = 20}, End{.rounds = true}}) {
    SCOPED_TRACE(testing::Message()
                 << "logits " << end.logits << ", hadamard " << end.hadamard << ", rounds "
                 << end.rounds << ", ratio " << end.ratio << ", f32 " << (end.type == kF32));
    Segmented attention(end);
    if (end.logits) {
      attention.Set("logits", 1, -std::numeric_limits<double>::infinity());
      attention.Set("logits", 2, 40);
    }
    attention.ExpectAsDefined();
  }
}

TEST(AttentionPartsTest, RangesOfOneForAllRows) {
  Segmented({.one_range = true}).ExpectAsDefined();
  Segmented({.type = kF16, .logits = true, .one_range = true}).ExpectAsDefined();
}

// Of whichever part it comes, it stays in its row.
TEST(AttentionPartsTest, WhatIsNotFiniteIsKept) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  // Element 5 of a token of head 1 of a row.
  const auto at = [](int64_t row, int64_t tokens, int64_t token, int64_t channels = kSize) {
    return ((row * kHeads + 1) * tokens + token) * channels + 5 * channels / kSize;
  };
  for (const bool logits : {false, true}) {
    SCOPED_TRACE(logits);
    Segmented attention({.logits = logits});
    attention.Set("k_window", at(0, 24, 21), kNan);
    attention.Set("v_scales", at(2, kCodes, 5, 2), kNan);
    attention.Set("v_sinks", at(4, 4, 1), -kInfinity);
    attention.Set("k_scales", at(5, kCodes, 10, 2), kInfinity);
    attention.Set("v_window", at(7, 24, 3), kInfinity);
    attention.Set("v_window", at(7, 24, 4), -kInfinity);
    attention.ExpectAsDefined();
  }
}

}  // namespace
}  // namespace kvant
