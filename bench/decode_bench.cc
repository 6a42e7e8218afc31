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

constexpr int64_t kOtherTokens = 100;

struct Format {
  DataType type;
  int64_t group;  // along the head; 0: not quantized
  // In front of and behind what is quantized, in f16. Then, and where there is room for more tokens
  // than there are (capacity; 0: no), ranges at execution say which tokens exist.
  int64_t sinks = 0, residual = 0;
  int64_t capacity = 0;
  int64_t page = 0;          // tokens of a page; 0: contiguous
  int64_t heads = kHeads;    // of queries
  int64_t others = 0;        // sequences beside, of kOtherTokens in pages
  bool token_major = false;  // all heads of a token side by side

  bool has_ranges() const { return sinks + residual + capacity > 0; }
  int64_t pages_of(int64_t tokens) const { return (tokens + page - 1) / page; }
  int64_t pool(int64_t kv_len) const { return pages_of(kv_len) + others * pages_of(kOtherTokens); }
  std::vector<int64_t> Segments(int64_t kv_len) const {
    if (sinks + residual == 0) return {std::max(kv_len, capacity)};
    return {sinks, std::max(kv_len, capacity) - sinks - residual, residual};
  }
};

// As [N, H, 1, S, D], which may lie as [N, S, H, 1, D].
Value CacheInput(GraphBuilder& g, const Format& format, const std::string& name, DataType type,
                 const Dims& dims) {
  if (!format.token_major) return g.Input(name, type, dims);
  const int64_t token = dims[1] * dims[4];
  return g.Input(name, type, dims, Dims{dims[3] * token, dims[4], dims[4], token, 1});
}

// K or V. indices: ranges, or lengths and a page table.
Value Cache(GraphBuilder& g, const std::string& name, const Format& format, int64_t kv_len,
            const std::vector<Value>& indices, std::optional<Value>* lengths) {
  const std::vector<int64_t> segments = format.Segments(kv_len);
  const int64_t pages = format.page == 0 ? 1 : format.pool(kv_len);
  std::vector<Value> parts;
  for (size_t s = 0; s < segments.size(); ++s) {
    const bool plain = segments.size() == 3 && s != 1;
    const int64_t tokens = format.page == 0 ? segments[s] : format.page;
    const std::string part = name + std::to_string(s);
    const Value data = CacheInput(g, format, part, plain ? kF16 : format.type,
                                  {pages, kKvHeads, 1, tokens, kSize});
    if (plain) {
      parts.push_back(g.TypeCast(data, kF32));
    } else if (format.group == 0) {
      parts.push_back(data);
    } else {
      const Value scales = CacheInput(g, format, part + "_scales", kF32,
                                      {pages, kKvHeads, 1, tokens, kSize / format.group});
      parts.push_back(
          g.DynamicDequantize(data, scales, {.group_shape = {1, 1, 1, 1, format.group}}));
    }
  }
  if (format.page > 0) return g.LoadPages(parts[0], indices[0], indices[1]);
  if (!format.has_ranges()) return parts[0];
  if (*lengths) return g.LoadRanges(parts, indices[0]);
  const auto [tokens, count] = g.LoadRangesWithLengths(parts, indices[0]);
  *lengths = count;
  return tokens;
}

absl::StatusOr<Graph> DecodeGraph(const Format& format, int64_t kv_len) {
  GraphBuilder g({.apply_to_int = true});
  const DataType type = format.group > 0 ? kF32 : format.type;
  const Value q =
      g.Input("q", type, {1 + format.others, kKvHeads, format.heads / kKvHeads, 1, kSize});
  std::vector<Value> indices;
  std::optional<Value> lengths;
  if (format.page > 0) {
    const int64_t rows = 1 + format.others;
    indices = {g.Input("pages", kS32, {rows, format.pages_of(kv_len)}),
               g.Input("lengths", kS32, {rows})};
    lengths = indices[1];
  } else if (format.has_ranges()) {
    const auto segments = static_cast<int64_t>(format.Segments(kv_len).size());
    indices = {g.Input("ranges", kS32, {1, segments, 2})};
  }
  const Value k = Cache(g, "k", format, kv_len, indices, &lengths);
  const Value scores = g.MatMul(q, k, {.transpose_b = true, .type = kF32});
  const Value scaled = g.Divide(scores, g.Input("scale", kF32, {}));
  const Value probs = g.SoftMax(scaled, {.type = type, .lengths = lengths});
  g.Output("o", g.MatMul(probs, Cache(g, "v", format, kv_len, indices, &lengths)));
  return std::move(g).Build();
}

// What says where tokens are: kv_len of them, of a ring that has room for more from token `first`
// on; or in pages in no order.
std::vector<int32_t> IndicesOf(const Format& format, const std::string& name, int64_t kv_len,
                               int64_t first) {
  std::vector<int32_t> indices;
  if (name == "lengths") {
    indices.assign(static_cast<size_t>(1 + format.others), kOtherTokens);
    indices[0] = static_cast<int32_t>(kv_len);
  }
  if (name == "pages") {
    const int64_t pages = format.pool(kv_len);
    for (int64_t row = 0, next = 0; row <= format.others; ++row) {
      const int64_t own = format.pages_of(row == 0 ? kv_len : kOtherTokens);
      for (int64_t i = 0; i < format.pages_of(kv_len); ++i) {
        const int64_t page = i < own ? next++ : 0;
        indices.push_back(static_cast<int32_t>((page * 61 + first) % pages));  // divides no count
      }
    }
  }
  if (name != "ranges") return indices;
  const std::vector<int64_t> segments = format.Segments(kv_len);
  for (size_t s = 0; s < segments.size(); ++s) {
    const bool ring = segments.size() == 1 || s == 1;
    const int64_t tokens = ring ? kv_len - format.sinks - format.residual : segments[s];
    indices.push_back(static_cast<int32_t>(ring ? first % segments[s] : 0));
    indices.push_back(static_cast<int32_t>(tokens));
  }
  return indices;
}

