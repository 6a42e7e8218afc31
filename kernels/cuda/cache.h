// What a cache has to be done beside storing and attention (graph/cache_tasks.h says what). Small:
// a decode step launches them for each layer, so each is one launch whatever the lengths are.
#ifndef KVANT_KERNELS_CUDA_CACHE_H_
#define KVANT_KERNELS_CUDA_CACHE_H_

#include "kvant/graph/cache_tasks.h"
#include "kvant/kernels/cuda/elements.h"

namespace kvant::cuda {

KVANT_DEVICE i64 GlobalThread() { return BlockIndex() * BlockThreads() + ThreadIndex(); }
KVANT_DEVICE i64 AllThreads() { return GridBlocks() * BlockThreads(); }

KVANT_DEVICE i32 CountOf(const CacheTaken& taken, i32 row) {
  return taken.counts == nullptr ? taken.count : Load(taken.counts + row);
}
KVANT_DEVICE i32 StartOf(const i32* starts, i32 row) {
  return starts == nullptr ? 0 : Load(starts + row);
}

// The first trouble since the host has read the last.
KVANT_DEVICE void Tell(const CacheTrouble& trouble, const CacheNews& news) {
  constexpr u32 kMost = 0xffffffffu;
  if (AtomicIncrement(trouble.stopped, kMost) == 0) Store(trouble.news, news.Packed());
}

KVANT_DEVICE void StoreRange(const CacheRange& range, i32* to) {
  Store(to, static_cast<i32>(range.first));
  Store(to + 1, static_cast<i32>(range.tokens));
}

// One block.
class CacheStepKernel {
 public:
  KVANT_DEVICE static void Run(const CacheStep& p) {
    // All threads find the same, before any of them writes.
    i32 exceeds = -1;
    KVANT_NO_UNROLL
    for (i32 row = 0; row < p.batch && exceeds < 0; ++row) {
      if (LengthOf(p, row) > p.capacity - CountOf(p.taken, row)) exceeds = row;
    }
    const bool stopped = LoadCoherent(p.trouble.stopped) != 0 || exceeds >= 0;
    BlockSync();
    if (exceeds >= 0 && ThreadIndex() == 0) {
      CacheNews news;
      news.kind = CacheNewsKind::kBeyondCapacity;
      news.layer = p.layer;
      news.row = exceeds;
      news.detail = LengthOf(p, exceeds);
      Tell(p.trouble, news);
    }
    KVANT_NO_UNROLL
    for (i32 row = ThreadIndex(); row < p.batch; row += BlockThreads()) {
      const i32 count = CountOf(p.taken, row), length = LengthOf(p, row);
      const bool active = !stopped && p.done < count;
      KVANT_NO_UNROLL
      for (i32 side = 0; side < p.sides; ++side) {
        if (p.side[side].places != nullptr) StorePlaces(p, p.side[side], row, length, active);
        if (p.advance != 0 && !stopped) StoreRanges(p.side[side], row, length + count);
      }
      if (p.advance != 0 && !stopped) Store(p.lengths + row, length + count);
    }
  }

 private:
  // What other launches have written, and this one writes in the end.
  KVANT_DEVICE static i32 LengthOf(const CacheStep& p, i32 row) {
    return LoadCoherent(p.lengths + row);
  }

  KVANT_DEVICE static void StorePlaces(const CacheStep& p, const CacheSide& side, i32 row,
                                       i32 length, bool active) {
    CacheLayout::Places places;
    if (active) places = side.layout.PlacesOf(length + p.done, p.tokens);
    Store(side.places + kSinksAt * p.stride + row, places.sinks);
    Store(side.places + kRestAt * p.stride + row, places.rest);
    Store(side.places + kLeavingAt * p.stride + row, places.leaving);
    Store(side.places + kLeavingFrom * p.stride + row, places.leaving_from);
  }

  KVANT_DEVICE static void StoreRanges(const CacheSide& side, i32 row, i32 length) {
    if (side.ranges == nullptr) return;
    i32* const to = side.ranges + row * side.layout.segments() * 2;
    side.layout.EachRange(length,
                          [to](i32 i, const CacheRange& range) { StoreRange(range, to + i * 2); });
  }
};

KVANT_DEVICE i32 ElementTypeOf(CacheFloat type) {
  return type == kCacheF32 ? kFloat32 : type == kCacheF16 ? kFloat16 : kBFloat16;
}

// Element i of [batch, heads, tokens, channels].
struct CacheElement {
  i32 row, head, token, channel;

