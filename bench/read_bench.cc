// Reads memory in chunks, in order and in no order: what a paged cache can be read at, whose page
// holds a chunk of each head, beside decode_bench.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

namespace {

constexpr int64_t kBytes = int64_t{256} << 20;
constexpr int kLine = 64;

// Chunks that begin within a line would end in one that nobody has asked for.
struct alignas(kLine) Line {
  uint64_t words[kLine / sizeof(uint64_t)] = {1, 1, 1, 1, 1, 1, 1, 1};
};

void BM_Read(benchmark::State& state) {
  static const std::vector<Line> memory(kBytes / kLine);
  const int64_t chunk = state.range(0);
  std::vector<int64_t> order(static_cast<size_t>(kBytes / chunk / state.threads()));
  std::iota(order.begin(), order.end(), state.thread_index() * static_cast<int64_t>(order.size()));
  if (state.range(1) != 0) std::shuffle(order.begin(), order.end(), std::mt19937(1));
  const auto* const base = reinterpret_cast<const char*>(memory.data());
  for (auto _ : state) {
    uint64_t sums[kLine / sizeof(uint64_t)] = {};
    for (size_t i = 0; i < order.size(); ++i) {
      const char* const at = base + order[i] * chunk;
      const char* const next = base + order[std::min(i + 1, order.size() - 1)] * chunk;
      for (int64_t byte = 0; byte < chunk; byte += kLine) {
        __builtin_prefetch(next + byte, 0, 2);
        const auto* const line = reinterpret_cast<const uint64_t*>(at + byte);
        for (size_t lane = 0; lane < std::size(sums); ++lane) sums[lane] += line[lane];
      }
    }
    benchmark::DoNotOptimize(sums);
  }
  state.SetBytesProcessed(state.iterations() * chunk * static_cast<int64_t>(order.size()));
}
BENCHMARK(BM_Read)
    ->ArgNames({"chunk", "shuffled"})
    ->ArgsProduct({{1024, 2048, 4096, 8192}, {0, 1}})
    ->Threads(2)
    ->UseRealTime();

}  // namespace
