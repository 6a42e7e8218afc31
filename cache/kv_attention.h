// KvAttention: attention of new tokens' queries over a KvCache.
#ifndef KVANT_CACHE_KV_ATTENTION_H_
#define KVANT_CACHE_KV_ATTENTION_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/backends/compiled_partition.h"
#include "kvant/backends/engine.h"
#include "kvant/cache/kv_cache.h"
#include "kvant/graph/graph.h"

namespace kvant {

// What attention takes beside queries, as its KvAttentionOptions say.
struct KvAttentionInputs {
  ConstTensor sinks;  // f32 [query_heads]: a logit that joins each softmax's denominator
  ConstTensor bias;   // f32, of KvAttentionOptions::bias
  // Of the query tokens, dense [batch, heads, query_tokens, head size] (v_head_size of v) of
  // KvAttentionOptions::type. Row b has those from its starts[b] on, or all where there are none;
  // the output of the queries before those means nothing.
  ConstTensor k, v;
  absl::Span<const int64_t> starts;
};

// A KvAttention belongs to a cache and must not be executed when the cache is gone. Several threads
// may execute it at once.
class KvAttention {
 public:
  KvAttention(const KvAttention&) = delete;
  KvAttention& operator=(const KvAttention&) = delete;

  const KvAttentionOptions& options() const { return options_; }
  // What runs for that layer. Layers of one scheme share it. kInvalidArguments for a layer that is
  // not there.
  absl::StatusOr<CompiledPartition> compiled(int64_t layer) const;

  // out = attention(q), both dense [batch, query_heads, query_tokens, head size] (v_head_size of
  // the output) of options().type. `stats`, if options().stats: f32 [batch, query_heads,
  // query_tokens, 1], max + ln(sum exp(score - max)), -inf where a query sees nothing. Outputs must
  // overlap nothing else, which is not checked.
  //
  // Queries are those of a row's last tokens. Where a row has fewer tokens than queries, the first
  // queries see nothing, and give 0. All queries read the cache as it is now: tokens that have left
  // the window are quantized for the first query too.
  //
  // kInvalidArguments where queries see tokens that their layer has not kept. On a GPU, where there
  // may be such tokens, or starts are given, Execute waits for the GPU, and the stream must not be
  // captured.
  //
  // Execute computes in KvCache::scratch_bytes(), and allocates nothing once these are enough. On a
  // GPU all is allocated before.
  absl::Status Execute(const Stream& stream, int64_t layer, ConstTensor q, Tensor out,
                       const KvAttentionInputs& inputs = {}, Tensor stats = {}) const;

 private:
  friend class KvCache;
  KvAttention(const KvCache& cache, const KvAttentionOptions& options)
      : cache_(cache), options_(options) {}
  static absl::StatusOr<std::shared_ptr<const KvAttention>> Compile(
      const KvCache& cache, const KvAttentionOptions& options);
  // Of its own.
  int64_t scratch_bytes() const;

  const KvCache& cache_;
  const KvAttentionOptions options_;
  struct Compiled {
    CompiledPartition partition;
    std::vector<uint8_t> sources;  // what each input is
    bool stats_first = false;      // of the outputs
    // What rotates new keys and values where the cache's are rotated.
    std::optional<CompiledPartition> rotate_k, rotate_v;
    std::array<const CompiledPartition*, 2> rotations() const {
      return {rotate_k ? &*rotate_k : nullptr, rotate_v ? &*rotate_v : nullptr};
    }
    // What it computes in, where executions run later, one after another.
    KvBlock block;
  };
  // The arguments of an execution, by source.
  class Arguments;
  absl::Status CheckInputs(const KvAttentionInputs& inputs, const Tensor& stats) const;
  // Whether the layer may not have all tokens that queries see, and whether it has.
  bool MayLack(int64_t layer) const;
  absl::Status CheckKept(int64_t layer) const;
  // Of the cache's tokens, how many the first query sees.
  int64_t Seen() const {
    // What is added to a window beyond any cache must fit.
    const int64_t most = std::numeric_limits<int64_t>::max() - options_.query_tokens;
    return std::min(options_.window, most) + (options_.new_tokens ? -1 : options_.query_tokens - 1);
  }
  // Execute, on a GPU.
  absl::Status ExecuteLater(const Stream& stream, int64_t layer, ConstTensor q,
                            absl::Span<const Tensor> outputs,
                            const KvAttentionInputs& inputs) const;

  std::vector<Compiled> compiled_;  // by group of layers
};

}  // namespace kvant

#endif  // KVANT_CACHE_KV_ATTENTION_H_
