#include "kvant/tools/random_data.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "kvant/graph/builder.h"
#include "kvant/tools/acceptance.h"
#include "kvant/tools/attention_graph.h"
#include "kvant/tools/graph_runner.h"
#include "kvant/tools/tensor_role.h"

namespace kvant {
namespace {

using Kind = TensorRole::Kind;

Graph Everything() {
  AttentionGraphOptions options{.batch = 2, .heads = 4, .kv_heads = 2, .q_len = 6, .kv_len = 32};
  options.k = *ParseNumberFormat("u4:g16:zp");
  options.v = *ParseNumberFormat("s8:tensor");
  options.soft_cap = 30.f;
  options.causal = AttentionGraphOptions::Causal::kBottomRight;
  options.mask = "NxHxQxS";
  options.select = "1x1x1xS";
  options.dropout = true;
  return MakeAttentionGraph(options).value();
}

BufferMap Fill(const Graph& graph, RandomDataOptions options) {
  const std::unique_ptr<Executor> executor = MakeTbbExecutor(2);
  return MakeRandomInputs(graph, options, *executor).value();
}

std::vector<double> Values(const Graph& graph, const BufferMap& buffers, std::string_view name) {
  const LogicalTensor& tensor = graph.FindTensor(name)->desc;
  std::vector<double> values;
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    values.push_back(LoadElement(tensor.type, buffers.at(tensor.id).data(), i));
  }
  return values;
}

TEST(TensorRoleTest, FollowsWhatAnInputIsFor) {
  const Graph graph = Everything();
  const std::pair<const char*, Kind> cases[] = {
      {"q", Kind::kQuery},           {"k", Kind::kCodes},
      {"k_scales", Kind::kScales},   {"k_zps", Kind::kZeroPoints},
      {"scale", Kind::kDivisor},     {"inverse_cap", Kind::kCapInverse},
      {"cap", Kind::kCap},           {"causal_fill", Kind::kFill},
      {"kv_len", Kind::kKvLength},   {"q_len", Kind::kQueryLength},
      {"mask", Kind::kMask},         {"select", Kind::kCondition},
      {"dropout_seed", Kind::kSeed}, {"dropout_probability", Kind::kProbability}};
  for (const auto& [name, kind] : cases) {
    const Graph::TensorInfo* info = graph.FindTensor(name);
    ASSERT_NE(info, nullptr) << name;
    EXPECT_EQ(RoleOf(graph, info->desc.id).kind, kind) << name;
  }
}

TEST(RandomDataTest, IntegerDataIsSmallWholeNumbers) {
  const Graph graph = Everything();
  const BufferMap data = Fill(graph, {.kind = DataKind::kInteger, .seed = 5});
  for (double x : Values(graph, data, "q")) EXPECT_TRUE(x == std::round(x) && std::abs(x) <= 4);
  for (double x : Values(graph, data, "k")) EXPECT_TRUE(x >= 0 && x <= 4);
  for (double x : Values(graph, data, "v")) EXPECT_LE(std::abs(x), 4);
  for (double x : Values(graph, data, "k_scales"))
    EXPECT_EQ(std::log2(x), std::round(std::log2(x)));
  const double divisor = Values(graph, data, "scale")[0];
  EXPECT_TRUE(divisor == 2 || divisor == 4 || divisor == 8);
  EXPECT_EQ(Values(graph, data, "kv_len")[0], 32);
  EXPECT_EQ(Values(graph, data, "q_len")[0], 6);
  EXPECT_EQ(Values(graph, data, "dropout_probability")[0], 0.5);
  std::set<double> mask;
  int whole_rows = 0;
  const std::vector<double> values = Values(graph, data, "mask");
  for (size_t row = 0; row < values.size() / 32; ++row) {
    const std::set<double> of_row(values.begin() + row * 32, values.begin() + (row + 1) * 32);
    whole_rows += of_row == std::set<double>{-INFINITY};
    mask.insert(of_row.begin(), of_row.end());
  }
  EXPECT_EQ(mask, (std::set<double>{-INFINITY, 0}));
  EXPECT_EQ(whole_rows, 8);  // one of the rows of each head
}

TEST(RandomDataTest, SeedDecidesEverything) {
  const Graph graph = Everything();
  for (DataKind kind : {DataKind::kInteger, DataKind::kReal}) {
    const BufferMap a = Fill(graph, {.kind = kind, .seed = 1});
    const BufferMap b = Fill(graph, {.kind = kind, .seed = 1});
    const BufferMap c = Fill(graph, {.kind = kind, .seed = 2});
    EXPECT_EQ(Values(graph, a, "q"), Values(graph, b, "q"));
    EXPECT_EQ(Values(graph, a, "k"), Values(graph, b, "k"));
    EXPECT_NE(Values(graph, a, "q"), Values(graph, c, "q"));
    EXPECT_NE(Values(graph, a, "k"), Values(graph, c, "k"));
  }
}

TEST(RandomDataTest, RealMeansDifferAlongEveryAxis) {
  const Graph graph = Everything();
  const BufferMap data = Fill(graph, {.kind = DataKind::kReal, .seed = 1});
  const std::vector<double> q = Values(graph, data, "q");  // [2, 2, 2, 6, 64]
  const int64_t strides[] = {2 * 2 * 6 * 64, 2 * 6 * 64, 6 * 64, 64, 1};
  const int64_t dims[] = {2, 2, 2, 6, 64};
  for (int axis = 0; axis < 5; ++axis) {
    double mean[2] = {};
    for (size_t i = 0; i < q.size(); ++i) {
      const int64_t at = static_cast<int64_t>(i) / strides[axis] % dims[axis];
      if (at < 2) mean[at] += q[i] * dims[axis] / static_cast<double>(q.size());
    }
    EXPECT_NE(mean[0], mean[1]) << axis;
    EXPECT_GT(std::abs(mean[0] - mean[1]), 0.01) << axis;
  }
  const std::vector<double> scales = Values(graph, data, "k_scales");
  EXPECT_TRUE(std::any_of(scales.begin(), scales.end(), [](double s) { return s < 0; }));
}

// Results of the oracle on this data, and on the same data with one thing wrong, must
// be told apart: else the data could not catch that error.
TEST(RandomDataTest, DataCatchesPlantedErrors) {
  const Graph graph = Everything();
  for (DataKind kind : {DataKind::kInteger, DataKind::kReal}) {
    const GraphRunner oracle =
        GraphRunner::Create(graph, Engine::Create(EngineOptionsFor("oracle", 2)).value()).value();
    BufferMap right = Fill(graph, {.kind = kind, .seed = 1});
    ASSERT_TRUE(oracle.Run(right).ok());
    const LogicalTensor& out = graph.tensor(graph.outputs()[0]);
    for (const char* name : {"q", "k", "k_scales", "k_zps", "v", "v_scales", "scale", "cap", "mask",
                             "select", "q_len", "dropout_seed"}) {
      BufferMap wrong = Fill(graph, {.kind = kind, .seed = 1});
      const LogicalTensor& tensor = graph.FindTensor(name)->desc;
      std::byte* const at = wrong.at(tensor.id).data();
      const int64_t n = tensor.elements();
      if (n == 1) {
        StoreElement(tensor.type, at, 0, 3 * LoadElement(tensor.type, at, 0) + 1);
      } else {
        // The second half in place of the first: the other batch or half of the columns.
        for (int64_t i = 0; i < n / 2; ++i) {
          StoreElement(tensor.type, at, i, LoadElement(tensor.type, at, i + n / 2));
        }
      }
      ASSERT_TRUE(oracle.Run(wrong).ok());
      EXPECT_FALSE(Compare(out, right.at(out.id).data(), wrong.at(out.id).data()).passed) << name;
    }
  }
}

// Positions are such that what appends takes them; some rows are left out.
TEST(RandomDataTest, PositionsFitTheCache) {
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {40, 2, 8, 16});
  const Value positions = g.Input("positions", kS32, {40});
  const GraphBuilder::Quantized cache =
      g.Append(x, positions, 36, {.group_shape = {1, 1, 4, 1}, .type = kS8});
  g.Output("cache", cache.codes);
  g.Output("scales", cache.scales);
  const Graph graph = std::move(g).Build().value();
  for (DataKind kind : {DataKind::kInteger, DataKind::kReal}) {
    BufferMap data = Fill(graph, {.kind = kind, .seed = 5});
    const std::vector<double> values = Values(graph, data, "positions");
    EXPECT_GE(values[0], 0);
    std::set<double> distinct;
    for (double position : values) {
      distinct.insert(position);
      EXPECT_TRUE(position == -1 || (position >= 0 && position <= 28)) << position;
    }
    EXPECT_EQ(distinct.size(), 9u);  // 0, 4, .., 28 and -1
    const GraphRunner cpu =
        GraphRunner::Create(graph, Engine::Create(EngineOptionsFor("cpu", 2)).value()).value();
    EXPECT_TRUE(cpu.Run(data).ok());
  }
}

