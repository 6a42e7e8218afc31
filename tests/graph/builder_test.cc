#include "kvant/graph/builder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "kvant/graph/json.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<OpKind> KindsOf(const Graph& graph) {
  std::vector<OpKind> kinds;
  for (const Op& op : graph.ops()) kinds.push_back(op.kind);
  return kinds;
}

TEST(GraphBuilder, CompressedAttention) {
  GraphBuilder g({.fpmath = FpMath::kF16, .apply_to_int = true});
  const Value q = g.Input("q", kF32, {1, 8, 4, 1, 128});
  const Value k = g.Input("k", kU4, {1, 8, 1, 256, 128});
  const Value k_scale = g.Input("k_scale", kF32, {1, 8, 1, 256, 4});
  const Value v = g.Input("v", kS8, {1, 8, 1, 256, 64});
  const Value v_scale = g.Input("v_scale", kF32, {1, 8, 1, 2, 64});
  const Value root = g.Input("root", kF32, {});
  const Value scores = g.MatMul(
      q, g.DynamicDequantize(k, k_scale, {.group_shape = {1, 1, 1, 1, 32}}), {.transpose_b = true});
  EXPECT_EQ(g.Describe(scores).dims, (Dims{1, 8, 4, 1, 256}));
  const Value probs = g.SoftMax(g.Divide(scores, root));
  g.Output("o",
           g.MatMul(probs, g.DynamicDequantize(v, v_scale, {.group_shape = {1, 1, 1, 128, 1}})));
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();

  EXPECT_TRUE(graph->finalized());
  EXPECT_EQ(graph->options().fpmath, FpMath::kF16);
  EXPECT_TRUE(graph->options().apply_to_int);
  EXPECT_THAT(KindsOf(*graph),
              ElementsAre(OpKind::kDynamicDequantize, OpKind::kMatMul, OpKind::kDivide,
                          OpKind::kSoftMax, OpKind::kDynamicDequantize, OpKind::kMatMul));
  EXPECT_THAT(graph->inputs(), ElementsAre(k.id, k_scale.id, q.id, root.id, v.id, v_scale.id));
  ASSERT_EQ(graph->outputs().size(), 1u);
  const LogicalTensor& o = graph->FindTensor("o")->desc;
  EXPECT_EQ(o.id, graph->outputs()[0]);
  EXPECT_EQ(o.dims, (Dims{1, 8, 4, 1, 64}));
  EXPECT_EQ(o.strides, (Dims{2048, 256, 64, 64, 1}));
  EXPECT_EQ(graph->ops().back().name, "o");
  EXPECT_EQ(*graph->ops()[3].Find<Attr::kMode>(), "inf_as_zero");
}

TEST(GraphBuilder, StridesOfInputsAndOutputs) {
  GraphBuilder g;
  const Value x = g.Input("x", kF16, {2, 3}, Dims{1, 2});
  const Value y = g.Tanh(x);
  g.Output("y", y, Dims{1, 4});
  g.Output("z", g.Reorder(y));
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_EQ(graph->FindTensor("x")->desc.strides, (Dims{1, 2}));
  EXPECT_EQ(graph->FindTensor("y")->desc.strides, (Dims{1, 4}));
  EXPECT_EQ(graph->FindTensor("z")->desc.strides, (Dims{3, 1}));
  // y is consumed, so an End marks it.
  EXPECT_THAT(KindsOf(*graph), ElementsAre(OpKind::kTanh, OpKind::kReorder, OpKind::kEnd));
  EXPECT_THAT(graph->outputs(),
              ElementsAre(graph->FindTensor("y")->desc.id, graph->FindTensor("z")->desc.id));
}

