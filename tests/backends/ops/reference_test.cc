// The reference backend against the oracle: masks, attention, lengths, concurrency, memory.
#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "kvant/backends/engine.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tests/backends/ops/reference_testing.h"

namespace kvant::testing {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
using Ints = std::vector<int64_t>;

TEST(ReferenceTest, RowsOfMinusInfinity) {
  for (const std::string mode : {"none", "inf_as_zero"}) {
    for (int64_t length : {1, 5, 16, 37, 300}) {
      GraphBuilder g;
      const Value x = g.Input("x", kF32, {6, length});
      g.SoftMaxWithStats(x, {.mode = mode});
      g.AddOp(OpKind::kReduceMax, "max", {x}, {kF32}, {{Attr::kAxes, Ints{1}}});
      ExpectAgrees(std::move(g), [&](Values& values) {
        std::vector<double>& v = values[x.id];
        std::fill(v.begin() + length, v.begin() + 2 * length, -kInf);  // all of row 1
        v[3 * length] = -kInf;                                         // some of rows 3 and 4
        for (int64_t i = 1; i < length; ++i) v[4 * length + i] = i % 3 == 0 ? v[i] : -kInf;
        v[5 * length] = 200;
      });
    }
  }
}

TEST(ReferenceTest, Dropout) {
  for (double probability : {0.0, 0.3, 0.99}) {
    GraphBuilder g;
    const Value x = g.Input("x", kF32, {5, 7, 401}), seed = g.HostScalar("seed", kS64);
    const Value offset = g.Input("offset", kS64, {1}), p = g.Input("p", kF32, {});
    g.AddOp(OpKind::kDropout, "y", {x, seed, offset, p}, {kF32, kU8});
    ExpectAgrees(std::move(g), [&](Values& values) { values[p.id] = {probability}; });
  }
}

TEST(ReferenceTest, DropoutRejectsWhatIsNoProbability) {
  for (double probability : {-0.1, 1.5, std::nan("")}) {
    GraphBuilder g;
    g.AddOp(OpKind::kDropout, "y",
            {g.Input("x", kF32, {5}), g.HostScalar("seed", kS64), g.HostScalar("offset", kS64),
             g.Input("p", kF32, {})},
            {kF32});
    const Graph graph = std::move(g).Build().value();
    Values values = RandomInputs(graph);
    values[graph.FindTensor("p")->desc.id] = {probability};
    const auto result = RunGraph(graph, values, "reference");
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(result.status().message(), "probability")) << result.status();
  }
}

TEST(ReferenceTest, ElementwiseAtTheEdges) {
  for (OpKind kind : {OpKind::kExp, OpKind::kTanh, OpKind::kReLU, OpKind::kSigmoid, OpKind::kSqrt,
                      OpKind::kSquare, OpKind::kAbs, OpKind::kReciprocal, OpKind::kLog}) {
    SCOPED_TRACE(std::string(OpKindName(kind)));
    GraphBuilder g;
    const Value x = g.Input("x", kF32, {11});
    g.AddOp(kind, "y", {x}, {kF32});
    ExpectAgrees(std::move(g), [&](Values& values) {
      values[x.id] = {-kInf, kInf, 0, -80, 80, 1e-6, -1e-6, 1e-30, 1e15, -30, 30};
    });
  }
}

TEST(ReferenceTest, BinaryWithInfinities) {
  for (OpKind kind : {OpKind::kAdd, OpKind::kSubtract, OpKind::kMultiply, OpKind::kMaximum,
                      OpKind::kMinimum, OpKind::kGreaterEqual}) {
    SCOPED_TRACE(std::string(OpKindName(kind)));
    GraphBuilder g;
    const Value a = g.Input("a", kF32, {8}), b = g.Input("b", kF32, {8});
    g.AddOp(kind, "y", {a, b}, {kind == OpKind::kGreaterEqual ? kBoolean : kF32});
    ExpectAgrees(std::move(g), [&](Values& values) {
      values[a.id] = {-kInf, kInf, 1, -kInf, 0, 3, -kInf, kInf};
      values[b.id] = {1, 1, -kInf, -kInf, kInf, 3, kInf, kInf};
    });
  }
}

