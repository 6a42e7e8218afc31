// Constants: numbers that are part of a graph.
#include "kvant/graph/constant.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/json.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(ConstantTest, HoldsItsTypesNumbersExactly) {
  EXPECT_EQ(Constant(-kInf).type(), kF32);
  EXPECT_EQ(Constant(-kInf).value(), -kInf);
  EXPECT_EQ(Constant(-kInf).ToString(), "-inf");
  EXPECT_EQ(Constant(0.1f).value(), double{0.1f});
  EXPECT_EQ(Constant(0.1f).ToString(), "0.1");
  constexpr int64_t kLow = std::numeric_limits<int64_t>::min();
  EXPECT_EQ(Constant(kLow + 1).integer(), kLow + 1);
  EXPECT_EQ(Constant(kLow + 1).ToString(), "-9223372036854775807");
  EXPECT_EQ(Constant(std::numeric_limits<int32_t>::min()).integer(), -2147483648);
  EXPECT_EQ(Constant(true).type(), kBoolean);
  EXPECT_EQ(Constant(true).ToString(), "true");
  EXPECT_EQ(Constant(kBF16, 0.3).value(), RoundTo(kBF16, 0.3));
  EXPECT_EQ(Constant(kU4, 99).integer(), 15);
  const int8_t code = -7;
  EXPECT_EQ(Constant(kS8, &code), Constant(kS8, -7.0));
  EXPECT_EQ(Constant(1e30f).integer(), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(Constant(-1e30f).integer(), kLow);
  EXPECT_EQ(Constant(std::nanf("")).integer(), 0);
  // By type and bits.
  EXPECT_NE(Constant(0.f), Constant(0));
  EXPECT_NE(Constant(0.f), Constant(-0.f));
  EXPECT_EQ(Constant(std::nanf("")), Constant(std::nanf("")));
  // As JSON reads it.
  EXPECT_EQ(Constant(-std::nanf("")).ToString(), "nan");
}

// x / 8 + x, whose ports are x and y; and the id of the constant.
Graph WithScalar(const Constant& scalar, TensorId* id) {
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {2, 3});
  const Value c = g.Scalar(scalar.type(), scalar.value());
  *id = c.id;
  g.Output("y", g.Add(g.Divide(x, c), x));
  return std::move(g).Build().value();
}

TEST(ConstantTest, IsPartOfTheGraphAndNoInput) {
  TensorId id = 0;
  const Graph graph = WithScalar(8.f, &id);
  EXPECT_THAT(graph.inputs(), ElementsAre(graph.FindTensor("x")->desc.id));
  const LogicalTensor& tensor = graph.tensor(id);
  EXPECT_EQ(tensor.value, Constant(8.f));
  EXPECT_EQ(tensor.property, Property::kConstant);
  EXPECT_EQ(tensor.ToString(), "f32 8");
  EXPECT_EQ(graph.Subgraph({0}).tensor(id).value, Constant(8.f));
}

TEST(ConstantTest, TypesFollowTheArgument) {
  GraphBuilder g;
  EXPECT_EQ(g.Describe(g.Scalar(0.5)).value, Constant(0.5f));
  EXPECT_EQ(g.Describe(g.Scalar(0.5f)).type, kF32);
  EXPECT_EQ(g.Describe(g.Scalar(7)).type, kS32);
  EXPECT_EQ(g.Describe(g.Scalar(7L)).type, kS64);
  EXPECT_EQ(g.Describe(g.Scalar(7LL)).type, kS64);
  EXPECT_EQ(g.Describe(g.Scalar(false)).value, Constant(false));
  EXPECT_EQ(g.Describe(g.Scalar(kF16, 0.1)).value, Constant(kF16, 0.1));
}

TEST(ConstantTest, NumbersBeyondTheTypeAreRefused) {
  const auto error = [](auto... scalar) {
    GraphBuilder g;
    g.Output("y", g.Add(g.Input("x", kF32, {4}), g.Scalar(scalar...)));
    return std::string(std::move(g).Build().status().message());
  };
  EXPECT_EQ(error(kF16, 65504.0), "");
  EXPECT_EQ(error(kF16, -double{kInf}), "");
  EXPECT_THAT(error(kF16, 1e6), HasSubstr("Scalar: 1e+06 is no f16: at most 65504"));
  EXPECT_THAT(error(1e300), HasSubstr("1e+300 is no f32: at most 3.40282e+38"));
  EXPECT_THAT(error(kF8E4M3, double{kInf}), HasSubstr("inf is no f8_e4m3"));
  EXPECT_THAT(error(kS32, std::nan("")), HasSubstr("nan is no s32: -2147483648 to 2147483647"));
  EXPECT_THAT(error(kS32, 3e9), HasSubstr("3e+09 is no s32"));
}