// Slots are those of the pool, each of one token; some tokens are left out, as are those that it
// has no room for.
TEST(RandomDataTest, SlotsDiffer) {
  for (const int64_t pages : {0, 1, 5, 9}) {
    GraphBuilder g;
    const Value x = g.Input("x", kF32, {60, 2, 16}), slots = g.Input("slots", kS64, {60});
    const GraphBuilder::Quantized pool = g.AppendPages(x, slots, {.pages = pages, .page_size = 8},
                                                       {.group_shape = {1, 1, 1, 8}, .type = kS8});
    g.Output("pool", pool.codes);
    g.Output("scales", pool.scales);
    const Graph graph = std::move(g).Build().value();
    BufferMap data = Fill(graph, {.kind = DataKind::kReal, .seed = 5});
    std::set<double> distinct;
    int64_t written = 0;
    for (const double slot : Values(graph, data, "slots")) {
      if (slot < 0) continue;
      ++written;
      distinct.insert(slot);
      EXPECT_LT(slot, pages * 8);
    }
    EXPECT_EQ(static_cast<int64_t>(distinct.size()), written);
    EXPECT_GE(written, std::min<int64_t>(60, pages * 8) / 2);
    EXPECT_LT(written, 60);
    const GraphRunner cpu =
        GraphRunner::Create(graph, Engine::Create(EngineOptionsFor("cpu", 2)).value()).value();
    EXPECT_TRUE(cpu.Run(data).ok());
  }
}

