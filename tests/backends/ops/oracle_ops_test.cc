// Every op of the table against values worked out by hand.
#include <cmath>
#include <limits>
#include <set>

#include "gtest/gtest.h"
#include "kvant/tests/backends/ops/op_testing.h"

namespace kvant::testing {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");
// Results in f32 of inexact functions.
constexpr double kF32 = 1e-6;

using Ints = std::vector<int64_t>;
using Floats = std::vector<float>;

PortValues Of(DataType type, const Dims& dims, const std::vector<double>& values) {
  return {type, dims, values, {}};
}
PortValues F32(const Dims& dims, const std::vector<double>& values) {
  return Of(kvant::kF32, dims, values);
}

OpCase Unary(OpKind kind, const std::vector<double>& x, const std::vector<double>& y) {
  const Dims dims = {static_cast<int64_t>(x.size())};
  return {std::string(OpKindName(kind)), kind, {}, {F32(dims, x)}, {F32(dims, y)}, kF32};
}

// [2, 3] with [3]: rows use the same second operand.
OpCase Binary(OpKind kind, const std::vector<double>& y) {
  return {std::string(OpKindName(kind)),
          kind,
          {},
          {F32({2, 3}, {1, -2, 3, 4, 8, -6}), F32({3}, {2, 4, -3})},
          {F32({2, 3}, y)},
          kF32};
}

std::vector<OpCase> MatMulCases() {
  const PortValues a = F32({2, 3}, {1, 2, 3, 4, 5, 6});
  const PortValues b = F32({3, 2}, {1, 0, -1, 2, 0.5, 3});
  const std::vector<double> ab = {0.5, 13, 2, 28};
  return {
      {"plain", OpKind::kMatMul, {}, {a, b}, {F32({2, 2}, ab)}},
      {"transpose_a",
       OpKind::kMatMul,
       {{Attr::kTransposeA, true}},
       {F32({3, 2}, {1, 4, 2, 5, 3, 6}), b},
       {F32({2, 2}, ab)}},
      {"transpose_b",
       OpKind::kMatMul,
       {{Attr::kTransposeB, true}},
       {a, F32({2, 3}, {1, -1, 0.5, 0, 2, 3})},
       {F32({2, 2}, ab)}},
      {"bias", OpKind::kMatMul, {}, {a, b, F32({2}, {10, 20})}, {F32({2, 2}, {10.5, 33, 12, 48})}},
      // [2, 1, 1, 2] x [1, 3, 2, 1]: batch dims broadcast either way.
      {"batch_broadcast",
       OpKind::kMatMul,
       {},
       {F32({2, 1, 1, 2}, {1, 2, 3, 4}), F32({1, 3, 2, 1}, {1, 1, 0, 1, 2, -1})},
       {F32({2, 3, 1, 1}, {3, 2, 0, 7, 4, 2})}},
      {"rank_differs",
       OpKind::kMatMul,
       {},
       {F32({2, 1, 2}, {1, 2, 3, 4}), F32({2, 1}, {5, 7})},
       {F32({2, 1, 1}, {19, 43})}},
      {"f16_to_f32",
       OpKind::kMatMul,
       {},
       {Of(kF16, {1, 2}, {0.5, 2}), Of(kF16, {2, 1}, {3, 4})},
       {F32({1, 1}, {9.5})}},
  };
}

std::vector<OpCase> HadamardCases() {
  const double root = std::sqrt(2.0);
  return {
      {"block_of_4",
       OpKind::kHadamard,
       {{Attr::kBlock, int64_t{4}}},
       {F32({2, 4}, {1, 2, 3, 4, 0, 0, 2, -6})},
       {F32({2, 4}, {5, -1, -2, 0, -2, 4, 2, -4})}},
      {"block_of_2",
       OpKind::kHadamard,
       {{Attr::kBlock, int64_t{2}}},
       {F32({1, 4}, {3, 1, 5, -1})},
       {F32({1, 4}, {4 / root, 2 / root, 4 / root, 6 / root})},
       kF32},
      {"block_of_1",
       OpKind::kHadamard,
       {{Attr::kBlock, int64_t{1}}},
       {Of(kF16, {3}, {3, kNan, 5})},
       {Of(kF16, {3}, {3, kNan, 5})}},
      {"nan_and_infinity_stay_in_their_block",
       OpKind::kHadamard,
       {{Attr::kBlock, int64_t{2}}},
       {Of(kBF16, {6}, {kNan, 1, 0, 0, kInf, 1})},
       {Of(kBF16, {6}, {kNan, kNan, 0, 0, kInf, kInf})}},
  };
}

std::vector<OpCase> SoftMaxCases() {
  const double e1 = 1 / (1 + std::exp(-1.0)), e2 = std::exp(2.0) / (std::exp(2.0) + 1);
  const AttrValue zero = std::string("inf_as_zero");
  return {
      {"last_axis",
       OpKind::kSoftMax,
       {{Attr::kAxis, int64_t{-1}}},
       {F32({2, 2}, {5, 4, -1, 1})},
       {F32({2, 2}, {e1, 1 - e1, 1 - e2, e2}), F32({2, 1}, {5 - std::log(e1), 1 - std::log(e2)})},
       kF32},
      {"first_axis",
       OpKind::kSoftMax,
       {{Attr::kAxis, int64_t{0}}},
       {F32({2, 2}, {5, -1, 4, 1})},
       {F32({2, 2}, {e1, 1 - e2, 1 - e1, e2}), F32({1, 2}, {5 - std::log(e1), 1 - std::log(e2)})},
       kF32},
      {"default_axis_is_1",
       OpKind::kSoftMax,
       {},
       {F32({1, 2, 2}, {5, -1, 4, 1})},
       {F32({1, 2, 2}, {e1, 1 - e2, 1 - e1, e2})},
       kF32},
      {"masked_row_none",
       OpKind::kSoftMax,
       {{Attr::kAxis, int64_t{-1}}},
       {F32({2, 2}, {-kInf, -kInf, 1, 0})},
       {F32({2, 2}, {kNan, kNan, e1, 1 - e1})},
       kF32},
      {"masked_row_zero",
       OpKind::kSoftMax,
       {{Attr::kAxis, int64_t{-1}}, {Attr::kMode, zero}},
       {F32({2, 2}, {-kInf, -kInf, -kInf, 3})},
       {F32({2, 2}, {0, 0, 0, 1}), F32({2, 1}, {0, 3})}},
      {"nan_stays",
       OpKind::kSoftMax,
       {{Attr::kAxis, int64_t{-1}}, {Attr::kMode, zero}},
       {F32({1, 3}, {-kInf, kNan, 2})},
       {F32({1, 3}, {kNan, kNan, kNan})}},
      {"large_values",
       OpKind::kSoftMax,
       {{Attr::kAxis, int64_t{-1}}},
       {F32({1, 2}, {30000, 30000})},
       {F32({1, 2}, {0.5, 0.5}), F32({1, 1}, {30000 + std::log(2.0)})},
       kF32},
      // dst * (diff_dst - 2.5) in the first line, dst * (diff_dst - 1) in the second.
      {"backward",
       OpKind::kSoftMaxBackward,
       {{Attr::kAxis, int64_t{-1}}},
       {F32({2, 2}, {1, 3, -2, 4}), F32({2, 2}, {0.25, 0.75, 0.5, 0.5})},
       {F32({2, 2}, {-0.375, 0.375, -1.5, 1.5})}},
      {"backward_first_axis",
       OpKind::kSoftMaxBackward,
       {{Attr::kAxis, int64_t{0}}},
       {F32({2, 2}, {1, -2, 3, 4}), F32({2, 2}, {0.25, 0.5, 0.75, 0.5})},
       {F32({2, 2}, {-0.375, -1.5, 0.375, 1.5})}},
  };
}

std::vector<OpCase> BinaryCases() {
  std::vector<OpCase> cases = {
      Binary(OpKind::kAdd, {3, 2, 0, 6, 12, -9}),
      Binary(OpKind::kSubtract, {-1, -6, 6, 2, 4, -3}),
      Binary(OpKind::kMultiply, {2, -8, -9, 8, 32, 18}),
      Binary(OpKind::kDivide, {0.5, -0.5, -1, 2, 2, 2}),
      Binary(OpKind::kMaximum, {2, 4, 3, 4, 8, -3}),
      Binary(OpKind::kMinimum, {1, -2, -3, 2, 4, -6}),
  };
  OpCase ge = Binary(OpKind::kGreaterEqual, {0, 0, 1, 1, 1, 0});
  ge.outputs[0].type = kBoolean;
  cases.push_back(ge);
  cases.push_back({"both_broadcast",
                   OpKind::kSubtract,
                   {},
                   {F32({2, 1}, {10, 20}), F32({1, 3}, {1, 2, 3})},
                   {F32({2, 3}, {9, 8, 7, 19, 18, 17})}});
  cases.push_back({"scalar_left",
                   OpKind::kDivide,
                   {},
                   {F32({}, {12}), F32({2, 2}, {1, 2, 3, 4})},
                   {F32({2, 2}, {12, 6, 4, 3})}});
  cases.push_back({"select",
                   OpKind::kSelect,
                   {},
                   {Of(kBoolean, {1, 2}, {1, 0}), F32({2, 2}, {1, 2, 3, 4}), F32({}, {-kInf})},
                   {F32({2, 2}, {1, -kInf, 3, -kInf})}});
  cases.push_back({"select_scores_last",
                   OpKind::kSelect,
                   {},
                   {Of(kBoolean, {2, 1}, {1, 0}), F32({1}, {9}), F32({2, 2}, {1, 2, 3, 4})},
                   {F32({2, 2}, {9, 9, 3, 4})}});
  return cases;
}

std::vector<OpCase> UnaryCases() {
  return {
      Unary(OpKind::kExp, {0, 1, -kInf}, {1, std::exp(1.0), 0}),
      Unary(OpKind::kTanh, {0, 0.5, -100}, {0, 0.46211715726, -1}),
      Unary(OpKind::kReLU, {-1, 0, 2.5}, {0, 0, 2.5}),
      Unary(OpKind::kSigmoid, {0, 2, -2}, {0.5, 0.880797077978, 0.119202922022}),
      Unary(OpKind::kSqrt, {0, 2.25, 9}, {0, 1.5, 3}),
      Unary(OpKind::kSquare, {-3, 0.5, 2}, {9, 0.25, 4}),
      Unary(OpKind::kAbs, {-3, 0, 2}, {3, 0, 2}),
      Unary(OpKind::kReciprocal, {4, -0.5, 1}, {0.25, -2, 1}),
      Unary(OpKind::kLog, {1, 2, 0}, {0, 0.69314718056, -kInf}),
      Unary(OpKind::kGELU, {0, 1, -1}, {0, 0.841344746069, -0.158655253931}),
      {"by_tanh",
       OpKind::kGELU,
       {{Attr::kMode, std::string("gelu_tanh")}},
       {F32({3}, {0, 1, -1})},
       {F32({3}, {0, 0.841191990608, -0.158808009392})},
       kF32},
      {"typecast",
       OpKind::kTypeCast,
       {},
       {F32({3}, {1.0009765625, 3.14159274, -70000})},
       {Of(kF16, {3}, {1.0009765625, 3.140625, -kInf})}},
      {"reorder", OpKind::kReorder, {}, {F32({2, 2}, {1, 2, 3, 4})}, {F32({2, 2}, {1, 2, 3, 4})}},
  };
}

std::vector<OpCase> ShapeCases() {
  const std::vector<double> six = {1, 2, 3, 4, 5, 6};
  return {
      {"genindex_rows",
       OpKind::kGenIndex,
       {{Attr::kAxis, int64_t{-2}}},
       {F32({2, 3, 2}, std::vector<double>(12, 7))},
       {Of(kS32, {2, 3, 2}, {0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2})}},
      {"genindex_columns",
       OpKind::kGenIndex,
       {{Attr::kAxis, int64_t{1}}},
       {F32({2, 3}, six)},
       {Of(kS32, {2, 3}, {0, 1, 2, 0, 1, 2})}},
      {"sum",
       OpKind::kReduceSum,
       {{Attr::kAxes, Ints{1}}},
       {F32({2, 3}, six)},
       {F32({2}, {6, 15})}},
      {"sum_nothing",
       OpKind::kReduceSum,
       {{Attr::kAxes, Ints{}}},
       {F32({2, 3}, six)},
       {F32({2, 3}, six)}},
      {"sum_keep",
       OpKind::kReduceSum,
       {{Attr::kAxes, Ints{-2}}, {Attr::kKeepDims, true}},
       {F32({2, 3}, six)},
       {F32({1, 3}, {5, 7, 9})}},
      {"sum_all",
       OpKind::kReduceSum,
       {{Attr::kAxes, Ints{0, 1}}},
       {F32({2, 3}, six)},
       {F32({}, {21})}},
      {"max",
       OpKind::kReduceMax,
       {{Attr::kAxes, Ints{0}}},
       {F32({2, 3}, {-1, -5, kNan, -2, -4, 1})},
       {F32({3}, {-1, -4, kNan})}},
      {"mean",
       OpKind::kReduceMean,
       {{Attr::kAxes, Ints{0, 2}}},
       {F32({2, 2, 2}, {1, 2, 3, 4, 5, 6, 7, 8})},
       {F32({2}, {3.5, 5.5})}},
      {"reshape",
       OpKind::kStaticReshape,
       {{Attr::kShape, Ints{0, 3, -1}}, {Attr::kSpecialZero, true}},
       {F32({1, 2, 3}, six)},
       {F32({1, 3, 2}, six)}},
      {"transpose",
       OpKind::kStaticTranspose,
       {{Attr::kOrder, Ints{2, 0, 1}}},
       {F32({1, 2, 3}, six)},
       {F32({3, 1, 2}, {1, 4, 2, 5, 3, 6})}},
      {"transpose_u4",
       OpKind::kStaticTranspose,
       {{Attr::kOrder, Ints{-1, 0}}},
       {Of(kU4, {2, 3}, six)},
       {Of(kU4, {3, 2}, {1, 4, 2, 5, 3, 6})}},
      {"slice",
       OpKind::kSlice,
       {{Attr::kAxis, int64_t{-2}}, {Attr::kBegin, int64_t{1}}, {Attr::kSize, int64_t{2}}},
       {F32({2, 3, 2}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12})},
       {F32({2, 2, 2}, {3, 4, 5, 6, 9, 10, 11, 12})}},
      {"slice_u4_from_the_start",
       OpKind::kSlice,
       {{Attr::kAxis, int64_t{1}}, {Attr::kSize, int64_t{1}}},
       {Of(kU4, {2, 3}, six)},
       {Of(kU4, {2, 1}, {1, 4})}},
      {"concat",
       OpKind::kConcat,
       {{Attr::kAxis, int64_t{-2}}},
       {F32({2, 1, 2}, {1, 2, 3, 4}), F32({2, 0, 2}, {}),
        F32({2, 2, 2}, {5, 6, 7, 8, 9, 10, 11, 12})},
       {F32({2, 3, 2}, {1, 2, 5, 6, 7, 8, 3, 4, 9, 10, 11, 12})}},
  };
}