  KVANT_DEVICE static CacheElement Of(i64 i, i32 heads, i32 tokens, i32 channels) {
    const i64 vector = i / channels, line = vector / tokens;
    return {static_cast<i32>(line / heads), static_cast<i32>(line % heads),
            static_cast<i32>(vector - line * tokens), static_cast<i32>(i - vector * channels)};
  }
  // Of the source's token of that number.
  KVANT_DEVICE float LoadFrom(const CacheSource& source, i64 number) const {
    return LoadElement(ElementTypeOf(source.type), source.data,
                       row * source.strides[0] + head * source.strides[1] +
                           number * source.strides[2] + channel * source.strides[3]);
  }
};

// A thread for each channel of K and V.
class CacheCheckKernel {
 public:
  KVANT_DEVICE static void Run(const CacheCheck& p) {
    KVANT_NO_UNROLL
    for (i32 side = 0; side < 2; ++side) {
      const CacheSource& source = p.source[side];
      const i64 all = static_cast<i64>(p.batch) * p.heads * p.tokens * source.channels;
      KVANT_NO_UNROLL
      for (i64 i = GlobalThread(); i < all; i += AllThreads()) {
        const CacheElement at = CacheElement::Of(i, p.heads, p.tokens, source.channels);
        const i32 start = StartOf(p.taken.starts, at.row);
        if (at.token < start || at.token >= start + CountOf(p.taken, at.row)) continue;
        if (Abs(at.LoadFrom(source, at.token)) <= p.largest[side]) continue;
        CacheNews news;
        news.kind = side == 0 ? CacheNewsKind::kNumberOfK : CacheNewsKind::kNumberOfV;
        news.layer = p.layer;
        news.row = at.row;
        news.detail = at.head;
        Tell(p.trouble, news);
      }
    }
  }
};

// A thread for each element.
class CacheLoadKernel {
 public:
  KVANT_DEVICE static void Run(const CacheLoad& p) {
    const CacheSource& source = p.source;
    const i64 all = static_cast<i64>(p.batch) * p.heads * p.tokens * source.channels;
    KVANT_NO_UNROLL
    for (i64 i = GlobalThread(); i < all; i += AllThreads()) {
      const CacheElement at = CacheElement::Of(i, p.heads, p.tokens, source.channels);
      if (Load(p.places + kSinksAt * p.stride + at.row) < 0 &&
          Load(p.places + kRestAt * p.stride + at.row) < 0) {
        continue;
      }
      Store(p.to + i, at.LoadFrom(source, i64{StartOf(p.starts, at.row)} + p.done + at.token));
    }
  }
};

// A thread for each 16 bits.
class CacheLeaveKernel {
 public:
  KVANT_DEVICE static void Run(const CacheLeave& p) {
    const i32 units = p.token_bytes / 2;
    const i64 all = static_cast<i64>(p.batch) * p.heads * p.tokens * units;
    const auto* ring = static_cast<const u16*>(p.ring);
    auto* to = static_cast<u16*>(p.to);
    KVANT_NO_UNROLL
    for (i64 i = GlobalThread(); i < all; i += AllThreads()) {
      const i64 vector = i / units, line = vector / p.tokens;
      const i32 first = Load(p.places + kLeavingFrom * p.stride + static_cast<i32>(line / p.heads));
      if (first < 0) continue;
      const i64 slot = (first + (vector - line * p.tokens)) % p.slots;
      Store(to + i, Load(ring + (line * p.slots + slot) * units + (i - vector * units)));
    }
  }
};

// A thread for each 16 bytes where all begin at such, or for each byte.
class CacheCopyKernel {
 public:
  KVANT_DEVICE static void Run(const CacheCopy& p) {
    const u64 bits = reinterpret_cast<u64>(p.from) | reinterpret_cast<u64>(p.to) |
                     static_cast<u64>(p.from_pitch | p.to_pitch | p.bytes);
    if (bits % 16 == 0) {
      Move<Words4>(p);
    } else {
      Move<u8>(p);
    }
  }

 private:
  template <class Unit>
  KVANT_DEVICE static void Move(const CacheCopy& p) {
    const i64 size = sizeof(Unit), units = p.bytes / size, all = units * p.rows;
    KVANT_NO_UNROLL
    for (i64 i = GlobalThread(); i < all; i += AllThreads()) {
      const i64 row = i / units, at = (i - row * units) * size;
      auto* from = reinterpret_cast<Unit*>(p.from + row * p.from_pitch + at);
      auto* to = reinterpret_cast<Unit*>(p.to + row * p.to_pitch + at);
      const Unit moved = LoadCoherent(from);
      if (p.exchange != 0) Store(from, LoadCoherent(to));
      Store(to, moved);
    }
  }
};

// A thread for each row.
class CacheRangesKernel {
 public:
  KVANT_DEVICE static void Run(const CacheRanges& p) {
    KVANT_NO_UNROLL
    for (i64 row = GlobalThread(); row < p.batch; row += AllThreads()) {
      i32* to = p.to + row * (p.segments + 1) * 2;
      KVANT_NO_UNROLL
      for (i32 i = 0; i < p.segments * 2; ++i) {
        Store(to + i, Load(p.kept + row * p.segments * 2 + i));
      }
      CacheRange range;
      const i32 start = StartOf(p.starts, static_cast<i32>(row));
      range.tokens = p.new_tokens - start;
      range.first = range.tokens == 0 ? 0 : start;
      StoreRange(range, to + p.segments * 2);
    }
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CACHE_H_