// Else a benchmark would read less than lies in memory.
TEST(RandomDataTest, NoPageIsReadTwice) {
  AttentionGraphOptions options{.batch = 3, .heads = 2, .kv_len = 96};
  options.page_size = 16;
  const Graph graph = MakeAttentionGraph(options).value();
  for (uint64_t seed : {1, 2}) {
    const std::vector<double> pages = Values(graph, Fill(graph, {.seed = seed}), "page_table");
    const std::set<double> distinct(pages.begin(), pages.end());
    EXPECT_EQ(distinct.size(), 18u);
    EXPECT_GE(*distinct.begin(), 0);
    EXPECT_LT(*distinct.rbegin(), 18);
    EXPECT_FALSE(std::is_sorted(pages.begin(), pages.end()));
  }
}

// exp(scores - stats) sums to 1 in every row that is not masked whole.
TEST(RandomDataTest, BackwardStatsAreThoseOfTheScores) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {2, 3, 5, 16});
  const Value k = g.Input("k", kF32, {2, 3, 9, 16});
  const Value scores = g.Add(g.MatMul(q, k, {.transpose_b = true}), g.Input("mask", kF32, {5, 9}));
  const Value shifted = g.Subtract(scores, g.Input("stats", kF32, {2, 3, 5, 1}));
  const std::vector<Value> probs = g.AddOp(OpKind::kExp, "p", {shifted}, {kF32});
  const Attributes sum_last({{Attr::kAxes, std::vector<int64_t>{-1}}});
  g.Output("sum", g.AddOp(OpKind::kReduceSum, "sum", probs, {kF32}, sum_last)[0]);
  const Graph graph = std::move(g).Build().value();
  for (DataKind kind : {DataKind::kInteger, DataKind::kReal}) {
    BufferMap data = Fill(graph, {.kind = kind, .seed = 3});
    const GraphRunner oracle =
        GraphRunner::Create(graph, Engine::Create(EngineOptionsFor("oracle", 2)).value()).value();
    ASSERT_TRUE(oracle.Run(data).ok());
    int whole_rows = 0;
    for (double sum : Values(graph, data, "sum")) {
      whole_rows += sum == 0;
      EXPECT_TRUE(sum == 0 || std::abs(sum - 1) < 1e-4) << sum;
    }
    EXPECT_EQ(whole_rows, 6);
  }
}

}  // namespace
}  // namespace kvant
