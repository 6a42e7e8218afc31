// What the native grammar fuses, and the specs that come out.
#include "kvant/tests/patterns/patterns_testing.h"

namespace kvant {
namespace {

using testing::KindsOf;
using testing::OnlySpec;
using testing::Partitions;
using testing::Plain;
using testing::Text;
using Kind = ScoreStep::Kind;
using Alignment = ScoreStep::Alignment;

TEST(AttentionMatcher, PlainWithScaleAndMask) {
  Plain p;
  const Value s = p.g.Add(p.g.Divide(p.Scores(), p.scale), p.mask);
  p.g.Output("o", p.g.MatMul(p.g.SoftMax(s), p.v));
  const AttentionSpec spec = OnlySpec(Partitions(std::move(p.g)));
  EXPECT_EQ(spec.batch, (std::array<int64_t, 3>{2, 4, 1}));
  EXPECT_EQ(spec.q_len, 3);
  EXPECT_EQ(spec.kv_len, 5);
  EXPECT_EQ(spec.head_size, 8);
  EXPECT_EQ(spec.v_head_size, 6);
  EXPECT_EQ(Text(spec.q), "0:f32[2,4,1,3,8]s[96,24,0,8,1]");
  EXPECT_EQ(Text(spec.k[0]), "1:f32[2,4,1,5,8]s[160,40,0,8,1]");
  EXPECT_EQ(Text(spec.v[0]), "4:f32[2,4,1,5,6]s[120,30,0,6,1]");
  EXPECT_EQ(Text(spec.output), "0:f32[2,4,1,3,6]s[72,18,0,6,1]");
  EXPECT_EQ(KindsOf(spec), (std::vector<Kind>{Kind::kDivide, Kind::kAdd}));
  EXPECT_TRUE(spec.steps[0].operand.view.scalar());
  EXPECT_EQ(Text(spec.steps[1].operand.view), "3:f32[2,1,1,3,5]s[15,0,0,5,1]");
  EXPECT_EQ(WhyNotTaken(spec, {Feature::kDivideStep, Feature::kAddStep}), "");
  EXPECT_EQ(WhyNotTaken(spec, {Feature::kDivideStep}), "Add on scores");
  EXPECT_EQ(spec.ToString(),
            "batch 2, 4 query heads over 4 KV heads, 3 x 5, head size 8 and 6 for V; Q f32; K f32; "
            "V f32; scores over a f32 scalar, plus f32 [2,1,1,3,5]; output f32");
}

TEST(AttentionMatcher, StepsKeepTheOrderOfTheGraph) {
  Plain p;
  const Value cap = p.g.Input("cap", kF32, {});
  const Value cond = p.g.Input("cond", kBoolean, {1, 1, 3, 5});
  Value s = p.g.Add(p.mask, p.Scores());  // mask before scale, on the other side
  s = p.g.Multiply(p.scale, s);
  s = p.g.Multiply(p.g.Tanh(p.g.Divide(s, cap)), cap);
  s = p.g.Select(cond, cap, s);  // scores on the false branch
  s = p.g.Subtract(cap, s);
  p.g.Output("o", p.g.MatMul(p.g.SoftMax(s), p.v));
  const AttentionSpec spec = OnlySpec(Partitions(std::move(p.g)));
  EXPECT_EQ(KindsOf(spec),
            (std::vector<Kind>{Kind::kAdd, Kind::kMultiply, Kind::kDivide, Kind::kTanh,
                               Kind::kMultiply, Kind::kSelect, Kind::kMultiply, Kind::kAdd}));
  EXPECT_TRUE(spec.steps[5].inverted);
  EXPECT_EQ(spec.steps[5].condition.dims, (std::array<int64_t, 5>{1, 1, 1, 3, 5}));
  EXPECT_EQ(spec.steps[6].operand.constant, -1.f);
  EXPECT_TRUE(spec.Uses(Feature::kTanhStep));
  EXPECT_TRUE(spec.Uses(Feature::kSelectStep));
}

TEST(AttentionMatcher, CausalTopLeftAndRuntime) {
  for (const bool runtime : {false, true}) {
    Plain p;
    const Value fill = p.g.Input("fill", kF32, {1});
    const Value s = p.g.Multiply(p.Scores(), p.scale);
    const Value masked =
        runtime ? p.g.CausalMask(s, fill, p.g.Input("s", kS32, {1}), p.g.Input("t", kS32, {}))
                : p.g.CausalMask(s, fill);
    p.g.Output("o", p.g.MatMul(p.g.SoftMax(p.g.Add(masked, p.mask)), p.v));
    const AttentionSpec spec = OnlySpec(Partitions(std::move(p.g)));
    ASSERT_EQ(KindsOf(spec), (std::vector<Kind>{Kind::kMultiply, Kind::kBand, Kind::kAdd}));
    const ScoreStep& band = spec.steps[1];
    EXPECT_EQ(band.right, 0);
    EXPECT_EQ(band.left, std::nullopt);
    EXPECT_FALSE(band.inverted);
    EXPECT_EQ(band.alignment, runtime ? Alignment::kRuntime : Alignment::kTopLeft);
    EXPECT_EQ(band.shift_add.view.present(), runtime);
    EXPECT_EQ(band.shift_sub.view.present(), runtime);
    if (runtime) {
      EXPECT_NE(band.shift_add.view.port, band.shift_sub.view.port);
    }
  }
}

TEST(AttentionMatcher, BandsInOtherForms) {
  // col + t >= row, scores on the false branch: what is at or right of the diagonal
  // less t is filled.
  Plain p;
  const Value fill = p.g.Input("fill", kF32, {});
  const Value t = p.g.Input("t", kS32, {1});
  const Value s = p.Scores();
  const Value col = p.g.Add(t, p.g.GenIndex(s, -1));
  const Value masked = p.g.Select(p.g.GreaterEqual(col, p.g.GenIndex(s, 2)), fill, s);
  p.g.Output("o", p.g.MatMul(p.g.SoftMax(masked), p.v));
  const AttentionSpec spec = OnlySpec(Partitions(std::move(p.g)));
  ASSERT_EQ(spec.steps.size(), 1u);
  const ScoreStep& band = spec.steps[0];
  EXPECT_EQ(band.kind, Kind::kBand);
  EXPECT_TRUE(band.inverted);
  EXPECT_EQ(band.left, 0);
  EXPECT_EQ(band.right, std::nullopt);
  EXPECT_EQ(band.alignment, Alignment::kRuntime);
  EXPECT_EQ(band.shift_add.constant, 0);
  EXPECT_TRUE(band.shift_sub.view.scalar());
}

TEST(AttentionMatcher, CompressedKeysInEveryLayout) {
  struct Case {
    const char* name;
    Dims dims;
    std::optional<Dims> strides;
    Dims group, scales;
    bool transpose;
    std::string expected;
  };
  const Case cases[] = {
      {"token-major, along the head",
       {2, 4, 6, 8},
       {},
       {1, 1, 1, 4},
       {2, 4, 6, 2},
       true,
       "0:s4[2,4,1,6,8]s[192,48,0,8,1] /[1,1,1,1,4] * 1:f16[2,4,1,6,2]s[48,12,0,2,1]"},
      {"token-major seen transposed",
       {2, 4, 8, 6},
       Dims{192, 48, 1, 8},
       {1, 1, 4, 1},
       {2, 4, 2, 6},
       false,
       "0:s4[2,4,1,6,8]s[192,48,0,8,1] /[1,1,1,1,4] * 1:f16[2,4,1,6,2]s[48,12,0,1,6]"},
      {"channel-major",
       {2, 4, 8, 6},
       {},
       {1, 1, 8, 1},
       {2, 4, 1, 6},
       false,
       "0:s4[2,4,1,6,8]s[192,48,0,1,6] /[1,1,1,1,8] * 1:f16[2,4,1,6,1]s[24,6,0,1,0]"},
      {"per channel, in groups of tokens",
       {2, 4, 6, 8},
       {},
       {1, 1, 3, 1},
       {2, 4, 2, 8},
       true,
       "0:s4[2,4,1,6,8]s[192,48,0,8,1] /[1,1,1,3,1] * 1:f16[2,4,1,2,8]s[64,16,0,8,1]"},
      {"across heads and both",
       {2, 4, 6, 8},
       {},
       {2, 2, 2, 4},
       {1, 2, 3, 2},
       true,
       "0:s4[2,4,1,6,8]s[192,48,0,8,1] /[1,2,1,2,4] * 1:f16[1,2,1,3,2]s[0,6,0,2,1]"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    GraphBuilder g;
    const Value q = g.Input("q", kF16, {2, 4, 3, 8});
    const Value k = g.DynamicDequantize(g.Input("k", kS4, c.dims, c.strides),
                                        g.Input("ks", kF16, c.scales), {.group_shape = c.group});
    const Value v = g.Input("v", kF16, {2, 4, 6, 8});
    g.Output("o", g.MatMul(g.SoftMax(g.MatMul(q, k, {.transpose_b = c.transpose})), v));
    const AttentionSpec spec = OnlySpec(Partitions(std::move(g)));
    ASSERT_EQ(spec.k.size(), 1u);
    EXPECT_EQ(Text(spec.k[0]), c.expected);
    EXPECT_EQ(WhyNotTaken(spec, {Feature::kQuantizedK}), "");
  }
}

TEST(AttentionMatcher, PerTensorAndPerChannel) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {2, 4, 3, 8});
  const Value k = g.DynamicDequantize(g.Input("k", kU8, {2, 4, 6, 8}), g.Input("ks", kF32, {1}),
                                      g.Input("kz", kU8, {1}), {});
  const Value v =
      g.DynamicDequantize(g.Input("v", kS8, {2, 4, 6, 8}), g.Input("vs", kF32, {4}), {.axis = 1});
  g.Output("o", g.MatMul(g.SoftMax(g.MatMul(q, k, {.transpose_b = true})), v));
  const AttentionSpec spec = OnlySpec(Partitions(std::move(g)));
  EXPECT_TRUE(spec.k[0].quantization->scales.scalar());
  EXPECT_TRUE(spec.k[0].quantization->zero_points.scalar());
  EXPECT_EQ(Text(spec.v[0].quantization->scales), "4:f32[1,4,1,1,1]s[0,1,0,0,0]");
  EXPECT_EQ(spec.v[0].quantization->group[1], 1);
  EXPECT_EQ(spec.v[0].quantization->group[3], 6);
}

TEST(AttentionMatcher, GroupedHeadsByReshapeOfEverything) {
  GraphBuilder g;
  const Value q = g.Reshape(g.Input("q", kF16, {2, 6, 3, 8}), {2, 2, 3, 3, 8});
  const Value k = g.Reshape(
      g.DynamicDequantize(g.Input("k", kU4, {2, 2, 5, 8}), g.Input("ks", kF16, {2, 2, 5, 2}),
                          g.Input("kz", kU4, {2, 2, 5, 2}), {.group_shape = {1, 1, 1, 4}}),
      {2, 2, 1, 5, 8});
  const Value codes = g.Reshape(g.Input("v", kU4, {2, 2, 5, 8}), {2, 2, 1, 5, 8});
  const Value scales = g.Reshape(g.Input("vs", kF16, {2, 2, 5, 2}), {2, 2, 1, 5, 2});
  const Value v = g.DynamicDequantize(codes, scales, {.group_shape = {1, 1, 1, 1, 4}});
  const Value mask = g.Reshape(g.Input("mask", kF16, {2, 6, 3, 5}), {2, 2, 3, 3, 5});
  const Value s = g.Add(g.MatMul(q, k, {.transpose_b = true}), mask);
  g.Output("o", g.Reshape(g.MatMul(g.SoftMax(s), v), {2, 6, 3, 8}));
  const AttentionSpec spec = OnlySpec(Partitions(std::move(g)));
  EXPECT_EQ(spec.batch, (std::array<int64_t, 3>{2, 2, 3}));
  EXPECT_EQ(Text(spec.q), "0:f16[2,2,3,3,8]s[144,72,24,8,1]");
  EXPECT_EQ(Text(spec.k[0]),
            "1:u4[2,2,1,5,8]s[80,40,0,8,1] /[1,1,1,1,4] * 2:f16[2,2,1,5,2]s[20,10,0,2,1] - "
            "3:u4[2,2,1,5,2]s[20,10,0,2,1]");
  EXPECT_EQ(Text(spec.v[0]),
            "4:u4[2,2,1,5,8]s[80,40,0,8,1] /[1,1,1,1,4] * 5:f16[2,2,1,5,2]s[20,10,0,2,1]");
  EXPECT_EQ(Text(spec.steps[0].operand.view), "6:f16[2,2,3,3,5]s[90,45,15,5,1]");
  EXPECT_EQ(Text(spec.output), "0:f16[2,2,3,3,8]s[144,72,24,8,1]");
}

TEST(AttentionMatcher, BatchAxesByRank) {
  struct Case {
    Dims q, k;
    std::array<int64_t, 3> batch;
    std::string q_view, k_view;
  };
  const Case cases[] = {
      {{3, 8}, {5, 8}, {1, 1, 1}, "0:f32[1,1,1,3,8]s[0,0,0,8,1]", "1:f32[1,1,1,5,8]s[0,0,0,8,1]"},
      {{2, 3, 8},
       {2, 5, 8},
       {2, 1, 1},
       "0:f32[2,1,1,3,8]s[24,0,0,8,1]",
       "1:f32[2,1,1,5,8]s[40,0,0,8,1]"},
      {{4, 3, 8},
       {1, 5, 8},
       {1, 1, 4},
       "0:f32[1,1,4,3,8]s[0,0,24,8,1]",
       "1:f32[1,1,1,5,8]s[0,0,0,8,1]"},
      {{2, 4, 3, 8},
       {2, 1, 5, 8},
       {2, 1, 4},
       "0:f32[2,1,4,3,8]s[96,0,24,8,1]",
       "1:f32[2,1,1,5,8]s[40,0,0,8,1]"},
      {{2, 2, 3, 3, 8},
       {2, 2, 1, 5, 8},
       {2, 2, 3},
       "0:f32[2,2,3,3,8]s[144,72,24,8,1]",
       "1:f32[2,2,1,5,8]s[80,40,0,8,1]"},
      {{2, 3, 2, 2, 3, 8},
       {2, 3, 2, 1, 5, 8},
       {6, 2, 2},
       "0:f32[6,2,2,3,8]s[96,48,24,8,1]",
       "1:f32[6,2,1,5,8]s[80,40,0,8,1]"},
  };
  for (const Case& c : cases) {
    GraphBuilder g;
    const Value q = g.Input("q", kF32, c.q), k = g.Input("k", kF32, c.k);
    // K and V are the same tensor.
    g.Output("o", g.MatMul(g.SoftMax(g.MatMul(q, k, {.transpose_b = true})), k));
    const AttentionSpec spec = OnlySpec(Partitions(std::move(g)));
    EXPECT_EQ(spec.batch, c.batch);
    EXPECT_EQ(Text(spec.q), c.q_view);
    EXPECT_EQ(Text(spec.k[0]), c.k_view);
    EXPECT_EQ(spec.v[0].data.port, spec.k[0].data.port);
  }
}

TEST(AttentionMatcher, OutputPermutedAndMergedIntoThePort) {
  Plain p;
  const Value o = p.g.MatMul(p.g.SoftMax(p.Scores()), p.v);
  p.g.Output("o", p.g.TypeCast(p.g.Reshape(p.g.Transpose(o, {0, 2, 1, 3}), {2, 3, 24}), kBF16));
  const AttentionSpec spec = OnlySpec(Partitions(std::move(p.g)));
  EXPECT_EQ(Text(spec.output), "0:bf16[2,4,1,3,6]s[72,6,0,24,1]");
}

TEST(AttentionMatcher, TransposedProbabilitiesAtInputOne) {
  // O^T = V^T P^T, as JAX writes it.
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {2, 4, 3, 8}), k = g.Input("k", kF32, {2, 4, 8, 5});
  const Value vt = g.Input("v", kF32, {2, 4, 6, 5});
  const Value probs = g.Reorder(g.Transpose(g.SoftMax(g.MatMul(q, k)), {0, 1, 3, 2}));
  g.Output("o", g.Transpose(g.MatMul(vt, probs), {0, 3, 1, 2}));
  const AttentionSpec spec = OnlySpec(Partitions(std::move(g)));
  EXPECT_EQ(Text(spec.k[0]), "1:f32[2,4,1,5,8]s[160,40,0,1,5]");
  EXPECT_EQ(Text(spec.v[0]), "2:f32[2,4,1,5,6]s[120,30,0,1,5]");
  EXPECT_EQ(Text(spec.output), "0:f32[2,4,1,3,6]s[72,6,0,24,1]");
}