TEST(ReferenceTest, QuantizeRoundsTiesToEvenAndSaturates) {
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {8}), scale = g.Input("scale", kF32, {1});
  const Value zp = g.Input("zp", kS8, {1});
  for (DataType type : {kS8, kU8, kS4, kU4, kS2, kU2}) {
    g.DynamicQuantize(x, scale, zp, {.type = type});
    g.DynamicQuantize(x, scale, std::nullopt, {.type = type});
  }
  ExpectAgrees(std::move(g), [&](Values& values) {
    values[x.id] = {0.25, 0.75, -0.25, -0.75, 1.25, 1e9, -1e9, 0};
    values[scale.id] = {0.5};
    values[zp.id] = {1};
  });
}

// scores -> scale -> causal -> bias -> SoftMax -> compressed V: several arrays share memory.
GraphBuilder CompressedAttention(DataType type) {
  GraphBuilder g;
  const Value q = g.Input("q", type, {2, 3, 2, 7, 16}, Dims{1344, 32, 16, 192, 1});
  const Value k = g.DynamicDequantize(
      g.Input("k", kU4, {2, 3, 1, 33, 16}), g.Input("k_scales", type, {2, 3, 1, 33, 4}),
      g.Input("k_zps", kU4, {2, 3, 1, 33, 4}), {.group_shape = {1, 1, 1, 1, 4}});
  const Value v = g.DynamicDequantize(g.Input("v", kS8, {2, 3, 1, 33, 24}),
                                      g.Input("v_scales", type, {2, 3, 1, 33, 1}),
                                      {.group_shape = {1, 1, 1, 1, 24}});
  Value scores = g.Multiply(g.MatMul(q, k, {.transpose_b = true}), g.Input("scale", type, {}));
  scores = g.CausalMask(scores, g.Input("fill", type, {}));
  scores = g.Add(scores, g.Input("bias", type, {2, 1, 1, 7, 33}));
  g.Output("o", g.MatMul(g.SoftMax(scores), v), Dims{24 * 42, 24 * 2, 24, 24 * 6, 1});
  return g;
}

TEST(ReferenceTest, CompressedAttention) {
  for (DataType type : {kF32, kF16, kBF16}) {
    const Graph graph = CompressedAttention(type).Build().value();
    Values values = RandomInputs(graph);
    // Keeps scores small: an error in a score is one in the logarithm of a probability.
    values[graph.FindTensor("scale")->desc.id] = {0.01};
    ExpectAgrees(graph, values);
  }
}

TEST(ReferenceTest, FirstClassAttention) {
  struct Options {
    int bits;
    float soft_cap;
    int64_t left, right;
  };
  for (const Options& o : std::vector<Options>{{0, 0, -1, -1},
                                               {1, 0, -1, 0},
                                               {2, 5, 3, 2},
                                               {4, 0, -1, -1},
                                               {8, 0, -1, -1},
                                               {16, 0, -1, -1},
                                               {32, 0, 4, 0},
                                               {63, 3, 2, 1}}) {
    SCOPED_TRACE(o.bits);
    GraphBuilder g;
    GraphBuilder::AttentionOptions options;
    if (o.soft_cap != 0) options.soft_cap = o.soft_cap;
    options.left_window = o.left;
    options.right_window = o.right;
    options.stats = true;
    const Value q = g.Input("q", kF32, {2, 6, 5, 8}), k = g.Input("k", kS4, {2, 3, 9, 8});
    const Value v = g.Input("v", kF32, {2, 3, 9, 12});
    const Value keys = g.DynamicDequantize(k, g.Input("k_scales", kF32, {2, 3, 9, 2}),
                                           {.group_shape = {1, 1, 1, 4}});
    if (o.bits & 1) options.bias = g.Input("bias", kF32, {2, 1, 5, 9});
    if (o.bits & 2) options.select = g.Input("select", kBoolean, {6, 1, 9});
    if (o.bits & 4) options.sinks = g.Input("sinks", kF32, {6});
    if (o.bits & 8) options.alibi_slopes = g.Input("slopes", kF32, {6});
    options.bottom_right = o.bits & 16;
    if (o.bits & 32) options.kv_lengths = g.Input("lengths", kS32, {2});
    g.ScaledDotProductAttention(q, keys, v, options);
    ExpectAgrees(std::move(g), [&](Values& values) {
      if (options.kv_lengths) values[options.kv_lengths->id] = {0, 7};
    });
  }
}

