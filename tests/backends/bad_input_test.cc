// Bad input, from text to execution: a status that says what is wrong and where,
// and nothing written to outputs.
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/json.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/partitioner.h"
#include "kvant_test_config.h"
#include "nlohmann/json.hpp"

namespace kvant {
namespace {

using Json = nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kTokens = 8, kSize = 16, kGroup = 4;

// Attention over an int4 K: q 0, k 1, scales 2, zero points 3, v 4.
absl::StatusOr<Graph> BaseGraph() {
  GraphBuilder g({.apply_to_int = true});
  const Value q = g.Input("q", kF32, {1, 2, 3, kSize});
  const Value k = g.Input("k", kU4, {1, 2, kTokens, kSize});
  const Value scales = g.Input("scales", kF32, {1, 2, kTokens, kSize / kGroup});
  const Value zps = g.Input("zps", kU4, {1, 2, kTokens, kSize / kGroup});
  const Value v = g.Input("v", kF32, {1, 2, kTokens, kSize});
  const Value key = g.DynamicDequantize(k, scales, zps, {.group_shape = {1, 1, 1, kGroup}});
  const Value scores = g.MatMul(q, key, {.transpose_b = true});
  g.Output("o", g.MatMul(g.SoftMax(scores), v));
  return std::move(g).Build();
}

Json BaseJson() { return Json::parse(GraphToJson(*BaseGraph())); }

// Every mention of a tensor.
void EditTensor(Json& graph, uint64_t id, const std::function<void(Json&)>& edit) {
  for (Json& op : graph["graph"]) {
    for (const char* side : {"inputs", "outputs"}) {
      for (Json& tensor : op[side]) {
        if (tensor["id"] == id) edit(tensor);
      }
    }
  }
}

Json& FindOp(Json& graph, const std::string& kind) {
  for (Json& op : graph["graph"]) {
    if (op["kind"] == kind) return op;
  }
  return graph["graph"][0];
}

void SetShape(Json& graph, uint64_t id, const std::vector<int64_t>& shape) {
  EditTensor(graph, id, [&](Json& tensor) {
    tensor["shape"] = shape;
    std::vector<int64_t> strides(shape.size(), 1);
    // Wrapping is what the reader has to survive.
    for (int d = static_cast<int>(shape.size()) - 2; d >= 0; --d) {
      strides[d] = static_cast<int64_t>(static_cast<uint64_t>(strides[d + 1]) *
                                        static_cast<uint64_t>(shape[d + 1]));
    }
    tensor["stride"] = strides;
  });
}

// Compiles every partition for every backend; the first error.
absl::Status CompileAll(const Graph& graph) {
  KVANT_ASSIGN_OR_RETURN(const std::vector<Partition> partitions, PartitionGraph(graph));
  for (const char* backend : {"oracle", "cpu"}) {
    KVANT_ASSIGN_OR_RETURN(const Engine engine, Engine::Create({.backends = {backend}}));
    for (const Partition& partition : partitions) {
      KVANT_RETURN_IF_ERROR(engine.Compile(partition).status());
    }
  }
  return absl::OkStatus();
}

absl::Status Load(const std::string& text) {
  KVANT_ASSIGN_OR_RETURN(Graph graph, GraphFromJson(text));
  KVANT_RETURN_IF_ERROR(InferShapes(graph));
  return CompileAll(graph);
}

struct BadGraph {
  std::string name;
  std::function<void(Json&)> damage;
  ErrorKind kind;
  std::vector<std::string> mentions;
};

void PrintTo(const BadGraph& bad, std::ostream* out) { *out << bad.name; }

std::vector<BadGraph> BadGraphs() {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 2;
  const auto shape = [](uint64_t id, const std::vector<int64_t>& dims) {
    return [id, dims](Json& g) { SetShape(g, id, dims); };
  };
  const auto attr = [](const char* kind, const char* name, const char* type, Json value) {
    return [=](Json& g) { FindOp(g, kind)["attrs"][name] = {{"type", type}, {"value", value}}; };
  };
  return {
      {"UnknownKind",
       [](Json& g) { FindOp(g, "SoftMax")["kind"] = "HardMax"; },
       ErrorKind::kInvalidGraphOp,
       {"HardMax"}},
      {"UnknownAttribute",
       attr("SoftMax", "sharpness", "f32", 2.0),
       ErrorKind::kInvalidGraphOp,
       {"SoftMax", "sharpness"}},
      {"AttributeOfAnotherType",
       attr("SoftMax", "axis", "f32", 1.0),
       ErrorKind::kInvalidGraphOp,
       {"SoftMax", "axis"}},
      {"AttributeOfTheWrongJsonType",
       attr("SoftMax", "axis", "s64", "last"),
       ErrorKind::kInvalidJson,
       {"axis"}},
      {"ModeThatIsNone",
       attr("SoftMax", "mode", "string", "round"),
       ErrorKind::kInvalidGraphOp,
       {"SoftMax", "mode", "round"}},
      {"MissingAttribute",
       [](Json& g) { FindOp(g, "DynamicDequantize")["attrs"].erase("group_shape"); },
       ErrorKind::kInvalidArguments,
       {"DynamicDequantize", "group_shape"}},
      {"TwoProducers",
       [](Json& g) {
         Json copy = FindOp(g, "SoftMax");
         copy["id"] = 77;
         g["graph"].push_back(copy);
       },
       ErrorKind::kInvalidGraph,
       {"SoftMax", "id 77"}},
      {"DuplicateOpId",
       [](Json& g) { FindOp(g, "SoftMax")["id"] = FindOp(g, "DynamicDequantize")["id"]; },
       ErrorKind::kInvalidGraph,
       {"SoftMax"}},
      {"Cycle",
       [](Json& g) {
         const Json out = FindOp(g, "SoftMax")["outputs"][0];
         FindOp(g, "MatMul")["inputs"][0] = out;
       },
       ErrorKind::kInvalidGraph,
       {"cycle"}},
      {"TensorDeclaredTwice",
       [](Json& g) { FindOp(g, "SoftMax")["inputs"][0]["dtype"] = "bf16"; },
       ErrorKind::kNone,
       {"SoftMax"}},
      {"SizeOverflow", shape(4, {1, kHuge, kHuge, kSize}), ErrorKind::kNone, {"tensor 4"}},
      {"BytesOverflow", shape(4, {1, 1, kHuge, 2}), ErrorKind::kNone, {"tensor 4"}},
      {"NegativeDim", shape(4, {1, 2, -3, kSize}), ErrorKind::kNone, {"tensor 4"}},
      {"TooManyDims", shape(4, std::vector<int64_t>(13, 1)), ErrorKind::kNone, {"inputs[1]", "13"}},
      {"ZeroTokensOnOneSide",
       shape(4, {1, 2, 0, kSize}),
       ErrorKind::kInvalidShape,
       {"MatMul", "tensor 4"}},
      {"RankMismatch", shape(4, {kTokens}), ErrorKind::kInvalidShape, {"MatMul", "tensor"}},
      {"HeadsDiffer",
       shape(4, {1, 3, kTokens, kSize}),
       ErrorKind::kInvalidShape,
       {"MatMul", "tensor 4"}},
      {"TokensDiffer",
       shape(4, {1, 2, kTokens + 1, kSize}),
       ErrorKind::kInvalidShape,
       {"MatMul", "tensor 4", "9"}},
      {"GroupsDoNotDivide",
       attr("DynamicDequantize", "group_shape", "s64[]", {1, 1, 1, 5}),
       ErrorKind::kInvalidArguments,
       {"DynamicDequantize", "tensor 1", "5"}},
      {"GroupOfZero",
       attr("DynamicDequantize", "group_shape", "s64[]", {1, 1, 1, 0}),
       ErrorKind::kInvalidArguments,
       {"DynamicDequantize", "0"}},
      {"GroupShapeOfAnotherRank",
       attr("DynamicDequantize", "group_shape", "s64[]", {1, 4}),
       ErrorKind::kInvalidArguments,
       {"DynamicDequantize", "tensor 1"}},
      {"ScalesOfTheWrongShape",
       shape(2, {1, 2, kTokens, 2}),
       ErrorKind::kInvalidArguments,
       {"DynamicDequantize", "tensor 2"}},
      {"ZeroPointsOfTheWrongShape",
       shape(3, {1, 2, 1, 4}),
       ErrorKind::kInvalidArguments,
       {"DynamicDequantize", "tensor 3"}},
      {"ScalesOfIntegers",
       [](Json& g) { EditTensor(g, 2, [](Json& t) { t["dtype"] = "s8"; }); },
       ErrorKind::kInvalidDataType,
       {"DynamicDequantize", "tensor 2"}},
      {"UnknownType",
       [](Json& g) { EditTensor(g, 1, [](Json& t) { t["dtype"] = "f3"; }); },
       ErrorKind::kInvalidJson,
       {"f3"}},
      {"MissingInput",
       [](Json& g) { FindOp(g, "MatMul")["inputs"].erase(1); },
       ErrorKind::kInvalidGraphOp,
       {"MatMul"}},
      {"NoSuchAxis", attr("SoftMax", "axis", "s64", 9), ErrorKind::kInvalidShape, {"SoftMax", "9"}},
      {"InputsAreNoList",
       [](Json& g) { FindOp(g, "MatMul")["inputs"] = 5; },
       ErrorKind::kInvalidJson,
       {"inputs"}},
      {"StridesOfAnotherRank",
       [](Json& g) { EditTensor(g, 4, [](Json& t) {
                       t["stride"] = {1, 1};
                     }); },
       ErrorKind::kNone,
       {"tensor 4"}},
  };
}

class BadGraphTest : public testing::TestWithParam<BadGraph> {};

TEST_P(BadGraphTest, IsRefusedWithASentence) {
  Json graph = BaseJson();
  GetParam().damage(graph);
  const absl::Status status = Load(graph.dump());
  ASSERT_FALSE(status.ok());
  // Where it is found first (text, schema, shapes) may be any of several.
  if (GetParam().kind != ErrorKind::kNone) {
    EXPECT_EQ(ErrorKindName(ErrorKindOf(status)), ErrorKindName(GetParam().kind)) << status;
  }
  EXPECT_NE(ErrorKindOf(status), ErrorKind::kNone) << status;
  for (const std::string& part : GetParam().mentions) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
}

INSTANTIATE_TEST_SUITE_P(Bad, BadGraphTest, testing::ValuesIn(BadGraphs()),
                         [](const auto& info) { return info.param.name; });

TEST(BadInputTest, TheBaseIsFine) {
  const absl::Status status = Load(BaseJson().dump());
  EXPECT_TRUE(status.ok()) << status;
}

TEST(BadInputTest, EveryTruncationOfTheTextIsRefused) {
  const std::string text = GraphToJson(*BaseGraph());
  const size_t end = text.find_last_not_of(" \n\t");
  for (size_t length = 0; length < end; length += 7) {
    EXPECT_FALSE(Load(text.substr(0, length)).ok()) << length;
  }
}

TEST(BadInputTest, TextThatIsNoGraph) {
  for (const char* text : {"", " ", "null", "1", "[]", "{}", "\"graph\"", "{\"graph\": 1}",
                           "{\"graph\": [1]}", "{\"graph\": [{}]}", "{\"graph\": [{\"id\": -1}]}",
                           "\xff\xfe", "{\"graph\": [{\"id\": 1e400}]}"}) {
    const absl::Status status = GraphFromJson(text).status();
    EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidJson) << text << ": " << status;
  }
}

TEST(BadInputTest, DeepNestingIsRefused) {
  std::string deep(1000000, '[');
  EXPECT_EQ(ErrorKindOf(GraphFromJson(deep).status()), ErrorKind::kInvalidJson);
  deep += std::string(1000000, ']');
  EXPECT_EQ(ErrorKindOf(GraphFromJson("{\"graph\": " + deep + "}").status()),
            ErrorKind::kInvalidJson);
}

TEST(BadInputTest, HugeTextIsRefused) {
  const std::string text = GraphToJson(*BaseGraph());
  const absl::Status status = GraphFromJson(text, text.size() - 1).status();
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidJson) << status;
}

