// The oracle on whole graphs: attention, memory it reuses, layouts, KV lengths.
#include <algorithm>
#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/status.h"
#include "kvant/kernels/philox.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tests/backends/ops/op_testing.h"

namespace kvant::testing {
namespace {

using ::testing::DoubleNear;
using ::testing::Pointwise;

constexpr double kInf = std::numeric_limits<double>::infinity();

// Values that differ from element to element and are not centred on 0.
std::vector<double> Wave(int64_t count, double mean, double phase) {
  std::vector<double> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(
        static_cast<float>(mean + std::sin(0.37 * static_cast<double>(i * i % 101) + phase)));
  }
  return values;
}

// One head of attention by its definition; score(i, j) completes q.k.
template <typename Score>
std::vector<double> NaiveHead(const double* q, const double* k, const double* v, int64_t q_len,
                              int64_t kv_len, int64_t size, int64_t v_size, Score score) {
  std::vector<double> output(q_len * v_size, 0.0);
  for (int64_t i = 0; i < q_len; ++i) {
    std::vector<double> p(kv_len);
    double max = -kInf, sum = 0;
    for (int64_t j = 0; j < kv_len; ++j) {
      double dot = 0;
      for (int64_t d = 0; d < size; ++d) dot += q[i * size + d] * k[j * size + d];
      p[j] = score(i, j, dot);
      max = std::max(max, p[j]);
    }
    if (max == -kInf) continue;
    for (double& x : p) sum += x = std::exp(x - max);
    for (int64_t j = 0; j < kv_len; ++j) {
      for (int64_t d = 0; d < v_size; ++d) output[i * v_size + d] += p[j] / sum * v[j * v_size + d];
    }
  }
  return output;
}

TensorId OnlyOutput(const Graph& graph) { return graph.outputs().front(); }

TEST(OracleTest, CausalAttentionIsItsDefinition) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {1, 2, 3, 4}), k = g.Input("k", kF32, {1, 2, 5, 4});
  const Value v = g.Input("v", kF32, {1, 2, 5, 3}), divisor = g.Input("divisor", kF32, {1});
  const Value fill = g.Input("fill", kF32, {1});
  const Value scores = g.Divide(g.MatMul(q, k, {.transpose_b = true}), divisor);
  g.Output("o", g.MatMul(g.SoftMax(g.CausalMask(scores, fill)), v));
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  const auto qv = Wave(24, 0.5, 0), kv = Wave(40, -0.3, 1), vv = Wave(30, 0.2, 2);
  const absl::StatusOr<Values> result =
      RunGraph(*graph, {{q.id, qv}, {k.id, kv}, {v.id, vv}, {divisor.id, {2}}, {fill.id, {-kInf}}},
               "oracle");
  ASSERT_TRUE(result.ok()) << result.status();
  std::vector<double> expected;
  for (int h = 0; h < 2; ++h) {
    const auto head =
        NaiveHead(&qv[h * 12], &kv[h * 20], &vv[h * 15], 3, 5, 4, 3,
                  [](int64_t i, int64_t j, double dot) { return j <= i ? dot / 2 : -kInf; });
    expected.insert(expected.end(), head.begin(), head.end());
  }
  EXPECT_THAT(result->at(OnlyOutput(*graph)), Pointwise(DoubleNear(1e-6), expected));
}

// Everything that the first-class op takes, at once.
struct FirstClass {
  static constexpr int64_t kBatch = 2, kQHeads = 4, kKvHeads = 2, kQLen = 3, kKvLen = 6;
  static constexpr int64_t kSize = 4, kVSize = 2;
  std::vector<double> q = Wave(kBatch * kQHeads * kQLen * kSize, 0.3, 0);
  std::vector<double> k_codes, v = Wave(kBatch * kKvHeads * kKvLen * kVSize, -0.4, 5);
  std::vector<double> k_scales = Wave(kBatch * kKvHeads * kKvLen * 2, 1.5, 3);
  std::vector<double> k_zps, bias = Wave(kQHeads * kQLen * kKvLen, 0.1, 4);
  std::vector<double> select, lengths = {4, 6}, sinks = {0.5, -1, 2, 0},
                              slopes = {0.1, 0.2, 0.3, 0.4};

  FirstClass() {
    for (int i = 0; i < kBatch * kKvHeads * kKvLen * kSize; ++i) k_codes.push_back(i * 7 % 16);
    for (int i = 0; i < kBatch * kKvHeads * kKvLen * 2; ++i) k_zps.push_back(i * 5 % 16);
    for (int i = 0; i < kBatch * kQLen * kKvLen; ++i) select.push_back(i % 5 != 2);
  }

