// Whole graphs: partitions that hand on to each other, by position and by name.
#include "kvant/backends/compiled_graph.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tests/backends/attention/harness.h"
#include "kvant_test_config.h"

namespace kvant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kTokens = 24, kHead = 16;

ConstTensor In(const std::vector<float>& x) { return {x.data(), x.size() * 4}; }
Tensor Out(std::vector<float>& x) { return {x.data(), x.size() * 4}; }

std::vector<float> Numbers(int64_t n, int step) {
  std::vector<float> x;
  for (int64_t i = 0; i < n; ++i) x.push_back(static_cast<float>((i * step) % 29 - 14) / 8);
  return x;
}

// x -> layers of attention over themselves, each plus what went in: intermediates of different
// ages. The first layer's result is an output as well as read.
Graph Layers(int layers) {
  GraphBuilder g;
  Value x = g.Input("x", kF32, {1, 2, kTokens, kHead});
  const Value k = g.Input("k", kF32, {1, 2, kTokens, kHead});
  const Value first = x;
  for (int i = 0; i < layers; ++i) {
    const Value scores = g.Multiply(g.MatMul(x, k, {.transpose_b = true}), g.Scalar(0.25));
    const Value mixed = g.MatMul(g.SoftMax(scores), x);
    x = g.Add(g.Tanh(mixed), i % 2 == 0 ? first : x);
    if (i == 0) g.Output("early", x);
  }
  g.Output("late", x);
  return std::move(g).Build().value();
}

Engine EngineOf(const std::vector<std::string>& backends, Device device = Device::kCpu) {
  return Engine::Create({.device = device, .backends = backends}).value();
}

const std::vector<std::string> kSplit = {"cpu", "oracle"};

TEST(CompiledGraphTest, GivesWhatTheOracleGivesPartitionByPartition) {
  const Graph graph = Layers(5);
  const Engine engine = EngineOf(kSplit), oracle = EngineOf({"oracle"});
  const absl::StatusOr<CompiledGraph> compiled = engine.Compile(graph);
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  EXPECT_GT(compiled->partitions().size(), 5u);
  EXPECT_FALSE(compiled->fused());
  EXPECT_EQ(compiled->graph().inputs(), graph.inputs());

  // By hand, with memory of its own for every tensor.
  const std::vector<float> x = Numbers(2 * kTokens * kHead, 7), k = Numbers(2 * kTokens * kHead, 5);
  std::vector<std::vector<float>> memory(64);
  memory[graph.inputs()[0]] = x;
  memory[graph.inputs()[1]] = k;
  const std::vector<Partition> partitions = PartitionGraph(graph).value();
  for (const Partition& partition : partitions) {
    const CompiledPartition one = oracle.Compile(partition).value();
    std::vector<ConstTensor> in;
    std::vector<Tensor> out;
    for (const TensorId id : partition.inputs()) in.push_back(In(memory.at(id)));
    for (size_t i = 0; i < partition.outputs().size(); ++i) {
      std::vector<float>& to = memory.at(partition.outputs()[i]);
      to.resize(static_cast<size_t>(partition.output(static_cast<int>(i)).elements()));
      out.push_back(Out(to));
    }
    ASSERT_TRUE(one.Execute(Stream(oracle), in, out).ok());
  }
  std::vector<float> early(x.size()), late(x.size());
  for (int run = 0; run < 3; ++run) {
    std::fill(early.begin(), early.end(), -9.f);
    std::fill(late.begin(), late.end(), -9.f);
    const absl::Status status = compiled->Execute(Stream(engine), {{"k", In(k)}, {"x", In(x)}},
                                                  {{"late", Out(late)}, {"early", Out(early)}});
    ASSERT_TRUE(status.ok()) << status;
    const auto& want_early = memory.at(graph.FindTensor("early")->desc.id);
    const auto& want_late = memory.at(graph.FindTensor("late")->desc.id);
    for (size_t i = 0; i < late.size(); ++i) {
      ASSERT_NEAR(early[i], want_early[i], 1e-5) << i;
      ASSERT_NEAR(late[i], want_late[i], 1e-5) << i;
    }
  }
}

// What is dead makes room: a deep graph takes no more than a few tensors beside the partitions'
// own.
TEST(CompiledGraphTest, IntermediatesShareMemory) {
  const Engine engine = EngineOf({"oracle"});
  const size_t few = engine.Compile(Layers(8)).value().scratch_bytes();
  const size_t many = engine.Compile(Layers(40)).value().scratch_bytes();
  EXPECT_EQ(few, many);
  EXPECT_LE(many, 4u * 2 * kTokens * kHead * 4);
}

