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

// What a block keeps of segments in shared memory: their columns, where those are not known before
// the launch, and codebooks; of K and then V each, and a codebook of Q before them.
struct SegmentTables {
  i32 codebooks, bytes;

  KVANT_DEVICE static constexpr SegmentTables Of(const AttentionTraits& t) {
    const i32 columns = HasRanges(t) ? (t.k_segments + t.v_segments) * 16 : 0;
    return {columns, columns + CodebookBytes(&t.q, 1) + CodebookBytes(t.k, t.k_segments) +
                         CodebookBytes(t.v, t.v_segments)};
  }
  KVANT_DEVICE static constexpr i32 CodebookBytes(const SegmentTraits* segments, i32 count) {
    i32 entries = 0;
    for (i32 s = 0; s < count; ++s) entries += segments[s].codebook;
    return entries * 4;
  }
};

// Those of K or of V.
template <class T>
class SegmentTable {
 public:
  KVANT_DEVICE SegmentTable(SharedAddress tables, bool keys)
      : columns_(tables + static_cast<u32>(keys ? 0 : T::k.k_segments * 16)),
        codebooks_(CodebooksOf(tables, keys)) {}

  // By all threads; done by the block's next barrier.
  KVANT_DEVICE static void Write(const AttentionParams& p, i32 b0, SharedAddress tables) {
    const SegmentTable k(tables, true), v(tables, false);
    if (HasRanges(T::k)) {
      if (ThreadIndex() == 0) k.WriteColumns(p, b0, 0, T::k.k_segments, p.k);
      if (ThreadIndex() == 1) v.WriteColumns(p, b0, T::k.k_segments, T::k.v_segments, p.v);
    }
    WriteCodebooks(&T::k.q, &p.q, 1, CodebookOfQueries(tables));
    WriteCodebooks(T::k.k, p.k, T::k.k_segments, k.codebooks_);
    WriteCodebooks(T::k.v, p.v, T::k.v_segments, v.codebooks_);
  }

  KVANT_DEVICE SegmentColumns Columns(const SegmentParams* segments, i32 s) const {
    if (!HasRanges(T::k)) {
      const i32 begin = segments[s].begin, tokens = segments[s].tokens;
      return {begin, begin + tokens, 0, tokens};
    }
    const Words4 x = LoadShared128(columns_ + static_cast<u32>(s * 16));
    return {static_cast<i32>(x.v[0]), static_cast<i32>(x.v[1]), static_cast<i32>(x.v[2]),
            static_cast<i32>(x.v[3])};
  }

  KVANT_DEVICE SharedAddress Codebook(const SegmentTraits* segments, i32 s) const {
    return codebooks_ + static_cast<u32>(SegmentTables::CodebookBytes(segments, s));
  }
  KVANT_DEVICE static SharedAddress CodebookOfQueries(SharedAddress tables) {
    return tables + static_cast<u32>(SegmentTables::Of(T::k).codebooks);
  }

 private:
  KVANT_DEVICE static SharedAddress CodebooksOf(SharedAddress tables, bool keys) {
    const i32 q = SegmentTables::CodebookBytes(&T::k.q, 1);
    const i32 k = SegmentTables::CodebookBytes(T::k.k, T::k.k_segments);
    return CodebookOfQueries(tables) + static_cast<u32>(keys ? q : q + k);
  }

  KVANT_DEVICE static void WriteCodebooks(const SegmentTraits* traits,
                                          const SegmentParams* segments, i32 count,
                                          SharedAddress to) {
    KVANT_UNROLL
    for (i32 s = 0; s < count; ++s) {
      const SharedAddress at = to + static_cast<u32>(SegmentTables::CodebookBytes(traits, s));
      for (i32 i = ThreadIndex(); i < traits[s].codebook; i += BlockThreads()) {
        StoreShared32(at + static_cast<u32>(i * 4), AsBits(Load(segments[s].codebook + i)));
      }
    }
  }

  KVANT_DEVICE void WriteColumns(const AttentionParams& p, i32 b0, i32 row, i32 count,
                                 const SegmentParams* segments) const {
    i32 begin = 0;
    KVANT_UNROLL
    for (i32 s = 0; s < count; ++s) {
      const SegmentColumns c = ReadRange(T::k, p, b0, row + s, segments[s], begin);
      StoreShared128(columns_ + static_cast<u32>(s * 16),
                     {{static_cast<u32>(c.begin), static_cast<u32>(c.end),
                       static_cast<u32>(c.first), static_cast<u32>(c.capacity)}});
      begin = c.end;
    }
  }

  const SharedAddress columns_, codebooks_;
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_COLUMNS_H_
