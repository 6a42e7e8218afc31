#include "kvant/backends/engine.h"

#include <atomic>
#include <sstream>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tests/backends/ops/op_testing.h"
#include "kvant_test_config.h"

namespace kvant::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// a [2, 3] + b [3] -> y, named, with ids 10, 11 and 12.
Graph AddGraph(Dims y_dims = {2, 3}, std::optional<Dims> y_strides = std::nullopt) {
  const auto tensor = [](TensorId id, const char* name, Dims dims) {
    LogicalTensor desc;
    desc.id = id;
    desc.name = name;
    desc.type = kF32;
    desc.dims = std::move(dims);
    return desc;
  };
  LogicalTensor y = tensor(12, "y", y_dims);
  y.strides = std::move(y_strides);
  Op op;
  op.id = 4;
  op.kind = OpKind::kAdd;
  op.name = "sum";
  Graph graph;
  EXPECT_TRUE(
      graph.AddOp(op, {tensor(10, "a", y_dims), tensor(11, "b", {y_dims.back()})}, {y}).ok());
  EXPECT_TRUE(graph.Finalize().ok());
  return graph;
}

Partition AddPartition(Dims y_dims = {2, 3}, std::optional<Dims> y_strides = std::nullopt) {
  return PartitionGraph(AddGraph(std::move(y_dims), std::move(y_strides)))->front();
}

absl::StatusOr<Engine> Oracle() { return Engine::Create({.backends = {"oracle"}, .threads = 2}); }

class ExecuteTest : public ::testing::Test {
 protected:
  // Expects this error, and that the output was not touched.
  void ExpectError(const absl::Status& status, const std::string& message) {
    EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments) << status;
    EXPECT_EQ(std::string(status.message()), message);
    for (float value : y_) EXPECT_EQ(value, 42);
  }

  const Engine engine_ = *Oracle();
  const Stream stream_{engine_};
  const CompiledPartition compiled_ = *engine_.Compile(AddPartition());
  alignas(8) float a_[7] = {1, 2, 3, 4, 5, 6, 7};
  alignas(8) float b_[4] = {10, 20, 30, 40};
  alignas(8) float y_[7] = {42, 42, 42, 42, 42, 42, 42};
  const ConstTensor a_tensor_{a_, 24}, b_tensor_{b_, 12};
  const Tensor y_tensor_{y_, 24};
};

TEST_F(ExecuteTest, RunsByPosition) {
  ASSERT_TRUE(compiled_.Execute(stream_, {a_tensor_, b_tensor_}, {y_tensor_}).ok());
  EXPECT_THAT(y_, ::testing::ElementsAre(11, 22, 33, 14, 25, 36, 42));
}

TEST_F(ExecuteTest, RunsByNameAndId) {
  ASSERT_TRUE(
      compiled_.Execute(stream_, {{"11", b_tensor_}, {"a", a_tensor_}}, {{"y", y_tensor_}}).ok());
  EXPECT_THAT(y_, ::testing::ElementsAre(11, 22, 33, 14, 25, 36, 42));
}

TEST_F(ExecuteTest, CountsTensors) {
  ExpectError(compiled_.Execute(stream_, {a_tensor_}, {y_tensor_}),
              "the partition has 2 inputs, not 1");
  ExpectError(compiled_.Execute(stream_, {a_tensor_, b_tensor_, b_tensor_}, {y_tensor_}),
              "the partition has 2 inputs, not 3");
  ExpectError(compiled_.Execute(stream_, {a_tensor_, b_tensor_}, absl::Span<const Tensor>()),
              "the partition has 1 outputs, not 0");
}

TEST_F(ExecuteTest, RefusesNull) {
  ExpectError(compiled_.Execute(stream_, {a_tensor_, ConstTensor(nullptr, 12)}, {y_tensor_}),
              "input 1 'b' (tensor 11, f32[3]) is null");
  ExpectError(compiled_.Execute(stream_, {a_tensor_, b_tensor_}, {Tensor{nullptr, 24}}),
              "output 0 'y' (tensor 12, f32[2,3]) is null");
}

TEST_F(ExecuteTest, RefusesTooSmall) {
  ExpectError(compiled_.Execute(stream_, {ConstTensor(a_, 23), b_tensor_}, {y_tensor_}),
              "input 0 'a' (tensor 10, f32[2,3]) needs 24 bytes, not 23");
  ExpectError(compiled_.Execute(stream_, {a_tensor_, b_tensor_}, {Tensor{y_, 20}}),
              "output 0 'y' (tensor 12, f32[2,3]) needs 24 bytes, not 20");
}

