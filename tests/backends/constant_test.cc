// Constants and host scalars of graphs: what becomes of them in specs, plans and backends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kvant/backends/cpu/attention_plan.h"
#include "kvant/backends/cuda/attention/attention_plan.h"
#include "kvant/backends/cuda/cuda_backend.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/status.h"
#include "kvant/kernels/cpu/score_steps.h"
#include "kvant/patterns/partitioner.h"
#include "kvant_test_config.h"

namespace kvant {
namespace {

using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kQueries = 70, kTokens = 96, kHead = 64;

// How the same causal attention over [1, 2, kQueries, kHead] is said.
enum class Mask { kFirstClass, kConstant, kHostScalar, kInput };

Graph Causal(Mask mask) {
  GraphBuilder g({.fpmath = FpMath::kF16});
  const Value q = g.Input("q", kF16, {1, 2, kQueries, kHead});
  const Value k = g.Input("k", kF16, {1, 2, kTokens, kHead});
  const Value v = g.Input("v", kF16, {1, 2, kTokens, kHead});
  if (mask == Mask::kFirstClass) {
    g.Output("o", g.ScaledDotProductAttention(q, k, v, {.scale = 0.125f, .right_window = 0}).first);
    return std::move(g).Build().value();
  }
  const Value fill = mask == Mask::kConstant     ? g.Scalar(-kInf)
                     : mask == Mask::kHostScalar ? g.HostScalar("fill", kF32)
                                                 : g.Input("fill", kF32, {});
  const Value scores = g.MatMul(q, k, {.transpose_b = true, .type = kF32});
  const Value masked = g.CausalMask(g.Multiply(scores, g.Scalar(0.125)), fill);
  g.Output("o", g.MatMul(g.SoftMax(masked, {.type = kF16}), v));
  return std::move(g).Build().value();
}

Partition Only(const Graph& graph) {
  std::vector<Partition> partitions = PartitionGraph(graph).value();
  EXPECT_EQ(partitions.size(), 1u);
  return partitions.at(0);
}

TEST(ConstantFillTest, PlansTheSameCudaKernelAsTheFirstClassOp) {
  const cuda::DeviceProperties device = cuda::PropertiesOf("sm_90a").value();
  const auto kernels = [&](Mask mask) {
    return cuda::KernelsOf(Only(Causal(mask)), device).value();
  };
  const std::string text = kernels(Mask::kFirstClass).at(0).source.text;
  const auto first = cuda::PlanAttention(*Only(Causal(Mask::kFirstClass)).attention(), device);
  ASSERT_EQ(first->traits.step_count, 2);
  EXPECT_EQ(first->traits.steps[1].hides, 1);
  EXPECT_EQ(kernels(Mask::kConstant).size(), 1u);
  EXPECT_EQ(kernels(Mask::kConstant)[0].source.text, text);
  // A fill that is read at execution: one kernel for -inf, which skips, and one for the rest.
  ASSERT_EQ(kernels(Mask::kHostScalar).size(), 2u);
  EXPECT_EQ(kernels(Mask::kHostScalar)[0].source.text, text);
  EXPECT_NE(kernels(Mask::kHostScalar)[1].source.text, text);
  // One that lies on the device is not known when tiles are skipped.
  ASSERT_EQ(kernels(Mask::kInput).size(), 1u);
  EXPECT_NE(kernels(Mask::kInput)[0].source.text, text);
}

TEST(ConstantFillTest, HidesTheSameColumnsOnTheCpuAsTheFirstClassOp) {
  const cpu::KernelSet& kernels = *cpu::KernelsAt(0);
  const cpu::Plan first(*Only(Causal(Mask::kFirstClass)).attention(), kernels,
                        cpu::SoftmaxPass::kOnline);
  for (const Mask mask : {Mask::kConstant, Mask::kHostScalar, Mask::kInput}) {
    const Partition partition = Only(Causal(mask));
    const cpu::Plan plan(*partition.attention(), kernels, cpu::SoftmaxPass::kOnline);
    std::vector<const void*> inputs(partition.inputs().size());
    const float fill = -kInf;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (partition.input(static_cast<int>(i)).name == "fill") inputs[i] = &fill;
    }
    const cpu::Reader reader{&kernels, inputs.data()};
    for (int64_t row = 0; row < kQueries; ++row) {
      cpu::Position at{};
      at.at[cpu::kRow] = row;
      const cpu::Extent extent{0, kTokens, 0, kQueries};
      const cpu::ColumnRange a = cpu::LiveColumns(first.problem(), {&kernels, nullptr}, at, extent);
      const cpu::ColumnRange b = cpu::LiveColumns(plan.problem(), reader, at, extent);
      EXPECT_EQ(a.begin, b.begin) << row;
      EXPECT_EQ(a.end, b.end) << row;
      EXPECT_EQ(a.end, row + 1);
    }
  }
}

// One head of q, k and v and the scalar inputs, by name.
struct Data {
  std::vector<float> q, k, v;
  explicit Data(int64_t rows, int64_t tokens, int64_t d) {
    const auto fill = [](std::vector<float>& x, int64_t n, int step) {
      for (int64_t i = 0; i < n; ++i) x.push_back(static_cast<float>((i * step) % 23 - 11) / 8);
    };
    fill(q, rows * d, 7);
    fill(k, tokens * d, 5);
    fill(v, tokens * d, 3);
  }
};

template <typename T>
ConstTensor In(const std::vector<T>& x) {
  return {x.data(), x.size() * sizeof(T)};
}

// A kernel for -inf must not be taken where the host says otherwise, nor the other way round.
TEST(HostScalarTest, IsReadAtEveryExecution) {
  constexpr int64_t kRows = 5, kCols = 40, kD = 16;
  const Data data(kRows, kCols, kD);
  const Engine simt = Engine::Create({.device = Device::kCudaSimt}).value();
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {1, 1, kRows, kD}), k = g.Input("k", kF32, {1, 1, kCols, kD}),
              v = g.Input("v", kF32, {1, 1, kCols, kD});
  const Value scores =
      g.Multiply(g.MatMul(q, k, {.transpose_b = true}), g.HostScalar("scale", kF32));
  const Value masked = g.CausalMask(scores, g.HostScalar("fill", kF32), g.HostScalar("s", kS32),
                                    g.HostScalar("t", kS32));
  g.Output("o", g.MatMul(g.SoftMax(masked), v));
  const Graph graph = std::move(g).Build().value();
  const Partition partition = Only(graph);
  const auto compiled = simt.Compile(partition, {.require_fused = true});
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  const Engine oracle = Engine::Create({.backends = {"oracle"}}).value();
  const auto judge = oracle.Compile(partition);
  ASSERT_TRUE(judge.ok()) << judge.status();
  for (const float fill : {-kInf, -1.f, -kInf, 0.5f}) {
    for (const int32_t s : {40, 9}) {
      for (const float scale : {0.25f, -1.f}) {
        const std::vector<float> fills{fill}, scales{scale};
        const std::vector<int32_t> ss{s}, ts{5};
        std::vector<float> got(kRows * kD, -7.f), expected(kRows * kD);
        const auto run = [&](const Engine& engine, const CompiledPartition& what,
                             std::vector<float>& out) {
          return what.Execute(Stream(engine),
                              {{"q", In(data.q)},
                               {"k", In(data.k)},
                               {"v", In(data.v)},
                               {"scale", In(scales)},
                               {"fill", In(fills)},
                               {"s", In(ss)},
                               {"t", In(ts)}},
                              {{"o", {out.data(), out.size() * sizeof(float)}}});
        };
        ASSERT_TRUE(run(simt, *compiled, got).ok());
        ASSERT_TRUE(run(oracle, *judge, expected).ok());
        for (size_t i = 0; i < got.size(); ++i) {
          EXPECT_NEAR(got[i], expected[i], 2e-6) << fill << ' ' << s << ' ' << scale << ' ' << i;
        }
      }
    }
  }
}

