// How many columns a batch entry has, and which tokens they are.
#ifndef KVANT_KERNELS_CUDA_COLUMNS_H_
#define KVANT_KERNELS_CUDA_COLUMNS_H_

#include "kvant/kernels/cuda/elements.h"

namespace kvant::cuda {

struct ColumnRange {
  i32 begin, end;
};

// Lengths and ranges are read on the device, too late for an error: they are clamped to what there
// is room for.
KVANT_DEVICE i32 ClampedTo(i32 most, i64 value) {
  return static_cast<i32>(value < 0 ? 0 : value > most ? most : value);
}

KVANT_DEVICE i64 LoadIndex(const IndexArray& array, i32 b0, i32 i) {
  return LoadInteger(kInt32, array.data,
                     array.offset + i64{b0} * array.stride + i64{i} * array.step);
}

KVANT_DEVICE constexpr bool HasRanges(const AttentionTraits& t) {
  return t.k_segments > 0 && t.k[0].load == kByRange;
}
KVANT_DEVICE constexpr bool HasPages(const AttentionTraits& t) {
  bool any = false;
  for (i32 s = 0; s < t.k_segments; ++s) any |= t.k[s].load == kByPages;
  for (i32 s = 0; s < t.v_segments; ++s) any |= t.v[s].load == kByPages;
  return any;
}
// Whether lengths differ between batch entries, and only the device knows them.
KVANT_DEVICE constexpr bool LengthsVary(const AttentionTraits& t) {
  return HasRanges(t) ? t.k[0].load_varies != 0 : t.lengths_vary != 0;
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

  // Those of columns [from, to) that are of the segment, as columns of a part from `at` on.
  KVANT_DEVICE SegmentColumns Piece(i32 from, i32 to, i32 at) const {
    from = MaxOf(from, begin);
    const i32 tokens = MaxOf(MinOf(to, end) - from, 0);
    return {at, at + tokens, tokens > 0 ? TokenOf(from) : 0, capacity};
  }
};

// Moves `at`, of an entry of b0, to a token.
KVANT_DEVICE void MoveTo(const SegmentTraits& traits, const SegmentParams& segment, i32 token,
                         Position& at) {
  at.row = token;
  if (traits.load != kByPages) return;
  const i32 page = token / segment.tokens;
  at.row = token - page * segment.tokens;
  at.b0 = ClampedTo(segment.pages - 1, LoadIndex(segment.load, at.b0, page));
}

// Where a range gives them.
KVANT_DEVICE SegmentColumns ReadRange(i32 b0, const SegmentParams& segment, i32 begin) {
  const i32 tokens = ClampedTo(segment.tokens, LoadIndex(segment.load, b0, 1));
  return {begin, begin + tokens,
          ClampedTo(MaxOf(segment.tokens - 1, 0), LoadIndex(segment.load, b0, 0)), segment.tokens};
}

// Of attention in parts, which columns of the whole are codes in K and V both: [begin, end).
//
//   K             sinks | codes . . . . . . . . . . | window      V may leave its codes elsewhere
//   kCodesPart              [begin, end)
//   kOthersPart   sinks | head                tail  | window      of the segment of codes twice
struct CodesColumns {
  SegmentColumns k, v;  // all of the segments of codes
  i32 begin, end;

  template <class T>
  KVANT_DEVICE static CodesColumns Of(const AttentionParams& p, i32 b0) {
    CodesColumns of{};
    of.k = Segment<T>(p.k, T::k.k_codes, b0);
    of.v = Segment<T>(p.v, T::k.v_codes, b0);
    of.begin = MaxOf(of.k.begin, of.v.begin);
    of.end = MaxOf(of.begin, MinOf(of.k.end, of.v.end));
    return of;
  }

  // The columns of kOthersPart from `at` on that are head or tail of one of the segments.
  KVANT_DEVICE SegmentColumns Head(const SegmentColumns& segment, i32 at) const {
    return segment.Piece(segment.begin, begin, at);
  }
  KVANT_DEVICE SegmentColumns Tail(const SegmentColumns& segment, i32 at) const {
    return segment.Piece(end, segment.end, at);
  }

