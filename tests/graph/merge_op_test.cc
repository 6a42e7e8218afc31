// MergeAttention in graphs: shapes, types, ports, JSON and errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvant/graph/builder.h"
#include "kvant/graph/json.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

using ::testing::HasSubstr;

struct Port {
  std::optional<Dims> dims;
  DataType type = kF32;
};

absl::StatusOr<Graph> MakeGraph(const std::vector<Port>& inputs, const std::vector<Port>& outputs) {
  std::vector<LogicalTensor> tensors;
  for (const auto* ports : {&inputs, &outputs}) {
    for (const Port& port : *ports) {
      LogicalTensor& tensor = tensors.emplace_back();
      tensor.id = tensors.size() - 1;
      tensor.type = port.type;
      tensor.dims = port.dims;
    }
  }
  Graph graph;
  Op op;
  op.id = 7;
  op.name = "m";
  op.kind = OpKind::kMergeAttention;
  KVANT_RETURN_IF_ERROR(graph.AddOp(op, absl::MakeSpan(tensors).first(inputs.size()),
                                    absl::MakeSpan(tensors).subspan(inputs.size())));
  KVANT_RETURN_IF_ERROR(graph.Finalize());
  KVANT_RETURN_IF_ERROR(InferShapes(graph));
  return graph;
}

TEST(MergeAttentionOp, HasTheShapeOfItsParts) {
  constexpr int64_t kAny = kUnknownDim;
  const Port o{Dims{2, 3, 5, 16}}, s{Dims{2, 3, 5, 1}}, unknown{};
  const auto dims = [&](const std::vector<Port>& inputs) {
    const absl::StatusOr<Graph> graph = MakeGraph(inputs, {{}, {}});
    EXPECT_TRUE(graph.ok()) << graph.status();
    return std::pair(graph->tensor(inputs.size()).dims, graph->tensor(inputs.size() + 1).dims);
  };
  const auto whole = std::pair(o.dims, s.dims);
  EXPECT_EQ(dims({o, s}), whole);
  EXPECT_EQ(dims({o, s, o, s, o, s}), whole);
  EXPECT_EQ(dims({o, unknown, unknown, unknown}), whole);
  EXPECT_EQ(dims({{Dims{kAny, 3, kAny, 16}}, unknown, unknown, s}), whole);
  EXPECT_EQ(dims({unknown, s}), std::pair(std::optional(Dims{2, 3, 5, kAny}), s.dims));
  EXPECT_EQ(dims({unknown, unknown}), std::pair(std::optional<Dims>(), std::optional<Dims>()));
  EXPECT_EQ(dims({{Dims{16}}, {Dims{1}}}),
            std::pair(std::optional(Dims{16}), std::optional(Dims{1})));
}

TEST(MergeAttentionOp, ErrorsNameTheTensors) {
  const Port o{Dims{2, 3, 16}}, s{Dims{2, 3, 1}};
  const auto expect = [](const std::vector<Port>& inputs, ErrorKind kind, const std::string& part,
                         const std::vector<Port>& outputs = {{}}) {
    const absl::StatusOr<Graph> graph = MakeGraph(inputs, outputs);
    ASSERT_FALSE(graph.ok()) << part;
    EXPECT_EQ(ErrorKindOf(graph.status()), kind);
    EXPECT_THAT(std::string(graph.status().message()), HasSubstr("MergeAttention 'm' (id 7)"));
    EXPECT_THAT(std::string(graph.status().message()), HasSubstr(part));
  };
  constexpr ErrorKind kOp = ErrorKind::kInvalidGraphOp, kShape = ErrorKind::kInvalidShape,
                      kType = ErrorKind::kInvalidDataType;
  expect({}, kOp, "has 0 inputs, takes 2 and multiples of 2 more");
  expect({o}, kOp, "has 1 inputs, takes 2");
  expect({o, s, o}, kOp, "has 3 inputs, takes 2 and multiples of 2 more");
  expect({o, s}, kOp, "has 3 outputs", {{}, {}, {}});
  expect({o, s, {Dims{2, 4, 16}}, s}, kShape,
         "tensor 2 [2,4,16] is no part beside parts whose outputs are [2,3,16]");
  expect({o, s, o, {Dims{2, 3, 2}}}, kShape,
         "stats have one number for a row, but are tensor 3 [2,3,2]");
  expect({o, {Dims{2, 3}}}, kShape, "stats have one number for a row");
  expect({o, {Dims{2, 1}}}, kShape, "tensor 1 [2,1] is no part beside");
  expect({{Dims{}}, s}, kShape, "tensor 0 [] has no dim of channels");
  expect({o, s}, kShape, "but tensor 2 [2,3,8] is declared", {{Dims{2, 3, 8}}});
  expect({{o.dims, kS8}, s}, kType, "src (tensor 0) is s8, not one of f32, bf16, f16");
  expect({{o.dims, kF16}, s, o, s}, kType, "src (tensor 2) is f32 but src (tensor 0) is f16");
  expect({o, {s.dims, kF16}}, kType, "stats (tensor 1) is f16, not f32");
  expect({o, s, o, {s.dims, kBF16}}, kType, "stats (tensor 3) is bf16, not f32");
  expect({o, s}, kType, "stats (tensor 3) is f16, not f32", {{}, {{}, kF16}});
}

TEST(MergeAttentionOp, NamesItsPortsInTurn) {
  const absl::StatusOr<Graph> graph = MakeGraph(
      {{Dims{2, 8}, kF16}, {Dims{2, 1}}, {Dims{2, 8}, kF16}, {Dims{2, 1}}}, {{{}, kBF16}});
  ASSERT_TRUE(graph.ok()) << graph.status();
  const Op& op = graph->ops()[0];
  EXPECT_EQ(InputName(op, 0), "src");
  EXPECT_EQ(InputName(op, 1), "stats");
  EXPECT_EQ(InputName(op, 2), "src");
  EXPECT_EQ(InputName(op, 3), "stats");
}

TEST(MergeAttentionOp, RoundTripsThroughJson) {
  const Port o{Dims{2, 8}}, s{Dims{2, 1}};
  const absl::StatusOr<Graph> graph = MakeGraph({o, s, o, s}, {{}, {}});
  ASSERT_TRUE(graph.ok()) << graph.status();
  const absl::StatusOr<Graph> again = GraphFromJson(GraphToJson(*graph));
  ASSERT_TRUE(again.ok()) << again.status();
  ASSERT_EQ(again->ops().size(), 1u);
  EXPECT_EQ(again->ops()[0].inputs, graph->ops()[0].inputs);
  EXPECT_EQ(again->ops()[0].kind, OpKind::kMergeAttention);
}

TEST(MergeAttentionOp, BuilderMakesIt) {
  GraphBuilder g;
  const Value o = g.Input("o", kF16, {3, 8}), s = g.Input("s", kF32, {3, 1});
  const auto [plain, none] = g.MergeAttention({{o, s}, {o, s}}, {});
  EXPECT_FALSE(none);
  EXPECT_EQ(g.Describe(plain).type, kF16);
  const auto [output, stats] = g.MergeAttention({{plain, s}}, {.type = kF32, .stats = true});
  ASSERT_TRUE(stats);
  EXPECT_EQ(g.Describe(output).type, kF32);
  EXPECT_EQ(*g.Describe(*stats).dims, (Dims{3, 1}));
  GraphBuilder empty;
  empty.MergeAttention({}, {});
  EXPECT_THAT(std::string(empty.status().message()), HasSubstr("has 0 inputs"));
}

}  // namespace
}  // namespace kvant