TEST(HostScalarTest, ElsewhereThanInStepsIsDeclinedByCuda) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {1, 1, 2, 16}), v = g.Input("v", kF32, {1, 1, 32, 16});
  const Value k = g.DynamicDequantize(g.Input("k", kS8, {1, 1, 32, 16}), g.HostScalar("s", kF32),
                                      GraphBuilder::DequantizeOptions());
  g.Output("o", g.MatMul(g.SoftMax(g.MatMul(q, k, {.transpose_b = true})), v));
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  const auto simt = Engine::Create({.device = Device::kCudaSimt}).value();
  const auto compiled = simt.Compile(Only(*graph), {.require_fused = true});
  EXPECT_THAT(std::string(compiled.status().message()),
              HasSubstr("does not take host scalars but as operands of scores"));
  // The cpu reads it where it is.
  const auto cpu = Engine::Create().value();
  EXPECT_TRUE(cpu.Compile(Only(*graph), {.require_fused = true}).ok());
}

TEST(ConstantsInGraphsTest, ScalesOfAWholeTensorBecomePartOfTheSpec) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {1, 1, 2, 16}), v = g.Input("v", kF32, {1, 1, 32, 16});
  const Value k = g.DynamicDequantize(g.Input("k", kS8, {1, 1, 32, 16}), g.Scalar(0.5),
                                      g.Scalar(kS8, 3), GraphBuilder::DequantizeOptions());
  g.Output("o", g.MatMul(g.SoftMax(g.MatMul(q, k, {.transpose_b = true})), v));
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  const Partition partition = Only(*graph);
  ASSERT_NE(partition.attention(), nullptr) << ::testing::PrintToString(partition.notes());
  const Quantization& how = *partition.attention()->k[0].quantization;
  EXPECT_EQ(how.static_scales, std::vector<float>{0.5f});
  EXPECT_EQ(how.static_zps, std::vector<int64_t>{3});
  EXPECT_EQ(partition.inputs().size(), 3u);
}

