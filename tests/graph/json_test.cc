#include "kvant/graph/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "absl/strings/str_cat.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/graph/status.h"
#include "kvant_test_config.h"

namespace kvant {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

// Graphs are equal in all that the format holds, tensors by id.
void ExpectSame(const Graph& a, const Graph& b) {
  EXPECT_EQ(a.options().engine_kind, b.options().engine_kind);
  EXPECT_EQ(a.options().fpmath, b.options().fpmath);
  EXPECT_EQ(a.options().apply_to_int, b.options().apply_to_int);
  EXPECT_EQ(a.inputs(), b.inputs());
  EXPECT_EQ(a.outputs(), b.outputs());
  ASSERT_EQ(a.ops().size(), b.ops().size());
  for (size_t i = 0; i < a.ops().size(); ++i) {
    const Op &x = a.ops()[i], &y = b.ops()[i];
    SCOPED_TRACE(x.ToString());
    EXPECT_EQ(x.id, y.id);
    EXPECT_EQ(x.name, y.name);
    EXPECT_EQ(x.kind, y.kind);
    EXPECT_EQ(x.inputs, y.inputs);
    EXPECT_EQ(x.outputs, y.outputs);
    EXPECT_TRUE(x.attrs == y.attrs);
    std::vector<TensorId> ids(x.inputs.begin(), x.inputs.end());
    ids.insert(ids.end(), x.outputs.begin(), x.outputs.end());
    for (const TensorId id : ids) {
      const LogicalTensor &s = a.tensor(id), &t = b.tensor(id);
      EXPECT_EQ(s.type, t.type) << id;
      EXPECT_EQ(s.dims, t.dims) << id;
      EXPECT_EQ(s.strides, t.strides) << id;
      EXPECT_EQ(s.layout, t.layout) << id;
      EXPECT_EQ(s.property, t.property) << id;
    }
  }
}

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// What a file says, less what may be written otherwise: version, ports, order of ops and
// attributes that are at their defaults.
void ExpectHoldsAllOf(const json& written, const json& original) {
  std::map<uint64_t, const json*> ops;
  for (const json& op : written["graph"]) ops[op["id"]] = &op;
  ASSERT_EQ(ops.size(), original["graph"].size());
  for (const json& op : original["graph"]) {
    ASSERT_TRUE(ops.count(op["id"]));
    const json& mine = *ops[op["id"]];
    EXPECT_EQ(mine["kind"], op["kind"]);
    EXPECT_EQ(mine["name"], op["name"]);
    for (const auto& [name, attr] : op["attrs"].items()) {
      EXPECT_EQ(mine["attrs"][name]["type"], attr["type"]) << name;
      EXPECT_EQ(mine["attrs"][name]["value"], attr["value"]) << name;
    }
    for (const char* ports : {"inputs", "outputs"}) {
      ASSERT_EQ(mine[ports].size(), op[ports].size());
      for (size_t i = 0; i < op[ports].size(); ++i) {
        for (const auto& [key, value] : op[ports][i].items()) {
          EXPECT_EQ(mine[ports][i][key], value) << key;
        }
      }
    }
  }
}

TEST(SharedGraphs, LoadInferAndSurvive) {
  const char* from_env = std::getenv("KVANT_SHARED_DIR");
  const std::filesystem::path shared = from_env ? from_env : KVANT_SHARED_DIR;
  if (!std::filesystem::is_directory(shared / "graphs")) {
    ASSERT_EQ(std::getenv("KVANT_REQUIRE_SHARED"), nullptr)
        << "KVANT_REQUIRE_SHARED is set, but there are no graphs in " << shared;
    GTEST_SKIP() << "no graphs in " << shared;
  }
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(shared / "graphs")) {
    if (entry.path().extension() != ".json") continue;
    SCOPED_TRACE(entry.path().filename().string());
    ++files;
    absl::StatusOr<Graph> graph = GraphFromJsonFile(entry.path().string());
    ASSERT_TRUE(graph.ok()) << graph.status();
    const std::string written = GraphToJson(*graph);
    absl::StatusOr<Graph> again = GraphFromJson(written);
    ASSERT_TRUE(again.ok()) << again.status();
    ExpectSame(*graph, *again);
    EXPECT_EQ(GraphToJson(*again), written);
    ExpectHoldsAllOf(json::parse(written), json::parse(ReadFile(entry.path())));

    const absl::Status inferred = InferShapes(*graph);
    ASSERT_TRUE(inferred.ok()) << inferred;
    for (const Op& op : graph->ops()) {
      for (const TensorId id : op.outputs) {
        EXPECT_TRUE(graph->tensor(id).has_shape()) << op.ToString() << ", tensor " << id;
      }
    }
    absl::StatusOr<Graph> after = GraphFromJson(GraphToJson(*graph));
    ASSERT_TRUE(after.ok()) << after.status();
    ExpectSame(*graph, *after);
  }
  EXPECT_GE(files, 16);
}

