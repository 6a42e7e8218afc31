#include "kvant/graph/graph.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

LogicalTensor T(TensorId id, DataType type, Dims dims) {
  LogicalTensor tensor;
  tensor.id = id;
  tensor.type = type;
  tensor.dims = std::move(dims);
  return tensor;
}

Op MakeOp(OpId id, OpKind kind, const char* name, Attributes attrs = {}) {
  Op op;
  op.id = id;
  op.kind = kind;
  op.name = name;
  op.attrs = std::move(attrs);
  return op;
}

void ExpectError(const absl::Status& status, ErrorKind kind, const char* text) {
  EXPECT_EQ(ErrorKindOf(status), kind) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(text));
}

TEST(Graph, SortsOpsAndFindsPorts) {
  Graph graph;
  const LogicalTensor a = T(1, kF32, {4}), b = T(2, kF32, {4}), c = T(3, kF32, {4});
  ASSERT_TRUE(graph.AddOp(MakeOp(7, OpKind::kExp, "late"), {b}, {c}).ok());
  ASSERT_TRUE(graph.AddOp(MakeOp(9, OpKind::kTanh, "early"), {a}, {b}).ok());
  ASSERT_TRUE(graph.Finalize().ok());
  ASSERT_EQ(graph.ops().size(), 2u);
  EXPECT_EQ(graph.ops()[0].name, "early");
  EXPECT_THAT(graph.inputs(), ElementsAre(1));
  EXPECT_THAT(graph.outputs(), ElementsAre(3));
  EXPECT_EQ(graph.FindTensor(2)->producer.op, 0);
  EXPECT_EQ(graph.FindTensor(2)->consumers[0].op, 1);
}

// As a graph in JSON may name them.
TEST(Graph, NamesOfPortsDiffer) {
  const auto finalized = [](std::string input, std::string output) {
    Graph graph;
    LogicalTensor a = T(1, kF32, {4}), b = T(2, kF32, {4}), c = T(3, kF32, {4}),
                  d = T(4, kF32, {4});
    a.name = "x";
    b.name = input;
    c.name = "y";
    d.name = output;
    EXPECT_TRUE(graph.AddOp(MakeOp(0, OpKind::kAdd, "sum"), {a, b}, {c}).ok());
    EXPECT_TRUE(graph.AddOp(MakeOp(1, OpKind::kExp, "exp"), {b}, {d}).ok());
    const absl::Status first = graph.Finalize();
    EXPECT_EQ(graph.Finalize(), first);  // and the second time
    EXPECT_EQ(graph.finalized(), first.ok());
    return first;
  };
  EXPECT_TRUE(finalized("y", "x").ok());
  EXPECT_TRUE(finalized("", "").ok());
  ExpectError(finalized("x", "z"), ErrorKind::kInvalidGraph, "two inputs are named 'x'");
  ExpectError(finalized("z", "y"), ErrorKind::kInvalidGraph, "two outputs are named 'y'");
}

TEST(Graph, EndMarksAnOutput) {
  Graph graph;
  const LogicalTensor a = T(1, kF32, {4}), b = T(2, kF32, {4}), c = T(3, kF32, {4});
  ASSERT_TRUE(graph.AddOp(MakeOp(0, OpKind::kExp, "e"), {a}, {b}).ok());
  ASSERT_TRUE(graph.AddOp(MakeOp(1, OpKind::kTanh, "t"), {b}, {c}).ok());
  ASSERT_TRUE(graph.AddOp(MakeOp(2, OpKind::kEnd, "end"), {b}, {}).ok());
  ASSERT_TRUE(graph.Finalize().ok());
  EXPECT_THAT(graph.outputs(), ElementsAre(2, 3));
}

TEST(Graph, RejectsCycles) {
  Graph graph;
  const LogicalTensor a = T(1, kF32, {4}), b = T(2, kF32, {4});
  ASSERT_TRUE(graph.AddOp(MakeOp(0, OpKind::kExp, "x"), {a}, {b}).ok());
  ASSERT_TRUE(graph.AddOp(MakeOp(1, OpKind::kExp, "y"), {b}, {a}).ok());
  ExpectError(graph.Finalize(), ErrorKind::kInvalidGraph, "Exp 'x' (id 0) is on or behind a cycle");
}

TEST(Graph, NamesTheStridesThatDisagree) {
  Graph graph;
  LogicalTensor dense = T(1, kF32, {4}), padded = dense;
  dense.strides = {1};
  padded.strides = {2};
  ASSERT_TRUE(graph.AddOp(MakeOp(0, OpKind::kTanh, "x"), {dense}, {T(2, kF32, {4})}).ok());
  ExpectError(graph.AddOp(MakeOp(1, OpKind::kTanh, "y"), {padded}, {T(3, kF32, {4})}),
              ErrorKind::kInvalidGraph,
              "tensor 1 is f32[4] with strides [2] here but f32[4] with strides [1] elsewhere");
}