TEST(ConstantsInGraphsTest, ConditionsOfSelect) {
  const auto spec = [](bool condition, bool scores_first) {
    GraphBuilder g;
    const Value q = g.Input("q", kF32, {1, 1, 2, 16}), k = g.Input("k", kF32, {1, 1, 32, 16});
    const Value scores = g.MatMul(q, k, {.transpose_b = true}), fill = g.Scalar(-1.f);
    const Value c = g.Scalar(condition);
    const Value chosen = scores_first ? g.Select(c, scores, fill) : g.Select(c, fill, scores);
    g.Output("o", g.MatMul(g.SoftMax(chosen), k));
    return Only(std::move(g).Build().value());
  };
  for (const bool first : {true, false}) {
    const Partition keeps = spec(first, first), loses = spec(!first, first);
    ASSERT_NE(keeps.attention(), nullptr);
    EXPECT_TRUE(keeps.attention()->steps.empty());
    EXPECT_EQ(loses.attention(), nullptr);
    ASSERT_FALSE(loses.notes().empty());
    EXPECT_THAT(loses.notes()[0], HasSubstr("which keeps no score"));
  }
}

// Where a spec has no place for a constant, it must not be taken for an input that is absent.
TEST(ConstantsInGraphsTest, WhatDoesNotFoldIsNotFused) {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {1, 1, 2, 16}), k = g.Input("k", kF32, {1, 1, 32, 16});
  g.Output("o", g.ScaledDotProductAttention(q, k, k, {.kv_lengths = g.Scalar(7)}).first);
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  if (graph.ok()) {
    const Partition partition = Only(*graph);
    EXPECT_EQ(partition.attention(), nullptr);
    ASSERT_FALSE(partition.notes().empty());
    EXPECT_THAT(partition.notes()[0], HasSubstr("the constant 7, is fused only"));
  } else {
    EXPECT_THAT(std::string(graph.status().message()), HasSubstr("kv_lengths"));
  }
}

