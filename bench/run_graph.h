#ifndef KVANT_BENCH_RUN_GRAPH_H_
#define KVANT_BENCH_RUN_GRAPH_H_

#include "absl/status/statusor.h"
#include "benchmark/benchmark.h"
#include "kvant/graph/graph.h"

namespace kvant {

// Times the first partition of `graph` on the CPU, in one thread: inputs are random codes, and
// random numbers from `lowest` to 1. The label is the kernel. An error ends the benchmark.
void RunGraph(benchmark::State& state, const absl::StatusOr<Graph>& graph, double lowest);

}  // namespace kvant

#endif  // KVANT_BENCH_RUN_GRAPH_H_
