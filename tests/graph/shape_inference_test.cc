#include "kvant/graph/shape_inference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "absl/strings/str_cat.h"
#include "kvant/graph/op_shapes.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using OptionalDims = std::optional<Dims>;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 2;

LogicalTensor Tensor(TensorId id, OptionalDims dims, DataType type = kF32) {
  LogicalTensor tensor;
  tensor.id = id;
  tensor.type = type;
  tensor.dims = std::move(dims);
  return tensor;
}

// One op on inputs of these dims: tensors 0, 1, ... in port order.
struct Case {
  OpKind kind;
  std::vector<OptionalDims> inputs;
  Attributes attrs = {};
  size_t outputs = 1;

  absl::Status Run(std::vector<OptionalDims>& results) const {
    Op op;
    op.id = 2;
    op.kind = kind;
    op.name = "x";
    op.attrs = attrs;
    std::vector<LogicalTensor> tensors;
    for (size_t i = 0; i < inputs.size(); ++i) {
      op.inputs.push_back(i);
      tensors.push_back(Tensor(i, inputs[i]));
    }
    ShapeContext context;
    for (const LogicalTensor& tensor : tensors) context.inputs.push_back(&tensor);
    context.outputs.resize(outputs);
    KVANT_RETURN_IF_ERROR(ShapeRuleOf(kind)(op, context));
    for (size_t i = 0; i < outputs; ++i) {
      KVANT_RETURN_IF_ERROR(MergeOutput(op, Tensor(100 + i, std::nullopt), context.outputs[i]));
      results.push_back(context.outputs[i]);
    }
    return absl::OkStatus();
  }
};

void ExpectDims(const Case& test, const std::vector<OptionalDims>& expected) {
  SCOPED_TRACE(std::string(OpKindName(test.kind)));
  std::vector<OptionalDims> results;
  const absl::Status status = test.Run(results);
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(results.size(), expected.size());
  for (size_t i = 0; i < results.size(); ++i) {
    EXPECT_EQ(results[i], expected[i])
        << "output " << i << " is " << (results[i] ? DimsToString(*results[i]) : "unknown");
  }
}

void ExpectDims(const Case& test, OptionalDims expected) {
  ExpectDims(test, std::vector<OptionalDims>{std::move(expected)});
}

void ExpectError(const Case& test, ErrorKind kind, const std::string& part) {
  SCOPED_TRACE(std::string(OpKindName(test.kind)));
  std::vector<OptionalDims> results;
  const absl::Status status = test.Run(results);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(ErrorKindOf(status), kind) << status;
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("'x' (id 2): "), HasSubstr(part)));
}

constexpr int64_t kAny = kUnknownDim;
const OptionalDims kNoRank = std::nullopt;
// Copied, because GCC 12 warns of moving an empty inlined vector.
const Dims kScalar;
const ErrorKind kShapeError = ErrorKind::kInvalidShape;
const ErrorKind kArgumentError = ErrorKind::kInvalidArguments;

using Ints = std::vector<int64_t>;

TEST(ShapeRules, MatMul) {
  const auto with = [](bool a, bool b) {
    return Attributes{{Attr::kTransposeA, a}, {Attr::kTransposeB, b}};
  };
  ExpectDims({OpKind::kMatMul, {Dims{2, 3, 5, 7}, Dims{2, 3, 7, 11}}}, Dims{2, 3, 5, 11});
  ExpectDims({OpKind::kMatMul, {Dims{2, 3, 7, 5}, Dims{2, 3, 7, 11}}, with(true, false)},
             Dims{2, 3, 5, 11});
  ExpectDims({OpKind::kMatMul, {Dims{2, 3, 5, 7}, Dims{2, 3, 11, 7}}, with(false, true)},
             Dims{2, 3, 5, 11});
  ExpectDims({OpKind::kMatMul, {Dims{7, 5}, Dims{11, 7}}, with(true, true)}, Dims{5, 11});
  // Grouped-query attention: the ratio broadcasts.
  ExpectDims({OpKind::kMatMul, {Dims{2, 3, 4, 5, 7}, Dims{2, 3, 1, 7, 11}}}, Dims{2, 3, 4, 5, 11});
  ExpectDims({OpKind::kMatMul, {Dims{5, 7}, Dims{3, 7, 11}}}, Dims{3, 5, 11});
  ExpectDims({OpKind::kMatMul, {Dims{7}, Dims{3, 7, 11}}}, Dims{3, 11});
  ExpectDims({OpKind::kMatMul, {Dims{3, 5, 7}, Dims{7}}}, Dims{3, 5});
  ExpectDims({OpKind::kMatMul, {Dims{7}, Dims{7}}}, kScalar);
  ExpectDims({OpKind::kMatMul, {Dims{5, 7}, Dims{7, 11}, Dims{11}}}, Dims{5, 11});
  ExpectDims({OpKind::kMatMul, {Dims{2, 0, 7}, Dims{2, 7, 11}}}, Dims{2, 0, 11});
}

