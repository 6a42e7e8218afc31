// What stays outside of attention, or keeps it from being resolved, at its operands and moves.
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
using Kind = ScoreStep::Kind;

TEST(AttentionMatcher, ABiasOfTheScoresIsAStep) {
  Plain p;
  const Value scores =
      p.g.AddOp(OpKind::kMatMul, "qk", {p.q, p.k, p.mask}, {kF32}, {{Attr::kTransposeB, true}})[0];
  p.g.Output("o", p.g.MatMul(p.g.SoftMax(p.g.Multiply(scores, p.scale)), p.v));
  EXPECT_EQ(KindsOf(OnlySpec(Partitions(std::move(p.g)))),
            (std::vector<Kind>{Kind::kAdd, Kind::kMultiply}));
}

TEST(AttentionMatcher, WhatOthersUseOfAnOperandStaysOutside) {
  for (const char* operand : {"q", "k", "v", "mask"}) {
    const std::string_view name = operand;
    Plain p;
    Value q = p.q, k = p.k, v = p.v, mask = p.mask;
    const auto moved = [&](Value x, Dims dims) {
      const Value y = p.g.Reshape(x, std::vector<int64_t>(dims.begin(), dims.end()));
      p.g.Output("seen", p.g.Tanh(y));
      return y;
    };
    if (name == "q") q = moved(q, {2, 4, 3, 8});
    if (name == "k") k = moved(k, {2, 4, 5, 8});
    if (name == "v") v = moved(v, {2, 4, 5, 6});
    if (name == "mask") mask = moved(mask, {2, 1, 3, 5});
    const Value s = p.g.Add(p.g.MatMul(q, k, {.transpose_b = true}), mask);
    p.g.Output("o", p.g.MatMul(p.g.SoftMax(s), v));
    const auto r = Partitions(std::move(p.g));
    EXPECT_THAT(KindsOf(r), HasSubstr("MatMul Add SoftMax MatMul")) << name;
    EXPECT_THAT(MissesOf(r), IsEmpty());
  }
}

TEST(AttentionMatcher, RotatedAndLoadedMasksStayOutside) {
  for (const bool rotated : {true, false}) {
    Plain p;
    const Value x = p.g.Input("x", kF32, {2, 1, 3, 4}), k = p.g.Input("k4", kF32, {2, 4, 4, 8});
    const Value mask =
        rotated ? p.g.Hadamard(x, 4) : p.g.LoadTokens(x, p.g.Input("lengths", kS32, {2}));
    const Value s = p.g.Add(p.g.MatMul(p.q, k, {.transpose_b = true}), mask);
    p.g.Output("o", p.g.MatMul(p.g.SoftMax(s), k));
    EXPECT_EQ(KindsOf(Partitions(std::move(p.g))), rotated
                                                       ? "Hadamard | MatMul Add SoftMax MatMul"
                                                       : "LoadTokens | MatMul Add SoftMax MatMul");
  }
}

TEST(AttentionMatcher, AConditionOfTwoAttentionsStaysOutside) {
  Plain p;
  const Value rows = p.g.GenIndex(p.mask, -2), cols = p.g.GenIndex(p.mask, -1);
  const Value causal = p.g.GreaterEqual(rows, cols);
  const auto attention = [&](const char* name) {
    const Value s = p.g.Select(causal, p.Scores(), p.scale);
    p.g.Output(name, p.g.MatMul(p.g.SoftMax(s), p.v));
  };
  attention("a");
  attention("b");
  const auto r = Partitions(std::move(p.g));
  EXPECT_EQ(KindsOf(r),
            "GenIndex | GenIndex | GreaterEqual | MatMul Select SoftMax MatMul | MatMul Select "
            "SoftMax MatMul");
  EXPECT_THAT(MissesOf(r), IsEmpty());
}

TEST(AttentionMatcher, ScoresThatAMaskBroadcastsAreNotResolved) {
  for (const bool rows : {true, false}) {
    GraphBuilder g;
    const Value q = g.Input("q", kF32, {2, 4, rows ? 1 : 3, 8}),
                k = g.Input("k", kF32, {2, 4, rows ? 5 : 1, 8});
    const Value mask = g.Input("mask", kF32, {3, 5}), v = g.Input("v", kF32, {2, 4, 5, 6});
    g.Output("o", g.MatMul(g.SoftMax(g.Add(g.MatMul(q, k, {.transpose_b = true}), mask)), v));
    const auto r = Partitions(std::move(g));
    ASSERT_EQ(r.size(), 1u);
    EXPECT_EQ(r[0].attention(), nullptr);
    EXPECT_THAT(r[0].notes(), ElementsAre(HasSubstr("are broadcast to more rows or columns")));
  }
}