std::vector<OpCase> StaticQuantizationCases() {
  const AttrValue per_channel = std::string("per_channel");
  return {
      {"quantize",
       OpKind::kQuantize,
       {{Attr::kScales, Floats{0.5f}}, {Attr::kZps, Ints{3}}},
       // Ties go to even before the zero point is added: 0.5 -> 0, 1.5 -> 2, 2.5 -> 2.
       {F32({6}, {0.25, 0.75, 1.25, -1, 1000, -1000})},
       {Of(kU8, {6}, {3, 5, 5, 1, 255, 0})}},
      {"quantize_f8",
       OpKind::kQuantize,
       {{Attr::kScales, Floats{2.f}}},
       {F32({3}, {2, 37, -6.1})},
       {Of(kF8E4M3, {3}, {1, 18, -3})}},
      {"quantize_channel",
       OpKind::kQuantize,
       {{Attr::kScales, Floats{1, 2}}, {Attr::kQType, per_channel}, {Attr::kAxis, int64_t{0}}},
       {F32({2, 2}, {4, -200, 4, -200})},
       {Of(kS8, {2, 2}, {4, -128, 2, -100})}},
      {"dequantize",
       OpKind::kDequantize,
       {{Attr::kScales, Floats{0.25f}}, {Attr::kZps, Ints{-2}}},
       {Of(kS8, {3}, {-128, 0, 127})},
       {F32({3}, {-31.5, 0.5, 32.25})}},
      {"dequantize_channel",
       OpKind::kDequantize,
       {{Attr::kScales, Floats{1, 0.5}},
        {Attr::kZps, Ints{10, 20}},
        {Attr::kQType, per_channel},
        {Attr::kAxis, int64_t{-1}}},
       {Of(kU8, {2, 2}, {10, 20, 30, 40})},
       {F32({2, 2}, {0, 0, 20, 10})}},
  };
}

