// Every op of the table on the reference backend against the oracle: shapes, types, layouts.
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kvant/tests/backends/ops/reference_testing.h"

namespace kvant::testing {
namespace {

using Ints = std::vector<int64_t>;
using Floats = std::vector<float>;

struct Case {
  std::string name;
  std::function<void(GraphBuilder&)> build;
};
std::ostream& operator<<(std::ostream& out, const Case& test) { return out << test.name; }

class ReferenceCase : public ::testing::TestWithParam<Case> {};

TEST_P(ReferenceCase, AgreesWithOracle) {
  GraphBuilder builder;
  GetParam().build(builder);
  ExpectAgrees(std::move(builder));
}

std::vector<Case> UnaryCases() {
  std::vector<Case> cases;
  for (OpKind kind :
       {OpKind::kExp, OpKind::kTanh, OpKind::kReLU, OpKind::kSigmoid, OpKind::kSqrt,
        OpKind::kSquare, OpKind::kAbs, OpKind::kReciprocal, OpKind::kLog, OpKind::kGELU}) {
    for (DataType type : {kF32, kF16, kBF16}) {
      cases.push_back({std::string(OpKindName(kind)) + "_" + std::string(DataTypeName(type)),
                       [=](GraphBuilder& g) {
                         g.AddOp(kind, "y", {g.Input("x", type, {3, 5, 7})}, {type});
                       }});
    }
  }
  cases.push_back({"GELU_by_tanh", [](GraphBuilder& g) {
                     g.AddOp(OpKind::kGELU, "y", {g.Input("x", kF32, {3, 5, 7})}, {kF32},
                             {{Attr::kMode, std::string("gelu_tanh")}});
                   }});
  return cases;
}

std::vector<Case> BinaryCases() {
  const std::vector<std::pair<Dims, Dims>> shapes = {
      {{2, 3, 5}, {2, 3, 5}}, {{2, 3, 5}, {}},          {{2, 3, 5}, {1}},
      {{}, {2, 3}},           {{2, 3, 5}, {5}},         {{2, 3, 5}, {3, 1}},
      {{2, 1, 5}, {1, 3, 1}}, {{5}, {2, 3, 5}},         {{2, 3, 4, 5, 6}, {2, 1, 4, 1, 6}},
      {{4, 1}, {1, 4}},       {{1, 2, 1, 3}, {2, 1, 1}}};
  std::vector<Case> cases;
  for (OpKind kind : {OpKind::kAdd, OpKind::kSubtract, OpKind::kMultiply, OpKind::kDivide,
                      OpKind::kMaximum, OpKind::kMinimum, OpKind::kGreaterEqual}) {
    for (DataType type : {kF32, kS32}) {
      for (size_t i = 0; i < shapes.size(); ++i) {
        cases.push_back(
            {std::string(OpKindName(kind)) + "_" + std::string(DataTypeName(type)) + "_" +
                 std::to_string(i),
             [=](GraphBuilder& g) {
               const DataType out = kind == OpKind::kGreaterEqual ? kBoolean : type;
               g.AddOp(kind, "y",
                       {g.Input("a", type, shapes[i].first), g.Input("b", type, shapes[i].second)},
                       {out});
             }});
      }
    }
  }
  // Any mixture of types.
  for (OpKind kind : {OpKind::kAdd, OpKind::kSubtract, OpKind::kMultiply, OpKind::kDivide,
                      OpKind::kMaximum, OpKind::kMinimum}) {
    constexpr DataType kTypes[] = {kF32, kF16, kBF16, kS32};
    for (DataType a : kTypes) {
      for (DataType b : kTypes) {
        for (DataType out : kTypes) {
          std::string name(OpKindName(kind));
          for (DataType type : {a, b, out}) name += "_" + std::string(DataTypeName(type));
          cases.push_back(
              {name, [=](GraphBuilder& g) {
                 g.AddOp(kind, "y", {g.Input("a", a, {3, 5}), g.Input("b", b, {5})}, {out});
               }});
        }
      }
    }
  }
  return cases;
}

std::vector<Case> MatMulCases() {
  struct Shape {
    Dims a, b;
    bool transpose_a, transpose_b;
  };
  const std::vector<Shape> shapes = {
      {{3, 5}, {5, 4}, false, false},
      {{5, 3}, {4, 5}, true, true},
      {{2, 3, 7, 5}, {2, 3, 4, 5}, false, true},
      {{2, 3, 7, 5}, {5, 4}, false, false},
      {{2, 3, 5, 7}, {5, 4}, true, false},
      {{7, 5}, {2, 3, 5, 4}, false, false},
      {{2, 1, 7, 5}, {1, 3, 5, 4}, false, false},
      {{2, 2, 3, 7, 16}, {2, 2, 1, 33, 16}, false, true},
      {{2, 2, 1, 7, 16}, {2, 2, 3, 16, 9}, false, false},
      {{2, 1, 3, 1, 2, 4, 5}, {1, 2, 3, 2, 1, 5, 3}, false, false},
      {{1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 3, 4}, {1, 1, 2, 2, 1, 1, 1, 1, 1, 1, 4, 3}, false, false},
      {{5}, {5}, false, false},
      {{5}, {2, 5, 3}, false, false},
      {{2, 3, 5}, {5}, false, false},
      {{2, 3, 0}, {2, 0, 4}, false, false}};
  std::vector<Case> cases;
  for (size_t i = 0; i < shapes.size(); ++i) {
    cases.push_back(
        {"MatMul_" + std::to_string(i), [=](GraphBuilder& g) {
           g.MatMul(g.Input("a", kF32, shapes[i].a), g.Input("b", kF32, shapes[i].b),
                    {.transpose_a = shapes[i].transpose_a, .transpose_b = shapes[i].transpose_b});
         }});
  }
  for (const Dims& bias : {Dims{4}, Dims{1}, Dims{7, 1}, Dims{2, 1, 7, 4}}) {
    cases.push_back({"MatMul_bias_" + std::to_string(bias.size()) + std::to_string(bias[0]),
                     [=](GraphBuilder& g) {
                       g.AddOp(OpKind::kMatMul, "y",
                               {g.Input("a", kF32, {2, 3, 7, 5}), g.Input("b", kF32, {5, 4}),
                                g.Input("bias", kF32, bias)},
                               {kF32});
                     }});
  }
  for (const auto& [a, b] : {std::pair{kF32, kBF16}, {kF16, kF32}, {kBF16, kBF16}}) {
    cases.push_back(
        {"MatMul_" + std::string(DataTypeName(a)) + "_" + std::string(DataTypeName(b)),
         [a = a, b = b](GraphBuilder& g) {
           g.MatMul(g.Input("a", a, {2, 7, 5}), g.Input("b", b, {5, 4}), {.type = kF32});
         }});
  }
  return cases;
}

std::vector<Case> HadamardCases() {
  // Of blocks beyond 64, factors.
  const std::pair<Dims, int64_t> shapes[] = {{{3, 5, 8}, 8},    {{7}, 1},        {{2, 3, 96}, 32},
                                             {{64}, 64},        {{5, 256}, 128}, {{2, 3, 512}, 512},
                                             {{1, 8192}, 8192}, {{0, 16}, 4}};
  std::vector<Case> cases;
  for (const auto& [dims, block] : shapes) {
    for (const DataType type : {kF32, kF16, kBF16}) {
      cases.push_back({"Hadamard_" + std::string(DataTypeName(type)) + "_" + std::to_string(block) +
                           "_of_" + std::to_string(dims.back()),
                       [dims = dims, block = block, type](GraphBuilder& g) {
                         g.Hadamard(g.Input("x", type, dims), block);
                       }});
    }
  }
  cases.push_back({"Hadamard_of_padded_rows", [](GraphBuilder& g) {
                     g.Hadamard(g.Input("x", kF32, {2, 3, 8}, Dims{40, 11, 1}), 4);
                   }});
  return cases;
}

std::vector<Case> LineCases() {
  std::vector<Case> cases;
  for (const std::string mode : {"none", "inf_as_zero"}) {
    for (int64_t axis : {0, 1, -1}) {
      cases.push_back(
          {"SoftMax_" + mode + "_" + std::to_string(axis + 1), [=](GraphBuilder& g) {
             g.SoftMaxWithStats(g.Input("x", kF32, {4, 6, 37}), {.axis = axis, .mode = mode});
           }});
    }
  }
  for (int64_t axis : {0, 1, -1}) {
    for (const auto& [type, probs_type] :
         std::vector<std::pair<DataType, DataType>>{{kF32, kF32}, {kF32, kBF16}, {kF16, kF32}}) {
      cases.push_back(
          {"SoftMaxBackward_" + std::string(DataTypeName(type)) + "_" +
               std::string(DataTypeName(probs_type)) + "_" + std::to_string(axis + 1),
           [type = type, probs_type = probs_type, axis](GraphBuilder& g) {
             g.AddOp(OpKind::kSoftMaxBackward, "y",
                     {g.Input("dy", type, {4, 6, 37}), g.Input("p", probs_type, {4, 6, 37})},
                     {type}, {{Attr::kAxis, axis}});
           }});
    }
  }
  for (OpKind kind : {OpKind::kReduceSum, OpKind::kReduceMax, OpKind::kReduceMean}) {
    const std::vector<Ints> axes = {{0}, {-1}, {1, 3}, {0, 1, 2, 3}, {2}, {}};
    for (size_t i = 0; i < axes.size(); ++i) {
      cases.push_back(
          {std::string(OpKindName(kind)) + "_" + std::to_string(i), [=](GraphBuilder& g) {
             g.AddOp(kind, "y", {g.Input("x", kF32, {3, 4, 5, 17})}, {kF32},
                     {{Attr::kAxes, axes[i]}, {Attr::kKeepDims, i % 2 == 0}});
           }});
    }
  }
  return cases;
}

std::vector<Case> MovementCases() {
  return {
      {"Select",
       [](GraphBuilder& g) {
         g.Select(g.Input("c", kBoolean, {3, 1, 5}), g.Input("x", kF32, {2, 1, 4, 5}),
                  g.Input("y", kF32, {3, 1, 1}));
       }},
      {"Select_scalar_x",
       [](GraphBuilder& g) {
         g.Select(g.Input("c", kBoolean, {4, 5}), g.Input("x", kBF16, {1}),
                  g.Input("y", kBF16, {2, 4, 5}));
       }},
      {"GenIndex",
       [](GraphBuilder& g) {
         g.GenIndex(g.Input("x", kF16, {2, 3, 4}), -2);
       }},
      {"Causal",
       [](GraphBuilder& g) {
         g.CausalMask(g.Input("x", kF32, {2, 3, 4, 6}), g.Input("fill", kF32, {}));
       }},
      {"CausalBottomRight",
       [](GraphBuilder& g) {
         g.CausalMask(g.Input("x", kF32, {2, 3, 4, 6}), g.Input("fill", kF32, {1}),
                      g.Input("s", kS32, {}), g.Input("t", kS32, {1}));
       }},
      {"Reshape",
       [](GraphBuilder& g) {
         g.Reshape(g.Input("x", kU8, {2, 3, 4}), {4, -1});
       }},
      {"Transpose",
       [](GraphBuilder& g) {
         g.Transpose(g.Input("x", kF32, {2, 3, 4, 5}), {2, 0, 3, 1});
       }},
      {"Transpose_s32",
       [](GraphBuilder& g) {
         g.Transpose(g.Input("x", kS32, {2, 1, 4}), {2, 0, 1});
       }},
      {"Transpose_s4",
       [](GraphBuilder& g) {
         g.Transpose(g.Input("x", kS4, {3, 5}), {1, 0});
       }},
      {"Transpose_s64",
       [](GraphBuilder& g) {
         g.Transpose(g.Input("x", kS64, {3, 5}), {1, 0});
       }},
      {"Reorder",
       [](GraphBuilder& g) {
         g.Reorder(g.Input("x", kF32, {3, 5}), Dims{1, 4});
       }},
      {"TypeCast", [](GraphBuilder& g) { g.TypeCast(g.Input("x", kF32, {33}), kF16); }},
      {"Slice",
       [](GraphBuilder& g) {
         g.Slice(g.Input("x", kF32, {2, 7, 4}), 1, 2, 3);
       }},
      {"Slice_s4",
       [](GraphBuilder& g) {
         g.Slice(g.Input("x", kS4, {3, 5}), -1, 1, 3);
       }},
      {"Slice_s64_first",
       [](GraphBuilder& g) {
         g.Slice(g.Input("x", kS64, {3, 5}), 0, 0, 1);
       }},
      {"Slice_of_nothing",
       [](GraphBuilder& g) {
         g.Slice(g.Input("x", kF16, {3, 5}), 1, 5, 0);
       }},
      {"Concat",
       [](GraphBuilder& g) {
         g.Concat({g.Input("x", kF32, {2, 3, 4}), g.Input("y", kF32, {2, 0, 4}),
                   g.Input("z", kF32, {2, 5, 4})},
                  -2);
       }},
      {"Concat_u2",
       [](GraphBuilder& g) {
         g.Concat({g.Input("x", kU2, {3, 5}), g.Input("y", kU2, {3, 2})}, 1);
       }},
  };
}

// Layouts of an input: interleaved heads, padded and overlapping rows, transposed, broadcast.
std::vector<Case> LayoutCases() {
  std::vector<Case> cases;
  const std::vector<Dims> layouts = {{60, 5, 15, 1}, {80, 20, 6, 1}, {4, 8, 16, 100},
                                     {0, 20, 5, 1},  {60, 20, 5, 0}, {120, 40, 10, 2},
                                     {60, 20, 5, 1}};
  for (DataType type : {kF32, kF16, kBF16, kF8E4M3, kF8E5M2, kS8, kU8, kS4, kU4, kS2, kU2, kS32}) {
    for (size_t i = 0; i < layouts.size(); ++i) {
      cases.push_back({"Layout_" + std::string(DataTypeName(type)) + "_" + std::to_string(i),
                       [=](GraphBuilder& g) {
                         const Value x = g.Input("x", type, {2, 3, 4, 5}, layouts[i]);
                         g.Output("y", g.Transpose(x, {0, 2, 1, 3}), Dims{64, 16, 5, 1});
                       }});
    }
  }
  return cases;
}

std::vector<Case> QuantizationCases() {
  std::vector<Case> cases;
  for (DataType codes : {kS8, kU8, kS4, kU4, kS2, kU2, kF8E4M3, kF8E5M2}) {
    const std::string name(DataTypeName(codes));
    for (const Dims& group :
         {Dims{1, 1, 1, 4}, Dims{1, 1, 6, 1}, Dims{1, 1, 2, 3}, Dims{1, 3, 6, 12}}) {
      const Dims dims{2, 3, 6, 12};
      Dims groups = dims;
      for (size_t i = 0; i < 4; ++i) groups[i] /= group[i];
      for (DataType zps : {kUndef, kU8, kS32, kF16}) {
        cases.push_back(
            {"Groups_" + name + "_" + std::to_string(cases.size()), [=](GraphBuilder& g) {
               const Value x = g.Input("x", codes, dims, Dims{216, 72, 1, 6});
               const Value scales = g.Input("scales", kF16, groups);
               const GraphBuilder::DequantizeOptions options{.group_shape = group, .type = kF32};
               if (zps == kUndef) {
                 g.DynamicDequantize(x, scales, options);
               } else {
                 g.DynamicDequantize(x, scales, g.Input("zps", zps, groups), options);
               }
               const Value real = g.Input("real", kF32, dims);
               std::optional<Value> shift;
               if (zps != kUndef && (zps == kF16 || IsInteger(codes))) {
                 shift = g.Input("shift", zps, groups);
               }
               g.DynamicQuantize(real, scales, shift, {.group_shape = group, .type = codes});
             }});
      }
    }
    cases.push_back({"PerChannel_" + name, [=](GraphBuilder& g) {
                       g.DynamicDequantize(g.Input("x", codes, {2, 5, 3}),
                                           g.Input("scales", kF32, {5}), {.axis = 1, .type = kF32});
                     }});
    cases.push_back({"PerTensor_" + name, [=](GraphBuilder& g) {
                       g.DynamicDequantize(g.Input("x", codes, {2, 5, 3}),
                                           g.Input("scales", kF32, {1}), {.type = kF32});
                     }});
  }
  for (DataType codes : {kS8, kU8, kF8E4M3}) {
    cases.push_back(
        {"Static_" + std::string(DataTypeName(codes)), [=](GraphBuilder& g) {
           const Ints zps = codes == kU8 ? Ints{3, 100, 7} : Ints{};
           const Attributes attrs{{Attr::kQType, std::string("per_channel")},
                                  {Attr::kAxis, int64_t{1}},
                                  {Attr::kScales, Floats{0.1f, 0.013f, 2.f}},
                                  {Attr::kZps, zps}};
           g.AddOp(OpKind::kQuantize, "c", {g.Input("x", kF32, {4, 3, 50})}, {codes}, attrs);
           g.AddOp(OpKind::kDequantize, "y", {g.Input("d", codes, {4, 3, 50})}, {kF32}, attrs);
         }});
  }
  return cases;
}

std::string CaseName(const ::testing::TestParamInfo<Case>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Unary, ReferenceCase, ::testing::ValuesIn(UnaryCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(Binary, ReferenceCase, ::testing::ValuesIn(BinaryCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(MatMul, ReferenceCase, ::testing::ValuesIn(MatMulCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(Hadamard, ReferenceCase, ::testing::ValuesIn(HadamardCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(Lines, ReferenceCase, ::testing::ValuesIn(LineCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(Movement, ReferenceCase, ::testing::ValuesIn(MovementCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(Layout, ReferenceCase, ::testing::ValuesIn(LayoutCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(Quantization, ReferenceCase, ::testing::ValuesIn(QuantizationCases()),
                         CaseName);

}  // namespace
}  // namespace kvant::testing
