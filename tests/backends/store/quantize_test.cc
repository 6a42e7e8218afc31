// DynamicQuantize by hand, on every backend: what scales, zero points and codes it gives.
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/graph/builder.h"
#include "kvant/tests/backends/ops/op_testing.h"
#include "kvant_test_config.h"

namespace kvant::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<std::string> Backends() {
#ifdef KVANT_WITH_ONEDNN
  return {"oracle", "reference", "cpu", "cuda_simt"};
#else
  return {"oracle", "cpu", "cuda_simt"};
#endif
}

class DynamicQuantizeTest : public ::testing::TestWithParam<std::string> {
 protected:
  // `outputs`: codes, scales and, perhaps, zero points.
  static void Expect(const PortValues& x, const std::vector<PortValues>& outputs,
                     Attributes attrs = {}) {
    OpCase test;
    test.name = "quantize";
    test.kind = OpKind::kDynamicQuantize;
    test.attrs = std::move(attrs);
    test.inputs = {x};
    test.outputs = outputs;
    ExpectOpCase(test, GetParam());
  }

  static Attributes Groups(std::vector<int64_t> shape) {
    return {{Attr::kQType, std::string("per_group")}, {Attr::kGroupShape, std::move(shape)}};
  }
};

INSTANTIATE_TEST_SUITE_P(Backends, DynamicQuantizeTest, ::testing::ValuesIn(Backends()),
                         [](const auto& info) { return info.param; });

TEST_P(DynamicQuantizeTest, SymmetricScalesAreTheLargestMagnitudeByTheHighestCode) {
  Expect({kF32, {6}, {-7, 3.5, 0, 0, 7, -14}},
         {{kS4, {6}, {-7, 4, 0, 0, 4, -7}}, {kF32, {3}, {1, 1, 2}}}, Groups({2}));
}

TEST_P(DynamicQuantizeTest, IntegerZeroPointsWidenTheRangeToZero) {
  Expect({kF32, {6}, {15, 30, -30, -6, -10, 5}},
         {{kU4, {6}, {8, 15, 0, 12, 0, 15}}, {kF32, {3}, {2, 2, 1}}, {kS8, {3}, {0, 15, 10}}},
         Groups({2}));
}

TEST_P(DynamicQuantizeTest, RealZeroPointsReproduceTheMinimum) {
  Expect({kF32, {4}, {15, 30, 3, 3}},
         {{kS4, {4}, {-8, 7, -8, -8}}, {kF32, {2}, {1, 1}}, {kF32, {2}, {-8 - 15, -8 - 3}}},
         Groups({2}));
}

TEST_P(DynamicQuantizeTest, PerTensorAndPerChannel) {
  const PortValues x{kF32, {2, 3}, {127, -2, 0, 12.7, 254, 0}};
  Expect(x, {{kS8, {2, 3}, {64, -1, 0, 6, 127, 0}}, {kF32, {1}, {2}}});
  Expect(x, {{kS8, {2, 3}, {127, -1, 0, 13, 127, 0}}, {kF32, {3}, {1, 2, 1}}},
         {{Attr::kQType, std::string("per_channel")}, {Attr::kAxis, int64_t{-1}}});
}

TEST_P(DynamicQuantizeTest, CodesAreOfTheScaleAsStored) {
  // 1 / 127 in bf16 is 0.00787353515625, and 100 / 127 is 0.7890625.
  Expect({kF32, {4}, {1, 0.5, 100, -63}},
         {{kS8, {4}, {127, 64, 127, -80}}, {kBF16, {2}, {0.00787353515625, 0.7890625}}},
         Groups({2}));
}

TEST_P(DynamicQuantizeTest, ScalesThatDoNotFitTheirTypeStayUsable) {
  Expect({kF32, {4}, {1e30, -1e30, 1e-12, 0}},
         {{kS8, {4}, {127, -128, 0, 0}}, {kF16, {2}, {65504, 0x1p-24}}}, Groups({2}));
  Expect({kF32, {2}, {-3e38, 0}}, {{kU8, {2}, {0, 1}}, {kF16, {1}, {65504}}, {kF16, {1}, {65504}}},
         Groups({2}));
}