std::vector<OpCase> DynamicQuantizationCases() {
  const AttrValue per_group = std::string("per_group"), per_channel = std::string("per_channel");
  const Attributes pairs = {{Attr::kQType, per_group}, {Attr::kGroupShape, Ints{1, 2}}};
  const PortValues codes = Of(kU4, {2, 4}, {0, 1, 2, 3, 15, 14, 13, 12});
  const PortValues scales = Of(kF16, {2, 2}, {1, 2, 0.5, 4});
  return {
      {"group_integer_zp",
       OpKind::kDynamicDequantize,
       pairs,
       {codes, scales, Of(kU4, {2, 2}, {1, 2, 15, 8})},
       {Of(kF16, {2, 4}, {-1, 0, 0, 2, 0, -0.5, 20, 16})}},
      // Zero points in real units: x * scale - zp.
      {"group_float_zp",
       OpKind::kDynamicDequantize,
       pairs,
       {codes, scales, Of(kF16, {2, 2}, {1, 2, 15, 8})},
       {Of(kF16, {2, 4}, {-1, 0, 2, 4, -7.5, -8, 44, 40})}},
      {"group_along_rows",
       OpKind::kDynamicDequantize,
       {{Attr::kQType, per_group}, {Attr::kGroupShape, Ints{2, 1}}},
       {Of(kS2, {2, 4}, {-2, -1, 0, 1, 1, 0, -1, -2}), F32({1, 4}, {1, 2, 3, 4})},
       {F32({2, 4}, {-2, -2, 0, 4, 1, 0, -3, -8})}},
      {"tensor",
       OpKind::kDynamicDequantize,
       {},
       {Of(kS4, {3}, {-8, 0, 7}), F32({1}, {0.5}), Of(kS32, {}, {-1})},
       {F32({3}, {-3.5, 0.5, 4})}},
      {"channel",
       OpKind::kDynamicDequantize,
       {{Attr::kQType, per_channel}, {Attr::kAxis, int64_t{0}}},
       {Of(kF8E5M2, {2, 2}, {1, 2, -4, 0.5}), F32({2}, {3, 10})},
       {F32({2, 2}, {3, 6, -40, 5})}},
      {"channel_one_zp",
       OpKind::kDynamicDequantize,
       {{Attr::kQType, per_channel}, {Attr::kAxis, int64_t{1}}},
       {Of(kS8, {2, 2}, {1, 2, -4, 5}), F32({2}, {3, 10}), Of(kS8, {1}, {2})},
       {F32({2, 2}, {-3, 0, -18, 30})}},
      {"quantize_group_integer_zp",
       OpKind::kDynamicQuantize,
       pairs,
       {F32({2, 4}, {-1, 0, 0, 2, 0, -0.5, 20, 100}), scales, Of(kU4, {2, 2}, {1, 2, 15, 8})},
       {Of(kU4, {2, 4}, {0, 1, 2, 3, 15, 14, 13, 15})}},
      {"quantize_group_float_zp",
       OpKind::kDynamicQuantize,
       pairs,
       {F32({2, 4}, {-1, 0, 2, 4, -7.5, -8, 44, 40}), scales, F32({2, 2}, {1, 2, 15, 8})},
       {Of(kU4, {2, 4}, {0, 1, 2, 3, 15, 14, 13, 12})}},
      {"quantize_tensor_ties",
       OpKind::kDynamicQuantize,
       {},
       {F32({5}, {0.5, 1.5, -0.5, -2.5, 9}), F32({1}, {1}), Of(kS8, {1}, {1})},
       {Of(kS4, {5}, {1, 3, 1, -1, 7})}},
  };
}

