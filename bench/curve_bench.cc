// Fused attention on the CPU, one thread, along what a user may choose freely: the size of groups,
// and dropout. Neighbours should cost about the same, or the kernel's description say why.
#include <string>
#include <utility>

#include "benchmark/benchmark.h"
#include "kvant/bench/run_graph.h"
#include "kvant/graph/builder.h"

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

void BM_Groups(benchmark::State& state, DataType type, DataType zero_points, int64_t queries) {
  RunGraph(state, CurveGraph({type, state.range(0), zero_points}, queries, /*dropout=*/false), 0);
}

void BM_Dropout(benchmark::State& state, bool dropout) {
  RunGraph(state, CurveGraph({}, state.range(0), dropout), 0);
}

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