// Scales of what is stored, on every engine.
TEST(ConstantsInGraphsTest, StoresTakeThem) {
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {4});
  g.Output("codes", g.DynamicQuantize(x, g.Scalar(0.25f), g.Scalar(kU8, 3), {.type = kU8}));
  const Graph graph = std::move(g).Build().value();
  for (const char* const backend : {"cpu", "cuda_simt", "oracle"}) {
    const EngineOptions options{.device = *DeviceOfBackend(backend), .backends = {backend}};
    const Engine engine = Engine::Create(options).value();
    const auto compiled = engine.Compile(Only(graph));
    ASSERT_TRUE(compiled.ok()) << compiled.status();
    const std::vector<float> input{-1.f, 0.f, 0.25f, 3.f};
    std::vector<uint8_t> codes(4);
    const ConstTensor in[] = {In(input)};
    const Tensor out[] = {{codes.data(), 4}};
    ASSERT_TRUE(compiled->Execute(Stream(engine), in, out).ok());
    EXPECT_EQ(codes, (std::vector<uint8_t>{0, 3, 4, 15})) << backend;
  }
}

TEST(ConstantsInGraphsTest, OpsByThemselvesTakeThem) {
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {4});
  g.Output("y", g.Add(g.Multiply(x, g.Scalar(2.f)), g.Scalar(-0.5f)));
  g.Output("codes", g.DynamicQuantize(x, g.Scalar(0.25f), std::nullopt, {.type = kS8}));
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  std::vector<std::string> backends = {"oracle"};
#ifdef KVANT_WITH_ONEDNN
  backends.emplace_back("reference");
#endif
  for (const std::string& backend : backends) {
    const Engine engine = Engine::Create({.backends = {backend}}).value();
    const std::vector<float> input{-1.f, 0.f, 0.25f, 3.f};
    std::vector<float> result(4);
    std::vector<int8_t> codes(4);
    const std::vector<Partition> partitions = PartitionGraph(*graph).value();
    for (const Partition& partition : partitions) {
      const auto compiled = engine.Compile(partition);
      ASSERT_TRUE(compiled.ok()) << compiled.status();
      EXPECT_EQ(compiled->backend(), backend);
      ASSERT_EQ(partition.inputs().size(), 1u);
      std::vector<Tensor> out;
      for (size_t i = 0; i < partition.outputs().size(); ++i) {
        const bool is_codes = partition.output(static_cast<int>(i)).type == kS8;
        out.push_back(is_codes ? Tensor{codes.data(), 4} : Tensor{result.data(), 16});
      }
      const ConstTensor in[] = {In(input)};
      ASSERT_TRUE(compiled->Execute(Stream(engine), in, out).ok());
    }
    EXPECT_EQ(result, (std::vector<float>{-2.5f, -0.5f, 0.f, 5.5f})) << backend;
    EXPECT_EQ(codes, (std::vector<int8_t>{-4, 0, 1, 12})) << backend;
  }
}

// The probability of dropout is checked where it is known, when the graph is compiled.
TEST(ConstantsInGraphsTest, DropoutsProbabilityIsChecked) {
#ifdef KVANT_WITH_ONEDNN
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {4});
  const auto y = g.AddOp(OpKind::kDropout, "y",
                         {x, g.Scalar(int64_t{1}), g.Scalar(int64_t{2}), g.Scalar(1.5f)}, {kF32});
  g.Output("y", y[0]);
  const Graph graph = std::move(g).Build().value();
  const Engine engine = Engine::Create({.backends = {"reference"}}).value();
  EXPECT_THAT(std::string(engine.Compile(Only(graph)).status().message()),
              HasSubstr("probability 1.5 is not in [0, 1]"));
#endif
}

}  // namespace
}  // namespace kvant