// y = Tanh(x), a file as small as they get.
const char kTanh[] = R"({
  "version": "3.13.0", "engine_kind": "gpu", "fpmath_mode": "bf16",
  "fpmath_mode_apply_to_int": "true", "input_ports": [7], "output_ports": [8],
  "graph": [{"id": 140664149209152, "name": "t", "kind": "Tanh", "attrs": {},
    "inputs": [{"id": 7, "dtype": "f32", "shape": [2, 3], "stride": [3, 1],
                "layout_type": "strided", "property_type": "constant"}],
    "outputs": [{"id": 18446744073709551615, "dtype": "f32", "shape": [-9223372036854775808],
                 "stride": [-9223372036854775808], "layout_type": "undef",
                 "property_type": "undef"}]}]})";

// kTanh with one value replaced, or removed for a discarded one.
std::string With(const std::string& pointer, const json& value) {
  json file = json::parse(kTanh);
  const json::json_pointer at(pointer);
  if (value.is_discarded()) {
    file[at.parent_pointer()].erase(at.back());
  } else {
    file[at] = value;
  }
  return file.dump();
}

const json kRemoved(json::value_t::discarded);

Graph Load(const std::string& text) {
  absl::StatusOr<Graph> graph = GraphFromJson(text);
  EXPECT_TRUE(graph.ok()) << graph.status();
  return graph.ok() ? *std::move(graph) : Graph();
}

void ExpectError(const std::string& text, ErrorKind kind, const std::string& part) {
  const absl::StatusOr<Graph> graph = GraphFromJson(text);
  ASSERT_FALSE(graph.ok()) << part;
  EXPECT_EQ(ErrorKindOf(graph.status()), kind) << graph.status();
  EXPECT_THAT(std::string(graph.status().message()), HasSubstr(part));
}

void ExpectBadJson(const std::string& text, const std::string& part) {
  ExpectError(text, ErrorKind::kInvalidJson, part);
}

TEST(GraphFromJson, ReadsEveryField) {
  const Graph graph = Load(kTanh);
  EXPECT_EQ(graph.options().engine_kind, "gpu");
  EXPECT_EQ(graph.options().fpmath, FpMath::kBF16);
  EXPECT_TRUE(graph.options().apply_to_int);
  ASSERT_EQ(graph.ops().size(), 1u);
  EXPECT_EQ(graph.ops()[0].id, 140664149209152u);
  EXPECT_EQ(graph.ops()[0].name, "t");
  const LogicalTensor& x = graph.tensor(7);
  EXPECT_EQ(x.type, kF32);
  EXPECT_EQ(x.dims, (Dims{2, 3}));
  EXPECT_EQ(x.strides, (Dims{3, 1}));
  EXPECT_EQ(x.layout, Layout::kStrided);
  EXPECT_EQ(x.property, Property::kConstant);
  const LogicalTensor& y = graph.tensor(18446744073709551615u);
  EXPECT_EQ(y.rank(), -1);
  EXPECT_FALSE(y.strides.has_value());
  EXPECT_EQ(y.layout, Layout::kUndef);
  ExpectSame(graph, Load(GraphToJson(graph)));
}