// Memory begins at a line, as that of frameworks does.
struct alignas(64) Line {
  uint64_t words[8];
};
using Memory = std::vector<Line>;

// All bytes 0x2c: a small positive number in every type.
Memory MakeMemory(const LogicalTensor& tensor) {
  Line line;
  std::fill(std::begin(line.words), std::end(line.words), 0x2c2c2c2c2c2c2c2c);
  return Memory(static_cast<size_t>(tensor.memory_bytes()) / sizeof(Line) + 1, line);
}

void BM_Decode(benchmark::State& state, const Format& format) {
  const int64_t kv_len = state.range(0);
  const absl::StatusOr<Graph> graph = DecodeGraph(format, kv_len);
  if (!graph.ok()) return state.SkipWithError(std::string(graph.status().message()).c_str());
  const absl::StatusOr<Engine> engine = Engine::Create({.backends = {"cpu"}});
  const auto compiled = engine->Compile(PartitionGraph(*graph)->at(0), {.require_fused = true});
  if (!compiled.ok()) return state.SkipWithError(std::string(compiled.status().message()).c_str());
  const Partition& partition = compiled->partition();
  const size_t ports = partition.inputs().size();
  size_t bytes = 0;
  for (size_t i = 0; i < ports; ++i) {
    bytes += static_cast<size_t>(partition.input(static_cast<int>(i)).memory_bytes());
  }
  const size_t copies = std::clamp<size_t>(kRotatedBytes / bytes, 1, 64);
  std::vector<std::vector<Memory>> memory(copies);
  for (auto& copy : memory) {
    for (size_t i = 0; i < ports; ++i) {
      copy.push_back(MakeMemory(partition.input(static_cast<int>(i))));
    }
  }
  // A large capacity is read in several places.
  constexpr size_t kPlaces = 64;
  std::vector<std::vector<std::vector<int32_t>>> indices(kPlaces);
  std::vector<std::vector<ConstTensor>> inputs(kPlaces);
  for (size_t place = 0; place < kPlaces; ++place) {
    const int64_t first = static_cast<int64_t>(place / copies) * kv_len;
    for (size_t i = 0; i < ports; ++i) {
      const std::string& name = partition.input(static_cast<int>(i)).name;
      indices[place].push_back(
          IndicesOf(format, name, kv_len, format.capacity == 0 && format.page == 0 ? 0 : first));
      const std::vector<int32_t>& own = indices[place].back();
      const Memory& port = memory[place % copies][i];
      inputs[place].push_back(own.empty() ? ConstTensor{port.data(), port.size() * sizeof(Line)}
                                          : ConstTensor{own.data(), own.size() * 4});
    }
  }
  Memory out = MakeMemory(partition.output(0));
  const Tensor outputs[] = {{out.data(), out.size() * sizeof(Line)}};
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

// Pages beside a contiguous cache, of which they should take at most 1.1 times as long, and the
// same where all heads of a token lie side by side.
#define KVANT_PAGED(name, ...)                            \
  BENCHMARK_CAPTURE(BM_Decode, name, Format{__VA_ARGS__}) \
      ->ArgName("kv_len")                                 \
      ->Arg(32768)                                        \
      ->UseRealTime()                                     \
      ->Unit(benchmark::kMicrosecond)
#define KVANT_PAGES(name, type, group, heads)                                          \
  KVANT_PAGED(name##_contiguous, type, group, 0, 0, 0, 0, heads);                      \
  KVANT_PAGED(name##_pages_16, type, group, 0, 0, 0, 16, heads);                       \
  KVANT_PAGED(name##_pages_64, type, group, 0, 0, 0, 64, heads);                       \
  KVANT_PAGED(name##_token_major_contiguous, type, group, 0, 0, 0, 0, heads, 0, true); \
  KVANT_PAGED(name##_token_major_pages_16, type, group, 0, 0, 0, 16, heads, 0, true);  \
  KVANT_PAGED(name##_token_major_pages_64, type, group, 0, 0, 0, 64, heads, 0, true)
KVANT_PAGES(s8_g32_r4, kS8, 32, 32);
KVANT_PAGES(s8_g32_r1, kS8, 32, 8);
KVANT_PAGES(u4_g32_r4, kU4, 32, 32);
KVANT_PAGES(u4_g32_r1, kU4, 32, 8);
KVANT_PAGES(f16_r4, kF16, 0, 32);
KVANT_PAGES(f16_r1, kF16, 0, 8);
KVANT_PAGES(f32_r4, kF32, 0, 32);
#undef KVANT_PAGES
// One long sequence beside many short ones keeps all cores busy: with 10 % more tokens than it
// has alone, it takes that much longer.
KVANT_PAGED(u4_g32_r4_pages_64_beside_31, kU4, 32, 0, 0, 0, 64, 32, 31);
#undef KVANT_PAGED

}  // namespace
}  // namespace kvant
