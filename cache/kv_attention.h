// KvAttention: attention of new tokens' queries over a KvCache.
#ifndef KVANT_CACHE_KV_ATTENTION_H_
#define KVANT_CACHE_KV_ATTENTION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kvant/backends/compiled_partition.h"
#include "kvant/backends/engine.h"
#include "kvant/cache/kv_cache.h"
#include "kvant/graph/graph.h"

namespace kvant {

// It belongs to a cache and must not be executed when that is gone. Several threads may execute it
// at once.
class KvAttention {
 public:
  KvAttention(const KvAttention&) = delete;
  KvAttention& operator=(const KvAttention&) = delete;

  const KvAttentionOptions& options() const { return options_; }
  // What runs for that layer; layers of one scheme share it. kInvalidArguments for a layer that is
  // not there.
  absl::StatusOr<CompiledPartition> compiled(int64_t layer) const;

  // out = attention(q), both dense [batch, query_heads, query_tokens, head size] (v_head_size of
  // the output) of options().type. It computes in KvCache::scratch_bytes(), and allocates nothing
  // once these are enough. Queries are those of a row's last tokens: of a row with fewer tokens
  // than queries the first ones see nothing, and give 0. All queries read the cache as it is now:
  // tokens that have left the window are quantized for the first of them too. `sinks`, where the
  // options say so, and only there: f32 [query_heads], a logit that joins each softmax's
  // denominator.
  absl::Status Execute(const Stream& stream, int64_t layer, ConstTensor q, Tensor out,
                       ConstTensor sinks = {}) const;

 private:
  friend class KvCache;
  KvAttention(const KvCache& cache, const KvAttentionOptions& options)
      : cache_(cache), options_(options) {}
  static absl::StatusOr<std::shared_ptr<const KvAttention>> Compile(
      const KvCache& cache, const KvAttentionOptions& options);

  const KvCache& cache_;
  const KvAttentionOptions options_;
  struct Compiled {
    CompiledPartition partition;
    std::vector<uint8_t> sources;  // what each input is
  };
  std::vector<Compiled> compiled_;  // by group of layers
};

}  // namespace kvant

#endif  // KVANT_CACHE_KV_ATTENTION_H_
