#include "kvant/tools/overrides.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "kvant/graph/builder.h"

namespace kvant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// q 0, k 1 -> scores 2; scale 3 -> scaled 4 -> probs 5; v 6 -> o 7; ops 0..3
Graph Attention() {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {1, 2, 4, 8});
  const Value k = g.Input("k", kF32, {1, 2, 16, 8});
  const Value scores = g.MatMul(q, k, {.transpose_b = true});
  const Value scaled = g.Divide(scores, g.Input("scale", kF32, {1}));
  const Value probs = g.SoftMax(scaled);
  g.Output("o", g.MatMul(probs, g.Input("v", kF32, {1, 2, 16, 8})));
  return std::move(g).Build().value();
}

// "ID:" of a tensor by name.
std::string Id(const Graph& graph, std::string_view name) {
  return absl::StrCat(graph.FindTensor(name)->desc.id, ":");
}

TEST(OverridesTest, NothingChangesNothing) {
  const Graph graph = Attention();
  const absl::StatusOr<Graph> same = ApplyOverrides(graph, {});
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_THAT(*same->FindTensor("o")->desc.dims, ElementsAre(1, 2, 4, 8));
}

TEST(OverridesTest, NewShapesAreInferredThrough) {
  const Graph graph = Attention();
  const absl::StatusOr<Graph> longer =
      ApplyOverrides(graph, {.in_shapes = absl::StrCat(Id(graph, "q"), "3x2x5x8+", Id(graph, "k"),
                                                       "3x2x32x8+", Id(graph, "v"), "3x2x32x6")});
  ASSERT_TRUE(longer.ok()) << longer.status();
  EXPECT_THAT(*longer->FindTensor("o")->desc.dims, ElementsAre(3, 2, 5, 6));
  EXPECT_THAT(longer->FindTensor("o")->desc.StridesOrDense(), ElementsAre(60, 30, 6, 1));
  const TensorId scores = longer->ops()[0].outputs[0];
  EXPECT_THAT(*longer->tensor(scores).dims, ElementsAre(3, 2, 5, 32));
}

TEST(OverridesTest, LayoutsAsTagsAndStrides) {
  const Graph graph = Attention();
  const auto strides_of_q = [&](const std::string& value) {
    const absl::StatusOr<Graph> g = ApplyOverrides(graph, {.in_shapes = Id(graph, "q") + value});
    EXPECT_TRUE(g.ok()) << value << ": " << g.status();
    return g.ok() ? g->FindTensor("q")->desc.StridesOrDense() : Dims();
  };
  EXPECT_THAT(strides_of_q("acbd"), ElementsAre(64, 8, 16, 1));
  EXPECT_THAT(strides_of_q("*acbd"), ElementsAre(64, 8, 16, 1));
  EXPECT_THAT(strides_of_q("*128x64x16x2"), ElementsAre(128, 64, 16, 2));
  EXPECT_THAT(strides_of_q("1x2x6x8*abcd"), ElementsAre(96, 48, 8, 1));
  EXPECT_THAT(strides_of_q("1x2x6x8*acbd"), ElementsAre(96, 8, 16, 1));
  EXPECT_THAT(strides_of_q("1x2x6x8"), ElementsAre(96, 48, 8, 1));
}

TEST(OverridesTest, InferredTensorsKeepTheOrderOfTheirStrides) {
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {1, 2, 4, 8});
  g.Output("y", g.Tanh(x), Dims{64, 8, 16, 1});
  const Graph graph = std::move(g).Build().value();
  const absl::StatusOr<Graph> longer =
      ApplyOverrides(graph, {.in_shapes = Id(graph, "x") + "1x3x5x8"});
  ASSERT_TRUE(longer.ok()) << longer.status();
  EXPECT_THAT(longer->tensor(longer->outputs()[0]).StridesOrDense(), ElementsAre(120, 8, 24, 1));
}

TEST(OverridesTest, ScalarsInBothSpellings) {
  const Graph graph = Attention();
  for (const char* scalar : {"-", "scalar"}) {
    const absl::StatusOr<Graph> g =
        ApplyOverrides(graph, {.in_shapes = Id(graph, "scale") + scalar});
    ASSERT_TRUE(g.ok()) << g.status();
    EXPECT_EQ(g->FindTensor("scale")->desc.rank(), 0);
  }
}