  // Scores of one row: -inf outside of the window, `fill` where select is false.
  std::vector<double> Scores(int64_t n, int64_t h, int64_t i, double fill) const {
    std::vector<double> scores;
    const auto length = static_cast<int64_t>(lengths[n]);
    for (int64_t j = 0; j < length; ++j) {
      double dot = 0;
      for (int64_t d = 0; d < kSize; ++d) {
        const int64_t token = (n * kKvHeads + h / 2) * kKvLen + j;
        const int64_t group = token * 2 + d / 2;
        dot += q[((n * kQHeads + h) * kQLen + i) * kSize + d] *
               (k_codes[token * kSize + d] - k_zps[group]) * k_scales[group];
      }
      const int64_t ahead = j - (i + length - kQLen);
      double s = 3 * std::tanh(dot * 0.25 / 3);
      s += slopes[h] * static_cast<double>(ahead) + bias[(h * kQLen + i) * kKvLen + j];
      if (select[(n * kQLen + i) * kKvLen + j] == 0) s = fill;
      scores.push_back(ahead >= -2 && ahead <= 0 ? s : -kInf);
    }
    return scores;
  }
};

void ExpectFirstClassIsItsDefinition(std::optional<float> fill) {
  const FirstClass t;
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {t.kBatch, t.kQHeads, t.kQLen, t.kSize});
  const Value k = g.Input("k", kU4, {t.kBatch, t.kKvHeads, t.kKvLen, t.kSize});
  const Value v = g.Input("v", kF32, {t.kBatch, t.kKvHeads, t.kKvLen, t.kVSize});
  const Value k_scales = g.Input("k_scales", kF32, {t.kBatch, t.kKvHeads, t.kKvLen, 2});
  const Value k_zps = g.Input("k_zps", kU4, {t.kBatch, t.kKvHeads, t.kKvLen, 2});
  const Value bias = g.Input("bias", kF32, {1, t.kQHeads, t.kQLen, t.kKvLen});
  const Value select = g.Input("select", kBoolean, {t.kBatch, 1, t.kQLen, t.kKvLen});
  const Value lengths = g.Input("lengths", kS32, {t.kBatch});
  const Value sinks = g.Input("sinks", kF32, {t.kQHeads});
  const Value slopes = g.Input("slopes", kF32, {t.kQHeads});
  const Value keys = g.DynamicDequantize(k, k_scales, k_zps, {.group_shape = {1, 1, 1, 2}});
  const auto [o, stats] = g.ScaledDotProductAttention(q, keys, v,
                                                      {.scale = 0.25f,
                                                       .soft_cap = 3.f,
                                                       .select_fill = fill,
                                                       .bottom_right = true,
                                                       .left_window = 2,
                                                       .right_window = 0,
                                                       .bias = bias,
                                                       .select = select,
                                                       .kv_lengths = lengths,
                                                       .sinks = sinks,
                                                       .alibi_slopes = slopes,
                                                       .stats = true});
  g.Output("o", o);
  g.Output("stats", *stats);
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  const absl::StatusOr<Values> result = RunGraph(*graph,
                                                 {{q.id, t.q},
                                                  {k.id, t.k_codes},
                                                  {v.id, t.v},
                                                  {k_scales.id, t.k_scales},
                                                  {k_zps.id, t.k_zps},
                                                  {bias.id, t.bias},
                                                  {select.id, t.select},
                                                  {lengths.id, t.lengths},
                                                  {sinks.id, t.sinks},
                                                  {slopes.id, t.slopes}},
                                                 "oracle");
  ASSERT_TRUE(result.ok()) << result.status();
  std::vector<double> outputs, all_stats;
  for (int64_t row = 0; row < t.kBatch * t.kQHeads * t.kQLen; ++row) {
    const int64_t n = row / t.kQLen / t.kQHeads, h = row / t.kQLen % t.kQHeads;
    const std::vector<double> scores = t.Scores(n, h, row % t.kQLen, fill.value_or(-kInf));
    double sum = std::exp(t.sinks[h]);
    for (double s : scores) sum += std::exp(s);
    all_stats.push_back(std::log(sum));
    for (int64_t d = 0; d < t.kVSize; ++d) {
      double output = 0;
      for (size_t j = 0; j < scores.size(); ++j) {
        const int64_t token = (n * t.kKvHeads + h / 2) * t.kKvLen + static_cast<int64_t>(j);
        output += std::exp(scores[j]) / sum * t.v[token * t.kVSize + d];
      }
      outputs.push_back(output);
    }
  }
  EXPECT_THAT(result->at(o.id), Pointwise(DoubleNear(1e-6), outputs));
  EXPECT_THAT(result->at(stats->id), Pointwise(DoubleNear(1e-6), all_stats));
}