TEST(GraphFromJson, ToleratesWhatFilesLeaveOutOrAdd) {
  for (const char* key : {"version", "engine_kind", "fpmath_mode", "fpmath_mode_apply_to_int",
                          "input_ports", "output_ports"}) {
    Load(With(absl::StrCat("/", key), kRemoved));
  }
  for (const char* key : {"name", "attrs", "inputs/0/stride", "inputs/0/property_type"}) {
    Load(With(absl::StrCat("/graph/0/", key), kRemoved));
  }
  Load(With("/comment", {{"deep", {1, 2.5, nullptr}}}));
  Load(With("/graph/0/inputs/0/note", "x"));
  Load(With("/output_ports", "stale"));
  EXPECT_FALSE(Load(With("/fpmath_mode_apply_to_int", false)).options().apply_to_int);
  // A scalar, and unknown single dims.
  json scalar = json::parse(With("/graph/0/inputs/0/shape", json::array()));
  scalar["graph"][0]["inputs"][0]["stride"] = json::array();
  EXPECT_EQ(Load(scalar.dump()).tensor(7).dims, Dims{});
  const int64_t unknown = kUnknownDim;
  json open = json::parse(With("/graph/0/inputs/0/shape", {unknown, 3}));
  open["graph"][0]["inputs"][0]["stride"] = {unknown, unknown};
  EXPECT_EQ(Load(open.dump()).tensor(7).dims, (Dims{unknown, 3}));
  ExpectSame(Load(open.dump()), Load(GraphToJson(Load(open.dump()))));
}

TEST(GraphFromJson, WrongTypesNameTheirPath) {
  ExpectBadJson(With("/graph/0/inputs/0/shape/1", 3.5),
                "graph[0].inputs[0].shape[1]: expected a 64-bit integer, found the float 3.5");
  ExpectBadJson(With("/graph/0/inputs/0/shape/1", "3"), "graph[0].inputs[0].shape[1]");
  ExpectBadJson(With("/graph/0/inputs/0/shape", 3),
                "graph[0].inputs[0].shape: expected an array, found 3");
  ExpectBadJson(With("/graph/0/inputs/0/stride", {{"a", 1}}), "graph[0].inputs[0].stride");
  ExpectBadJson(With("/graph/0/outputs/0/id", -1),
                "graph[0].outputs[0].id: expected a non-negative 64-bit integer, found -1");
  ExpectBadJson(With("/graph/0/id", true), "graph[0].id: ");
  ExpectBadJson(With("/graph/0/id", 1e3), "graph[0].id: ");
  ExpectBadJson(With("/graph/0/name", 1), "graph[0].name: expected a string, found 1");
  ExpectBadJson(With("/graph/0/kind", nullptr), "graph[0].kind: expected a string, found null");
  ExpectBadJson(With("/graph/0/attrs", json::array()), "graph[0].attrs: expected an object");
  ExpectBadJson(With("/graph/0/inputs/0/dtype", "f31"),
                "graph[0].inputs[0].dtype: unknown data type 'f31'");
  ExpectBadJson(With("/graph/0/inputs/0/layout_type", "blocked"),
                "graph[0].inputs[0].layout_type: unknown value 'blocked'");
  ExpectBadJson(With("/graph/0/inputs/0/property_type", 1), "property_type: expected a string");
  ExpectBadJson(With("/fpmath_mode", "f8"), "fpmath_mode: unknown mode 'f8'");
  ExpectBadJson(With("/fpmath_mode_apply_to_int", "yes"), "fpmath_mode_apply_to_int");
  ExpectBadJson(With("/engine_kind", 1), "engine_kind");
  ExpectBadJson(With("/graph", {{"a", 1}}), "graph: expected an array");
  ExpectBadJson("[]", "(top level): expected an object");
  ExpectBadJson("3", "(top level): expected an object, found 3");
}

TEST(GraphFromJson, MissingAndRepeatedKeys) {
  for (const char* key : {"id", "kind", "inputs", "outputs"}) {
    ExpectBadJson(With(absl::StrCat("/graph/0/", key), kRemoved),
                  absl::StrCat("graph[0]: '", key, "' is missing"));
  }
  for (const char* key : {"id", "dtype", "shape"}) {
    ExpectBadJson(With(absl::StrCat("/graph/0/inputs/0/", key), kRemoved),
                  absl::StrCat("graph[0].inputs[0]: '", key, "' is missing"));
  }
  ExpectBadJson("{}", "(top level): 'graph' is missing");
  ExpectBadJson(R"({"graph": [], "graph": []})", "graph: this key occurs twice");
  const std::string twice = R"({"axis": {"type": "s64", "value": 1},
                                "axis": {"type": "s64", "value": 2}})";
  std::string text = With("/graph/0/attrs", "HERE");
  text.replace(text.find("\"HERE\""), 6, twice);
  ExpectBadJson(text, "graph[0].attrs.axis: this attribute occurs twice");
}