TEST(ShapeRules, MatMulErrorsNameTensorsAndNumbers) {
  ExpectError({OpKind::kMatMul, {Dims{1, 8, 1, 128}, Dims{1, 8, 64, 32}}}, kShapeError,
              "MatMul 'x' (id 2): inner dimensions differ: 128 (tensor 0, dim 3) vs 64 (tensor 1, "
              "dim 2)");
  ExpectError({OpKind::kMatMul, {Dims{128, 4}, Dims{32, 64}}, {{Attr::kTransposeB, true}}},
              kShapeError, "4 (tensor 0, dim 1) vs 64 (tensor 1, dim 1)");
  ExpectError({OpKind::kMatMul, {Dims{4, 3, 5, 7}, Dims{4, 2, 7, 5}}}, kShapeError,
              "conflict in dim 1");
  ExpectError({OpKind::kMatMul, {kScalar, Dims{7}}}, kShapeError, "a scalar cannot");
  ExpectError({OpKind::kMatMul, {Dims{5, 7}, Dims{7, 11}, Dims{5}}}, kShapeError,
              "tensor 2 [5] does not broadcast onto [5,11]");
}

TEST(ShapeRules, UnknownPartsStayUnknown) {
  ExpectDims({OpKind::kMatMul, {kNoRank, Dims{7, 11}}}, kNoRank);
  ExpectDims({OpKind::kMatMul, {Dims{kAny, 8, kAny, 128}, Dims{kAny, 8, 128, kAny}}},
             Dims{kAny, 8, kAny, kAny});
  ExpectDims({OpKind::kMatMul, {Dims{2, kAny}, Dims{7, 3}}}, Dims{2, 3});
  ExpectDims({OpKind::kAdd, {Dims{2, kAny, 1, kAny}, Dims{4, kAny, 1}}}, Dims{2, 4, kAny, kAny});
  ExpectDims({OpKind::kAdd, {kNoRank, Dims{3}}}, kNoRank);
  ExpectDims({OpKind::kSoftMax, {Dims{kAny, 5}}, {{Attr::kAxis, int64_t{-1}}}, 2},
             {Dims{kAny, 5}, Dims{kAny, 1}});
  ExpectDims({OpKind::kTanh, {kNoRank}}, kNoRank);
  ExpectDims({OpKind::kStaticReshape, {Dims{kAny, 6}}, {{Attr::kShape, Ints{-1, 3}}}},
             Dims{kAny, 3});
  ExpectDims({OpKind::kStaticReshape, {kNoRank}, {{Attr::kShape, Ints{4, 3}}}}, Dims{4, 3});
  ExpectDims({OpKind::kConcat, {Dims{2, 3}, Dims{2, kAny}}, {{Attr::kAxis, int64_t{1}}}},
             Dims{2, kAny});
}

TEST(ShapeRules, SoftMax) {
  ExpectDims({OpKind::kSoftMax, {Dims{2, 3, 5}}, {{Attr::kAxis, int64_t{-1}}}, 2},
             {Dims{2, 3, 5}, Dims{2, 3, 1}});
  ExpectDims({OpKind::kSoftMax, {Dims{2, 3, 5}}, {}, 2}, {Dims{2, 3, 5}, Dims{2, 1, 5}});
  ExpectError({OpKind::kSoftMax, {Dims{2, 3}}, {{Attr::kAxis, int64_t{2}}}}, kShapeError,
              "axis 2 is outside the rank 2 of tensor 0 [2,3]");
  ExpectError({OpKind::kSoftMax, {Dims{2, 3}}, {{Attr::kAxis, int64_t{-3}}}}, kShapeError,
              "axis -3");
  ExpectError({OpKind::kSoftMax, {kScalar}, {{Attr::kAxis, int64_t{0}}}}, kShapeError, "axis 0");
}