TEST_F(ExecuteTest, RefusesMisaligned) {
  const void* odd = reinterpret_cast<const char*>(a_) + 2;
  ExpectError(compiled_.Execute(stream_, {ConstTensor(odd, 24), b_tensor_}, {y_tensor_}),
              "input 0 'a' (tensor 10, f32[2,3]) is not aligned to 4 bytes");
}

TEST_F(ExecuteTest, RefusesAnotherEnginesStream) {
  const Engine other = *Oracle();
  ExpectError(compiled_.Execute(Stream(other), {a_tensor_, b_tensor_}, {y_tensor_}),
              "the stream is of another engine than the compiled partition");
}

TEST_F(ExecuteTest, RefusesUnknownMissingAndRepeatedNames) {
  ExpectError(compiled_.Execute(stream_, {{"a", a_tensor_}, {"c", b_tensor_}}, {{"y", y_tensor_}}),
              "input 'c' is no port of the partition");
  ExpectError(compiled_.Execute(stream_, {{"a", a_tensor_}}, {{"y", y_tensor_}}),
              "input 1 'b' (tensor 11, f32[3]) is missing");
  ExpectError(compiled_.Execute(stream_, {{"a", a_tensor_}, {"10", a_tensor_}}, {{"y", y_tensor_}}),
              "input 0 'a' (tensor 10, f32[2,3]) is given twice");
  ExpectError(compiled_.Execute(stream_, {{"a", a_tensor_}, {"b", b_tensor_}}, {{"a", y_tensor_}}),
              "output 'a' is no port of the partition");
}

// Ids are left then. Tensors within a graph may share a name.
TEST_F(ExecuteTest, RefusesNamesThatNameNoOnePort) {
  const auto square = [](TensorId id, const char* name) {
    LogicalTensor tensor;
    tensor.id = id;
    tensor.name = name;
    tensor.type = kF32;
    tensor.dims = Dims{2, 2};
    return tensor;
  };
  Graph graph;
  const LogicalTensor a = square(10, ""), b = square(11, ""), c = square(12, "x"),
                      d = square(13, "x");
  Op op;
  op.kind = OpKind::kMatMul;
  for (const auto& [in, out] : std::vector<std::pair<std::vector<LogicalTensor>, LogicalTensor>>{
           {{a, b}, c}, {{b, a}, d}, {{c, d}, square(14, "y")}}) {
    ASSERT_TRUE(graph.AddOp(op, in, {out}).ok());
    ++op.id;
  }
  ASSERT_TRUE(graph.Finalize().ok());
  const std::vector<Partition> partitions = *PartitionGraph(graph);
  ASSERT_EQ(partitions.size(), 3u);
  const auto run = [&](int partition, const char* first, const char* second, const char* out) {
    return engine_.Compile(partitions[partition])
        ->Execute(stream_, {{first, a_tensor_}, {second, ConstTensor(b_, 16)}}, {{out, y_tensor_}});
  };
  ExpectError(run(2, "x", "13", "y"),
              "input 'x' is the name of more than one port of the partition");
  ExpectError(run(0, "", "11", "x"), "input '' is no port of the partition");
  EXPECT_TRUE(run(2, "12", "13", "y").ok());
  EXPECT_TRUE(run(0, "10", "11", "x").ok());
}

TEST_F(ExecuteTest, ChecksScratch) {
  alignas(64) std::byte scratch[128];
  ExpectError(compiled_.Execute(stream_, {a_tensor_, b_tensor_}, {y_tensor_},
                                absl::MakeSpan(scratch + 1, 64)),
              "scratch is not aligned to 64 bytes");
  EXPECT_TRUE(
      compiled_.Execute(stream_, {a_tensor_, b_tensor_}, {y_tensor_}, absl::MakeSpan(scratch))
          .ok());
}