TEST(GraphFromJson, BadTensors) {
  ExpectBadJson(With("/graph/0/inputs/0/shape", {2, -3}), "graph[0].inputs[0]: tensor 7 f32[");
  ExpectBadJson(With("/graph/0/inputs/0/stride", {1}), "graph[0].inputs[0]: tensor 7 f32[");
  ExpectBadJson(With("/graph/0/inputs/0/shape", {int64_t{1} << 40, int64_t{1} << 40}),
                "graph[0].inputs[0]: tensor 7 f32[");
  ExpectBadJson(With("/graph/0/inputs/0/shape", json(std::vector<int>(13, 1))),
                "rank 13 is above the limit of 12");
  std::string huge = With("/graph/0/inputs/0/shape/0", "HERE");
  huge.replace(huge.find("\"HERE\""), 6, "9223372036854775808");
  ExpectBadJson(huge, "graph[0].inputs[0].shape[0]: expected a 64-bit integer, found 92233720");
  huge.replace(huge.find("9223372036854775808"), 19, "99999999999999999999999");
  ExpectBadJson(huge, "graph[0].inputs[0].shape[0]");
  huge.replace(huge.find("99999999999999999999999"), 23, "1e999");
  ExpectBadJson(huge, "malformed JSON");
}

TEST(GraphFromJson, SchemaViolationsNameTheOp) {
  const ErrorKind kind = ErrorKind::kInvalidGraphOp;
  ExpectError(With("/graph/0/kind", "Tanhh"), kind,
              "op 't' (id 140664149209152): unknown kind 'Tanhh'");
  ExpectError(With("/graph/0/attrs", {{"alpha", {{"type", "f32"}, {"value", 1}}}}), kind,
              "Tanh 't' (id 140664149209152): unknown attribute 'alpha'");
  ExpectError(With("/graph/0/attrs", {{"axis", {{"type", "s64"}, {"value", 1}}}}), kind, "axis");
  ExpectError(With("/graph/0/inputs", json::array()), kind, "Tanh 't'");
  json two = json::parse(kTanh);
  two["graph"].push_back(two["graph"][0]);
  ExpectError(two.dump(), ErrorKind::kInvalidGraph, "Tanh 't'");
  two["graph"][1]["outputs"][0]["id"] = 9;
  ExpectError(two.dump(), ErrorKind::kInvalidGraph, "140664149209152");
  two["graph"][1]["id"] = 3;
  two["graph"][0]["inputs"][0]["id"] = 9;
  two["graph"][1]["inputs"][0]["id"] = 18446744073709551615u;
  ExpectError(two.dump(), ErrorKind::kInvalidGraph, "cycle");
}

json Attribute(const char* type, json value) {
  return {{"type", type}, {"value", std::move(value)}};
}

TEST(GraphFromJson, Attributes) {
  json file = json::parse(kTanh);
  json& op = file["graph"][0];
  op["kind"] = "Quantize";
  op["outputs"][0]["dtype"] = "s8";
  op["attrs"] = {{"scales", Attribute("f32[]", {0.1, 3, -2e-3})},
                 {"zps", Attribute("s64[]", {1, -128, 0})},
                 {"qtype", Attribute("string", "per_channel")},
                 {"axis", Attribute("s64", -1)}};
  const Graph graph = Load(file.dump());
  const Attributes& attrs = graph.ops()[0].attrs;
  EXPECT_EQ(*attrs.Get<std::vector<float>>(Attr::kScales), (std::vector<float>{0.1f, 3.f, -2e-3f}));
  EXPECT_EQ(*attrs.Get<std::vector<int64_t>>(Attr::kZps), (std::vector<int64_t>{1, -128, 0}));
  EXPECT_EQ(*attrs.Get<std::string>(Attr::kQType), "per_channel");
  EXPECT_EQ(*attrs.Get<int64_t>(Attr::kAxis), -1);

  const auto bad = [&](const char* name, json attribute, const std::string& part) {
    json changed = file;
    changed["graph"][0]["attrs"][name] = std::move(attribute);
    ExpectBadJson(changed.dump(), absl::StrCat("graph[0].attrs.", name, part));
  };
  bad("axis", Attribute("s64", 1.5), ".value: expected a 64-bit integer");
  bad("axis", Attribute("f64", 1.5), ".type: unknown value 'f64'");
  bad("axis", Attribute("s64", json::array({1})), ".value: expected a 64-bit integer");
  bad("axis", 1, ": expected an object");
  bad("axis", {{"type", "s64"}}, ": 'value' is missing");
  bad("axis", {{"value", 1}}, ": 'type' is missing");
  bad("scales", Attribute("f32[]", {1, "x"}), ".value[1]: expected a number");
  bad("scales", Attribute("f32[]", {1e39}), ".value[0]: expected a number within the range");
  bad("zps", Attribute("s64[]", {0, 0.5}), ".value[1]");
  bad("qtype", Attribute("string", 3), ".value: expected a string");
  file["graph"][0]["attrs"]["axis"] = Attribute("string", "one");
  ExpectError(file.dump(), ErrorKind::kInvalidGraphOp, "axis");
}