// Everything about executing, on each backend.
class BadExecutionTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    absl::StatusOr<Graph> graph = BaseGraph();
    ASSERT_TRUE(graph.ok()) << graph.status();
    absl::StatusOr<std::vector<Partition>> partitions = PartitionGraph(*graph);
    ASSERT_TRUE(partitions.ok() && partitions->size() == 1) << partitions.status();
    partition_ = partitions->front();
    absl::StatusOr<Engine> engine = Engine::Create({.backends = {GetParam()}});
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    absl::StatusOr<CompiledPartition> compiled = engine_->Compile(partition_);
    ASSERT_TRUE(compiled.ok()) << compiled.status();
    compiled_ = *std::move(compiled);
    for (size_t i = 0; i < partition_.inputs().size(); ++i) {
      memory_.emplace_back(partition_.input(static_cast<int>(i)).memory_bytes() / 4 + 1);
      std::vector<float>& m = memory_.back();
      inputs_.emplace_back(m.data(), (m.size() - 1) * 4);
    }
    o_.assign(1 * 2 * 3 * kSize + 1, kUntouched);
    outputs_ = {{o_.data(), (o_.size() - 1) * 4}};
  }

  // The status of executing; outputs must be as they were unless it is OK.
  absl::Status Execute(const Stream& stream, absl::Span<std::byte> scratch = {}) {
    absl::Status status = compiled_->Execute(stream, inputs_, outputs_, scratch);
    if (status.ok()) return status;
    for (const float x : o_) EXPECT_EQ(x, kUntouched);
    return status;
  }

  // Refused, with a message that says so.
  void ExpectRefused(const std::string& mention) {
    const absl::Status status = Execute(Stream(*engine_));
    EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(mention));
  }

  static constexpr float kUntouched = -12345.f;
  Partition partition_;
  std::optional<Engine> engine_;
  std::optional<CompiledPartition> compiled_;
  std::vector<std::vector<float>> memory_;
  std::vector<float> o_;
  std::vector<ConstTensor> inputs_;
  std::vector<Tensor> outputs_;
};

