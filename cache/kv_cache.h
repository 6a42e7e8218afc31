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
// A layer or batch row that is not there is never read: what is counted (tokens, ranges, bytes) is
// none for it, and every other call says so, kInvalidArguments.
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

// Of the memory that tokens are kept in, all of which is allocated when the cache is made. What
// attention computes in is beside it: KvCache::scratch_bytes().
struct KvCacheBytes {
  int64_t codes = 0;        // of quantized tokens, or all where a scheme does not quantize
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
  // Of bytes(), what the sequences hold now, by their lengths; without bookkeeping.
  int64_t used_bytes() const;
  const KvCacheOptions& options() const { return options_; }
  const Engine& engine() const { return engine_; }
  absl::StatusOr<CacheScheme> scheme(int64_t layer) const;

  // Tokens behind those that layer has, k and v of as many, for all batch rows alike; or `counts`
  // [batch], how many of them each row takes. kInvalidArguments, and the cache is as it was: shapes
  // or types that are not the cache's, memory that is null, too small or not aligned to its
  // elements, more tokens than its capacity, a number that its types do not hold. Where something
  // else failed, the engine's executor or an allocation, the layer has no tokens from then on.
  absl::Status Append(int64_t layer, const KvInput& k, const KvInput& v,
                      absl::Span<const int64_t> counts = {});

  // Compiled for these options, and kept: the same options give the same object, until
  // kKeptAttentions others have been asked for since. What is held stays compiled; it must not be
  // executed when the cache is gone.
  static constexpr size_t kKeptAttentions = 8;
  absl::StatusOr<std::shared_ptr<const KvAttention>> Attention(const KvAttentionOptions& options);
  // What attention computes in, kept from the first execution on: a block for each thread that has
  // executed one at the same time as others, of the size that the largest of them takes, rounded up
  // by a quarter at most. KvAttention::compiled says how much one takes: on the CPU up to 8 MiB,
  // and some hundred KiB for each thread of the engine.
  int64_t scratch_bytes() const { return scratch_.bytes(); }

  // Tokens of batch row `row` in that layer.
  int64_t length(int64_t layer, int64_t row = 0) const;

  // Every sequence becomes as it was with `tokens` tokens, in all layers; or each with its own.
  // Where tokens have left a window, only the last options.rollback can be taken back:
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
  // tensor is the cache's; a part that it has not is null and of 0 bytes.
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
    int32_t* totals = nullptr;                       // [batch]
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
  // For callers that hold lock_: shared is enough for CheckCrop.
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