TEST(OracleTest, FirstClassAttentionIsItsDefinition) {
  for (const std::optional<float> fill : {std::optional<float>(), std::optional(-0.5f)}) {
    ExpectFirstClassIsItsDefinition(fill);
  }
}

TEST(OracleTest, FirstClassAttentionWithNothingToSeeGivesZeros) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {1, 1, 2, 1}), k = g.Input("k", kF32, {1, 1, 2, 1});
  const Value v = g.Input("v", kF32, {1, 1, 2, 1});
  const Value select = g.Input("select", kBoolean, {1, 1, 2, 2});
  const auto [o, stats] = g.ScaledDotProductAttention(q, k, v, {.select = select, .stats = true});
  g.Output("o", o);
  g.Output("stats", *stats);
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  const absl::StatusOr<Values> result =
      RunGraph(*graph, {{q.id, {1, 1}}, {k.id, {2, 3}}, {v.id, {5, 7}}, {select.id, {0, 0, 0, 1}}},
               "oracle");
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->at(o.id), ::testing::ElementsAre(0, 7));
  // The logarithm of nothing, by which MergeAttention knows the row.
  EXPECT_THAT(result->at(stats->id), ::testing::ElementsAre(-kInf, 3));
}

// Of 0 tokens and of 1: infinity / infinity.
TEST(OracleTest, InfiniteSinksGiveNan) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {2, 1, 1, 1}), k = g.Input("k", kF32, {2, 1, 1, 1});
  const Value v = g.Input("v", kF32, {2, 1, 1, 1});
  const Value lengths = g.Input("lengths", kS32, {2}), sinks = g.Input("sinks", kF32, {1});
  const Value o =
      g.ScaledDotProductAttention(q, k, v, {.kv_lengths = lengths, .sinks = sinks}).first;
  g.Output("o", o);
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  for (const char* backend : {"oracle", "cpu"}) {
    const absl::StatusOr<Values> result = RunGraph(
        *graph,
        {{q.id, {1, 1}}, {k.id, {2, 2}}, {v.id, {5, 5}}, {lengths.id, {0, 1}}, {sinks.id, {kInf}}},
        backend);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_THAT(result->at(o.id), ::testing::Each(::testing::IsNan())) << backend;
  }
}

TEST(OracleTest, MatMulTailsAreRight) {
  for (const int64_t m : {1, 3, 4, 5, 33, 37}) {
    for (const int64_t k : {1, 7}) {
      for (const int64_t n : {1, 2, 512, 515}) {
        GraphBuilder g;
        const Value a = g.Input("a", kF32, {2, m, k}), b = g.Input("b", kF32, {1, n, k});
        g.Output("c", g.MatMul(a, b, {.transpose_b = true}));
        const absl::StatusOr<Graph> graph = std::move(g).Build();
        ASSERT_TRUE(graph.ok()) << graph.status();
        const auto av = Wave(2 * m * k, 1, 0), bv = Wave(n * k, -1, 1);
        const absl::StatusOr<Values> result = RunGraph(*graph, {{a.id, av}, {b.id, bv}}, "oracle");
        ASSERT_TRUE(result.ok()) << result.status();
        std::vector<double> expected;
        for (int64_t i = 0; i < 2 * m; ++i) {
          for (int64_t j = 0; j < n; ++j) {
            double sum = 0;
            for (int64_t d = 0; d < k; ++d) sum += av[i * k + d] * bv[j * k + d];
            expected.push_back(static_cast<float>(sum));
          }
        }
        ASSERT_THAT(result->at(OnlyOutput(*graph)), Pointwise(DoubleNear(1e-6), expected))
            << m << " " << k << " " << n;
      }
    }
  }
}

// Memory is handed on from op to op; a value that is still needed must survive.
TEST(OracleTest, SharedValuesSurvive) {
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {2, 2});
  const Value t = g.Multiply(x, x);
  const Value sum = g.Add(t, t), difference = g.Subtract(sum, x), row = g.Reshape(t, {4});
  const Value folded = g.Add(g.Multiply(difference, t), x);
  for (const Value& value : {t, sum, difference, row, folded}) g.Output("", value);
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  const absl::StatusOr<Values> result = RunGraph(*graph, {{x.id, {1, 2, 3, -4}}}, "oracle");
  ASSERT_TRUE(result.ok()) << result.status();
  using ::testing::ElementsAre;
  EXPECT_THAT(result->at(t.id), ElementsAre(1, 4, 9, 16));
  EXPECT_THAT(result->at(sum.id), ElementsAre(2, 8, 18, 32));
  EXPECT_THAT(result->at(difference.id), ElementsAre(1, 6, 15, 36));
  EXPECT_THAT(result->at(row.id), ElementsAre(1, 4, 9, 16));
  EXPECT_THAT(result->at(folded.id), ElementsAre(2, 26, 138, 572));
}

