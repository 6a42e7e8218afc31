// What is not fused, and the sentence that says why.
#include <vector>

#include "kvant/tests/patterns/patterns_testing.h"

namespace kvant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::KindsOf;
using testing::OnlySpec;
using testing::Partitions;
using testing::Plain;

TEST(NearMiss, ProbabilitiesUsedElsewhere) {
  Plain p;
  const Value probs = p.g.SoftMax(p.Scores());
  p.g.Output("o", p.g.MatMul(probs, p.v));
  p.g.Output("entropy", p.g.AddOp(OpKind::kReduceSum, "entropy", {probs}, {kF32},
                                  {{Attr::kAxes, std::vector<int64_t>{-1}}})[0]);
  const std::vector<Partition> result = Partitions(std::move(p.g));
  EXPECT_EQ(KindsOf(result), "MatMul | SoftMax | MatMul | ReduceSum");
  ASSERT_EQ(MissesOf(result).size(), 1u);
  EXPECT_THAT(MissesOf(result)[0],
              ::testing::MatchesRegex("SoftMax '.*' \\(id [0-9]+\\) is not fused: its output is "
                                      "also consumed by ReduceSum 'entropy' \\(id [0-9]+\\)"));
}

// The graph of `build` misses with a sentence that ends like this.
template <typename BuildGraph>
void ExpectMiss(const std::string& kinds, const std::string& reason, BuildGraph build) {
  Plain p;
  build(p);
  const std::vector<Partition> result = Partitions(std::move(p.g));
  EXPECT_EQ(KindsOf(result), kinds);
  ASSERT_EQ(MissesOf(result).size(), 1u);
  EXPECT_THAT(MissesOf(result)[0],
              ::testing::MatchesRegex("SoftMax '.*' \\(id [0-9]+\\) is not fused: " + reason));
}

TEST(NearMiss, ScoresUsedElsewhere) {
  ExpectMiss("MatMul | SoftMax | MatMul | Tanh",
             "the output of MatMul '.*' \\(id [0-9]+\\) is also consumed by Tanh '.*'.*",
             [](Plain& p) {
               const Value s = p.Scores();
               p.g.Output("o", p.g.MatMul(p.g.SoftMax(s), p.v));
               p.g.Output("t", p.g.Tanh(s));
             });
}

TEST(NearMiss, ScoresAreAnOutput) {
  ExpectMiss("MatMul | SoftMax | MatMul", "the output of MatMul .* is also consumed by End .*",
             [](Plain& p) {
               const Value s = p.Scores();
               p.g.Output("s", s);
               p.g.Output("o", p.g.MatMul(p.g.SoftMax(s), p.v));
             });
}

TEST(NearMiss, ScoresThatBecomeIntegers) {
  ExpectMiss("MatMul Add | Multiply | SoftMax | MatMul",
             "Add 'rounded' \\(id [0-9]+\\) rounds the scores to integers", [](Plain& p) {
               const Value s = p.g.AddOp(OpKind::kAdd, "rounded", {p.Scores(), p.mask}, {kS32})[0];
               p.g.Output("o", p.g.MatMul(p.g.SoftMax(p.g.Multiply(s, p.scale)), p.v));
             });
}

// Row + 0.5 >= column is no diagonal with a whole shift: the condition is made outside. A sum that
// is rounded to s32, the type of coordinates, makes no diagonal either.
TEST(NearMiss, DiagonalsShiftedByFractions) {
  for (const OpKind kind : {OpKind::kAdd, OpKind::kSubtract}) {
    for (const DataType sum : {kF32, kS32}) {
      for (const DataType type : {kF32, kBF16}) {
        Plain p;
        const Value s = p.Scores(), shift = p.g.Input("shift", type, {1});
        const auto shifted = [&](int axis, Value by) {
          return p.g.AddOp(kind, absl::StrCat("shifted", axis), {p.g.GenIndex(s, axis), by},
                           {sum})[0];
        };
        const Value columns = sum == kS32 ? p.g.GenIndex(s, 3) : shifted(3, shift);
        const Value seen = p.g.GreaterEqual(shifted(2, shift), columns);
        const Value masked = p.g.Select(seen, s, p.scale);
        p.g.Output("o", p.g.MatMul(p.g.SoftMax(masked), p.v));
        EXPECT_THAT(MissesOf(Partitions(std::move(p.g))),
                    ElementsAre(::testing::ContainsRegex(
                        "also consumed by GenIndex .*, which makes no mask")));
      }
    }
  }
}