// Attention compiled for a capacity; what lies beyond the lengths is NaN.
TEST(ReferenceTest, KvLengths) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {3, 2, 4, 8}), k = g.Input("k", kF32, {3, 2, 11, 8});
  const Value v = g.Input("v", kF32, {3, 2, 11, 8});
  const Value lengths = g.Input("lengths", kS32, {3});
  const Value scores = g.MatMul(q, g.LoadTokens(k, lengths), {.transpose_b = true});
  const Value probs = g.SoftMax(scores, {.lengths = lengths});
  g.Output("o", g.MatMul(probs, g.LoadTokens(v, lengths)));
  const Graph graph = std::move(g).Build().value();
  const std::vector<Partition> partitions = PartitionGraph(graph).value();
  ASSERT_EQ(partitions.size(), 1u);
  std::vector<std::vector<double>> results;
  for (const std::string backend : {"oracle", "reference"}) {
    const Engine engine = Engine::Create({.backends = {backend}}).value();
    const auto compiled = engine.Compile(partitions[0]);
    ASSERT_TRUE(compiled.ok()) << compiled.status();
    const auto run = [&](std::vector<double> real) {
      Values values = RandomInputs(graph);
      values[lengths.id] = std::move(real);
      for (Value x : {k, v}) {
        std::vector<double>& elements = values[x.id];
        for (size_t i = 0; i < elements.size(); ++i) {
          const size_t n = i / 176, token = i / 8 % 11;
          if (token >= values[lengths.id][n]) elements[i] = std::nan("");
        }
      }
      std::vector<Bytes> memory;
      std::vector<ConstTensor> inputs;
      const Partition& known = compiled->partition();
      for (size_t i = 0; i < known.inputs().size(); ++i) {
        memory.push_back(Pack(known.input(static_cast<int>(i)), values[known.inputs()[i]]));
      }
      inputs.reserve(memory.size());
      for (const Bytes& bytes : memory) inputs.emplace_back(bytes.data(), bytes.size());
      Bytes output(known.output(0).memory_bytes());
      const Tensor out{output.data(), output.size()};
      absl::Status status = compiled->Execute(Stream(engine), inputs, absl::MakeConstSpan(&out, 1));
      if (status.ok()) results.push_back(Unpack(known.output(0), output));
      return status;
    };
    const absl::Status status = run({11, 0, 6});
    ASSERT_TRUE(status.ok()) << status;
    for (const auto& bad : {std::vector<double>{1, 12, 3}, std::vector<double>{1, -1, 3}}) {
      const absl::Status error = run(bad);
      EXPECT_EQ(error.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_TRUE(absl::StrContains(error.message(), "the length of row 1")) << error;
    }
  }
  ASSERT_EQ(results.size(), 2u);
  ExpectNear(graph.tensor(graph.outputs()[0]), results[0], results[1]);
}

// One partition of all ops of the graph, compiled for the reference.
CompiledPartition CompileWhole(const Engine& engine, const Graph& graph) {
  const std::vector<Partition> partitions = PartitionGraph(graph).value();
  EXPECT_EQ(partitions.size(), 1u);
  return engine.Compile(partitions[0]).value();
}

TEST(ReferenceTest, ConcurrentExecutionAndThreadCounts) {
  const Graph graph = CompressedAttention(kF32).Build().value();
  const Values values = RandomInputs(graph);
  std::vector<Bytes> results;
  for (int threads : {1, 3}) {
    const Engine engine = Engine::Create({.backends = {"reference"}, .threads = threads}).value();
    const CompiledPartition compiled = CompileWhole(engine, graph);
    const Partition& known = compiled.partition();
    std::vector<Bytes> memory;
    std::vector<ConstTensor> inputs;
    for (size_t i = 0; i < known.inputs().size(); ++i) {
      memory.push_back(Pack(known.input(static_cast<int>(i)), values.at(known.inputs()[i])));
    }
    inputs.reserve(memory.size());
    for (const Bytes& bytes : memory) inputs.emplace_back(bytes.data(), bytes.size());
    std::vector<Bytes> outputs(4, Bytes(known.output(0).memory_bytes(), std::byte{0xA5}));
    std::vector<std::thread> workers;
    workers.reserve(outputs.size());
    for (Bytes& output : outputs) {
      workers.emplace_back([&] {
        const Tensor out{output.data(), output.size()};
        for (int i = 0; i < 20; ++i) {
          EXPECT_TRUE(compiled.Execute(Stream(engine), inputs, absl::MakeConstSpan(&out, 1)).ok());
        }
      });
    }
    for (std::thread& worker : workers) worker.join();
    results.insert(results.end(), outputs.begin(), outputs.end());
  }
  for (const Bytes& result : results) EXPECT_EQ(result, results[0]);
}

