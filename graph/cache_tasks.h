// What a cache has to be done in its memory beside storing and attention, as kernels are told it:
// plain numbers and pointers into that memory. Kernels include this, so it includes nothing else.
#ifndef KVANT_GRAPH_CACHE_TASKS_H_
#define KVANT_GRAPH_CACHE_TASKS_H_

#include "kvant/graph/cache_layout.h"

namespace kvant {

// Of new keys and values.
enum CacheFloat : int { kCacheF32, kCacheF16, kCacheBF16 };

// Places of a piece, [kCachePlaces][stride] with an element for each batch row; -1: nothing there.
enum CachePlace : int { kSinksAt, kRestAt, kLeavingAt, kLeavingFrom };
inline constexpr int kCachePlaces = 4;

// Which of the tokens that come each batch row takes: counts[b] from its starts[b] on.
struct CacheTaken {
  const int* counts = nullptr;  // [batch]; null: `count` for each row
  const int* starts = nullptr;  // [batch]; null: the first ones
  int count = 0;
};

// What a kernel found that the host could not know when it put it onto the stream. Nothing is
// appended from then on until the host has read it.
struct CacheTrouble {
  unsigned* stopped = nullptr;  // not 0 once there is trouble
  // A CacheNews of it, in memory that the host reads without waiting.
  long long* news = nullptr;
};
// In 64 bits, which are written at once.
enum class CacheNewsKind : int { kNone, kBeyondCapacity, kNumberOfK, kNumberOfV };
struct CacheNews {
  CacheNewsKind kind = CacheNewsKind::kNone;  // 2 bits
  int layer = 0;                              // 14
  int row = 0;                                // 16
  int detail = 0;                             // 32: tokens of the row, or the head
  KVANT_ANYWHERE long long Packed() const {
    return static_cast<long long>(kind) | static_cast<long long>(layer & 0x3fff) << 2 |
           static_cast<long long>(row & 0xffff) << 16 | static_cast<long long>(detail) << 32;
  }
  KVANT_ANYWHERE static CacheNews Of(long long packed) {
    CacheNews news;
    news.kind = static_cast<CacheNewsKind>(packed & 3);
    news.layer = static_cast<int>(packed >> 2 & 0x3fff);
    news.row = static_cast<int>(packed >> 16 & 0xffff);
    news.detail = static_cast<int>(packed >> 32);
    return news;
  }
};

// K or V of a layer.
struct CacheSide {
  CacheLayout layout;
  int* places = nullptr;  // null: none are wanted
  int* ranges = nullptr;  // what attention reads: [batch][segments][2]; null: not written
};

// Writes where tokens done, done + 1, ... done + tokens - 1 of those that come go. In the end, with
// `advance`, the sequences have them: lengths and ranges are those after. A row that has not so
// many gets -1. Where a row would exceed its capacity, no row gets any: that is trouble.
struct CacheStep {
  int* lengths = nullptr;  // [batch]
  CacheTaken taken;
  int done = 0, tokens = 0;
  int advance = 0;
  int batch = 0, stride = 0, capacity = 0, layer = 0;
  int sides = 0;
  CacheSide side[2];
  CacheTrouble trouble;
};

// New keys or values, [batch, heads, tokens, channels].
struct CacheSource {
  const void* data = nullptr;
  CacheFloat type = kCacheF32;
  long long strides[4] = {};
  int channels = 0;
};

// Finds numbers among what the rows take of K and V that are not finite, or beyond what a cache
// holds. That is trouble.
struct CacheCheck {
  CacheSource source[2];
  float largest[2] = {};
  CacheTaken taken;
  int batch = 0, heads = 0, tokens = 0, layer = 0;
  CacheTrouble trouble;
};

// to[b, h, t, d] = source[b, h, starts[b] + done + t, d], of rows that have a place.
struct CacheLoad {
  CacheSource source;
  const int* starts = nullptr;  // as CacheTaken's
  const int* places = nullptr;
  int batch = 0, stride = 0, heads = 0, done = 0, tokens = 0;
  float* to = nullptr;
};

// to[b, h, t] = ring[b, h, (places[kLeavingFrom][b] + t) mod slots], of tokens of so many bytes,
// which are whole 16-bit elements.
struct CacheLeave {
  const void* ring = nullptr;
  const int* places = nullptr;
  int batch = 0, stride = 0, heads = 0, slots = 0, tokens = 0, token_bytes = 0;
  void* to = nullptr;
};

// Copies rows of bytes, or exchanges them.
struct CacheCopy {
  unsigned char *from = nullptr, *to = nullptr;
  long long from_pitch = 0, to_pitch = 0, bytes = 0, rows = 0;
  int exchange = 0;
};

// to[b] = the segments' ranges kept[b], and behind them that of the new tokens of a row, which has
// those from its starts[b] on.
struct CacheRanges {
  const int* kept = nullptr;
  const int* starts = nullptr;  // null: 0
  int batch = 0, segments = 0, new_tokens = 0;
  int* to = nullptr;
};

}  // namespace kvant

#endif  // KVANT_GRAPH_CACHE_TASKS_H_