// What is not written is as op_testing's Pack leaves it: bytes of 0xA5.
std::vector<OpCase> AppendCases() {
  const AttrValue per_group = std::string("per_group");
  const double untouched = F16ToF32(0xa5a5);
  return {
      // Row 0 at token 1, row 1 left out, row 2 at token 0; capacity 3.
      {"conversion",
       OpKind::kAppend,
       {},
       {F32({3, 1, 2, 1}, {1.0009765625, 2, 3, 4, 5, 6}), Of(kS32, {3}, {1, -1, 0})},
       {Of(kF16, {3, 1, 3, 1},
           {untouched, 1.0009765625, 2, untouched, untouched, untouched, 5, 6, untouched})}},
      // Codes of 4 bits in rows of 3: 0xa and 0x5 take turns where nothing is written.
      {"groups_along_channels",
       OpKind::kAppend,
       {{Attr::kQType, per_group}, {Attr::kGroupShape, Ints{1, 1, 3}}},
       {F32({1, 1, 3}, {7, -14, 3.5}), Of(kS32, {1}, {1})},
       {Of(kS4, {1, 3, 3}, {5, -6, 5, 4, -7, 2, 5, -6, 5}),
        Of(kF16, {1, 3, 1}, {untouched, 2, untouched})}},
      {"groups_along_tokens",
       OpKind::kAppend,
       {{Attr::kQType, per_group}, {Attr::kGroupShape, Ints{1, 2, 1}}},
       {F32({1, 2, 2}, {0, 3, 6, 0}), Of(kS32, {1}, {2})},
       {Of(kU2, {1, 4, 2}, {1, 1, 2, 2, 0, 3, 3, 0}),
        Of(kF16, {1, 2, 2}, {untouched, untouched, 2, 1}),
        Of(kF16, {1, 2, 2}, {untouched, untouched, 0, 0})}},
      // Scales that exist: by channel for all tokens, so that any position goes.
      {"given_by_channel",
       OpKind::kAppend,
       {{Attr::kQType, per_group}, {Attr::kGroupShape, Ints{1, 4, 1}}},
       {F32({1, 1, 2}, {6, 6}), Of(kS32, {1}, {3}), F32({1, 1, 2}, {1, 2}),
        Of(kS8, {1, 1, 2}, {1, -1})},
       {Of(kS8, {1, 4, 2}, {-91, -91, -91, -91, -91, -91, 7, 2})}},
      {"given_by_groups_of_tokens",
       OpKind::kAppend,
       {{Attr::kQType, per_group}, {Attr::kGroupShape, Ints{1, 2, 1}}},
       {F32({2, 2, 1}, {6, 8, 6, 8}), Of(kS32, {2}, {2, 0}), F32({2, 2, 1}, {1, 2, 0.5, 4})},
       {Of(kS8, {2, 4, 1}, {-91, -91, 3, 4, 12, 16, -91, -91})}},
      {"one_position_for_all_rows",
       OpKind::kAppend,
       {{Attr::kTokenAxis, int64_t{1}}},
       {F32({2, 1}, {1, 2}), Of(kS32, {1}, {1})},
       {Of(kBF16, {2, 2}, {BF16ToF32(0xa5a5), 1, BF16ToF32(0xa5a5), 2})}},
  };
}

