// MergeAttention on values worked out by hand, and behind attention over parts of the tokens.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kvant/graph/builder.h"
#include "kvant/tests/backends/ops/op_testing.h"
#include "kvant/tests/backends/ops/reference_testing.h"
#include "kvant_test_config.h"

namespace kvant::testing {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");

std::vector<std::string> Backends() {
  return {"oracle", "cpu", "cuda_simt",
#ifdef KVANT_WITH_ONEDNN
          "reference"
#endif
  };
}

PortValues F32(Dims dims, std::vector<double> values) {
  return {kF32, std::move(dims), std::move(values), {}};
}

// factor, 2 * factor, ...
std::vector<double> Numbers(int count, double factor) {
  std::vector<double> numbers;
  for (int i = 1; i <= count; ++i) numbers.push_back(factor * i);
  return numbers;
}

std::vector<OpCase> Cases() {
  const OpKind kind = OpKind::kMergeAttention;
  const double ln2 = std::log(2.0), ln3 = std::log(3.0);
  return {
      {"of_one_part",
       kind,
       {},
       {F32({2, 2}, {1, 2, 3, 4}), F32({2, 1}, {5, -7})},
       {F32({2, 2}, {1, 2, 3, 4}), F32({2, 1}, {5, -7})}},
      // Three tokens in one part, one in the other, each of score 0.
      {"by_how_much_of_the_sum_they_have",
       kind,
       {},
       {F32({1, 2}, {4, 8}), F32({1, 1}, {ln3}), F32({1, 2}, {8, -8}), F32({1, 1}, {0})},
       {F32({1, 2}, {5, 4}), F32({1, 1}, {2 * ln2})},
       1e-6},
      {"large_statistics",
       kind,
       {},
       {F32({2, 1}, {1, 1}), F32({2, 1}, {1e4, -1e4}), F32({2, 1}, {3, 3}),
        F32({2, 1}, {1e4, 1e4})},
       {F32({2, 1}, {2, 3}), F32({2, 1}, {1e4 + ln2, 1e4})},
       1e-6},
      {"parts_without_tokens_do_not_count",
       kind,
       {},
       {F32({3, 1}, {kNan, 2, kInf}), F32({3, 1}, {-kInf, 1, -kInf}), F32({3, 1}, {7, kNan, kNan}),
        F32({3, 1}, {3, -kInf, -kInf})},
       {F32({3, 1}, {7, 2, 0}), F32({3, 1}, {3, 1, -kInf})}},
      {"nan_is_kept",
       kind,
       {},
       {F32({3, 1}, {1, kNan, 2}), F32({3, 1}, {kNan, 0, kInf}), F32({3, 1}, {7, 8, 3}),
        F32({3, 1}, {3, 0, 0})},
       {F32({3, 1}, {kNan, kNan, kNan}), F32({3, 1}, {kNan, ln2, kNan})},
       1e-6},
      // Beside what does not count.
      {"nan_alone",
       kind,
       {},
       {F32({1, 1}, {1}), F32({1, 1}, {kNan}), F32({1, 1}, {2}), F32({1, 1}, {-kInf})},
       {F32({1, 1}, {kNan}), F32({1, 1}, {kNan})}},
      {"many_channels_that_lie_apart",
       kind,
       {},
       {{kF32, {2, 700}, Numbers(1400, 1), Dims{1, 2}},
        F32({2, 1}, {0, 1}),
        {kF32, {2, 700}, Numbers(1400, 3), Dims{1, 2}},
        F32({2, 1}, {0, 1})},
       {{kF32, {2, 700}, Numbers(1400, 2), {}}, F32({2, 1}, {ln2, 1 + ln2})},
       1e-5},
      {"of_f16_without_statistics",
       kind,
       {},
       {{kF16, {1, 2}, {1, -1}, {}},
        F32({1, 1}, {-2}),
        {kF16, {1, 2}, {2, 0}, {}},
        F32({1, 1}, {-2}),
        {kF16, {1, 2}, {6, 10}, {}},
        F32({1, 1}, {-2})},
       {{kBF16, {1, 2}, {3, 3}, {}}}},
  };
}

class MergeByHandTest : public ::testing::TestWithParam<OpCase> {};

TEST_P(MergeByHandTest, IsWhatBackendsGive) {
  for (const std::string& backend : Backends()) {
    SCOPED_TRACE(backend);
    ExpectOpCase(GetParam(), backend);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, MergeByHandTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

// Attention over 37 tokens of which `lengths` exist: as a whole, or over parts of so many tokens,
// merged. Parts may have tokens that no query sees.
struct Split {
  std::string name;
  std::vector<int64_t> parts;
  DataType type = kF32;
  bool sinks = false, bias = false;
};

Graph AttentionOver(const Split& split, bool whole) {
  GraphBuilder g;
  constexpr int64_t kTokens = 37;
  const Value q = g.Input("q", split.type, {2, 6, 3, 16});
  const Value k = g.Input("k", split.type, {2, 2, kTokens, 16});
  const Value v = g.Input("v", split.type, {2, 2, kTokens, 24});
  const Value bias = g.Input("bias", kF32, {2, 1, 3, kTokens});
  const Value sinks = g.Input("sinks", kF32, {6});
  GraphBuilder::AttentionOptions options{.soft_cap = 5.f, .stats = true};
  if (split.bias || !whole) options.bias = bias;
  if (split.sinks) options.sinks = sinks;
  if (whole) {
    const auto [o, stats] = g.ScaledDotProductAttention(q, k, v, options);
    g.Output("o", o);
    g.Output("stats", *stats);
  } else {
    std::vector<GraphBuilder::AttentionPart> parts;
    int64_t begin = 0;
    for (const int64_t tokens : split.parts) {
      const std::string i = absl::StrCat(parts.size());
      const auto part = [&](const std::string& name, DataType type, Dims dims) {
        return g.Input(name + i, type, std::move(dims));
      };
      options.bias = part("bias", kF32, {2, 1, 3, tokens});
      const auto [o, stats] =
          g.ScaledDotProductAttention(q, part("k", split.type, {2, 2, tokens, 16}),
                                      part("v", split.type, {2, 2, tokens, 24}), options);
      parts.push_back({g.TypeCast(o, kF32), *stats});
      // A sink is in one part.
      options.sinks.reset();
      begin += tokens;
    }
    EXPECT_EQ(begin, kTokens);
    const auto [o, stats] = g.MergeAttention(parts, {.type = split.type, .stats = true});
    g.Output("o", o);
    g.Output("stats", *stats);
  }
  absl::StatusOr<Graph> graph = std::move(g).Build();
  EXPECT_TRUE(graph.ok()) << graph.status();
  return *std::move(graph);
}

const LogicalTensor& Named(const Graph& graph, const std::string& name) {
  for (const auto& ids : {graph.inputs(), graph.outputs()}) {
    for (const TensorId id : ids) {
      if (graph.tensor(id).name == name) return graph.tensor(id);
    }
  }
  ADD_FAILURE() << "no tensor " << name;
  return NoTensor();
}

// Tokens [begin, begin + tokens) along `axis` of dense values.
std::vector<double> Slice(const std::vector<double>& values, const Dims& dims, int axis,
                          int64_t begin, int64_t tokens) {
  int64_t inner = 1;
  for (size_t d = static_cast<size_t>(axis) + 1; d < dims.size(); ++d) inner *= dims[d];
  std::vector<double> slice;
  const int64_t lines = static_cast<int64_t>(values.size()) / (dims[axis] * inner);
  for (int64_t line = 0; line < lines; ++line) {
    const auto first = values.begin() + (line * dims[axis] + begin) * inner;
    slice.insert(slice.end(), first, first + tokens * inner);
  }
  return slice;
}

class MergedPartsTest : public ::testing::TestWithParam<Split> {};

TEST_P(MergedPartsTest, AreTheWhole) {
  const Split& split = GetParam();
  Split with_bias = split;
  with_bias.bias = true;
  const Graph whole = AttentionOver(with_bias, true), parts = AttentionOver(split, false);
  Values inputs;
  std::map<std::string, std::vector<double>> values;
  for (const TensorId id : whole.inputs()) {
    const LogicalTensor& tensor = whole.tensor(id);
    values[tensor.name] = RandomValues(tensor);
  }
  // The last query of row 0 sees only tokens behind the 20th, that of row 1 none.
  const Dims bias_dims = {2, 1, 3, 37};
  for (int64_t t = 0; t < 37; ++t) {
    if (t < 20) values["bias"][2 * 37 + t] = -kInf;
    values["bias"][5 * 37 + t] = -kInf;
  }
  for (const TensorId id : whole.inputs()) inputs[id] = values[whole.tensor(id).name];
  const absl::StatusOr<Values> expected = RunGraph(whole, inputs, "oracle");
  ASSERT_TRUE(expected.ok()) << expected.status();
  Values given;
  for (const TensorId id : parts.inputs()) {
    const std::string& name = parts.tensor(id).name;
    if (values.count(name) > 0) {
      given[id] = values[name];
      continue;
    }
    const std::string of = name.substr(0, name.find_first_of("0123456789"));
    const size_t part = std::stoul(name.substr(of.size()));
    int64_t begin = 0;
    for (size_t i = 0; i < part; ++i) begin += split.parts[i];
    const LogicalTensor& from = Named(whole, of);
    given[id] = Slice(values[of], *from.dims, of == "bias" ? 3 : 2, begin, split.parts[part]);
  }
  const LogicalTensor &o = Named(whole, "o"), &stats = Named(whole, "stats");
  for (const std::string& backend : Backends()) {
    SCOPED_TRACE(backend);
    const absl::StatusOr<Values> got = RunGraph(parts, given, backend);
    ASSERT_TRUE(got.ok()) << got.status();
    ExpectNear(o, expected->at(o.id), got->at(Named(parts, "o").id));
    ExpectNear(stats, expected->at(stats.id), got->at(Named(parts, "stats").id));
  }
  // Row 1's last query, of each head.
  if (!split.sinks) {
    for (int64_t h = 0; h < 6; ++h) {
      EXPECT_EQ(expected->at(stats.id)[(6 + h) * 3 + 2], -kInf);
      EXPECT_EQ(expected->at(o.id)[((6 + h) * 3 + 2) * 24 + 5], 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Splits, MergedPartsTest,
                         ::testing::Values(Split{"two", {20, 17}}, Split{"uneven", {1, 19, 4, 13}},
                                           Split{"with_sinks", {9, 11, 17}, kF32, true},
                                           Split{"an_empty_one", {20, 0, 17}},
                                           Split{"f16", {5, 15, 17}, kF16},
                                           Split{"bf16", {30, 7}, kBF16}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kvant::testing
