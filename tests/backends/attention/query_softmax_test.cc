// Attention whose softmax is over the queries, on the cpu backend: specs against f64 loops, and
// oneDNN's JAX-MQA graph against the oracle.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/graph/builder.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tests/backends/attention/harness.h"
#include "kvant/tests/backends/ops/op_testing.h"
#include "kvant/tests/backends/ops/reference_testing.h"

namespace kvant::cpu {
namespace {

using Kind = ScoreStep::Kind;
using ::testing::HasSubstr;
constexpr double kInf = std::numeric_limits<double>::infinity();

Case OverQueries(const Shape& shape, const Format& k = {}, const Format& v = {}) {
  Case c = Plain(shape, k, v);
  c.spec.over_queries = true;
  return c;
}

Dims5 DimsOfScores(const Shape& s) { return {s.b0, s.b1, s.ratio, s.q_len, s.kv_len}; }

void AddStep(Case& c, Kind kind, const View& operand) {
  ScoreStep step;
  step.kind = kind;
  step.operand.view = operand;
  c.spec.steps.push_back(step);
}

// Hides some scores, and whole columns: every fifth key from every query.
void AddMask(Case& c, double fill = -kInf) {
  AddStep(c, Kind::kAdd, c.AddDense(kF32, DimsOfScores(c.shape), [&](const Dims5& p) {
    return p[4] % 5 == 2 || (p[3] + p[4] + p[2]) % 7 == 3 ? fill : c.Random(-1, 1);
  }));
}

TEST(CpuQuerySoftmax, Shapes) {
  for (int64_t heads : {1, 3}) {
    for (int64_t q_len : {1, 5, 70}) {
      for (int64_t kv_len : {1, 33, 130}) {
        for (bool shared : {false, true}) {
          SCOPED_TRACE(::testing::Message() << heads << " heads, " << q_len << " x " << kv_len);
          Case c = OverQueries({.b0 = 2,
                                .b1 = shared ? 1 : heads,
                                .ratio = shared ? heads : 2,
                                .q_len = q_len,
                                .kv_len = kv_len,
                                .d = 12,
                                .dv = 9});
          c.spec.softmax_mode = SoftmaxMode::kInfAsZero;
          if (kv_len > 1) AddMask(c);
          c.Check();
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(CpuQuerySoftmax, StorageOfKeysAndValues) {
  const Format formats[] = {
      {},
      {.type = kF16},
      {.type = kBF16},
      {.type = kU4, .group = {1, 1, 1, 1, 8}, .scales = kF16, .zero_points = kU4},
      {.type = kS8, .group = {1, 1, 1, 13, 1}, .scales = kF32},
      {.type = kF8E4M3, .group = {1, 1, 1, 1, 0}, .scales = kF32}};
  for (const Format& k : formats) {
    for (const Format& v : formats) {
      for (bool per_query_head : {false, true}) {
        Format own = k;
        own.per_query_head = per_query_head;
        SCOPED_TRACE(::testing::Message() << DataTypeName(k.type) << " " << DataTypeName(v.type));
        Case c = OverQueries({.b0 = 1, .q_len = 4, .kv_len = 130, .d = 24, .dv = 16}, own, v);
        c.SetQ(k.type == kF16 ? kF16 : kF32);
        AddMask(c);
        c.Check();
        if (HasFailure()) return;
      }
    }
  }
}

TEST(CpuQuerySoftmax, QuantizedQueriesAndProbabilities) {
  Case c = OverQueries({.b0 = 1, .q_len = 20, .kv_len = 70, .d = 16, .dv = 16});
  c.SetQ(kS8);
  Quantization& q = c.spec.q_quantization.emplace();
  q.static_scales = {0.015f};
  q.static_zps = {3};
  c.Check();
  c.spec.probs_quantization = FakeQuantize{kU8, 1.f / 255, 0};
  c.Check(1e-2);  // codes may be off by one
}

TEST(CpuQuerySoftmax, EveryStepThatHasARowAndAColumn) {
  Case c = OverQueries({.b0 = 1, .q_len = 9, .kv_len = 75});
  const auto values = [&](double low, double high) {
    return [&c, low, high](const Dims5&) { return c.Random(low, high); };
  };
  AddStep(c, Kind::kMultiply, c.AddDense(kF32, {1, 2, 3, 9, 1}, values(0.5, 2)));
  AddStep(c, Kind::kDivide, c.AddDense(kF16, {1, 1, 1, 1, 75}, values(0.5, 2)));
  AddStep(c, Kind::kTanh, {});
  AddStep(c, Kind::kSubtract, c.AddDense(kF32, {1, 1, 3, 9, 75}, values(-2, 2)));
  AddStep(c, Kind::kMaximum, c.AddDense(kF32, {1, 1, 1, 9, 1}, values(-2, -1)));
  AddStep(c, Kind::kMinimum, c.AddDense(kF32, {1, 1, 1, 1, 75}, values(1, 2)));
  for (bool inverted : {false, true}) {
    ScoreStep select;
    select.kind = Kind::kSelect;
    select.condition = c.AddDense(kBoolean, {1, 2, 1, 9, 75}, [=](const Dims5& p) {
      return (p[3] * p[4] % 3 == 0) != inverted;
    });
    select.operand.view = c.AddDense(kF32, {1, 1, 1, 9, 1}, values(-3, 0));
    select.inverted = inverted;
    c.spec.steps.push_back(select);
    c.Check();
  }
}

// Probabilities of a column sum to one whatever scores are rounded to.
TEST(CpuQuerySoftmax, ColumnsSumToOne) {
  for (const FpMath fpmath : {FpMath::kStrict, FpMath::kBF16}) {
    Case c = OverQueries({.b0 = 1, .b1 = 2, .ratio = 1, .q_len = 100, .kv_len = 100, .dv = 100});
    c.spec.fpmath = fpmath;
    auto* const q = static_cast<float*>(c.inputs[c.spec.q.port].data());
    for (size_t i = 0; i < c.inputs[c.spec.q.port].bytes() / sizeof(float); ++i) q[i] *= 100;
    auto* const v = static_cast<float*>(c.inputs[c.spec.v[0].data.port].data());
    for (int64_t i = 0; i < 2 * 100 * 100; ++i) v[i] = i / 100 % 100 == i % 100 ? 1.f : 0.f;
    for (int i = 0; const KernelSet* set = KernelsAt(i); ++i) {
      ASSERT_TRUE(c.Run(*set, 2).ok());
      const auto* const out = static_cast<const float*>(c.outputs[c.spec.output.port].data());
      // Values are the unit matrix, so that outputs are probabilities.
      for (int64_t column = 0; column < 2 * 100; ++column) {
        double sum = 0;
        for (int64_t row = 0; row < 100; ++row) {
          sum += out[(column / 100 * 100 + row) * 100 + column % 100];
        }
        EXPECT_NEAR(sum, 1, 1e-2) << set->name << " " << static_cast<int>(fpmath);
      }
    }
  }
}

// Which is NaN for all rows.
TEST(CpuQuerySoftmax, ColumnsOfNanAndNothingElse) {
  for (SoftmaxMode mode : {SoftmaxMode::kNone, SoftmaxMode::kInfAsZero}) {
    Case c = OverQueries({.q_len = 6, .kv_len = 66});
    AddStep(c, Kind::kAdd, c.AddDense(kF32, {2, 1, 1, 6, 66}, [&](const Dims5& p) {
      if (p[0] != 1 || p[4] != 65) return 0.0;
      return p[3] == 2 ? std::nan("") : -kInf;
    }));
    c.spec.softmax_mode = mode;
    c.Check();
  }
}

TEST(CpuQuerySoftmax, ColumnsThatNothingSeesInBothModes) {
  for (SoftmaxMode mode : {SoftmaxMode::kNone, SoftmaxMode::kInfAsZero}) {
    Case c = OverQueries({.q_len = 6, .kv_len = 66});
    AddStep(c, Kind::kAdd, c.AddDense(kF32, {2, 1, 1, 6, 66}, [&](const Dims5& p) {
      return p[0] == 1 && p[4] % 65 == 0 ? -kInf : 0.0;
    }));
    c.spec.softmax_mode = mode;
    c.Check();
  }
}

// A logarithm of the sum that is added to such a maximum is lost.
TEST(CpuQuerySoftmax, ColumnsUnderALargeFiniteMask) {
  for (double fill : {-1e9, -1e30}) {
    Case c = OverQueries({.q_len = 6, .kv_len = 66});
    AddStep(c, Kind::kMultiply, c.AddScalar(kF32, 0));  // f64 keeps what f32 rounds away
    AddStep(c, Kind::kAdd, c.AddDense(kF32, {1, 1, 1, 6, 66}, [&](const Dims5& p) {
      return p[4] % 3 == 0 ? fill : 0.25 * static_cast<double>(p[3]);
    }));
    c.Check();
  }
}

// Of one query, every probability is 1. Scores that differ between the passes by their rounding
// would give others.
TEST(CpuQuerySoftmax, LargeScoresAreTheSameInBothPasses) {
  for (int64_t d : {24, 200}) {
    Case c =
        OverQueries({.q_len = 1, .kv_len = 130, .d = d},
                    {.type = kS8, .group = {1, 1, 1, 1, 8}, .scales = kF32, .zero_points = kF32});
    AddStep(c, Kind::kMultiply, c.AddScalar(kF32, 1.2345e6));
    c.Check();
  }
}

TEST(CpuQuerySoftmax, SplitsOfEitherAxis) {
  for (const auto& [q_len, kv_len] : {std::pair(3, 1500), std::pair(1500, 3)}) {
    Case c = OverQueries(
        {.b0 = 1, .b1 = 1, .ratio = 2, .q_len = q_len, .kv_len = kv_len, .d = 8, .dv = 8});
    AddMask(c);
    const auto executable = CompileAttention(c.spec, *KernelsAt(0));
    ASSERT_TRUE(executable.ok()) << executable.status();
    EXPECT_THAT((*executable)->kernel(), HasSubstr(" splits"));
    c.Check();
  }
}

TEST(CpuQuerySoftmax, ShortProductsInBothPassesOrNone) {
  Case c = OverQueries({.b0 = 1, .q_len = 40, .kv_len = 90},
                       {.type = kS8, .group = {1, 1, 1, 1, 8}, .scales = kF32});
  c.spec.fpmath = FpMath::kBF16;
  c.Check();  // no, as apply_to_int is not set
  c.spec.apply_to_int = true;
  c.Check(3e-2);
  const auto executable = CompileAttention(c.spec, HighestKernels());
  ASSERT_TRUE(executable.ok()) << executable.status();
  EXPECT_EQ((*executable)->rounding(), HighestKernels().pairs == nullptr ? 0 : 1e-2);
}

// Neither pass has the scale in its queries, which are keys in the other, also where those are bf16
// and their products exact.
TEST(CpuQuerySoftmax, ScaleOfQueriesInBF16) {
  Case c = OverQueries({.b0 = 1, .q_len = 40, .kv_len = 90, .d = 128, .dv = 32}, {.type = kBF16},
                       {.type = kBF16});
  c.SetQ(kBF16);
  for (FpMath fpmath : {FpMath::kStrict, FpMath::kBF16}) {
    c.spec.fpmath = fpmath;
    c.Check(fpmath == FpMath::kStrict ? 2e-5 : 1e-2);
  }
}

TEST(CpuQuerySoftmax, NoScratchOfScores) {
  AttentionSpec spec = OverQueries({.b0 = 1, .b1 = 1, .ratio = 1}).spec;
  spec.q_len = spec.kv_len = int64_t{1} << 20;
  spec.q.dims[3] = spec.k[0].data.dims[3] = spec.v[0].data.dims[3] = spec.q_len;
  const auto executable = CompileAttention(spec, *KernelsAt(0));
  ASSERT_TRUE(executable.ok()) << executable.status();
  EXPECT_LE((*executable)->scratch_bytes(2), (16 << 20) + 2 * sizeof(float) * spec.kv_len);
}

TEST(CpuQuerySoftmax, SaysWhatItDoesNotTake) {
  const auto sentence = [](auto edit) {
    Case c = OverQueries({.b0 = 1, .kv_len = 8});
    edit(c);
    return std::string(CompileAttention(c.spec, *KernelsAt(0)).status().message());
  };
  EXPECT_THAT(sentence([](Case& c) { c.spec.steps.push_back({.kind = Kind::kBand}); }),
              HasSubstr("does not take Band on scores with a softmax over queries"));
  EXPECT_THAT(sentence([](Case& c) { c.spec.steps.push_back({.kind = Kind::kAlibi}); }),
              HasSubstr("Alibi on scores with"));
  EXPECT_THAT(sentence([](Case& c) { c.spec.sinks = c.AddScalar(kF32, 1); }),
              HasSubstr("sinks with"));
  EXPECT_THAT(sentence([](Case& c) { c.spec.kv_lengths = c.AddScalar(kS32, 1); }),
              HasSubstr("KV lengths with"));
  EXPECT_THAT(sentence([](Case& c) { c.spec.dropout.emplace(); }), HasSubstr("dropout with"));
  EXPECT_THAT(sentence([](Case& c) { c.AddStats(); }), HasSubstr("statistics with"));
  EXPECT_THAT(sentence([](Case& c) { c.SetK({}, {3, 5}); }), HasSubstr("segments of keys with"));
  EXPECT_EQ(sentence([](Case& c) { c.SetV({}, {3, 5}); }), "");
}

// oneDNN's JAX-MQA, and with key heads its GQA form: scores K x Q are [B, Hkv?, S, R * Sq].
struct Jax {
  int64_t key_heads = 0;  // 0: the axis is not there
  int64_t heads = 3, q_len = 5, kv_len = 33;
  DataType type = kF32;
  bool compressed = false;  // K and V, u4 in groups along the head
  bool masked = false;      // some keys from all queries
  std::string mode = "none";
};

void ExpectFusedLikeTheOracle(const Jax& jax) {
  constexpr int64_t kBatch = 2, kSize = 16, kValueSize = 8;
  GraphBuilder g;
  Dims lead{kBatch};
  if (jax.key_heads > 0) lead.push_back(jax.key_heads);
  const int64_t rank = static_cast<int64_t>(lead.size());
  const auto shape = [&](std::initializer_list<int64_t> tail) {
    Dims dims = lead;
    dims.insert(dims.end(), tail);
    return dims;
  };
  const auto stored = [&](const std::string& name, const Dims& dims, int64_t axis) {
    if (!jax.compressed) return g.Input(name, jax.type, dims);
    Dims groups(dims.size(), 1), scales = dims;
    groups[axis] = 8;
    scales[axis] /= 8;
    return g.DynamicDequantize(g.Input(name, kU4, dims),
                               g.Input(name + "_scales", jax.type, scales),
                               {.group_shape = groups});
  };
  const Value k = stored("k", shape({jax.kv_len, kSize}), rank + 1);
  const Value v = stored("v", shape({kValueSize, jax.kv_len}), rank);
  const Value q = g.Input("q", jax.type, shape({kSize, jax.heads * jax.q_len}));
  const Value mask = g.Input("mask", kF32, shape({jax.heads, jax.kv_len, jax.q_len}));
  const Value root = g.Input("root", kF32, {});
  std::vector<int64_t> order(rank + 3);
  for (int64_t axis = 0; axis < rank + 3; ++axis) order[axis] = axis;
  std::swap(order[rank], order[rank + 1]);
  const auto list = [](const Dims& dims) { return std::vector<int64_t>(dims.begin(), dims.end()); };
  Value s = g.Divide(g.MatMul(k, q), root);
  s = g.Transpose(g.Reshape(s, list(shape({jax.kv_len, jax.heads, jax.q_len}))), order);
  Value p = g.SoftMax(g.Add(s, mask), {.axis = rank + 2, .mode = jax.mode, .type = jax.type});
  p = g.Reshape(g.Transpose(p, order), list(shape({jax.kv_len, jax.heads * jax.q_len})));
  g.Output("o", g.MatMul(v, p));
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();

  const absl::StatusOr<std::vector<Partition>> partitions = PartitionGraph(*graph);
  ASSERT_TRUE(partitions.ok()) << partitions.status();
  ASSERT_EQ(partitions->size(), 1u);
  const absl::StatusOr<Engine> engine = Engine::Create({.backends = {"cpu"}});
  ASSERT_TRUE(engine.ok()) << engine.status();
  const absl::StatusOr<CompiledPartition> compiled = engine->Compile(partitions->at(0));
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  EXPECT_TRUE(compiled->fused());
  if (jax.q_len > 1 || jax.kv_len > 1) {  // over one element, any axis will do
    EXPECT_THAT(compiled->ToString(), HasSubstr("softmax over queries in two passes"));
  }

  testing::Values inputs = testing::RandomInputs(*graph);
  std::vector<double>& hidden = inputs[mask.id];
  for (size_t i = 0; jax.masked && i < hidden.size(); ++i) {
    if (static_cast<int64_t>(i) / jax.q_len % jax.kv_len % 4 == 1) hidden[i] = -kInf;
  }
  inputs[root.id] = {4};
  const auto expected = testing::RunGraph(*graph, inputs, "oracle");
  ASSERT_TRUE(expected.ok()) << expected.status();
  const auto actual = testing::RunGraph(*graph, inputs, "cpu");
  ASSERT_TRUE(actual.ok()) << actual.status();
  const TensorId o = graph->outputs()[0];
  testing::ExpectNear(graph->tensor(o), expected->at(o), actual->at(o));
}

TEST(CpuQuerySoftmax, JaxGraphs) {
  for (int64_t key_heads : {0, 2}) {
    for (int64_t heads : {1, 3}) {
      for (int64_t q_len : {1, 5, 70}) {
        for (int64_t kv_len : {1, 33, 130}) {
          SCOPED_TRACE(::testing::Message()
                       << key_heads << " " << heads << " heads, " << q_len << " x " << kv_len);
          Jax jax{.key_heads = key_heads, .heads = heads, .q_len = q_len, .kv_len = kv_len};
          ExpectFusedLikeTheOracle(jax);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(CpuQuerySoftmax, JaxGraphsOfEveryStorageAndMode) {
  for (int64_t key_heads : {0, 2}) {
    for (DataType type : {kF32, kF16, kBF16}) {
      for (bool compressed : {false, true}) {
        for (const char* mode : {"none", "inf_as_zero"}) {
          for (bool masked : {false, true}) {
            SCOPED_TRACE(::testing::Message()
                         << DataTypeName(type) << compressed << mode << masked);
            Jax jax{
                .key_heads = key_heads, .type = type, .compressed = compressed, .masked = masked};
            jax.mode = mode;
            ExpectFusedLikeTheOracle(jax);
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvant::cpu