TEST(GraphFromJson, BoolsAreNumbersOrWords) {
  json file = json::parse(kTanh);
  json& op = file["graph"][0];
  op["kind"] = "ReduceSum";
  op["attrs"]["axes"] = Attribute("s64[]", {-1});
  for (const json& value : {json(1), json(true)}) {
    op["attrs"]["keep_dims"] = Attribute("bool", value);
    EXPECT_TRUE(Load(file.dump()).ops()[0].Get<Attr::kKeepDims>());
  }
  op["attrs"]["keep_dims"] = Attribute("bool", 0);
  EXPECT_FALSE(Load(file.dump()).ops()[0].Get<Attr::kKeepDims>());
  for (const json& value : {json(2), json(-1), json("true"), json(1.0)}) {
    op["attrs"]["keep_dims"] = Attribute("bool", value);
    ExpectBadJson(file.dump(), "graph[0].attrs.keep_dims.value: expected true, false, 1 or 0");
  }
}

TEST(GraphFromJson, OpsInAnyOrder) {
  json file = json::parse(kTanh);
  json second = file["graph"][0];
  second["id"] = 5;
  second["name"] = "u";
  second["inputs"][0] = second["outputs"][0];
  second["outputs"][0]["id"] = 9;
  file["graph"].insert(file["graph"].begin(), second);
  const Graph graph = Load(file.dump());
  EXPECT_EQ(graph.ops()[0].name, "t");
  EXPECT_EQ(graph.ops()[1].name, "u");
}

TEST(GraphFromJson, MalformedAndTruncated) {
  const std::string text = kTanh;
  for (size_t size = 0; size < text.size(); ++size) {
    const absl::StatusOr<Graph> graph = GraphFromJson(text.substr(0, size));
    ASSERT_FALSE(graph.ok()) << size;
    ASSERT_EQ(ErrorKindOf(graph.status()), ErrorKind::kInvalidJson) << graph.status();
  }
  ExpectBadJson(text + "x", "malformed JSON at byte");
  ExpectBadJson("{\"graph\": [\"\xff\xfe\"]}", "malformed JSON");
  ExpectBadJson("{\"graph\": [NaN]}", "malformed JSON");
  ExpectBadJson(text + '\0', " is NUL");
}

TEST(GraphFromJson, DeepNestingIsRefused) {
  for (const size_t depth : {65, 1000000}) {
    ExpectBadJson(std::string(depth, '['), "nested deeper than 64");
    std::string objects;
    for (size_t i = 0; i < depth; ++i) objects += "{\"a\":";
    ExpectBadJson(objects, "nested deeper than 64");
  }
  Load(With("/note", json::parse(std::string(60, '[') + std::string(60, ']'))));
}

TEST(GraphFromJson, LimitsTheSize) {
  EXPECT_TRUE(GraphFromJson(kTanh, sizeof(kTanh) - 1).ok());
  EXPECT_EQ(ErrorKindOf(GraphFromJson(kTanh, sizeof(kTanh) - 2).status()), ErrorKind::kInvalidJson);
}

// Random damage must give a status, and never anything worse.
TEST(GraphFromJson, SurvivesMutation) {
  std::mt19937 random(1);
  const std::string tokens = "{}[],:\"0-9e.tfn\\ \x80";
  for (int round = 0; round < 4000; ++round) {
    std::string text = kTanh;
    for (int change = 0; change < 1 + round % 3; ++change) {
      const size_t at = random() % text.size();
      const char token = tokens[random() % tokens.size()];
      switch (random() % 3) {
        case 0:
          text[at] = token;
          break;
        case 1:
          text.erase(at, 1 + random() % 20);
          break;
        default:
          text.insert(at, 1, token);
      }
    }
    absl::StatusOr<Graph> graph = GraphFromJson(text);
    if (graph.ok()) {
      InferShapes(*graph).IgnoreError();
      EXPECT_TRUE(GraphFromJson(GraphToJson(*graph)).ok()) << text;
    } else {
      EXPECT_NE(ErrorKindOf(graph.status()), ErrorKind::kNone) << graph.status();
    }
  }
}