TEST(NearMiss, DivisionByTheScores) {
  ExpectMiss("MatMul | Divide Add | SoftMax | MatMul", "Divide .* divides by the scores",
             [](Plain& p) {
               const Value s = p.g.Add(p.g.Divide(p.scale, p.Scores()), p.mask);
               p.g.Output("o", p.g.MatMul(p.g.SoftMax(s), p.v));
             });
}

TEST(NearMiss, NoQueryProduct) {
  ExpectMiss("SoftMax | MatMul", "its scores come from tensor [0-9]+ 's', not from a MatMul",
             [](Plain& p) {
               p.g.Output("o", p.g.MatMul(p.g.SoftMax(p.g.Input("s", kF32, {2, 4, 3, 5})), p.v));
             });
}

TEST(NearMiss, AnotherStepOnTheScores) {
  ExpectMiss("MatMul ReLU | SoftMax | MatMul", "ReLU .* is not a step that scores can take",
             [](Plain& p) {
               const Value s = p.g.AddOp(OpKind::kReLU, "relu", {p.Scores()}, {kF32})[0];
               p.g.Output("o", p.g.MatMul(p.g.SoftMax(s), p.v));
             });
}

TEST(NearMiss, SoftMaxOverAnotherAxis) {
  ExpectMiss(
      "MatMul | SoftMax | MatMul", "its axis 1 is not one of the last two of rank 4",
      [](Plain& p) { p.g.Output("o", p.g.MatMul(p.g.SoftMax(p.Scores(), {.axis = 1}), p.v)); });
}

TEST(NearMiss, SoftMaxOverTheQueries) {
  ExpectMiss(
      "MatMul | SoftMax | MatMul", "it normalises over another axis than MatMul .* sums over",
      [](Plain& p) { p.g.Output("o", p.g.MatMul(p.g.SoftMax(p.Scores(), {.axis = 2}), p.v)); });
}

TEST(NearMiss, ScoresMultipliedByThemselves) {
  ExpectMiss("MatMul | Multiply | SoftMax | MatMul", "the output of MatMul .* is used twice in it",
             [](Plain& p) {
               const Value s = p.Scores();
               p.g.Output("o", p.g.MatMul(p.g.SoftMax(p.g.Multiply(s, s)), p.v));
             });
}

TEST(NearMiss, StatisticsThatFeedTheValuesAreACycle) {
  Plain p;
  const auto [probs, stats] = p.g.SoftMaxWithStats(p.g.MatMul(p.q, p.k, {.transpose_b = true}), {});
  const Value v =
      p.g.Add(p.g.AddOp(OpKind::kReduceSum, "sum", {stats}, {kF32},
                        {{Attr::kAxes, std::vector<int64_t>{2}}, {Attr::kKeepDims, true}})[0],
              p.v);
  p.g.Output("o", p.g.MatMul(probs, v));
  const std::vector<Partition> result = Partitions(std::move(p.g));
  EXPECT_EQ(KindsOf(result), "MatMul | SoftMax | ReduceSum | Add | MatMul");
  ASSERT_EQ(MissesOf(result).size(), 1u);
  EXPECT_THAT(MissesOf(result)[0],
              ::testing::HasSubstr("other ops depend on the group and it depends on them"));
}