TEST(ShapeRules, SoftMaxBackward) {
  ExpectDims({OpKind::kSoftMaxBackward, {Dims{2, 3, 5}, Dims{2, 3, 5}}, {}}, Dims{2, 3, 5});
  ExpectDims({OpKind::kSoftMaxBackward, {Dims{2, 3, 5}, kNoRank}, {}}, kNoRank);
  ExpectError({OpKind::kSoftMaxBackward, {Dims{2, 3, 5}, Dims{2, 3, 1}}, {}}, kShapeError,
              "tensor 0 [2,3,5], and dst, tensor 1 [2,3,1], differ");
  ExpectError({OpKind::kSoftMaxBackward, {Dims{2}, Dims{2}}, {}}, kShapeError, "axis 1");
}

TEST(ShapeRules, BinaryAndSelect) {
  const Attributes none = {{Attr::kAutoBroadcast, std::string("none")}};
  ExpectDims({OpKind::kAdd, {Dims{2, 1, 5}, Dims{3, 1}}}, Dims{2, 3, 5});
  ExpectDims({OpKind::kAdd, {kScalar, Dims{2, 3}}}, Dims{2, 3});
  ExpectDims({OpKind::kDivide, {Dims{0, 3}, Dims{1}}}, Dims{0, 3});
  ExpectDims({OpKind::kGreaterEqual, {Dims{2, 3}, Dims{2, 3}}, none}, Dims{2, 3});
  ExpectError({OpKind::kAdd, {Dims{2, 4, 5}, Dims{3, 1}}}, kShapeError,
              "tensor 0 [2,4,5] and tensor 1 [3,1] do not broadcast: they conflict in dim 1");
  ExpectError({OpKind::kMultiply, {Dims{2, 0}, Dims{2, 3}}}, kShapeError, "do not broadcast");
  ExpectError({OpKind::kAdd, {Dims{2, 3}, Dims{1, 3}}, none}, kShapeError,
              "auto_broadcast is none");
  ExpectError({OpKind::kAdd, {Dims{1, 3}, Dims{3}}, none}, kShapeError, "auto_broadcast is none");
  ExpectDims({OpKind::kSelect, {Dims{4, 5}, Dims{2, 3, 4, 5}, kScalar}}, Dims{2, 3, 4, 5});
  ExpectDims({OpKind::kSelect, {Dims{1, 5}, kScalar, Dims{3, 4, 5}}}, Dims{3, 4, 5});
  ExpectError({OpKind::kSelect, {Dims{2, 3}, Dims{3}, kScalar}}, kShapeError,
              "tensor 0 [2,3] does not broadcast onto [3]");
  ExpectError({OpKind::kSelect, {Dims{3}, Dims{2, 3}, Dims{2, 3}}, none}, kShapeError,
              "another rank");
}

TEST(ShapeRules, SameShapeChecksAxisAndScalars) {
  ExpectDims({OpKind::kGenIndex, {Dims{2, 3}}, {{Attr::kAxis, int64_t{-2}}}}, Dims{2, 3});
  ExpectError({OpKind::kGenIndex, {Dims{2, 3}}, {{Attr::kAxis, int64_t{2}}}}, kShapeError,
              "axis 2");
  ExpectDims({OpKind::kDropout, {Dims{2, 3}, kScalar, Dims{1}, Dims{1, 1}}, {}, 2},
             {Dims{2, 3}, Dims{2, 3}});
  ExpectError({OpKind::kDropout, {Dims{2, 3}, kScalar, Dims{2}, kScalar}}, kShapeError,
              "input 2 must be a scalar, but is tensor 2 [2]");
}

TEST(ShapeRules, Reduce) {
  const auto over = [](Ints axes, bool keep) {
    return Attributes{{Attr::kAxes, std::move(axes)}, {Attr::kKeepDims, keep}};
  };
  ExpectDims({OpKind::kReduceSum, {Dims{2, 3, 5}}, over({-1, 0}, false)}, Dims{3});
  ExpectDims({OpKind::kReduceMax, {Dims{2, 3, 5}}, over({1}, true)}, Dims{2, 1, 5});
  ExpectError({OpKind::kReduceMean, {Dims{2, 3, 5}}, over({1, -2}, false)}, kShapeError,
              "axis -2 occurs twice");
  ExpectError({OpKind::kReduceMean, {Dims{2, 3, 5}}, over({3}, false)}, kShapeError, "axis 3");
}