TEST_P(BadExecutionTest, TheBaseRuns) {
  EXPECT_TRUE(Execute(Stream(*engine_)).ok());
  EXPECT_NE(o_.front(), kUntouched);
  EXPECT_EQ(o_.back(), kUntouched);
}

TEST_P(BadExecutionTest, NullHandles) {
  for (ConstTensor& input : inputs_) {
    const ConstTensor whole = std::exchange(input, ConstTensor());
    ExpectRefused("null");
    input = whole;
  }
  outputs_[0].data = nullptr;
  ExpectRefused("'o'");
}

TEST_P(BadExecutionTest, TooSmallBuffers) {
  for (ConstTensor& input : inputs_) {
    --input.bytes;
    ExpectRefused("needs");
    ++input.bytes;
  }
  --outputs_[0].bytes;
  ExpectRefused("'o'");
}

TEST_P(BadExecutionTest, MissingTensors) {
  const ConstTensor last = inputs_.back();
  inputs_.pop_back();
  ExpectRefused("inputs");
  inputs_.insert(inputs_.end(), 2, last);
  ExpectRefused("inputs");
  inputs_.pop_back();
  outputs_.clear();
  ExpectRefused("outputs");
}

TEST_P(BadExecutionTest, MissingAndUnknownNames) {
  const Stream stream(*engine_);
  const Tensor o = outputs_[0];
  const ConstTensor x = inputs_[0];
  EXPECT_THAT(std::string(compiled_->Execute(stream, {{"q", x}}, {{"o", o}}).message()),
              HasSubstr("missing"));
  EXPECT_THAT(std::string(compiled_->Execute(stream, {{"nobody", x}}, {{"o", o}}).message()),
              HasSubstr("'nobody'"));
  EXPECT_THAT(std::string(compiled_->Execute(stream, {{"q", x}, {"q", x}}, {{"o", o}}).message()),
              HasSubstr("twice"));
  EXPECT_EQ(o_.front(), kUntouched);
}