TEST_F(ExecuteTest, RunsInManyThreadsAtOnce) {
  std::vector<std::thread> threads;
  threads.reserve(8);
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 50; ++round) {
        const float a[6] = {1.f * t, 2, 3, 4, 5, 1.f * round};
        float y[6] = {};
        const absl::Status done = compiled_.Execute(stream_, {ConstTensor(a, sizeof(a)), b_tensor_},
                                                    {Tensor{y, sizeof(y)}});
        if (!done.ok() || y[0] != t + 10 || y[5] != round + 30) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(EngineTest, KnowsItsBackends) {
  const absl::StatusOr<Engine> engine = Engine::Create({.backends = {"abacus"}});
  EXPECT_EQ(ErrorKindOf(engine.status()), ErrorKind::kInvalidArguments);
  EXPECT_EQ(std::string(engine.status().message()),
            "no backend is named 'abacus'; there are cpu, reference, oracle, cuda, cuda_simt");
  for (const auto& [device, name] :
       {std::pair(Device::kCpu, "cuda_simt"), {Device::kCudaSimt, "oracle"}}) {
    const absl::Status elsewhere = Engine::Create({.device = device, .backends = {name}}).status();
    EXPECT_EQ(ErrorKindOf(elsewhere), ErrorKind::kInvalidArguments) << elsewhere;
    EXPECT_THAT(std::string(elsewhere.message()), HasSubstr("does not run on device "));
  }
#ifndef KVANT_WITH_ONEDNN
  const absl::StatusOr<Engine> reference = Engine::Create({.backends = {"reference"}});
  EXPECT_EQ(ErrorKindOf(reference.status()), ErrorKind::kUnimplemented);
  EXPECT_EQ(std::string(reference.status().message()), "backend 'reference' is not in this build");
#endif
}

TEST(EngineTest, UsesTheCallersExecutor) {
  class Counting : public Executor {
   public:
    int max_concurrency() const override { return 1; }
    void ParallelFor(int64_t n, absl::FunctionRef<void(int64_t, int)> body) override {
      ++calls;
      for (int64_t i = 0; i < n; ++i) body(i, 0);
    }
    int calls = 0;
  };
  const auto executor = std::make_shared<Counting>();
  const Engine engine = *Engine::Create({.backends = {"oracle"}, .executor = executor});
  const CompiledPartition compiled = *engine.Compile(AddPartition());
  const float a[6] = {}, b[3] = {};
  float y[6];
  ASSERT_TRUE(
      compiled.Execute(Stream(engine), {ConstTensor(a, 24), ConstTensor(b, 12)}, {Tensor{y, 24}})
          .ok());
  EXPECT_GT(executor->calls, 0);
}

TEST(EngineTest, AsksBackendsInOrderAndSaysWhyTheyDeclined) {
  const Engine engine = *Engine::Create({.backends = {"cpu", "oracle"}});
  const absl::StatusOr<CompiledPartition> compiled = engine.Compile(AddPartition());
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  EXPECT_EQ(compiled->backend(), "oracle");
  EXPECT_FALSE(compiled->fused());
  ASSERT_EQ(compiled->passed_over().size(), 1u);
  EXPECT_THAT(compiled->passed_over()[0], HasSubstr("cpu: "));
  std::ostringstream text;
  text << *compiled;
  EXPECT_THAT(text.str(), HasSubstr("oracle, f64, op by op"));
  EXPECT_THAT(text.str(), HasSubstr("passed over: cpu: "));
}

TEST(EngineTest, FailsWhereFusedIsRequiredAndNothingFuses) {
  const Engine engine = *Engine::Create({.backends = {"cpu", "oracle"}});
  const absl::Status status = engine.Compile(AddPartition(), {.require_fused = true}).status();
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no backend runs it. cpu: "));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("; oracle: does not fuse, and fused is required"));
}

TEST(EngineTest, SaysThatTheOracleWouldRunIt) {
  const Engine engine = *Engine::Create({.backends = {"cpu"}});
  const auto why = [&](bool fused) {
    return std::string(engine.Compile(AddPartition(), {.require_fused = fused}).status().message());
  };
  EXPECT_THAT(why(false),
              HasSubstr(". The backend 'oracle', which the engine has not, runs ops in f64"));
  EXPECT_THAT(why(true), Not(HasSubstr("oracle")));
}

LogicalTensor Port(TensorId id, Dims dims, std::optional<Dims> strides = std::nullopt) {
  LogicalTensor port;
  port.id = id;
  port.type = kF32;
  port.dims = std::move(dims);
  port.strides = std::move(strides);
  return port;
}

TEST(EngineTest, CompilesForOtherShapes) {
  const Engine engine = *Oracle();
  const absl::StatusOr<CompiledPartition> compiled = engine.Compile(
      AddPartition(),
      {.ports = {Port(10, {2, 2}, Dims{4, 1}), Port(11, {2}), Port(12, {2, 2}, Dims{3, 1})}});
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  EXPECT_EQ(*compiled->partition().output(0).dims, (Dims{2, 2}));
  // A tensor of 2 rows, 4 apart, spans 2 * 4 elements.
  const float a[8] = {1, 2, -1, -1, 3, 4, -1, -1}, b[2] = {10, 20};
  float y[6] = {-1, -1, -1, -1, -1, -1};
  ASSERT_TRUE(
      compiled->Execute(Stream(engine), {ConstTensor(a, 32), ConstTensor(b, 8)}, {Tensor{y, 24}})
          .ok());
  EXPECT_THAT(y, ::testing::ElementsAre(11, 22, -1, 13, 24, -1));
}

TEST(EngineTest, RefusesPortsThatAreNone) {
  const absl::Status status =
      Oracle()->Compile(AddPartition(), {.ports = {Port(99, {2})}}).status();
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments);
  EXPECT_THAT(std::string(status.message()), HasSubstr("tensor 99 is not one of its ports"));
}