TEST(GraphBuilder, ArithmeticTakesTheWiderType) {
  GraphBuilder g;
  const Value half = g.Input("h", kF16, {2, 3}), single = g.Input("s", kF32, {2, 3});
  const Value other_half = g.Input("b", kBF16, {2, 3}), integer = g.Input("i", kS32, {2, 3});
  EXPECT_EQ(g.Describe(g.Add(half, other_half)).type, kF32);
  EXPECT_EQ(g.Describe(g.Multiply(integer, half)).type, kF32);
  EXPECT_EQ(g.Describe(g.Subtract(integer, integer)).type, kS32);
  EXPECT_EQ(g.Describe(g.Add(half, single)).type, kF32);
  EXPECT_EQ(g.Describe(g.Add(single, half)).type, kF32);
  EXPECT_EQ(g.Describe(g.Add(half, half)).type, kF16);
  EXPECT_EQ(g.Describe(g.GreaterEqual(single, single)).type, kBoolean);
  EXPECT_EQ(g.Describe(g.GenIndex(half, 1)).type, kS32);
  EXPECT_EQ(g.Describe(g.TypeCast(half, kF32)).type, kF32);
  const auto [probs, stats] = g.SoftMaxWithStats(half, {});
  EXPECT_EQ(g.Describe(probs).type, kF16);
  EXPECT_EQ(g.Describe(stats).type, kF32);
  EXPECT_EQ(g.Describe(stats).dims, (Dims{2, 1}));
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  EXPECT_TRUE(graph.ok()) << graph.status();
}

TEST(GraphBuilder, CausalMasks) {
  GraphBuilder g;
  const Value scores = g.Input("s", kF32, {2, 4, 6}), fill = g.Input("fill", kF32, {});
  const Value kv_len = g.HostScalar("kv_len", kS32), q_len = g.HostScalar("q_len", kS32);
  g.Output("top_left", g.CausalMask(scores, fill));
  g.Output("bottom_right", g.CausalMask(scores, fill, kv_len, q_len));
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_THAT(KindsOf(*graph),
              ElementsAre(OpKind::kGenIndex, OpKind::kGenIndex, OpKind::kGreaterEqual,
                          OpKind::kSelect, OpKind::kGenIndex, OpKind::kAdd, OpKind::kSubtract,
                          OpKind::kGenIndex, OpKind::kGreaterEqual, OpKind::kSelect));
  EXPECT_EQ(graph->ops()[0].Get<Attr::kAxis>(), 1) << "rows first";
  EXPECT_EQ(graph->ops()[1].Get<Attr::kAxis>(), 2);
  EXPECT_EQ(graph->FindTensor("bottom_right")->desc.dims, (Dims{2, 4, 6}));
  EXPECT_EQ(graph->FindTensor("kv_len")->desc.property, Property::kHostScalar);
}

TEST(GraphBuilder, AttentionStatedDirectly) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {2, 6, 5, 16});
  const Value k = g.Input("k", kF32, {2, 3, 9, 16}), v = g.Input("v", kF32, {2, 3, 9, 8});
  GraphBuilder::AttentionOptions options;
  options.scale = 0.25f;
  options.bottom_right = true;
  options.right_window = 0;
  options.sinks = g.Input("sinks", kF32, {6});
  options.kv_lengths = g.Input("lengths", kS32, {2});
  options.stats = true;
  const auto [o, stats] = g.ScaledDotProductAttention(q, k, v, options);
  ASSERT_TRUE(stats.has_value());
  g.Output("o", o);
  g.Output("stats", *stats);
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  const Op& op = graph->ops()[0];
  EXPECT_EQ(*op.Find<Attr::kOptionalInputs>(), "kv_lengths,sinks");
  EXPECT_EQ(op.Get<Attr::kScale>(), 0.25f);
  EXPECT_EQ(graph->FindTensor("o")->desc.dims, (Dims{2, 6, 5, 8}));
  EXPECT_EQ(graph->FindTensor("stats")->desc.dims, (Dims{2, 6, 5, 1}));
}

TEST(GraphBuilder, ReshapeTransposeConcatQuantize) {
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {2, 6, 4}), y = g.Input("y", kF32, {2, 1, 4});
  const Value both = g.Concat({x, y}, 1);
  EXPECT_EQ(g.Describe(both).dims, (Dims{2, 7, 4}));
  EXPECT_EQ(g.Describe(g.Transpose(both, {2, 0, 1})).dims, (Dims{4, 2, 7}));
  EXPECT_EQ(g.Describe(g.Slice(both, 1, 3, 2)).dims, (Dims{2, 2, 4}));
  EXPECT_EQ(g.Describe(g.Reshape(both, {0, -1}, true)).dims, (Dims{2, 28}));
  const Value scales = g.Input("scales", kF32, {7});
  const Value codes = g.DynamicQuantize(both, scales, std::nullopt, {.axis = 1, .type = kS8});
  EXPECT_EQ(g.Describe(codes).type, kS8);
  const Value zps = g.Input("zps", kS8, {7});
  EXPECT_EQ(g.Describe(g.DynamicDequantize(codes, scales, zps, {.axis = 1})).type, kF32);
  const std::vector<Value> clipped = g.AddOp(OpKind::kMaximum, "clipped", {both, both}, {kF32});
  ASSERT_EQ(clipped.size(), 1u);
  EXPECT_EQ(g.Describe(clipped[0]).name, "clipped");
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  EXPECT_TRUE(graph.ok()) << graph.status();
}

