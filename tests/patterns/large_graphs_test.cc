// Graphs as large as a whole model unrolled: the work grows with them, and no more.
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/graph/json.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/matcher.h"
#include "kvant/tests/common/backward_graph.h"
#include "kvant/tests/patterns/patterns_testing.h"

namespace kvant {
namespace {

using testing::Grammar;
using ::testing::HasSubstr;

LogicalTensor Tensor(TensorId id, Dims dims) {
  return {.id = id, .type = kF32, .dims = std::move(dims)};
}

Op MakeOp(OpId id, OpKind kind, Attributes attrs = {}) {
  Op op;
  op.id = id;
  op.kind = kind;
  op.attrs = std::move(attrs);
  return op;
}

// So many attentions side by side over one K, which they share behind a Reorder.
Graph SideBySide(int count) {
  Graph graph;
  const LogicalTensor k = Tensor(0, {1, 1, 4, 8}), moved = Tensor(1, {1, 1, 4, 8});
  EXPECT_TRUE(graph.AddOp(MakeOp(0, OpKind::kReorder), {k}, {moved}).ok());
  for (int i = 0; i < count; ++i) {
    const TensorId base = 2 + 5 * static_cast<TensorId>(i);
    const OpId op = 1 + 3 * static_cast<OpId>(i);
    const LogicalTensor q = Tensor(base, {1, 1, 2, 8}), v = Tensor(base + 1, {1, 1, 4, 8});
    const LogicalTensor s = Tensor(base + 2, {1, 1, 2, 4}), p = Tensor(base + 3, {1, 1, 2, 4});
    const LogicalTensor o = Tensor(base + 4, {1, 1, 2, 8});
    EXPECT_TRUE(
        graph.AddOp(MakeOp(op, OpKind::kMatMul, {{Attr::kTransposeB, true}}), {q, moved}, {s})
            .ok());
    EXPECT_TRUE(
        graph.AddOp(MakeOp(op + 1, OpKind::kSoftMax, {{Attr::kAxis, int64_t{-1}}}), {s}, {p}).ok());
    EXPECT_TRUE(graph.AddOp(MakeOp(op + 2, OpKind::kMatMul), {p, v}, {o}).ok());
  }
  EXPECT_TRUE(graph.Finalize().ok());
  return graph;
}

// The most ops that are looked at to match one SoftMax.
int64_t MostVisited(const Graph& graph) {
  std::vector<char> taken(graph.ops().size(), 0);
  std::vector<Miss> misses;
  AttentionMatcher matcher(graph, taken, &misses);
  int64_t most = 0;
  for (size_t i = 0; i < graph.ops().size(); ++i) {
    if (graph.ops()[i].kind != OpKind::kSoftMax) continue;
    AttentionMatch match;
    const int64_t before = matcher.visited();
    EXPECT_TRUE(matcher.Match(static_cast<OpIndex>(i), &match)) << misses.back().why;
    most = std::max(most, matcher.visited() - before);
  }
  return most;
}

TEST(LargeGraphs, MatchingLooksOnlyAroundTheSoftMax) {
  const int64_t few = MostVisited(SideBySide(3));
  EXPECT_GT(few, 3);
  EXPECT_LT(few, 100);
  EXPECT_EQ(MostVisited(SideBySide(2000)), few);
}

TEST(LargeGraphs, BackwardMatchingLooksOnlyAroundTheExp) {
  const auto visited = [](int others) {
    GraphBuilder g = testing::BackwardGraph(testing::BackwardCases().front());
    for (int i = 0; i < others; ++i) (void)g.Tanh(g.Input("", kF32, {4}));
    const Graph graph = *std::move(g).Build();
    std::vector<char> taken(graph.ops().size(), 0);
    std::vector<Miss> misses;
    AttentionMatcher matcher(graph, taken, &misses);
    for (size_t i = 0; i < graph.ops().size(); ++i) {
      if (graph.ops()[i].kind != OpKind::kExp) continue;
      std::vector<OpIndex> ops;
      EXPECT_TRUE(matcher.MatchBackward(static_cast<OpIndex>(i), &ops)) << misses.back().why;
    }
    return matcher.visited();
  };
  EXPECT_EQ(visited(3), visited(3000));
}

TEST(LargeGraphs, ThousandsOfAttentions) {
  const Graph graph = SideBySide(4000);
  for (const Grammar grammar : {Grammar::kNative, Grammar::kOneDnn}) {
    const absl::StatusOr<std::vector<Partition>> result = PartitionGraph(graph, {grammar});
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->size(), 4001u);
    EXPECT_EQ(result->back().pattern(), "attention: plain");
  }
  const std::string text = GraphToJson(graph);
  const absl::StatusOr<Graph> again = GraphFromJson(text);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(GraphToJson(*again), text);
}

// Deep: nothing recurses along it.
TEST(LargeGraphs, AHundredThousandOpsInARow) {
  constexpr int kOps = 100000;
  Graph graph;
  for (int i = kOps; i-- > 0;) {  // the last first, to be sorted
    const TensorId id = static_cast<TensorId>(i);
    ASSERT_TRUE(
        graph.AddOp(MakeOp(id, OpKind::kTanh), {Tensor(id, {4})}, {Tensor(id + 1, {4})}).ok());
  }
  ASSERT_TRUE(graph.Finalize().ok());
  EXPECT_EQ(graph.ops().front().id, 0u);
  ASSERT_TRUE(InferShapes(graph, {Tensor(0, {7})}).ok());
  EXPECT_EQ(graph.tensor(kOps).dims, Dims{7});
  const absl::StatusOr<std::vector<Partition>> partitions = PartitionGraph(graph);
  ASSERT_TRUE(partitions.ok());
  EXPECT_EQ(partitions->size(), kOps / 5u);
}

TEST(LargeGraphs, OneTensorWithAHundredThousandConsumers) {
  constexpr int kOps = 100000;
  Graph graph;
  for (int i = 0; i < kOps; ++i) {
    const TensorId id = static_cast<TensorId>(i);
    ASSERT_TRUE(graph
                    .AddOp(MakeOp(id, OpKind::kAdd), {Tensor(0, {4}), Tensor(0, {4})},
                           {Tensor(id + 1, {4})})
                    .ok());
  }
  ASSERT_TRUE(graph.Finalize().ok());
  EXPECT_EQ(graph.FindTensor(0)->consumers.size(), 2u * kOps);
  EXPECT_EQ(PartitionGraph(graph)->size(), 1u * kOps);
}

// The ports of one op are compared with each other.
TEST(LargeGraphs, OneOpWithAHundredThousandInputs) {
  constexpr int kInputs = 100000;
  std::vector<LogicalTensor> inputs;
  for (int i = 0; i < kInputs; ++i) inputs.push_back(Tensor(static_cast<TensorId>(i) / 2, {1}));
  const Op concat = MakeOp(0, OpKind::kConcat, {{Attr::kAxis, int64_t{0}}});
  Graph graph;
  ASSERT_TRUE(graph.AddOp(concat, inputs, {Tensor(kInputs, {kInputs})}).ok());
  ASSERT_TRUE(graph.Finalize().ok());
  ASSERT_TRUE(InferShapes(graph).ok());
  EXPECT_EQ(PartitionGraph(graph)->front().inputs().size(), kInputs / 2u);

  Graph other;
  inputs.back().dims = Dims{2};
  const absl::Status status = other.AddOp(concat, inputs, {Tensor(kInputs, {kInputs})});
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidGraph);
  EXPECT_THAT(std::string(status.message()), HasSubstr("tensor 49999 is f32[1] and f32[2]"));
}