std::vector<OpCase> DropoutCases() {
  return {
      {"keep_all",
       OpKind::kDropout,
       {},
       {F32({4}, {1, 2, 3, 4}), Of(kS64, {1}, {7}), Of(kS64, {1}, {0}), F32({1}, {0})},
       {F32({4}, {1, 2, 3, 4}), Of(kU8, {4}, {1, 1, 1, 1})}},
      // Philox4x32-10 of counter 0 and key 0 is 6627e8d5 e169c58d bc57ac4c 9b00dbd8 (the known
      // answer of its authors): of 2^32, 0.399, 0.881, 0.736 and 0.606.
      {"known_bits",
       OpKind::kDropout,
       {},
       {F32({4}, {1, 2, 3, 4}), Of(kS64, {1}, {0}), Of(kS64, {1}, {0}), F32({1}, {0.5})},
       {F32({4}, {0, 4, 6, 8}), Of(kU8, {4}, {0, 1, 1, 1})}},
      {"known_bits_s32_seed",
       OpKind::kDropout,
       {},
       {F32({2, 2}, {1, 2, 3, 4}), Of(kS32, {}, {0}), Of(kS32, {}, {0}), F32({}, {0.75})},
       {F32({2, 2}, {0, 8, 0, 0})}},
  };
}

