// Partitions with other shapes.
#include "kvant/patterns/partition.h"

#include "kvant/graph/status.h"
#include "kvant/tests/patterns/patterns_testing.h"

namespace kvant {
namespace {

using ::testing::ElementsAre;
using testing::KindsOf;
using testing::Partitions;
using testing::Plain;
using testing::Text;

LogicalTensor Tensor(TensorId id, DataType type, Dims dims) {
  LogicalTensor tensor;
  tensor.id = id;
  tensor.type = type;
  tensor.dims = std::move(dims);
  return tensor;
}

Partition PlainPartition() {
  Plain p;
  const Value s = p.g.Add(p.g.Divide(p.Scores(), p.scale), p.mask);
  p.g.Output("o", p.g.MatMul(p.g.SoftMax(s), p.v));
  std::vector<Partition> result = Partitions(std::move(p.g));
  EXPECT_EQ(result.size(), 1u);
  return std::move(result[0]);
}

TEST(Partition, PortsInOrderOfUse) {
  const Partition partition = PlainPartition();
  EXPECT_THAT(partition.inputs(), ElementsAre(0, 1, 3, 4, 2));
  EXPECT_EQ(partition.outputs().size(), 1u);
  EXPECT_EQ(partition.pattern(), "attention: scale, additive mask");
}

TEST(Partition, WithPortsResolvesAgain) {
  const Partition partition = PlainPartition();
  const absl::StatusOr<Partition> longer =
      partition.WithPorts({Tensor(1, kF32, {2, 4, 9, 8}), Tensor(2, kF32, {2, 4, 9, 6}),
                           Tensor(4, kF32, {1, 1, 1, 9})});
  ASSERT_TRUE(longer.ok()) << longer.status();
  ASSERT_NE(longer->attention(), nullptr);
  EXPECT_EQ(longer->attention()->kv_len, 9);
  EXPECT_EQ(Text(longer->attention()->steps[1].operand.view), "3:f32[1,1,1,1,9]s[0,0,0,0,1]");
  EXPECT_EQ(partition.attention()->kv_len, 5);
}

TEST(Partition, WithPortsRejectsContradictions) {
  const Partition partition = PlainPartition();
  EXPECT_FALSE(partition.WithPorts({Tensor(1, kF32, {2, 4, 9, 8})}).ok());  // V has 5 tokens
  EXPECT_FALSE(partition.WithPorts({Tensor(99, kF32, {1})}).ok());
  const auto unknown = partition.WithPorts({Tensor(0, kF32, {2, 4, kUnknownDim, 8})});
  EXPECT_FALSE(unknown.ok());
}

TEST(Partition, UnknownShapesAreMatchedAndResolvedLater) {
  GraphBuilder g;
  const Dims unknown = {kUnknownDim, 4, kUnknownDim, 8};
  const Value q = g.Input("q", kF32, unknown), k = g.Input("k", kF32, unknown);
  const Value s = g.CausalMask(g.MatMul(q, k, {.transpose_b = true}), g.Input("f", kF32, {1}));
  g.Output("o", g.MatMul(g.SoftMax(s), k));
  const std::vector<Partition> result = Partitions(std::move(g));
  ASSERT_EQ(result.size(), 1u);
  const Partition& partition = result[0];
  EXPECT_EQ(partition.kind(), Partition::Kind::kAttention);
  EXPECT_EQ(partition.attention(), nullptr);
  EXPECT_TRUE(partition.notes().empty());
  const auto known =
      partition.WithPorts({Tensor(q.id, kF32, {2, 4, 3, 8}), Tensor(k.id, kF32, {2, 4, 7, 8})});
  ASSERT_TRUE(known.ok()) << known.status();
  ASSERT_NE(known->attention(), nullptr) << known->notes()[0];
  EXPECT_EQ(known->attention()->kv_len, 7);
  EXPECT_EQ(ErrorKindOf(partition.WithPorts({Tensor(q.id, kF32, {2, 4, 3, 8})}).status()),
            ErrorKind::kInvalidShape);
}

TEST(Partition, DeclaredShapesThatContradictAreANoteAndNoSpec) {
  Op store;
  store.kind = OpKind::kDynamicQuantize;
  store.name = "store";
  store.attrs = {{Attr::kQType, std::string("per_group")},
                 {Attr::kGroupShape, std::vector<int64_t>(9, 4)}};
  Graph graph;
  ASSERT_TRUE(graph
                  .AddOp(store, {Tensor(1, kF32, {2, 8})},
                         {Tensor(2, kS8, {2, 8}), Tensor(3, kF32, {2, 2})})
                  .ok());
  ASSERT_TRUE(graph.Finalize().ok());
  const absl::StatusOr<std::vector<Partition>> result = PartitionGraph(graph);
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(result->size(), 1u);
  EXPECT_EQ(result->front().store(), nullptr);
  EXPECT_THAT(result->front().notes(),
              ElementsAre("DynamicQuantize 'store' (id 0): group_shape [4,4,4,4,4,4,4,4,4] and "
                          "tensor 1 [2,8] differ in rank"));
  EXPECT_EQ(result->front().ops().tensor(3).dims, (Dims{2, 2}));
}

TEST(Partition, GraphHasToBeFinalized) {
  EXPECT_EQ(ErrorKindOf(PartitionGraph(Graph()).status()), ErrorKind::kInvalidGraph);
}

TEST(Partition, EachOpIsInOne) {
  const auto attention = [](Plain& p, Value q) {
    return p.g.MatMul(p.g.SoftMax(p.g.MatMul(q, p.k, {.transpose_b = true})), p.k);
  };
  {  // What moves the output of one attention, and makes the queries of the next.
    Plain p;
    p.g.Output("o", attention(p, p.g.Reshape(attention(p, p.q), {2, 4, 3, 8})));
    EXPECT_EQ(KindsOf(Partitions(std::move(p.g))),
              "MatMul SoftMax MatMul StaticReshape | MatMul SoftMax MatMul");
  }
  {  // The same of values, where their SoftMax comes first.
    Plain p;
    const Value probs = p.g.SoftMax(p.g.MatMul(p.q, p.q, {.transpose_b = true}));
    p.g.Output("o", p.g.MatMul(probs, p.g.Reshape(attention(p, p.q), {2, 4, 3, 8})));
    EXPECT_EQ(KindsOf(Partitions(std::move(p.g))),
              "MatMul SoftMax MatMul | MatMul SoftMax StaticReshape MatMul");
  }
}

TEST(Partition, ChainsGoOnWhereOperandsMaySwap) {
  Plain p;
  const Value x = p.g.Input("x", kF32, {2, 4, 3, 5});
  p.g.Output("a", p.g.Add(p.mask, p.g.Tanh(x)));
  p.g.Output("b", p.g.Subtract(p.mask, p.g.Tanh(x)));
  p.g.Output("c", p.g.Divide(p.mask, p.g.Tanh(x)));
  EXPECT_EQ(KindsOf(Partitions(std::move(p.g))), "Tanh Add | Tanh | Subtract | Tanh | Divide");
}

LogicalTensor Unknown(TensorId id) {
  LogicalTensor tensor;
  tensor.id = id;
  tensor.type = kF32;
  return tensor;
}
// An axis that counts from the front is taken for the last one.
TEST(Partition, UnknownRanksAreMatched) {
  for (const int64_t axis : {-2, -1, 3}) {
    Graph graph;
    const auto add = [&](OpKind kind, int64_t id, std::vector<TensorId> in, TensorId out,
                         Attributes attrs) {
      Op op;
      op.kind = kind;
      op.id = id;
      op.attrs = std::move(attrs);
      std::vector<LogicalTensor> inputs;
      for (const TensorId id : in) inputs.push_back(Unknown(id));
      ASSERT_TRUE(graph.AddOp(op, inputs, {Unknown(out)}).ok());
    };
    add(OpKind::kMatMul, 0, {0, 1}, 2, {{Attr::kTransposeB, true}});
    add(OpKind::kSoftMax, 1, {2}, 3, {{Attr::kAxis, axis}});
    add(OpKind::kMatMul, 2, {3, 4}, 5, {});
    ASSERT_TRUE(graph.Finalize().ok());
    EXPECT_EQ(KindsOf(PartitionGraph(graph).value()),
              axis == -2 ? "MatMul | SoftMax | MatMul" : "MatMul SoftMax MatMul")
        << axis;
  }
}

}  // namespace
}  // namespace kvant
