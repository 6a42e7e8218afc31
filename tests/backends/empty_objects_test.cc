// Objects that were made by default or moved from, and indices and ids of nothing: never a crash.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/backend.h"
#include "kvant/backends/cuda_simt.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/json.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/partitioner.h"

// Using what was moved from is what these tests are about.
// NOLINTBEGIN(bugprone-use-after-move)
namespace kvant {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

Graph TanhGraph() {
  GraphBuilder g;
  g.Output("y", g.Tanh(g.Input("x", kF32, {4})));
  return *std::move(g).Build();
}

Partition AttentionPartition() {
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {1, 2, 8, 16});
  g.Output("o", g.ScaledDotProductAttention(x, x, x, {}).first);
  return PartitionGraph(*std::move(g).Build())->front();
}

void ExpectInvalid(const absl::Status& status, const std::string& message) {
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(message));
}

void ExpectNoTensor(const LogicalTensor& tensor) {
  EXPECT_EQ(tensor.type, kUndef);
  EXPECT_FALSE(tensor.dims);
  EXPECT_EQ(tensor.elements(), 0);
  EXPECT_EQ(tensor.span_elements(), 0);
  EXPECT_EQ(tensor.memory_bytes(), 0);
  EXPECT_THAT(tensor.StridesOrDense(), IsEmpty());
}

void ExpectEmpty(const Partition& partition) {
  EXPECT_TRUE(partition.ops().finalized());
  EXPECT_THAT(partition.ops().ops(), IsEmpty());
  EXPECT_THAT(partition.inputs(), IsEmpty());
  EXPECT_THAT(partition.outputs(), IsEmpty());
  ExpectNoTensor(partition.input(0));
  ExpectNoTensor(partition.output(0));
  EXPECT_EQ(partition.attention(), nullptr);
  ExpectInvalid(partition.WithPorts({}).status(), "no ops");
  const LogicalTensor other{.id = 9, .type = kS32, .dims = Dims{1}};
  for (const std::vector<std::string>& backends :
       std::vector<std::vector<std::string>>{{"cpu"}, {"oracle"}, {}}) {
    const Engine engine = *Engine::Create({.backends = backends});
    ExpectInvalid(engine.Compile(partition).status(), "no ops");
    ExpectInvalid(engine.Compile(partition, {.ports = {other}}).status(), "not one of its ports");
  }
  ExpectInvalid(Engine::Create({.device = Device::kCudaSimt})->Compile(partition).status(),
                "no ops");
}

TEST(EmptyObjectsTest, Partitions) {
  ExpectEmpty(Partition());
  Partition partition = AttentionPartition();
  const Partition taken = std::move(partition);
  ExpectEmpty(partition);
  EXPECT_NE(taken.attention(), nullptr);
  partition = taken;
  EXPECT_NE(partition.attention(), nullptr);
}

TEST(EmptyObjectsTest, PortsThatAreNone) {
  const Partition partition = AttentionPartition();
  for (const int port : {-1, 1, 2, 1 << 30, -(1 << 30)}) {
    ExpectNoTensor(partition.input(port));
    ExpectNoTensor(partition.output(port));
  }
  EXPECT_EQ(partition.InputPort(77), kNoPort);
  EXPECT_EQ(partition.OutputPort(77), kNoPort);
}

// What an engine checks before it asks a backend, a backend may not rely on.
TEST(EmptyObjectsTest, BackendsGivenAnEmptyPartition) {
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(MakeCpuBackend());
  backends.push_back(MakeOracleBackend());
  backends.push_back(MakeCudaSimtBackend());
  backends.push_back(MakeReferenceBackend());
  for (const std::unique_ptr<Backend>& backend : backends) {
    if (backend != nullptr) (void)backend->Compile(Partition());
  }
}