TEST(ReferenceTest, LeavesGapsOfOutputsAlone) {
  for (DataType type : {kF32, kF16, kU8}) {
    GraphBuilder g;
    g.Output("y", g.Transpose(g.Input("x", type, {3, 4}), {1, 0}), Dims{5, 1});
    const Graph graph = std::move(g).Build().value();
    const Engine engine = Engine::Create({.backends = {"reference"}}).value();
    const CompiledPartition compiled = CompileWhole(engine, graph);
    const LogicalTensor& y = compiled.partition().output(0);
    const Bytes input = Pack(compiled.partition().input(0), RandomInputs(graph).begin()->second);
    const ConstTensor in{input.data(), input.size()};
    Bytes output(BytesFor(type, 20), std::byte{0xA5});
    const Tensor out{output.data(), output.size()};
    ASSERT_TRUE(
        compiled.Execute(Stream(engine), absl::MakeConstSpan(&in, 1), absl::MakeConstSpan(&out, 1))
            .ok());
    EXPECT_EQ(Unpack(y, output).size(), 12u);
    const size_t element = BytesFor(type, 1);
    for (size_t i = 0; i < 20; ++i) {
      if (i % 5 < 3) continue;
      for (size_t b = 0; b < element; ++b) EXPECT_EQ(output[i * element + b], std::byte{0xA5});
    }
  }
}

TEST(ReferenceTest, EmptyOutputs) {
  GraphBuilder g;
  g.MatMul(g.Input("a", kF32, {2, 0, 3}), g.Input("b", kF32, {2, 3, 4}));
  g.SoftMax(g.Input("x", kF32, {0, 4}));
  ExpectAgrees(std::move(g));
}

// oneDNN counts with 32 bits: some of these had it divide by zero.
TEST(ReferenceTest, ProductsTooLargeForOneDnnAreDeclined) {
  const int64_t large = int64_t{1} << 32, half = int64_t{1} << 16;
  const std::pair<Dims, Dims> pairs[] = {{{1, large}, {large, 1}},
                                         {{large, 1}, {1, 1}},
                                         {{1, 1}, {1, large + 8}},
                                         {{half, half, 1}, {1, 1}}};
  const Engine engine = Engine::Create({.backends = {"reference"}}).value();
  for (const auto& [a, b] : pairs) {
    GraphBuilder g;
    g.Output("y", g.MatMul(g.Input("a", kF32, a), g.Input("b", kF32, b)));
    const auto compiled = engine.Compile(std::move(g).Build().value());
    ASSERT_FALSE(compiled.ok());
    const std::string said(compiled.status().message());
    EXPECT_TRUE(absl::StrContains(said, "MatMul")) << said;
    EXPECT_TRUE(absl::StrContains(said, "oneDNN takes no more than 2147483647")) << said;
  }
}

TEST(ReferenceTest, SaysWhatRuns) {
  const Graph graph = CompressedAttention(kF32).Build().value();
  const Engine engine = Engine::Create({.backends = {"reference"}}).value();
  const CompiledPartition compiled = CompileWhole(engine, graph);
  EXPECT_FALSE(compiled.fused());
  EXPECT_TRUE(absl::StrContains(compiled.kernel(), "op by op through oneDNN")) << compiled.kernel();
  EXPECT_TRUE(absl::StrContains(compiled.kernel(), "Add, SoftMax, MatMul")) << compiled.kernel();
}

}  // namespace
}  // namespace kvant::testing
