// Fused attention on the CPU, one thread, along what a user may choose freely: the size of groups,
// and dropout. Neighbours should cost about the same, or the kernel's description say why.
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"
#include "kvant/patterns/partitioner.h"

namespace kvant {
namespace {

// Twenty numbers divide the head size.
constexpr int64_t kHeads = 2, kSize = 240, kTokens = 1024;

struct Storage {
  DataType type = kF32;
  int64_t group = 0;  // along the head; 0: not quantized
  DataType zero_points = kUndef;
};

Value Cache(GraphBuilder& g, const std::string& name, const Storage& storage) {
  const Value data = g.Input(name, storage.type, {1, kHeads, kTokens, kSize});
  if (storage.group == 0) return data;
  const Dims groups = {1, kHeads, kTokens, kSize / storage.group};
  const Value scales = g.Input(name + "_scales", kF32, groups);
  const GraphBuilder::DequantizeOptions options{.group_shape = {1, 1, 1, storage.group}};
  if (storage.zero_points == kUndef) return g.DynamicDequantize(data, scales, options);
  const Value zero_points = g.Input(name + "_zero_points", storage.zero_points, groups);
  return g.DynamicDequantize(data, scales, zero_points, options);
}

absl::StatusOr<Graph> CurveGraph(const Storage& storage, int64_t queries, bool dropout) {
  GraphBuilder g({.apply_to_int = true});
  const Value q = g.Input("q", kF32, {1, kHeads, queries, kSize});
  const Value scores = g.MatMul(q, Cache(g, "k", storage), {.transpose_b = true});
  Value probs = g.SoftMax(g.Divide(scores, g.Input("divisor", kF32, {})));
  if (dropout) {
    probs = g.AddOp(OpKind::kDropout, "dropout",
                    {probs, g.Input("seed", kS64, {}), g.Input("offset", kS64, {}),
                     g.Input("probability", kF32, {})},
                    {kF32})[0];
  }
  g.Output("o", g.MatMul(probs, Cache(g, "v", storage)));
  return std::move(g).Build();
}

// Random numbers between 0 and 1, or random codes.
std::vector<uint64_t> MakeMemory(const LogicalTensor& tensor) {
  std::vector<uint64_t> memory(static_cast<size_t>(tensor.memory_bytes()) / 8 + 1);
  std::mt19937_64 random;
  if (IsInteger(tensor.type)) {
    for (uint64_t& word : memory) word = random();
    return memory;
  }
  std::uniform_real_distribution<double> value(0, 1);
  for (int64_t i = 0; i < tensor.memory_bytes() * 8 / BitsOf(tensor.type); ++i) {
    StoreElement(tensor.type, memory.data(), i, value(random));
  }
  return memory;
}

void Run(benchmark::State& state, const Storage& storage, int64_t queries, bool dropout) {
  const absl::StatusOr<Graph> graph = CurveGraph(storage, queries, dropout);
  if (!graph.ok()) return state.SkipWithError(std::string(graph.status().message()).c_str());
  const absl::StatusOr<Engine> engine = Engine::Create({.backends = {"cpu"}, .threads = 1});
  const auto compiled = engine->Compile(PartitionGraph(*graph)->at(0));
  if (!compiled.ok()) return state.SkipWithError(std::string(compiled.status().message()).c_str());
  const Partition& partition = compiled->partition();
  std::vector<std::vector<uint64_t>> memory;
  std::vector<ConstTensor> inputs;
  for (size_t i = 0; i < partition.inputs().size(); ++i) {
    memory.push_back(MakeMemory(partition.input(static_cast<int>(i))));
    inputs.emplace_back(memory.back().data(), memory.back().size() * 8);
  }
  std::vector<uint64_t> out(static_cast<size_t>(partition.output(0).memory_bytes()) / 8 + 1);
  const Tensor outputs[] = {{out.data(), out.size() * 8}};
  const Stream stream(*engine);
  for (auto _ : state) {
    const absl::Status status = compiled->Execute(stream, inputs, outputs);
    if (!status.ok()) state.SkipWithError(std::string(status.message()).c_str());
  }
  state.SetLabel(compiled->kernel());
}

void BM_Groups(benchmark::State& state, DataType type, DataType zero_points, int64_t queries) {
  Run(state, {type, state.range(0), zero_points}, queries, /*dropout=*/false);
}

void BM_Dropout(benchmark::State& state, bool dropout) { Run(state, {}, state.range(0), dropout); }

void EveryDivisor(benchmark::internal::Benchmark* benchmark) {
  for (int64_t group = 1; group <= kSize; ++group) {
    if (kSize % group == 0) benchmark->Arg(group);
  }
}

#define KVANT_GROUPS(name, ...)                   \
  BENCHMARK_CAPTURE(BM_Groups, name, __VA_ARGS__) \
      ->Apply(EveryDivisor)                       \
      ->ArgName("group")                          \
      ->Unit(benchmark::kMicrosecond)
KVANT_GROUPS(s8, kS8, kUndef, 1);
KVANT_GROUPS(s8_4_queries, kS8, kUndef, 4);
KVANT_GROUPS(s8_64_queries, kS8, kUndef, 64);
KVANT_GROUPS(u4_zero_points, kU4, kU8, 1);
KVANT_GROUPS(f8, kF8E4M3, kUndef, 1);
#undef KVANT_GROUPS

BENCHMARK_CAPTURE(BM_Dropout, without, false)->Arg(1)->Arg(64)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(BM_Dropout, with, true)->Arg(1)->Arg(64)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace kvant