TEST(AttentionMatcher, ScoresTransposedThroughout) {
  // S^T = K Q^T normalised over its rows, O^T = V^T S^T.
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {2, 4, 3, 8}), k = g.Input("k", kF32, {2, 4, 5, 8});
  const Value vt = g.Input("v", kF32, {2, 4, 6, 5});
  const Value bias = g.Input("bias", kF32, {2, 1, 5, 3});
  const Value s = g.Add(g.MatMul(k, q, {.transpose_b = true}), bias);
  g.Output("o", g.MatMul(vt, g.SoftMax(s, {.axis = -2})));
  const AttentionSpec spec = OnlySpec(Partitions(std::move(g)));
  EXPECT_EQ(spec.q_len, 3);
  EXPECT_EQ(spec.kv_len, 5);
  EXPECT_EQ(Text(spec.q), "1:f32[2,4,1,3,8]s[96,24,0,8,1]");
  EXPECT_EQ(Text(spec.k[0]), "0:f32[2,4,1,5,8]s[160,40,0,8,1]");
  EXPECT_EQ(Text(spec.steps[0].operand.view), "2:f32[2,1,1,3,5]s[15,0,0,1,3]");
  EXPECT_EQ(Text(spec.output), "0:f32[2,4,1,3,6]s[72,18,0,1,3]");
}