TEST(AttentionMatcher, DropoutOfMovedScoresIsNotResolved) {
  for (int form = 0; form < 3; ++form) {
    Plain p;
    const auto drop = [&](Value x) {
      return p.g.AddOp(OpKind::kDropout, "dropout",
                       {x, p.g.HostScalar("seed", kS64), p.g.HostScalar("offset", kS64),
                        p.g.HostScalar("p", kF32)},
                       {kF32})[0];
    };
    const std::vector<int64_t> swap = {0, 1, 3, 2};
    Value probs =
        form == 0
            ? p.g.Transpose(
                  drop(p.g.SoftMax(p.g.MatMul(p.k, p.q, {.transpose_b = true}), {.axis = -2})),
                  swap)
        : form == 1
            ? drop(p.g.SoftMax(p.g.Transpose(p.g.MatMul(p.k, p.q, {.transpose_b = true}), swap)))
            : drop(p.g.Transpose(p.g.SoftMax(p.Scores()), swap));
    p.g.Output("o", p.g.MatMul(probs, p.v, {.transpose_a = form == 2}));
    const auto r = Partitions(std::move(p.g));
    ASSERT_EQ(r.size(), 1u) << form << KindsOf(r);
    EXPECT_EQ(r[0].attention(), nullptr) << form;
    EXPECT_THAT(r[0].notes(),
                ElementsAre(HasSubstr("its random bits follow another order than the scores")))
        << form;
  }
}

TEST(AttentionMatcher, StatisticsOfMovedScoresAreNotResolved) {
  Plain p;
  const std::vector<int64_t> swap = {0, 1, 3, 2};
  const auto [probs, stats] =
      p.g.SoftMaxWithStats(p.g.Transpose(p.g.MatMul(p.k, p.q, {.transpose_b = true}), swap), {});
  p.g.Output("o", p.g.MatMul(probs, p.v));
  p.g.Output("stats", stats);
  const auto r = Partitions(std::move(p.g));
  ASSERT_EQ(r.size(), 1u) << KindsOf(r);
  EXPECT_EQ(r[0].attention(), nullptr);
  EXPECT_THAT(r[0].notes(), ElementsAre(HasSubstr("statistics of reshaped scores")));
}

TEST(AttentionMatcher, ZeroPointsOfProbabilitiesNeedRowsThatSeeSomething) {
  for (const bool masked : {true, false})
    for (const bool nan : {true, false})
      for (const int64_t zero_point : {0, 3}) {
        Plain p;
        const Attributes attrs = {{Attr::kQType, std::string("per_tensor")},
                                  {Attr::kScales, std::vector<float>{0.5f}},
                                  {Attr::kZps, std::vector<int64_t>{zero_point}}};
        const Value s = masked ? p.g.Add(p.Scores(), p.mask) : p.g.Multiply(p.Scores(), p.scale);
        const Value probs = p.g.SoftMax(s, {.mode = nan ? "none" : "inf_as_zero"});
        const Value codes = p.g.AddOp(OpKind::kQuantize, "quantize", {probs}, {kU8}, attrs)[0];
        p.g.Output("o",
                   p.g.MatMul(p.g.AddOp(OpKind::kDequantize, "", {codes}, {kF32}, attrs)[0], p.v));
        const auto r = Partitions(std::move(p.g));
        ASSERT_EQ(r.size(), 1u) << KindsOf(r);
        EXPECT_EQ(r[0].attention() == nullptr, masked && nan && zero_point != 0);
      }
}

TEST(AttentionMatcher, AnOutputQuantizedPerChannelStaysOutside) {
  Plain p;
  const Value o = p.g.MatMul(p.g.SoftMax(p.Scores()), p.v);
  p.g.Output("o", p.g.AddOp(OpKind::kQuantize, "q", {o}, {kS8},
                            {{Attr::kQType, std::string("per_channel")},
                             {Attr::kScales, std::vector<float>{1, 2, 3, 4, 5, 6}},
                             {Attr::kAxis, int64_t{3}}})[0]);
  EXPECT_EQ(KindsOf(Partitions(std::move(p.g))), "MatMul SoftMax MatMul | Quantize");
}

}  // namespace
}  // namespace kvant