std::vector<OpCase> AllCases() {
  std::vector<OpCase> all;
  for (auto& cases :
       {MatMulCases(), HadamardCases(), SoftMaxCases(), BinaryCases(), UnaryCases(), ShapeCases(),
        StaticQuantizationCases(), DynamicQuantizationCases(), AppendCases(), DropoutCases()}) {
    all.insert(all.end(), cases.begin(), cases.end());
  }
  return all;
}

class OracleOpTest : public ::testing::TestWithParam<OpCase> {};

TEST_P(OracleOpTest, GivesWhatIsWorkedOutByHand) { ExpectOpCase(GetParam(), "oracle"); }

INSTANTIATE_TEST_SUITE_P(All, OracleOpTest, ::testing::ValuesIn(AllCases()),
                         [](const ::testing::TestParamInfo<OpCase>& info) {
                           return std::string(OpKindName(info.param.kind)) + "_" + info.param.name;
                         });

// ScaledDotProductAttention, AppendPages, MergeAttention and what loads have tests of their own;
// End computes nothing, and nothing runs Wildcard.
TEST(OracleOpsTest, EveryOpHasACase) {
  std::set<OpKind> covered = {OpKind::kScaledDotProductAttention,
                              OpKind::kAppendPages,
                              OpKind::kMergeAttention,
                              OpKind::kLoadTokens,
                              OpKind::kLoadPages,
                              OpKind::kLoadRanges,
                              OpKind::kEnd,
                              OpKind::kWildcard};
  for (const OpCase& test : AllCases()) covered.insert(test.kind);
  for (const OpKind kind : kAllOpKinds) {
    EXPECT_EQ(covered.count(kind), 1u) << OpKindName(kind);
  }
}

}  // namespace
}  // namespace kvant::testing
