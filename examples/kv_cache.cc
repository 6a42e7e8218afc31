// Decoding with a quantized KV cache: tokens are appended layer by layer, quantized as they come,
// and attended to by one compiled partition that every step reuses.
#include <cmath>
#include <iostream>
#include <vector>

#include "kvant/kvant.h"

namespace {

constexpr int64_t kLayers = 4, kHeads = 2, kQueryHeads = 8, kHeadSize = 64, kCapacity = 1024;

// What a model's projections would give for a token.
std::vector<float> Projection(int64_t heads, int64_t token, float phase) {
  std::vector<float> x(heads * kHeadSize);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = std::sin(0.31f * static_cast<float>(i) + 0.07f * static_cast<float>(token) + phase);
  }
  return x;
}

absl::Status Run() {
  KVANT_ASSIGN_OR_RETURN(const auto engine, kvant::Engine::Create());
  kvant::KvCacheOptions options;
  options.layers = kLayers;
  options.heads = kHeads;
  options.head_size = kHeadSize;
  options.capacity = kCapacity;
  // The first 4 and the last 64 tokens stay as they are, and so does all of the first layer.
  KVANT_ASSIGN_OR_RETURN(const auto int4, kvant::ParseCacheScheme("u4:g32:rzp+sinks4+window64"));
  KVANT_ASSIGN_OR_RETURN(const auto f16, kvant::ParseCacheScheme("f16"));
  options.schemes = {f16, int4, int4, int4};
  KVANT_ASSIGN_OR_RETURN(const auto cache, kvant::KvCache::Create(engine, options));
  KVANT_ASSIGN_OR_RETURN(const auto attention, cache->Attention({.query_heads = kQueryHeads}));
  KVANT_ASSIGN_OR_RETURN(const auto compiled, attention->compiled(1));
  std::cout << compiled << "\n";

  const kvant::Stream stream(engine);
  const kvant::Dims token{1, kHeads, 1, kHeadSize};
  std::vector<float> out(kQueryHeads * kHeadSize);
  const size_t bytes = out.size() * sizeof(float);
  for (int64_t t = 0; t < 300; ++t) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const std::vector<float> k = Projection(kHeads, t, 0.f), v = Projection(kHeads, t, 1.f);
      const std::vector<float> q = Projection(kQueryHeads, t, 2.f);
      KVANT_RETURN_IF_ERROR(cache->Append(layer, kvant::MakeKvInput(kvant::kF32, k.data(), token),
                                          kvant::MakeKvInput(kvant::kF32, v.data(), token)));
      KVANT_RETURN_IF_ERROR(
          attention->Execute(stream, layer, {q.data(), bytes}, {out.data(), bytes}));
    }
  }
  std::cout << cache->length(0) << " tokens take " << cache->used_bytes() << " bytes, "
            << kLayers * kHeads * kHeadSize * 2 * 2 * cache->length(0) << " in f16\n";
  for (const float x : out) {
    if (!(std::abs(x) <= 1.01f)) return absl::InternalError("not a mean of values");
  }
  return absl::OkStatus();
}

}  // namespace

int main() {
  const absl::Status status = Run();
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