// oneDNN's JAX-MQA: scores [B, S, H * Sq] that are normalised as [B, H, S, Sq].
struct JaxMqa {
  GraphBuilder g;
  Value k = g.Input("k", kF32, {2, 5, 8});
  Value q = g.Input("q", kF32, {2, 8, 12});
  Value vt = g.Input("v", kF32, {2, 6, 5});

  Value Scores() { return g.Transpose(g.Reshape(g.MatMul(k, q), {2, 5, 4, 3}), {0, 2, 1, 3}); }
  std::vector<Partition> Found(Value probs) {
    const Value p = g.Reshape(g.Transpose(probs, {0, 2, 1, 3}), {2, 5, 12});
    g.Output("o", g.MatMul(vt, p));
    return Partitions(std::move(g));
  }
};

TEST(AttentionMatcher, SoftMaxOverTheQueriesOfAHead) {
  JaxMqa jax;
  const Value masked = jax.g.Add(jax.Scores(), jax.g.Input("mask", kF32, {2, 4, 5, 3}));
  const AttentionSpec spec = OnlySpec(jax.Found(jax.g.SoftMax(masked, {.mode = "none"})));
  EXPECT_TRUE(spec.over_queries);
  EXPECT_TRUE(spec.Uses(Feature::kOverQueries));
  EXPECT_EQ(spec.softmax_mode, SoftmaxMode::kNone);
  EXPECT_EQ(spec.batch, (std::array<int64_t, 3>{2, 1, 4}));
  EXPECT_EQ(spec.q_len, 3);
  EXPECT_EQ(spec.kv_len, 5);
  EXPECT_EQ(spec.head_size, 8);
  EXPECT_EQ(spec.v_head_size, 6);
  EXPECT_EQ(Text(spec.q), "1:f32[2,1,4,3,8]s[96,0,3,1,12]");
  EXPECT_EQ(Text(spec.k[0]), "0:f32[2,1,1,5,8]s[40,0,0,8,1]");
  EXPECT_EQ(Text(spec.v[0]), "3:f32[2,1,1,5,6]s[30,0,0,1,5]");
  EXPECT_EQ(Text(spec.steps[0].operand.view), "2:f32[2,1,4,3,5]s[60,0,15,1,3]");
  EXPECT_EQ(Text(spec.output), "0:f32[2,1,4,3,6]s[72,0,3,1,12]");
  EXPECT_THAT(spec.ToString(), ::testing::HasSubstr("softmax over queries with NaN columns"));
}