void ExpectNothingToRun(const CompiledPartition& compiled) {
  ExpectEmpty(compiled.partition());
  EXPECT_EQ(compiled.backend(), "");
  EXPECT_FALSE(compiled.fused());
  EXPECT_EQ(compiled.kernel(), "");
  EXPECT_EQ(compiled.rounding(), 0);
  EXPECT_EQ(compiled.ToString(), "nothing to run");
  for (const Engine& engine : {Engine(), *Engine::Create()}) {
    const Stream stream(engine);
    ExpectInvalid(compiled.Execute(stream, absl::Span<const ConstTensor>(), {}), "nothing to run");
    ExpectInvalid(compiled.Execute(stream, {{"x", ConstTensor()}}, {{"o", Tensor()}}),
                  "nothing to run");
  }
}

TEST(EmptyObjectsTest, CompiledPartitions) {
  ExpectNothingToRun(CompiledPartition());
  const Engine engine = *Engine::Create();
  CompiledPartition compiled = *engine.Compile(AttentionPartition());
  const CompiledPartition taken = std::move(compiled);
  ExpectNothingToRun(compiled);
  EXPECT_EQ(taken.backend(), "cpu");
  compiled = taken;
  EXPECT_EQ(compiled.backend(), "cpu");
}

TEST(EmptyObjectsTest, Engines) {
  const Engine none;
  EXPECT_EQ(none.executor().max_concurrency(), 1);
  EXPECT_FALSE(none.memory().asynchronous());
  ExpectInvalid(none.Compile(AttentionPartition()).status(), "no backends");

  Engine engine = *Engine::Create();
  const Engine taken = std::move(engine);
  // Both are the engine.
  EXPECT_EQ(engine.shared_executor(), taken.shared_executor());
  std::vector<float> x(2 * 8 * 16, 1.f), o(x.size());
  for (const Engine& one : {engine, taken}) {
    const absl::StatusOr<CompiledPartition> compiled = one.Compile(AttentionPartition());
    ASSERT_TRUE(compiled.ok()) << compiled.status();
    Stream stream(engine);
    const Stream other = std::move(stream);
    for (const Stream& on : {stream, other}) {
      EXPECT_TRUE(
          compiled
              ->Execute(on, {ConstTensor(x.data(), x.size() * 4)}, {Tensor{o.data(), o.size() * 4}})
              .ok());
      EXPECT_GE(on.executor().max_concurrency(), 1);
    }
  }
  ExpectInvalid(Engine::Create({.device = static_cast<Device>(9)}).status(), "no device");
}

TEST(EmptyObjectsTest, Graphs) {
  Graph graph = TanhGraph();
  const Graph taken = std::move(graph);
  Graph made;
  for (Graph* empty : {&graph, &made}) {
    EXPECT_FALSE(empty->finalized());
    EXPECT_EQ(empty->FindTensor(0), nullptr);
    EXPECT_EQ(empty->FindTensor("x"), nullptr);
    EXPECT_THAT(empty->Subgraph({0, -1, 5}).ops(), IsEmpty());
    EXPECT_EQ(ErrorKindOf(PartitionGraph(*empty).status()), ErrorKind::kInvalidGraph);
    EXPECT_TRUE(InferShapes(*empty).ok());
    EXPECT_THAT(GraphToJson(*empty), HasSubstr("\"graph\": []"));
    EXPECT_TRUE(empty->Finalize().ok());
    EXPECT_THAT(PartitionGraph(*empty).value(), IsEmpty());
  }
  EXPECT_EQ(taken.ops().size(), 1u);
  graph = taken;
  graph = std::move(graph);
  EXPECT_EQ(graph.ops().size(), 1u);
}