TEST_P(DynamicQuantizeTest, FloorsAndPowersOfTwo) {
  Attributes attrs = Groups({2});
  attrs.Set(Attr::kScaleFloor, 0.5f);
  const PortValues x{kF32, {6}, {0, 0, 1, -2, 70, 35}};
  Expect(x, {{kS4, {6}, {0, 0, 2, -4, 7, 4}}, {kF32, {3}, {0.5, 0.5, 10}}}, attrs);
  attrs.Set(Attr::kPowerOfTwoScales, true);
  Expect(x, {{kS4, {6}, {0, 0, 2, -4, 4, 2}}, {kF32, {3}, {0.5, 0.5, 16}}}, attrs);
  Expect({kF32, {2}, {14, 7}}, {{kS4, {2}, {7, 4}}, {kF16, {1}, {2}}}, attrs);
  Expect({kF32, {2}, {1e30, 0}}, {{kS4, {2}, {7, 0}}, {kF16, {1}, {32768}}}, attrs);
}

TEST_P(DynamicQuantizeTest, FloatCodes) {
  Expect({kF32, {4}, {448, -1.0625, 0.001, -0.0009}},
         {{kF8E4M3, {4}, {448, -1, 0.001953125, 0}}, {kF32, {1}, {1}}}, Groups({4}));
  Expect({kF32, {4}, {57344, -1.125, 1e-5, -1}},
         {{kF8E5M2, {4}, {57344, -1, 0x1p-16, -1}}, {kF32, {1}, {1}}}, Groups({4}));
}

// A scale that is subnormal in its type rounds up, so that the largest of its group has a code.
TEST_P(DynamicQuantizeTest, SubnormalScalesRoundUp) {
  const double unit = 0x1p-24;
  Expect({kF32, {6}, {448 * 2.25 * unit, 0, -7 * unit, 448 * 3 * unit, 1e-9, 0}},
         {{kF8E4M3, {6}, {320, 0, -2.25, 448, 9 * 0x1p-9, 0}},
          {kF16, {3}, {3 * unit, 3 * unit, unit}}},
         Groups({2}));
  Expect({kF32, {6}, {57344 * 1.25 * unit, 0, -7 * unit, 57344 * 3 * unit, 1e-9, 0}},
         {{kF8E5M2, {6}, {32768, 0, -2.5, 57344, 0.015625, 0}},
          {kF16, {3}, {2 * unit, 3 * unit, unit}}},
         Groups({2}));
  Expect({kF32, {4}, {127 * 1.25 * unit, -3 * unit, 0.4 * unit, 0}},
         {{kS8, {4}, {79, -2, 0, 0}}, {kF16, {2}, {2 * unit, unit}}}, Groups({2}));
  Expect({kF32, {4}, {1.5 * unit, 18 * unit, -3 * unit, 4 * unit}},
         {{kU4, {4}, {0, 8, 0, 7}},
          {kF16, {2}, {2 * unit, unit}},
          {kF32, {2}, {-1.5 * unit, 3 * unit}}},
         Groups({2}));
  // Those of the smallest binade that is normal do not.
  Expect({kF32, {1}, {127 * (0x1p-14 + 0.25 * unit)}}, {{kS8, {1}, {127}}, {kF16, {1}, {0x1p-14}}},
         Groups({1}));
}

// Codes of finite numbers are finite; infinity and NaN stay what they are as far as the type has
// them.
TEST_P(DynamicQuantizeTest, FloatCodesOfGivenScalesSaturate) {
  const std::vector<double> x{448, 464, 480, -1e6, 6e4, -7e4, 3e38, kInfinity, -kInfinity, kNan};
  const std::vector<double> e4m3{448, 448, 448, -448, 448, -448, 448, kNan, kNan, kNan};
  const std::vector<double> e5m2{448,    448,   512,       -57344,     57344,
                                 -57344, 57344, kInfinity, -kInfinity, kNan};
  OpCase test;
  test.name = "quantize";
  test.kind = OpKind::kDynamicQuantize;
  test.inputs = {{kF32, {10}, x}, {kF32, {1}, {1}}};
  for (const PortValues& codes : {PortValues{kF8E4M3, {10}, e4m3}, {kF8E5M2, {10}, e5m2}}) {
    test.outputs = {codes};
    ExpectOpCase(test, GetParam());
  }
  // With zero points, in codes and in real units.
  test.name = "with zero points";
  for (const DataType points : {kS8, kF32, kBF16}) {
    test.inputs = {{kF32, {4}, {1e6, -1e6, 3, -1}}, {kF32, {1}, {1}}, {points, {1}, {1}}};
    for (const PortValues& codes : {PortValues{kF8E4M3, {4}, {448, -448, 4, 0}},
                                    PortValues{kF8E5M2, {4}, {57344, -57344, 4, 0}}}) {
      test.outputs = {codes};
      ExpectOpCase(test, GetParam());
    }
  }
  // Beyond f32 with its zero point.
  test.inputs = {{kF32, {2}, {3e38, -1}}, {kF32, {1}, {1}}, {kF32, {1}, {1e38}}};
  test.outputs = {{kF8E5M2, {2}, {57344, 57344}}};
  ExpectOpCase(test, GetParam());
  // Quotients beyond f32.
  test.name = "quantize";
  test.inputs = {{kF32, {3}, {3e38, -1, kInfinity}}, {kF32, {1}, {0x1p-130}}};
  for (const PortValues& codes :
       {PortValues{kF8E4M3, {3}, {448, -448, kNan}}, {kF8E5M2, {3}, {57344, -57344, kInfinity}}}) {
    test.outputs = {codes};
    ExpectOpCase(test, GetParam());
  }
}

