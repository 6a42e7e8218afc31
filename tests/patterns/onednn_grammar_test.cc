// The partitions that oneDNN Graph makes of variations, as observed by running it.
#include "kvant/tests/patterns/patterns_testing.h"

namespace kvant {
namespace {

using testing::Grammar;
using testing::KindsOf;
using testing::Partitions;
using testing::Plain;

struct Compressed : Plain {
  Value ck = g.DynamicDequantize(g.Input("ck", kU4, {2, 4, 5, 8}),
                                 g.Input("ks", kF32, {2, 4, 5, 2}), {.group_shape = {1, 1, 1, 4}});
  Value cv = g.DynamicDequantize(g.Input("cv", kU4, {2, 4, 5, 6}),
                                 g.Input("vs", kF32, {2, 4, 5, 1}), {.group_shape = {1, 1, 1, 6}});
  Value CompressedScores() {
    return g.Add(g.Divide(g.MatMul(q, ck, {.transpose_b = true}), scale), mask);
  }
};

// The native grammar makes one partition of all of them.
template <typename Case>
void Expect(const std::string& onednn, void (*build)(Case&)) {
  Case a, b;
  build(a);
  build(b);
  EXPECT_EQ(KindsOf(Partitions(std::move(a.g), Grammar::kOneDnn)), onednn);
  const std::vector<Partition> native = Partitions(std::move(b.g));
  EXPECT_EQ(native.size(), 1u) << KindsOf(native);
}

TEST(OneDnnGrammar, MaskBeforeScale) {
  Expect<Plain>(
      "MatMul Add Divide | SoftMax | MatMul", +[](Plain& p) {
        const Value s = p.g.Divide(p.g.Add(p.Scores(), p.mask), p.scale);
        p.g.Output("o", p.g.MatMul(p.g.SoftMax(s), p.v));
      });
}

TEST(OneDnnGrammar, DivideWithScoresAtInputOne) {
  Plain p;
  const Value s = p.g.Add(p.g.Divide(p.scale, p.Scores()), p.mask);
  p.g.Output("o", p.g.MatMul(p.g.SoftMax(s), p.v));
  EXPECT_EQ(KindsOf(Partitions(std::move(p.g), Grammar::kOneDnn)),
            "MatMul | Divide Add | SoftMax | MatMul");
}

TEST(OneDnnGrammar, PlainFormsAreOnePartition) {
  Expect<Plain>(
      "MatMul SoftMax MatMul",
      +[](Plain& p) { p.g.Output("o", p.g.MatMul(p.g.SoftMax(p.Scores()), p.v)); });
  Expect<Plain>(
      "MatMul Divide Add SoftMax TypeCast MatMul", +[](Plain& p) {
        const Value s = p.g.Add(p.g.Divide(p.Scores(), p.scale), p.mask);
        p.g.Output("o", p.g.MatMul(p.g.TypeCast(p.g.SoftMax(s), kBF16),
                                   p.g.Input("v16", kBF16, {2, 4, 5, 6})));
      });
  Expect<Plain>(
      "MatMul Multiply GenIndex GenIndex GreaterEqual Select Add SoftMax MatMul", +[](Plain& p) {
        const Value s = p.g.CausalMask(p.g.Multiply(p.Scores(), p.scale), p.scale);
        p.g.Output("o", p.g.MatMul(p.g.SoftMax(p.g.Add(s, p.mask)), p.v));
      });
  Expect<Plain>(
      "MatMul Select Divide Add SoftMax MatMul", +[](Plain& p) {
        Value s = p.g.Select(p.g.Input("c", kBoolean, {2, 1, 3, 5}), p.Scores(), p.scale);
        s = p.g.Add(p.g.Divide(s, p.scale), p.mask);
        p.g.Output("o", p.g.MatMul(p.g.SoftMax(s), p.v));
      });
  Expect<Plain>(
      "MatMul Divide Tanh Multiply Select SoftMax MatMul", +[](Plain& p) {
        Value s = p.g.Multiply(p.g.Tanh(p.g.Divide(p.Scores(), p.scale)), p.scale);
        s = p.g.Select(p.g.Input("c", kBoolean, {2, 1, 3, 5}), s, p.scale);
        p.g.Output("o", p.g.MatMul(p.g.SoftMax(s), p.v));
      });
}

TEST(OneDnnGrammar, CompressedIsOnePartition) {
  Expect<Compressed>(
      "DynamicDequantize DynamicDequantize MatMul Divide Add SoftMax MatMul",
      +[](Compressed& p) { p.g.Output("o", p.g.MatMul(p.g.SoftMax(p.CompressedScores()), p.cv)); });
}

TEST(OneDnnGrammar, CompressedWithTrailingTransposeAndReorder) {
  Expect<Compressed>(
      "DynamicDequantize DynamicDequantize MatMul Divide Add SoftMax MatMul | StaticTranspose | "
      "Reorder",
      +[](Compressed& p) {
        const Value o = p.g.MatMul(p.g.SoftMax(p.CompressedScores()), p.cv);
        p.g.Output("o", p.g.Reorder(p.g.Transpose(o, {0, 2, 1, 3})));
      });
}

TEST(OneDnnGrammar, CompressedWithSoftCap) {
  Expect<Compressed>(
      "DynamicDequantize | DynamicDequantize | MatMul Divide Tanh Multiply SoftMax MatMul",
      +[](Compressed& p) {
        const Value s = p.g.Divide(p.g.MatMul(p.q, p.ck, {.transpose_b = true}), p.scale);
        p.g.Output("o", p.g.MatMul(p.g.SoftMax(p.g.Multiply(p.g.Tanh(s), p.scale)), p.cv));
      });
}

TEST(OneDnnGrammar, CompressedWithDropout) {
  Expect<Compressed>(
      "DynamicDequantize | DynamicDequantize | MatMul Divide Add SoftMax Dropout MatMul",
      +[](Compressed& p) {
        const Value probs = p.g.SoftMax(p.CompressedScores());
        const Value dropped = p.g.AddOp(OpKind::kDropout, "dropout",
                                        {probs, p.g.HostScalar("seed", kS64),
                                         p.g.HostScalar("offset", kS64), p.g.HostScalar("p", kF32)},
                                        {kF32})[0];
        p.g.Output("o", p.g.MatMul(dropped, p.cv));
      });
}

TEST(OneDnnGrammar, CompressedGroupedHeadsByReshapeAreSevenPartitions) {
  GraphBuilder g;
  const Value q = g.Reshape(g.Input("q", kF32, {2, 4, 3, 8}), {2, 2, 2, 3, 8});
  const auto kv = [&g](std::string_view name) {
    const Value codes = g.Input(name, kU4, {2, 2, 5, 8});
    return g.Reshape(g.DynamicDequantize(codes, g.Input(std::string(name) + "_s", kF32, {1}), {}),
                     {2, 2, 1, 5, 8});
  };
  const Value s = g.Divide(g.MatMul(q, kv("k"), {.transpose_b = true}), g.Input("d", kF32, {1}));
  g.Output("o", g.Reshape(g.MatMul(g.SoftMax(s), kv("v")), {2, 4, 3, 8}));
  const std::vector<Partition> result = Partitions(std::move(g), Grammar::kOneDnn);
  EXPECT_EQ(result.size(), 7u) << KindsOf(result);
}

TEST(OneDnnGrammar, TrailingTypeCastAndResidualAdd) {
  Expect<Plain>(
      "MatMul SoftMax MatMul | TypeCast", +[](Plain& p) {
        p.g.Output("o", p.g.TypeCast(p.g.MatMul(p.g.SoftMax(p.Scores()), p.v), kBF16));
      });
  Plain p;
  const Value o = p.g.MatMul(p.g.SoftMax(p.Scores()), p.v);
  p.g.Output("o", p.g.Add(o, p.g.Input("residual", kF32, {2, 4, 3, 6})));
  const std::vector<Partition> result = Partitions(std::move(p.g), Grammar::kOneDnn);
  EXPECT_EQ(KindsOf(result), "MatMul SoftMax MatMul | Add");
}

TEST(OneDnnGrammar, SaysWhatItLeavesOut) {
  Plain p;
  const Value o = p.g.MatMul(p.g.SoftMax(p.Scores()), p.v);
  p.g.Output("o", p.g.TypeCast(o, kBF16));
  const std::vector<Partition> result = Partitions(std::move(p.g), Grammar::kOneDnn);
  ASSERT_EQ(MissesOf(result).size(), 1u);
  EXPECT_THAT(MissesOf(result)[0],
              ::testing::MatchesRegex("SoftMax .* is fused without TypeCast '.*' \\(id [0-9]+\\), "
                                      "which oneDNN does not fuse with it"));
}

}  // namespace
}  // namespace kvant
