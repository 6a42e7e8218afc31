// DynamicQuantize in graphs: its two forms, their shapes, types, JSON and errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "kvant/graph/builder.h"
#include "kvant/graph/codebooks.h"
#include "kvant/graph/json.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Ints = std::vector<int64_t>;

LogicalTensor Tensor(TensorId id, DataType type, std::optional<Dims> dims = std::nullopt) {
  LogicalTensor tensor;
  tensor.id = id;
  tensor.type = type;
  tensor.dims = std::move(dims);
  return tensor;
}

absl::StatusOr<Graph> MakeGraph(const std::vector<LogicalTensor>& inputs,
                                const std::vector<LogicalTensor>& outputs, Attributes attrs = {}) {
  Graph graph;
  Op op;
  op.id = 2;
  op.name = "x";
  op.kind = OpKind::kDynamicQuantize;
  op.attrs = std::move(attrs);
  KVANT_RETURN_IF_ERROR(graph.AddOp(op, inputs, outputs));
  KVANT_RETURN_IF_ERROR(graph.Finalize());
  KVANT_RETURN_IF_ERROR(InferShapes(graph));
  return graph;
}

Attributes Groups(Ints shape) {
  return {{Attr::kQType, std::string("per_group")}, {Attr::kGroupShape, std::move(shape)}};
}
Attributes Channels(int64_t axis) {
  return {{Attr::kQType, std::string("per_channel")}, {Attr::kAxis, axis}};
}

// The dims that inference finds for codes, scales and zero points.
void ExpectDims(std::optional<Dims> x, const Attributes& attrs, std::optional<Dims> parameters) {
  const absl::StatusOr<Graph> graph =
      MakeGraph({Tensor(0, kF32, x)}, {Tensor(1, kU4), Tensor(2, kF16), Tensor(3, kU4)}, attrs);
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_EQ(graph->tensor(1).dims, x);
  EXPECT_EQ(graph->tensor(2).dims, parameters);
  EXPECT_EQ(graph->tensor(3).dims, parameters);
}

TEST(DynamicQuantizeShapes, OneScalePerTensorChannelOrGroup) {
  constexpr int64_t kAny = kUnknownDim;
  ExpectDims(Dims{2, 8, 64}, {}, Dims{1});
  ExpectDims(Dims{2, 8, 64}, Channels(1), Dims{8});
  ExpectDims(Dims{2, 8, 64}, Channels(-1), Dims{64});
  ExpectDims(Dims{2, 8, 64}, Groups({1, 1, 32}), Dims{2, 8, 2});
  ExpectDims(Dims{2, 8, 64}, Groups({2, 4, 1}), Dims{1, 2, 64});
  ExpectDims(Dims{2, kAny, 64}, Groups({1, 4, 32}), Dims{2, kAny, 2});
  ExpectDims(Dims{0, 64}, Groups({1, 32}), Dims{0, 2});
  ExpectDims(std::nullopt, {}, Dims{1});
  ExpectDims(std::nullopt, Channels(1), std::nullopt);
  ExpectDims(std::nullopt, Groups({1, 32}), std::nullopt);
}

void ExpectError(const std::vector<LogicalTensor>& inputs,
                 const std::vector<LogicalTensor>& outputs, const Attributes& attrs, ErrorKind kind,
                 const std::string& sentence) {
  const absl::StatusOr<Graph> graph = MakeGraph(inputs, outputs, attrs);
  ASSERT_FALSE(graph.ok()) << "accepted instead of: " << sentence;
  EXPECT_EQ(ErrorKindOf(graph.status()), kind) << graph.status();
  EXPECT_EQ(std::string(graph.status().message()), "DynamicQuantize 'x' (id 2): " + sentence);
}

