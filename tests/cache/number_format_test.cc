#include "kvant/cache/number_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kvant/graph/builder.h"
#include "kvant/tools/attention_graph.h"

namespace kvant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<int64_t> GroupOf(std::string_view text, const Dims& dims) {
  const absl::StatusOr<NumberFormat> format = ParseNumberFormat(text);
  if (!format.ok()) return {};
  const absl::StatusOr<Dims> group = format->GroupShape(dims);
  if (!group.ok()) return {};
  return std::vector<int64_t>(group->begin(), group->end());
}

TEST(NumberFormatTest, ReadsEveryPart) {
  const absl::StatusOr<NumberFormat> format = ParseNumberFormat("u4:g32:zp:sbf16");
  ASSERT_TRUE(format.ok()) << format.status();
  EXPECT_EQ(format->type, kU4);
  EXPECT_EQ(format->groups, NumberFormat::Groups::kHeadSlice);
  EXPECT_EQ(format->group_size, 32);
  EXPECT_EQ(format->zero_points, NumberFormat::ZeroPoints::kBytes);
  EXPECT_EQ(format->scale_type, kBF16);
  EXPECT_EQ(format->ZeroPointType(kBF16), kU8);
}

TEST(NumberFormatTest, GroupsFollowTheWord) {
  const Dims dims = {2, 3, 96, 64};
  EXPECT_THAT(GroupOf("s8:g16", dims), ElementsAre(1, 1, 1, 16));
  EXPECT_THAT(GroupOf("s8", dims), ElementsAre(1, 1, 1, 64));
  // Of K and V that query heads share, by an axis of their own.
  EXPECT_THAT(GroupOf("s8:all_heads", Dims{2, 3, 1, 96, 64}), ElementsAre(1, 3, 1, 1, 64));
  EXPECT_THAT(GroupOf("s8:token", dims), ElementsAre(1, 1, 1, 64));
  EXPECT_THAT(GroupOf("s8:channel", dims), ElementsAre(1, 1, 96, 1));
  EXPECT_THAT(GroupOf("s8:channel:g32", dims), ElementsAre(1, 1, 32, 1));
  EXPECT_THAT(GroupOf("s8:g32:channel", dims), ElementsAre(1, 1, 32, 1));
  EXPECT_THAT(GroupOf("s8:block:g32", dims), ElementsAre(1, 1, 32, 32));
  EXPECT_THAT(GroupOf("s8:head", dims), ElementsAre(1, 1, 96, 64));
  EXPECT_THAT(GroupOf("s8:tensor", dims), ElementsAre(2, 3, 96, 64));
}

TEST(NumberFormatTest, TextSurvivesParsing) {
  for (const char* text :
       {"f32", "bf16", "f8_e4m3:tensor", "s8:g128", "u4:g32:zp", "u4:g32:pzp", "s4:token:sf32",
        "u2:channel:g64:zp:sf16", "u4:block:g32:zp", "u4:token:rzp", "s2:head", "f8_e5m2:token:zp",
        "u8:channel", "u4:g32:nf4", "u4:g32:iq4_nl:ggml:sf16", "u4:token:e2m1"}) {
    const absl::StatusOr<NumberFormat> format = ParseNumberFormat(text);
    ASSERT_TRUE(format.ok()) << format.status();
    EXPECT_EQ(format->ToString(), text);
  }
}

TEST(NumberFormatTest, ZeroPointsHaveTheSignOfTheCodes) {
  EXPECT_EQ(ParseNumberFormat("s4:zp")->ZeroPointType(kF16), kS8);
  EXPECT_EQ(ParseNumberFormat("u2:zp")->ZeroPointType(kF16), kU8);
  EXPECT_EQ(ParseNumberFormat("u4:pzp")->ZeroPointType(kF16), kU4);
  EXPECT_EQ(ParseNumberFormat("s8:pzp")->ZeroPointType(kF16), kS8);
  EXPECT_EQ(ParseNumberFormat("f8_e5m2:zp")->ZeroPointType(kF16), kF16);
  EXPECT_EQ(ParseNumberFormat("u4:rzp")->ZeroPointType(kF16), kF16);
  EXPECT_EQ(ParseNumberFormat("u2")->ZeroPointType(kF16), kUndef);
}