// The same of the static op, by itself and within attention: there probabilities and outputs are
// beyond the codes, and a value of the second channel is infinite.
TEST(StaticQuantizeTest, FloatCodesSaturate) {
  for (const auto& [type, largest] : {std::pair(kF8E4M3, 448.0), std::pair(kF8E5M2, 57344.0)}) {
    SCOPED_TRACE(std::string(DataTypeName(type)));
    const auto step = static_cast<float>(0.25 / largest);
    const auto scale = [](float value) {
      return Attributes{{Attr::kScales, std::vector<float>{value}}};
    };
    GraphBuilder g;
    const Value probs = g.SoftMax(g.MatMul(g.Input("q", kF32, {1, 2, 2}),
                                           g.Input("k", kF32, {1, 3, 2}), {.transpose_b = true}));
    const Value codes = g.AddOp(OpKind::kQuantize, "codes", {probs}, {type}, scale(step))[0];
    const Value rounded = g.AddOp(OpKind::kDequantize, "", {codes}, {kF32}, scale(step))[0];
    const Value o = g.MatMul(rounded, g.Input("v", kF32, {1, 3, 2}));
    g.Output("o", g.AddOp(OpKind::kQuantize, "o", {o}, {type}, scale(step))[0]);
    const absl::StatusOr<Graph> graph = std::move(g).Build();
    ASSERT_TRUE(graph.ok()) << graph.status();
    // Nearly all of the probability is the first token's, of which 1/4 is left.
    const std::vector<double> q{20, 0, 20, 0}, k{1, 0, 0, 0, 0, 0};
    Values values;
    values[graph->inputs()[0]] = q;
    values[graph->inputs()[1]] = k;
    values[graph->inputs()[2]] = {2, kInfinity, 0, 1, 0, 1};
    for (const std::string& backend : Backends()) {
      SCOPED_TRACE(backend);
      const absl::StatusOr<Values> result = RunGraph(*graph, values, backend);
      ASSERT_TRUE(result.ok()) << result.status();
      const std::vector<double>& got = result->at(graph->outputs()[0]);
      EXPECT_EQ(got[0], largest);
      EXPECT_FALSE(std::isfinite(got[1])) << got[1];
    }
  }
}

// Codes are positions in a table, here one of no order. Ties go to the lower code.
TEST_P(DynamicQuantizeTest, CodebooksGiveTheNearestEntry) {
  Attributes attrs = Groups({4});
  attrs.Set(Attr::kCodebook, std::vector<float>{4, -1, 0, 2});
  Expect({kF32, {8}, {8, -5, 0.9, 2, -1, 3, -8, 1}},
         {{kU2, {8}, {0, 1, 2, 2, 1, 3, 1, 2}}, {kF32, {2}, {2, 2}}}, attrs);
  Expect({kF32, {4}, {0, -0.0, 0, 0}}, {{kU2, {4}, {2, 2, 2, 2}}, {kF32, {1}, {1}}}, attrs);
  Expect({kF32, {4}, {kNan, 1, 2, 3}}, {{kU2, {4}, {0, 0, 0, 0}}, {kF32, {1}, {kNan}}}, attrs);
}

