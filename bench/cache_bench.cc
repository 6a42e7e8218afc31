// A decoding step through KvCache: attention of one token, and appending one, by scheme, heads and
// length. As many layers as it takes for the cache to come from memory, as it does in a model.
//
//   build/kvant_bench --benchmark_filter='Kv(Attention|Append)'
//       --benchmark_enable_random_interleaving --benchmark_repetitions=9
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "kvant/cache/kv_attention.h"
#include "kvant/cache/kv_cache.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

constexpr int64_t kQueryHeads = 32, kSize = 128;
constexpr int64_t kColdBytes = int64_t{256} << 20;
constexpr int64_t kPiece = 64;

// A cache with `tokens` tokens and room for some more.
struct Filled {
  std::unique_ptr<KvCache> cache;
  std::vector<float> tokens;
  int64_t layers = 1;

  KvInput Slice(int64_t count) const {
    return MakeKvInput(kF32, tokens.data(), {1, cache->options().heads, count, kSize});
  }
};

absl::StatusOr<Filled> Fill(const Engine& engine, const std::string& scheme, int64_t heads,
                            int64_t tokens) {
  KvCacheOptions options;
  options.heads = heads;
  options.head_size = kSize;
  options.capacity = tokens + 4096;
  KVANT_ASSIGN_OR_RETURN(options.schemes[0], ParseCacheScheme(scheme));
  KVANT_ASSIGN_OR_RETURN(const KvCacheBytes one, KvCache::BytesFor(options));
  const int64_t used = one.total() / options.capacity * tokens;
  options.layers = std::clamp<int64_t>(kColdBytes / std::max<int64_t>(1, used), 1, 48);
  Filled filled;
  filled.layers = options.layers;
  KVANT_ASSIGN_OR_RETURN(filled.cache, KvCache::Create(engine, options));
  filled.tokens.resize(heads * kPiece * kSize);
  for (size_t i = 0; i < filled.tokens.size(); ++i) {
    filled.tokens[i] = std::sin(0.37f * static_cast<float>(i)) + 0.2f;
  }
  for (int64_t layer = 0; layer < filled.layers; ++layer) {
    for (int64_t t = 0; t < tokens; t += kPiece) {
      const KvInput piece = filled.Slice(std::min(kPiece, tokens - t));
      KVANT_RETURN_IF_ERROR(filled.cache->Append(layer, piece, piece));
    }
  }
  return filled;
}

void BM_KvAttention(benchmark::State& state, const std::string& scheme) {
  const Engine engine = Engine::Create().value();
  const auto filled = Fill(engine, scheme, state.range(0), state.range(1));
  if (!filled.ok()) return state.SkipWithError(std::string(filled.status().message()).c_str());
  const auto attention = filled->cache->Attention({.query_heads = kQueryHeads}).value();
  std::vector<float> q(kQueryHeads * kSize, 0.1f), out(q.size());
  const size_t bytes = q.size() * sizeof(float);
  const Stream stream(engine);
  int64_t layer = 0;
  for (auto _ : state) {
    const absl::Status status = attention->Execute(stream, layer++ % filled->layers,
                                                   {q.data(), bytes}, {out.data(), bytes});
    if (!status.ok()) state.SkipWithError(std::string(status.message()).c_str());
  }
  state.SetBytesProcessed(filled->cache->used_bytes() / filled->layers * state.iterations());
  state.SetLabel(attention->compiled(0)->kernel());
}

void BM_KvAppend(benchmark::State& state, const std::string& scheme) {
  const Engine engine = Engine::Create().value();
  const auto filled = Fill(engine, scheme, state.range(0), state.range(1));
  if (!filled.ok()) return state.SkipWithError(std::string(filled.status().message()).c_str());
  const KvInput token = filled->Slice(1);
  int64_t layer = 0;
  for (auto _ : state) {
    if (filled->cache->length(layer % filled->layers) == filled->cache->options().capacity) {
      state.PauseTiming();
      filled->cache->Reset().IgnoreError();
      state.ResumeTiming();
    }
    const absl::Status status = filled->cache->Append(layer++ % filled->layers, token, token);
    if (!status.ok()) state.SkipWithError(std::string(status.message()).c_str());
  }
}

void Lengths(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"kv_heads", "tokens"})->UseRealTime()->Unit(benchmark::kMicrosecond);
  for (const int64_t heads : {32, 8}) {
    for (const int64_t tokens : {512, 2048, 4096, 32768}) bench->Args({heads, tokens});
  }
}
void OneLength(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"kv_heads", "tokens"})->UseRealTime()->Unit(benchmark::kMicrosecond);
  for (const int64_t heads : {32, 8}) bench->Args({heads, 4096});
}

BENCHMARK_CAPTURE(BM_KvAttention, f16, "f16")->Apply(Lengths);
BENCHMARK_CAPTURE(BM_KvAttention, int4_g32, "int4_g32")->Apply(Lengths);
BENCHMARK_CAPTURE(BM_KvAttention, int4_g64_R128_s4, "int4_g64_R128_s4")->Apply(Lengths);
BENCHMARK_CAPTURE(BM_KvAttention, kivi2, "kivi2")->Apply(Lengths);
BENCHMARK_CAPTURE(BM_KvAttention, int8_th, "int8_th")->Apply(Lengths);
BENCHMARK_CAPTURE(BM_KvAppend, f16, "f16")->Apply(OneLength);
BENCHMARK_CAPTURE(BM_KvAppend, int4_g32, "int4_g32")->Apply(OneLength);
BENCHMARK_CAPTURE(BM_KvAppend, int4_g64_R128_s4, "int4_g64_R128_s4")->Apply(OneLength);
BENCHMARK_CAPTURE(BM_KvAppend, kivi2, "kivi2")->Apply(OneLength);

}  // namespace
}  // namespace kvant
