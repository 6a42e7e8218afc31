// Hadamard on the cpu backend inside attention, against f64 loops; on it and on CUDA's kernels
// alone and before what stores, against the oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/graph/builder.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tests/backends/attention/harness.h"
#include "kvant/tests/backends/ops/reference_testing.h"

namespace kvant {
namespace {

using cpu::Case;
using cpu::Dense;
using cpu::Dims5;
using cpu::Format;
using cpu::Plain;
using testing::RunGraph;
using testing::Values;

constexpr double kInf = std::numeric_limits<double>::infinity();
// Queries and probabilities are rounded to 15 bits of the largest of a row.
constexpr double kOnCodes = 5e-4;

Format Codes(DataType type) {
  return {.type = type, .group = {1, 1, 1, 1, 8}, .scales = kF16, .zero_points = type};
}

TEST(CpuRotation, EveryBlockOfQueriesAndOutput) {
  for (int64_t size : {24, 64, 96, 128}) {
    for (int64_t block = 2; size % block == 0; block *= 2) {
      Case c = Plain({.b0 = 1, .kv_len = 65, .d = size, .dv = size});
      c.spec.q_hadamard = block;
      c.spec.output_hadamard = size / block % 2 == 0 ? 2 * block : block;
      c.CheckEverywhere();
    }
  }
}

TEST(CpuRotation, OverCodesTilesAndSplits) {
  for (DataType type : {kS8, kU4}) {
    for (int64_t q_len : {1, 3, 13}) {
      Case c = Plain({.b0 = 1, .ratio = 2, .q_len = q_len, .kv_len = 300, .d = 80, .dv = 64},
                     Codes(type), Codes(type));
      c.spec.q_hadamard = 16;
      c.spec.output_hadamard = 64;
      c.AddStats();
      c.CheckEverywhere(kOnCodes);
    }
  }
}

// f16 queries, of which sums do not fit into f16, and of which some heads are zeros.
TEST(CpuRotation, OfPackedCodesAndTilesOnTheCudaBackend) {
  for (const bool packed : {true, false}) {
    for (const float size : {1e-3f, 1.f, 6e4f}) {
      for (const int64_t block : {2, 16, 32, 64, 128}) {
        SCOPED_TRACE(::testing::Message() << packed << " " << size << " " << block);
        Case c = Plain(
            {.b0 = 2, .ratio = packed ? 3 : 5, .q_len = 3, .kv_len = 332, .d = 128, .dv = 128},
            Codes(kU8), Codes(kU8));
        if (packed) {
          const Format codes = {.type = kU8, .group = {1, 1, 1, 1, 32}, .scales = kF16};
          c.spec.k.clear();
          c.spec.v.clear();
          c.SetK(codes);
          c.SetV(codes);
        }
        c.spec.q = c.AddDense(kF16, {2, 2, packed ? 3 : 5, 3, 128}, [&](const Dims5& p) {
          return p[2] == 1 ? 0 : size * c.Random(.9, 1);
        });
        ScoreStep scale{.kind = ScoreStep::Kind::kMultiply};
        scale.operand.constant = 1 / (size * 128);
        c.spec.steps = {scale};
        c.spec.q_hadamard = block;
        c.spec.output_hadamard = 128 / block * 2;
        const std::string kernel = c.CheckOnCudaSimt(5e-3);
        EXPECT_EQ(kernel.find("products of packed codes") != std::string::npos, packed) << kernel;
        if (HasFailure()) return;
      }
    }
  }
}

TEST(CpuRotation, OfQueriesComesBeforeWhatScalesThem) {
  Case c = Plain({.q_len = 3, .kv_len = 130, .d = 64, .dv = 32});
  ScoreStep scale{.kind = ScoreStep::Kind::kMultiply};
  scale.operand.view = c.AddDense(kF32, {2, 2, 3, 3, 1}, [&](const Dims5& p) {
    return 0.5 + 0.25 * static_cast<double>(p[2] + p[3]);
  });
  c.spec.steps.push_back(scale);
  c.spec.q_hadamard = 32;
  c.spec.output_hadamard = 8;
  c.spec.sinks = c.AddDense(kF32, {1, 2, 3, 1, 1},
                            [](const Dims5& p) { return static_cast<double>(p[1] + p[2]); });
  c.CheckEverywhere();
}

TEST(CpuRotation, OfTheOutputComesBeforeItsRounding) {
  for (bool two_passes : {false, true}) {
    Case c = Plain({.q_len = 3, .kv_len = 130, .d = 32, .dv = 32});
    c.spec.output_hadamard = 32;
    if (two_passes) c.spec.probs_quantization = FakeQuantize{kU8, 1.f / 200, 3};
    c.outputs.clear();
    c.spec.output_quantization = FakeQuantize{kU8, 0.02f, 100};
    c.spec.output = c.AddOutput(kU8, {2, 2, 3, 3, 32}, Dense({2, 2, 3, 3, 32}));
    c.CheckEverywhere(1.0);  // codes may be off by one
  }
  for (DataType type : {kF16, kBF16}) {
    Case c = Plain({.q_len = 3, .kv_len = 65, .d = 64, .dv = 64});
    c.outputs.clear();
    c.spec.output = c.AddOutput(type, {2, 2, 3, 3, 64}, {1, 2, 4, 12, 36});
    c.spec.q_hadamard = 16;
    c.spec.output_hadamard = 16;
    c.CheckEverywhere(type == kBF16 ? 1e-2 : 1.2e-3);
  }
}

TEST(CpuRotation, OfRowsThatSeeNothing) {
  for (SoftmaxMode mode : {SoftmaxMode::kNone, SoftmaxMode::kInfAsZero}) {
    Case c = Plain({.q_len = 5, .kv_len = 600, .d = 32, .dv = 32});
    ScoreStep band{.kind = ScoreStep::Kind::kBand, .right = 0};
    band.alignment = ScoreStep::Alignment::kRuntime;
    band.shift_sub.constant = 3;
    band.operand.constant = -std::numeric_limits<float>::infinity();
    c.spec.steps.push_back(band);
    c.spec.softmax_mode = mode;
    c.spec.q_hadamard = c.spec.output_hadamard = 32;
    c.AddStats();
    c.CheckEverywhere();
  }
}

TEST(CpuRotation, OfQueriesIsDeclinedWithASoftmaxOverThem) {
  Case c = Plain({.d = 32, .dv = 32});
  c.spec.over_queries = true;
  c.spec.output_hadamard = 16;
  EXPECT_TRUE(CompileAttention(c.spec, *cpu::KernelsAt(0)).ok());
  c.Check();
  c.spec.q_hadamard = 16;
  const absl::Status status = CompileAttention(c.spec, *cpu::KernelsAt(0)).status();
  EXPECT_EQ(status.message(), "does not take rotated queries or keys with a softmax over queries");
}

// Both backends give the same where the oracle has a number, and NaN or the infinity where it has.
void ExpectAsOracle(const Graph& graph, const Values& inputs, double tolerance,
                    const std::string& backend = "cpu") {
  const absl::StatusOr<Values> want = RunGraph(graph, inputs, "oracle");
  const absl::StatusOr<Values> got = RunGraph(graph, inputs, backend);
  ASSERT_TRUE(want.ok()) << want.status();
  ASSERT_TRUE(got.ok()) << got.status();
  for (const TensorId id : graph.outputs()) {
    const std::vector<double>&w = want->at(id), &g = got->at(id);
    ASSERT_EQ(w.size(), g.size());
    for (size_t i = 0; i < w.size(); ++i) {
      if (std::isfinite(w[i])) {
        ASSERT_NEAR(g[i], w[i], tolerance * std::max(1.0, std::abs(w[i]))) << "element " << i;
      } else {
        ASSERT_TRUE(std::isnan(w[i]) ? std::isnan(g[i]) : g[i] == w[i])
            << "element " << i << ": " << g[i] << ", expected " << w[i];
      }
    }
  }
}

// Q and V are rotated; V and the output alike would cancel.
TEST(CpuRotation, NanAndInfinityAreTheOracles) {
  const auto attention = [](GraphBuilder& g) {
    const Value q = g.Hadamard(g.Input("q", kF32, {1, 2, 4, 32}), 16);
    const Value k = g.Input("k", kF32, {1, 2, 70, 32});
    const Value v = g.Hadamard(g.Input("v", kF32, {1, 2, 70, 32}), 8);
    g.Output("o", g.MatMul(g.SoftMax(g.MatMul(q, k, {.transpose_b = true})), v));
  };
  const struct {
    const char* tensor;
    size_t element;
    double value;
  } cases[] = {{"q", 32 + 5, std::nan("")},
               {"q", 32 + 5, kInf},
               {"k", 70 * 32 + 7, std::nan("")},
               {"v", 9, std::nan("")},
               {"v", 9, -kInf}};
  for (const auto& [tensor, element, value] : cases) {
    GraphBuilder g;
    attention(g);
    const absl::StatusOr<Graph> graph = std::move(g).Build();
    ASSERT_TRUE(graph.ok()) << graph.status();
    Values inputs = testing::RandomInputs(*graph);
    for (auto& [id, values] : inputs) {
      for (double& x : values) x /= 8;
    }
    inputs[graph->FindTensor(tensor)->desc.id][element] = value;
    ExpectAsOracle(*graph, inputs, 1e-5);
  }
}

TEST(CpuRotation, AloneAsTheOracle) {
  const struct {
    Dims dims;
    int64_t block;
    std::optional<Dims> strides;
  } cases[] = {
      {{64}, 64, {}},
      {{2, 3, 5, 96}, 32, {}},
      {{3, 80}, 16, {}},
      {{2, 5000}, 8, {}},
      {{3, 8192}, 4096, {}},
      {{2, 1024}, 512, {}},
      {{3, 2048}, 2048, {{8, 30}}},
      {{700, 128}, 128, {}},
      {{4, 24}, 8, {}},
      {{5, 7}, 1, {}},
      {{0, 16}, 4, {}},
      {{2, 1, 3, 20}, 4, {}},
      {{2, 3, 32}, 16, {{200, 40, 1}}},
      {{2, 3, 32}, 16, {{1, 2, 6}}},
  };
  for (const auto& [dims, block, strides] : cases) {
    for (DataType type : {kF32, kF16, kBF16}) {
      for (bool strided_output : {false, true}) {
        SCOPED_TRACE(absl::StrCat("block ", block, " of ", dims.back(), " ",
                                  std::string(DataTypeName(type)), strided_output));
        GraphBuilder g;
        const Value y = g.Hadamard(g.Input("x", type, dims, strides), block);
        g.Output("y", y, strided_output ? strides : std::nullopt);
        const absl::StatusOr<Graph> graph = std::move(g).Build();
        ASSERT_TRUE(graph.ok()) << graph.status();
        // A unit in the last place: ties fall either way.
        const double tolerance = type == kF32 ? 1e-5 : type == kF16 ? 1e-3 : 8e-3;
        ExpectAsOracle(*graph, testing::RandomInputs(*graph), tolerance);
        ExpectAsOracle(*graph, testing::RandomInputs(*graph), tolerance, "cuda_simt");
      }
    }
  }
}

// Runs all in one slot of two.
class OneSlot : public Executor {
 public:
  explicit OneSlot(int slot) : slot_(slot) {}
  int max_concurrency() const override { return 2; }
  void ParallelFor(int64_t n, absl::FunctionRef<void(int64_t, int)> body) override {
    for (int64_t i = 0; i < n; ++i) body(i, slot_);
  }

