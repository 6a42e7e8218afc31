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

// Of one cache, which it must not be executed without. May be executed from several threads at
// once.
class KvAttention {
 public:
  KvAttention(const KvAttention&) = delete;
  KvAttention& operator=(const KvAttention&) = delete;

  const KvAttentionOptions& options() const { return options_; }
  // What runs for that layer; one partition for all layers of a scheme. kInvalidArguments for a
  // layer that is not there.
  absl::StatusOr<CompiledPartition> compiled(int64_t layer) const;

  // out = attention(q), both dense [batch, query_heads, query_tokens, head size] (of the output,
  // v_head_size) of options().type. It computes in KvCache::scratch_bytes() and allocates nothing
  // once these are as many as are needed. kInvalidArguments if a sequence has fewer tokens than
  // there are queries, of which there are several; one over no token gives 0. Several queries after
  // tokens that came together all read the cache as it is now: tokens that have left the window are
  // quantized for the first of them too.
  absl::Status Execute(const Stream& stream, int64_t layer, ConstTensor q, Tensor out) const;

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