TEST(AttentionMatcher, SoftMaxOverTheKeysOfTransposedScores) {
  JaxMqa jax;  // the other axis of the same scores
  const AttentionSpec spec = OnlySpec(jax.Found(jax.g.SoftMax(jax.Scores(), {.axis = -2})));
  EXPECT_FALSE(spec.over_queries);
  EXPECT_EQ(spec.batch, (std::array<int64_t, 3>{2, 1, 1}));
  EXPECT_EQ(spec.q_len, 12);
  EXPECT_EQ(spec.kv_len, 5);
}

TEST(AttentionMatcher, SoftMaxOverTheQueriesOfEachKeyHead) {
  // GQA: scores [N, Hkv, S, R * Sq]; K in groups along the head, the mask over queries alone.
  GraphBuilder g;
  const Value k =
      g.DynamicDequantize(g.Input("k", kU4, {2, 3, 5, 8}), g.Input("ks", kF16, {2, 3, 5, 2}),
                          {.group_shape = {1, 1, 1, 4}});
  const Value q = g.Input("q", kF16, {2, 3, 14, 8});
  const Value s = g.Reshape(g.MatMul(k, q, {.transpose_b = true}), {2, 3, 5, 2, 7});
  const Value masked = g.Add(s, g.Input("mask", kF32, {7}));
  const Value probs = g.Reshape(g.SoftMax(masked), {2, 3, 5, 14});
  g.Output("o", g.MatMul(probs, g.Input("v", kF16, {2, 3, 5, 6}), {.transpose_a = true}));
  const AttentionSpec spec = OnlySpec(Partitions(std::move(g)));
  EXPECT_TRUE(spec.over_queries);
  EXPECT_EQ(spec.batch, (std::array<int64_t, 3>{2, 3, 2}));
  EXPECT_EQ(spec.q_len, 7);
  EXPECT_EQ(Text(spec.q), "2:f16[2,3,2,7,8]s[336,112,56,8,1]");
  EXPECT_EQ(Text(spec.k[0]),
            "0:u4[2,3,1,5,8]s[120,40,0,8,1] /[1,1,1,1,4] * 1:f16[2,3,1,5,2]s[30,10,0,2,1]");
  EXPECT_EQ(Text(spec.steps[0].operand.view), "3:f32[1,1,1,7,1]s[0,0,0,1,0]");
  EXPECT_EQ(Text(spec.output), "0:f32[2,3,2,7,6]s[252,84,42,6,1]");
}