TEST(ShapeRules, Reshape) {
  const auto to = [](Ints shape, bool special_zero = false) {
    return Attributes{{Attr::kShape, std::move(shape)}, {Attr::kSpecialZero, special_zero}};
  };
  ExpectDims({OpKind::kStaticReshape, {Dims{2, 6, 5}}, to({2, 2, 3, 5})}, Dims{2, 2, 3, 5});
  ExpectDims({OpKind::kStaticReshape, {Dims{2, 6, 5}}, to({-1, 15})}, Dims{4, 15});
  ExpectDims({OpKind::kStaticReshape, {Dims{2, 6, 5}}, to({0, -1}, true)}, Dims{2, 30});
  ExpectDims({OpKind::kStaticReshape, {Dims{2, 0, 5}}, to({0, 7})}, Dims{0, 7});
  ExpectDims({OpKind::kStaticReshape, {Dims{1}}, to({})}, kScalar);
  ExpectError({OpKind::kStaticReshape, {Dims{2, 6, 5}}, to({7, -1})}, kShapeError,
              "tensor 0 [2,6,5] does not reshape to [7,-1]");
  ExpectError({OpKind::kStaticReshape, {Dims{2, 6}}, to({3, 5})}, kShapeError, "does not reshape");
  ExpectError({OpKind::kStaticReshape, {Dims{2, 6}}, to({-1, -1})}, kShapeError, "more than one");
  ExpectError({OpKind::kStaticReshape, {Dims{2, 6}}, to({-2, 6})}, kShapeError, "negative dim");
  ExpectError({OpKind::kStaticReshape, {Dims{2, 0}}, to({0, -1})}, kShapeError, "does not reshape");
  ExpectError({OpKind::kStaticReshape, {Dims{12}}, to({12, 0}, true)}, kShapeError,
              "shape copies dim 1, but tensor 0 [12] has none");
  ExpectError({OpKind::kStaticReshape, {Dims{12}}, to({kHuge, kHuge, -1})}, kShapeError,
              "does not reshape");
  ExpectError({OpKind::kStaticReshape, {kNoRank}, to(Ints(13, 1))}, kShapeError, "its rank 12");
}

TEST(ShapeRules, TransposeAndConcat) {
  const auto by = [](Ints order) { return Attributes{{Attr::kOrder, std::move(order)}}; };
  ExpectDims({OpKind::kStaticTranspose, {Dims{2, 3, 5, 7}}, by({0, 2, 1, -1})}, Dims{2, 5, 3, 7});
  ExpectError({OpKind::kStaticTranspose, {Dims{2, 3}}, by({0, 0})}, kShapeError,
              "order [0,0] does not permute");
  ExpectError({OpKind::kStaticTranspose, {Dims{2, 3}}, by({0, -2})}, kShapeError, "permute");
  ExpectError({OpKind::kStaticTranspose, {Dims{2, 3}}, by({0})}, kShapeError, "permute");
  ExpectError({OpKind::kStaticTranspose, {Dims{2, 3}}, by({0, 2})}, kShapeError, "axis 2");

  const Attributes along = {{Attr::kAxis, int64_t{-2}}};
  ExpectDims({OpKind::kConcat, {Dims{2, 3, 5}, Dims{2, 4, 5}, Dims{2, 0, 5}}, along},
             Dims{2, 7, 5});
  ExpectError({OpKind::kConcat, {Dims{2, 3, 5}, Dims{2, 4, 6}}, along}, kShapeError,
              "tensor 1 [2,4,6] does not continue tensor 0 [2,3,5] along dim 1");
  ExpectError({OpKind::kConcat, {Dims{2, 3, 5}, Dims{3, 5}}, along}, kShapeError, "continue");
  ExpectError({OpKind::kConcat, {Dims{1, kHuge, 1}, Dims{1, kHuge, 1}, Dims{1, kHuge, 1}}, along},
              kShapeError, "overflows");
}

TEST(ShapeRules, Slice) {
  const auto part = [](int64_t axis, int64_t begin, int64_t size) {
    return Attributes{{Attr::kAxis, axis}, {Attr::kBegin, begin}, {Attr::kSize, size}};
  };
  ExpectDims({OpKind::kSlice, {Dims{2, 3, 5}}, part(-1, 1, 4)}, Dims{2, 3, 4});
  ExpectDims({OpKind::kSlice, {Dims{2, 3, 5}}, part(0, 2, 0)}, Dims{0, 3, 5});
  ExpectDims({OpKind::kSlice, {Dims{2, kUnknownDim, 5}}, part(1, 4, 4)}, Dims{2, 4, 5});
  ExpectError({OpKind::kSlice, {Dims{2, 3, 5}}, part(-1, 2, 4)}, kShapeError,
              "elements 2 and on, 4 of them, of axis 2 are not in tensor 0 [2,3,5]");
  ExpectError({OpKind::kSlice, {Dims{2, 3, 5}}, part(1, -1, 2)}, kShapeError, "elements -1 and on");
  ExpectError({OpKind::kSlice, {Dims{2, 3, 5}}, part(1, 0, -1)}, kShapeError, "-1 of them");
  ExpectError({OpKind::kSlice, {Dims{2, 3, 5}}, part(1, 1, kHuge)}, kShapeError, "not in");
  ExpectError({OpKind::kSlice, {Dims{2, 3, 5}}, part(3, 0, 1)}, kShapeError, "axis 3");
}