TEST(Graph, RejectsWhatDisagrees) {
  Graph graph;
  const LogicalTensor a = T(1, kF32, {4}), b = T(2, kF32, {4}), c = T(3, kF32, {4});
  ASSERT_TRUE(graph.AddOp(MakeOp(0, OpKind::kExp, "x"), {a}, {b}).ok());
  ExpectError(graph.AddOp(MakeOp(1, OpKind::kTanh, "y"), {a}, {b}), ErrorKind::kInvalidGraph,
              "Tanh 'y' (id 1): tensor 2 is already produced by Exp 'x' (id 0)");
  ExpectError(graph.AddOp(MakeOp(0, OpKind::kTanh, "y"), {a}, {c}), ErrorKind::kInvalidGraph,
              "its id is already that of Exp 'x' (id 0)");
  ExpectError(graph.AddOp(MakeOp(1, OpKind::kTanh, "y"), {T(2, kF32, {5})}, {c}),
              ErrorKind::kInvalidGraph, "tensor 2 is f32[5] here but f32[4] elsewhere");
  ExpectError(graph.AddOp(MakeOp(1, OpKind::kTanh, "y"), {c}, {c}), ErrorKind::kInvalidGraph,
              "both input and output");
  EXPECT_EQ(graph.ops().size(), 1u);
  EXPECT_EQ(graph.FindTensor(3), nullptr);
}

TEST(Graph, SchemaErrorsNameOpAndPort) {
  Graph graph;
  const LogicalTensor f = T(1, kF32, {4}), h = T(2, kF16, {4}), i = T(3, kS32, {4});
  const LogicalTensor out = T(9, kF32, {4});
  ExpectError(graph.AddOp(MakeOp(0, OpKind::kExp, "x"), {f, h}, {out}), ErrorKind::kInvalidGraphOp,
              "Exp 'x' (id 0): has 2 inputs, takes 1");
  ExpectError(graph.AddOp(MakeOp(0, OpKind::kMatMul, "m"), {T(4, kBF16, {4}), h}, {out}),
              ErrorKind::kInvalidDataType, "weights (tensor 2) is f16 but src (tensor 4) is bf16");
  ExpectError(graph.AddOp(MakeOp(0, OpKind::kMatMul, "m"), {f, h}, {T(9, kF16, {4})}),
              ErrorKind::kInvalidDataType, "dst (tensor 9) is f16 but the result of its inputs is");
  ExpectError(graph.AddOp(MakeOp(0, OpKind::kAdd, "a"), {i, T(5, kS64, {4})}, {out}),
              ErrorKind::kInvalidDataType, "b (tensor 5) is s64, not one of f32, bf16, f16, s32");
  ExpectError(graph.AddOp(MakeOp(0, OpKind::kTanh, "t"), {i}, {out}), ErrorKind::kInvalidDataType,
              "src (tensor 3) is s32, not one of f32, bf16, f16");
  ExpectError(
      graph.AddOp(MakeOp(0, OpKind::kGenIndex, "g", {{Attr::kAxis, int64_t{0}}}), {f}, {out}),
      ErrorKind::kInvalidDataType, "dst (tensor 9) is f32, not s32");
  ExpectError(graph.AddOp(MakeOp(0, OpKind::kGreaterEqual, "g"), {i, f}, {T(9, kBoolean, {4})}),
              ErrorKind::kInvalidDataType, "b (tensor 1) is f32 but a (tensor 3) is s32");
  ExpectError(graph.AddOp(MakeOp(0, OpKind::kSelect, "s"), {T(5, kBoolean, {4}), f, h}, {out}),
              ErrorKind::kInvalidDataType, "y (tensor 2) is f16 but x (tensor 1) is f32");
  ExpectError(graph.AddOp(MakeOp(0, OpKind::kGenIndex, "g"), {f}, {T(9, kS32, {4})}),
              ErrorKind::kInvalidGraphOp, "attribute 'axis' is required");
  ExpectError(graph.AddOp(MakeOp(0, OpKind::kExp, "x", {{Attr::kAxis, int64_t{1}}}), {f}, {out}),
              ErrorKind::kInvalidGraphOp, "has no attribute 'axis'; it has none");
  ExpectError(
      graph.AddOp(MakeOp(0, OpKind::kSoftMax, "s", {{Attr::kAxes, std::vector<int64_t>{1}}}), {f},
                  {out}),
      ErrorKind::kInvalidGraphOp, "has no attribute 'axes'; it has axis, mode");
  ExpectError(graph.AddOp(MakeOp(0, OpKind::kSoftMax, "s", {{Attr::kAxis, 1.f}}), {f}, {out}),
              ErrorKind::kInvalidGraphOp, "attribute 'axis' is not of type s64");
  constexpr float kInf = std::numeric_limits<float>::infinity();
  ExpectError(graph.AddOp(MakeOp(0, OpKind::kDequantize, "d",
                                 {{Attr::kScales, std::vector<float>{1.f, -kInf}}}),
                          {T(5, kS8, {4})}, {out}),
              ErrorKind::kInvalidGraphOp, "attribute 'scales' is infinite or not a number");
  ExpectError(graph.AddOp(MakeOp(0, OpKind::kScaledDotProductAttention, "a",
                                 {{Attr::kOptionalInputs, std::string("bias,,sinks")}}),
                          {f, f, f, f, f}, {out}),
              ErrorKind::kInvalidGraphOp, "optional_inputs names ''");
  ExpectError(graph.AddOp(MakeOp(0, OpKind::kScaledDotProductAttention, "a",
                                 {{Attr::kScale, std::nanf("")}}),
                          {f, f, f}, {out}),
              ErrorKind::kInvalidGraphOp, "attribute 'scale' is infinite or not a number");
  ExpectError(graph.AddOp(MakeOp(0, OpKind::kSoftMax, "s", {{Attr::kMode, std::string("both")}}),
                          {f}, {out}),
              ErrorKind::kInvalidGraphOp, "'mode' is 'both', not one of none, inf_as_zero");
  EXPECT_TRUE(graph.ops().empty());
}

