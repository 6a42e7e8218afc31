// Specs of the first-class op.
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

TEST(FirstClassOp, GivesTheSameViews) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {2, 6, 3, 8}), k = g.Input("k", kU4, {2, 2, 4, 8});
  const Value v = g.Input("v", kF32, {2, 2, 4, 6});
  GraphBuilder::AttentionOptions options;
  options.soft_cap = 30.f;
  options.bottom_right = true;
  options.right_window = 0;
  options.left_window = 7;
  const Value keys = g.DynamicDequantize(k, g.Input("ks", kF16, {2, 2, 4, 2}),
                                         {.group_shape = {1, 1, 1, 4}, .type = kF32});
  options.bias = g.Input("bias", kF32, {1, 6, 3, 4});
  options.kv_lengths = g.Input("lengths", kS32, {2});
  options.sinks = g.Input("sinks", kF32, {6});
  options.alibi_slopes = g.Input("slopes", kF32, {6});
  g.Output("o", g.ScaledDotProductAttention(q, keys, v, options).first);
  const AttentionSpec spec = OnlySpec(Partitions(std::move(g)));
  EXPECT_EQ(spec.batch, (std::array<int64_t, 3>{2, 2, 3}));
  EXPECT_EQ(Text(spec.q), "2:f32[2,2,3,3,8]s[144,72,24,8,1]");
  EXPECT_EQ(Text(spec.k[0]),
            "0:u4[2,2,1,4,8]s[64,32,0,8,1] /[1,1,1,1,4] * 1:f16[2,2,1,4,2]s[16,8,0,2,1]");
  EXPECT_EQ(Text(spec.v[0]), "3:f32[2,2,1,4,6]s[48,24,0,6,1]");
  EXPECT_EQ(KindsOf(spec),
            (std::vector<Kind>{Kind::kMultiply, Kind::kDivide, Kind::kTanh, Kind::kMultiply,
                               Kind::kAlibi, Kind::kAdd, Kind::kBand}));
  EXPECT_EQ(spec.steps[0].operand.constant, 1 / std::sqrt(8.f));
  EXPECT_EQ(spec.steps[5].operand.view.dims, (std::array<int64_t, 5>{1, 2, 3, 3, 4}));
  EXPECT_EQ(spec.steps[6].left, 7);
  EXPECT_EQ(spec.steps[6].alignment, Alignment::kBottomRight);
  EXPECT_EQ(spec.sinks.dims, (std::array<int64_t, 5>{1, 2, 3, 1, 1}));
  EXPECT_EQ(spec.sinks.strides, (std::array<int64_t, 5>{0, 3, 1, 0, 0}));
  EXPECT_EQ(spec.kv_lengths.strides[0], 1);
}

// A load whose rows stand for several tokens zeroes others than lengths hide.
TEST(FirstClassOp, KeysAndValuesAreLoadedTokenByToken) {
  for (const bool keys : {true, false}) {
    GraphBuilder g;
    const Value lengths = g.Input("lengths", kS32, {2});
    const auto load = [&](const char* name, int64_t group) {
      return g.LoadTokens(g.Input(name, kF32, {2, 2, 8, 4}), lengths, {}, {.token_group = group});
    };
    const Value q = g.Input("q", kF32, {2, 2, 1, 4});
    const Value k = load("k", keys ? 4 : 1), v = load("v", keys ? 1 : 4);
    g.Output("o", g.ScaledDotProductAttention(q, k, v, {.kv_lengths = lengths}).first);
    const std::vector<Partition> parts = Partitions(std::move(g));
    ASSERT_EQ(parts.size(), 1);
    EXPECT_EQ(parts[0].attention(), nullptr);
    EXPECT_THAT(absl::StrJoin(parts[0].notes(), "; "),
                ::testing::HasSubstr("keys or values of which a row stands for 4 tokens"));
  }
}

TEST(FirstClassOp, PagesOfNoSequences) {
  GraphBuilder g;
  const Value lengths = g.Input("lengths", kS32, {0}), table = g.Input("table", kS32, {0, 2});
  const auto load = [&](const char* name) {
    return g.LoadPages(g.Input(name, kF16, {3, 2, 16, 64}), table, lengths);
  };
  const Value k = load("k"), v = load("v"), q = g.Input("q", kF16, {4, 2, 64});
  const Value offsets = g.Input("offsets", kS32, {1});
  g.Output("o",
           g.ScaledDotProductAttention(q, k, v, {.kv_lengths = lengths, .query_offsets = offsets})
               .first);
  EXPECT_EQ(OnlySpec(Partitions(std::move(g))).batch[0], 0);
}

TEST(FirstClassOp, TakesWhatConvertsAndRotatesBesideIt) {
  GraphBuilder g;
  const auto rotated = [&](const char* name, int64_t block) {
    return g.Hadamard(g.TypeCast(g.Input(name, kF16, {2, 4, 8, 32}), kF32), block);
  };
  const Value q = rotated("q", 16), k = rotated("k", 16), v = rotated("v", 1);
  const Value out = g.ScaledDotProductAttention(q, k, v, {}).first;
  g.Output("o", g.TypeCast(g.Hadamard(out, 32), kBF16));
  const AttentionSpec spec = OnlySpec(Partitions(std::move(g)));
  EXPECT_EQ(spec.q.type, kF16);
  EXPECT_EQ(spec.output.type, kBF16);
  EXPECT_EQ(spec.q_hadamard, 0) << "Q and K are rotated alike";
  EXPECT_EQ(spec.output_hadamard, 32);
}

TEST(FirstClassOp, LeavesWhatMovesItsOutput) {
  Plain p;
  const Value o = p.g.ScaledDotProductAttention(p.q, p.k, p.v, {}).first;
  p.g.Output("o", p.g.Transpose(o, {0, 2, 1, 3}));
  EXPECT_EQ(KindsOf(Partitions(std::move(p.g))), "ScaledDotProductAttention | StaticTranspose");
}

}  // namespace
}  // namespace kvant
