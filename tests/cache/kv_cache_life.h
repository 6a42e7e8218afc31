// Random lives of a KvCache beside a plain model: lists of tokens. What the cache holds must be
// those tokens, as if they had just been appended to a cache of their own on the CPU, and a crop
// that is promised must be taken.
#ifndef KVANT_TESTS_CACHE_KV_CACHE_LIFE_H_
#define KVANT_TESTS_CACHE_KV_CACHE_LIFE_H_

#include <cstdint>

#include "kvant/backends/engine.h"
#include "kvant/cache/kv_cache_options.h"

namespace kvant::cache_testing {

// As many steps as that. `engine`: null is one of the CPU.
void Live(const KvCacheOptions& options, uint64_t seed, int steps, const Engine* engine = nullptr);

}  // namespace kvant::cache_testing

#endif  // KVANT_TESTS_CACHE_KV_CACHE_LIFE_H_