TEST(DynamicQuantizeErrors, Forms) {
  const LogicalTensor x = Tensor(0, kF32, Dims{8}), codes = Tensor(1, kS8),
                      scales = Tensor(2, kF32), zps = Tensor(3, kS8);
  const LogicalTensor given = Tensor(4, kF32, Dims{1});
  const auto graph_error = [&](const auto& inputs, const auto& outputs, const Attributes& attrs,
                               const std::string& sentence) {
    ExpectError(inputs, outputs, attrs, ErrorKind::kInvalidGraphOp, sentence);
  };
  using Tensors = std::vector<LogicalTensor>;
  graph_error(Tensors{x}, Tensors{codes}, {}, "has neither an input nor an output for its scales");
  graph_error(Tensors{x, given}, Tensors{codes, scales}, {},
              "has scales as input (tensor 4) and as output (tensor 2)");
  graph_error(Tensors{x, given}, Tensors{codes}, {{Attr::kPowerOfTwoScales, true}},
              "attribute 'power_of_two_scales' is for scales that it computes, but they are an "
              "input (tensor 4)");
  graph_error(Tensors{x, given}, Tensors{codes}, {{Attr::kScaleFloor, 1.f}},
              "attribute 'scale_floor' is for scales that it computes, but they are an input "
              "(tensor 4)");
  graph_error(Tensors{x}, Tensors{codes, scales, zps}, {{Attr::kScaleFloor, -1.f}},
              "attribute 'scale_floor' is -1, less than 0");
}

TEST(DynamicQuantizeErrors, Codebooks) {
  const auto error = [](DataType codes, std::vector<float> codebook, DataType zps,
                        const std::string& sentence) {
    std::vector<LogicalTensor> outputs{Tensor(1, codes), Tensor(2, kF32)};
    if (zps != kUndef) outputs.push_back(Tensor(3, zps));
    ExpectError({Tensor(0, kF32, Dims{8})}, outputs, {{Attr::kCodebook, std::move(codebook)}},
                ErrorKind::kInvalidGraphOp, sentence);
  };
  const std::vector<float> nf4(std::begin(kNf4Codebook), std::end(kNf4Codebook));
  error(kU4, {1, 2, 3, 4}, kUndef,
        "a codebook of 4 for codes of type u4; it goes with u2 (4), u4 (16) or u8 (256)");
  error(kS4, nf4, kUndef,
        "a codebook of 16 for codes of type s4; it goes with u2 (4), u4 (16) or u8 (256)");
  error(kU2, {}, kUndef,
        "a codebook of 0 for codes of type u2; it goes with u2 (4), u4 (16) or u8 (256)");
  error(kU4, nf4, kF32, "has a codebook and zero points");
  error(kU2, {0, 0, -0.f, 0}, kUndef, "its codebook has no value but 0");
  error(kU2, {0, 1, 2, std::numeric_limits<float>::infinity()}, kUndef,
        "attribute 'codebook' is infinite or not a number");
  EXPECT_TRUE(MakeGraph({Tensor(0, kF32, Dims{8})}, {Tensor(1, kU4), Tensor(2, kF32)},
                        {{Attr::kCodebook, nf4}})
                  .ok());
  EXPECT_TRUE(MakeGraph({Tensor(0, kF32, Dims{8}), Tensor(2, kF16, Dims{1})}, {Tensor(1, kU4)},
                        {{Attr::kCodebook, nf4}})
                  .ok());
}

