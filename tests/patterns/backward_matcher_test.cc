// Which backward passes are one partition, and why others are not.
#include "kvant/tests/backward_graph.h"
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
    const PartitionResult result = Partitions(BackwardGraph(GetParam()), grammar);
    ASSERT_EQ(result.partitions.size(), 1u) << KindsOf(result);
    EXPECT_THAT(result.explanations, ::testing::IsEmpty());
    const Partition& partition = result.partitions[0];
    EXPECT_EQ(partition.kind(), Partition::Kind::kAttentionBackward);
    EXPECT_EQ(partition.outputs().size(), GetParam().mask_axes ? 4u : 3u);
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
  const PartitionResult result = Partitions(std::move(g));
  EXPECT_GT(result.partitions.size(), 1u);
  ASSERT_EQ(result.explanations.size(), 1u);
  EXPECT_THAT(result.explanations[0],
              ::testing::MatchesRegex("Exp 'p' \\(id [0-9]+\\) is not fused: " + reason));
}

TEST(BackwardMatcher, ProbabilitiesSummedElsewhereAreNoGradient) {
  Gradients b;
  b.AddQAndV();
  b.AddK();
  b.g.Output("entropy", b.Sum(b.probs, "entropy"));
  ExpectMiss(std::move(b.g), "its output is also consumed by ReduceSum 'entropy' .*");
}

TEST(BackwardMatcher, GradientOfTheMaskIsNotThatOfK) {
  Gradients b;
  b.AddQAndV();
  b.g.Output("dmask", b.Sum(b.d_scores, "dmask"));
  ExpectMiss(std::move(b.g), "it leads to 2 gradients, not to those of Q, K and V");
}

}  // namespace
}  // namespace kvant
