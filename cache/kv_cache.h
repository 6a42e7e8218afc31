// KvCache: keys and values of a model's layers, compressed as they come, and attention over them.
//
//   auto cache = *KvCache::Create(engine, {.layers = 32, .batch = 1, .heads = 8, .head_size = 128,
//                                          .capacity = 32768, .schemes =
//                                          {*ParseCacheScheme("kivi2")}});
//   const auto attention = *cache->Attention({.query_heads = 32});
//   for each step, for each layer:
//     cache->Append(stream, layer, k, v);
//     attention->Execute(stream, layer, q, out);
//
// All methods may be called from several threads at once: those that change the cache wait for
// those that read it, and the other way round.
//
// On a GPU everything lies in its memory.
//
// - Append and Execute put kernels onto a stream. The kernels read the sequences' lengths in the
//   GPU's memory: a decode step of all layers can be captured into a CUDA graph, and replayed while
//   sequences grow.
// - All that is put onto streams must run one after another: the caller makes a stream wait for
//   another.
// - What a kernel finds, a sequence beyond its capacity or a number that is not finite, is the
//   error of a later call. Between the two nothing was appended.
// - Other methods wait for the GPU, but for length() as long as nothing was captured.
//
// A layer or batch row that is not there has no tokens, ranges or bytes. All other methods refuse
// it with kInvalidArguments.
#ifndef KVANT_CACHE_KV_CACHE_H_
#define KVANT_CACHE_KV_CACHE_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/backends/engine.h"
#include "kvant/cache/kv_block.h"
#include "kvant/cache/kv_cache_options.h"
#include "kvant/cache/kv_input.h"
#include "kvant/cache/kv_lock.h"
#include "kvant/cache/kv_mover.h"
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
  int64_t query_tokens = 1;  // the last of each sequence; each sees itself and what is before it
  DataType type = kF32;      // of queries and output
  float scale = 0;           // 0: 1 / sqrt(head_size)
  float soft_cap = 0;        // scores become soft_cap * tanh(score / soft_cap); 0: they stay
  int64_t window = 0;        // the last tokens up to its own that a query sees; 0: all
  // The queries are of tokens that the cache does not have yet: Execute takes their keys and values
  // and reads these as they are. Append comes after it.
  bool new_tokens = false;
  // The queries are of tokens that are not here and come after all that are: each sees all.
  bool sees_all = false;
  // Execute also gives statistics of the softmax, by which MergeAttention joins parts.
  bool stats = false;
  bool sinks = false;  // Execute takes a logit for each query head
  // Dims of the bias that Execute adds to the scaled scores: [batch or 1, query_heads or 1,
  // query_tokens, columns]. Column j is of the j-th token that a row keeps, new ones behind those
  // of the cache. There are at least KvCache::columns() columns, and query_tokens more with new
  // tokens. Empty: nothing is added.
  Dims bias;
  bool operator==(const KvAttentionOptions&) const = default;
};

class KvAttention;

class KvCache {
 public:
  // Allocates everything; kInvalidArguments in words and numbers, kResourceExhausted.
  static absl::StatusOr<std::unique_ptr<KvCache>> Create(const Engine& engine,
                                                         KvCacheOptions options);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  // What a cache of these options takes, without making it.
  static absl::StatusOr<KvCacheBytes> BytesFor(const KvCacheOptions& options);
  KvCacheBytes bytes() const { return bytes_; }
  // How much of bytes() the sequences hold at their present lengths, without bookkeeping.
  int64_t used_bytes() const;
  const KvCacheOptions& options() const { return options_; }
  const Engine& engine() const { return engine_; }
  absl::StatusOr<CacheScheme> scheme(int64_t layer) const;

  // Appends tokens to a layer, as many of k as of v. Row b takes counts[b] tokens from its
  // starts[b] on, where prompts that are padded on the left begin. Without starts it takes the
  // first ones, without counts all from its start on.
  //
  // kInvalidArguments, and the cache is as it was: shapes or types that are not the cache's, memory
  // that is null, too small or not aligned to its elements, more tokens than its capacity, a number
  // that its types do not hold. Where something else failed, the engine's executor or an
  // allocation, the layer has no tokens from then on.
  //
  // A stream that is captured takes one token for each row, without counts or starts. On a stream
  // that is not, Append waits for the GPU where counts or starts are given.
  absl::Status Append(const Stream& stream, int64_t layer, const KvInput& k, const KvInput& v,
                      absl::Span<const int64_t> counts = {}, absl::Span<const int64_t> starts = {});
  // On the engine's default stream.
  absl::Status Append(int64_t layer, const KvInput& k, const KvInput& v,
                      absl::Span<const int64_t> counts = {},
                      absl::Span<const int64_t> starts = {}) {
    return Append(stream_, layer, k, v, counts, starts);
  }

