// The cpu backend against f64 loops, spec by spec.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kvant/backends/cpu/attention_plan.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/graph/status.h"
#include "kvant/tests/backends/attention/harness.h"

namespace kvant::cpu {
namespace {

using Kind = ScoreStep::Kind;
using Alignment = ScoreStep::Alignment;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr DataType kStorageTypes[] = {kF32, kF16, kBF16, kF8E4M3, kF8E5M2, kS8,
                                      kU8,  kS4,  kU4,   kS2,     kU2};

Format Quantized(DataType type, Dims5 group = {1, 1, 1, 1, 8}, DataType scales = kF16,
                 DataType zero_points = kUndef) {
  return {.type = type, .group = group, .scales = scales, .zero_points = zero_points};
}

// A format that makes sense of the type: codes with scales and zero points, floats plain.
Format Usual(DataType type) {
  if (IsComputeFloat(type)) return {.type = type};
  return Quantized(type, {1, 1, 1, 1, 8}, kF16, IsInteger(type) ? type : kUndef);
}

TEST(CpuAttention, EveryPairOfStorageTypes) {
  for (DataType k : kStorageTypes) {
    for (DataType v : kStorageTypes) {
      SCOPED_TRACE(testing::Message() << DataTypeName(k) << " " << DataTypeName(v));
      Plain({.b0 = 1, .kv_len = 67}, Usual(k), Usual(v)).Check();
      if (HasFailure()) return;
    }
  }
}

TEST(CpuAttention, GroupsAlongAnyAxis) {
  const Shape shape{.b0 = 1, .ratio = 2, .q_len = 1, .kv_len = 150, .d = 24, .dv = 24};
  const Dims5 groups[] = {{1, 1, 1, 1, 8},  {1, 1, 1, 1, 1},  {1, 1, 1, 1, 0}, {1, 1, 1, 10, 1},
                          {1, 1, 1, 75, 3}, {1, 1, 1, 0, 1},  {1, 1, 1, 0, 0}, {0, 0, 0, 0, 0},
                          {0, 1, 1, 2, 24}, {1, 0, 1, 30, 12}};
  for (DataType type : {kU4, kS8, kS2, kF8E4M3}) {
    for (const Dims5& group : groups) {
      for (DataType zp : {kUndef, kU4, kS8, kS32, kF16, kF32}) {
        for (auto order : {Format::Order::kTokenMajor, Format::Order::kChannelMajor}) {
          Format f = Quantized(type, group, zp == kF16 ? kBF16 : kF32, zp);
          f.order = order;
          SCOPED_TRACE(testing::Message() << DataTypeName(type) << testing::PrintToString(group)
                                          << DataTypeName(zp) << static_cast<int>(order));
          Plain(shape, f, f).Check();
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(CpuAttention, LayoutsAndScalesOfTheirOwnLayout) {
  for (DataType type : {kF32, kF16, kS8, kU4, kU2}) {
    for (auto k : {Format::Order::kTokenMajor, Format::Order::kChannelMajor, Format::Order::kPadded,
                   Format::Order::kInterleaved}) {
      for (bool per_query_head : {false, true}) {
        Format f = Usual(type);
        f.order = k;
        f.per_query_head = per_query_head;
        SCOPED_TRACE(testing::Message() << DataTypeName(type) << static_cast<int>(k));
        Plain({.kv_len = 65, .d = 40, .dv = 24}, f, f).Check();
        Plain({.kv_len = 65, .d = 40, .dv = 24}, f, {}).Check();
        if (HasFailure()) return;
      }
    }
  }
  // K token-major with scales [D / G, S], tokens contiguous.
  Case c = Plain({.kv_len = 66}, Quantized(kU4, {1, 1, 1, 1, 8}, kF16, kU8));
  c.spec.k[0].quantization->scales = c.AddInput(kF16, {2, 2, 1, 66, 5}, {660, 330, 330, 1, 66},
                                                [&](const Dims5&) { return c.Random(0.05, 0.2); });
  c.Check();
}

TEST(CpuAttention, HeadSizes) {
  for (int64_t d : {1, 7, 16, 40, 64, 80, 96, 128, 256}) {
    for (int64_t dv : {d, d + 3}) {
      SCOPED_TRACE(testing::Message() << d << " " << dv);
      Plain({.b0 = 1, .ratio = 5, .kv_len = 67, .d = d, .dv = dv}, Quantized(kS8, {1, 1, 1, 1, 0}),
            Quantized(kU4, {1, 1, 1, 1, 0}))
          .Check(1e-4);  // integer products: 2e-5 here, and kernels round differently
      if (HasFailure()) return;
    }
  }
}

TEST(CpuAttention, Lengths) {
  for (int64_t s : {1, 2, 31, 33, 63, 64, 65, 257, 1025}) {
    for (int64_t q : {1, 2, 5, 64, 130}) {
      if (s * q > 40000) continue;
      SCOPED_TRACE(testing::Message() << s << " " << q);
      Case c = Plain({.b0 = 1, .b1 = 2, .ratio = 2, .q_len = q, .kv_len = s, .d = 16, .dv = 16},
                     Usual(kU4), Usual(kS8));
      c.AddStats();
      c.Check();
      if (HasFailure()) return;
    }
  }
}

TEST(CpuAttention, Ratios) {
  for (int64_t ratio : {1, 2, 3, 6, 7, 8, 16, 71}) {
    for (int64_t q : {1, 3}) {
      SCOPED_TRACE(testing::Message() << ratio << " " << q);
      Plain({.ratio = ratio, .q_len = q, .kv_len = 129, .d = 16, .dv = 16}, Usual(kU4)).Check();
      if (HasFailure()) return;
    }
  }
}

TEST(CpuAttention, RealScoresOverManySplits) {
  Case c = Plain({.b0 = 1, .b1 = 1, .ratio = 4, .q_len = 1, .kv_len = 8200, .d = 64, .dv = 64},
                 Usual(kS8), Usual(kU4));
  c.spec.steps[0].operand.constant = 0.5f;  // scores of +-50
  c.AddStats();
  c.Check();
  const Plan plan(c.spec, *KernelsAt(0));
  EXPECT_TRUE(plan.problem().may_split);
}

TEST(CpuAttention, ElementwiseStepsWithEveryShapeOfOperand) {
  const Dims5 shapes[] = {{1, 1, 1, 1, 1},  {2, 2, 3, 5, 67}, {1, 1, 1, 5, 67},
                          {2, 1, 1, 1, 67}, {1, 2, 3, 1, 1},  {1, 1, 1, 5, 1}};
  for (Kind kind : {Kind::kMultiply, Kind::kDivide, Kind::kAdd, Kind::kSubtract, Kind::kMaximum,
                    Kind::kMinimum}) {
    for (const Dims5& dims : shapes) {
      for (DataType type : {kF32, kF16, kBF16}) {
        Case c = Plain({.q_len = 5, .kv_len = 67, .d = 16, .dv = 16});
        ScoreStep step{.kind = kind};
        step.operand.view = c.AddDense(type, dims, [&](const Dims5&) { return c.Random(0.3, 2); });
        c.spec.steps.push_back(step);
        SCOPED_TRACE(testing::Message() << static_cast<int>(kind) << testing::PrintToString(dims));
        c.Check();
        if (HasFailure()) return;
      }
    }
  }
}

TEST(CpuAttention, SoftCapAndAlibi) {
  Case c = Plain({.q_len = 5, .kv_len = 131});
  for (auto [kind, value] :
       {std::pair{Kind::kDivide, 3.f}, {Kind::kTanh, 0.f}, {Kind::kMultiply, 3.f}}) {
    ScoreStep step{.kind = kind};
    if (kind != Kind::kTanh) step.operand.constant = value;
    c.spec.steps.push_back(step);
  }
  ScoreStep alibi{.kind = Kind::kAlibi, .alignment = Alignment::kBottomRight};
  alibi.operand.view = c.AddDense(kF32, {1, 2, 3, 1, 1}, [](const Dims5& p) {
    return 0.01 * static_cast<double>(1 + p[1] * 3 + p[2]);
  });
  c.spec.steps.push_back(alibi);
  c.AddStats();
  c.Check();
}

TEST(CpuAttention, SelectOnEitherBranch) {
  for (bool inverted : {false, true}) {
    for (float fill : {kNegInf, -1e4f, -0.5f}) {
      for (const Dims5& dims :
           {Dims5{2, 2, 3, 5, 67}, Dims5{2, 1, 1, 1, 67}, Dims5{2, 2, 1, 5, 1}}) {
        Case c = Plain({.q_len = 5, .kv_len = 67, .d = 16, .dv = 16});
        ScoreStep step{.kind = Kind::kSelect, .inverted = inverted};
        step.condition =
            c.AddDense(kBoolean, dims, [&](const Dims5&) { return c.Random(0, 1) > 0.6; });
        step.operand.view = c.AddScalar(kF32, fill);
        c.spec.steps.push_back(step);
        c.AddStats();
        c.Check();
        if (HasFailure()) return;
      }
    }
  }
}

TEST(CpuAttention, Bands) {
  struct Bounds {
    std::optional<int64_t> left, right;
  };
  const Bounds bounds[] = {{{}, 0}, {0, {}}, {40, 0}, {3, 70}, {{}, {}}, {-5, 200}, {{}, -3}};
  for (Alignment alignment : {Alignment::kTopLeft, Alignment::kBottomRight, Alignment::kRuntime}) {
    for (const Bounds& b : bounds) {
      for (bool inverted : {false, true}) {
        for (float fill : {kNegInf, -3e4f}) {
          for (int64_t q : {3, 70}) {
            Case c =
                Plain({.b0 = 1, .b1 = 1, .ratio = 2, .q_len = q, .kv_len = 257, .d = 4, .dv = 4},
                      {.type = kF16});
            ScoreStep step{.kind = Kind::kBand,
                           .inverted = inverted,
                           .left = b.left,
                           .right = b.right,
                           .alignment = alignment};
            step.operand.constant = fill;
            step.shift_add.view = c.AddScalar(kS32, 100);
            step.shift_sub.constant = 7;
            c.spec.steps.push_back(step);
            c.AddStats();
            SCOPED_TRACE(testing::Message() << static_cast<int>(alignment) << " " << inverted << " "
                                            << fill << " " << q);
            c.Check();
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

// After a band, steps that revive what it masked: no tile may be skipped then.
TEST(CpuAttention, StepsAfterABand) {
  for (Kind kind : {Kind::kMaximum, Kind::kTanh, Kind::kMultiply, Kind::kSelect, Kind::kAdd}) {
    Case c = Plain({.b0 = 1, .q_len = 5, .kv_len = 200, .d = 16, .dv = 16});
    ScoreStep band{.kind = Kind::kBand, .right = 0};
    band.operand.constant = kNegInf;
    ScoreStep after{.kind = kind};
    if (kind == Kind::kMultiply) band.operand.constant = -10.f;
    if (kind == Kind::kSelect) {
      after.condition = c.AddDense(kBoolean, {1, 1, 1, 5, 200},
                                   [&](const Dims5&) { return c.Random(0, 1) > 0.5; });
    }
    after.operand.constant = kind == Kind::kMultiply ? -1.f : 0.25f;
    c.spec.steps.push_back(band);
    c.spec.steps.push_back(after);
    SCOPED_TRACE(static_cast<int>(kind));
    c.Check();
    if (HasFailure()) return;
  }
}

TEST(CpuAttention, SegmentsOfKAndVWithDifferentBoundaries) {
  Case c = Plain({.q_len = 3, .kv_len = 300});
  c.SetK(Usual(kU4), {1, 128, 100, 71});
  c.spec.k[1] = c.MakeSegment({.type = kF16, .order = Format::Order::kChannelMajor}, 128, 40);
  c.SetV(Usual(kS8), {77, 200, 23});
  c.spec.v[2] = c.MakeSegment({.type = kF32, .order = Format::Order::kChannelMajor}, 23, 40);
  ScoreStep band{
      .kind = Kind::kBand, .left = 150, .right = 0, .alignment = Alignment::kBottomRight};
  band.operand.constant = kNegInf;
  c.spec.steps.push_back(band);
  c.Check();
}

TEST(CpuAttention, FullyMaskedRowsInBothModes) {
  for (SoftmaxMode mode : {SoftmaxMode::kNone, SoftmaxMode::kInfAsZero}) {
    for (bool round : {false, true}) {
      Case c = Plain({.q_len = 5, .kv_len = 600});
      ScoreStep band{.kind = Kind::kBand, .right = 0};
      band.alignment = Alignment::kRuntime;
      band.shift_sub.constant = 3;  // the first three rows see nothing
      band.operand.constant = kNegInf;
      c.spec.steps.push_back(band);
      c.spec.softmax_mode = mode;
      if (round) c.spec.probs_quantization = FakeQuantize{kU8, 1.f / 255, 0};
      c.AddStats();
      c.Check(round ? 5e-3 : 2e-5);
    }
  }
}

TEST(CpuAttention, KvLengths) {
  for (int64_t q : {1, 4}) {
    for (bool round : {false, true}) {
      Case c = Plain({.b0 = 5, .q_len = q, .kv_len = 700, .d = 16, .dv = 16}, Usual(kU4));
      const double lengths[] = {0, 1, 64, 333, 700};
      c.spec.kv_lengths =
          c.AddDense(kS32, {5, 1, 1, 1, 1}, [&](const Dims5& p) { return lengths[p[0]]; });
      ScoreStep band{.kind = Kind::kBand, .right = 0, .alignment = Alignment::kBottomRight};
      band.operand.constant = kNegInf;
      c.spec.steps.push_back(band);
      if (round) c.spec.probs_quantization = FakeQuantize{kU8, 1.f / 255, 0};
      c.AddStats();
      c.Check(round ? 5e-3 : 2e-5);
    }
  }
}

TEST(CpuAttention, NothingIsReadBeyondTheLength) {
  Case c = Plain({.b0 = 1, .kv_len = 200}, {}, {});
  c.spec.kv_lengths = c.AddScalar(kS32, 100);
  for (const KvSegment* segment : {&c.spec.k[0], &c.spec.v[0]}) {
    float* data = static_cast<float*>(c.inputs[segment->data.port].data());
    for (int64_t head = 0; head < 2; ++head) {
      for (int64_t i = 100 * 40; i < 200 * 40; ++i) data[head * 200 * 40 + i] = std::nanf("");
    }
  }
  c.Check();
}

// Left padding and the room behind a row's tokens hold anything.
TEST(CpuAttention, WhatLiesOutsideOfTheTokensDoesNotCount) {
  constexpr int64_t kFirst = 70, kEnd = 133;
  for (const int64_t q_len : {1, 40}) {
    for (const auto order : {Format::Order::kTokenMajor, Format::Order::kChannelMajor}) {
      for (const DataType scales : {kUndef, kF32, kF16}) {
        Format format{.type = scales == kUndef ? kF32 : kU8, .order = order};
        if (scales != kUndef) {
          format.group = {1, 1, 1, 1, 0};
          format.scales = scales;
        }
        SCOPED_TRACE(testing::Message()
                     << q_len << " queries, " << DataTypeName(format.type) << ", scales "
                     << DataTypeName(scales) << ", order " << static_cast<int>(order));
        Case c = Plain({.b0 = 1, .q_len = q_len, .kv_len = 200, .d = 32, .dv = 32}, format, format);
        c.spec.kv_first = c.AddScalar(kS32, kFirst);
        c.spec.kv_lengths = c.AddScalar(kS32, kEnd);
        for (KvSegment* segment : {&c.spec.k[0], &c.spec.v[0]}) {
          View& view = segment->quantization ? segment->quantization->scales : segment->data;
          view = c.AddInput(view.type, view.dims, view.strides, [&](const Dims5& p) {
            return p[3] < kFirst || kEnd <= p[3] ? std::nan("") : c.Random(0.003, 0.006);
          });
        }
        c.CheckEverywhere();
      }
    }
  }
}

TEST(CpuAttention, Sinks) {
  for (int64_t s : {65, 1000}) {
    for (bool masked : {false, true}) {
      Case c = Plain({.b0 = 1, .kv_len = s});
      c.spec.sinks = c.AddDense(kF32, {1, 2, 3, 1, 1}, [](const Dims5& p) {
        return p[2] == 2 ? -INFINITY : 1.5 * static_cast<double>(p[1] + 2 * p[2]) - 1;
      });
      if (masked) {
        c.spec.kv_lengths = c.AddScalar(kS32, 0);
      }
      c.AddStats();
      c.Check();
    }
  }
}

TEST(CpuAttention, Dropout) {
  for (double probability : {0.0, 0.3, 1.0}) {
    for (int64_t s : {67, 520}) {
      Case c = Plain({.q_len = 3, .kv_len = s});
      Dropout& dropout = c.spec.dropout.emplace();
      dropout.seed.view = c.AddScalar(kS64, 1234567890123.0);
      dropout.offset.view = c.AddScalar(kS64, 77);
      dropout.probability.view = c.AddScalar(kF32, probability);
      const Dims5 dims{2, 2, 3, 3, s};
      dropout.mask = c.AddOutput(kU8, dims, Dense(dims));
      if (s > 100) c.spec.kv_lengths = c.AddScalar(kS32, 300);
      if (probability == 1.0) c.spec.dropout->probability.view = c.AddScalar(kF32, 0.999);
      c.AddStats();
      c.Check(probability == 1.0 ? 2e-3 : 2e-5);
    }
  }
}

TEST(CpuAttention, StaticQuantizationEverywhere) {
  Case c({.q_len = 3, .kv_len = 130});
  const Shape& s = c.shape;
  const auto codes = [&](const Dims5&) { return std::floor(c.Random(0, 256)); };
  c.spec.q = c.AddDense(kU8, {s.b0, s.b1, s.ratio, s.q_len, s.d}, codes);
  Quantization tensor;
  tensor.static_scales = {0.01f};
  tensor.static_zps = {110};
  c.spec.q_quantization = tensor;
  c.SetK({.type = kS8});
  Quantization channel;
  channel.static_axis = 4;
  for (int d = 0; d < s.d; ++d) {
    channel.static_scales.push_back(0.005f + 0.0003f * static_cast<float>(d));
    channel.static_zps.push_back(d - 20);
  }
  c.spec.k[0].quantization = channel;
  c.SetV({.type = kU8, .order = Format::Order::kChannelMajor});
  channel.static_axis = 1;
  channel.static_scales = {0.01f, 0.02f};
  channel.static_zps.clear();
  c.spec.v[0].quantization = channel;
  c.AddScale();
  c.Check(5e-5);
  c.spec.probs_quantization = FakeQuantize{kU8, 1.f / 200, 3};
  c.spec.output_quantization = FakeQuantize{kU8, 0.02f, 5};
  const Dims5 dims{s.b0, s.b1, s.ratio, s.q_len, s.dv};
  c.outputs.clear();
  c.spec.output = c.AddOutput(kU8, dims, Dense(dims));
  c.Check(1.0);  // codes may be off by one
}

TEST(CpuAttention, OutputTypesAndLayouts) {
  for (DataType type : {kF16, kBF16, kF32}) {
    Case c = Plain({.q_len = 3, .kv_len = 65});
    c.outputs.clear();
    c.spec.output = c.AddOutput(type, {2, 2, 3, 3, 40}, {3000, 120, 40, 240, 1});
    c.Check(type == kBF16 ? 1e-2 : type == kF16 ? 1.2e-3 : 2e-5);
    c.outputs.clear();
    c.spec.output = c.AddOutput(type, {2, 2, 3, 3, 40}, {1, 2, 4, 12, 36});
    c.Check(type == kBF16 ? 1e-2 : type == kF16 ? 1.2e-3 : 2e-5);
  }
}

TEST(CpuAttention, NanAndInfinityPropagateAsInPlainLoops) {
  Case c = Plain({.b0 = 1, .q_len = 4, .kv_len = 300});
  ScoreStep add{.kind = Kind::kAdd};
  add.operand.view = c.AddDense(kF32, {1, 1, 1, 4, 300}, [](const Dims5& p) {
    if (p[3] == 1 && p[4] == 280) return double{INFINITY};
    if (p[3] == 2 && p[4] == 10) return std::nan("");
    return p[3] == 3 && p[4] < 290 ? -double{INFINITY} : 0.0;
  });
  c.spec.steps.push_back(add);
  ASSERT_TRUE(c.Run(*KernelsAt(0), 2).ok());
  const float* out = static_cast<const float*>(c.outputs[0].data());
  for (int64_t row = 0; row < 24; ++row) {
    const bool nan = row % 4 == 1 || row % 4 == 2;
    EXPECT_EQ(std::isnan(out[row * 40 + 5]), nan) << row;
  }
}

TEST(CpuAttention, MaximumAndMinimumKeepNanOfScoresAndOperand) {
  for (const Kind kind : {Kind::kMaximum, Kind::kMinimum}) {
    for (const bool by_column : {false, true}) {
      for (const DataType codes : {kUndef, kU4}) {
        const Format stored = codes == kUndef ? Format() : Usual(codes);
        Case c = Plain({.b0 = 1, .q_len = 4, .kv_len = 70}, stored, stored);
        ScoreStep add{.kind = Kind::kAdd};
        add.operand.view = c.AddDense(kF32, {1, 1, 1, 4, 70}, [](const Dims5& p) {
          return p[3] == 1 && p[4] == 66 ? std::nan("") : 0.0;
        });
        ScoreStep step{.kind = kind};
        step.operand.view = c.AddDense(kF32, {1, 1, 1, 4, by_column ? 70 : 1}, [&](const Dims5& p) {
          return p[3] == 2 && (!by_column || p[4] == 9) ? std::nan("") : c.Random(-0.5, 0.5);
        });
        c.spec.steps = {add, step};
        SCOPED_TRACE(testing::Message()
                     << static_cast<int>(kind) << by_column << DataTypeName(codes));
        c.CheckEverywhere();
        if (HasFailure()) return;
      }
    }
  }
}

// Half a tile of K and of V is most of what a unit may hold.
TEST(CpuAttention, LargeHeads) {
  Plain({.b0 = 1, .b1 = 1, .ratio = 1, .q_len = 2, .kv_len = 130, .d = 10240, .dv = 10240}).Check();
}

TEST(CpuAttention, HeadSizesBeyondAnyScratchAreDeclined) {
  Case c = Plain({});
  for (int64_t* size : {&c.spec.head_size, &c.spec.v_head_size}) {
    const int64_t kept = *size;
    *size = int64_t{1} << 56;
    const absl::Status status = CompileAttention(c.spec, *KernelsAt(0)).status();
    EXPECT_EQ(ErrorKindOf(status), ErrorKind::kUnimplemented);
    EXPECT_EQ(status.message(), "does not take a head size of 72057594037927936");
    *size = kept;
  }
}

TEST(CpuAttention, EmptyProblems) {
  Plain({.kv_len = 0}).Check();
  Plain({.b0 = 0}).Check();
  Plain({.q_len = 0}).Check();
}

}  // namespace
}  // namespace kvant::cpu
