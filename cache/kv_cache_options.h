// What a KvCache is made from.
#ifndef KVANT_CACHE_KV_CACHE_OPTIONS_H_
#define KVANT_CACHE_KV_CACHE_OPTIONS_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kvant/cache/cache_scheme.h"
#include "kvant/cache/kv_layout.h"

namespace kvant {

struct KvCacheOptions {
  int64_t layers = 1, batch = 1, heads = 1;
  int64_t head_size = 0;
  int64_t v_head_size = 0;  // 0: as head_size
  int64_t capacity = 0;     // tokens of a sequence
  // One for all layers, or one for each.
  std::vector<CacheScheme> schemes = {CacheScheme{}};
  // How many of the last tokens Crop can take back where tokens leave a window: so many more stay
  // there in full precision.
  int64_t rollback = 0;
  // Appending a NaN or an infinity is an error. If allowed, it is stored, and with it the values of
  // its group read as NaN, but no others.
  bool allow_non_finite = false;
  // For schemes whose scales are static: [layers][1] or [layers][heads * head_size].
  std::vector<std::vector<float>> k_scales, v_scales;

  int64_t value_size() const { return v_head_size == 0 ? head_size : v_head_size; }
};

// kInvalidArguments, in words and numbers, where they contradict each other.
absl::Status CheckKvCacheOptions(const KvCacheOptions& options);

// Of one of the layers. The options are such that CheckKvCacheOptions takes them.
const CacheScheme& CacheSchemeOf(const KvCacheOptions& options, int64_t layer);
// Of K and V, with as many slots each: attention's graph multiplies one by the other.
std::pair<KvLayout, KvLayout> KvLayoutsOf(const CacheScheme& scheme, const KvCacheOptions& options);

}  // namespace kvant

#endif  // KVANT_CACHE_KV_CACHE_OPTIONS_H_