// But only for what is no larger: b, between a dead tensor and the end of the scratch, stays.
TEST(CompiledGraphTest, IntermediatesFitWhereTheyAre) {
  constexpr int64_t kRows = 250;
  GraphBuilder g;
  const Value w = g.Input("w", kF32, {kRows, 1}), x = g.Input("x", kF32, {1, 4});
  const Value m = g.Input("m", kF32, {4, 4});
  const Value b = g.MatMul(g.MatMul(x, m), m);
  g.Output("y", g.Add(g.MatMul(g.MatMul(w, b), m), b));
  const Graph graph = std::move(g).Build().value();
  const Engine engine = EngineOf({"oracle"});
  const CompiledGraph compiled = engine.Compile(graph).value();
  ASSERT_GT(compiled.partitions().size(), 3u);
  const std::vector<float> in_w = Numbers(kRows, 7), in_x = Numbers(4, 5);
  const std::vector<float> in_m = Numbers(16, 11);
  std::vector<float> y(kRows * 4);
  const absl::Status status = compiled.Execute(
      Stream(engine), {{"w", In(in_w)}, {"x", In(in_x)}, {"m", In(in_m)}}, {{"y", Out(y)}});
  ASSERT_TRUE(status.ok()) << status;
  const auto times_m = [&](const std::vector<double>& row) {
    std::vector<double> product(4);
    for (size_t i = 0; i < 16; ++i) product[i % 4] += row[i / 4] * in_m[i];
    return product;
  };
  const std::vector<double> of_b = times_m(times_m({in_x.begin(), in_x.end()}));
  const std::vector<double> of_bm = times_m(of_b);
  for (size_t i = 0; i < y.size(); ++i) {
    const double want = in_w[i / 4] * of_bm[i % 4] + of_b[i % 4];
    ASSERT_NEAR(y[i], want, 1e-5 * (1 + std::abs(want))) << i;
  }
}

// So do partitions whose kernels keep nothing: of many layers of attention, the scratch is that of
// few.
TEST(CompiledGraphTest, KernelsShareScratch) {
  const auto scratch_of = [](int layers) {
    GraphBuilder g;
    Value x = g.Input("x", kF32, {1, 2, 1, 64});
    for (int i = 0; i < layers; ++i) {
      const Value k = g.Input("k" + std::to_string(i), kF32, {1, 2, 600, 64});
      x = g.ScaledDotProductAttention(x, k, k, {}).first;
    }
    g.Output("o", x);
    const Engine engine = EngineOf({"cpu"});
    const CompiledGraph compiled =
        engine.Compile(std::move(g).Build().value(), {.require_fused = true}).value();
    EXPECT_GT(compiled.partitions()[0].scratch_bytes(), 1000u);
    return compiled.scratch_bytes();
  };
  EXPECT_EQ(scratch_of(3), scratch_of(30));
}

// Of one token, a reshape leaves open which axis of extent 1 the tokens are along.
TEST(CompiledGraphTest, FusesCachesOfOneTokenWhoseHeadsAreGrouped) {
  for (const int64_t heads : {1, 2}) {
    GraphBuilder g;
    const Value lengths = g.Input("lengths", kS32, {1});
    const Value q = g.Input("q", kF32, {1, heads, 3, 1, 16});
    const auto cache = [&](const char* name) {
      return g.Reshape(g.LoadTokens(g.Input(name, kF32, {1, heads, 1, 16}), lengths),
                       {1, heads, 1, 1, 16});
    };
    const Value k = cache("k"), scores = g.MatMul(q, k, {.transpose_b = true});
    g.Output("o", g.MatMul(g.SoftMax(scores, {.lengths = lengths}), cache("v")));
    const Engine engine = EngineOf({"cpu"});
    const absl::StatusOr<CompiledGraph> compiled =
        engine.Compile(std::move(g).Build().value(), {.require_fused = true});
    ASSERT_TRUE(compiled.ok()) << compiled.status();
    const std::vector<float> x = Numbers(heads * 3 * 16, 7), v = Numbers(heads * 16, 5);
    for (const int32_t length : {0, 1}) {
      std::vector<float> o(x.size(), -9.f);
      ASSERT_TRUE(
          compiled
              ->Execute(Stream(engine),
                        {{"q", In(x)}, {"k", In(v)}, {"v", In(v)}, {"lengths", {&length, 4}}},
                        {{"o", Out(o)}})
              .ok());
      for (size_t i = 0; i < o.size(); ++i) {
        EXPECT_NEAR(o[i], length == 0 ? 0.f : v[i / 48 * 16 + i % 16], 1e-6) << i;
      }
    }
  }
}

