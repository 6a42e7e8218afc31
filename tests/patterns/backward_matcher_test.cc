// Which backward passes are one partition, and why others are not.
#include <functional>

#include "kvant/tests/common/backward_graph.h"
#include "kvant/tests/patterns/patterns_testing.h"

namespace kvant {
namespace {

using testing::BackwardCase;
using testing::BackwardGraph;
using testing::Grammar;
using testing::KindsOf;
using testing::Partitions;

class BackwardMatcher : public ::testing::TestWithParam<BackwardCase> {};

TEST_P(BackwardMatcher, IsOnePartitionInBothGrammars) {
  for (const Grammar grammar : {Grammar::kNative, Grammar::kOneDnn}) {
    const std::vector<Partition> result = Partitions(BackwardGraph(GetParam()), grammar);
    ASSERT_EQ(result.size(), 1u) << KindsOf(result);
    EXPECT_THAT(MissesOf(result), ::testing::IsEmpty());
    const Partition& partition = result[0];
    EXPECT_EQ(partition.kind(), Partition::Kind::kAttentionBackward);
    EXPECT_EQ(partition.outputs().size(), GetParam().mask_gradient ? 4u : 3u);
    EXPECT_THAT(partition.notes(), ::testing::IsEmpty());
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, BackwardMatcher, ::testing::ValuesIn(testing::BackwardCases()),
                         [](const auto& info) { return info.param.name; });

// What is written here by hand: P and dS, to which a test adds.
struct Gradients {
  GraphBuilder g;
  Value q = g.Input("q", kF32, {2, 3, 5, 6});
  Value k = g.Input("k", kF32, {2, 3, 7, 6});
  Value v = g.Input("v", kF32, {2, 3, 7, 6});
  Value d_out = g.Input("do", kF32, {2, 3, 5, 6});
  Value stats = g.Input("stats", kF32, {2, 3, 5, 1});
  Value probs = g.AddOp(OpKind::kExp, "p",
                        {g.Subtract(g.MatMul(q, k, {.transpose_b = true}), stats)}, {kF32})[0];
  Value d_scores =
      g.AddOp(OpKind::kSoftMaxBackward, "ds", {g.MatMul(d_out, v, {.transpose_b = true}), probs},
              {kF32}, {{Attr::kAxis, int64_t{-1}}})[0];

  Value Sum(Value x, std::string_view name) {
    return g.AddOp(OpKind::kReduceSum, name, {x}, {kF32},
                   {{Attr::kAxes, std::vector<int64_t>{-1}}})[0];
  }
  void AddQAndV() {
    g.Output("dv", g.MatMul(probs, d_out, {.transpose_a = true}));
    g.Output("dq", g.MatMul(d_scores, k));
  }
  void AddK() { g.Output("dk", g.MatMul(d_scores, q, {.transpose_a = true})); }
};

void ExpectMiss(GraphBuilder g, const std::string& reason) {
  const std::vector<Partition> result = Partitions(std::move(g));
  EXPECT_GT(result.size(), 1u);
  ASSERT_EQ(MissesOf(result).size(), 1u);
  EXPECT_THAT(MissesOf(result)[0],
              ::testing::MatchesRegex("Exp 'p' \\(id [0-9]+\\) is not fused: " + reason));
}

TEST(BackwardMatcher, ProbabilitiesSummedElsewhereAreNoGradient) {
  Gradients b;
  b.AddQAndV();
  b.AddK();
  b.g.Output("entropy", b.Sum(b.probs, "entropy"));
  ExpectMiss(std::move(b.g), "its output is also consumed by ReduceSum 'entropy' .*");
}

// What consumes the gradient of the mask is none of the backward pass's.
TEST(BackwardMatcher, GradientOfTheMaskMayBeConsumed) {
  Gradients b;
  b.AddQAndV();
  b.AddK();
  const Value mask = b.g.Input("mask", kF32, {2, 3, 5, 7});
  b.g.Output("mask'", b.g.Subtract(mask, b.d_scores));
  const std::vector<Partition> result = Partitions(std::move(b.g));
  EXPECT_THAT(MissesOf(result), ::testing::IsEmpty());
  ASSERT_EQ(result.size(), 2u) << KindsOf(result);
  EXPECT_EQ(result[0].kind(), Partition::Kind::kAttentionBackward);
  EXPECT_EQ(result[0].outputs().size(), 4u);
  EXPECT_EQ(result[1].pattern(), "single op: Subtract");
}

TEST(BackwardMatcher, NamesTheOpThatIsNoStepTowardsAGradient) {
  Gradients b;
  b.g.Output("dv", b.g.MatMul(b.probs, b.d_out, {.transpose_a = true}));
  const Value noisy = b.g.Add(b.d_scores, b.g.Input("noise", kF32, {2, 3, 5, 7}));
  b.g.Output("dq", b.g.MatMul(noisy, b.k));
  b.g.Output("dk", b.g.MatMul(noisy, b.q, {.transpose_a = true}));
  ExpectMiss(std::move(b.g),
             "it leads to 1 gradients, not to those of Q, K and V; Add '.*' \\(id [0-9]+\\) is no "
             "step towards one");
}

// A backward pass that is nearly one: `make` adds P to the builder.
void ExpectNearMiss(const std::function<Value(GraphBuilder&)>& make, const std::string& sentence) {
  GraphBuilder g;
  const Value probs = make(g);
  const Value k = g.Input("k", kF32, {2, 3, 7, 6}), d_out = g.Input("do", kF32, {2, 3, 5, 6});
  const Value d_probs = g.MatMul(d_out, g.Input("v", kF32, {2, 3, 7, 6}), {.transpose_b = true});
  const Value d_scores = g.AddOp(OpKind::kSoftMaxBackward, "ds", {d_probs, probs}, {kF32},
                                 {{Attr::kAxis, int64_t{-1}}})[0];
  g.Output("dv", g.MatMul(probs, d_out, {.transpose_a = true}));
  g.Output("dq", g.MatMul(d_scores, k));
  const std::vector<Partition> result = Partitions(std::move(g));
  EXPECT_GT(result.size(), 1u);
  EXPECT_THAT(MissesOf(result), ::testing::ElementsAre(::testing::MatchesRegex(sentence)));
}

TEST(BackwardMatcher, SaysWhereProbabilitiesMustComeFrom) {
  const Dims scores = {2, 3, 5, 7}, rows = {2, 3, 5, 1};
  const auto exp = [](GraphBuilder& g, Value x) {
    return g.AddOp(OpKind::kExp, "p", {x}, {kF32})[0];
  };
  ExpectNearMiss([&](GraphBuilder& g) { return g.Input("p", kF32, scores); },
                 "SoftMaxBackward 'ds' \\(id [0-9]+\\) is not fused: its probabilities come from "
                 "tensor [0-9]+ 'p', not from the Exp of scores less their statistics");
  ExpectNearMiss(
      [&](GraphBuilder& g) {
        return g.AddOp(OpKind::kSigmoid, "p", {g.Input("x", kF32, scores)}, {kF32})[0];
      },
      "SoftMaxBackward 'ds' .* its probabilities come from Sigmoid 'p' \\(id [0-9]+\\), not from "
      ".*");
  ExpectNearMiss([&](GraphBuilder& g) { return exp(g, g.Input("x", kF32, scores)); },
                 "Exp 'p' .* its input comes from tensor [0-9]+ 'x', not from "
                 "the Subtract of statistics from scores");
  ExpectNearMiss(
      [&](GraphBuilder& g) {
        return exp(g, g.Subtract(g.Input("x", kF32, scores), g.Input("stats", kF32, rows)));
      },
      "Exp 'p' .*: its scores come from tensor [0-9]+ 'x' by way of Subtract "
      "'Subtract_[0-9]+' "
      "\\(id [0-9]+\\), not from a MatMul");
}

TEST(BackwardMatcher, SaysThatASoftMaxInPartsIsNoBackwardPass) {
  GraphBuilder g;
  const Value scores = g.MatMul(g.Input("q", kF32, {5, 6}), g.Input("k", kF32, {6, 7}));
  const Value e =
      g.AddOp(OpKind::kExp, "e", {g.Subtract(scores, g.Input("max", kF32, {5, 1}))}, {kF32})[0];
  const Value sum = g.AddOp(OpKind::kReduceSum, "sum", {e}, {kF32},
                            {{Attr::kAxes, std::vector<int64_t>{-1}}, {Attr::kKeepDims, true}})[0];
  g.Output("o", g.MatMul(g.Divide(e, sum), g.Input("v", kF32, {7, 6})));
  EXPECT_THAT(
      MissesOf(Partitions(std::move(g))),
      ::testing::ElementsAre(::testing::MatchesRegex(
          "Exp 'e' .* is not fused: its output is also consumed by ReduceSum 'sum' .*, as in "
          "a softmax in parts: only a SoftMax is fused")));
}

TEST(BackwardMatcher, GradientOfTheMaskIsNotThatOfK) {
  Gradients b;
  b.AddQAndV();
  b.g.Output("dmask", b.Sum(b.d_scores, "dmask"));
  ExpectMiss(std::move(b.g), "it leads to 2 gradients, not to those of Q, K and V");
}

// The backward pass in parts, some of which a test replaces.
struct Parts {
  GraphBuilder g;
  Value q = g.Input("q", kF32, {2, 3, 5, 6}), k = g.Input("k", kF32, {2, 3, 7, 6});
  Value v = g.Input("v", kF32, {2, 3, 7, 6}), d_out = g.Input("do", kF32, {2, 3, 5, 6});
  Value out = g.Input("o", kF32, {2, 3, 5, 6}), stats = g.Input("stats", kF32, {2, 3, 5, 1});
  Value scores = g.MatMul(q, k, {.transpose_b = true});
  Value Exp(Value x) { return g.AddOp(OpKind::kExp, "p", {x}, {kF32})[0]; }
  Value Sum(Value x) {
    return g.AddOp(OpKind::kReduceSum, "sum", {x}, {kF32},
                   {{Attr::kAxes, std::vector<int64_t>{-1}}, {Attr::kKeepDims, true}})[0];
  }
  Value DProbs() { return g.MatMul(d_out, v, {.transpose_b = true}); }
  void AddGradients(Value probs, Value d_scores) {
    g.Output("dv", g.MatMul(probs, d_out, {.transpose_a = true}));
    g.Output("dq", g.MatMul(d_scores, k));
    g.Output("dk", g.MatMul(d_scores, q, {.transpose_a = true}));
  }
};

TEST(BackwardMatcher, StepsOnTheWayToAGradient) {
  Parts b;
  const Value probs = b.Exp(b.g.Subtract(b.scores, b.stats));
  const Value centred =
      b.g.Subtract(b.g.Reshape(b.DProbs(), {2, 3, 5, 7}), b.Sum(b.g.Multiply(b.out, b.d_out)));
  const Value d_scores = b.g.Multiply(probs, centred);
  const Value zero = b.g.Input("zero", kF32, {1});
  b.AddGradients(probs, b.g.Select(b.g.Input("kept", kBoolean, {5, 7}), d_scores, zero));
  b.g.Output("dmask", b.Sum(b.g.Reshape(d_scores, {2, 3, 5, 7})));
  const std::vector<Partition> result = Partitions(std::move(b.g));
  EXPECT_EQ(result.size(), 1u) << KindsOf(result);
  EXPECT_THAT(MissesOf(result), ::testing::IsEmpty());
}

TEST(BackwardMatcher, ScoresMustNotBeWhatIsSubtracted) {
  Parts b;
  const Value probs = b.Exp(b.g.Subtract(b.stats, b.scores));
  b.AddGradients(
      probs, b.g.Multiply(probs, b.g.Subtract(b.DProbs(), b.Sum(b.g.Multiply(b.out, b.d_out)))));
  const std::vector<Partition> result = Partitions(std::move(b.g));
  EXPECT_THAT(MissesOf(result),
              ::testing::ElementsAre(::testing::HasSubstr(" subtracts the scores")));
}

TEST(BackwardMatcher, GradientOfTheProbabilitiesSeenElsewhere) {
  Parts b;
  const Value probs = b.Exp(b.g.Subtract(b.scores, b.stats));
  const Value d_probs = b.DProbs();
  b.g.Output("seen", d_probs);
  b.AddGradients(probs,
                 b.g.Multiply(probs, b.g.Subtract(d_probs, b.Sum(b.g.Multiply(b.out, b.d_out)))));
  const std::vector<Partition> result = Partitions(std::move(b.g));
  EXPECT_GT(result.size(), 1u) << KindsOf(result);
  EXPECT_THAT(MissesOf(result),
              ::testing::ElementsAre(::testing::HasSubstr("is also consumed by End")));
}

TEST(BackwardMatcher, ProductsUsedElsewhereStayOutside) {
  Parts b;
  const Value probs = b.Exp(b.g.Subtract(b.scores, b.stats));
  const Value products = b.g.Multiply(b.out, b.d_out);
  b.AddGradients(probs, b.g.Multiply(probs, b.g.Subtract(b.DProbs(), b.Sum(products))));
  b.g.Output("t", b.g.Tanh(products));
  const std::vector<Partition> result = Partitions(std::move(b.g));
  EXPECT_EQ(result.size(), 3u) << KindsOf(result);
  EXPECT_THAT(MissesOf(result),
              ::testing::ElementsAre(::testing::HasSubstr(" is fused without Multiply")));
}

}  // namespace
}  // namespace kvant