TEST(DynamicQuantizeErrors, Formulas) {
  const auto make = [](DataType codes, DataType zps, Attributes attrs, bool computes = true) {
    attrs.Set(Attr::kFormula, std::string("ggml"));
    std::vector<LogicalTensor> inputs{Tensor(0, kF32, Dims{8})}, outputs{Tensor(1, codes)};
    auto& parameters = computes ? outputs : inputs;
    parameters.push_back(Tensor(2, kF16, computes ? std::nullopt : std::optional(Dims{1})));
    if (zps != kUndef) parameters.push_back(Tensor(3, zps));
    return MakeGraph(inputs, outputs, std::move(attrs)).status();
  };
  const auto error = [](const absl::Status& status, const std::string& sentence) {
    EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidGraphOp) << status;
    EXPECT_EQ(std::string(status.message()), "DynamicQuantize 'x' (id 2): " + sentence);
  };
  const Attributes iq4_nl{
      {Attr::kCodebook, std::vector<float>(std::begin(kIq4NlCodebook), std::end(kIq4NlCodebook))}};
  const Attributes e2m1{
      {Attr::kCodebook, std::vector<float>(std::begin(kE2M1Codebook), std::end(kE2M1Codebook))}};
  EXPECT_TRUE(make(kS8, kUndef, {}).ok());
  EXPECT_TRUE(make(kS4, kUndef, {}).ok());
  EXPECT_TRUE(make(kU4, kF16, {}).ok());
  EXPECT_TRUE(make(kU4, kUndef, iq4_nl).ok());
  const std::string takes =
      "formula ggml is for s8 and s4 without zero points, u4 with ones in real units and u4 with a "
      "codebook, not for ";
  error(make(kU4, kUndef, {}), takes + "u4");
  error(make(kS8, kS8, {}), takes + "s8 with zero points");
  error(make(kU4, kU4, {}), takes + "u4 with zero points");
  error(make(kF8E4M3, kUndef, {}), takes + "f8_e4m3");
  error(make(kU4, kUndef, e2m1),
        "formula ggml takes a codebook that ascends and does not begin with 0");
  error(make(kS8, kUndef, {}, /*computes=*/false),
        "formula ggml is for scales that it computes, but they are an input");
  error(make(kS8, kUndef, {{Attr::kScaleFloor, 0.5f}}),
        "attribute 'scale_floor' does not go with formula ggml");
  error(make(kS8, kUndef, {{Attr::kPowerOfTwoScales, true}}),
        "attribute 'power_of_two_scales' does not go with formula ggml");
}

TEST(DynamicQuantizeErrors, Types) {
  const auto type_error = [](DataType x, DataType codes, DataType scales, DataType zps,
                             const std::string& sentence) {
    ExpectError({Tensor(0, x, Dims{8})}, {Tensor(1, codes), Tensor(2, scales), Tensor(3, zps)}, {},
                ErrorKind::kInvalidDataType, sentence);
  };
  type_error(kS8, kS8, kF32, kS8, "src (tensor 0) is s8, not one of f32, bf16, f16");
  type_error(kF32, kF16, kF32, kS8,
             "dst (tensor 1) is f16, not one of u8, s8, u4, s4, u2, s2, f8_e4m3, f8_e5m2");
  type_error(kF32, kS8, kS8, kS8, "scales (tensor 2) is s8, not one of f32, bf16, f16");
  type_error(kF32, kS8, kF32, kBoolean,
             "zps (tensor 3) is boolean, not one of s32, u8, s8, u4, s4, u2, s2, f32, bf16, f16");
  type_error(kF32, kF8E4M3, kF32, kF32,
             "computes no zero points (tensor 3) for dst (tensor 1) of f8_e4m3");
}

TEST(DynamicQuantizeErrors, Shapes) {
  const auto error = [](const Dims& x, const Attributes& attrs, ErrorKind kind,
                        const std::string& sentence, std::optional<Dims> scales = std::nullopt) {
    ExpectError({Tensor(0, kF32, x)}, {Tensor(1, kS8), Tensor(2, kF32, std::move(scales))}, attrs,
                kind, sentence);
  };
  const ErrorKind arguments = ErrorKind::kInvalidArguments;
  error({2, 8}, Groups({1, 3}), arguments, "groups of 3 do not divide dim 1 of tensor 0 [2,8]");
  error({2, 8}, Groups({8}), arguments, "group_shape [8] and tensor 0 [2,8] differ in rank");
  error({2, 8}, Groups({1, 0}), arguments, "group_shape [1,0] has a group of 0 in dim 1");
  error({2, 8}, {{Attr::kQType, std::string("per_group")}}, arguments,
        "per_group needs a group_shape");
  const absl::StatusOr<Graph> graph = MakeGraph(
      {Tensor(0, kF32, Dims{2, 8})}, {Tensor(1, kS8), Tensor(2, kF32, Dims{2, 4})}, Groups({1, 4}));
  ASSERT_FALSE(graph.ok());
  EXPECT_EQ(ErrorKindOf(graph.status()), ErrorKind::kInvalidShape) << graph.status();
  EXPECT_THAT(std::string(graph.status().message()), HasSubstr("tensor 2"));
  EXPECT_FALSE(
      MakeGraph({Tensor(0, kF32, Dims{8})}, {Tensor(1, kS8), Tensor(2, kF32)}, Channels(1)).ok());
}