TEST(GraphBuilder, UnknownDimsPassThrough) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {1, kUnknownDim, 64});
  const Value k = g.Input("k", kF32, {1, kUnknownDim, 64});
  const Value scores = g.MatMul(q, k, {.transpose_b = true});
  EXPECT_EQ(g.Describe(scores).dims, (Dims{1, kUnknownDim, kUnknownDim}));
  g.Output("o", scores);
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_FALSE(graph->FindTensor("o")->desc.strides.has_value());
}

TEST(GraphBuilder, TheFirstErrorIsKept) {
  GraphBuilder g;
  const Value a = g.Input("a", kF32, {2, 3}), b = g.Input("b", kF32, {4, 5});
  const Value bad = g.MatMul(a, b);
  const Value worse = g.Add(bad, g.Reshape(b, {7}));
  EXPECT_EQ(g.Describe(worse).rank(), -1);
  g.Output("o", worse);
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  EXPECT_EQ(ErrorKindOf(graph.status()), ErrorKind::kInvalidShape);
  EXPECT_THAT(
      std::string(graph.status().message()),
      AllOf(HasSubstr("MatMul"), HasSubstr("inner dimensions differ: 3 (tensor 0 'a', dim 1) "
                                           "vs 4 (tensor 1 'b', dim 0)")));
}

// Builds with `make` and expects an error of this kind that says `part`.
template <typename Make>
void ExpectFailure(ErrorKind kind, const std::string& part, Make make) {
  GraphBuilder g;
  make(g);
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_FALSE(graph.ok());
  EXPECT_EQ(ErrorKindOf(graph.status()), kind) << graph.status();
  EXPECT_THAT(std::string(graph.status().message()), HasSubstr(part));
}

TEST(GraphBuilder, BadUses) {
  ExpectFailure(ErrorKind::kInvalidShape, "input 'x'", [](GraphBuilder& g) {
    g.Input("x", kF32, {2, -3});
  });
  ExpectFailure(ErrorKind::kInvalidArguments, "is a Value that no builder made",
                [](GraphBuilder& g) {
                  EXPECT_EQ(g.Describe({99}).type, kUndef);
                  g.Tanh({99});
                });
  ExpectFailure(ErrorKind::kInvalidArguments, "output 'y'",
                [](GraphBuilder& g) { g.Output("y", g.Input("x", kF32, {2})); });
  ExpectFailure(ErrorKind::kInvalidArguments, "tensor 1 'y' is an output already",
                [](GraphBuilder& g) {
                  const Value y = g.Tanh(g.Input("x", kF32, {2}));
                  g.Output("y", y);
                  g.Output("z", y);
                });
  ExpectFailure(ErrorKind::kInvalidGraphOp, "MatMul", [](GraphBuilder& g) {
    g.AddOp(OpKind::kMatMul, "mm", {g.Input("x", kF32, {2})}, {kF32});
  });
  ExpectFailure(ErrorKind::kInvalidGraphOp, "Concat", [](GraphBuilder& g) { g.Concat({}, 0); });
  ExpectFailure(ErrorKind::kInvalidGraphOp, "SoftMax",
                [](GraphBuilder& g) { g.SoftMax(g.Input("x", kF32, {2}), {.mode = "sometimes"}); });
  ExpectFailure(ErrorKind::kInvalidArguments, "Append of type f16 converts: it has no scales",
                [](GraphBuilder& g) {
                  g.Append(g.Input("x", kF32, {1, 2, 3, 32}), g.Input("at", kS32, {1}), 64,
                           {.group_shape = {1, 1, 1, 32}, .type = kF16});
                });
}

TEST(GraphBuilder, RefusesOpsWithoutResults) {
  GraphBuilder g;
  g.AddOp(OpKind::kTanh, "", {}, {});
  EXPECT_FALSE(std::move(g).Build().ok());
}