TEST(ConstantTest, JsonHoldsEveryNumber) {
  std::vector<Constant> constants = {0.125f, -0.f, 1e-45f, 3.4028235e38f, -kInf, kInf, 0, -123};
  constants.emplace_back(kF16, 0.1);
  constants.emplace_back(kBF16, -kInf);
  for (const Constant& constant : constants) {
    GraphBuilder g;
    const DataType type = constant.type();
    const Value x = g.Input("x", type, {2, 3});
    const Value c = g.Scalar(type, constant.value());
    g.Output("y", g.Select(g.GreaterEqual(x, x), x, c));
    const absl::StatusOr<Graph> graph = std::move(g).Build();
    ASSERT_TRUE(graph.ok()) << graph.status();
    const absl::StatusOr<Graph> again = GraphFromJson(GraphToJson(*graph));
    ASSERT_TRUE(again.ok()) << again.status() << GraphToJson(*graph);
    EXPECT_EQ(again->tensor(c.id).value, constant) << constant.ToString();
    EXPECT_EQ(again->inputs(), graph->inputs());
    EXPECT_EQ(GraphToJson(*again), GraphToJson(*graph));
  }
}

TEST(ConstantTest, JsonHoldsBooleansAndLongIntegers) {
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {2, 3}), y = g.Input("y", kF32, {2, 3});
  const Value no = g.Scalar(false);
  const Value seed = g.Scalar(kS64, 0), offset = g.HostScalar("offset", kS64);
  const Value kept =
      g.AddOp(OpKind::kDropout, "d", {g.Select(no, x, y), seed, offset, g.HostScalar("p", kF32)},
              {kF32})[0];
  g.Output("o", kept);
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const int64_t number : {kMost, -kMost - 1, (int64_t{1} << 53) + 1}) {
    const std::string text = absl::StrReplaceAll(
        GraphToJson(*graph), {{absl::StrCat("\"id\": ", seed.id, ", \"value\": 0"),
                               absl::StrCat("\"id\": ", seed.id, ", \"value\": ", number)}});
    const absl::StatusOr<Graph> again = GraphFromJson(text);
    ASSERT_TRUE(again.ok()) << again.status() << text;
    EXPECT_EQ(again->tensor(seed.id).value, Constant(number));
    EXPECT_EQ(again->tensor(no.id).value, Constant(false));
  }
}

TEST(ConstantTest, JsonHoldsNanAndChecksTheType) {
  TensorId id = 0;
  const std::string file = GraphToJson(WithScalar(8.f, &id));
  EXPECT_TRUE(GraphFromJson(file).ok());
  const std::string tensor = absl::StrCat("{\"id\": ", id, ", \"dtype\": \"f32\"");
  const auto read = [&](std::string_view type, std::string_view value) {
    const std::string text = absl::StrReplaceAll(
        file, {{tensor, absl::StrCat("{\"id\": ", id, ", \"dtype\": \"", std::string(type), "\"")},
               {"\"value\": 8", absl::StrCat("\"value\": ", std::string(value))}});
    return GraphFromJson(text).status();
  };
  EXPECT_TRUE(read("f32", "\"nan\"").ok());
  EXPECT_TRUE(read("f32", "-8.5e0").ok());
  const auto error = [&](std::string_view type, std::string_view value) {
    return std::string(read(type, value).message());
  };
  EXPECT_THAT(error("f32", "\"eight\""), HasSubstr("unknown value 'eight'"));
  EXPECT_THAT(error("f32", "1e99"), HasSubstr("kvant_constants[0].value"));
  EXPECT_THAT(error("s32", "4294967296"), HasSubstr("is no s32: -2147483648 to 2147483647"));
  EXPECT_THAT(error("f16", "65505"), HasSubstr("65505 is no f16: at most 65504"));
  EXPECT_THAT(error("f8_e4m3", "\"inf\""), HasSubstr("inf is no f8_e4m3"));
  EXPECT_TRUE(read("f16", "\"-inf\"").ok());
  EXPECT_THAT(error("s32", "0.5"), HasSubstr("kvant_constants[0].value"));
  EXPECT_THAT(error("undef", "1"), HasSubstr("a value of type undef"));
}

// oneDNN's reader stops at the first key that it does not know, so all it needs comes before.
TEST(ConstantTest, JsonHasThemLast) {
  TensorId id = 0;
  const Graph graph = WithScalar(-kInf, &id);
  const auto json = nlohmann::ordered_json::parse(GraphToJson(graph));
  EXPECT_EQ(std::prev(json.end(), 2).key(), "kvant_constants");
  EXPECT_EQ(std::prev(json.end()).key(), "kvant_names");
  EXPECT_EQ(json["kvant_constants"],
            (nlohmann::ordered_json::array({{{"id", id}, {"value", "-inf"}}})));
  EXPECT_EQ(json["graph"][0]["inputs"][1]["property_type"], "constant");
}

