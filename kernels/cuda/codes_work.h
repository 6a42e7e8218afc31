// Which part of the work a block of attention over packed codes has.
//
// An item is a tile of rows of queries of one head of K and V; blocks are splits of items' tokens,
// an item's side by side. Where lengths are on the device and differ, blocks are dealt to sequences
// by their lengths.
#ifndef KVANT_KERNELS_CUDA_CODES_WORK_H_
#define KVANT_KERNELS_CUDA_CODES_WORK_H_

#include "kvant/kernels/cuda/codes_format.h"
#include "kvant/kernels/cuda/columns.h"
#include "kvant/kernels/cuda/finish.h"

namespace kvant::cuda {

inline constexpr i32 kMaxSplits = 256;  // of a sequence
inline constexpr i32 kWorkBytes = 128;  // of shared memory that a CodesWork takes

// It is read from shared memory where it is needed, rather than kept in registers through the loop.
template <class T>
struct CodesWork {
  BlockRows rows;     // rows.b0 is beyond the last for a block that has nothing to do
  i32 item;           // of all rows of all sequences
  i32 split, splits;  // of the item's tokens
  i32 kv_len;
  i32 k_first, v_first;  // tokens of column 0, with ranges

  // By channel, a tile's keys are of one group. So tiles of a ring begin where tokens of K do, and
  // there are as many columns before the first that exists: tokens are at columns [Lead(), kv_len +
  // Lead()) of tiles.
  KVANT_DEVICE static bool HasLead() {
    return HasRanges(T::k) && CodeFormat::IsByChannel(T::k.k[0]);
  }
  KVANT_DEVICE i32 Lead() const { return HasLead() ? k_first % T::k.warp_tile : 0; }
  // With ranges, of tiles' columns.
  KVANT_DEVICE SegmentColumns KeyColumns(const AttentionParams& p) const {
    return {Lead(), Lead() + kv_len, k_first, KeySegment<T>(p).tokens};
  }
  KVANT_DEVICE SegmentColumns ValueColumns(const AttentionParams& p) const {
    return {Lead(), Lead() + kv_len, v_first, ValueSegment<T>(p).tokens};
  }

  KVANT_DEVICE static CodesWork Load(const AttentionParams& p, SharedAddress at) {
    const Words4 a = LoadShared128(at), b = LoadShared128(at + 16);
    CodesWork work;
    work.rows.b0 = static_cast<i32>(a.v[0]);
    work.rows.b1 = static_cast<i32>(a.v[1]);
    work.rows.b2 = static_cast<i32>(a.v[2]);
    work.rows.row = static_cast<i32>(a.v[3]);
    work.rows.rows = MinOf(Finish<T>::Rows(), p.rows - work.rows.row);
    work.rows.q_first = 0;
    work.rows.q_len = p.q_len;
    work.rows.split_b2 = T::k.kv_varies_over_b2 != 0;
    work.item = static_cast<i32>(b.v[0]);
    work.split = static_cast<i32>(b.v[1]);
    work.splits = static_cast<i32>(b.v[2]);
    work.kv_len = static_cast<i32>(b.v[3]);
    if (HasRanges(T::k)) {
      const Words2 c = LoadShared64(at + 32);
      work.k_first = static_cast<i32>(c.v[0]);
      work.v_first = static_cast<i32>(c.v[1]);
    }
    return work;
  }

  // Of those that have codes.
  KVANT_DEVICE static i64 Block(const AttentionParams& p) {
    return BlockIndex() - (T::k.part == kCodesPart ? p.codes_block : 0);
  }

  // By one warp. Leaves it at `at`, for Load.
  KVANT_DEVICE static void Find(const AttentionParams& p, SharedAddress at) {
    const i32 block = static_cast<i32>(Block(p));
    const i32 b2s = T::k.kv_varies_over_b2 ? p.batch[2] : 1;
    const i32 row_tiles = RowTiles(T::k, p.rows), splits = SplitOf<T>(p).splits;
    const i32 items = p.batch[1] * b2s * row_tiles;  // of an entry of b0
    // Blocks are dealt to entries of b0 first; of each, an item's splits lie side by side.
    Share share{block / (items * splits), block % (items * splits), splits};
    if (LengthsVary(T::k)) share = ByLength(p, block, items);
    i32 rest = share.block / share.splits;
    const i32 split = share.block % share.splits, item = share.b0 * items + rest;
    const i32 row = rest % row_tiles * Finish<T>::Rows();
    rest /= row_tiles;
    const i32 b2 = rest % b2s, b1 = rest / b2s;
    const i32 kv_len = share.b0 < p.batch[0] ? RealLength<T>(p, Position{share.b0, b1, 0, 0}) : 0;
    if (LaneIndex() != 0) return;
    StoreShared128(at, {{static_cast<u32>(share.b0), static_cast<u32>(b1), static_cast<u32>(b2),
                         static_cast<u32>(row)}});
    StoreShared128(at + 16, {{static_cast<u32>(item), static_cast<u32>(split),
                              static_cast<u32>(share.splits), static_cast<u32>(kv_len)}});
    if (!HasRanges(T::k)) return;
    const i32 b0 = MinOf(share.b0, p.batch[0] - 1);
    SegmentColumns k, v;
    if (T::k.part == kCodesPart) {
      const CodesColumns codes = CodesColumns::Of<T>(p, b0);
      k = codes.k.Piece(codes.begin, codes.end, 0);
      v = codes.v.Piece(codes.begin, codes.end, 0);
    } else {
      k = ReadRange(b0, KeySegment<T>(p), 0);
      v = ReadRange(b0, ValueSegment<T>(p), 0);
    }
    StoreShared64(at + 32, {{static_cast<u32>(k.first), static_cast<u32>(v.first)}});
  }