TEST(GraphBuilder, RefusesWhatIsBeyondItsTypes) {
  GraphBuilder mode({.fpmath = static_cast<FpMath>(77)});
  mode.Output("o", mode.Tanh(mode.Input("x", kF32, {4})));
  EXPECT_THAT(std::string(std::move(mode).Build().status().message()),
              HasSubstr("the graph's fpmath is 77, which is no mode"));
  GraphBuilder capacity;
  const Value x = capacity.Input("x", kF32, {1, 2, 3, 4}), p = capacity.Input("p", kS32, {1});
  capacity.Append(x, p, std::numeric_limits<int64_t>::max(), {.type = kF16});
  EXPECT_THAT(std::string(capacity.status().message()), HasSubstr("overflows 64 bits"));
}

TEST(GraphBuilder, TakesOnlyItsOwnValues) {
  const auto error = [](auto build) {
    GraphBuilder g;
    const Value x = g.Input("x", kF32, {4});
    build(g, x);
    return std::string(std::move(g).Build().status().message());
  };
  GraphBuilder other;
  const Value foreign = other.Input("y", kF32, {4});
  EXPECT_THAT(error([](GraphBuilder& g, Value x) { g.Add(x, Value()); }),
              HasSubstr("Add (op 0): input 1 is a Value that no builder made"));
  EXPECT_THAT(error([&](GraphBuilder& g, Value x) { g.Multiply(foreign, x); }),
              HasSubstr("Multiply (op 0): input 0 is a Value of another builder"));
  EXPECT_THAT(error([&](GraphBuilder& g, Value) { g.Output("o", foreign); }),
              HasSubstr("output 'o': value 0 is a Value of another builder"));
  EXPECT_THAT(error([](GraphBuilder& g, Value) { g.Output("o", Value()); }),
              HasSubstr("is a Value that no builder made"));
  EXPECT_EQ(other.Describe(Value()).type, kUndef);
  // A copy of a builder goes on with the values of both.
  const Value later = [&] {
    GraphBuilder copy = other;
    return copy.Tanh(foreign);
  }();
  GraphBuilder original = other;
  original.Tanh(foreign);  // of the same id as the copy's
  original.Output("o", later);
  EXPECT_THAT(std::string(std::move(original).Build().status().message()),
              HasSubstr("output 'o': value 1 is a Value of another builder"));
  // What was moved from is a builder of its own.
  GraphBuilder from;
  const Value made = from.Input("made", kF32, {4});
  const GraphBuilder to = std::move(from);
  const Value again = from.Input("again", kF32, {7});  // of the same id
  EXPECT_EQ(to.Describe(again).type, kUndef);
  EXPECT_EQ(to.Describe(made).type, kF32);
  GraphBuilder copy = other;
  copy.Output("o", copy.Tanh(foreign));
  EXPECT_TRUE(std::move(copy).Build().ok());
}

TEST(GraphBuilder, NamesOfPortsDiffer) {
  const auto error = [](auto build) {
    GraphBuilder g;
    build(g);
    return std::string(std::move(g).Build().status().message());
  };
  EXPECT_THAT(error([](GraphBuilder& g) {
                g.Output("o", g.Add(g.Input("x", kF32, {4}), g.Input("x", kF32, {4})));
              }),
              HasSubstr("two inputs are named 'x'"));
  EXPECT_THAT(error([](GraphBuilder& g) {
                const Value x = g.Input("x", kF32, {4});
                g.Output("o", g.Tanh(x));
                g.Output("o", g.Hadamard(x, 4));
              }),
              HasSubstr("two outputs are named 'o'"));
  // In and out, as of a cache that is written in place, and without a name.
  EXPECT_EQ(error([](GraphBuilder& g) {
              g.Output("x", g.Add(g.Input("x", kF32, {4}),
                                  g.Add(g.Input("", kF32, {4}), g.Input("", kF32, {4}))));
            }),
            "");
}

// The destination is not called like the source.
TEST(GraphBuilder, WhatDoesNotFitIsNamed) {
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {1, 2, 17, 8}), at = g.Input("at", kS32, {1});
  g.Output("cache", g.Append(x, at, 16, {.type = kF16}).codes);
  EXPECT_THAT(std::string(std::move(g).Build().status().message()),
              ::testing::HasSubstr("'x' [1,2,17,8] has 17 tokens along dim 2, more than tensor 2 "
                                   "'cache' [1,2,16,8] holds"));
}

}  // namespace
}  // namespace kvant