TEST(AttentionMatcher, SoftMaxOverHeadsIsNotResolved) {
  GraphBuilder g;  // [B, S, Sq, H]: the last axis is the heads of one query
  const Value s = g.Reshape(g.MatMul(g.Input("k", kF32, {2, 5, 8}), g.Input("q", kF32, {2, 8, 12})),
                            {2, 5, 3, 4});
  const Value probs = g.Reshape(g.SoftMax(s, {.axis = -2}), {2, 5, 12});
  g.Output("o", g.MatMul(g.Input("v", kF32, {2, 6, 5}), probs));
  const std::vector<Partition> result = Partitions(std::move(g));
  ASSERT_EQ(result.size(), 1u) << testing::KindsOf(result);
  EXPECT_EQ(result[0].attention(), nullptr);
  EXPECT_THAT(result[0].notes(),
              ::testing::ElementsAre(::testing::HasSubstr(
                  "axis -2 is not that of the keys, nor of the queries of a head")));
}

TEST(AttentionMatcher, SoftMaxOverAnAxisThatAMaskBroadcastIsNotResolved) {
  GraphBuilder g;  // [1, S, Sq] as [S, 1, Sq], where a mask makes 4 of the axis of 1
  const Value s = g.MatMul(g.Input("k", kF32, {1, 5, 8}), g.Input("q", kF32, {1, 8, 3}));
  const Value masked = g.Add(g.Transpose(s, {1, 0, 2}), g.Input("mask", kF32, {5, 4, 3}));
  const Value probs = g.Transpose(g.SoftMax(masked, {.axis = 1}), {1, 0, 2});
  g.Output("o", g.MatMul(g.Input("v", kF32, {1, 6, 5}), probs));
  const std::vector<Partition> result = Partitions(std::move(g));
  ASSERT_EQ(result.size(), 1u) << testing::KindsOf(result);
  EXPECT_EQ(result[0].attention(), nullptr);
}