TEST(ShapeRules, OutputsThatOverflowAreRejected) {
  ExpectError({OpKind::kAdd, {Dims{int64_t{1} << 40, 1}, Dims{int64_t{1} << 40}}}, kShapeError,
              "overflows 64 bits");
  // 2^59 f32 have 2^64 bits, 2^57 have 2^62.
  ExpectError({OpKind::kAbs, {Dims{int64_t{1} << 59}}}, kShapeError, "overflows 64 bits");
  ExpectDims({OpKind::kAbs, {Dims{int64_t{1} << 57}}}, Dims{int64_t{1} << 57});
}

TEST(ShapeRules, StaticQuantization) {
  const auto with = [](std::string qtype, size_t scales, size_t zps) {
    return Attributes{{Attr::kQType, std::move(qtype)},
                      {Attr::kAxis, int64_t{-1}},
                      {Attr::kScales, std::vector<float>(scales, 0.5f)},
                      {Attr::kZps, Ints(zps, 3)}};
  };
  ExpectDims({OpKind::kQuantize, {Dims{2, 3}}, with("per_tensor", 1, 1)}, Dims{2, 3});
  ExpectDims({OpKind::kDequantize, {Dims{2, 3}}, with("per_channel", 3, 0)}, Dims{2, 3});
  ExpectError({OpKind::kQuantize, {Dims{2, 3}}, with("per_tensor", 2, 1)}, kArgumentError,
              "takes one scale, but has 2");
  ExpectError({OpKind::kDequantize, {Dims{2, 3}}, with("per_channel", 2, 0)}, kArgumentError,
              "dim 1 of tensor 0 [2,3] needs 3 scales, but there are 2");
  ExpectError({OpKind::kDequantize, {Dims{2, 3}}, with("per_channel", 3, 1)}, kArgumentError,
              "1 zero points, but 3 scales");
}

TEST(ShapeRules, DynamicQuantization) {
  const auto with = [](std::string qtype, Ints group = {}) {
    Attributes attrs{{Attr::kQType, std::move(qtype)}, {Attr::kAxis, int64_t{1}}};
    if (!group.empty()) attrs.Set(Attr::kGroupShape, std::move(group));
    return attrs;
  };
  const OpKind kind = OpKind::kDynamicDequantize;
  const Dims x = {1, 2, 6, 12};
  ExpectDims({kind, {x, kScalar}, with("per_tensor")}, x);
  ExpectDims({kind, {x, Dims{1}, Dims{1, 1}}, with("per_tensor")}, x);
  ExpectDims({kind, {x, Dims{2}, Dims{2}}, with("per_channel")}, x);
  ExpectDims({kind, {x, Dims{2}, Dims{1}}, with("per_channel")}, x);
  ExpectDims({kind, {x, Dims{1, 2, 6, 3}, Dims{1, 2, 6, 3}}, with("per_group", {1, 1, 1, 4})}, x);
  ExpectDims({kind, {x, Dims{1, 1, 2, 12}}, with("per_group", {1, 2, 3, 1})}, x);
  ExpectDims({kind, {x, kNoRank}, with("per_group", {1, 1, 6, 1})}, x);
  ExpectDims({kind, {Dims{1, kAny, 12}, Dims{1, kAny, 3}}, with("per_group", {1, 1, 4})},
             Dims{1, kAny, 12});
  ExpectDims({OpKind::kDynamicQuantize, {x, Dims{2}}, with("per_channel")}, x);

  ExpectError({kind, {x, Dims{2}}, with("per_tensor")}, kArgumentError, "per_tensor takes one");
  ExpectError({kind, {x, Dims{3}}, with("per_channel")}, kArgumentError,
              "scales per channel must be [2] as dim 1 of tensor 0 [1,2,6,12], but are tensor 1 "
              "[3]");
  ExpectError({kind, {x, Dims{1, 2, 6, 3}}, with("per_group")}, kArgumentError,
              "needs a group_shape");
  ExpectError({kind, {x, Dims{1, 2, 6, 3}}, with("per_group", {1, 1, 5})}, kArgumentError,
              "differ in rank");
  ExpectError({kind, {x, Dims{6, 3}}, with("per_group", {1, 1, 1, 4})}, kArgumentError,
              "scales per group have the rank");
  ExpectError({kind, {x, Dims{1, 2, 6, 2}}, with("per_group", {1, 1, 1, 5})}, kArgumentError,
              "groups of 5 do not divide dim 3 of tensor 0 [1,2,6,12]");
  ExpectError({kind, {x, Dims{1, 2, 6, 4}}, with("per_group", {1, 1, 1, 4})}, kArgumentError,
              "need 3 of scales there, but there are 4 in tensor 1 [1,2,6,4]");
  ExpectError({kind, {x, Dims{1, 2, 6, 3}, Dims{1, 2, 6, 1}}, with("per_group", {1, 1, 1, 4})},
              kArgumentError, "of zero points there, but there are 1 in tensor 2");
  for (const int64_t group : {int64_t{0}, int64_t{-4}, std::numeric_limits<int64_t>::min()}) {
    ExpectError({kind, {x, Dims{1, 2, 6, 3}}, with("per_group", {1, 1, 1, group})}, kArgumentError,
                absl::StrCat("has a group of ", group, " in dim 3"));
  }
}

