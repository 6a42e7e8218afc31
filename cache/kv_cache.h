// KvCache: keys and values of a model's layers, compressed as they come, and attention over them.
//
//   auto cache = *KvCache::Create(engine, {.layers = 32, .batch = 1, .heads = 8, .head_size = 128,
//                                          .capacity = 32768, .schemes =
//                                          {*ParseCacheScheme("kivi2")}});
//   const auto attention = *cache->Attention({.query_heads = 32});
//   for each step, for each layer:
//     cache->Append(layer, k, v);
//     attention->Execute(stream, layer, q, out);
//
// All methods may be called from several threads at once: those that change the cache wait for
// those that read it, and the other way round.
//
// A layer or batch row that is not there has no tokens, ranges and bytes. All other methods refuse
// it with kInvalidArguments.
#ifndef KVANT_CACHE_KV_CACHE_H_
#define KVANT_CACHE_KV_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/backends/engine.h"
#include "kvant/cache/kv_cache_options.h"
#include "kvant/cache/kv_input.h"
#include "kvant/cache/kv_lock.h"
#include "kvant/cache/kv_scratch.h"
#include "kvant/cache/kv_tensor.h"

namespace kvant {

// The memory that tokens are kept in. All of it is allocated when the cache is made. Attention
// computes in other memory: KvCache::scratch_bytes().
struct KvCacheBytes {
  int64_t codes = 0;        // of quantized tokens; of all tokens where none is quantized
  int64_t parameters = 0;   // scales and zero points
  int64_t window = 0;       // sinks and windows
  int64_t bookkeeping = 0;  // lengths, work space of Append, alignment
  int64_t total() const { return codes + parameters + window + bookkeeping; }
};

struct KvAttentionOptions {
  int64_t query_heads = 0;
  int64_t query_tokens = 1;  // the last of each sequence; each sees what is not behind it
  DataType type = kF32;      // of queries and output
  float scale = 0;           // 0: 1 / sqrt(head_size)
  float soft_cap = 0;        // scores become soft_cap * tanh(score / soft_cap); 0: they stay
  // The last tokens up to its own that a query sees; 0: all. What is older stays in the cache.
  int64_t window = 0;
  bool sinks = false;  // Execute takes a logit for each query head
  bool operator==(const KvAttentionOptions&) const = default;
};

class KvAttention;

class KvCache {
 public:
  // Allocates everything; kInvalidArguments in words and numbers, kResourceExhausted. The engine's
  // device must be kCpu or kCudaSimt.
  static absl::StatusOr<std::unique_ptr<KvCache>> Create(const Engine& engine,
                                                         KvCacheOptions options);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  // What a cache of these options takes, without making it.
  static absl::StatusOr<KvCacheBytes> BytesFor(const KvCacheOptions& options);
  KvCacheBytes bytes() const { return bytes_; }
  // What the sequences hold of bytes() at their present lengths, without bookkeeping.
  int64_t used_bytes() const;
  const KvCacheOptions& options() const { return options_; }
  const Engine& engine() const { return engine_; }
  absl::StatusOr<CacheScheme> scheme(int64_t layer) const;

  // Appends tokens to a layer, as many of k as of v: all of them to every batch row, or the first
  // counts[b] of them to row b. kInvalidArguments, and the cache is as it was: shapes or types that
  // are not the cache's, memory that is null, too small or not aligned to its elements, more tokens
  // than its capacity, a number that its types do not hold. Where something else failed, the
  // engine's executor or an allocation, the layer has no tokens from then on.
  absl::Status Append(int64_t layer, const KvInput& k, const KvInput& v,
                      absl::Span<const int64_t> counts = {});

  // Compiles attention and keeps it. The same options give the same object, until kKeptAttentions
  // others have been asked for since. What a caller holds stays compiled, but must not be executed
  // when the cache is gone.
  static constexpr size_t kKeptAttentions = 8;
  absl::StatusOr<std::shared_ptr<const KvAttention>> Attention(const KvAttentionOptions& options);
  // What attention computes in. It is kept from the first execution on: a block for each thread
  // that has executed at the same time as others, as large as the largest execution needs, rounded
  // up by a quarter at most. On the CPU an execution needs up to 8 MiB, and some hundred KiB for
  // each thread of the engine (KvAttention::compiled says how much).
  int64_t scratch_bytes() const { return scratch_.bytes(); }

  // Tokens of batch row `row` in that layer.
  int64_t length(int64_t layer, int64_t row = 0) const;

  // Takes every sequence back to its first `tokens` tokens, in all layers; or each row to a number
  // of its own. Where tokens have left a window, only the last options.rollback can be taken back:
  // kInvalidArguments otherwise, and the cache is as it was.
  absl::Status Crop(int64_t tokens);
  absl::Status Crop(absl::Span<const int64_t> tokens);
  // Crop to 0, which is always possible.
  void Reset();
  // Row i becomes what row rows[i] was: beam search. kInvalidArguments for rows that are not there.
  absl::Status Reorder(absl::Span<const int64_t> rows);
  // A cache of its own with the same tokens.
  absl::StatusOr<std::unique_ptr<KvCache>> Fork() const;

  // A layer's part as it is stored, for tests and for export: [batch, heads, slots, ...]. The
  // memory is the cache's. A part that is not there is null, of 0 bytes.
  absl::StatusOr<const KvTensor*> tensor(int64_t layer, bool values) const;
  ConstTensor part(int64_t layer, bool values, KvPart part) const;
  // Where the tokens of a row are: in the sinks, the quantized tokens (or all), the window.
  std::array<KvRange, kKvSegmentKinds> Ranges(int64_t layer, bool values, int64_t row) const;

 private:
  friend class KvAttention;
  // Layers of one scheme share what is compiled.
  struct Group {
    CacheScheme scheme;
    KvTensor k, v;
  };
  struct Layer {
    int group = 0;
    KvPointers k, v;
    // What attention reads: [batch][segments][2].
    int32_t *k_ranges = nullptr, *v_ranges = nullptr;
    int64_t* lengths = nullptr;                      // [batch]
    int64_t *k_exact = nullptr, *v_exact = nullptr;  // [batch]: what of a window is still there
  };
  // Where things lie in the one block of memory.
  class Arena;

  KvCache(const Engine& engine, KvCacheOptions options);
  absl::Status CheckLayer(int64_t layer) const;
  void MakeGroups();
  void Place(Arena& arena);
  void FillStaticScales();
  // Callers of what follows hold lock_, shared for CheckCrop.
  void Publish(int64_t layer);
  absl::Status CropTo(absl::Span<const int64_t> tokens);
  absl::Status CheckCrop(int64_t layer, int64_t row, int64_t tokens) const;
  void Clear(int64_t layer);
  void Advance(int64_t layer, absl::Span<const int64_t> counts);
  void MoveRow(int64_t from, int64_t to);
  void ExchangeRows(int64_t a, int64_t b);

  const Engine engine_;
  const Stream stream_;
  const KvCacheOptions options_;
  KvCacheBytes bytes_;
  std::vector<Group> groups_;
  std::vector<Layer> layers_;
  std::byte* memory_ = nullptr;
  std::byte* working_ = nullptr;
  int64_t *counts_ = nullptr, *waiting_ = nullptr;  // [batch], of one call
  mutable KvLock lock_;
  mutable KvScratch scratch_;
  std::mutex attentions_mutex_;  // of what follows
  // In the order in which they were asked for last.
  std::vector<std::shared_ptr<const KvAttention>> attentions_;
};

}  // namespace kvant

#endif  // KVANT_CACHE_KV_CACHE_H_