TEST(Graph, DefaultsAreFilledIn) {
  Graph graph;
  const LogicalTensor a = T(1, kF32, {4, 4}), b = T(2, kF32, {4, 4}), c = T(3, kF32, {4, 4});
  ASSERT_TRUE(graph.AddOp(MakeOp(0, OpKind::kMatMul, "m"), {a, b}, {c}).ok());
  const Op& op = graph.ops()[0];
  ASSERT_NE(op.Find<Attr::kTransposeA>(), nullptr);
  ASSERT_NE(op.Find<Attr::kAccumulationMode>(), nullptr);
  EXPECT_EQ(*op.Find<Attr::kTransposeA>(), false);
  EXPECT_EQ(*op.Find<Attr::kAccumulationMode>(), "strict");
  // By an op that no graph has checked, too.
  EXPECT_EQ(MakeOp(1, OpKind::kSoftMax, "s").Get<Attr::kAxis>(), 1);
  EXPECT_EQ(MakeOp(1, OpKind::kSoftMax, "s").Find<Attr::kAxis>(), nullptr);
}

TEST(Graph, InvalidTensors) {
  Graph graph;
  const LogicalTensor out = T(9, kF32, {4});
  const auto add = [&](const LogicalTensor& in) {
    return graph.AddOp(MakeOp(0, OpKind::kExp, "x"), {in}, {out});
  };
  ExpectError(add(T(1, kF32, {-3})), ErrorKind::kInvalidShape, "negative dim -3");
  ExpectError(add(T(1, kF32, {int64_t{1} << 40, int64_t{1} << 40})), ErrorKind::kInvalidShape,
              "overflows");
  ExpectError(add(T(1, kF32, Dims(13, 1))), ErrorKind::kInvalidShape, "rank 13 exceeds 12");
  LogicalTensor strided = T(1, kF32, {2, 2});
  strided.strides = Dims{int64_t{1} << 62, int64_t{1} << 62};
  ExpectError(add(strided), ErrorKind::kInvalidShape, "overflows");
  strided.strides = Dims{1};
  ExpectError(add(strided), ErrorKind::kInvalidShape, "1 strides for 2 dims");
}

TEST(Graph, LooksUpByNameThenId) {
  Graph graph;
  LogicalTensor a = T(1, kF32, {4}), b = T(2, kF32, {4});
  a.name = "2";  // a name that is also an id: the name wins
  ASSERT_TRUE(graph.AddOp(MakeOp(0, OpKind::kExp, "x"), {a}, {b}).ok());
  EXPECT_EQ(graph.FindTensor("2")->desc.id, 1u);
  EXPECT_EQ(graph.FindTensor("1")->desc.id, 1u);
  EXPECT_EQ(graph.FindTensor("q"), nullptr);
}