TEST(OverridesTest, TypesOfAllOrOne) {
  const Graph graph = Attention();
  const absl::StatusOr<Graph> all = ApplyOverrides(graph, {.dt = "f16"});
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->FindTensor("q")->desc.type, kF16);
  EXPECT_EQ(all->FindTensor("o")->desc.type, kF16);
  const absl::StatusOr<Graph> one = ApplyOverrides(graph, {.dt = Id(graph, "scale") + "f16"});
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(one->FindTensor("scale")->desc.type, kF16);
  EXPECT_EQ(one->FindTensor("q")->desc.type, kF32);
  // The schema is checked anew: MatMul takes no integers.
  EXPECT_FALSE(ApplyOverrides(graph, {.dt = Id(graph, "q") + "s8"}).ok());
}

TEST(OverridesTest, AttributesByOp) {
  const Graph graph = Attention();
  const std::string matmul = absl::StrCat(graph.ops()[0].id);
  const absl::StatusOr<Graph> g =
      ApplyOverrides(graph, {.in_shapes = Id(graph, "k") + "1x2x8x16",
                             .op_attrs = matmul + ":transpose_b:false*accumulation_mode:f32"});
  ASSERT_TRUE(g.ok()) << g.status();
  EXPECT_FALSE(g->ops()[0].Get<Attr::kTransposeB>());
  EXPECT_EQ(g->ops()[0].Get<Attr::kAccumulationMode>(), "f32");
  // Removed, an attribute takes its default again.
  const absl::StatusOr<Graph> removed = ApplyOverrides(
      graph, {.in_shapes = Id(graph, "k") + "1x2x8x16", .op_attrs = matmul + ":transpose_b:undef"});
  ASSERT_TRUE(removed.ok()) << removed.status();
  EXPECT_FALSE(removed->ops()[0].Get<Attr::kTransposeB>());
}

TEST(OverridesTest, RefusesWithTheWrongPart) {
  const Graph graph = Attention();
  const std::pair<Overrides, std::string> cases[] = {
      {{.in_shapes = "0"}, "'0'"},
      {{.in_shapes = ":1x2"}, "ID:"},
      {{.in_shapes = "x:1x2"}, "ID:"},
      {{.in_shapes = "99:1x2"}, "99"},
      {{.in_shapes = "99999999999999999999999:1"}, "ID:"},
      {{.in_shapes = "0:"}, "empty"},
      {{.in_shapes = "0:1xx2"}, "1xx2"},
      {{.in_shapes = "0:1x-2x4x8"}, "negative"},
      {{.in_shapes = "0:1x2x4x8*"}, "layout"},
      {{.in_shapes = "0:1x2x4x8*abc"}, "abc"},
      {{.in_shapes = "0:*aacd"}, "aacd"},
      {{.in_shapes = "0:*1x2x3"}, "strides"},
      {{.in_shapes = "0:1x2x4x8,0:1x2x6x8"}, "comma"},
      {{.in_shapes = "0:1x2x4x8+1:1x2x16x8+0:1x2x6x8"}, "names 0 twice"},
      {{.in_shapes = "0:9223372036854775807x9223372036854775807"}, ""},
      {{.in_shapes = "0:1x2x4x9"}, "9"},  // does not multiply with k
      {{.dt = "s8"}, "s8"},
      {{.dt = "0:nothing"}, "nothing"},
      {{.dt = "99:f32"}, "99"},
      {{.dt = "0:f16+0:bf16"}, "names 0 twice"},
      {{.op_attrs = "99:axis:1"}, "99"},
      {{.op_attrs = "0:nonsense:1"}, "nonsense"},
      {{.op_attrs = "0:transpose_b"}, "transpose_b"},
      {{.op_attrs = "0:transpose_b:2"}, "wrong type"},
      {{.op_attrs = "0:axis:1"}, "axis"},  // no attribute of a MatMul
  };
  for (const auto& [overrides, message] : cases) {
    const absl::StatusOr<Graph> g = ApplyOverrides(graph, overrides);
    const std::string text = overrides.in_shapes + overrides.dt + overrides.op_attrs;
    ASSERT_FALSE(g.ok()) << text;
    EXPECT_THAT(std::string(g.status().message()), HasSubstr(message)) << text;
  }
}

}  // namespace
}  // namespace kvant