TEST(NumberFormatTest, CountsScalesInBits) {
  const Dims dims = {1, 1, 128, 64};
  EXPECT_DOUBLE_EQ(ParseNumberFormat("f16")->BitsPerElement(dims, kF32).value(), 16);
  EXPECT_DOUBLE_EQ(ParseNumberFormat("u4:g32:zp:sf16")->BitsPerElement(dims, kF32).value(),
                   4 + 24. / 32);
  EXPECT_DOUBLE_EQ(ParseNumberFormat("u4:g32:pzp:sf16")->BitsPerElement(dims, kF32).value(),
                   4 + 20. / 32);
  EXPECT_DOUBLE_EQ(ParseNumberFormat("u2:channel")->BitsPerElement(dims, kF32).value(),
                   2 + 32. / 128);
}

TEST(NumberFormatTest, RefusesWithTheWrongPart) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "''"},
      {"f64", "'f64'"},
      {"s32", "'s32'"},
      {"f16:g32", "not quantized"},
      {"s8:g0", "'g0'"},
      {"s8:g-1", "'g-1'"},
      {"s8:g99999999999999999999", "'g99999999999999999999'"},
      {"s8:gx", "'gx'"},
      {"s8:g", "'g'"},
      {"s8:", "''"},
      {"s8:g32:g64", "two group sizes"},
      {"s8:token:head", "'head'"},
      {"s8:token:g32", "no other group but channel and block"},
      {"s8:block", "groups of 0"},
      {"s8:block:channel", "second kind"},
      {"s8:zp:zp", "twice"},
      {"s8:zp:rzp", "twice"},
      {"s4:pzp:zp", "twice"},
      {"f8_e4m3:pzp", "'pzp' is for integers"},
      {"f8_e4m3:rzp", "for integers"},
      {"s8:sf16:sf32", "two types"},
      {"s8:sf8", "'sf8'"},
      {"s8:g 5", "'g 5'"},
      {"u4:nf4:iq4_nl", "two codebooks"},
  };
  for (const auto& [text, message] : cases) {
    const absl::StatusOr<NumberFormat> format = ParseNumberFormat(text);
    ASSERT_FALSE(format.ok()) << text;
    EXPECT_THAT(std::string(format.status().message()), HasSubstr(message)) << text;
  }
}

TEST(NumberFormatTest, RefusesGroupsThatDoNotDivide) {
  EXPECT_FALSE(ParseNumberFormat("s8:g32")->GroupShape(Dims{1, 1, 8, 80}).ok());
  EXPECT_FALSE(ParseNumberFormat("s8:channel:g32")->GroupShape(Dims{1, 1, 33, 64}).ok());
  EXPECT_FALSE(ParseNumberFormat("s8:block:g32")->GroupShape(Dims{1, 1, 33, 64}).ok());
  EXPECT_FALSE(ParseNumberFormat("s8:block:g32")->GroupShape(Dims{1, 1, 32, 80}).ok());
  EXPECT_FALSE(ParseNumberFormat("s8:token")->GroupShape(Dims{64}).ok());
  EXPECT_FALSE(ParseNumberFormat("s8:all_heads")->GroupShape(Dims{32, 64}).ok());
  // Nor of what has no elements.
  EXPECT_FALSE(ParseNumberFormat("s8:token")->GroupShape(Dims{1, 1, 8, 0}).ok());
  EXPECT_FALSE(ParseNumberFormat("s8:channel")->GroupShape(Dims{1, 1, 0, 64}).ok());
}

