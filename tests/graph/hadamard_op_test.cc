// Hadamard in graphs: shapes, types, JSON and errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvant/graph/builder.h"
#include "kvant/graph/json.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

using ::testing::HasSubstr;

absl::StatusOr<Graph> MakeGraph(std::optional<Dims> dims, Attributes attrs, DataType src = kF16,
                                DataType dst = kF16) {
  LogicalTensor x, y;
  x.id = 0;
  x.type = src;
  x.dims = std::move(dims);
  y.id = 1;
  y.type = dst;
  Graph graph;
  Op op;
  op.id = 7;
  op.name = "h";
  op.kind = OpKind::kHadamard;
  op.attrs = std::move(attrs);
  KVANT_RETURN_IF_ERROR(graph.AddOp(op, {x}, {y}));
  KVANT_RETURN_IF_ERROR(graph.Finalize());
  KVANT_RETURN_IF_ERROR(InferShapes(graph));
  return graph;
}

Attributes Block(int64_t block) { return {{Attr::kBlock, block}}; }

TEST(HadamardOp, HasItsInputsShape) {
  constexpr int64_t kAny = kUnknownDim;
  for (const std::optional<Dims>& dims :
       std::vector<std::optional<Dims>>{Dims{64}, Dims{2, 3, 96}, Dims{2, kAny, 32}, Dims{2, kAny},
                                        Dims{0, 32}, Dims{4, 0}, std::nullopt}) {
    const absl::StatusOr<Graph> graph = MakeGraph(dims, Block(32));
    ASSERT_TRUE(graph.ok()) << graph.status();
    EXPECT_EQ(graph->tensor(1).dims, dims);
  }
}

TEST(HadamardOp, ErrorsNameTheNumbers) {
  const auto expect = [](std::optional<Dims> dims, Attributes attrs, const std::string& part) {
    const absl::StatusOr<Graph> graph = MakeGraph(std::move(dims), std::move(attrs));
    ASSERT_FALSE(graph.ok());
    EXPECT_THAT(std::string(graph.status().message()), HasSubstr("Hadamard 'h' (id 7)"));
    EXPECT_THAT(std::string(graph.status().message()), HasSubstr(part));
  };
  expect(Dims{64}, Block(0), "a block of 0 is no power of two");
  expect(Dims{64}, Block(-8), "a block of -8 is no power of two");
  expect(Dims{96}, Block(48), "a block of 48 is no power of two");
  expect(std::nullopt, Block(48), "a block of 48 is no power of two");
  expect(Dims{2, 96}, Block(64), "blocks of 64 do not divide the last dim of tensor 0 [2,96]");
  expect(Dims{}, Block(2), "blocks of 2 do not divide the last dim");
  expect(Dims{64}, {}, "block");
}

TEST(HadamardOp, TakesFloatsOfOneType) {
  EXPECT_TRUE(MakeGraph(Dims{32}, Block(32), kBF16, kBF16).ok());
  EXPECT_FALSE(MakeGraph(Dims{32}, Block(32), kF16, kF32).ok());
  EXPECT_FALSE(MakeGraph(Dims{32}, Block(32), kS8, kS8).ok());
}

TEST(HadamardOp, RoundTripsThroughJson) {
  const absl::StatusOr<Graph> graph = MakeGraph(Dims{2, 96}, Block(32));
  ASSERT_TRUE(graph.ok()) << graph.status();
  const absl::StatusOr<Graph> again = GraphFromJson(GraphToJson(*graph));
  ASSERT_TRUE(again.ok()) << again.status();
  ASSERT_EQ(again->ops().size(), 1u);
  EXPECT_EQ(again->ops()[0].Get<Attr::kBlock>(), 32);
  EXPECT_EQ(again->ops()[0].kind, OpKind::kHadamard);
}

}  // namespace
}  // namespace kvant