// What is loaded by row may be moved before it is multiplied. Where its rows are no longer those of
// the batch, or pages would be another axis's, it is not fused.
TEST(CompiledGraphTest, LoadsThatAreMovedGiveWhatTheOracleGives) {
  struct Moved {
    const char* name;
    Dims pool;
    int64_t rows, most;  // of the page table; 0 most: by lengths
    Dims shape;          // reshaped to; empty: transposed by `order`
    std::vector<int64_t> order;
    Dims q;
    bool fuses;
  };
  const std::vector<Moved> all = {
      {"heads as the batch", {2, 2, 16, 8}, 1, 2, {2, 32, 8}, {}, {2, 3, 8}, false},
      {"one token", {1, 2, 1, 8}, 1, 1, {2, 1, 1, 8}, {}, {2, 1, 3, 8}, false},
      {"rows swapped with heads", {2, 2, 32, 8}, 2, 0, {}, {1, 0, 2, 3}, {2, 2, 3, 8}, false},
      {"pages swapped with heads", {4, 2, 16, 8}, 2, 2, {}, {1, 0, 2, 3}, {2, 2, 3, 8}, false},
      {"heads grouped", {4, 2, 16, 8}, 2, 2, {2, 2, 1, 32, 8}, {}, {2, 2, 2, 3, 8}, true},
      {"one row, heads grouped", {2, 2, 16, 8}, 1, 2, {1, 2, 1, 32, 8}, {}, {1, 2, 2, 3, 8}, true},
      {"one head", {4, 1, 16, 8}, 2, 2, {2, 32, 8}, {}, {2, 3, 8}, true},
  };
  for (const Moved& moved : all) {
    SCOPED_TRACE(moved.name);
    GraphBuilder g;
    const Value lengths = g.Input("lengths", kS32, {moved.rows});
    const Value table = g.Input("table", kS32, {moved.rows, std::max<int64_t>(1, moved.most)});
    const auto cache = [&](const char* name) {
      const Value pool = g.Input(name, kF32, moved.pool);
      const Value x =
          moved.most > 0 ? g.LoadPages(pool, table, lengths) : g.LoadTokens(pool, lengths);
      return moved.shape.empty()
                 ? g.Transpose(x, moved.order)
                 : g.Reshape(x, std::vector<int64_t>(moved.shape.begin(), moved.shape.end()));
    };
    const Value q = g.Input("q", kF32, moved.q), k = cache("k");
    const Value probs = g.SoftMax(g.MatMul(q, k, {.transpose_b = true}), {.lengths = lengths});
    g.Output("o", g.MatMul(probs, cache("v")));
    const Graph graph = std::move(g).Build().value();
    const std::vector<float> x = Numbers(ElementsOf(moved.q), 7),
                             k_data = Numbers(4 * 2 * 16 * 8, 5),
                             v_data = Numbers(4 * 2 * 16 * 8, 11);
    const std::vector<int32_t> counts =
        moved.most == 1 ? std::vector<int32_t>{1} : std::vector<int32_t>{20, 5};
    const std::vector<int32_t> pages = moved.pool[0] == 4   ? std::vector<int32_t>{1, 0, 3, 2}
                                       : moved.pool[0] == 1 ? std::vector<int32_t>{0}
                                                            : std::vector<int32_t>{1, 0};
    std::vector<std::vector<float>> results;
    for (const std::vector<std::string>& backends :
         {std::vector<std::string>{"cpu", "oracle"}, {"oracle"}}) {
      const Engine engine = EngineOf(backends);
      const CompiledGraph compiled = engine.Compile(graph).value();
      EXPECT_EQ(compiled.fused(), moved.fuses && backends.size() > 1) << compiled.ToString();
      std::vector<ConstTensor> in;
      for (const TensorId id : graph.inputs()) {
        const std::string& name = graph.tensor(id).name;
        in.push_back(name == "q"         ? In(x)
                     : name == "k"       ? In(k_data)
                     : name == "v"       ? In(v_data)
                     : name == "lengths" ? ConstTensor(counts.data(), counts.size() * 4)
                                         : ConstTensor(pages.data(), pages.size() * 4));
      }
      std::vector<float>& o = results.emplace_back(x.size());
      const absl::Status status = compiled.Execute(Stream(engine), in, {Out(o)});
      ASSERT_TRUE(status.ok()) << status;
    }
    for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(results[0][i], results[1][i], 1e-5) << i;
  }
}