TEST(NearMiss, ConcatAlongHeadsKeepsANote) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {2, 4, 3, 8});
  const Value k = g.Concat({g.Input("a", kF32, {2, 2, 5, 8}), g.Input("b", kF32, {2, 2, 5, 8})}, 1);
  g.Output("o", g.MatMul(g.SoftMax(g.MatMul(q, k, {.transpose_b = true})),
                         g.Input("v", kF32, {2, 4, 5, 8})));
  const std::vector<Partition> result = Partitions(std::move(g));
  ASSERT_EQ(result.size(), 1u);
  EXPECT_EQ(result[0].kind(), Partition::Kind::kAttention);
  EXPECT_EQ(result[0].attention(), nullptr);
  EXPECT_THAT(
      result[0].notes(),
      ElementsAre("tensor 1 'a': loaded or concatenated along axis 1, which is not that of the "
                  "tokens"));
}

// Of a Quantize or Dequantize.
struct Rounding {
  float scale = 0.5f;
  int64_t zero_point = 0;
  std::string type = "per_tensor";
};

Attributes AttributesOf(const Rounding& r) {
  const size_t n = r.type == "per_tensor" ? 1 : 5;
  Attributes attrs = {{Attr::kQType, r.type},
                      {Attr::kScales, std::vector<float>(n, r.scale)},
                      {Attr::kZps, std::vector<int64_t>(n, r.zero_point)}};
  if (n > 1) attrs.Set(Attr::kAxis, int64_t{3});
  return attrs;
}

Value Quantize(Plain& p, Value x, const Rounding& r) {
  return p.g.AddOp(OpKind::kQuantize, "quantize", {x}, {kU8}, AttributesOf(r))[0];
}

Value Round(Plain& p, Value x, const Rounding& to, const Rounding& from) {
  return p.g.AddOp(OpKind::kDequantize, "dequantize", {Quantize(p, x, to)}, {kF32},
                   AttributesOf(from))[0];
}

Value Drop(Plain& p, Value x) {
  return p.g.AddOp(
      OpKind::kDropout, "dropout",
      {x, p.g.HostScalar("seed", kS64), p.g.HostScalar("offset", kS64), p.g.HostScalar("p", kF32)},
      {kF32})[0];
}

TEST(NearMiss, ProbabilitiesRoundedOtherwiseThanOnceAfterDropout) {
  const Rounding same;
  {
    Plain p;
    p.g.Output("o", p.g.MatMul(Round(p, Drop(p, p.g.SoftMax(p.Scores())), same, same), p.v));
    EXPECT_TRUE(OnlySpec(Partitions(std::move(p.g))).probs_quantization);
  }
  const std::string chain = "MatMul | SoftMax | Quantize | Dequantize | MatMul";
  const std::string differs =
      "Quantize .* and Dequantize .* do not have the same scale and zero point per tensor";
  for (const auto& [to, from] : {std::pair(same, Rounding{.scale = 0.25f}),
                                 {same, {.zero_point = 1}},
                                 {same, {.type = "per_channel"}},
                                 {{.type = "per_channel"}, same}}) {
    ExpectMiss(chain, differs, [&, to = to, from = from](Plain& p) {
      p.g.Output("o", p.g.MatMul(Round(p, p.g.SoftMax(p.Scores()), to, from), p.v));
    });
  }
  ExpectMiss("MatMul | SoftMax | Quantize | Dequantize | Quantize | Dequantize | MatMul",
             "Quantize .* is a second quantization", [&](Plain& p) {
               const Value once = Round(p, p.g.SoftMax(p.Scores()), same, same);
               p.g.Output("o", p.g.MatMul(Round(p, once, same, same), p.v));
             });
  ExpectMiss("MatMul | SoftMax | Quantize | Dequantize | Dropout | MatMul",
             "Dropout .* follows a Quantize", [&](Plain& p) {
               p.g.Output("o",
                          p.g.MatMul(Drop(p, Round(p, p.g.SoftMax(p.Scores()), same, same)), p.v));
             });
  ExpectMiss(
      "MatMul | SoftMax | Dropout | Dropout | MatMul", "Dropout .* is a second dropout",
      [&](Plain& p) {
        const Value x = p.g.SoftMax(p.Scores());
        const Value seed = p.g.HostScalar("seed", kS64), probability = p.g.HostScalar("p", kF32);
        const auto drop = [&](Value x) {
          return p.g.AddOp(OpKind::kDropout, "dropout", {x, seed, seed, probability}, {kF32})[0];
        };
        p.g.Output("o", p.g.MatMul(drop(drop(x)), p.v));
      });
}