TEST(OracleTest, GapsBetweenStridesStayAsTheyAre) {
  // Transposed, rows of 5 with 3 in use; for s4 the rows share bytes.
  for (const DataType type : {kF32, kS8, kS4, kU2}) {
    OpCase test{"gaps",
                OpKind::kStaticTranspose,
                {{Attr::kOrder, std::vector<int64_t>{1, 0}}},
                {{type, {3, 2}, {0, 1, 1, 0, 1, 1}, Dims{1, 4}}},
                {{type, {2, 3}, {}, Dims{5, 1}}}};
    const absl::StatusOr<Graph> graph = GraphOf(test);
    ASSERT_TRUE(graph.ok()) << graph.status();
    const Engine engine = *Engine::Create({.backends = {"oracle"}});
    const absl::StatusOr<CompiledPartition> compiled =
        engine.Compile(PartitionGraph(*graph)->front());
    ASSERT_TRUE(compiled.ok()) << compiled.status();
    const LogicalTensor& out = compiled->partition().output(0);
    const Bytes in = Pack(compiled->partition().input(0), test.inputs[0].values);
    Bytes memory = Pack(out, {});
    const Bytes expected = Pack(out, {0, 1, 1, 1, 0, 1});
    ASSERT_TRUE(compiled
                    ->Execute(Stream(engine), {ConstTensor(in.data(), in.size())},
                              {Tensor{memory.data(), memory.size()}})
                    .ok());
    EXPECT_EQ(memory, expected) << DataTypeName(type);
  }
}

TEST(OracleTest, DropoutReadsAllBitsOfItsSeed) {
  const int64_t seed = (int64_t{1} << 53) + 1;  // not an f64
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {64}), probability = g.Input("p", kF32, {1});
  const Value seed_in = g.Input("seed", kS64, {1}), offset = g.Input("offset", kS64, {1});
  const Value y = g.AddOp(OpKind::kDropout, "drop", {x, seed_in, offset, probability}, {kF32})[0];
  g.Output("y", y);
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  const Engine engine = *Engine::Create({.backends = {"oracle"}});
  const absl::StatusOr<CompiledPartition> compiled =
      engine.Compile(PartitionGraph(*graph)->front());
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  const std::vector<float> ones(64, 1.f);
  const int64_t zero = 0;
  const float half = 0.5f;
  std::vector<float> out(64);
  ASSERT_TRUE(compiled
                  ->Execute(Stream(engine),
                            {{"x", ConstTensor(ones.data(), 256)},
                             {"p", ConstTensor(&half, 4)},
                             {"seed", ConstTensor(&seed, 8)},
                             {"offset", ConstTensor(&zero, 8)}},
                            {{"y", Tensor{out.data(), 256}}})
                  .ok());
  for (int i = 0; i < 64; ++i) EXPECT_EQ(out[i], DropoutKeeps(seed, 0, i, 0.5) ? 2 : 0) << i;
}

// Attention over a cache of 6 tokens per batch, by matching or stated directly.
class KvLengthsTest : public ::testing::TestWithParam<bool> {
 protected:
  KvLengthsTest() {
    GraphBuilder g;
    const Value q = g.Input("q", kF32, {2, 2, 1, 4}), k = g.Input("k", kF32, {2, 2, 6, 4});
    const Value v = g.Input("v", kF32, {2, 2, 6, 3}), lengths = g.Input("lengths", kS32, {2});
    const Value values = g.LoadTokens(v, lengths);
    if (GetParam()) {
      g.Output("o", g.ScaledDotProductAttention(q, g.LoadTokens(k, lengths), values,
                                                {.scale = 1.f, .kv_lengths = lengths})
                        .first);
    } else {
      const Value scores = g.MatMul(q, k, {.transpose_b = true});
      g.Output("o", g.MatMul(g.SoftMax(scores, {.lengths = lengths}), values));
    }
    graph_ = std::move(g).Build();
  }

