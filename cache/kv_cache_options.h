// What a KvCache is made from.
#ifndef KVANT_CACHE_KV_CACHE_OPTIONS_H_
#define KVANT_CACHE_KV_CACHE_OPTIONS_H_

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kvant/cache/cache_scheme.h"
#include "kvant/cache/kv_layout.h"
#include "kvant/graph/graph.h"

namespace kvant {

// Of a sequence, and of queries at once.
constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max() / 2;

struct KvCacheOptions {
  int64_t layers = 1, batch = 1, heads = 1;
  int64_t head_size = 0;
  int64_t v_head_size = 0;  // 0: as head_size
  int64_t capacity = 0;     // tokens of a sequence
  // One for all layers, or one for each. By default f16, nothing quantized.
  std::vector<CacheScheme> schemes = {CacheScheme{}};
  // Of a sequence only the last so many tokens are kept, what a layer of sliding-window attention
  // sees: one number for all layers, or one for each; 0, or none given: all are.
  std::vector<int64_t> keep;
  // How many of the last tokens Crop can take back. A window keeps so many more in full precision.
  int64_t rollback = 0;
  // If false, appending a NaN or an infinity is an error. If true, it is stored, and the values of
  // its group read as NaN; no others do.
  bool allow_non_finite = false;
  // What attention over it may be computed in, of codes as well: KvAttention::compiled says how far
  // that may be from f32 (CompiledPartition::rounding).
  FpMath fpmath = FpMath::kStrict;
  // For storage with static scales, by layer: 1 (tensor), heads (head) or heads * head_size
  // (channel) of them.
  std::vector<std::vector<float>> k_scales, v_scales;

  int64_t value_size() const { return v_head_size == 0 ? head_size : v_head_size; }
};

// kInvalidArguments, in words and numbers, where they contradict each other.
absl::Status CheckKvCacheOptions(const KvCacheOptions& options);

// That of a layer, for options that CheckKvCacheOptions takes.
const CacheScheme& CacheSchemeOf(const KvCacheOptions& options, int64_t layer);
int64_t KeepOf(const KvCacheOptions& options, int64_t layer);
// Those of K and V, for a layer that keeps so many tokens. They have as many slots, since attention
// multiplies a score of every slot of K with one of V.
std::pair<KvLayout, KvLayout> KvLayoutsOf(const CacheScheme& scheme, const KvCacheOptions& options,
                                          int64_t keep);

}  // namespace kvant

#endif  // KVANT_CACHE_KV_CACHE_OPTIONS_H_