TEST(ConstantTest, JsonRefusesValuesThatAreNoConstants) {
  TensorId id = 0;
  const Graph graph = WithScalar(8.f, &id);
  const std::string file = GraphToJson(graph);
  const auto error = [&](const std::string& from, const std::string& to) {
    return std::string(GraphFromJson(absl::StrReplaceAll(file, {{from, to}})).status().message());
  };
  const std::string entry = absl::StrCat("{\"id\": ", id, ", \"value\": 8}");
  EXPECT_THAT(error(entry, "{\"id\": 99, \"value\": 8}"),
              HasSubstr("tensor 99 is not in the graph"));
  EXPECT_THAT(error(entry, absl::StrCat(entry, ",", entry)), HasSubstr("has two values"));
  // x has dims, and is a variable.
  EXPECT_THAT(error(entry, absl::StrCat("{\"id\": ", graph.inputs()[0], ", \"value\": 8}")),
              HasSubstr("a value is that of a constant without dims, of its type"));
}

// An f32 without dims.
LogicalTensor ScalarTensor(TensorId id, std::optional<Constant> value = std::nullopt) {
  LogicalTensor tensor;
  tensor.id = id;
  tensor.type = kF32;
  tensor.dims = Dims();
  if (value) tensor.property = Property::kConstant;
  tensor.value = value;
  return tensor;
}

Op TanhOp(OpId id) {
  Op op;
  op.id = id;
  op.kind = OpKind::kTanh;
  return op;
}

TEST(ConstantTest, ResultsOfOpsHaveNone) {
  Graph graph;
  const absl::Status status = graph.AddOp(TanhOp(0), {ScalarTensor(1)}, {ScalarTensor(2, 1.f)});
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidGraph);
  EXPECT_THAT(std::string(status.message()), HasSubstr("has a value and is the result of an op"));
  // Nor once they are results.
  ASSERT_TRUE(graph.AddOp(TanhOp(0), {ScalarTensor(1)}, {ScalarTensor(2)}).ok());
  const absl::Status later = graph.AddOp(TanhOp(1), {ScalarTensor(2, 1.f)}, {ScalarTensor(3)});
  EXPECT_EQ(ErrorKindOf(later), ErrorKind::kInvalidGraph);
}

TEST(ConstantTest, TwoValuesOfOneTensorAreRefused) {
  Graph graph;
  ASSERT_TRUE(graph.AddOp(TanhOp(0), {ScalarTensor(1, 1.f)}, {ScalarTensor(2)}).ok());
  EXPECT_EQ(ErrorKindOf(graph.AddOp(TanhOp(1), {ScalarTensor(1, 2.f)}, {ScalarTensor(3)})),
            ErrorKind::kInvalidGraph);
}

// Names of inputs and outputs, of which oneDNN's format has none.
TEST(ConstantTest, JsonKeepsNamesBesideThem) {
  GraphBuilder g;
  const Value q = g.Input("q \"1\"", kF32, {2, 3}), k = g.Input("k", kF32, {3, 2});
  g.Output("scores", g.MatMul(q, k));
  const Graph graph = std::move(g).Build().value();
  const std::string text = GraphToJson(graph);
  const Graph read = GraphFromJson(text).value();
  for (const char* name : {"q \"1\"", "k", "scores"}) {
    ASSERT_NE(read.FindTensor(name), nullptr) << name;
    EXPECT_EQ(read.FindTensor(name)->desc.id, graph.FindTensor(name)->desc.id);
  }
  EXPECT_EQ(GraphToJson(read), text);
  const auto error = [&](const std::string& from, const std::string& to) {
    return std::string(GraphFromJson(absl::StrReplaceAll(text, {{from, to}})).status().message());
  };
  const std::string entry =
      absl::StrCat("{\"id\": ", graph.FindTensor("k")->desc.id, ", \"name\": \"k\"}");
  EXPECT_THAT(error(entry, "{\"id\": 99, \"name\": \"k\"}"),
              HasSubstr("kvant_names[1].name: tensor 99 is not in the graph"));
  EXPECT_THAT(error(entry, absl::StrCat(entry, ", ", entry)), HasSubstr("has two names"));
  EXPECT_THAT(error("\"name\": \"k\"", "\"name\": 3"), HasSubstr("expected a string, found 3"));
  EXPECT_THAT(error(entry, "{\"id\": 1}"), HasSubstr("'name' is missing"));
}

}  // namespace
}  // namespace kvant