TEST(AttentionMatcher, SegmentsOfKeysAndValues) {
  GraphBuilder g;
  const Value q = g.Input("q", kF16, {2, 4, 1, 8});
  const Value old_k =
      g.DynamicDequantize(g.Input("k", kU4, {2, 4, 6, 8}), g.Input("ks", kF16, {2, 4, 6, 2}),
                          {.group_shape = {1, 1, 1, 4}});
  const Value k = g.Concat({old_k, g.Input("k_new", kF16, {2, 4, 3, 8})}, 2);
  // V: codes are concatenated, then dequantized; seen channel-major.
  const Value codes =
      g.Concat({g.Input("v", kS8, {2, 4, 8, 4}), g.Input("v_new", kS8, {2, 4, 8, 5})}, -1);
  const Value v = g.Transpose(
      g.DynamicDequantize(codes, g.Input("vs", kF16, {2, 4, 2, 9}), {.group_shape = {1, 1, 4, 1}}),
      {0, 1, 3, 2});
  g.Output("o", g.MatMul(g.SoftMax(g.MatMul(q, k, {.transpose_b = true})), v));
  const AttentionSpec spec = OnlySpec(Partitions(std::move(g)));
  ASSERT_EQ(spec.k.size(), 2u);
  ASSERT_EQ(spec.v.size(), 2u);
  EXPECT_EQ(Text(spec.k[0]),
            "0:u4[2,4,1,6,8]s[192,48,0,8,1] /[1,1,1,1,4] * 1:f16[2,4,1,6,2]s[48,12,0,2,1]");
  EXPECT_EQ(Text(spec.k[1]), "2:f16[2,4,1,3,8]s[96,24,0,8,1]");
  EXPECT_EQ(Text(spec.v[0]),
            "3:s8[2,4,1,4,8]s[128,32,0,1,4] /[1,1,1,1,4] * 5:f16[2,4,1,4,2]s[72,18,0,1,9]");
  EXPECT_EQ(Text(spec.v[1]),
            "4:s8[2,4,1,5,8]s[160,40,0,1,5] /[1,1,1,1,4] * 5:f16[2,4,1,5,2]s[72,18,0,1,9]+4");
  EXPECT_TRUE(spec.Uses(Feature::kSegments));
}