  // Compiles attention and keeps it. The same options give the same object, until kKeptAttentions
  // others have been asked for since. What a caller holds stays compiled. It must not be executed
  // once the cache is gone.
  //
  // On a GPU a captured graph computes in memory of the attentions that it was captured with:
  // whoever replays it holds them.
  static constexpr size_t kKeptAttentions = 8;
  absl::StatusOr<std::shared_ptr<const KvAttention>> Attention(const KvAttentionOptions& options);
  // Bytes that attention computes in. They are kept from the first execution on.
  //
  // On the CPU: a block for each thread that has executed at the same time as others, as large as
  // the largest execution needs, rounded up by a quarter at most. An execution needs up to 8 MiB,
  // and some hundred KiB for each thread of the engine (KvAttention::compiled says how much). On a
  // GPU: that of all attentions that are kept, and what Append computes in.
  int64_t scratch_bytes() const;

  // Tokens that a sequence has room for in the memory of a layer: those of its quantized part,
  // whole groups of them, and those kept as they are, sinks and window. Of all layers the most.
  int64_t columns() const;

  // Tokens of batch row `row` in that layer, also those that the layer has not kept. On a GPU, not
  // while a stream is captured.
  int64_t length(int64_t layer, int64_t row = 0) const;

  // Takes every sequence back to its first `tokens` tokens, which it must have, in all layers; or
  // each row to a number of its own, in all layers or in one. Where tokens have left a window, or
  // are older than what a layer keeps, only options.rollback tokens can be taken back, counted from
  // the most that the sequence has had. Otherwise kInvalidArguments, and the cache is as it was.
  absl::Status Crop(int64_t tokens);
  absl::Status Crop(absl::Span<const int64_t> tokens, std::optional<int64_t> layer = std::nullopt);
  // Crop to 0, which is always possible: an error that a kernel found and no call has told is
  // forgotten.
  absl::Status Reset();
  // Row i becomes what row rows[i] was, in all layers or in one: beam search. kInvalidArguments for
  // rows that are not there.
  absl::Status Reorder(absl::Span<const int64_t> rows, std::optional<int64_t> layer = std::nullopt);
  // A cache of its own with the same tokens. Its row i is row rows[i] of this cache; without rows
  // it has all rows as they are. capacity 0: as this cache's. So batches change and sequences grow
  // beyond the capacity. kInvalidArguments for rows that are not there and tokens that do not fit.
  absl::StatusOr<std::unique_ptr<KvCache>> Fork(
      std::optional<absl::Span<const int64_t>> rows = std::nullopt, int64_t capacity = 0) const;

  // A layer's sequences as bytes, to be sent to another machine or written to a file. They have
  // what attention reads of each row, as it is stored, and what its next tokens are quantized with.
  // They do not have the scheme, heads, sizes and what the layer keeps, which must be those of the
  // cache that loads them; nor lengths, nor static scales. Capacity, batch and layers may be
  // others.
  //
  // SavedBytes is how many bytes, for rows of these lengths [batch].
  absl::StatusOr<int64_t> SavedBytes(int64_t layer, absl::Span<const int64_t> lengths) const;
  // `to` has so many bytes, in the engine's memory; some between arrays are left alone. On a GPU
  // Save waits for what is under way, then copies on the stream, which must not be captured.
  absl::Status Save(const Stream& stream, int64_t layer, Tensor to) const;
  // The layer's rows become what was saved. They are as they were, but for Crop, which brings no
  // token of them back into a window, or into what the layer keeps. The bytes are trusted as codes
  // are.
  absl::Status Load(const Stream& stream, int64_t layer, absl::Span<const int64_t> lengths,
                    ConstTensor from);

  // A layer's part as it is stored, for tests and for export: [batch, heads, slots, ...]. The
  // memory is the cache's, of its engine. A part that is not there is null, of 0 bytes.
  absl::StatusOr<const KvTensor*> tensor(int64_t layer, bool values) const;
  ConstTensor part(int64_t layer, bool values, KvPart part) const;
  // Where the tokens of a row are: in the sinks, the quantized tokens (or all), the window.
  std::array<KvRange, kKvSegmentKinds> Ranges(int64_t layer, bool values, int64_t row) const;

 private:
  friend class KvAttention;
  // Layers of one scheme that keep as many tokens share what is compiled.
  struct Group {
    CacheScheme scheme;
    int64_t keep;  // as KvCacheOptions has it
    KvTensor k, v;
  };
  struct Layer {
    int group = 0;
    KvPointers k, v;
    // In the host's state. What attention reads: [batch][segments][2].
    int32_t *k_ranges = nullptr, *v_ranges = nullptr;
    int32_t* lengths = nullptr;          // [batch]
    std::vector<KvKept> k_kept, v_kept;  // [batch]
  };
  // Where things lie in the one block of memory.
  class Arena;

