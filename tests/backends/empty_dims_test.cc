// Dims of 0 that leave something to compute: results are the ops', whatever memory held before.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kvant/backends/compiled_graph.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"

namespace kvant {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::Pointwise;

struct Buffer {
  explicit Buffer(size_t n) : values(n + 1, 7.f) {}
  std::vector<float> values;  // one more, so that it has an address
  ConstTensor in() const { return {values.data(), (values.size() - 1) * 4}; }
  Tensor out() { return {values.data(), (values.size() - 1) * 4}; }
  std::vector<float> written() const { return {values.begin(), values.end() - 1}; }
};

// Every engine that computes on the host.
std::vector<Engine> Engines() {
  std::vector<Engine> engines;
  for (const std::vector<std::string>& names :
       {std::vector<std::string>{"cpu", "oracle"}, {"reference"}, {"oracle"}}) {
    if (auto engine = Engine::Create({.backends = names}); engine.ok()) engines.push_back(*engine);
  }
  return engines;
}

// Computes in scratch that holds NaN.
void Execute(const Engine& engine, const Graph& graph, const std::vector<ConstTensor>& inputs,
             const std::vector<Tensor>& outputs) {
  const absl::StatusOr<CompiledGraph> compiled = engine.Compile(graph);
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  SCOPED_TRACE(compiled->ToString());
  std::vector<std::byte> scratch(compiled->scratch_bytes() + 64, std::byte{0xff});
  void* start = scratch.data();
  size_t space = scratch.size();
  std::align(64, compiled->scratch_bytes(), start, space);
  const absl::Span<std::byte> there(static_cast<std::byte*>(start), compiled->scratch_bytes());
  const absl::Status status = compiled->Execute(Stream(engine), inputs, outputs, there);
  ASSERT_TRUE(status.ok()) << status;
}

// Queries and keys of no channels: scores are 0, so that all values count alike.
TEST(EmptyDimsTest, HeadsOfNoChannelsGiveTheMeansOfValues) {
  constexpr int64_t kHeads = 2, kSize = 16;
  for (const int64_t rows : {3, 17, 64}) {
    for (const int64_t tokens : {5, 64, 130}) {
      for (const char* mode : {"inf_as_zero", "none"}) {
        GraphBuilder g;
        const Value q = g.Input("q", kF32, {1, kHeads, rows, 0});
        const Value k = g.Input("k", kF32, {1, kHeads, tokens, 0});
        const Value v = g.Input("v", kF32, {1, kHeads, tokens, kSize});
        const auto [probs, stats] =
            g.SoftMaxWithStats(g.MatMul(q, k, {.transpose_b = true}), {.mode = mode});
        g.Output("o", g.MatMul(probs, v));
        g.Output("stats", stats);
        const Graph graph = std::move(g).Build().value();
        Buffer none(0), values(kHeads * tokens * kSize);
        std::vector<float> means;
        for (int64_t h = 0; h < kHeads; ++h) {
          std::vector<double> sums(kSize);
          for (int64_t i = 0; i < tokens * kSize; ++i) {
            float& x = values.values[h * tokens * kSize + i];
            x = static_cast<float>(h + 1) * static_cast<float>(i % 37 - 11);
            sums[i % kSize] += x;
          }
          for (int64_t i = 0; i < rows * kSize; ++i) {
            means.push_back(static_cast<float>(sums[i % kSize] / static_cast<double>(tokens)));
          }
        }
        for (const Engine& engine : Engines()) {
          SCOPED_TRACE(absl::StrCat(rows, " rows, ", tokens, " tokens, ", mode));
          Buffer o(kHeads * rows * kSize), s(kHeads * rows);
          Execute(engine, graph, {none.in(), none.in(), values.in()}, {s.out(), o.out()});
          EXPECT_THAT(o.written(), Pointwise(FloatNear(1e-3f), means));
          EXPECT_THAT(s.written(), Each(FloatNear(std::log(static_cast<float>(tokens)), 1e-5f)));
        }
      }
    }
  }
}

// Ragged queries of no sequences: there is room for rows, and none is written.
TEST(EmptyDimsTest, NoSequencesWriteNothing) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {2, 1, 4});
  const Value k = g.Input("k", kF32, {0, 1, 3, 4}), v = g.Input("v", kF32, {0, 1, 3, 8});
  const Value offsets = g.Input("offsets", kS32, {1});
  const auto [o, stats] = g.ScaledDotProductAttention(
      q, k, v, {.right_window = 0, .query_offsets = offsets, .stats = true});
  g.Output("o", o);
  g.Output("stats", *stats);
  const Graph graph = std::move(g).Build().value();
  const int32_t first = 0;
  for (const Engine& engine : Engines()) {
    Buffer queries(8), none(0), out(16), statistics(2);
    Execute(engine, graph, {queries.in(), none.in(), none.in(), {&first, sizeof(first)}},
            {out.out(), statistics.out()});
    EXPECT_THAT(out.written(), Each(7.f));
    EXPECT_THAT(statistics.written(), Each(7.f));
  }
}

