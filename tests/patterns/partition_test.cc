// Partitions with other shapes, with KV lengths, and with ranges of segments.
#include "kvant/patterns/partition.h"

#include "kvant/graph/status.h"
#include "kvant/tests/patterns/patterns_testing.h"

namespace kvant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
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
  PartitionResult result = Partitions(std::move(p.g));
  EXPECT_EQ(result.partitions.size(), 1u);
  return std::move(result.partitions[0]);
}

TEST(Partition, PortsInOrderOfUse) {
  const Partition partition = PlainPartition();
  EXPECT_THAT(partition.inputs(), ElementsAre(0, 1, 3, 4, 2));
  EXPECT_EQ(partition.outputs().size(), 1u);
  EXPECT_EQ(partition.pattern(), "attention: scale, additive mask");
  ASSERT_TRUE(partition.softmax_op());
  EXPECT_FALSE(partition.kv_lengths_id());
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
  const PartitionResult result = Partitions(std::move(g));
  ASSERT_EQ(result.partitions.size(), 1u);
  const Partition& partition = result.partitions[0];
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

TEST(Partition, KvLengthsAreTheLastInput) {
  const Partition partition = PlainPartition();
  for (const int64_t count : {1, 2}) {
    const auto with = partition.WithKvLengths(Tensor(77, kS32, {count}));
    ASSERT_TRUE(with.ok()) << with.status();
    EXPECT_EQ(with->inputs().back(), 77u);
    EXPECT_EQ(with->kv_lengths_id(), 77u);
    EXPECT_EQ(with->input(5).type, kS32);
    ASSERT_NE(with->attention(), nullptr);
    EXPECT_EQ(Text(with->attention()->kv_lengths),
              count == 1 ? "5:s32[1,1,1,1,1]s[0,0,0,0,0]" : "5:s32[2,1,1,1,1]s[1,0,0,0,0]");
    EXPECT_TRUE(with->attention()->Uses(Feature::kKvLengths));
    EXPECT_FALSE(with->WithKvLengths(Tensor(78, kS32, {1})).ok());
  }
}

TEST(Partition, KvLengthsThatDoNotFit) {
  const Partition partition = PlainPartition();
  EXPECT_FALSE(partition.WithKvLengths(Tensor(77, kS64, {2})).ok());
  EXPECT_FALSE(partition.WithKvLengths(Tensor(77, kS32, {2, 1})).ok());
  EXPECT_FALSE(partition.WithKvLengths(Tensor(0, kS32, {2})).ok());
  const auto three = partition.WithKvLengths(Tensor(77, kS32, {3}));
  ASSERT_TRUE(three.ok());
  EXPECT_EQ(three->attention(), nullptr);
  EXPECT_THAT(three->notes(), ElementsAre(HasSubstr("3 KV lengths are not one per batch of 2")));
  const auto two = three->WithPorts({Tensor(77, kS32, {2})});
  ASSERT_TRUE(two.ok()) << two.status();
  EXPECT_NE(two->attention(), nullptr);
  EXPECT_TRUE(two->notes().empty());

  Plain p;
  p.g.Output("o", p.g.Tanh(p.mask));
  const PartitionResult other = Partitions(std::move(p.g));
  const absl::Status status = other.partitions[0].WithKvLengths(Tensor(77, kS32, {1})).status();
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments);
  EXPECT_THAT(std::string(status.message()), HasSubstr("single op: Tanh"));
}

// K of two segments, V of one.
Partition SegmentedPartition() {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {2, 4, 3, 8});
  const Value k =
      g.Concat({g.Input("k0", kF32, {2, 4, 4, 8}), g.Input("k1", kF32, {2, 4, 5, 8})}, -2);
  const Value v = g.Input("v", kF32, {2, 4, 9, 6});
  g.Output("o", g.MatMul(g.SoftMax(g.MatMul(q, k, {.transpose_b = true})), v));
  PartitionResult result = Partitions(std::move(g));
  EXPECT_EQ(result.partitions.size(), 1u);
  return std::move(result.partitions[0]);
}