// What each port leaves open, another one fills in.
TEST(LargeGraphs, PortsOfOneTensorAgreeAllTogether) {
  const Op concat = MakeOp(3, OpKind::kConcat, {{Attr::kAxis, int64_t{0}}});
  const LogicalTensor open = Tensor(1, {kUnknownDim, 4}), two = Tensor(1, {2, kUnknownDim}),
                      three = Tensor(1, {3, 4}), result = Tensor(9, {kUnknownDim, 4});
  Graph graph;
  EXPECT_TRUE(Graph().AddOp(concat, {open, two, open}, {result}).ok());
  EXPECT_TRUE(Graph().AddOp(concat, {two, open}, {result}).ok());
  EXPECT_EQ(ErrorKindOf(graph.AddOp(concat, {two, open, three}, {result})),
            ErrorKind::kInvalidGraph);
  EXPECT_EQ(std::string(graph.AddOp(concat, {two, open}, {two}).message()),
            "Concat '' (id 3): tensor 1 is both input and output");
  EXPECT_THAT(graph.ops(), ::testing::IsEmpty());
}

// Many a SoftMax behind one long chain: each gives up soon.
TEST(LargeGraphs, LongScoresAreGivenUp) {
  GraphBuilder g;
  Value scores = g.MatMul(g.Input("q", kF32, {2, 8}), g.Input("k", kF32, {8, 4}));
  for (int i = 0; i < 1000; ++i) scores = g.TypeCast(scores, i % 2 == 0 ? kF16 : kF32);
  const Value v = g.Input("v", kF32, {4, 8});
  for (int i = 0; i < 100; ++i) (void)g.MatMul(g.SoftMax(scores), v);
  const std::vector<Partition> result = testing::Partitions(std::move(g));
  ASSERT_EQ(MissesOf(result).size(), 100u);
  EXPECT_THAT(MissesOf(result)[0], HasSubstr("no MatMul is among the 64 ops before it"));
}

}  // namespace
}  // namespace kvant