TEST(ShapeRules, Attention) {
  const OpKind kind = OpKind::kScaledDotProductAttention;
  const Dims q = {2, 6, 5, 16}, k = {2, 3, 9, 16}, v = {2, 3, 9, 8};
  const auto named = [](std::string names) {
    return Attributes{{Attr::kOptionalInputs, std::move(names)}};
  };
  ExpectDims({kind, {q, k, v}, {}, 2}, {Dims{2, 6, 5, 8}, Dims{2, 6, 5, 1}});
  ExpectDims({kind,
              {q, k, v, Dims{2, 6, 1, 9}, Dims{5, 9}, Dims{2}, Dims{6}, Dims{6}},
              named("bias,select,kv_lengths,sinks,alibi_slopes")},
             Dims{2, 6, 5, 8});
  // Ragged: q is [T, Hq, D], and masks have rows of T.
  ExpectDims(
      {kind, {Dims{7, 6, 16}, k, v, Dims{3}, Dims{1, 6, 7, 9}}, named("query_offsets,bias"), 2},
      {Dims{7, 6, 8}, Dims{7, 6, 1}});
  ExpectDims({kind, {q, k, kNoRank}}, kNoRank);

  ExpectError({kind, {q, Dims{2, 3, 9, 8}, v}}, kShapeError,
              "head sizes of q and k differ: 16 (tensor 0, dim 3) vs 8 (tensor 1, dim 3)");
  ExpectError({kind, {q, Dims{1, 3, 9, 16}, v}}, kShapeError, "batch sizes of q and k");
  ExpectError({kind, {q, k, Dims{1, 3, 9, 8}}}, kShapeError, "batch sizes of k and v");
  ExpectError({kind, {q, k, Dims{2, 3, 8, 8}}}, kShapeError, "lengths of k and v");
  ExpectError({kind, {q, k, Dims{2, 1, 9, 8}}}, kShapeError, "numbers of heads of k and v");
  ExpectError({kind, {q, Dims{2, 4, 9, 16}, Dims{2, 4, 9, 8}}}, kShapeError,
              "6 query heads (tensor 0, dim 1) are no multiple of 4 key heads");
  ExpectError({kind, {q, Dims{2, 0, 9, 16}, Dims{2, 0, 9, 8}}}, kShapeError, "no multiple");
  ExpectError({kind, {Dims{6, 5, 16}, k, v}}, kShapeError, "q has rank 4, but is");
  ExpectError({kind, {q, k, v, Dims{3}}, named("query_offsets")}, kShapeError,
              "q has rank 3 beside query_offsets, but is");
  ExpectError({kind, {Dims{7, 6, 16}, k, v, Dims{2}}, named("query_offsets")}, kShapeError,
              "query_offsets must be [3]");
  ExpectError({kind, {q, k, v, Dims{2}}, named("kv_first")}, ErrorKind::kInvalidGraphOp,
              "has kv_first, but no kv_lengths");
  ExpectError({kind, {q, k, v, Dims{5, 8}}, named("bias")}, kShapeError, "onto [2,6,5,9]");
  ExpectError({kind, {q, k, v, Dims{3}}, named("sinks")}, kShapeError, "sinks must be [6]");
  ExpectError({kind, {q, k, v}, {{Attr::kLeftWindow, int64_t{-2}}}}, ErrorKind::kInvalidGraphOp,
              "left_window");
  for (const float cap : {0.f, -30.f}) {
    ExpectError({kind, {q, k, v}, {{Attr::kSoftCap, cap}}}, ErrorKind::kInvalidGraphOp,
                "soft_cap must be above 0, not");
  }
  ExpectError({kind, {q, k, v}, {{Attr::kSelectFill, -2.f}}}, ErrorKind::kInvalidGraphOp,
              "has select_fill, but no select");
}