TEST(AttentionGraphTest, IsFiveDimensionalWhenHeadsDiffer) {
  AttentionGraphOptions options{.heads = 8, .kv_heads = 2, .q_len = 3, .kv_len = 64};
  options.k = *ParseNumberFormat("u4:g32:zp");
  options.v = *ParseNumberFormat("s8:channel:g16");
  const absl::StatusOr<Graph> graph = MakeAttentionGraph(options);
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_THAT(*graph->FindTensor("q")->desc.dims, ElementsAre(1, 2, 4, 3, 64));
  EXPECT_THAT(*graph->FindTensor("k")->desc.dims, ElementsAre(1, 2, 1, 64, 64));
  EXPECT_THAT(*graph->FindTensor("k_scales")->desc.dims, ElementsAre(1, 2, 1, 64, 2));
  EXPECT_EQ(graph->FindTensor("k_zps")->desc.type, kU8);
  EXPECT_THAT(*graph->FindTensor("v_scales")->desc.dims, ElementsAre(1, 2, 1, 4, 64));
  EXPECT_THAT(*graph->tensor(graph->outputs()[0]).dims, ElementsAre(1, 2, 4, 3, 64));
}

TEST(AttentionGraphTest, RefusesWhatDoesNotGoTogether) {
  EXPECT_FALSE(MakeAttentionGraph({.heads = 8, .kv_heads = 3}).ok());
  EXPECT_FALSE(MakeAttentionGraph({.q_len = 0}).ok());
  EXPECT_FALSE(MakeAttentionGraph({.sinks = true}).ok());
  EXPECT_FALSE(MakeAttentionGraph({.mask = "1x1x2x256"}).ok());
  EXPECT_FALSE(MakeAttentionGraph({.mask = "QxS"}).ok());
  AttentionGraphOptions options{.head_size = 80};
  options.k = *ParseNumberFormat("s8:g32");
  const absl::StatusOr<Graph> graph = MakeAttentionGraph(options);
  ASSERT_FALSE(graph.ok());
  EXPECT_THAT(std::string(graph.status().message()), HasSubstr("head size 80"));
}

// Every format in every position, layout and type, and all options at once.
TEST(AttentionGraphTest, BuildsEveryFormat) {
  for (const char* type : {"f32", "bf16", "f16"}) {
    for (const char* format :
         {"f32", "bf16", "f16", "f8_e4m3:zp", "f8_e5m2", "s8:g32:zp", "u8:tensor:zp", "s4:head",
          "u4:channel:g32", "s2:channel:sf32", "u2:g16:sbf16"}) {
      for (auto layout :
           {AttentionGraphOptions::KLayout::kTokens, AttentionGraphOptions::KLayout::kTransposed,
            AttentionGraphOptions::KLayout::kChannels}) {
        AttentionGraphOptions options{.heads = 4, .kv_heads = 2, .q_len = 5, .kv_len = 64};
        options.dtype = *DataTypeFromName(type);
        options.k = options.v = *ParseNumberFormat(format);
        options.k_layout = layout;
        options.causal = AttentionGraphOptions::Causal::kBottomRight;
        options.soft_cap = 30.f;
        options.mask = "NxHxQxS";
        options.select = "Nx1x1xS";
        options.stats = options.dropout = options.transpose_output = true;
        const absl::StatusOr<Graph> graph = MakeAttentionGraph(options);
        EXPECT_TRUE(graph.ok()) << type << " " << format << ": " << graph.status();
      }
    }
  }
}

TEST(AttentionGraphTest, BuildsTheSingleOp) {
  AttentionGraphOptions options{.heads = 6, .kv_heads = 2, .q_len = 5, .kv_len = 64};
  options.k = *ParseNumberFormat("u4:g32:zp");
  options.v = *ParseNumberFormat("s8:tensor");
  options.single_op = options.kv_lengths = options.sinks = options.alibi = options.stats = true;
  options.mask = "1x1xQxS";
  const absl::StatusOr<Graph> graph = MakeAttentionGraph(options);
  ASSERT_TRUE(graph.ok()) << graph.status();
  ASSERT_EQ(graph->outputs().size(), 2u);
  EXPECT_THAT(*graph->tensor(graph->outputs()[0]).dims, ElementsAre(1, 6, 5, 64));
}

}  // namespace
}  // namespace kvant
