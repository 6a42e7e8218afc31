// Appending to a cache through CompiledPartition::Execute, in one thread: one token, 64 tokens and
// a prompt of 4096. Bytes read and written, each once, per second; Append/memcpy moves as many
// bytes as the prompt in s8 and is what to compare with. bench/append_numpy.py runs this beside
// numpy.
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"
#include "kvant/patterns/partitioner.h"

namespace kvant {
namespace {

constexpr int64_t kHeads = 32, kSize = 128;

struct Scheme {
  const char* name;
  DataType codes, zero_points;
  Dims group;  // none: a conversion
};

constexpr int64_t kPrompt = 4096;

std::vector<std::byte> Numbers(int64_t elements) {
  std::vector<float> table(4096);
  uint32_t random = 1;
  for (float& value : table) {
    random = random * 1664525 + 1013904223;
    value = static_cast<float>(random >> 8) / (1 << 23) - 1;
  }
  std::vector<std::byte> numbers(elements * sizeof(float));
  for (int64_t i = 0; i < elements; i += 4096) {
    std::memcpy(numbers.data() + i * sizeof(float), table.data(),
                std::min<int64_t>(4096, elements - i) * sizeof(float));
  }
  return numbers;
}

void BM_Append(benchmark::State& state, const Scheme& scheme) {
  const int64_t tokens = state.range(0), capacity = 2 * kPrompt;
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {1, kHeads, tokens, kSize});
  const Value positions = g.Input("positions", kS32, {1});
  g.Append(x, positions, capacity,
           {.group_shape = scheme.group,
            .type = scheme.codes,
            .scale_type = kF16,
            .zero_point_type = scheme.zero_points});
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  const std::vector<Partition> partitions = *PartitionGraph(*graph);
  const absl::StatusOr<Engine> engine = Engine::Create({.executor = MakeSerialExecutor()});
  const absl::StatusOr<CompiledPartition> append = engine->Compile(partitions[0]);
  if (!append.ok()) return state.SkipWithError(std::string(append.status().message()).c_str());
  const Stream stream(*engine);

  const std::vector<std::byte> src = Numbers(kHeads * tokens * kSize);
  int32_t position = 0;
  std::vector<std::vector<std::byte>> memory;
  std::vector<Tensor> outputs;
  auto moved = static_cast<int64_t>(src.size());
  for (size_t i = 0; i < append->partition().outputs().size(); ++i) {
    memory.emplace_back(append->partition().output(static_cast<int>(i)).memory_bytes());
    outputs.push_back({memory.back().data(), memory.back().size()});
    moved += static_cast<int64_t>(memory.back().size()) * tokens / capacity;
  }
  const ConstTensor inputs[] = {{src.data(), src.size()}, {&position, sizeof(position)}};
  for (auto _ : state) {
    if (!append->Execute(stream, inputs, outputs).ok()) return state.SkipWithError("failed");
    position = static_cast<int32_t>((position + tokens) % capacity);
  }
  state.SetBytesProcessed(state.iterations() * moved);
}

void BM_Memcpy(benchmark::State& state) {
  const int64_t half = kHeads * kPrompt * kSize * 5 / 2;
  std::vector<std::byte> from(half, std::byte{1}), to(half);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), half);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * half * 2);
}
BENCHMARK(BM_Memcpy)->Name("Append/memcpy");

const bool kRegistered = [] {
  static const auto* const schemes = new std::vector<Scheme>{
      {"s8_by_token_head", kS8, kUndef, {1, 1, 1, 128}},
      {"u4_real_by_32", kU4, kF16, {1, 1, 1, 32}},
      {"u2_columns", kU2, kF16, {1, 1, 32, 1}},
      {"f16", kF16, kUndef, {}},
  };
  for (const Scheme& scheme : *schemes) {
    auto* const row = benchmark::RegisterBenchmark((std::string("Append/") + scheme.name).c_str(),
                                                   BM_Append, scheme);
    // A group of tokens comes whole.
    const bool columns = !scheme.group.empty() && scheme.group[2] > 1;
    row->Arg(columns ? scheme.group[2] : 1)->Arg(64)->Arg(kPrompt);
  }
  return true;
}();

}  // namespace
}  // namespace kvant