TEST(NearMiss, ProductWithValuesThatAddsABias) {
  ExpectMiss("MatMul | SoftMax | MatMul", "MatMul .* adds a bias", [](Plain& p) {
    const Value bias = p.g.Input("bias", kF32, {6});
    p.g.Output("o",
               p.g.AddOp(OpKind::kMatMul, "pv", {p.g.SoftMax(p.Scores()), p.v, bias}, {kF32})[0]);
  });
}

TEST(NearMiss, LengthsOfRangesSeenElsewhere) {
  for (const bool output : {false, true}) {
    Plain p;
    const auto [k, lengths] =
        p.g.LoadRangesWithLengths({p.k}, p.g.Input("ranges", kS32, {2, 1, 2}));
    const auto v = p.g.LoadRanges({p.v}, p.g.Input("ranges_v", kS32, {2, 1, 2}));
    if (output) {
      p.g.Output("o", p.g.MatMul(p.g.SoftMax(p.g.MatMul(p.q, k, {.transpose_b = true})), v));
    } else {
      p.g.Output("o", p.g.MatMul(p.g.SoftMax(p.g.MatMul(p.q, k, {.transpose_b = true}),
                                             {.lengths = lengths}),
                                 v));
      p.g.Output("l", p.g.Reshape(lengths, {1, 2}));
    }
    auto r = Partitions(std::move(p.g));
    EXPECT_EQ(KindsOf(r), absl::StrCat("LoadRanges | LoadRanges | MatMul | SoftMax | MatMul",
                                       output ? "" : " | StaticReshape"));
    EXPECT_THAT(MissesOf(r), ElementsAre(HasSubstr("lengths of")));
  }
}

TEST(NearMiss, ScalesThatAreTheQueries) {
  Plain p;
  const Value q = p.g.Transpose(p.g.Input("s", kF32, {2, 4, 5, 8}), {0, 1, 2, 3});
  const Value codes = p.g.Input("c", kS8, {2, 4, 5, 8});
  const Value k = p.g.DynamicDequantize(codes, q, {.group_shape = {1, 1, 1, 1}});
  p.g.Output("o", p.g.MatMul(p.g.SoftMax(p.g.MatMul(q, k, {.transpose_b = true})), p.v));
  auto r = Partitions(std::move(p.g));
  EXPECT_EQ(KindsOf(r), "StaticTranspose | DynamicDequantize | MatMul | SoftMax | MatMul");
  EXPECT_THAT(MissesOf(r), ElementsAre(HasSubstr("is used twice in it")));
}

TEST(NearMiss, DiagonalsOfTwoScalars) {
  for (const bool rows : {true, false}) {
    Plain p;
    const Value s = p.Scores();
    const Value t = p.g.Input("t", kS32, {1}), u = p.g.Input("u", kS32, {1});
    const auto shifted = [&](Value x) { return p.g.Add(p.g.Add(x, t), u); };
    Value row = p.g.GenIndex(s, -2), col = p.g.GenIndex(s, -1);
    if (rows)
      row = shifted(row);
    else
      col = shifted(col);
    p.g.Output("o",
               p.g.MatMul(p.g.SoftMax(p.g.Select(p.g.GreaterEqual(row, col), s, p.scale)), p.v));
    const auto r = Partitions(std::move(p.g));
    EXPECT_THAT(MissesOf(r), ElementsAre(HasSubstr("plus at most one scalar and minus one")));
    EXPECT_EQ(r.size(), 9u) << KindsOf(r);
  }
}

}  // namespace
}  // namespace kvant