// Keys and values of no tokens: the sum over them is 0, also where the softmax of nothing is NaN.
TEST(EmptyDimsTest, NoTokensGiveZeros) {
  for (const char* mode : {"inf_as_zero", "none"}) {
    for (const bool with_stats : {false, true}) {
      GraphBuilder g;
      const Value q = g.Input("q", kF32, {1, 2, 3, 16});
      const Value k = g.Input("k", kF32, {1, 2, 0, 16}), v = g.Input("v", kF32, {1, 2, 0, 8});
      const Value scores = g.MatMul(q, k, {.transpose_b = true});
      std::optional<Value> stats;
      Value probs;
      if (with_stats) {
        std::tie(probs, stats) = g.SoftMaxWithStats(scores, {.mode = mode});
      } else {
        probs = g.SoftMax(scores, {.mode = mode});
      }
      g.Output("o", g.MatMul(probs, v));
      if (stats) g.Output("stats", *stats);
      const Graph graph = std::move(g).Build().value();
      for (const Engine& engine : Engines()) {
        SCOPED_TRACE(absl::StrCat(mode, with_stats ? ", statistics" : ""));
        Buffer queries(96), none(0), o(48), s(6);
        std::vector<Tensor> outputs;
        for (const TensorId id : graph.outputs()) {
          outputs.push_back(graph.tensor(id).name == "o" ? o.out() : s.out());
        }
        Execute(engine, graph, {queries.in(), none.in(), none.in()}, outputs);
        EXPECT_THAT(o.written(), Each(0.f));
        for (const float x : s.written()) {
          if (!with_stats) break;
          EXPECT_TRUE(mode[0] == 'i' ? x == 0.f : std::isnan(x)) << x;
        }
      }
    }
  }
}

// Of ScaledDotProductAttention, the softmax of nothing is NaN, and so is what it gives.
TEST(EmptyDimsTest, NoTokensGiveNaNWhereTheModeIsNone) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {1, 2, 3, 16});
  const Value k = g.Input("k", kF32, {1, 1, 0, 16}), v = g.Input("v", kF32, {1, 1, 0, 8});
  const std::vector<Value> results = g.AddOp(OpKind::kScaledDotProductAttention, "", {q, k, v},
                                             {kF32, kF32}, {{Attr::kMode, std::string("none")}});
  g.Output("o", results[0]);
  g.Output("stats", results[1]);
  const Graph graph = std::move(g).Build().value();
  for (const Engine& engine : Engines()) {
    Buffer queries(96), none(0), o(48), s(6);
    Execute(engine, graph, {queries.in(), none.in(), none.in()}, {o.out(), s.out()});
    for (const Buffer* written : {&o, &s}) {
      for (const float x : written->written()) EXPECT_TRUE(std::isnan(x)) << x;
    }
  }
}