// A group with NaN or infinity gets the scale NaN, so that it reads back as NaN whatever its
// codes; its neighbours are as they would be.
TEST_P(DynamicQuantizeTest, WhatIsNotFiniteStaysInItsGroup) {
  for (const double bad : {kNan, kInfinity, -kInfinity}) {
    const PortValues x{kF32, {6}, {7, -7, bad, 1, 14, 0}};
    Expect(x, {{kS4, {6}, {7, -7, 0, 0, 7, 0}}, {kF32, {3}, {1, kNan, 2}}}, Groups({2}));
    Expect(x,
           {{kU4, {6}, {15, 0, 0, 0, 15, 0}},
            {kF16, {3}, {F16ToF32(F32ToF16(14.f / 15)), kNan, F16ToF32(F32ToF16(14.f / 15))}},
            {kU4, {3}, {8, 0, 0}}},
           Groups({2}));
    Expect(x,
           {{kF8E4M3, {6}, {448, -448, kNan, kNan, 448, 0}},
            {kF32, {3}, {7 / 448.0, kNan, 14 / 448.0}}},
           Groups({2}));
  }
}

struct Scheme {
  DataType codes, scales, zero_points;
  std::vector<int64_t> group;
};

// The most that a value may be off: half a step, and what the stored zero point misses.
double Bound(const Scheme& scheme, double x, double scale, double spread) {
  if (scheme.codes == kF8E4M3) return std::max(std::abs(x) / 16, scale / 512) * 1.01;
  if (scheme.codes == kF8E5M2) return std::max(std::abs(x) / 8, scale / 65536) * 1.01;
  const double epsilon = scheme.scales == kF32 ? 1e-6 : scheme.scales == kF16 ? 1e-3 : 8e-3;
  const bool shifted = scheme.zero_points != kUndef && IsInteger(scheme.zero_points);
  return (shifted ? 1.0 : 0.5) * scale + epsilon * spread;
}

TEST_P(DynamicQuantizeTest, ReadsBackWithinHalfAStep) {
  const Scheme schemes[] = {
      {kS8, kF32, kUndef, {1, 1, 16}},     {kS8, kF16, kUndef, {2, 3, 16}},
      {kS4, kF32, kUndef, {1, 1, 4}},      {kS2, kF32, kUndef, {1, 1, 2}},
      {kU8, kF32, kU8, {1, 3, 1}},         {kU4, kF16, kU4, {1, 1, 8}},
      {kU4, kF32, kS32, {1, 3, 4}},        {kU2, kF32, kU2, {1, 1, 16}},
      {kS4, kBF16, kS8, {2, 1, 1}},        {kU4, kF32, kF32, {1, 1, 8}},
      {kU2, kF32, kF32, {1, 3, 1}},        {kS4, kF32, kF32, {1, 1, 16}},
      {kF8E4M3, kF32, kUndef, {1, 1, 16}}, {kF8E5M2, kF32, kUndef, {1, 3, 2}}};
  std::vector<double> data;
  for (int row = 0; row < 6; ++row) {
    for (int i = 0; i < 16; ++i) {
      data.push_back(static_cast<float>(0.7 * row - 1.5 + (1 + row) * std::sin(1.3 * i + row)));
    }
  }
  const Dims dims = {2, 3, 16};
  for (const Scheme& scheme : schemes) {
    SCOPED_TRACE(std::string(DataTypeName(scheme.codes)));
    GraphBuilder g;
    g.DynamicQuantize(g.Input("x", kF32, dims),
                      {.group_shape = Dims(scheme.group.begin(), scheme.group.end()),
                       .type = scheme.codes,
                       .scale_type = scheme.scales,
                       .zero_point_type = scheme.zero_points});
    const absl::StatusOr<Graph> graph = std::move(g).Build();
    ASSERT_TRUE(graph.ok()) << graph.status();
    const absl::StatusOr<Values> result = RunGraph(*graph, {{0, data}}, GetParam());
    ASSERT_TRUE(result.ok()) << result.status();
    const std::vector<double>& codes = result->at(1);
    for (size_t i = 0; i < data.size(); ++i) {
      const size_t at[3] = {i / 48, i / 16 % 3, i % 16};
      size_t group = 0;
      for (int d = 0; d < 3; ++d) {
        group = group * (dims[d] / scheme.group[d]) + at[d] / scheme.group[d];
      }
      const double scale = result->at(2)[group];
      const double zp = scheme.zero_points == kUndef ? 0 : result->at(3)[group];
      const double back =
          IsFloat(scheme.zero_points) ? codes[i] * scale - zp : (codes[i] - zp) * scale;
      EXPECT_NEAR(back, data[i], Bound(scheme, data[i], scale, 20)) << "element " << i;
    }
  }
}

}  // namespace
}  // namespace kvant::testing
