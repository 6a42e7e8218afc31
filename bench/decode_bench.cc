// Fused decode on the CPU: one query per head over a cache, for a few formats.
// Buffers are rotated, so that the cache comes from memory as it does in a model.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"
#include "kvant/patterns/partitioner.h"

namespace kvant {
namespace {

constexpr int64_t kHeads = 32, kKvHeads = 8, kSize = 128;
constexpr size_t kRotatedBytes = size_t{256} << 20;

struct Format {
  DataType type;
  int64_t group;  // along the head; 0: not quantized
};

Value Cache(GraphBuilder& g, const std::string& name, const Format& format, int64_t kv_len) {
  const Value data = g.Input(name, format.type, {1, kKvHeads, 1, kv_len, kSize});
  if (format.group == 0) return data;
  const Value scales =
      g.Input(name + "_scales", kF32, {1, kKvHeads, 1, kv_len, kSize / format.group});
  return g.DynamicDequantize(data, scales, {.group_shape = {1, 1, 1, 1, format.group}});
}

absl::StatusOr<Graph> DecodeGraph(const Format& format, int64_t kv_len) {
  GraphBuilder g({.apply_to_int = true});
  const DataType type = format.group > 0 ? kF32 : format.type;
  const Value q = g.Input("q", type, {1, kKvHeads, kHeads / kKvHeads, 1, kSize});
  const Value k = Cache(g, "k", format, kv_len);
  const Value scores = g.MatMul(q, k, {.transpose_b = true, .type = kF32});
  const Value scaled = g.Divide(scores, g.Input("scale", kF32, {}));
  g.Output("o", g.MatMul(g.SoftMax(scaled, {.type = type}), Cache(g, "v", format, kv_len)));
  return std::move(g).Build();
}

// All bytes 0x2c: a small positive number in every type.
std::vector<uint64_t> MakeMemory(const LogicalTensor& tensor) {
  return std::vector<uint64_t>(static_cast<size_t>(tensor.memory_bytes()) / 8 + 1,
                               0x2c2c2c2c2c2c2c2c);
}

void BM_Decode(benchmark::State& state, const Format& format) {
  const absl::StatusOr<Graph> graph = DecodeGraph(format, state.range(0));
  if (!graph.ok()) return state.SkipWithError(std::string(graph.status().message()).c_str());
  const absl::StatusOr<Engine> engine = Engine::Create({.backends = {"cpu"}});
  const auto compiled = engine->Compile(PartitionGraph(*graph)->at(0));
  if (!compiled.ok()) return state.SkipWithError(std::string(compiled.status().message()).c_str());
  const Partition& partition = compiled->partition();
  size_t bytes = 0;
  for (size_t i = 0; i < partition.inputs().size(); ++i) {
    bytes += static_cast<size_t>(partition.input(static_cast<int>(i)).memory_bytes());
  }
  const size_t copies = std::clamp<size_t>(kRotatedBytes / bytes, 1, 64);
  std::vector<std::vector<std::vector<uint64_t>>> memory(copies);
  std::vector<std::vector<ConstTensor>> inputs(copies);
  for (size_t c = 0; c < copies; ++c) {
    for (size_t i = 0; i < partition.inputs().size(); ++i) {
      memory[c].push_back(MakeMemory(partition.input(static_cast<int>(i))));
      inputs[c].emplace_back(memory[c].back().data(), memory[c].back().size() * 8);
    }
  }
  std::vector<uint64_t> out = MakeMemory(partition.output(0));
  const Tensor outputs[] = {{out.data(), out.size() * 8}};
  const Stream stream(*engine);
  size_t next = 0;
  for (auto _ : state) {
    const absl::Status status = compiled->Execute(stream, inputs[next++ % copies], outputs);
    if (!status.ok()) state.SkipWithError(std::string(status.message()).c_str());
  }
  state.SetBytesProcessed(static_cast<int64_t>(bytes) * state.iterations());
  state.SetLabel(compiled->kernel());
}

#define KVANT_DECODE(name, ...)                           \
  BENCHMARK_CAPTURE(BM_Decode, name, Format{__VA_ARGS__}) \
      ->ArgName("kv_len")                                 \
      ->Arg(1024)                                         \
      ->Arg(4096)                                         \
      ->UseRealTime()                                     \
      ->Unit(benchmark::kMicrosecond)
KVANT_DECODE(f32, kF32, 0);
KVANT_DECODE(f16, kF16, 0);
KVANT_DECODE(s8_g32, kS8, 32);
KVANT_DECODE(u4_g32, kU4, 32);
KVANT_DECODE(s2_g32, kS2, 32);
#undef KVANT_DECODE

}  // namespace
}  // namespace kvant