 private:
  template <class T>
  KVANT_DEVICE static SegmentColumns Segment(const SegmentParams* segments, i32 before, i32 b0) {
    i32 columns = 0;
    KVANT_UNROLL
    for (i32 s = 0; s < before; ++s) columns = ReadRange(b0, segments[s], columns).end;
    return ReadRange(b0, segments[before], columns);
  }
};

// Of b0 (and, of lengths, the heads of `at`); not of kOthersPart, whose SegmentTable knows.
template <class T>
KVANT_DEVICE i32 RealLength(const AttentionParams& p, const Position& at) {
  if (T::k.part == kCodesPart) {
    const CodesColumns codes = CodesColumns::Of<T>(p, at.b0);
    return codes.end - codes.begin;
  }
  if (HasRanges(T::k)) {
    i32 k = 0, v = 0;
    KVANT_UNROLL
    for (i32 s = 0; s < T::k.k_segments; ++s) k = ReadRange(at.b0, p.k[s], k).end;
    KVANT_UNROLL
    for (i32 s = 0; s < T::k.v_segments; ++s) v = ReadRange(at.b0, p.v[s], v).end;
    return MinOf(k, v);
  }
  if (!T::k.has_lengths) return p.kv_len;
  return ClampedTo(p.kv_len, LoadIndex(p.kv_lengths, at.b0, 0));
}

// What there is of an entry of b0: columns [kv_first, kv_len), and rows [q_first, q_first + q_len)
// of all queries.
struct Extent {
  i32 kv_first, kv_len, q_first, q_len;

  // All queries, and columns from 0 on.
  KVANT_DEVICE static Extent Whole(const AttentionParams& p, i32 kv_len) {
    return {0, kv_len, 0, p.q_len};
  }
  template <class T>
  KVANT_DEVICE static Extent Of(const AttentionParams& p, const Position& at) {
    Extent extent = Whole(p, RealLength<T>(p, at));
    if (T::k.has_first) extent.kv_first = ClampedTo(extent.kv_len, LoadIndex(p.kv_first, at.b0, 0));
    if (T::k.ragged) {
      extent.q_first = ClampedTo(p.q_len, LoadIndex(p.query_offsets, at.b0, 0));
      extent.q_len =
          MaxOf(0, ClampedTo(p.q_len, LoadIndex(p.query_offsets, at.b0, 1)) - extent.q_first);
    }
    return extent;
  }
};

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
      if (ThreadIndex() == 0) k.WriteColumns(p, b0, true);
      if (ThreadIndex() == 1) v.WriteColumns(p, b0, false);
    }
    WriteCodebooks(&T::k.q, &p.q, 1, CodebookOfQueries(tables));
    WriteCodebooks(T::k.k, p.k, T::k.k_segments, k.codebooks_);
    WriteCodebooks(T::k.v, p.v, T::k.v_segments, v.codebooks_);
  }

  KVANT_DEVICE SegmentColumns Columns(const SegmentParams* segments, i32 s) const {
    if (!HasRanges(T::k)) {
      const i32 begin = segments[s].begin, columns = segments[s].columns;
      return {begin, begin + columns, 0, columns};
    }
    const Words4 x = LoadShared128(columns_ + static_cast<u32>(s * 16));
    return {static_cast<i32>(x.v[0]), static_cast<i32>(x.v[1]), static_cast<i32>(x.v[2]),
            static_cast<i32>(x.v[3])};
  }

  // With ranges, of those written.
  KVANT_DEVICE static i32 Length(const AttentionParams& p, SharedAddress tables) {
    const SegmentTable k(tables, true), v(tables, false);
    return MinOf(k.Columns(p.k, T::k.k_segments - 1).end, v.Columns(p.v, T::k.v_segments - 1).end);
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

  template <class Stored>
  KVANT_DEVICE static void WriteCodebooks(const SegmentTraits* traits, const Stored* segments,
                                          i32 count, SharedAddress to) {
    KVANT_UNROLL
    for (i32 s = 0; s < count; ++s) {
      const SharedAddress at = to + static_cast<u32>(SegmentTables::CodebookBytes(traits, s));
      for (i32 i = ThreadIndex(); i < traits[s].codebook; i += BlockThreads()) {
        StoreShared32(at + static_cast<u32>(i * 4), AsBits(Load(segments[s].codebook + i)));
      }
    }
  }

  KVANT_DEVICE void WriteColumns(const AttentionParams& p, i32 b0, bool keys) const {
    const SegmentParams* const segments = keys ? p.k : p.v;
    const i32 count = keys ? T::k.k_segments : T::k.v_segments;
    const i32 head = keys ? T::k.k_codes : T::k.v_codes;
    CodesColumns codes{};
    if (T::k.part == kOthersPart) codes = CodesColumns::Of<T>(p, b0);
    const SegmentColumns& of_codes = keys ? codes.k : codes.v;
    i32 begin = 0;
    KVANT_UNROLL
    for (i32 s = 0; s < count; ++s) {
      const bool beside = T::k.part == kOthersPart && (s == head || s == head + 1);
      const SegmentColumns c = !beside     ? ReadRange(b0, segments[s], begin)
                               : s == head ? codes.Head(of_codes, begin)
                                           : codes.Tail(of_codes, begin);
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