TEST_P(BadExecutionTest, MisalignedTensors) {
  outputs_[0].data = reinterpret_cast<std::byte*>(outputs_[0].data) + 1;
  ExpectRefused("'o'");
}

TEST_P(BadExecutionTest, StreamOfAnotherEngine) {
  const absl::StatusOr<Engine> other = Engine::Create({.backends = {GetParam()}});
  ASSERT_TRUE(other.ok());
  const absl::Status status = Execute(Stream(*other));
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments);
  EXPECT_THAT(std::string(status.message()), HasSubstr("stream"));
}

TEST_P(BadExecutionTest, ScratchTooSmallOrMisaligned) {
  const size_t need = compiled_->scratch_bytes();
  std::vector<std::byte> memory(need + 256);
  const size_t past = reinterpret_cast<uintptr_t>(memory.data()) % 64;
  std::byte* const aligned = memory.data() + (64 - past) % 64;
  const Stream stream(*engine_);
  EXPECT_FALSE(Execute(stream, absl::MakeSpan(aligned + 1, need)).ok());
  if (need > 0) {
    EXPECT_FALSE(Execute(stream, absl::MakeSpan(aligned, need - 1)).ok());
  }
  EXPECT_TRUE(Execute(stream, absl::MakeSpan(aligned, need)).ok());
}