TEST(DynamicQuantizeBuilder, QuantizedValuesGoStraightIntoDequantization) {
  GraphBuilder g;
  const Value x = g.Input("x", kF16, {2, 64, 32});
  const GraphBuilder::Quantized k = g.DynamicQuantize(x, {.group_shape = {1, 32, 1},
                                                          .type = kU4,
                                                          .scale_type = kF16,
                                                          .zero_point_type = kF16,
                                                          .scale_floor = 0.125f});
  const GraphBuilder::Quantized v =
      g.DynamicQuantize(x, {.axis = 2, .type = kS8, .power_of_two_scales = true});
  EXPECT_FALSE(v.zero_points.has_value());
  EXPECT_EQ(g.Describe(k.codes).dims, (Dims{2, 64, 32}));
  EXPECT_EQ(g.Describe(k.scales).dims, (Dims{2, 2, 32}));
  EXPECT_EQ(g.Describe(*k.zero_points).dims, (Dims{2, 2, 32}));
  EXPECT_EQ(g.Describe(v.scales).dims, (Dims{32}));
  g.DynamicDequantize(k.codes, k.scales, *k.zero_points, {.group_shape = {1, 32, 1}});
  g.DynamicDequantize(v.codes, v.scales, {.axis = 2});
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_EQ(graph->ops()[0].Get<Attr::kScaleFloor>(), 0.125f);
  EXPECT_EQ(graph->ops()[0].attrs.Find(Attr::kPowerOfTwoScales), nullptr);
  EXPECT_TRUE(graph->ops()[1].Get<Attr::kPowerOfTwoScales>());
}

TEST(DynamicQuantizeJson, RoundTrips) {
  Attributes attrs = Groups({1, 4});
  attrs.Set(Attr::kPowerOfTwoScales, true);
  attrs.Set(Attr::kScaleFloor, 0.1f);
  const absl::StatusOr<Graph> graph = MakeGraph(
      {Tensor(0, kBF16, Dims{2, 8})}, {Tensor(1, kU2), Tensor(2, kF16), Tensor(3, kU8)}, attrs);
  ASSERT_TRUE(graph.ok()) << graph.status();
  const std::string text = GraphToJson(*graph);
  const absl::StatusOr<Graph> again = GraphFromJson(text);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->ops()[0].attrs, graph->ops()[0].attrs);
  EXPECT_THAT(again->ops()[0].inputs, ElementsAre(0));
  EXPECT_THAT(again->ops()[0].outputs, ElementsAre(1, 2, 3));
  EXPECT_EQ(GraphToJson(*again), text);
}

TEST(DynamicQuantizeJson, CodebooksAndFormulasRoundTrip) {
  Attributes attrs = Groups({1, 4});
  attrs.Set(Attr::kCodebook,
            std::vector<float>(std::begin(kIq4NlCodebook), std::end(kIq4NlCodebook)));
  attrs.Set(Attr::kFormula, std::string("ggml"));
  const absl::StatusOr<Graph> graph =
      MakeGraph({Tensor(0, kF32, Dims{2, 8})}, {Tensor(1, kU4), Tensor(2, kF16)}, attrs);
  ASSERT_TRUE(graph.ok()) << graph.status();
  const absl::StatusOr<Graph> again = GraphFromJson(GraphToJson(*graph));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->ops()[0].attrs, graph->ops()[0].attrs);
}

// oneDNN's reader knows no other attributes than its own.
TEST(DynamicQuantizeJson, TheFormThatTakesScalesIsWrittenAsEver) {
  const absl::StatusOr<Graph> graph =
      MakeGraph({Tensor(0, kF32, Dims{2, 8}), Tensor(4, kF32, Dims{1})}, {Tensor(1, kS8)});
  ASSERT_TRUE(graph.ok()) << graph.status();
  std::vector<std::string> names;
  for (const auto& [attr, value] : graph->ops()[0].attrs) names.emplace_back(AttrName(attr));
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("qtype", "axis"));
  EXPECT_THAT(GraphToJson(*graph), ::testing::Not(HasSubstr("scale_floor")));
}

}  // namespace
}  // namespace kvant