TEST(AttentionMatcher, SharedDequantizedKeysStayOutside) {
  GraphBuilder g;
  const Value q = g.Input("q", kF16, {2, 4, 3, 8});
  const Value k =
      g.DynamicDequantize(g.Input("k", kS8, {2, 4, 5, 8}), g.Input("ks", kF16, {1}), {});
  g.Output("o", g.MatMul(g.SoftMax(g.MatMul(q, k, {.transpose_b = true})),
                         g.Input("v", kF16, {2, 4, 5, 8})));
  g.Output("t", g.Tanh(k));
  const std::vector<Partition> result = Partitions(std::move(g));
  EXPECT_EQ(testing::KindsOf(result), "DynamicDequantize | MatMul SoftMax MatMul | Tanh");
  ASSERT_NE(result[1].attention(), nullptr);
  EXPECT_EQ(Text(result[1].attention()->k[0]), "1:f16[2,4,1,5,8]s[160,40,0,8,1]");
}

TEST(AttentionMatcher, OneDequantizeForKeysAndValues) {
  GraphBuilder g;
  const Value q = g.Input("q", kF16, {2, 4, 3, 8});
  const Value kv =
      g.DynamicDequantize(g.Input("kv", kS8, {2, 4, 5, 8}), g.Input("s", kF16, {1}), {});
  g.Output("o", g.MatMul(g.SoftMax(g.MatMul(q, kv, {.transpose_b = true})), kv));
  const AttentionSpec spec = OnlySpec(Partitions(std::move(g)));
  EXPECT_EQ(Text(spec.k[0]), Text(spec.v[0]));
}

TEST(AttentionMatcher, StatisticsAndDropout) {
  Plain p;
  const auto [probs, stats] = p.g.SoftMaxWithStats(p.Scores(), {});
  const std::vector<Value> dropped =
      p.g.AddOp(OpKind::kDropout, "dropout",
                {probs, p.g.HostScalar("seed", kS64), p.g.HostScalar("offset", kS64),
                 p.g.HostScalar("p", kF32)},
                {kF32, kU8});
  p.g.Output("stats", stats);
  p.g.Output("mask", dropped[1]);
  p.g.Output("o", p.g.MatMul(dropped[0], p.v));
  const AttentionSpec spec = OnlySpec(Partitions(std::move(p.g)));
  EXPECT_EQ(Text(spec.stats), "0:f32[2,4,1,3,1]s[12,3,0,1,0]");
  ASSERT_TRUE(spec.dropout);
  EXPECT_EQ(Text(spec.dropout->mask), "1:u8[2,4,1,3,5]s[60,15,0,5,1]");
  EXPECT_EQ(spec.dropout->seed.view.type, kS64);
  EXPECT_EQ(spec.dropout->probability.view.type, kF32);
  EXPECT_EQ(spec.output.port, 2);
}

}  // namespace
}  // namespace kvant