TEST(CompiledGraphTest, TakesScratchOfOnesOwn) {
  const Engine engine = EngineOf(kSplit);
  const CompiledGraph compiled = engine.Compile(Layers(3)).value();
  const std::vector<float> x = Numbers(2 * kTokens * kHead, 7);
  std::vector<float> early(x.size()), late(x.size()), late_by_pool(x.size());
  const std::vector<ConstTensor> in{In(x), In(x)};
  ASSERT_EQ(compiled.graph().outputs().size(), 2u);
  const bool early_first =
      compiled.graph().outputs()[0] == compiled.graph().FindTensor("early")->desc.id;
  const auto outputs = [&](std::vector<float>& last) {
    return early_first ? std::vector<Tensor>{Out(early), Out(last)}
                       : std::vector<Tensor>{Out(last), Out(early)};
  };
  const size_t bytes = compiled.scratch_bytes();
  std::vector<std::byte> memory(bytes + 64);
  std::byte* const scratch =
      memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  ASSERT_TRUE(compiled.Execute(Stream(engine), in, outputs(late), {scratch, bytes}).ok());
  ASSERT_TRUE(compiled.Execute(Stream(engine), in, outputs(late_by_pool)).ok());
  EXPECT_EQ(late, late_by_pool);
  const absl::Status small =
      compiled.Execute(Stream(engine), in, outputs(late), {scratch, bytes - 1});
  EXPECT_THAT(std::string(small.message()), HasSubstr("scratch needs"));
}

TEST(CompiledGraphTest, ChecksAllBeforeAnythingRuns) {
  const Engine engine = EngineOf(kSplit);
  const CompiledGraph compiled = engine.Compile(Layers(2)).value();
  const std::vector<float> x = Numbers(2 * kTokens * kHead, 7);
  std::vector<float> early(x.size(), -9.f), late(x.size(), -9.f);
  const auto error = [&](const Stream& stream, ConstTensor k, Tensor last) {
    const absl::Status status =
        compiled.Execute(stream, {{"x", In(x)}, {"k", k}}, {{"early", Out(early)}, {"late", last}});
    EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments);
    EXPECT_EQ(std::count(early.begin(), early.end(), -9.f), static_cast<int64_t>(early.size()));
    return std::string(status.message());
  };
  const Stream stream(engine);
  EXPECT_THAT(error(stream, {nullptr, 1 << 20}, Out(late)), HasSubstr("'k'"));
  EXPECT_THAT(error(stream, In(x), {late.data(), 12}), HasSubstr("'late'"));
  EXPECT_THAT(error(Stream(EngineOf(kSplit)), In(x), Out(late)),
              HasSubstr("the stream is of another engine than the compiled graph"));
  const absl::Status missing = compiled.Execute(stream, {{"x", In(x)}}, {{"early", Out(early)}});
  EXPECT_THAT(std::string(missing.message()), HasSubstr("'k'"));
  const absl::Status count = compiled.Execute(stream, {In(x)}, {Out(early), Out(late)});
  EXPECT_THAT(std::string(count.message()), HasSubstr("the graph has 2 inputs, not 1"));
}

TEST(CompiledGraphTest, SaysWhatRunsAndWhy) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {1, 1, 2, 16}), k = g.Input("k", kF32, {1, 1, 8, 16});
  const Value scores = g.MatMul(q, k, {.transpose_b = true});
  const Value gelu = g.AddOp(OpKind::kGELU, "gelu", {scores}, {kF32})[0];
  g.Output("o", g.MatMul(g.SoftMax(gelu), k));
  const Graph graph = std::move(g).Build().value();
  const Engine engine = EngineOf(kSplit);
  const CompiledGraph compiled = engine.Compile(graph).value();
  EXPECT_EQ(compiled.explanations().size(), compiled.partitions().size() + 1);
  EXPECT_THAT(compiled.explanations().back(), HasSubstr("GELU 'gelu'"));
  EXPECT_THAT(compiled.ToString(), HasSubstr("oracle"));
  // Which is said where fusing was asked for, too.
  const absl::Status status = engine.Compile(graph, {.require_fused = true}).status();
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("GELU 'gelu'"));
}

