// Hadamard ops around attention, as rotations of Q and of the output.
#include "kvant/tests/patterns/patterns_testing.h"

namespace kvant {
namespace {

using ::testing::ElementsAre;
using testing::Grammar;
using ::testing::IsEmpty;
using testing::KindsOf;
using ::testing::MatchesRegex;
using testing::OnlySpec;
using testing::Partitions;
using testing::Plain;
using testing::Text;

// Heads of 16 channels, K and V of 4 heads for 8 of Q.
struct Grouped {
  GraphBuilder g;
  Value q = g.Input("q", kF32, {2, 4, 2, 3, 16});
  Value k = g.Input("k", kF32, {2, 4, 1, 5, 16});
  Value v = g.Input("v", kF32, {2, 4, 1, 5, 16});

  void Attend(Value queries, Value keys, Value values, int64_t output_block = 0) {
    const Value o = g.MatMul(g.SoftMax(g.MatMul(queries, keys, {.transpose_b = true})), values);
    g.Output("o", output_block == 0 ? o : g.Hadamard(o, output_block));
  }
};

struct Blocks {
  int64_t q = 0, k = 0, v = 0, output = 0;
};

std::vector<Partition> RotatedBy(const Blocks& blocks) {
  Grouped p;
  const auto rotated = [&](Value x, int64_t block) {
    return block == 0 ? x : p.g.Hadamard(x, block);
  };
  p.Attend(rotated(p.q, blocks.q), rotated(p.k, blocks.k), rotated(p.v, blocks.v), blocks.output);
  return Partitions(std::move(p.g));
}

TEST(Rotation, OfEachOperandIsOneOfQueriesOrOutput) {
  const struct {
    Blocks blocks;
    int64_t q, output;
  } cases[] = {
      {{.q = 16}, 16, 0},
      {{.k = 8}, 8, 0},
      {{.v = 4}, 0, 4},
      {{.output = 16}, 0, 16},
      {{.q = 8, .v = 16}, 8, 16},
      {{.q = 8, .k = 8}, 0, 0},
      {{.v = 2, .output = 2}, 0, 0},
      {{.q = 1, .output = 1}, 0, 0},
      {{.q = 1, .k = 4, .v = 1, .output = 8}, 4, 8},
  };
  for (const auto& [blocks, q, output] : cases) {
    const AttentionSpec spec = OnlySpec(RotatedBy(blocks));
    EXPECT_EQ(spec.q_hadamard, q);
    EXPECT_EQ(spec.output_hadamard, output);
    EXPECT_EQ(spec.Uses(Feature::kHadamard), q + output > 0);
    // Ports are in order of use.
    EXPECT_EQ(Text(spec.q).substr(1), ":f32[2,4,2,3,16]s[384,96,48,16,1]");
    EXPECT_EQ(Text(spec.k[0]).substr(1), ":f32[2,4,1,5,16]s[320,80,0,16,1]");
  }
}

TEST(Rotation, IsInTheWords) {
  const std::vector<Partition> result = RotatedBy({.k = 8, .output = 16});
  EXPECT_EQ(result[0].pattern(), "attention: rotated, output chain");
  EXPECT_EQ(OnlySpec(result).ToString(),
            "batch 2, 8 query heads over 4 KV heads, 3 x 5, head size 16; Q f32 rotated in blocks "
            "of 8; K f32; V f32; output f32 rotated in blocks of 16");
}

TEST(Rotation, TwiceIsOnceInOtherBlocksOrNone) {
  Grouped p;
  // 16 and 4 and 16: what is left is 4. All commute.
  const Value q = p.g.Hadamard(p.g.Hadamard(p.g.Hadamard(p.q, 16), 4), 16);
  p.Attend(q, p.k, p.g.Hadamard(p.g.Hadamard(p.v, 8), 8), 2);
  const AttentionSpec spec = OnlySpec(Partitions(std::move(p.g)));
  EXPECT_EQ(spec.q_hadamard, 4);
  EXPECT_EQ(spec.output_hadamard, 2);
}

TEST(Rotation, OfBlocksThatAreNotOneStaysOpByOp) {
  const auto notes = [](const Blocks& blocks) {
    const std::vector<Partition> result = RotatedBy(blocks);
    EXPECT_EQ(result.size(), 1u);
    EXPECT_EQ(result[0].attention(), nullptr);
    return result[0].notes();
  };
  EXPECT_THAT(
      notes({.q = 4, .k = 16}),
      ElementsAre(MatchesRegex("MatMul '.*' \\(id [0-9]+\\): rotations of Q and K in blocks "
                               "of 4 and 16 are not one rotation in blocks")));
  EXPECT_THAT(notes({.v = 8, .output = 2}),
              ElementsAre(MatchesRegex("MatMul '.*' \\(id [0-9]+\\): rotations of V and the output "
                                       "in blocks of 2 and 8 are not one rotation in blocks")));
}

// Codes that were rotated when they were written.
TEST(Rotation, OfDequantizedSegmentsOneByOneOrTogether) {
  for (const bool together : {false, true}) {
    Grouped p;
    const auto old = [&](const char* name) {
      return p.g.DynamicDequantize(p.g.Input(name, kS4, {2, 4, 1, 7, 16}),
                                   p.g.Input(std::string(name) + "_scales", kF32, {2, 4, 1, 7, 2}),
                                   {.group_shape = {1, 1, 1, 1, 8}});
    };
    const auto whole = [&](const char* name, Value recent) {
      if (together) return p.g.Hadamard(p.g.Concat({old(name), recent}, -2), 16);
      return p.g.Concat({p.g.Hadamard(old(name), 16), p.g.Hadamard(recent, 16)}, -2);
    };
    const Value k = whole("old_k", p.k), v = whole("old_v", p.v);
    p.Attend(p.q, k, v);
    const AttentionSpec spec = OnlySpec(Partitions(std::move(p.g)));
    EXPECT_EQ(spec.q_hadamard, 16);
    EXPECT_EQ(spec.output_hadamard, 16);
    ASSERT_EQ(spec.k.size(), 2u);
    EXPECT_EQ(Text(spec.k[0]),
              "0:s4[2,4,1,7,16]s[448,112,0,16,1] /[1,1,1,1,8] * "
              "1:f32[2,4,1,7,2]s[56,14,0,2,1]");
    EXPECT_TRUE(spec.v[0].quantization.has_value());
    EXPECT_FALSE(spec.v[1].quantization.has_value());
  }
}

TEST(Rotation, OfKeysThatAreTheValuesIsOneOfEach) {
  Grouped p;
  const Value kv = p.g.Hadamard(p.k, 8);
  p.Attend(p.q, kv, kv);
  const AttentionSpec spec = OnlySpec(Partitions(std::move(p.g)));
  EXPECT_EQ(spec.q_hadamard, 8);
  EXPECT_EQ(spec.output_hadamard, 8);
}

TEST(Rotation, OfOneSegmentOnlyIsNotExpressible) {
  Grouped p;
  const Value k = p.g.Concat({p.g.Input("old", kF32, {2, 4, 1, 7, 16}), p.g.Hadamard(p.k, 8)}, -2);
  const Value v = p.g.Concat({p.g.Input("old_v", kF32, {2, 4, 1, 7, 16}), p.v}, -2);
  p.Attend(p.q, k, v);
  const std::vector<Partition> result = Partitions(std::move(p.g));
  ASSERT_EQ(result.size(), 1u);
  EXPECT_EQ(result[0].attention(), nullptr);
  EXPECT_THAT(
      result[0].notes(),
      ElementsAre("tensor 1 'k': a segment that is rotated in blocks of 8, where the first is "
                  "not rotated"));
}

// [N, S, H * D]: blocks of 8 are runs of a head, wherever reshapes and transposes put it.
TEST(Rotation, BeforeHeadsAreSplitAndAfterTheyAreMerged) {
  GraphBuilder g;
  const auto split = [&](const char* name, int64_t tokens, int64_t block) {
    Value x = g.Input(name, kF16, {2, tokens, 64});
    if (block > 0) x = g.Hadamard(x, block);
    return g.Transpose(g.Reshape(x, {2, tokens, 4, 16}), {0, 2, 1, 3});
  };
  const Value q = split("q", 3, 8), k = split("k", 5, 0), v = split("v", 5, 16);
  const Value o = g.MatMul(g.SoftMax(g.MatMul(q, k, {.transpose_b = true})), v);
  const Value merged = g.Reshape(g.Transpose(o, {0, 2, 1, 3}), {2, 3, 64});
  g.Output("o", g.TypeCast(g.Hadamard(merged, 16), kF32));
  const AttentionSpec spec = OnlySpec(Partitions(std::move(g)));
  EXPECT_EQ(spec.q_hadamard, 8);
  EXPECT_EQ(spec.output_hadamard, 0);
  EXPECT_EQ(Text(spec.q), "0:f16[2,4,1,3,16]s[192,16,0,64,1]");
  EXPECT_EQ(Text(spec.output), "0:f32[2,4,1,3,16]s[192,16,0,64,1]");
}

// A note that the only partition keeps instead of a spec.
template <typename BuildGraph>
void ExpectNote(const std::string& note, BuildGraph build) {
  GraphBuilder g;
  build(g);
  const std::vector<Partition> result = Partitions(std::move(g));
  ASSERT_EQ(result.size(), 1u) << KindsOf(result);
  EXPECT_EQ(result[0].attention(), nullptr);
  EXPECT_THAT(result[0].notes(), ElementsAre(MatchesRegex(note)));
}

TEST(Rotation, AcrossHeadsIsNotExpressible) {
  const std::string note =
      "Hadamard '.*' \\(id [0-9]+\\): its blocks of 32 are no runs of the 16 channels of a head";
  ExpectNote(note, [](GraphBuilder& g) {
    const Value x = g.Hadamard(g.Input("q", kF32, {2, 3, 64}), 32);
    const Value q = g.Transpose(g.Reshape(x, {2, 3, 4, 16}), {0, 2, 1, 3});
    g.Output(
        "o",
        g.MatMul(g.SoftMax(g.MatMul(q, g.Input("k", kF32, {2, 4, 5, 16}), {.transpose_b = true})),
                 g.Input("v", kF32, {2, 4, 5, 16})));
  });
  ExpectNote(note, [](GraphBuilder& g) {
    const Value o =
        g.MatMul(g.SoftMax(g.MatMul(g.Input("q", kF32, {2, 4, 3, 16}),
                                    g.Input("k", kF32, {2, 4, 5, 16}), {.transpose_b = true})),
                 g.Input("v", kF32, {2, 4, 5, 16}));
    g.Output("o", g.Hadamard(g.Reshape(g.Transpose(o, {0, 2, 1, 3}), {2, 3, 64}), 32));
  });
}

// Heads of 24 that begin within a block of 16: blocks of 8 would do.
TEST(Rotation, OfBlocksThatHeadsCutIsNotExpressible) {
  ExpectNote(
      "Hadamard '.*' \\(id [0-9]+\\): its blocks of 16 are no runs of the 24 channels of a "
      "head",
      [](GraphBuilder& g) {
        const Value x = g.Hadamard(g.Input("q", kF32, {2, 3, 48}), 16);
        const Value q = g.Transpose(g.Reshape(x, {2, 3, 2, 24}), {0, 2, 1, 3});
        g.Output("o", g.MatMul(g.SoftMax(g.MatMul(q, g.Input("k", kF32, {2, 2, 5, 24}),
                                                  {.transpose_b = true})),
                               g.Input("v", kF32, {2, 2, 5, 24})));
      });
}

TEST(Rotation, OfTokensIsNotExpressible) {
  const std::string note =
      "Hadamard '.*' \\(id [0-9]+\\): its blocks of 8 are no runs of the 16 "
      "channels of a head";
  // K as [D, S], and V rotated as [Dv, S] before it is transposed.
  ExpectNote(note, [](GraphBuilder& g) {
    const Value k = g.Hadamard(g.Input("k", kF32, {2, 4, 16, 8}), 8);
    g.Output("o", g.MatMul(g.SoftMax(g.MatMul(g.Input("q", kF32, {2, 4, 3, 16}), k)),
                           g.Input("v", kF32, {2, 4, 8, 16})));
  });
  ExpectNote(note, [](GraphBuilder& g) {
    const Value v = g.Transpose(g.Hadamard(g.Input("v", kF32, {2, 4, 16, 8}), 8), {0, 1, 3, 2});
    g.Output("o",
             g.MatMul(g.SoftMax(g.MatMul(g.Input("q", kF32, {2, 4, 3, 16}),
                                         g.Input("k", kF32, {2, 4, 8, 16}), {.transpose_b = true})),
                      v));
  });
  // O^T = V^T P^T: the last axis of its output is the queries'.
  ExpectNote(note, [](GraphBuilder& g) {
    const Value probs =
        g.SoftMax(g.MatMul(g.Input("q", kF32, {2, 4, 8, 16}), g.Input("k", kF32, {2, 4, 5, 16}),
                           {.transpose_b = true}));
    const Value o = g.MatMul(g.Input("v", kF32, {2, 4, 5, 16}), probs,
                             {.transpose_a = true, .transpose_b = true});
    g.Output("o", g.Hadamard(o, 8));
  });
}

// Channels in another order than when they were rotated.
TEST(Rotation, OfPermutedChannelsIsNotExpressible) {
  ExpectNote(
      "Hadamard '.*' \\(id [0-9]+\\): its blocks of 16 are no runs of the 16 channels of a "
      "head",
      [](GraphBuilder& g) {
        // In memory they are side by side as they are used.
        const Value q = g.Input("q", kF32, {2, 4, 3, 2, 8}, Dims{192, 48, 16, 1, 2});
        const Value x = g.Hadamard(g.Reshape(q, {2, 4, 3, 16}), 16);
        const Value permuted = g.Transpose(g.Reshape(x, {2, 4, 3, 2, 8}), {0, 1, 2, 4, 3});
        g.Output("o", g.MatMul(g.SoftMax(g.MatMul(g.Reshape(permuted, {2, 4, 3, 16}),
                                                  g.Input("k", kF32, {2, 4, 5, 16}),
                                                  {.transpose_b = true})),
                               g.Input("v", kF32, {2, 4, 5, 16})));
      });
}

TEST(Rotation, UsedElsewhereStaysOutside) {
  Grouped p;
  const Value k = p.g.Hadamard(p.k, 16);
  p.g.Output("t", p.g.Tanh(k));
  p.Attend(p.g.Hadamard(p.q, 16), k, p.v);
  const std::vector<Partition> result = Partitions(std::move(p.g));
  EXPECT_EQ(KindsOf(result), "Hadamard | Tanh | Hadamard MatMul SoftMax MatMul");
  ASSERT_NE(result[2].attention(), nullptr);
  EXPECT_EQ(result[2].attention()->q_hadamard, 16);
}

// Scores and probabilities have no channels: what rotates them is no part of attention.
TEST(Rotation, OfScoresOrProbabilitiesIsAMiss) {
  GraphBuilder g;
  const Value s = g.MatMul(g.Input("q", kF32, {2, 4, 3, 16}), g.Input("k", kF32, {2, 4, 8, 16}),
                           {.transpose_b = true});
  g.Output("o", g.MatMul(g.SoftMax(g.Hadamard(s, 8)), g.Input("v", kF32, {2, 4, 8, 16})));
  const std::vector<Partition> result = Partitions(std::move(g));
  EXPECT_EQ(KindsOf(result), "MatMul | Hadamard | SoftMax | MatMul");
  ASSERT_EQ(MissesOf(result).size(), 1u);
  EXPECT_THAT(
      MissesOf(result)[0],
      MatchesRegex("SoftMax .* is not fused: Hadamard .* is not a step that scores can take"));
}

// K or V, rotated when they are written.
TEST(Rotation, GoesWithAppendPages) {
  GraphBuilder g;
  const Value x = g.Hadamard(g.Input("x", kF16, {5, 2, 32}), 32);
  g.Output("pool", g.AppendPages(x, g.Input("slots", kS64, {5}), {4, 16}, {.type = kBF16}).codes);
  EXPECT_EQ(KindsOf(Partitions(std::move(g))), "Hadamard AppendPages");
}

TEST(Rotation, GoesWithTheOpThatStoresItsResult) {
  for (const bool append : {false, true}) {
    GraphBuilder g;
    const Value x = g.Hadamard(g.Input("x", kF16, {1, 2, 5, 32}), 32);
    const GraphBuilder::QuantizeOptions options{.group_shape = {1, 1, 1, 32}, .type = kS8};
    const GraphBuilder::Quantized stored =
        append ? g.Append(x, g.Input("at", kS32, {1}), 64, options) : g.DynamicQuantize(x, options);
    g.Output("codes", stored.codes);
    g.Output("scales", stored.scales);
    EXPECT_EQ(KindsOf(Partitions(std::move(g))),
              append ? "Hadamard Append" : "Hadamard DynamicQuantize");
  }
}

TEST(Rotation, OfScalesStaysAlone) {
  GraphBuilder g;
  const Value scales = g.Hadamard(g.Input("s", kF32, {4, 2}), 2);
  g.Output("codes", g.DynamicQuantize(g.Input("x", kF16, {4, 32}), scales, std::nullopt,
                                      {.group_shape = {1, 16}, .type = kS8}));
  EXPECT_EQ(KindsOf(Partitions(std::move(g))), "Hadamard | DynamicQuantize");
}

TEST(Rotation, IsResolvedAgainForOtherLengths) {
  Grouped p;
  p.Attend(p.g.Hadamard(p.q, 16), p.k, p.v, 8);
  const std::vector<Partition> result = Partitions(std::move(p.g));
  const LogicalTensor longer{
      .id = result[0].inputs()[1], .type = kF32, .dims = Dims{2, 4, 1, 9, 16}};
  LogicalTensor values = longer;
  values.id = result[0].inputs()[2];
  const auto other = result[0].WithPorts({longer, values});
  ASSERT_TRUE(other.ok()) << other.status();
  ASSERT_NE(other->attention(), nullptr);
  EXPECT_EQ(other->attention()->kv_len, 9);
  EXPECT_EQ(other->attention()->q_hadamard, 16);
  EXPECT_EQ(other->attention()->output_hadamard, 8);
}

TEST(Rotation, IsNotInOneDnnsGrammar) {
  Grouped p;
  p.Attend(p.g.Hadamard(p.q, 16), p.k, p.g.Hadamard(p.v, 16), 16);
  const std::vector<Partition> result = Partitions(std::move(p.g), Grammar::kOneDnn);
  EXPECT_EQ(KindsOf(result), "Hadamard | Hadamard | MatMul SoftMax MatMul | Hadamard");
  ASSERT_EQ(MissesOf(result).size(), 1u);
  EXPECT_THAT(MissesOf(result)[0],
              MatchesRegex("SoftMax .* is fused without Hadamard .*, Hadamard .*, Hadamard .*, "
                           "which oneDNN does not fuse with it"));
}

}  // namespace
}  // namespace kvant