TEST_P(BadExecutionTest, PortsThatDoNotFit) {
  const auto compile = [&](LogicalTensor port) {
    return engine_->Compile(partition_, {.ports = {std::move(port)}}).status();
  };
  const auto k = [](Dims dims, Dims strides) {
    return LogicalTensor{
        .id = 1, .type = kU4, .dims = std::move(dims), .strides = std::move(strides)};
  };
  EXPECT_EQ(ErrorKindOf(compile({.id = 555, .type = kF32, .dims = Dims{1}})),
            ErrorKind::kInvalidArguments);
  EXPECT_FALSE(compile(k({1, 2, kTokens, 12}, {192, 96, 12, 1})).ok());
  EXPECT_FALSE(compile(k({1, 2, 5, kSize}, {160, 80, kSize, 1})).ok());
  EXPECT_FALSE(compile(k({1, 2, kTokens, kSize}, {256, 128, kSize, -1})).ok());
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 4;
  EXPECT_FALSE(compile(k({1, 2, kTokens, kSize}, {256, kHuge, kHuge, 1})).ok());
  // Outputs that overlap themselves.
  EXPECT_FALSE(compile({.id = partition_.outputs()[0],
                        .type = kF32,
                        .dims = Dims{1, 2, 3, kSize},
                        .strides = Dims{0, 0, 0, 1}})
                   .ok());
}

INSTANTIATE_TEST_SUITE_P(Backends, BadExecutionTest,
                         testing::Values("cpu", "oracle"
#ifdef KVANT_WITH_ONEDNN
                                         ,
                                         "reference"
#endif
                                         ),
                         [](const auto& info) { return info.param; });

TEST(BadInputTest, CompilingWhatNothingRuns) {
  GraphBuilder g;
  g.Output("y", g.Tanh(g.Input("x", kF32, {4})));
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  const absl::StatusOr<std::vector<Partition>> partitions = PartitionGraph(*graph);
  ASSERT_TRUE(partitions.ok() && partitions->size() == 1);
  const absl::StatusOr<Engine> engine = Engine::Create({.backends = {"cpu"}});
  const absl::Status status = engine->Compile(partitions->front()).status();
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("cpu"), HasSubstr("Tanh")));
  const absl::Status fused =
      Engine::Create()->Compile(partitions->front(), {.require_fused = true}).status();
  EXPECT_EQ(ErrorKindOf(fused), ErrorKind::kUnimplemented);
}

TEST(BadInputTest, UnknownBackend) {
  const absl::Status status = Engine::Create({.backends = {"quantum"}}).status();
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments);
  EXPECT_THAT(std::string(status.message()), HasSubstr("quantum"));
}

TEST(BadInputTest, PartitioningAGraphThatIsNotFinalized) {
  EXPECT_EQ(ErrorKindOf(PartitionGraph(Graph()).status()), ErrorKind::kInvalidGraph);
}

TEST(BadInputTest, NoElementsRunAndDoNothing) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {1, 2, 0, 8});
  const Value k = g.Input("k", kF32, {1, 2, 5, 8});
  g.Output("o", g.MatMul(g.SoftMax(g.MatMul(q, k, {.transpose_b = true})), k));
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  const absl::StatusOr<std::vector<Partition>> partitions = PartitionGraph(*graph);
  ASSERT_TRUE(partitions.ok()) << partitions.status();
  const absl::StatusOr<Engine> engine = Engine::Create();
  ASSERT_EQ(partitions->size(), 1u);
  const absl::StatusOr<CompiledPartition> compiled = engine->Compile(partitions->front());
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  const std::vector<float> keys(80);
  const absl::Status status =
      compiled->Execute(Stream(*engine), {{"q", {}}, {"k", {keys.data(), 320}}}, {{"o", {}}});
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace kvant