TEST(ShapeRules, Loads) {
  const Dims x = {2, 3, 9, 16};
  ExpectDims({OpKind::kLoadTokens, {x, Dims{2}, Dims{1}}, {}}, x);
  ExpectError({OpKind::kLoadTokens, {x, Dims{3}}, {}}, kShapeError,
              "lengths must be [2] or [1], but are tensor 1 [3]");
  ExpectError({OpKind::kLoadTokens, {x, Dims{2}}, {{Attr::kTokenAxis, int64_t{0}}}}, kShapeError,
              "is that of rows");
  ExpectError({OpKind::kLoadTokens, {x, Dims{2}}, {{Attr::kTokenGroup, int64_t{0}}}}, kShapeError,
              "a row for 0 tokens");
  ExpectDims({OpKind::kLoadPages, {Dims{50, 3, 8, 16}, Dims{2, 7}, Dims{2}}, {}},
             Dims{2, 3, 56, 16});
  ExpectDims({OpKind::kLoadPages,
              {Dims{50, 8, 3, 16}, Dims{2, kAny}, Dims{1}},
              {{Attr::kTokenAxis, int64_t{1}}}},
             Dims{2, kAny, 3, 16});
  ExpectError({OpKind::kLoadPages, {x, Dims{14}, Dims{2}}, {}}, kShapeError,
              "page_table must be [rows, pages of a row]");
  ExpectError({OpKind::kLoadPages, {x, Dims{2, int64_t{1} << 61}, Dims{2}}, {}}, kShapeError,
              "overflow 64 bits");
  ExpectDims({OpKind::kLoadRanges, {Dims{2, 2, 2}, x, Dims{2, 3, 4, 16}}, {}, 2},
             {Dims{2, 3, 13, 16}, Dims{2}});
  ExpectDims({OpKind::kLoadRanges, {Dims{5, 1, 2}, Dims{1, 3, 9, 16}}, {}, 2},
             {Dims{5, 3, 9, 16}, Dims{5}});
  ExpectError({OpKind::kLoadRanges, {Dims{2, 1, 2}, x, x}, {}}, kShapeError,
              "ranges of 2 src must be [rows, 2, 2], but are tensor 0 [2,1,2]");
  ExpectError({OpKind::kLoadRanges, {Dims{3, 1, 2}, x}, {}}, kShapeError,
              "ranges of 3 rows do not go with tensor 1 [2,3,9,16]");
  ExpectError({OpKind::kSoftMax, {x, Dims{3}}, {{Attr::kAxis, int64_t{-1}}}}, kShapeError,
              "lengths must be [2] or [1]");
}

TEST(MergeOutput, CompletesAndContradicts) {
  Op op;
  op.kind = OpKind::kAdd;
  OptionalDims found = Dims{2, kAny, 3};
  ASSERT_TRUE(MergeOutput(op, Tensor(9, Dims{kAny, 4, kAny}), found).ok());
  EXPECT_EQ(found, (OptionalDims{Dims{2, 4, 3}}));
  const absl::Status status = MergeOutput(op, Tensor(9, Dims{2, 4, 5}), found);
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidShape);
  EXPECT_THAT(std::string(status.message()), HasSubstr("but tensor 9 [2,4,5] is declared"));
  found = kScalar;
  ASSERT_TRUE(MergeOutput(op, Tensor(9, Dims{1}), found).ok());
  EXPECT_EQ(found, (OptionalDims{Dims{1}}));
  EXPECT_FALSE(MergeOutput(op, Tensor(9, Dims{2}), found = kScalar).ok());
}

// scores = MatMul(q, k); y = Tanh(scores). Ids 0, 1 -> 2 -> 3.
Graph TwoOps(const LogicalTensor& q, const LogicalTensor& k, const LogicalTensor& scores,
             const LogicalTensor& y) {
  Graph graph;
  Op matmul, tanh;
  matmul.kind = OpKind::kMatMul;
  matmul.name = "qk";
  tanh.id = 1;
  tanh.kind = OpKind::kTanh;
  tanh.name = "cap";
  EXPECT_TRUE(graph.AddOp(matmul, {q, k}, {scores}).ok());
  EXPECT_TRUE(graph.AddOp(tanh, {scores}, {y}).ok());
  EXPECT_TRUE(graph.Finalize().ok());
  return graph;
}