  absl::Status Run(const std::vector<double>& k, const std::vector<double>& v,
                   std::vector<int32_t> lengths) {
    KVANT_ASSIGN_OR_RETURN(const Engine engine, Engine::Create({.backends = {"oracle"}}));
    KVANT_ASSIGN_OR_RETURN(const CompiledGraph compiled, engine.Compile(*graph_));
    const std::vector<float> qf(q_.begin(), q_.end()), kf(k.begin(), k.end()),
        vf(v.begin(), v.end());
    return compiled.Execute(Stream(engine),
                            {{"lengths", ConstTensor(lengths.data(), lengths.size() * 4)},
                             {"q", ConstTensor(qf.data(), qf.size() * 4)},
                             {"k", ConstTensor(kf.data(), kf.size() * 4)},
                             {"v", ConstTensor(vf.data(), vf.size() * 4)}},
                            {{"o", Tensor{output_.data(), output_.size() * 4}}});
  }

  absl::StatusOr<Graph> graph_;
  std::vector<double> q_ = Wave(16, 0.2, 0);
  std::vector<float> output_ = std::vector<float>(12, 42.f);
};

TEST_P(KvLengthsTest, ColumnsBeyondTheLengthDoNotExist) {
  ASSERT_TRUE(graph_.ok()) << graph_.status();
  std::vector<double> k = Wave(96, 0.3, 1), v = Wave(72, -0.2, 2);
  const std::vector<int32_t> lengths = {4, 0};
  // What lies beyond is whatever was in the cache's memory.
  for (int head = 0; head < 4; ++head) {
    const int length = lengths[head / 2];
    std::fill(&k[head * 24 + length * 4], &k[head * 24] + 24, std::nan(""));
    std::fill(&v[head * 18 + length * 3], &v[head * 18] + 18, head % 2 ? kInf : std::nan(""));
  }
  const absl::Status done = Run(k, v, lengths);
  ASSERT_TRUE(done.ok()) << done;
  for (int head = 0; head < 4; ++head) {
    const auto expected =
        NaiveHead(&q_[head * 4], &k[head * 24], &v[head * 18], 1, lengths[head / 2], 4, 3,
                  [](int64_t, int64_t, double dot) { return dot; });
    for (int d = 0; d < 3; ++d) EXPECT_NEAR(output_[head * 3 + d], expected[d], 1e-6) << head;
  }
}

TEST_P(KvLengthsTest, RefusesLengthsOutsideOfTheCapacity) {
  ASSERT_TRUE(graph_.ok()) << graph_.status();
  for (const int32_t length : {7, -1}) {
    const absl::Status status = Run(Wave(96, 0, 0), Wave(72, 0, 0), {3, length});
    EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments);
    EXPECT_THAT(std::string(status.message()),
                ::testing::HasSubstr("the length of row 1 is " + std::to_string(length) +
                                     "; it must be between 0 and the capacity of 6"));
    EXPECT_EQ(output_, std::vector<float>(12, 42.f));
  }
}

INSTANTIATE_TEST_SUITE_P(MatchedAndDirect, KvLengthsTest, ::testing::Bool());

TEST(OracleTest, ResultsDoNotDependOnThreads) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {2, 3, 37, 8}), k = g.Input("k", kF32, {2, 3, 61, 8});
  const Value v = g.Input("v", kF32, {2, 3, 61, 5});
  g.Output("o", g.MatMul(g.SoftMax(g.MatMul(q, k, {.transpose_b = true})), v));
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  std::vector<float> first;
  const auto to_f32 = [](const std::vector<double>& x) {
    return std::vector<float>(x.begin(), x.end());
  };
  const auto qf = to_f32(Wave(2 * 3 * 37 * 8, 0.1, 0)), kf = to_f32(Wave(2 * 3 * 61 * 8, 0.2, 1));
  const auto vf = to_f32(Wave(2 * 3 * 61 * 5, 0.3, 2));
  for (const int threads : {1, 2, 7}) {
    const Engine engine = *Engine::Create({.backends = {"oracle"}, .threads = threads});
    const absl::StatusOr<CompiledPartition> compiled =
        engine.Compile(PartitionGraph(*graph)->front());
    ASSERT_TRUE(compiled.ok()) << compiled.status();
    std::vector<float> o(2 * 3 * 37 * 5);
    ASSERT_TRUE(compiled
                    ->Execute(Stream(engine),
                              {{"q", ConstTensor(qf.data(), qf.size() * 4)},
                               {"k", ConstTensor(kf.data(), kf.size() * 4)},
                               {"v", ConstTensor(vf.data(), vf.size() * 4)}},
                              {{"o", Tensor{o.data(), o.size() * 4}}})
                    .ok());
    if (first.empty()) first = o;
    EXPECT_EQ(o, first) << threads;
  }
}

}  // namespace
}  // namespace kvant::testing
