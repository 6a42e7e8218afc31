// AppendPages: tokens into slots of pools that hold something already, on every backend that has
// it, and attention over what was written.
#include <cmath>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/codebooks.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tests/backends/store/append_harness.h"
#include "kvant/tests/common/hostile_data.h"

namespace kvant::testing {
namespace {

using ::testing::HasSubstr;

constexpr QuantizeTypes kTypes[] = {{kF32, kS8, kF32, kUndef},     {kF16, kU8, kF16, kU8},
                                    {kBF16, kS4, kBF16, kUndef},   {kF16, kU4, kF16, kF16},
                                    {kF16, kU4, kF16, kU4},        {kBF16, kS2, kF32, kUndef},
                                    {kF32, kU2, kF16, kU2},        {kF32, kU2, kF32, kS32},
                                    {kF32, kF8E4M3, kF16, kUndef}, {kBF16, kF8E5M2, kF32, kUndef}};

// `tokens` distinct slots of as many as there are, far apart and in no order; one of 5 is left out.
std::vector<int64_t> Slots(int64_t tokens, int64_t room) {
  std::vector<int64_t> slots;
  for (int64_t t = 0; t < tokens; ++t) {
    slots.push_back(t % 5 == 3 ? -1 - t : (room / 2 + t * 41) % room);
  }
  return slots;
}

// Rooms have no divisor 41.
std::vector<AppendCase> Layouts() {
  std::vector<AppendCase> cases = {
      {"heads_first", {9, 3, 1, 64}, 16, Slots(9, 128), {1, 1, 1, 16}},
      {"tokens_first", {9, 1, 3, 64}, 16, Slots(9, 128), {1, 1, 1, 16}},
      {"one_token", {1, 4, 1, 64}, 4, {13}, {1, 1, 1, 32}},
      {"no_token", {3, 4, 1, 64}, 4, {-1, -7, -2147483647}, {1, 1, 1, 32}},
      {"last_slot", {2, 2, 1, 32}, 4, {31, 0}, {1, 1, 1, 32}},
      {"a_page_of_one", {7, 2, 1, 40}, 1, Slots(7, 8), {1, 1, 1, 20}},
      {"one_page", {7, 2, 1, 40}, 64, Slots(7, 64), {1, 1, 1, 40}},
      {"a_token_is_a_group", {6, 1, 3, 16}, 8, Slots(6, 64), {1, 1, 3, 16}},
      {"heads_in_a_group", {6, 4, 1, 16}, 8, Slots(6, 64), {1, 2, 1, 8}},
      {"one_element_each", {5, 2, 1, 5}, 4, Slots(5, 32), {1, 1, 1, 1}},
      {"odd_size", {9, 2, 1, 33}, 8, Slots(9, 64), {1, 1, 1, 33}},
      {"odd_size_tokens_first", {9, 1, 2, 9}, 8, Slots(9, 64), {1, 1, 1, 3}},
      {"one_odd_token", {1, 3, 1, 9}, 8, {11}, {1, 1, 1, 9}},
      {"many_heads", {3, 33, 1, 96}, 4, Slots(3, 32), {1, 1, 1, 32}},
      // K of packed projections of Q, K and V, to pages that hold V as well.
      {.name = "from_qkv_to_kv",
       .dims = {6, 1, 2, 32},
       .capacity = 4,
       .positions = Slots(6, 32),
       .group = {1, 1, 1, 32},
       .axis = 1,
       .src_strides = Dims{320, 32, 1},
       .dst_strides = Dims{512, 64, 32, 1}},
      {.name = "channels_apart_in_source",
       .dims = {4, 2, 1, 16},
       .capacity = 8,
       .positions = Slots(4, 64),
       .group = {1, 1, 1, 16},
       .src_strides = Dims{32, 1, 2}},
      // A token of the innermost pages, as of [heads, tokens, pages].
      {.name = "pages_inside",
       .dims = {6, 2, 1, 8},
       .capacity = 4,
       .positions = Slots(6, 32),
       .group = {1, 1, 1, 8},
       .dst_strides = Dims{8, 256, 64, 1},
       .parameter_strides = Dims{1, 32, 8, 1}},
  };
  for (AppendCase& test : cases) {
    if (test.dims[1] == 1) test.axis = 1;
    test.pages = test.name == "one_page" ? 1 : 8;
    if (test.dims[0] % 2 == 0) test.position_type = kS64;
  }
  return cases;
}

class AppendPagesTest : public ::testing::TestWithParam<AppendCase> {};

TEST_P(AppendPagesTest, WritesItsTokensAndNothingElse) {
  for (const QuantizeTypes& types : kTypes) {
    AppendCase test = GetParam();
    test.types = types;
    ExpectAppends(test);
    test.given = true;
    ExpectAppends(test);
    if (HasFailure()) return;
  }
}

TEST_P(AppendPagesTest, Converts) {
  for (const DataType src : {kF32, kF16, kBF16}) {
    for (const DataType dst : {kF32, kF16, kBF16}) {
      AppendCase test = GetParam();
      test.group.clear();
      test.parameter_strides.reset();
      test.types = {src, dst, kUndef, kUndef};
      ExpectAppends(test);
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, AppendPagesTest, ::testing::ValuesIn(Layouts()),
                         [](const auto& info) { return info.param.name; });

PortValues Of(DataType type, const Dims& dims, const std::vector<double>& values) {
  return {type, dims, values, {}};
}

// Tokens of [heads, size] to slots of pages of two, worked out by hand. What is not written is as
// op_testing's Pack leaves it: bytes of 0xA5.
std::vector<OpCase> ByHand() {
  const AttrValue per_group = std::string("per_group");
  const double a5 = BF16ToF32(0xa5a5);
  return {
      // Token 0 to page 1, place 1; 1 left out; 2 to page 0, place 0.
      {"heads_first",
       OpKind::kAppendPages,
       {},
       {Of(kF32, {3, 2, 1}, {1, 2, 3, 4, 5, 6}), Of(kS32, {3}, {3, -1, 0})},
       {Of(kBF16, {2, 2, 2, 1}, {5, a5, 6, a5, a5, 1, a5, 2})}},
      {"tokens_first",
       OpKind::kAppendPages,
       {{Attr::kTokenAxis, int64_t{1}}},
       {Of(kF32, {3, 2, 1}, {1, 2, 3, 4, 5, 6}), Of(kS64, {3}, {3, -5, 0})},
       {Of(kBF16, {2, 2, 2, 1}, {5, 6, a5, a5, a5, a5, 1, 2})}},
      // Codes of 4 bits in rows of 3: 0xa and 0x5 take turns where nothing is written.
      {"groups_along_channels",
       OpKind::kAppendPages,
       {{Attr::kQType, per_group}, {Attr::kGroupShape, std::vector<int64_t>{1, 1, 1, 3}}},
       {Of(kF32, {2, 1, 3}, {7, -14, 3.5, 0, 7, 1}), Of(kS64, {2}, {3, 1})},
       {Of(kS4, {2, 1, 2, 3}, {5, -6, 5, 0, 7, 1, 5, -6, 5, 4, -7, 2}),
        Of(kF16, {2, 1, 2, 1}, {F16ToF32(0xa5a5), 1, F16ToF32(0xa5a5), 2})}},
      // Scales that exist: of each page and channel; of each channel, for all pages.
      {"given_by_page",
       OpKind::kAppendPages,
       {{Attr::kQType, per_group}, {Attr::kGroupShape, std::vector<int64_t>{1, 2, 1}}},
       {Of(kF32, {2, 2}, {6, 6, 8, 8}), Of(kS32, {2}, {3, 0}), Of(kF32, {2, 1, 2}, {1, 2, 0.5, 4})},
       {Of(kS8, {2, 2, 2}, {8, 4, -91, -91, -91, -91, 12, 2})}},
      {"given_by_channel",
       OpKind::kAppendPages,
       {{Attr::kQType, std::string("per_channel")}, {Attr::kAxis, int64_t{2}}},
       {Of(kF32, {1, 2}, {6, 6}), Of(kS32, {1}, {1}), Of(kF32, {2}, {1, 2}), Of(kS8, {2}, {1, -1})},
       {Of(kS8, {2, 2, 2}, {-91, -91, 7, 2, -91, -91, -91, -91})}},
      {"given_by_tensor",
       OpKind::kAppendPages,
       {},
       {Of(kF32, {1, 2}, {6, 8}), Of(kS32, {1}, {2}), Of(kF32, {1}, {2})},
       {Of(kS8, {2, 2, 2}, {-91, -91, -91, -91, 3, 4, -91, -91})}},
  };
}

class AppendPagesByHandTest : public ::testing::TestWithParam<OpCase> {};

TEST_P(AppendPagesByHandTest, IsWhatBackendsGive) {
  for (const char* const backend : {"oracle", "cpu"}) ExpectOpCase(GetParam(), backend);
}

INSTANTIATE_TEST_SUITE_P(Cases, AppendPagesByHandTest, ::testing::ValuesIn(ByHand()),
                         [](const auto& info) { return info.param.name; });

AppendCase Case(const std::string& name, const Dims& dims, int64_t page_tokens, int64_t pages,
                const Dims& group, const QuantizeTypes& types) {
  AppendCase test{name, dims, page_tokens, Slots(dims[0], page_tokens * pages), group, types};
  test.axis = dims[1] == 1 ? 1 : 2;
  test.pages = pages;
  return test;
}

TEST(AppendPages, EveryType) {
  for (const QuantizeTypes& types : AllQuantizeTypes()) {
    ExpectAppends(Case("types", {4, 2, 1, 64}, 4, 8, {1, 1, 1, 16}, types));
    ExpectAppends(Case("odd", {4, 1, 2, 9}, 4, 8, {1, 1, 1, 9}, types));
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(AppendPages, Codebooks) {
  for (const CodebookRow& row : kCodebooks) {
    AppendCase test =
        Case("codebook", {6, 2, 1, 64}, 8, 8, {1, 1, 1, 32}, {kF16, kU4, kF16, kUndef});
    test.codebook.assign(row.values.begin(), row.values.end());
    ExpectAppends(test);
    test.given = true;
    ExpectAppends(test);
  }
}

TEST(AppendPages, FormatsOfGgml) {
  for (const QuantizeTypes& types :
       {QuantizeTypes{kF32, kS8, kF16}, QuantizeTypes{kF16, kS4, kF16},
        QuantizeTypes{kF32, kU4, kF16, kF16}, QuantizeTypes{kF32, kU4, kF16}}) {
    for (const Dims& dims : {Dims{6, 3, 1, 64}, Dims{6, 1, 3, 64}}) {
      AppendCase test = Case("ggml", dims, 8, 8, {1, 1, 1, 32}, types);
      test.ggml = true;
      if (types.codes == kU4 && types.zero_points == kUndef) {
        test.codebook.assign(std::begin(kIq4NlCodebook), std::end(kIq4NlCodebook));
      }
      ExpectAppends(test);
    }
  }
}

// Scales that exist already, at whatever slot: by page, by channel, by head, for all pages.
TEST(AppendPages, GivenScales) {
  for (const QuantizeTypes& types : kTypes) {
    for (const Dims& group : {Dims{1, 2, 8, 40}, Dims{1, 1, 8, 1}, Dims{4, 1, 8, 1},
                              Dims{4, 2, 8, 40}, Dims{4, 1, 1, 20}, Dims{4, 1, 8, 8}}) {
      AppendCase test = Case("given", {6, 2, 1, 40}, 8, 4, group, types);
      test.given = true;
      ExpectAppends(test);
    }
  }
}

TEST(AppendPages, PromptsThatSeveralThreadsShare) {
  for (const QuantizeTypes& types : {kTypes[0], kTypes[3], kTypes[4], kTypes[5]}) {
    ExpectAppends(Case("heads_first", {900, 2, 1, 64}, 16, 80, {1, 1, 1, 32}, types));
    ExpectAppends(Case("tokens_first", {900, 1, 2, 64}, 16, 80, {1, 1, 1, 32}, types));
  }
  // Neighbours share bytes, so that threads may not.
  ExpectAppends(Case("odd", {900, 2, 1, 13}, 16, 80, {1, 1, 1, 13}, kTypes[2]));
  ExpectAppends(Case("numbers", {900, 2, 1, 96}, 16, 80, {}, {kF32, kF16, kUndef, kUndef}));
}

TEST(AppendPages, HostileNumbers) {
  for (const Hostile kind : kAllHostile) {
    SCOPED_TRACE(NameOf(kind));
    for (const QuantizeTypes& types : kTypes) {
      const HostileNumbers numbers{kind, /*seed=*/7, types.src == kF16 ? 65504.0 : 1e5};
      std::vector<double> values;
      for (int64_t t = 0; t < 24; ++t) {
        for (int64_t c = 0; c < 64; ++c) values.push_back(numbers(std::vector<int64_t>{t, c}));
      }
      ExpectAppends(Case("hostile", {12, 2, 1, 64}, 16, 4, {1, 1, 1, 16}, types), values);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

// By hand, without the oracle: s8 by token and head.
TEST(AppendPages, AsAPlainLoop) {
  for (const int axis : {2, 1}) {
    AppendCase test{"loop", {4, 3, 1, 16}, 4, {9, -2, 2, 7}, {1, 1, 1, 16}};
    if (axis == 1) test.dims = {4, 1, 3, 16};
    test.axis = axis;
    test.pages = 3;
    test.position_type = kS64;
    const std::vector<double> x = Unpack(test.src(), Pack(test.src(), QuantizeNumbers(test.dims)));
    const QuantizeMemory before = MemoryBefore(test);
    QuantizeMemory want = before;
    for (int64_t t = 0; t < 4; ++t) {
      const int64_t slot = test.positions[t], page = slot / 4, place = slot % 4;
      for (int64_t h = 0; h < 3 && slot >= 0; ++h) {
        const double* token = &x[(t * 3 + h) * 16];
        const int64_t to = axis == 2 ? (page * 3 + h) * 4 + place : (page * 4 + place) * 3 + h;
        double most = 0;
        for (int64_t d = 0; d < 16; ++d) most = std::max(most, std::abs(token[d]));
        const auto scale = static_cast<float>(most / 127);
        StoreElement(kF32, want.scales.data(), to, scale);
        for (int64_t d = 0; d < 16; ++d) {
          StoreElement(kS8, want.codes.data(), to * 16 + d, std::nearbyint(token[d] / scale));
        }
      }
    }
    for (const AppendBackend& backend : AppendBackends()) {
      const auto executable = std::move(*backend.compile(*test.MakePartition()));
      EXPECT_TRUE(
          *RunAppend(test, *executable, *MakeSerialExecutor(), Pack(test.src(), x), before) == want)
          << backend.name;
    }
  }
}

TEST(AppendPages, ShapesThatCannotGoTogether) {
  const auto why = [](AppendCase test, int64_t pages, int axis = 2) {
    test.pages = pages;
    test.axis = axis;
    return std::string(test.MakePartition().status().message());
  };
  EXPECT_THAT(why({"tokens", {4, 2, 1, 32}, 8, {0, 1, 2, 3}, {1, 1, 4, 1}}, 4),
              HasSubstr("groups of 4 along dim 2 of tensor 2 [4,2,8,32] are of several tokens, but "
                        "each token has a slot of its own"));
  EXPECT_THAT(why({"given", {4, 2, 1, 32}, 8, {0, 1, 2, 3}, {1, 1, 4, 1}, {}, true}, 4),
              HasSubstr("groups of 4 along dim 2 of tensor 2 [4,2,8,32] are of several tokens"));
  EXPECT_THAT(why({"page", {4, 2, 1, 32}, 8, {0, 1, 2, 3}, {1, 1, 8, 1}}, 4),
              HasSubstr("groups of 8 along dim 2 of tensor 2 [4,2,8,32] are of several tokens"));
  EXPECT_THAT(why({"pages", {4, 2, 1, 32}, 8, {0, 1, 2, 3}, {2, 1, 1, 32}}, 4),
              HasSubstr("groups of 2 along dim 0 of tensor 2 [4,2,8,32] are of several pages"));
  EXPECT_THAT(why({"slots", {4, 2, 1, 32}, 8, {0, 1, 2}, {1, 1, 1, 32}}, 4),
              HasSubstr("slots are [4] as dim 0 of tensor 0 [4,2,32], but are tensor 1 [3]"));
  EXPECT_THAT(why({"one", {4, 2, 1, 32}, 8, {0}, {1, 1, 1, 32}}, 4), HasSubstr("slots are [4]"));
  EXPECT_THAT(why({"axis", {4, 2, 32, 1}, 8, {0, 1, 2, 3}, {1, 1, 32, 1}}, 4, 3),
              HasSubstr("token_axis is 3, that of features"));
  AppendCase wide{"type", {1, 2, 1, 32}, 8, {0}, {1, 1, 1, 32}};
  wide.position_type = kF32;
  EXPECT_THAT(why(wide, 4), HasSubstr("slots (tensor 1) is f32, not s32 or s64"));

  GraphBuilder g;
  const Value x = g.Input("x", kF32, {4, 2, 32}), slots = g.Input("slots", kS64, {4});
  const auto pool = g.AppendPages(
      x, slots, {.pages = 6, .page_size = 16},
      {.group_shape = {1, 1, 1, 8}, .type = kU4, .scale_type = kF16, .zero_point_type = kU4});
  const auto numbers =
      g.AppendPages(x, slots, {.pages = 6, .page_size = 16}, {.type = kF16}, /*token_axis=*/1);
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_EQ(graph->tensor(pool.codes.id).dims, (Dims{6, 2, 16, 32}));
  EXPECT_EQ(graph->tensor(pool.scales.id).dims, (Dims{6, 2, 16, 4}));
  EXPECT_EQ(graph->tensor(pool.zero_points->id).dims, (Dims{6, 2, 16, 4}));
  EXPECT_EQ(graph->tensor(numbers.codes.id).dims, (Dims{6, 16, 2, 32}));
  LogicalTensor scales = graph->tensor(pool.scales.id);
  scales.dims = Dims{6, 2, 15, 4};
  scales.strides.reset();
  EXPECT_THAT(std::string(PartitionGraph(*graph)->front().WithPorts({scales}).status().message()),
              HasSubstr("holds 16 groups of 1 tokens along dim 2, but tensor 3 'AppendPages_3' "
                        "[6,2,15,4] holds 15 "
                        "scales there"));
}

}  // namespace
}  // namespace kvant::testing
