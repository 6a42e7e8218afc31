// Quantizing a cache's worth of numbers, scales and zero points included, in one thread: bytes read
// and written, each once, per second. From memory, and from the second-level cache.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/codebooks.h"
#include "kvant/patterns/partitioner.h"

namespace kvant {
namespace {

constexpr int64_t kHeads = 8, kSize = 128;
constexpr int64_t kMemoryTokens = 32768, kCacheTokens = 128;

struct Scheme {
  const char* name;
  DataType src, codes, zero_points;
  Dims group;
  std::vector<float> codebook = {};
  bool ggml = false;
};

std::vector<float> NamedCodebook(std::string_view name) {
  const absl::Span<const float> values = FindCodebook(name)->values;
  return {values.begin(), values.end()};
}
std::vector<float> Squares() {
  std::vector<float> values;
  for (int i = -128; i < 128; ++i) values.push_back(static_cast<float>(i * std::abs(i)) / 16384);
  return values;
}

void BM_Quantize(benchmark::State& state, const cpu::KernelSet* set, const Scheme& scheme) {
  const int64_t tokens = state.range(0), elements = kHeads * tokens * kSize;
  GraphBuilder g;
  g.DynamicQuantize(g.Input("x", scheme.src, {1, kHeads, tokens, kSize}),
                    {.group_shape = scheme.group,
                     .type = scheme.codes,
                     .scale_type = kF16,
                     .zero_point_type = scheme.zero_points,
                     .codebook = scheme.codebook,
                     .ggml_formula = scheme.ggml});
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  const std::vector<Partition> partitions = *PartitionGraph(*graph);
  const std::unique_ptr<Executable> quantize =
      std::move(*cpu::CompileStore(*partitions[0].store(), *set));
  const Partition& partition = partitions[0];

  std::vector<std::byte> src(partition.input(0).memory_bytes());
  std::vector<uint8_t> table(64 * 1024);
  uint32_t random = 1;
  for (int64_t i = 0; i < 4096; ++i) {
    random = random * 1664525 + 1013904223;
    StoreElement(scheme.src, table.data(), i, static_cast<double>(random >> 8) / (1 << 23) - 1);
  }
  const int64_t bytes = BytesFor(scheme.src, 1);
  for (int64_t i = 0; i < elements * bytes; ++i) {
    src[i] = static_cast<std::byte>(table[i % (4096 * bytes)]);
  }
  std::vector<std::vector<std::byte>> memory;
  std::vector<void*> outputs;
  int64_t moved = static_cast<int64_t>(src.size());
  for (size_t i = 0; i < partition.outputs().size(); ++i) {
    memory.emplace_back(partition.output(static_cast<int>(i)).memory_bytes());
    outputs.push_back(memory.back().data());
    moved += static_cast<int64_t>(memory.back().size());
  }
  std::vector<float> scratch(quantize->scratch_bytes(1) / sizeof(float) + 1);
  const void* inputs[] = {src.data()};
  const std::unique_ptr<Executor> executor = MakeSerialExecutor();
  for (auto _ : state) {
    quantize
        ->Run({*executor, inputs, absl::MakeSpan(outputs),
               reinterpret_cast<std::byte*>(scratch.data())})
        .IgnoreError();
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * moved);
}

// For every set of the kernels' table that this CPU has.
const bool kRegistered = [] {
  static const auto* const schemes = new std::vector<Scheme>{
      {"s8_by_32", kF32, kS8, kUndef, {1, 1, 1, 32}},
      {"u4_by_32", kF32, kU4, kU4, {1, 1, 1, 32}},
      {"u4_real_by_32", kF32, kU4, kF16, {1, 1, 1, 32}},
      {"s8_by_token", kF32, kS8, kUndef, {1, 1, 1, 128}},
      {"u4_by_channel", kF32, kU4, kF16, {1, 1, 32, 1}},
      {"s8_by_channel", kF32, kS8, kUndef, {1, 1, 32, 1}},
      {"nf4_by_32", kF32, kU4, kUndef, {1, 1, 1, 32}, NamedCodebook("nf4")},
      {"u8_codebook_by_32", kF32, kU8, kUndef, {1, 1, 1, 32}, Squares()},
      {"ggml_q8_0", kF32, kS8, kUndef, {1, 1, 1, 32}, {}, /*ggml=*/true},
      {"ggml_q4_0", kF32, kS4, kUndef, {1, 1, 1, 32}, {}, /*ggml=*/true},
      {"ggml_q4_1", kF32, kU4, kF16, {1, 1, 1, 32}, {}, /*ggml=*/true},
      {"ggml_iq4_nl", kF32, kU4, kUndef, {1, 1, 1, 32}, NamedCodebook("iq4_nl"), /*ggml=*/true},
  };
  for (int i = 0; const cpu::KernelSet* set = cpu::KernelsAt(i); ++i) {
    for (const DataType src : {kF32, kF16}) {
      for (Scheme scheme : *schemes) {
        scheme.src = src;
        const std::string name = std::string("Quantize/") + set->name + "/" +
                                 std::string(DataTypeName(src)) + "/" + scheme.name;
        benchmark::RegisterBenchmark(name.c_str(), BM_Quantize, set, scheme)
            ->Arg(kMemoryTokens)
            ->Arg(kCacheTokens);
      }
    }
  }
  return true;
}();

}  // namespace
}  // namespace kvant