TEST(GraphFromJsonFile, NamesTheFile) {
  const std::string missing = ::testing::TempDir() + "/kvant_no_such_file.json";
  EXPECT_EQ(ErrorKindOf(GraphFromJsonFile(missing).status()), ErrorKind::kInvalidArguments);
  EXPECT_FALSE(GraphFromJsonFile(::testing::TempDir()).ok());
  const std::string path = ::testing::TempDir() + "/kvant_json_test.json";
  std::ofstream(path) << "{\"graph\": [1]}";
  const absl::Status status = GraphFromJsonFile(path).status();
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidJson);
  EXPECT_THAT(std::string(status.message()), HasSubstr("kvant_json_test.json: graph[0]: "));
  std::filesystem::remove(path);
}

TEST(GraphToJson, WritesTheFormatsKeysAndTypes) {
  GraphBuilder g({.fpmath = FpMath::kF16, .apply_to_int = true});
  const Value x = g.Input("x", kF16, {2, 3});
  g.Output("y", g.SoftMax(g.MatMul(x, x, {.transpose_b = true})));
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  const json file = json::parse(GraphToJson(*graph));
  EXPECT_TRUE(file["version"].is_string());
  EXPECT_EQ(file["engine_kind"], "cpu");
  EXPECT_EQ(file["fpmath_mode"], "f16");
  EXPECT_EQ(file["fpmath_mode_apply_to_int"], "true");
  EXPECT_EQ(file["input_ports"], json(std::vector<int>{0}));
  EXPECT_EQ(file["output_ports"], json(std::vector<int>{2}));
  const json& matmul = file["graph"][0];
  EXPECT_EQ(matmul["kind"], "MatMul");
  EXPECT_EQ(matmul["attrs"]["transpose_b"], Attribute("bool", 1));
  EXPECT_EQ(matmul["attrs"]["transpose_a"], Attribute("bool", 0));
  const json expected = {
      {"id", 0},          {"dtype", "f16"},           {"shape", {2, 3}},
      {"stride", {3, 1}}, {"layout_type", "strided"}, {"property_type", "variable"}};
  EXPECT_EQ(matmul["inputs"][0], expected);
  EXPECT_EQ(file["graph"][1]["attrs"]["mode"], Attribute("string", "inf_as_zero"));
  ExpectSame(*graph, Load(GraphToJson(*graph)));
}

TEST(GraphToJson, FloatsRoundTrip) {
  std::vector<float> values = {0.f,
                               0.1f,
                               1.f / 3.f,
                               16777216.f,
                               std::numeric_limits<float>::max(),
                               std::numeric_limits<float>::min(),
                               std::numeric_limits<float>::denorm_min(),
                               -1e-20f};
  std::mt19937 random(2);
  while (values.size() < 2000) {
    const uint32_t bits = random();
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    if (value - value == 0.f) values.push_back(value);
  }
  const auto count = static_cast<int64_t>(values.size());
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {2, count});
  g.AddOp(OpKind::kQuantize, "q", {x}, {kS8},
          {{Attr::kScales, values}, {Attr::kQType, std::string("per_channel")}});
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  const Graph again = Load(GraphToJson(*graph));
  ASSERT_EQ(again.ops().size(), 1u);
  const auto* read = again.ops()[0].Find<Attr::kScales>();
  ASSERT_NE(read, nullptr);
  EXPECT_EQ(*read, values);
}

TEST(GraphToJson, NamesAreEscaped) {
  for (const std::string name : {"a \"quoted\\name\"\n\t\x01", "\u00e9\u4e2d"}) {
    GraphBuilder g;
    g.Output(name, g.Tanh(g.Input("x", kF32, {2})));
    const absl::StatusOr<Graph> graph = std::move(g).Build();
    ASSERT_TRUE(graph.ok()) << graph.status();
    EXPECT_EQ(Load(GraphToJson(*graph)).ops()[0].name, name);
  }
  GraphBuilder g;
  g.Output("bad \xff", g.Tanh(g.Input("x", kF32, {2})));
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  Load(GraphToJson(*graph));
}

}  // namespace
}  // namespace kvant