TEST(EmptyObjectsTest, TensorsAndOpsThatAreNone) {
  Graph graph = TanhGraph();
  ExpectNoTensor(graph.tensor(77));
  ExpectInvalid(graph.SetTensor({.id = 77, .type = kF32}), "tensor 77 is not in the graph");
  EXPECT_EQ(graph.Subgraph({0, 0, 1, -1, 1 << 30}).ops().size(), 1u);
  Op op;
  op.kind = static_cast<OpKind>(250);
  op.name = "odd";
  Graph other;
  const absl::Status status = other.AddOp(op, {}, {});
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidGraphOp);
  EXPECT_EQ(std::string(status.message()), "op 'odd' (id 0) is of kind 250, which there is not");
}

TEST(EmptyObjectsTest, EnumeratorsThatThereAreNot) {
  const auto error = [](auto add) {
    GraphBuilder g;
    add(g);
    const auto graph = std::move(g).Build();
    return std::string(graph.status().message());
  };
  const auto type = static_cast<DataType>(99);
  const char* const kWrongType = "is of data type 99, which there is not";
  EXPECT_THAT(error([&](GraphBuilder& g) { g.Output("y", g.Tanh(g.Input("x", type, {4}))); }),
              testing::HasSubstr(kWrongType));
  EXPECT_THAT(error([&](GraphBuilder& g) {
                g.AddOp(OpKind::kTanh, "t", {g.Input("x", kF32, {4})}, {type});
              }),
              testing::HasSubstr(kWrongType));
  EXPECT_THAT(error([&](GraphBuilder& g) {
                g.AddOp(static_cast<OpKind>(250), "odd", {g.Input("x", kF32, {4})}, {kF32});
              }),
              testing::HasSubstr("op 'odd' (id 0) is of kind 250, which there is not"));
}

// Sizes of what nobody has validated wrap nowhere.
TEST(EmptyObjectsTest, TensorsWithoutASize) {
  const LogicalTensor unknown{.type = kF32, .dims = Dims{2, kUnknownDim}};
  EXPECT_EQ(unknown.elements(), 0);
  EXPECT_EQ(unknown.memory_bytes(), 0);
  const LogicalTensor huge{.type = kS64, .dims = Dims{int64_t{1} << 40, int64_t{1} << 40}};
  EXPECT_EQ(huge.elements(), 0);
  EXPECT_EQ(huge.memory_bytes(), 0);
  const LogicalTensor large{.type = kS64, .dims = Dims{int64_t{1} << 62}};
  EXPECT_EQ(large.memory_bytes(), 0);
  EXPECT_EQ(DenseStrides({3, int64_t{1} << 62, int64_t{1} << 62}).size(), 3u);
}

TEST(EmptyObjectsTest, Builders) {
  GraphBuilder g;
  g.Output("y", g.Tanh(g.Input("x", kF32, {4})));
  EXPECT_TRUE(std::move(g).Build().ok());
  ExpectInvalid(std::move(g).Build().status(), "a builder builds one graph, and this one has");

  GraphBuilder first;
  const Value x = first.Input("x", kF32, {4});
  GraphBuilder second = std::move(first);
  const Value y = first.Tanh(x);
  ExpectNoTensor(first.Describe({.id = 1000}));
  first.Output("y", first.Reorder(first.Add(x, y)));
  (void)first.Append(x, y, 4, {.type = kS8}, -7);
  EXPECT_FALSE(std::move(first).Build().ok());
  second.Output("y", second.Tanh(x));
  EXPECT_TRUE(std::move(second).Build().ok());

  GraphBuilder wrong;
  const Value a = wrong.Input("a", kF32, {2, 4, 8});
  const Value at = wrong.Input("at", kS32, {1});
  (void)wrong.Append(a, at, 16, {.type = kS8}, -2);  // scales of one number, no axis -2
  (void)wrong.Append(a, at, 16, {.type = kS8}, 99);
  (void)wrong.Append({.id = 1u << 30}, at, 16, {.type = kS8}, 1);
  (void)wrong.Concat({}, 0);
  EXPECT_FALSE(std::move(wrong).Build().ok());
}

}  // namespace
}  // namespace kvant
// NOLINTEND(bugprone-use-after-move)
