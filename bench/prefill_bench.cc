// Fused prefill on the CPU, one thread: a chunk of 512 causal queries at the end of a
// cache of 4096 tokens. Counts the operations of both products that the mask leaves.
#include <utility>

#include "benchmark/benchmark.h"
#include "kvant/bench/run_graph.h"
#include "kvant/graph/builder.h"

namespace kvant {
namespace {

constexpr int64_t kHeads = 32, kKvHeads = 8, kSize = 128, kQueries = 512, kTokens = 4096;
constexpr int64_t kGroup = 32;

absl::StatusOr<Graph> PrefillGraph(DataType type, FpMath fpmath, DataType queries) {
  GraphBuilder g({.fpmath = fpmath, .apply_to_int = true});
  const Dims cache = {1, kKvHeads, kTokens, kSize};
  const Value q = g.Input("q", queries, {1, kHeads, kQueries, kSize});
  Value k = g.Input("k", type, cache), v = g.Input("v", type, cache);
  const GraphBuilder::AttentionOptions options{
      .scale = 0.088f, .bottom_right = true, .right_window = 0};
  if (IsInteger(type)) {
    const Dims groups = {1, kKvHeads, kTokens, kSize / kGroup};
    const GraphBuilder::DequantizeOptions by_group{.group_shape = {1, 1, 1, kGroup}, .type = kF32};
    k = g.DynamicDequantize(k, g.Input("k_scales", kF16, groups), by_group);
    v = g.DynamicDequantize(v, g.Input("v_scales", kF16, groups), by_group);
  }
  g.Output("o", g.ScaledDotProductAttention(q, k, v, options).first);
  return std::move(g).Build();
}

void BM_Prefill(benchmark::State& state, DataType type, FpMath fpmath, DataType queries = kF32) {
  RunGraph(state, PrefillGraph(type, fpmath, queries), -1);
  const double seen = static_cast<double>(kTokens) - static_cast<double>(kQueries - 1) / 2;
  state.counters["FLOP/s"] = benchmark::Counter(4.0 * kHeads * kQueries * kSize * seen,
                                                benchmark::Counter::kIsIterationInvariantRate);
}

#define KVANT_PREFILL(name, ...) \
  BENCHMARK_CAPTURE(BM_Prefill, name, __VA_ARGS__)->Unit(benchmark::kMillisecond)
KVANT_PREFILL(f32, kF32, FpMath::kStrict);
KVANT_PREFILL(f16, kF16, FpMath::kStrict);
KVANT_PREFILL(bf16, kBF16, FpMath::kStrict);
KVANT_PREFILL(bf16_throughout, kBF16, FpMath::kStrict, kBF16);
KVANT_PREFILL(s8_g32, kS8, FpMath::kStrict);
KVANT_PREFILL(u4_g32, kU4, FpMath::kStrict);
KVANT_PREFILL(bf16_in_bf16, kBF16, FpMath::kBF16);
KVANT_PREFILL(s8_g32_in_bf16, kS8, FpMath::kBF16);
KVANT_PREFILL(u4_g32_in_bf16, kU4, FpMath::kBF16);
#undef KVANT_PREFILL

}  // namespace
}  // namespace kvant