// Without a look at the rest of the graph: from the partition that is compiled.
TEST(NearMissTest, PartitionsAroundItCarryIt) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {1, 1, 2, 16}), k = g.Input("k", kF32, {1, 1, 8, 16});
  const Value gelu =
      g.AddOp(OpKind::kGELU, "gelu", {g.MatMul(q, k, {.transpose_b = true})}, {kF32})[0];
  g.Output("o", g.MatMul(g.SoftMax(gelu), k));
  g.Output("apart", g.Tanh(q));
  const std::vector<Partition> partitions = PartitionGraph(std::move(g).Build().value()).value();
  const Engine engine = EngineOf(kSplit);
  for (const Partition& partition : partitions) {
    SCOPED_TRACE(partition.pattern());
    const bool apart = partition.ops().ops()[0].kind == OpKind::kTanh;
    EXPECT_EQ(partition.misses().size(), apart ? 0u : 1u);
    const absl::Status status = engine.Compile(partition, {.require_fused = true}).status();
    EXPECT_EQ(std::string(status.message()).find("GELU 'gelu'") == std::string::npos, apart)
        << status;
  }
}

TEST(CompiledGraphTest, TakesShapesThatTheGraphLeavesOpen) {
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {2, kUnknownDim});
  g.Output("y", g.Tanh(x));
  const Graph graph = std::move(g).Build().value();
  const Engine engine = EngineOf({"oracle"});
  const absl::Status open = engine.Compile(graph).status();
  EXPECT_EQ(ErrorKindOf(open), ErrorKind::kInvalidShape);
  EXPECT_THAT(std::string(open.message()), HasSubstr("graph input 'x' ("));
  LogicalTensor known = graph.tensor(x.id);
  known.dims = Dims{2, 3};
  known.strides.reset();
  const absl::StatusOr<CompiledGraph> compiled = engine.Compile(graph, {.tensors = {known}});
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  EXPECT_THAT(*compiled->graph().FindTensor("y")->desc.dims, ElementsAre(2, 3));
}

TEST(CompiledGraphTest, RefusesWhatCannotRun) {
  const Engine engine = EngineOf(kSplit);
  EXPECT_EQ(ErrorKindOf(engine.Compile(Graph()).status()), ErrorKind::kInvalidGraph);
  // What is written into a part of a tensor keeps the rest, which must be someone's.
  GraphBuilder g;
  const Value stored =
      g.Append(g.Input("x", kF32, {1, 1, 2, 16}), g.Input("at", kS32, {1}), 8, {.type = kF16})
          .codes;
  g.Output("y", g.TypeCast(stored, kF32));
  const absl::Status status = engine.Compile(std::move(g).Build().value()).status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("which it writes a part of, is no output of the graph"));

  GraphBuilder wild;
  const Value x = wild.Input("x", kF32, {4});
  wild.Output("y", wild.Tanh(wild.AddOp(OpKind::kWildcard, "w", {x}, {{kF32, Dims{4}}})[0]));
  const absl::Status wildcard = engine.Compile(std::move(wild).Build().value()).status();
  EXPECT_EQ(ErrorKindOf(wildcard), ErrorKind::kInvalidGraph);
  EXPECT_THAT(std::string(wildcard.message()), HasSubstr("nothing computes 'w': Wildcard 'w'"));

  // One that gives nothing is in nobody's way.
  GraphBuilder idle;
  const Value z = idle.Input("x", kF32, {4});
  idle.AddOp(OpKind::kWildcard, "w", {z}, {});
  idle.Output("y", idle.Tanh(z));
  const absl::Status idles = engine.Compile(std::move(idle).Build().value()).status();
  EXPECT_TRUE(idles.ok()) << idles;

  const CompiledGraph none;
  EXPECT_FALSE(none.fused());
  EXPECT_THAT(std::string(none.Execute(Stream(engine), {}, {}, {}).message()),
              HasSubstr("nothing to run"));
  EXPECT_THAT(std::string(none.Execute(Stream(engine), {{"x", {}}}, {{"y", {}}}).message()),
              HasSubstr("nothing to run"));
  EXPECT_EQ(none.ToString(), "nothing to run");
  EXPECT_EQ(none.scratch_bytes(), 0u);
  EXPECT_TRUE(none.explanations().empty());
}