  KvCache(const Engine& engine, KvCacheOptions options);
  absl::Status CheckLayer(int64_t layer) const;
  absl::Status CheckRows(absl::Span<const int64_t> rows) const;
  // Whether the engine's kernels can read them.
  absl::Status CheckReach(int64_t layer, const KvInput& k, const KvInput& v) const;
  // Which tokens each row takes of `tokens` that come: counts_ and starts_. Compared with the
  // capacity if lengths are known.
  absl::Status Take(int64_t layer, int64_t tokens, absl::Span<const int64_t> counts,
                    absl::Span<const int64_t> starts, bool known);
  void MakeGroups();
  void MakeHostArrays();
  void Place(Arena& arena);
  absl::Status FillStaticScales();
  DeviceMemory& memory() const { return engine_.memory(); }
  // Whether the host's state is the engine's.
  bool on_host() const { return !memory().asynchronous(); }
  // Where that part of the host's state is in the engine's memory.
  int32_t* InEngine(const int32_t* state) const { return engine_state_ + (state - state_); }
  CacheTrouble trouble() const { return {reinterpret_cast<unsigned*>(InEngine(stopped_)), news_}; }
  KvMover mover() const { return {*kernels_, memory(), stream_}; }

  // Has the host know the lengths, if it does not.
  absl::Status Refresh() const;
  // Callers of what follows hold lock_, shared for CheckCrop.
  //
  // Before anything is put onto a stream: the error that a kernel has found, once, and appending
  // goes on then. A stream that is captured must not wait: it is told next time too.
  absl::Status TakeNews(bool captured) const;
  absl::Status Tell(CacheNews news) const;
  bool has_news() const { return std::atomic_ref(*news_).load() != 0; }
  bool stale() const { return stale_first_ < stale_last_; }
  // The lengths that the engine's memory has, and what was kept of the longest since.
  absl::Status FetchLengths() const;
  // Before the host reads lengths, or changes what is on the engine: all that is under way is done.
  absl::Status Settle() const;
  // Has the engine's state be the host's, of layers [first, last). If that fails, the next call
  // does it first.
  absl::Status Push(int64_t first, int64_t last) const;
  // Stores what Append has checked. Without `known` the host has no lengths.
  // `touched`: whether that has changed the layer.
  absl::Status Store(const Stream& stream, int64_t layer, const KvInput& k, const KvInput& v,
                     bool by_row, bool known, bool& touched);
  // Writes what attention reads from the lengths into the host's state.
  void Publish(int64_t layer);
  absl::Status CropTo(absl::Span<const int64_t> tokens, std::optional<int64_t> layer);
  absl::Status CheckCrop(int64_t layer, int64_t row, int64_t tokens) const;
  void Clear(int64_t layer);
  // Of layers of which only a part was changed, nothing is left.
  void ClearAfterFailure(int64_t first, int64_t last);
  void Advance(int64_t layer);
  // Copies a sequence of a layer to a row of that layer of `target`, this or a fork.
  absl::Status CopyRow(int64_t layer, int64_t from, KvCache& target, int64_t to) const;
  absl::Status ExchangeRows(int64_t layer, int64_t a, int64_t b);
  absl::Status ReorderLayer(int64_t layer, absl::Span<const int64_t> rows);
  absl::Status CheckSaved(const Stream& stream, int64_t layer, absl::Span<const int64_t> lengths,
                          ConstTensor bytes) const;
  absl::Status LoadRows(const Stream& stream, int64_t layer, absl::Span<const int64_t> lengths,
                        ConstTensor from);

  const Engine engine_;
  const Stream stream_;
  const KvCacheOptions options_;
  KvCacheBytes bytes_;
  std::vector<Group> groups_;
  mutable std::vector<Layer> layers_;
  std::unique_ptr<const CacheKernels> kernels_;
  // Between arrays of numbers by row, which begin at 64 bytes.
  const int stride_;
  KvBlock memory_;
  std::byte* working_ = nullptr;
  int32_t* places_ = nullptr;  // of K and of V, [2][kCachePlaces][stride of rows]
  int32_t* taken_ = nullptr;   // counts and starts, [2][stride of rows]
  int32_t* zeros_ = nullptr;   // [batch]
  // Of all layers, and whether there is trouble: in the engine's memory, and as the host has it,
  // which is the same where that is the host's.
  int32_t* engine_state_ = nullptr;
  int32_t* state_ = nullptr;
  int32_t* stopped_ = nullptr;
  int64_t state_size_ = 0;
  std::vector<int32_t> host_state_;
  long long* news_ = nullptr;
  // Whether an Append was captured: how often it runs, only the engine knows.
  mutable std::atomic<bool> replayed_ = false;
  // Layers whose state is yet to be pushed.
  mutable int64_t stale_first_ = 0, stale_last_ = 0;
  // [batch], of one call: what rows take, and the lengths before it. given_ is as taken_.
  std::vector<int64_t> counts_, starts_;
  std::vector<int32_t> lengths_, given_;
  mutable KvLock lock_;
  mutable KvScratch scratch_;
  mutable std::mutex attentions_mutex_;  // of what follows
  // In the order in which they were asked for last.
  std::vector<std::shared_ptr<const KvAttention>> attentions_;
};

}  // namespace kvant

#endif  // KVANT_CACHE_KV_CACHE_H_
