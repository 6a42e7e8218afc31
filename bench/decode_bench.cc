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
  // In front of and behind what is quantized, in f16. Then, and where there is room for more tokens
  // than there are (capacity; 0: no), ranges at execution say which tokens exist.
  int64_t sinks = 0, residual = 0;
  int64_t capacity = 0;

  bool has_ranges() const { return sinks + residual + capacity > 0; }
  std::vector<int64_t> Segments(int64_t kv_len) const {
    if (sinks + residual == 0) return {std::max(kv_len, capacity)};
    return {sinks, std::max(kv_len, capacity) - sinks - residual, residual};
  }
};

Value Cache(GraphBuilder& g, const std::string& name, const Format& format, int64_t kv_len) {
  const std::vector<int64_t> segments = format.Segments(kv_len);
  std::vector<Value> parts;
  for (size_t s = 0; s < segments.size(); ++s) {
    const bool plain = segments.size() == 3 && s != 1;
    const int64_t tokens = segments[s];
    const std::string part = name + std::to_string(s);
    const Value data = g.Input(part, plain ? kF16 : format.type, {1, kKvHeads, 1, tokens, kSize});
    if (plain) {
      parts.push_back(g.TypeCast(data, kF32));
    } else if (format.group == 0) {
      parts.push_back(data);
    } else {
      const Value scales =
          g.Input(part + "_scales", kF32, {1, kKvHeads, 1, tokens, kSize / format.group});
      parts.push_back(
          g.DynamicDequantize(data, scales, {.group_shape = {1, 1, 1, 1, format.group}}));
    }
  }
  return parts.size() == 1 ? parts[0] : g.Concat(parts, -2);
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

// The last input, where there are ranges: kv_len tokens, of a ring that has room for more from
// token `first` on.
std::vector<int32_t> RangesOf(const Format& format, int64_t kv_len, int64_t first) {
  std::vector<int32_t> ranges;
  for (int side = 0; side < 2; ++side) {
    const std::vector<int64_t> segments = format.Segments(kv_len);
    for (size_t s = 0; s < segments.size(); ++s) {
      const bool ring = segments.size() == 1 || s == 1;
      const int64_t tokens = ring ? kv_len - format.sinks - format.residual : segments[s];
      ranges.push_back(static_cast<int32_t>(ring ? first % segments[s] : 0));
      ranges.push_back(static_cast<int32_t>(tokens));
    }
  }
  return ranges;
}

// All bytes 0x2c: a small positive number in every type.
std::vector<uint64_t> MakeMemory(const LogicalTensor& tensor) {
  return std::vector<uint64_t>(static_cast<size_t>(tensor.memory_bytes()) / 8 + 1,
                               0x2c2c2c2c2c2c2c2c);
}

void BM_Decode(benchmark::State& state, const Format& format) {
  const int64_t kv_len = state.range(0);
  const absl::StatusOr<Graph> graph = DecodeGraph(format, kv_len);
  if (!graph.ok()) return state.SkipWithError(std::string(graph.status().message()).c_str());
  const absl::StatusOr<Engine> engine = Engine::Create({.backends = {"cpu"}});
  CompileOptions options;
  if (format.has_ranges()) {
    const auto segments = static_cast<int64_t>(format.Segments(kv_len).size());
    options.segment_ranges =
        LogicalTensor{.id = 1000000, .type = kS32, .dims = Dims{1, 2 * segments, 2}};
  }
  const auto compiled = engine->Compile(PartitionGraph(*graph)->at(0), options);
  if (!compiled.ok()) return state.SkipWithError(std::string(compiled.status().message()).c_str());
  const Partition& partition = compiled->partition();
  const size_t ports = partition.inputs().size() - (format.has_ranges() ? 1 : 0);
  size_t bytes = 0;
  for (size_t i = 0; i < ports; ++i) {
    bytes += static_cast<size_t>(partition.input(static_cast<int>(i)).memory_bytes());
  }
  const size_t copies = std::clamp<size_t>(kRotatedBytes / bytes, 1, 64);
  std::vector<std::vector<std::vector<uint64_t>>> memory(copies);
  for (auto& copy : memory) {
    for (size_t i = 0; i < ports; ++i) {
      copy.push_back(MakeMemory(partition.input(static_cast<int>(i))));
    }
  }
  // A large capacity is read in several places.
  constexpr size_t kPlaces = 64;
  std::vector<std::vector<int32_t>> ranges(kPlaces);
  std::vector<std::vector<ConstTensor>> inputs(kPlaces);
  for (size_t place = 0; place < kPlaces; ++place) {
    for (const auto& port : memory[place % copies]) {
      inputs[place].emplace_back(port.data(), port.size() * 8);
    }
    if (!format.has_ranges()) continue;
    const int64_t first = format.capacity == 0 ? 0 : static_cast<int64_t>(place / copies) * kv_len;
    ranges[place] = RangesOf(format, kv_len, first);
    inputs[place].emplace_back(ranges[place].data(), ranges[place].size() * 4);
  }
  std::vector<uint64_t> out = MakeMemory(partition.output(0));
  const Tensor outputs[] = {{out.data(), out.size() * 8}};
  const Stream stream(*engine);
  size_t next = 0;
  for (auto _ : state) {
    const absl::Status status = compiled->Execute(stream, inputs[next++ % kPlaces], outputs);
    if (!status.ok()) state.SkipWithError(std::string(status.message()).c_str());
  }
  const int64_t room = std::max(kv_len, format.capacity);
  state.SetBytesProcessed(static_cast<int64_t>(bytes) * kv_len / room * state.iterations());
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
KVANT_DECODE(u4_g32_sinks_residual, kU4, 32, 4, 128);
KVANT_DECODE(u4_g32_room_for_32k, kU4, 32, 0, 0, 32768);
KVANT_DECODE(s2_g32, kS2, 32);
#undef KVANT_DECODE

}  // namespace
}  // namespace kvant