 private:
  const int slot_;
};

// Threads would write to each other's otherwise.
TEST(CpuRotation, EachSlotHasScratchOfItsOwn) {
  GraphBuilder g;
  g.Output("y", g.Hadamard(g.Input("x", kF16, {700, 128}), 128));
  const Graph graph = std::move(g).Build().value();
  const std::vector<uint16_t> x(700 * 128, F32ToF16(1.5f));
  std::vector<uint8_t> was_written[2];
  for (const int slot : {0, 1}) {
    const Engine engine = *Engine::Create({.executor = std::make_shared<OneSlot>(slot)});
    const CompiledGraph compiled = *engine.Compile(graph, {.require_fused = true});
    std::vector<std::byte> memory(compiled.scratch_bytes() + 64, std::byte{0xa5});
    const size_t begin = (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    std::vector<uint16_t> y(x.size());
    const absl::Status done = compiled.Execute(
        Stream(engine), {ConstTensor(x.data(), 2 * x.size())}, {Tensor{y.data(), 2 * y.size()}},
        absl::MakeSpan(memory).subspan(begin, compiled.scratch_bytes()));
    ASSERT_TRUE(done.ok()) << done;
    for (size_t i = 0; i < compiled.scratch_bytes(); ++i) {
      was_written[slot].push_back(memory[begin + i] != std::byte{0xa5});
    }
    EXPECT_GT(std::count(was_written[slot].begin(), was_written[slot].end(), 1), 0);
  }
  for (size_t i = 0; i < was_written[0].size(); ++i) {
    ASSERT_FALSE(was_written[0][i] && was_written[1][i]) << "byte " << i;
  }
}

struct Chain {
  DataType src = kF32, codes = kS8, zero_points = kUndef;
  Dims dims{2, 3, 700, 64};
  Dims group{1, 1, 1, 32};
  int64_t block = 64;
};

Graph ChainGraph(const Chain& chain, bool rotate) {
  GraphBuilder g;
  Value x = g.Input("x", chain.src, chain.dims);
  if (rotate) x = g.Hadamard(x, chain.block);
  const GraphBuilder::Quantized q = g.DynamicQuantize(x, {.group_shape = chain.group,
                                                          .type = chain.codes,
                                                          .scale_type = kF16,
                                                          .zero_point_type = chain.zero_points});
  g.Output("codes", q.codes);
  g.Output("scales", q.scales);
  if (q.zero_points) g.Output("zps", *q.zero_points);
  absl::StatusOr<Graph> graph = std::move(g).Build();
  EXPECT_TRUE(graph.ok()) << graph.status();
  return *std::move(graph);
}

// What is rotated stays f32: the same as both ops one after the other, with f32 between.
void ExpectAsOneAfterTheOther(const Chain& chain, const Graph& graph, const Values& inputs,
                              const std::string& backend) {
  SCOPED_TRACE(backend);
  const absl::StatusOr<Values> got = RunGraph(graph, inputs, backend);
  ASSERT_TRUE(got.ok()) << got.status();
  GraphBuilder alone;
  alone.Output("y", alone.Hadamard(alone.Input("x", kF32, chain.dims), chain.block));
  const Graph rotation = *std::move(alone).Build();
  const auto rotated =
      RunGraph(rotation, {{rotation.inputs()[0], inputs.begin()->second}}, backend);
  ASSERT_TRUE(rotated.ok()) << rotated.status();
  Chain wide = chain;
  wide.src = kF32;
  const Graph second = ChainGraph(wide, false);
  const auto want =
      RunGraph(second, {{second.inputs()[0], rotated->at(rotation.outputs()[0])}}, backend);
  ASSERT_TRUE(want.ok()) << want.status();
  ASSERT_EQ(graph.outputs().size(), second.outputs().size());
  for (size_t i = 0; i < graph.outputs().size(); ++i) {
    EXPECT_EQ(got->at(graph.outputs()[i]), want->at(second.outputs()[i])) << "output " << i;
  }

  // The oracle's numbers differ in the last places of f32, so a few codes do by one.
  const absl::StatusOr<Values> oracle = RunGraph(graph, inputs, "oracle");
  ASSERT_TRUE(oracle.ok()) << oracle.status();
  const std::vector<double>&codes = got->at(graph.outputs()[0]),
        &true_codes = oracle->at(graph.outputs()[0]);
  size_t others = 0;
  for (size_t i = 0; i < codes.size(); ++i) {
    ASSERT_LE(std::abs(codes[i] - true_codes[i]), 1) << i;
    others += codes[i] != true_codes[i];
  }
  EXPECT_LE(others, codes.size() / 200);
  const std::vector<double>&scales = got->at(graph.outputs()[1]),
        &true_scales = oracle->at(graph.outputs()[1]);
  for (size_t i = 0; i < scales.size(); ++i) ASSERT_NEAR(scales[i] / true_scales[i], 1, 1e-3);
}

TEST(CpuRotation, BeforeQuantizationIsOnePartition) {
  for (const Chain& chain :
       {Chain{}, Chain{.src = kF16, .codes = kU4, .zero_points = kF16, .block = 32},
        Chain{.src = kBF16,
        .codes = kS4,
        .dims = {1, 2, 64, 96},
        .group = {1, 1, 32, 1},
        .block = 32},
        Chain{.codes = kU2,
        .zero_points = kU2,
        .dims = {1, 1, 3, 16},
        .group = {1, 1, 1, 4},
        .block = 8}}) {
    const Graph graph = ChainGraph(chain, true);
    const auto partitions = PartitionGraph(graph);
    ASSERT_TRUE(partitions.ok());
    ASSERT_EQ(partitions->size(), 1u);
    EXPECT_EQ(partitions->at(0).pattern(), "chain: Hadamard, DynamicQuantize");
    Values inputs = testing::RandomInputs(graph);
    for (double& x : inputs.begin()->second) x = RoundTo(chain.src, x);
    ExpectAsOneAfterTheOther(chain, graph, inputs, "cpu");
    ExpectAsOneAfterTheOther(chain, graph, inputs, "cuda_simt");
    EXPECT_EQ(*RunGraph(graph, inputs, "cuda_simt"), *RunGraph(graph, inputs, "cpu"));
  }
}

TEST(CpuRotation, ThatSomethingElseReadsStaysAlone) {
  GraphBuilder g;
  const Value x = g.Hadamard(g.Input("x", kF32, {4, 32}), 32);
  g.Output("codes", g.DynamicQuantize(x, {.group_shape = {1, 32}, .type = kS8}).codes);
  g.Output("x", x);
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  const auto partitions = PartitionGraph(*graph);
  ASSERT_TRUE(partitions.ok());
  ASSERT_EQ(partitions->size(), 2u);
  EXPECT_EQ(partitions->at(0).pattern(), "single op: Hadamard");
  const auto engine = Engine::Create({.backends = {"cpu"}});
  ASSERT_TRUE(engine.ok());
  const auto compiled = engine->Compile(partitions->at(0));
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  EXPECT_TRUE(compiled->fused());
  EXPECT_NE(compiled->ToString().find("Hadamard in blocks of 32"), std::string::npos)
      << compiled->ToString();
}

}  // namespace
}  // namespace kvant