TEST(EngineTest, RefusesShapesThatContradict) {
  const absl::Status status =
      Oracle()->Compile(AddPartition(), {.ports = {Port(10, {2, 5})}}).status();
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidShape);
  EXPECT_THAT(std::string(status.message()), HasSubstr("Add 'sum' (id 4)"));
}

TEST(EngineTest, RefusesUnknownShapes) {
  LogicalTensor a = Port(0, {kUnknownDim, 4}), y = Port(1, {kUnknownDim, 4});
  Op op;
  op.kind = OpKind::kTanh;
  Graph graph;
  ASSERT_TRUE(graph.AddOp(op, {a}, {y}).ok());
  ASSERT_TRUE(graph.Finalize().ok());
  const Partition partition = PartitionGraph(graph)->front();
  const Engine engine = *Oracle();
  EXPECT_EQ(ErrorKindOf(engine.Compile(partition).status()), ErrorKind::kInvalidShape);
  const absl::Status of_input = engine.Compile(partition, {.ports = {Port(1, {3, 4})}}).status();
  EXPECT_EQ(ErrorKindOf(of_input), ErrorKind::kInvalidShape) << of_input;
  EXPECT_TRUE(engine.Compile(partition, {.ports = {Port(0, {3, 4})}}).ok());
}

TEST(EngineTest, RefusesOutputsWhoseElementsShareAPlace) {
  const auto compile = [](const Dims& dims, const Dims& strides) {
    return Oracle()->Compile(AddPartition(dims, strides)).status();
  };
  // Rows side by side, padded, transposed, and split into two dims.
  for (const auto& [dims, strides] : std::vector<std::pair<Dims, Dims>>{{{2, 3}, {3, 1}},
                                                                        {{2, 3}, {7, 2}},
                                                                        {{2, 3}, {1, 2}},
                                                                        {{2, 2, 3}, {3, 9, 1}},
                                                                        {{2, 0}, {0, 1}}}) {
    EXPECT_EQ(compile(dims, strides), absl::OkStatus()) << DimsToString(strides);
  }
  // One place for a whole dim, rows that overlap by one element, equal strides.
  for (const auto& [dims, strides] : std::vector<std::pair<Dims, Dims>>{
           {{2, 3}, {0, 1}}, {{2, 3}, {2, 1}}, {{2, 3}, {4, 2}}, {{2, 3}, {1, 1}}}) {
    EXPECT_EQ(ErrorKindOf(compile(dims, strides)), ErrorKind::kInvalidArguments)
        << DimsToString(strides);
  }
  EXPECT_THAT(
      std::string(compile({2, 3}, {2, 1}).message()),
      HasSubstr("output tensor 12 'y' may write two elements to one place: dim 0 of 2 elements "
                "has stride 2, and dims within it reach 2 elements far"));
}

TEST(EngineTest, DoesNothingForEmptyOutputs) {
  const Engine engine = *Engine::Create();
  const absl::StatusOr<CompiledPartition> compiled = engine.Compile(AddPartition({0, 3}));
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  const float b[3] = {};
  EXPECT_TRUE(
      compiled->Execute(Stream(engine), {ConstTensor(), ConstTensor(b, 12)}, {Tensor()}).ok());
}

}  // namespace
}  // namespace kvant::testing