 private:
  // The blocks of an entry of b0: this one among them, and the splits of each of its items.
  struct Share {
    i32 b0, block, splits;
  };

  // Where lengths differ, so do splits: one for every entry, and the rest of SplitParams::splits on
  // average by length. Blocks that are left over get an entry beyond the last.
  KVANT_DEVICE static Share ByLength(const AttentionParams& p, i32 block, i32 items) {
    const i32 entries = p.batch[0];
    float total = 0.f;
    for (i32 b0 = LaneIndex(); b0 < entries; b0 += 32) total += LengthOf(p, b0);
    KVANT_UNROLL
    for (i32 mask = 1; mask < 32; mask *= 2) total += ShuffleXor(total, mask);
    const float rest = static_cast<float>(entries * (SplitOf<T>(p).splits - 1));
    const float by = total > 0.f ? Divide(rest, total) : 0.f;
    Share share{entries, 0, 1};
    i32 before = 0, rest_before = 0;
    float length_before = 0.f;
    for (i32 begin = 0; begin < entries; begin += 32) {
      const i32 b0 = begin + LaneIndex();
      // What the entries up to here have of the rest, rounded, less what those before have: all
      // together that is the rest.
      float length_end = b0 < entries ? LengthOf(p, b0) : 0.f;
      KVANT_UNROLL
      for (i32 n = 1; n < 32; n *= 2) {
        const float other = Shuffle(length_end, MaxOf(0, LaneIndex() - n));
        if (LaneIndex() >= n) length_end += other;
      }
      length_end += length_before;
      const i32 rest_end = static_cast<i32>(length_end * by + 0.5f);
      const i32 of_last =
          static_cast<i32>(Shuffle(static_cast<u32>(rest_end), MaxOf(0, LaneIndex() - 1)));
      const i32 more = rest_end - (LaneIndex() == 0 ? rest_before : of_last);
      const i32 splits = b0 < entries ? MinOf(1 + more, kMaxSplits) : 0;
      length_before = Shuffle(length_end, 31);
      rest_before = static_cast<i32>(Shuffle(static_cast<u32>(rest_end), 31));
      i32 end = splits;
      KVANT_UNROLL
      for (i32 n = 1; n < 32; n *= 2) {
        const i32 other =
            static_cast<i32>(Shuffle(static_cast<u32>(end), MaxOf(0, LaneIndex() - n)));
        if (LaneIndex() >= n) end += other;
      }
      const i32 first = (before + end - splits) * items, last = (before + end) * items;
      const bool mine = first <= block && block < last;
      // Of the one lane whose entry it is, if any, to all.
      u32 found = mine ? static_cast<u32>(LaneIndex() + 1) : 0;
      KVANT_UNROLL
      for (i32 mask = 1; mask < 32; mask *= 2) found |= ShuffleXor(found, mask);
      if (found != 0) {
        const i32 lane = static_cast<i32>(found) - 1;
        share = {begin + lane, block - static_cast<i32>(Shuffle(static_cast<u32>(first), lane)),
                 static_cast<i32>(Shuffle(static_cast<u32>(splits), lane))};
        break;
      }
      before += static_cast<i32>(Shuffle(static_cast<u32>(end), 31));
    }
    return share;
  }
  // In tokens, or in units of several, so that f32 holds all sums of lengths exactly.
  KVANT_DEVICE static float LengthOf(const AttentionParams& p, i32 b0) {
    const float tokens = static_cast<float>(RealLength<T>(p, Position{b0, 0, 0, 0}));
    const float most = static_cast<float>(p.batch[0]) * static_cast<float>(p.kv_len);
    if (most < 0x1p23f) return tokens;
    return static_cast<float>(static_cast<i32>(tokens * Divide(0x1p23f, most)));
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CODES_WORK_H_