TEST(Partition, SegmentRangesAreTheLastInput) {
  const Partition partition = SegmentedPartition();
  for (const int64_t count : {1, 2}) {
    const auto with = partition.WithSegmentRanges(Tensor(77, kS32, {count, 3, 2}));
    ASSERT_TRUE(with.ok()) << with.status();
    EXPECT_EQ(with->inputs().back(), 77u);
    EXPECT_EQ(with->segment_ranges_id(), 77u);
    EXPECT_FALSE(with->kv_lengths_id());
    ASSERT_NE(with->attention(), nullptr);
    EXPECT_EQ(Text(with->attention()->segment_ranges),
              count == 1 ? "4:s32[1,1,1,3,2]s[0,0,0,2,1]" : "4:s32[2,1,1,3,2]s[6,0,0,2,1]");
    EXPECT_TRUE(with->attention()->Uses(Feature::kSegmentRanges));
    EXPECT_THAT(with->attention()->ToString(), HasSubstr("; ranges of segments at execution"));
  }
  auto strided = Tensor(77, kS32, {2, 3, 2});
  strided.strides = Dims{1, 4, 2};
  EXPECT_EQ(Text(partition.WithSegmentRanges(strided)->attention()->segment_ranges),
            "4:s32[2,1,1,3,2]s[1,0,0,4,2]");
  // Of attention stated directly, K and V are a segment each.
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {2, 4, 3, 8}), k = g.Input("k", kF32, {2, 2, 9, 8});
  g.Output("o", g.ScaledDotProductAttention(q, k, k, {}).first);
  const PartitionResult direct = Partitions(std::move(g));
  const auto with = direct.partitions[0].WithSegmentRanges(Tensor(77, kS32, {2, 2, 2}));
  ASSERT_TRUE(with.ok()) << with.status();
  EXPECT_EQ(Text(with->attention()->segment_ranges), "2:s32[2,1,1,2,2]s[4,0,0,2,1]");
}

TEST(Partition, SegmentRangesThatDoNotFit) {
  const Partition partition = SegmentedPartition();
  const auto why = [](const absl::StatusOr<Partition>& result) {
    EXPECT_EQ(ErrorKindOf(result.status()), ErrorKind::kInvalidArguments);
    return std::string(result.status().message());
  };
  for (const LogicalTensor& wrong : {Tensor(77, kS64, {2, 3, 2}), Tensor(77, kS32, {2, 4, 2}),
                                     Tensor(77, kS32, {2, 3, 1}), Tensor(77, kS32, {3, 2})}) {
    EXPECT_THAT(why(partition.WithSegmentRanges(wrong)),
                HasSubstr("ranges of 2 segments of K and 1 of V are s32 of shape [N, 3, 2], not "));
  }
  EXPECT_THAT(why(partition.WithSegmentRanges(Tensor(0, kS32, {2, 3, 2}))),
              HasSubstr("ranges of segments have the id of another tensor, 0"));
  const auto with = partition.WithSegmentRanges(Tensor(77, kS32, {2, 3, 2}));
  EXPECT_THAT(why(with->WithKvLengths(Tensor(78, kS32, {2}))),
              HasSubstr("has ranges of segments already"));
  EXPECT_THAT(why(with->WithSegmentRanges(Tensor(78, kS32, {2, 3, 2}))),
              HasSubstr("has ranges of segments already"));
  EXPECT_THAT(why(partition.WithKvLengths(Tensor(77, kS32, {2}))
                      ->WithSegmentRanges(Tensor(78, kS32, {2, 3, 2}))),
              HasSubstr("has KV lengths already"));
  EXPECT_THAT(why(with->WithPorts({Tensor(77, kS32, {2, 5, 2})})), HasSubstr("[N, 3, 2]"));
  const auto three = partition.WithSegmentRanges(Tensor(77, kS32, {3, 3, 2}));
  ASSERT_TRUE(three.ok()) << three.status();
  EXPECT_EQ(three->attention(), nullptr);
  EXPECT_THAT(three->notes(),
              ElementsAre(HasSubstr("3 ranges of segments are not one per batch of 2")));

  Plain p;
  p.g.Output("o", p.g.Tanh(p.mask));
  const PartitionResult other = Partitions(std::move(p.g));
  EXPECT_THAT(why(other.partitions[0].WithSegmentRanges(Tensor(77, kS32, {1, 2, 2}))),
              HasSubstr("takes no ranges of segments"));
}

TEST(Partition, GraphHasToBeFinalized) {
  EXPECT_EQ(ErrorKindOf(PartitionGraph(Graph()).status()), ErrorKind::kInvalidGraph);
}

}  // namespace
}  // namespace kvant
