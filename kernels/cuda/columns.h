// How many columns a batch entry has, and which tokens they are.
#ifndef KVANT_KERNELS_CUDA_COLUMNS_H_
#define KVANT_KERNELS_CUDA_COLUMNS_H_

#include "kvant/kernels/cuda/elements.h"

namespace kvant::cuda {

// Lengths and ranges are read on the device, too late for an error: they are clamped to what there
// is room for.
KVANT_DEVICE i32 ClampedTo(i32 most, i64 value) {
  return static_cast<i32>(value < 0 ? 0 : value > most ? most : value);
}

KVANT_DEVICE constexpr bool HasRanges(const AttentionTraits& t) {
  return t.segment_ranges.type != kNone;
}
// Whether lengths differ between batch entries, and only the device knows them.
KVANT_DEVICE constexpr bool LengthsVary(const AttentionTraits& t) {
  return HasRanges(t) ? (t.segment_ranges.varies & 1) != 0 : t.kv_lengths.varies == 1;
}

// Columns [begin, end) of the whole are tokens first, first + 1, ... of a segment, and token 0
// again after its last.
struct SegmentColumns {
  i32 begin, end;
  i32 first, capacity;

  // In the segment, of a column of it.
  KVANT_DEVICE i32 TokenOf(i32 column) const {
    const i32 token = column - begin + first;
    return token < capacity ? token : token - capacity;
  }
};

// Where a range gives them. row: of segment_ranges.
KVANT_DEVICE SegmentColumns ReadRange(const AttentionTraits& t, const AttentionParams& p, i32 b0,
                                      i32 row, const SegmentParams& segment, i32 begin) {
  const auto read = [&](i32 col) {
    const i64 index = IndexOf(t.segment_ranges, p.segment_ranges, {b0, 0, 0, row}, col);
    return LoadInteger(t.segment_ranges.type, p.segment_ranges.data, index);
  };
  const i32 tokens = ClampedTo(segment.tokens, read(1));
  return {begin, begin + tokens, ClampedTo(MaxOf(segment.tokens - 1, 0), read(0)), segment.tokens};
}

// Of b0 (and, of lengths, the heads of `at`).
template <class T>
KVANT_DEVICE i32 RealLength(const AttentionParams& p, const Position& at) {
  if (HasRanges(T::k)) {
    i32 k = 0, v = 0;
    KVANT_UNROLL
    for (i32 s = 0; s < T::k.k_segments; ++s) k = ReadRange(T::k, p, at.b0, s, p.k[s], k).end;
    KVANT_UNROLL
    for (i32 s = 0; s < T::k.v_segments; ++s) {
      v = ReadRange(T::k, p, at.b0, T::k.k_segments + s, p.v[s], v).end;
    }
    return MinOf(k, v);
  }
  if (T::k.kv_lengths.type == kNone) return p.kv_len;
  return ClampedTo(p.kv_len,
                   LoadInteger(T::k.kv_lengths.type, p.kv_lengths.data, IndexOf(p.kv_lengths, at)));
}

// Where the segments' columns are not known before the launch they lie in shared memory, K's and
// then V's; `table` is where those of a side begin.
KVANT_DEVICE constexpr i32 TableBytes(const AttentionTraits& t) {
  return HasRanges(t) ? (t.k_segments + t.v_segments) * 16 : 0;
}
template <class T>
struct SegmentTable {
  KVANT_DEVICE static SharedAddress OfSide(SharedAddress tables, bool keys) {
    return tables + static_cast<u32>(keys ? 0 : T::k.k_segments * 16);
  }

  // By a thread for K and one for V.
  KVANT_DEVICE static void Write(const AttentionParams& p, i32 b0, SharedAddress tables) {
    if (!HasRanges(T::k)) return;
    if (ThreadIndex() == 0) WriteSide(p, b0, 0, T::k.k_segments, p.k, OfSide(tables, true));
    if (ThreadIndex() == 32 % Threads(T::k)) {
      WriteSide(p, b0, T::k.k_segments, T::k.v_segments, p.v, OfSide(tables, false));
    }
  }

  KVANT_DEVICE static SegmentColumns Of(const SegmentParams* segments, SharedAddress table, i32 s) {
    if (!HasRanges(T::k)) {
      const i32 begin = segments[s].begin, tokens = segments[s].tokens;
      return {begin, begin + tokens, 0, tokens};
    }
    const Words4 x = LoadShared128(table + static_cast<u32>(s * 16));
    return {static_cast<i32>(x.v[0]), static_cast<i32>(x.v[1]), static_cast<i32>(x.v[2]),
            static_cast<i32>(x.v[3])};
  }

 private:
  KVANT_DEVICE static void WriteSide(const AttentionParams& p, i32 b0, i32 row, i32 count,
                                     const SegmentParams* segments, SharedAddress table) {
    i32 begin = 0;
    KVANT_UNROLL
    for (i32 s = 0; s < count; ++s) {
      const SegmentColumns c = ReadRange(T::k, p, b0, row + s, segments[s], begin);
      StoreShared128(table + static_cast<u32>(s * 16),
                     {{static_cast<u32>(c.begin), static_cast<u32>(c.end),
                       static_cast<u32>(c.first), static_cast<u32>(c.capacity)}});
      begin = c.end;
    }
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_COLUMNS_H_