TEST(InferShapes, RunsThroughTensorsOfUnknownRank) {
  Graph graph =
      TwoOps(Tensor(0, Dims{4, 8}), Tensor(1, Dims{8, 16}), Tensor(2, kNoRank), Tensor(3, kNoRank));
  ASSERT_TRUE(InferShapes(graph).ok());
  EXPECT_EQ(graph.tensor(2).dims, (OptionalDims{Dims{4, 16}}));
  EXPECT_EQ(graph.tensor(3).dims, (OptionalDims{Dims{4, 16}}));
}

TEST(InferShapes, RejectsADeclaredOutputThatDiffers) {
  Graph graph = TwoOps(Tensor(0, Dims{4, 8}), Tensor(1, Dims{8, 16}), Tensor(2, kNoRank),
                       Tensor(3, Dims{4, 17}));
  const absl::Status status = InferShapes(graph);
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidShape);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("Tanh 'cap' (id 1)"), HasSubstr("tensor 3 [4,17]")));
}

TEST(InferShapes, ReinfersForNewLengths) {
  LogicalTensor q = Tensor(0, Dims{4, 8}), y = Tensor(3, Dims{4, 16});
  y.strides = Dims{32, 1};
  y.name = "a name that does not fit a short string";
  Graph graph = TwoOps(q, Tensor(1, Dims{8, 16}), Tensor(2, Dims{4, 16}), y);
  ASSERT_TRUE(InferShapes(graph).ok());
  EXPECT_EQ(graph.tensor(3).strides, (OptionalDims{Dims{32, 1}}));

  q.dims = Dims{5, 8};
  ASSERT_TRUE(InferShapes(graph, {q}).ok());
  EXPECT_EQ(graph.tensor(0).dims, (OptionalDims{Dims{5, 8}}));
  EXPECT_EQ(graph.tensor(1).dims, (OptionalDims{Dims{8, 16}}));
  EXPECT_EQ(graph.tensor(2).dims, (OptionalDims{Dims{5, 16}}));
  EXPECT_EQ(graph.tensor(3).dims, (OptionalDims{Dims{5, 16}}));
  EXPECT_EQ(graph.tensor(3).strides, kNoRank) << "strides of the old dims";
  EXPECT_EQ(graph.tensor(3).name, y.name);

  // A given output counts: its dims are checked and its strides kept.
  y.dims = Dims{5, 16};
  ASSERT_TRUE(InferShapes(graph, {q, y}).ok());
  EXPECT_EQ(graph.tensor(3).strides, (OptionalDims{Dims{32, 1}}));
  y.dims = Dims{6, 16};
  EXPECT_EQ(ErrorKindOf(InferShapes(graph, {q, y})), ErrorKind::kInvalidShape);
  EXPECT_THAT(std::string(InferShapes(graph, {q, q}).message()),
              ::testing::HasSubstr("tensor 0 is given twice"));
}

TEST(InferShapes, ForgetsWhatIsNoLongerKnown) {
  Graph graph = TwoOps(Tensor(0, Dims{4, 8}), Tensor(1, Dims{8, 16}), Tensor(2, Dims{4, 16}),
                       Tensor(3, Dims{4, 16}));
  ASSERT_TRUE(InferShapes(graph, {Tensor(0, kNoRank)}).ok());
  EXPECT_EQ(graph.tensor(2).dims, kNoRank);
  EXPECT_EQ(graph.tensor(3).dims, kNoRank);
}

TEST(InferShapes, RejectsBadGivenTensors) {
  Graph graph =
      TwoOps(Tensor(0, Dims{4, 8}), Tensor(1, Dims{8, 16}), Tensor(2, kNoRank), Tensor(3, kNoRank));
  EXPECT_EQ(ErrorKindOf(InferShapes(graph, {Tensor(7, Dims{4, 8})})), kArgumentError);
  EXPECT_EQ(ErrorKindOf(InferShapes(graph, {Tensor(0, Dims{4, -8})})), kShapeError);
  EXPECT_EQ(ErrorKindOf(InferShapes(graph, {Tensor(0, Dims{4, 8}, kF16)})),
            ErrorKind::kInvalidDataType);
  const absl::Status status = InferShapes(graph, {Tensor(0, Dims{4, 9})});
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidShape);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("MatMul 'qk' (id 0): inner dimensions differ: 9 (tensor 0, dim 1) vs 8 "
                        "(tensor 1, dim 0)"));
}

}  // namespace
}  // namespace kvant