TEST(Graph, SubgraphKeepsItsPorts) {
  Graph graph;
  const LogicalTensor a = T(1, kF32, {4}), b = T(2, kF32, {4}), c = T(3, kF32, {4}),
                      d = T(4, kF32, {4});
  ASSERT_TRUE(graph.AddOp(MakeOp(0, OpKind::kExp, "x"), {a}, {b}).ok());
  ASSERT_TRUE(graph.AddOp(MakeOp(1, OpKind::kTanh, "y"), {b}, {c}).ok());
  ASSERT_TRUE(graph.AddOp(MakeOp(2, OpKind::kAdd, "z"), {b, c}, {d}).ok());
  ASSERT_TRUE(graph.Finalize().ok());
  const Graph sub = graph.Subgraph({1, 2});
  EXPECT_THAT(sub.inputs(), ElementsAre(2));
  EXPECT_THAT(sub.outputs(), ElementsAre(4));
  // b is consumed inside and outside.
  EXPECT_THAT(graph.Subgraph({0, 1}).outputs(), ElementsAre(2, 3));
}

TEST(LogicalTensor, MemoryOfStridedAndSubByte) {
  LogicalTensor t = T(0, kU4, {2, 3});
  EXPECT_EQ(t.memory_bytes(), 3);
  t.strides = Dims{5, 1};
  EXPECT_EQ(t.memory_bytes(), 5);
  t = T(0, kF32, {1, 3});
  t.strides = Dims{100, 1};
  EXPECT_EQ(t.memory_bytes(), 12);  // the stride of a dim of 1 does not count
  t = T(0, kF32, {2, 3});
  t.strides = Dims{2, 2};
  EXPECT_EQ(t.memory_bytes(), 28);  // overlaps itself, and ends at element 1 * 2 + 2 * 2
  t = T(0, kF32, {0, 3});
  EXPECT_EQ(t.memory_bytes(), 0);
  t.dims->clear();
  t.strides.reset();
  EXPECT_EQ(t.memory_bytes(), 4);  // a scalar
}

TEST(LogicalTensor, Broadcasts) {
  EXPECT_EQ(*Broadcast({3, 1}, {4}), (Dims{3, 4}));
  EXPECT_EQ(*Broadcast({kUnknownDim, 1}, {2, 4}), (Dims{2, 4}));
  EXPECT_EQ(*Broadcast({}, {2}), (Dims{2}));
  EXPECT_EQ(*Broadcast({0, 1}, {1, 5}), (Dims{0, 5}));
  EXPECT_FALSE(Broadcast({3}, {4}));
}

TEST(Graph, InvalidConstantsAndHostScalars) {
  const auto add = [&](const LogicalTensor& in) { return ValidateTensor(in); };
  LogicalTensor strided = T(1, kF32, {2, 2});
  strided.strides = Dims{-2, 1};
  ExpectError(add(strided), ErrorKind::kInvalidShape, "negative stride -2");
  LogicalTensor constant = T(1, kF32, {});
  constant.value = Constant(1.f);
  ExpectError(add(constant), ErrorKind::kInvalidShape, "a value is that of a constant");
  constant.property = Property::kConstant;
  constant.type = kF16;
  ExpectError(add(constant), ErrorKind::kInvalidShape, "a value is that of a constant");
  constant.type = kF32;
  constant.dims = Dims{1};
  ExpectError(add(constant), ErrorKind::kInvalidShape, "a value is that of a constant");
  LogicalTensor scalar = T(1, kF32, {1});
  scalar.property = Property::kHostScalar;
  ExpectError(add(scalar), ErrorKind::kInvalidShape,
              "a host scalar is f32, s32 or s64, without dims");
  scalar = T(1, kF16, {});
  scalar.property = Property::kHostScalar;
  ExpectError(add(scalar), ErrorKind::kInvalidShape,
              "a host scalar is f32, s32 or s64, without dims");
  EXPECT_TRUE(ValidateTensor(T(1, kF32, Dims(kMaxRank, 1))).ok());
}

TEST(Graph, LooksUpNothingByHalfANumberOrASharedName) {
  Graph graph;
  LogicalTensor a = T(1, kF32, {4}), b = T(2, kF32, {4}), c = T(0, kF32, {4});
  a.name = b.name = "twice";
  ASSERT_TRUE(graph.AddOp(MakeOp(0, OpKind::kExp, "x"), {a}, {b}).ok());
  ASSERT_TRUE(graph.AddOp(MakeOp(1, OpKind::kExp, "y"), {b}, {c}).ok());
  EXPECT_EQ(graph.FindTensor("twice"), nullptr);
  EXPECT_EQ(graph.FindTensor("0x"), nullptr);
  EXPECT_EQ(graph.FindTensor("x0"), nullptr);
  EXPECT_EQ(graph.FindTensor(""), nullptr);
  EXPECT_EQ(graph.FindTensor("0")->desc.id, 0u);
  EXPECT_EQ(graph.FindTensor("99999999999999999999999"), nullptr);
}

}  // namespace
}  // namespace kvant
