// Fused prefill on the CPU, one thread: a chunk of 512 causal queries at the end of a
// cache of 4096 tokens. Counts the operations of both products that the mask leaves.
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

constexpr int64_t kHeads = 32, kKvHeads = 8, kSize = 128, kQueries = 512, kTokens = 4096;
constexpr int64_t kGroup = 32;

absl::StatusOr<Graph> PrefillGraph(DataType type, FpMath fpmath) {
  GraphBuilder g({.fpmath = fpmath, .apply_to_int = true});
  const Dims cache = {1, kKvHeads, kTokens, kSize};
  const Value q = g.Input("q", kF32, {1, kHeads, kQueries, kSize});
  const Value k = g.Input("k", type, cache), v = g.Input("v", type, cache);
  GraphBuilder::AttentionOptions options{.scale = 0.088f, .bottom_right = true, .right_window = 0};
  if (IsInteger(type)) {
    const Dims groups = {1, kKvHeads, kTokens, kSize / kGroup};
    options.k_scales = g.Input("k_scales", kF16, groups);
    options.v_scales = g.Input("v_scales", kF16, groups);
    options.k_group_shape = options.v_group_shape = {1, 1, 1, kGroup};
  }
  g.Output("o", g.ScaledDotProductAttention(q, k, v, options).first);
  return std::move(g).Build();
}

// Random numbers between -1 and 1, or random codes.
std::vector<uint64_t> MakeMemory(const LogicalTensor& tensor) {
  std::vector<uint64_t> memory(static_cast<size_t>(tensor.memory_bytes()) / 8 + 1);
  std::mt19937_64 random;
  if (IsInteger(tensor.type)) {
    for (uint64_t& word : memory) word = random();
    return memory;
  }
  std::uniform_real_distribution<double> value(-1, 1);
  for (int64_t i = 0; i < tensor.memory_bytes() * 8 / BitsOf(tensor.type); ++i) {
    StoreElement(tensor.type, memory.data(), i, value(random));
  }
  return memory;
}

void BM_Prefill(benchmark::State& state, DataType type, FpMath fpmath) {
  const absl::StatusOr<Graph> graph = PrefillGraph(type, fpmath);
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
  const double seen = static_cast<double>(kTokens) - static_cast<double>(kQueries - 1) / 2;
  state.counters["FLOP/s"] = benchmark::Counter(4.0 * kHeads * kQueries * kSize * seen,
                                                benchmark::Counter::kIsIterationInvariantRate);
  state.SetLabel(compiled->kernel());
}

#define KVANT_PREFILL(name, ...) \
  BENCHMARK_CAPTURE(BM_Prefill, name, __VA_ARGS__)->Unit(benchmark::kMillisecond)
KVANT_PREFILL(f32, kF32, FpMath::kStrict);
KVANT_PREFILL(f16, kF16, FpMath::kStrict);
KVANT_PREFILL(s8_g32, kS8, FpMath::kStrict);
KVANT_PREFILL(u4_g32, kU4, FpMath::kStrict);
KVANT_PREFILL(bf16_in_bf16, kBF16, FpMath::kBF16);
KVANT_PREFILL(s8_g32_in_bf16, kS8, FpMath::kBF16);
KVANT_PREFILL(u4_g32_in_bf16, kU4, FpMath::kBF16);
#undef KVANT_PREFILL

}  // namespace
}  // namespace kvant