// The largest of any partition, whichever that is.
TEST(CompiledGraphTest, RoundsAsTheRoughestPartition) {
  if (cpu::HighestKernels().codes == nullptr) GTEST_SKIP() << "this CPU has no integer products";
  for (const bool last : {false, true}) {
    GraphBuilder g({.fpmath = FpMath::kF16, .apply_to_int = true});
    const Value q = g.Input("q", kF32, {1, 2, 1, 64});
    const Value k = g.DynamicDequantize(g.Input("k", kS8, {1, 2, 96, 64}),
                                        g.Input("k_scales", kF32, {1, 2, 96, 2}),
                                        {.group_shape = {1, 1, 1, 32}});
    const Value o =
        g.ScaledDotProductAttention(last ? g.Tanh(q) : q, k, g.Input("v", kF32, {1, 2, 96, 64}), {})
            .first;
    g.Output("o", last ? o : g.Tanh(o));
    const CompiledGraph compiled = EngineOf(kSplit).Compile(std::move(g).Build().value()).value();
    ASSERT_EQ(compiled.partitions().size(), 2u);
    const double of_attention = compiled.partitions()[last ? 1 : 0].rounding();
    EXPECT_GT(of_attention, 0);
    EXPECT_EQ(compiled.partitions()[last ? 0 : 1].rounding(), 0);
    EXPECT_EQ(compiled.rounding(), of_attention);
  }
}

// An engine is itself, even where it shares all that it has with another.
TEST(EngineIdentityTest, StreamsOfEnginesThatShareAnExecutorAreTheirOwn) {
  auto executor = MakeSerialExecutor();
  const std::shared_ptr<Executor> shared(std::move(executor));
  const auto make = [&] {
    return Engine::Create({.backends = {"oracle"}, .executor = shared}).value();
  };
  const Engine a = make(), b = make(), copy = a;
  GraphBuilder g;
  g.Output("y", g.Tanh(g.Input("x", kF32, {4})));
  const CompiledGraph compiled = a.Compile(std::move(g).Build().value()).value();
  const std::vector<float> x(4);
  std::vector<float> y(4);
  EXPECT_TRUE(compiled.Execute(Stream(copy), {In(x)}, {Out(y)}).ok());
  EXPECT_EQ(ErrorKindOf(compiled.Execute(Stream(b), {In(x)}, {Out(y)})),
            ErrorKind::kInvalidArguments);
}

// Partitions on the executor of CUDA kernels find scratch as they left it, whatever the others do.
TEST(CompiledGraphTest, KeepsEachPartitionsScratch) {
  GraphBuilder g;
  Value x = g.Input("x", kF16, {1, 1, 1, 64});
  const Value k = g.Input("k", kF16, {1, 1, 512, 64});
  for (int i = 0; i < 3; ++i) {
    x = g.MatMul(g.SoftMax(g.MatMul(x, k, {.transpose_b = true, .type = kF32}), {.type = kF16}), k);
  }
  g.Output("o", x);
  const Graph graph = std::move(g).Build().value();
  const Engine simt = EngineOf({}, Device::kCudaSimt), oracle = EngineOf({"oracle"});
  const CompiledGraph compiled = simt.Compile(graph, {.require_fused = true}).value();
  ASSERT_EQ(compiled.partitions().size(), 3u);
  const CompiledGraph judge = oracle.Compile(graph).value();
  std::vector<uint16_t> q(64), keys(512 * 64), got(64), expected(64);
  for (size_t i = 0; i < q.size(); ++i) q[i] = F32ToF16(static_cast<float>(i % 7) / 8);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = F32ToF16(static_cast<float>(i * 5 % 23) / 32);
  const auto in = [](const std::vector<uint16_t>& v) {
    return ConstTensor(v.data(), v.size() * 2);
  };
  for (int run = 0; run < 2; ++run) {
    ASSERT_TRUE(
        compiled.Execute(Stream(simt), {{"x", in(q)}, {"k", in(keys)}}, {{"o", {got.data(), 128}}})
            .ok());
  }
  ASSERT_TRUE(
      judge
          .Execute(Stream(oracle), {{"x", in(q)}, {"k", in(keys)}}, {{"o", {expected.data(), 128}}})
          .ok());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(F16ToF32(got[i]), F16ToF32(expected[i]), 2e-3) << i;
  }
}

}  // namespace
}  // namespace kvant