// Values of no channels: there is an output of no elements, and statistics.
TEST(EmptyDimsTest, StatisticsAreWrittenWhereTheOutputIsEmpty) {
  for (const bool first_class : {true, false}) {
    GraphBuilder g;
    const Value q = g.Input("q", kF32, {1, 1, 2, 8}), k = g.Input("k", kF32, {1, 1, 5, 8});
    const Value v = g.Input("v", kF32, {1, 1, 5, 0});
    if (first_class) {
      const auto [o, stats] = g.ScaledDotProductAttention(q, k, v, {.scale = 0.25f, .stats = true});
      g.Output("o", o);
      g.Output("stats", *stats);
    } else {
      const Value scores = g.Multiply(g.MatMul(q, k, {.transpose_b = true}), g.Scalar(0.25));
      const auto [probs, stats] = g.SoftMaxWithStats(scores, {});
      g.Output("o", g.MatMul(probs, v));
      g.Output("stats", stats);
    }
    const Graph graph = std::move(g).Build().value();
    Buffer ones(16), keys(40), none(0);
    for (float& x : ones.values) x = 1;
    for (float& x : keys.values) x = 2;
    for (const Engine& engine : Engines()) {
      Buffer o(0), stats(2);
      // In the order of the graph's tensors.
      const std::vector<Tensor> outputs =
          first_class ? std::vector{o.out(), stats.out()} : std::vector{stats.out(), o.out()};
      Execute(engine, graph, {ones.in(), keys.in(), none.in()}, outputs);
      const float want = 4 + std::log(5.f);
      EXPECT_THAT(stats.written(), ElementsAre(FloatNear(want, 1e-5f), FloatNear(want, 1e-5f)));
    }
  }
}

// The sum over an axis of no elements.
TEST(EmptyDimsTest, StatisticsOfNothing) {
  for (const bool zeros : {true, false}) {
    GraphBuilder g;
    const auto [probs, stats] =
        g.SoftMaxWithStats(g.Input("x", kF32, {2, 3, 0}), {.mode = zeros ? "inf_as_zero" : "none"});
    g.Output("y", probs);
    g.Output("stats", stats);
    const Graph graph = std::move(g).Build().value();
    for (const Engine& engine : Engines()) {
      Buffer none(0), y(0), s(6);
      Execute(engine, graph, {none.in()}, {y.out(), s.out()});
      for (const float x : s.written()) EXPECT_TRUE(zeros ? x == 0.f : std::isnan(x)) << x;
    }
  }
}

TEST(EmptyDimsTest, LengthsOfRingsOfNoChannels) {
  GraphBuilder g;
  const Value ring = g.Input("ring", kF32, {1, 1, 4, 0}), at = g.Input("ranges", kS32, {1, 1, 2});
  const auto [tokens, lengths] = g.LoadRangesWithLengths({ring}, at);
  g.Output("tokens", tokens);
  g.Output("lengths", lengths);
  const Graph graph = std::move(g).Build().value();
  const int32_t ranges[] = {1, 3};
  for (const Engine& engine : Engines()) {
    Buffer none(0), to(0);
    int32_t length = 7;
    Execute(engine, graph, {{ranges, sizeof(ranges)}, none.in()},
            {to.out(), {&length, sizeof(length)}});
    EXPECT_EQ(length, 3);
  }
}

// Where there is nothing to quantize, scales are not written either.
TEST(EmptyDimsTest, StoresOfNothing) {
  GraphBuilder g;
  const auto stored = g.DynamicQuantize(g.Input("x", kF32, {2, 0}), {.axis = 0, .type = kS8});
  g.Output("codes", stored.codes);
  g.Output("scales", stored.scales);
  const Graph graph = std::move(g).Build().value();
  for (const Engine& engine : Engines()) {
    Buffer none(0), codes(0), scales(2);
    Execute(engine, graph, {none.in()}, {codes.out(), scales.out()});
    EXPECT_THAT(scales.written(), Each(7.f));
  }
}

}  // namespace
}  // namespace kvant
