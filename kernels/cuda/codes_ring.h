// Tiles of packed codes on their way through shared memory: every warp has a ring of its own, which
// it fills by cp.async some tiles ahead of what it multiplies. Warps do not wait for each other.
//
//   stage = K codes | V codes | K scales | V scales | K zero points | V zero points
//
// Tokens of a tile are dealt to the lanes' g: token t = N g' + i is in row block i, and there row
// g'; N = tile / 8. So an ldmatrix of row block i gives lane 4g + c the token whose score it will
// have, and the lane's scales are side by side.
//
// Row blocks of 8 rows lie one after the other. Within one, so that neither an ldmatrix (the same
// chunk of 8 rows) nor a copy (8 chunks in a row, of consecutive tokens) meets a bank twice, with R
// = 128 / row bytes (1 if less) rows to a line of banks:
//
//   row   = g' ^ i % R
//   chunk = chunk ^ row / R % (8 / R)
//
// These are XORs in bits 4 .. 6 of the address; all other bits are sums.
#ifndef KVANT_KERNELS_CUDA_CODES_RING_H_
#define KVANT_KERNELS_CUDA_CODES_RING_H_

#include "kvant/kernels/cuda/codes_bases.h"

namespace kvant::cuda {

// Where one side's rows lie in a tile.
struct CodeTile {
  CodeFormat format;
  i32 tokens;

  KVANT_DEVICE constexpr i32 Bytes() const { return tokens * format.RowBytes(); }

  // Of `chunk` of row g' of row block i.
  KVANT_DEVICE constexpr i32 Place(i32 i, i32 g, i32 chunk) const {
    const i32 bytes = format.RowBytes(), r = bytes >= 128 ? 1 : 128 / bytes;
    const i32 row = g ^ (i % r);
    return (i * 8 + row) * bytes + ((chunk ^ (row / r % (8 / r))) << 4);
  }
  KVANT_DEVICE constexpr i32 Place(i32 token, i32 chunk) const {
    const i32 n = tokens / 8;
    return Place(token % n, token / n, chunk);
  }
  // Place is linear: that of a lane's part, and of the part that all lanes share.
  KVANT_DEVICE static SharedAddress Join(SharedAddress lane, i32 shared) {
    return (lane ^ static_cast<u32>(shared & 127)) + static_cast<u32>(shared & ~127);
  }

  // A copy of a tile is `Copies()` instructions of 32 lanes x 16 bytes.
  KVANT_DEVICE constexpr i32 Copies() const { return Bytes() / 512; }
  KVANT_DEVICE constexpr i32 TokensPerCopy() const { return 512 / format.RowBytes(); }
  KVANT_DEVICE i32 LaneToken(i32 lane) const { return lane * 16 / format.RowBytes(); }
  KVANT_DEVICE i32 LaneChunk(i32 lane) const { return lane * 16 % format.RowBytes() / 16; }

  // Tokens [first, first + count) of the tile, `count` whole copies, from where they begin.
  KVANT_DEVICE void Copy(SharedAddress to, const u8* from, i32 pitch, i32 first, i32 count) const {
    KVANT_UNROLL
    for (i32 i = 0; i < count / TokensPerCopy(); ++i) {
      CopyAsync(16, Join(to, Place(first + i * TokensPerCopy(), 0)),
                from + i * TokensPerCopy() * pitch);
    }
  }
  // Of these, the tile's first `left` tokens; zeros after them.
  KVANT_DEVICE void CopyPart(SharedAddress to, const u8* from, i32 pitch, i32 first, i32 count,
                             i32 left, i32 lane) const {
    KVANT_NO_UNROLL
    for (i32 i = 0; i < count / TokensPerCopy(); ++i) {
      const bool any = first + i * TokensPerCopy() + LaneToken(lane) < left;
      CopyAsync(16, Join(to, Place(first + i * TokensPerCopy(), 0)),
                any ? from + i * TokensPerCopy() * pitch : from, any ? 16 : 0);
    }
  }

  // The same from column `token` of a ring on, whose rows are `pitch` apart. from: the lane's part
  // of the first tokens in memory.
  KVANT_DEVICE void CopyRing(SharedAddress to, const u8* from, i32 pitch,
                             const SegmentColumns& columns, i32 token, i32 left, i32 lane) const {
    KVANT_NO_UNROLL
    for (i32 i = 0; i < Copies(); ++i) {
      const i32 t = i * TokensPerCopy() + LaneToken(lane);
      const i64 row = columns.TokenOf(token + MinOf(t, left - 1)) - LaneToken(lane);
      CopyAsync(16, Join(to, Place(i * TokensPerCopy(), 0)), from + row * pitch, t < left ? 16 : 0);
    }
  }

  // Words of the chunks of row blocks 2j and 2j + 1. `at`: MatrixRow() into the tile.
  template <i32 kWords>
  KVANT_DEVICE void LoadPair(SharedAddress at, i32 j, bool transposed, u32 (&low)[kWords],
                             u32 (&high)[kWords]) const {
    const i32 chunks = format.Chunks();
    KVANT_UNROLL
    for (i32 m = 0; m < 2 * chunks; m += 4) {
      const SharedAddress row = Join(at, Place(2 * j + m / chunks, 0, m % chunks));
      const Words4 x = transposed ? LoadMatrix4Transposed(row) : LoadMatrix4(row);
      KVANT_UNROLL
      for (i32 e = 0; e < 4; ++e) {
        if ((m + e) / chunks == 0) low[(m + e) % chunks] = x.v[e];
        if ((m + e) / chunks == 1) high[(m + e) % chunks] = x.v[e];
      }
    }
  }
  KVANT_DEVICE i32 MatrixRow(i32 lane) const {
    return Place(lane / 8 / format.Chunks(), lane % 8, lane / 8 % format.Chunks());
  }
};

// One of the arrays of scales and zero points: dense, [token][group].
struct SideTraits {
  i32 token_bytes;  // 0: there is none
  i32 offset;       // in a stage
  KVANT_DEVICE constexpr i32 End(i32 tokens) const { return offset + token_bytes * tokens; }
};

struct CodesLayout {
  CodeTile k, v;
  i32 v_offset;
  SideTraits sides[kSides];
  i32 side_offset, side_bytes;
  i32 copy_bytes;  // width of copies of sides
  i32 stage_bytes;

  KVANT_DEVICE static constexpr CodesLayout Of(const AttentionTraits& t) {
    const CodeFormat k = CodeFormat::Of(t.k[0], t.head_size, t.subnormal_codes != 0);
    const CodeFormat v = CodeFormat::Of(t.v[0], t.v_head_size, t.subnormal_codes != 0);
    CodesLayout l{};
    l.k = {k, t.warp_tile};
    l.v = {v, t.warp_tile};
    l.v_offset = l.k.Bytes();
    l.side_offset = l.v_offset + l.v.Bytes();
    // No loop over them, so that all of this is known when it is compiled.
    const i32 first = l.side_offset;
    l.sides[0] = {k.groups * k.ScaleBytes(), first};
    l.sides[1] = {v.groups * v.ScaleBytes(), l.sides[0].End(t.warp_tile)};
    l.sides[2] = {k.groups * k.ZeroBits() / 8, l.sides[1].End(t.warp_tile)};
    l.sides[3] = {v.groups * v.ZeroBits() / 8, l.sides[2].End(t.warp_tile)};
    l.side_bytes = l.sides[3].End(t.warp_tile) - first;
    l.copy_bytes = t.side_copy;
    l.stage_bytes = CeilDiv(l.side_offset + l.side_bytes, 128) * 128;
    return l;
  }

  // A piece is what one lane copies at once; the pieces of all sides are dealt to lanes in order.
  KVANT_DEVICE constexpr i32 Pieces() const { return side_bytes / copy_bytes; }
  KVANT_DEVICE constexpr i32 SideCopies() const { return CeilDiv(Pieces(), 32); }
  KVANT_DEVICE constexpr i32 SideOf(i32 piece) const {
    const i32 at = side_offset + piece * copy_bytes;
    return at >= sides[3].offset ? 3 : at >= sides[2].offset ? 2 : at >= sides[1].offset ? 1 : 0;
  }
};

template <class T>
class CodesRing {
 public:
  // Loops over copies have a bound that the compiler needs not find.
  static constexpr i32 kSideCopies = CodesLayout::Of(T::kMax).SideCopies();

  KVANT_DEVICE static CodesLayout Layout() { return CodesLayout::Of(T::k); }
  KVANT_DEVICE static i32 RingBytes() { return Layout().stage_bytes * T::k.stages; }

  // Asks for the first of the tiles that begin at tokens `first`, first + warps * tile, ... before
  // `end`, where the last one is cut. work: CodesWork, in shared memory.
  KVANT_DEVICE CodesRing(const AttentionParams& p, SharedAddress work, SharedAddress ring,
                         i32 first, i32 end)
      : p_(p), work_(work), ring_(ring), end_(end), read_(0) {
    const CodesLayout l = Layout();
    const CodesBases<T> bases = CodesBases<T>::Of(p, work);
    const i32 lane = LaneIndex();
    k_ = bases.k + static_cast<i64>(l.k.LaneToken(lane)) * T::k.k_pitch + l.k.LaneChunk(lane) * 16;
    v_ = bases.v + static_cast<i64>(l.v.LaneToken(lane)) * T::k.v_pitch + l.v.LaneChunk(lane) * 16;
    k_to_ = ring + l.k.Place(l.k.LaneToken(lane), l.k.LaneChunk(lane));
    v_to_ = ring + l.v_offset + l.v.Place(l.v.LaneToken(lane), l.v.LaneChunk(lane));
    KVANT_UNROLL
    for (i32 r = 0; r < kSideCopies; ++r) {
      const i32 piece = r * 32 + lane, side = l.SideOf(piece);
      const u8* base = side == 0   ? bases.sides[0]
                       : side == 1 ? bases.sides[1]
                       : side == 2 ? bases.sides[2]
                                   : bases.sides[3];
      const i32 at = l.side_offset + piece * l.copy_bytes - OffsetOf(l, side);
      side_[r] = base + at;
      step_[r] = TileBytesOf(l, side);
      if (HasPages(T::k)) {
        const PageTraits pages = PagesOf(side);
        const i32 bytes = step_[r] / T::k.warp_tile * RunOf(pages);
        side_[r] -= at / MaxOf(bytes, 1) * bytes;
        entry_[r] = side % 2 * kEntries + at / MaxOf(bytes, 1);
        step_[r] = side < 2 ? pages.scales : pages.zero_points;
      }
    }
    if (HasPages(T::k)) {
      FindTable();
      LoadPages(first);
    } else if (!HasRanges(T::k)) {
      Advance(first / T::k.warp_tile);
    }
    KVANT_UNROLL
    for (i32 s = 0; s < T::k.stages - 1; ++s) {
      Fill(first + s * Step(), static_cast<u32>(s * l.stage_bytes));
    }
  }

  // From a warp's tile to its next, in tokens.
  KVANT_DEVICE static i32 Step() { return T::k.token_warps * T::k.warp_tile; }

  // Waits for the next tile.
  KVANT_DEVICE void Wait() const {
    if (T::k.stages == 2) {
      CopyAsyncWait<0>();
    } else if (T::k.stages == 3) {
      CopyAsyncWait<1>();
    } else {
      CopyAsyncWait<2>();
    }
    WarpSync();
  }

  // Waits for the next tile, that of `token`, and asks for one more. Where its stage begins, from
  // the ring on.
  KVANT_DEVICE u32 Next(i32 token) {
    Wait();
    const u32 stage = read_, bytes = static_cast<u32>(Layout().stage_bytes);
    const u32 last = static_cast<u32>(RingBytes()) - bytes;
    Fill(token + (T::k.stages - 1) * Step(), stage == 0 ? last : stage - bytes);
    read_ = stage == last ? 0 : stage + bytes;
    return stage;
  }

 private:
  KVANT_DEVICE static i32 TileBytesOf(const CodesLayout& l, i32 side) {
    i32 bytes = l.sides[0].token_bytes;
    KVANT_UNROLL
    for (i32 a = 1; a < kSides; ++a) {
      // Alike where they can be, so that there is nothing to choose.
      if (l.sides[a].token_bytes != 0 && side == a) bytes = l.sides[a].token_bytes;
    }
    return bytes * T::k.warp_tile;
  }
  KVANT_DEVICE static i32 OffsetOf(const CodesLayout& l, i32 side) {
    return side == 0   ? l.sides[0].offset
           : side == 1 ? l.sides[1].offset
           : side == 2 ? l.sides[2].offset
                       : l.sides[3].offset;
  }

  KVANT_DEVICE void Advance(i32 tiles) {
    k_ += static_cast<i64>(tiles) * (T::k.warp_tile * T::k.k_pitch);
    v_ += static_cast<i64>(tiles) * (T::k.warp_tile * T::k.v_pitch);
    KVANT_UNROLL
    for (i32 r = 0; r < kSideCopies; ++r) side_[r] += static_cast<i64>(tiles) * step_[r];
  }

  KVANT_DEVICE void Fill(i32 token, u32 stage) {
    const i32 left = end_ - token;
    if (HasRanges(T::k)) {
      if (left > 0) FillFromRings(token, stage, left);
    } else if (HasPages(T::k)) {
      FillFromPages(token, stage, left);
    } else if (left >= T::k.warp_tile) {
      FillWhole(stage, 0, 0);
    } else if (left > 0) {
      FillPart(stage, left);
    }
    CopyAsyncCommit();
    if (!HasRanges(T::k) && !HasPages(T::k)) Advance(T::k.token_warps);
  }

  // Of tokens `k` and `v` on from where pointers are.
  KVANT_DEVICE void FillWhole(u32 stage, i32 k, i32 v) {
    const CodesLayout l = Layout();
    l.k.Copy(k_to_ + stage, k_ + static_cast<i64>(k) * T::k.k_pitch, T::k.k_pitch, 0,
             T::k.warp_tile);
    l.v.Copy(v_to_ + stage, v_ + static_cast<i64>(v) * T::k.v_pitch, T::k.v_pitch, 0,
             T::k.warp_tile);
    CopySides(stage, T::k.warp_tile, [&](i32 r, i32 side) {
      const i64 token = side % 2 == 0 ? k : v;
      return side_[r] + token * (step_[r] / T::k.warp_tile);
    });
  }

  // Where pages are: of page tables lanes [0, kEntries) have K's entries from a tile's first page
  // on, and the next kEntries lanes V's.
  static constexpr i32 kEntries = 16;
  KVANT_DEVICE static PageTraits PagesOf(i32 side) {
    const PageTraits k = T::k.k_pages, v = T::k.v_pages;
    const bool keys = side % 2 == 0;
    return {keys ? k.tokens : v.tokens, keys ? k.codes : v.codes, keys ? k.scales : v.scales,
            keys ? k.zero_points : v.zero_points};
  }
  // Tokens of a tile that are in one page: a page has whole tiles, or a tile whole pages.
  KVANT_DEVICE static i32 RunOf(const PageTraits& pages) {
    return MinOf(pages.tokens, T::k.warp_tile);
  }
  KVANT_DEVICE static i32 InPage(const PageTraits& pages, i32 token) {
    return pages.tokens > T::k.warp_tile ? token % pages.tokens : 0;
  }

  KVANT_DEVICE void FindTable() {
    const i32 b0 = CodesWork<T>::Load(p_, work_).rows.b0;
    const IndexArray &k = p_.k[0].load, &v = p_.v[0].load;
    const u32* const of_k = static_cast<const u32*>(k.data) + k.offset + i64{b0} * k.stride;
    const u32* const of_v = static_cast<const u32*>(v.data) + v.offset + i64{b0} * v.stride;
    table_ = LaneIndex() < kEntries ? of_k : of_v;
  }
  // Entries for the tile at `token`, a tile ahead of their use. Those of tokens that do not exist
  // are of the last that does.
  KVANT_DEVICE void LoadPages(i32 token) {
    if (token >= end_) return;
    const bool keys = LaneIndex() < kEntries;
    const i32 tokens = keys ? T::k.k_pages.tokens : T::k.v_pages.tokens;
    const i32 entry = token / tokens + LaneIndex() % kEntries;
    const u32 page = Load(table_ + MinOf(entry, (end_ - 1) / tokens));
    page_ = ClampedTo((keys ? p_.k[0].pages : p_.v[0].pages) - 1, static_cast<i32>(page));
  }
  KVANT_DEVICE i64 Page(i32 entry) const {
    return static_cast<i32>(Shuffle(static_cast<u32>(page_), entry));
  }

  // The pages of a tile: of runs of K and of V, 4 of 16 tokens at most, and of the lane's pieces of
  // parameters.
  struct Pages {
    i64 k[4], v[4], sides[MaxOf(1, kSideCopies)];
  };
  // All lanes take part, whatever the tile holds: shuffles are of whole warps.
  KVANT_DEVICE Pages FindPages() const {
    Pages pages;
    KVANT_UNROLL
    for (i32 i = 0; i < T::k.warp_tile / 16; ++i) {
      if (i * RunOf(T::k.k_pages) < T::k.warp_tile) pages.k[i] = Page(i);
      if (i * RunOf(T::k.v_pages) < T::k.warp_tile) pages.v[i] = Page(kEntries + i);
    }
    KVANT_UNROLL
    for (i32 r = 0; r < kSideCopies; ++r) pages.sides[r] = Page(entry_[r]);
    return pages;
  }

  KVANT_DEVICE void FillFromPages(i32 token, u32 stage, i32 left) {
    const Pages pages = FindPages();
    if (left >= T::k.warp_tile) {
      CopyPages(pages, token, stage, T::k.warp_tile);
    } else if (left > 0) {
      CopyPages(pages, token, stage, left);
    }
    LoadPages(token + Step());
  }
  KVANT_DEVICE void CopyPages(const Pages& pages, i32 token, u32 stage, i32 left) const {
    const CodesLayout l = Layout();
    CopyCodes(l.k, T::k.k_pages, pages.k, k_to_ + stage, k_, T::k.k_pitch, token, left);
    CopyCodes(l.v, T::k.v_pages, pages.v, v_to_ + stage, v_, T::k.v_pitch, token, left);
    CopySides(stage, left, [&](i32 r, i32 side) {
      const i32 bytes = TileBytesOf(l, side) / T::k.warp_tile;
      return side_[r] + pages.sides[r] * step_[r] + InPage(PagesOf(side), token) * bytes;
    });
  }
  KVANT_DEVICE void CopyCodes(const CodeTile& tile, const PageTraits& pages, const i64* of_runs,
                              SharedAddress to, const u8* from, i32 pitch, i32 token,
                              i32 left) const {
    const i32 run = RunOf(pages);
    KVANT_UNROLL
    for (i32 first = 0; first < T::k.warp_tile; first += run) {
      const u8* at = from + of_runs[first / run] * pages.codes + InPage(pages, token) * pitch;
      if (left >= T::k.warp_tile) {
        tile.Copy(to, at, pitch, first, run);
      } else {
        tile.CopyPart(to, at, pitch, first, run, left, LaneIndex());
      }
    }
  }

  // The segments are rings, of which column 0 is any token; `token` is a column.
  KVANT_DEVICE void FillFromRings(i32 token, u32 stage, i32 left) {
    const CodesLayout l = Layout();
    const CodesWork<T> work = CodesWork<T>::Load(p_, work_);
    const SegmentColumns k{0, work.kv_len, work.k_first, p_.k[0].tokens};
    const SegmentColumns v{0, work.kv_len, work.v_first, p_.v[0].tokens};
    const i32 k_at = k.TokenOf(token), v_at = v.TokenOf(token);
    bool whole = left >= T::k.warp_tile && k_at + T::k.warp_tile <= k.capacity &&
                 v_at + T::k.warp_tile <= v.capacity;
    KVANT_UNROLL
    for (i32 s = 0; s < kSides; ++s) {
      whole &= (s % 2 == 0 ? k_at : v_at) * l.sides[s].token_bytes % l.copy_bytes == 0;
    }
    if (whole) return FillWhole(stage, k_at, v_at);
    const i32 lane = LaneIndex();
    l.k.CopyRing(k_to_ + stage, k_, T::k.k_pitch, k, token, left, lane);
    l.v.CopyRing(v_to_ + stage, v_, T::k.v_pitch, v, token, left, lane);
    const CodesBases<T> bases = CodesBases<T>::Of(p_, work_);
    const CodeFormat &kf = l.k.format, &vf = l.v.format;
    LoadSide(bases.sides[0], l.sides[0], kf.ScaleBytes(), k, token, stage, left);
    LoadSide(bases.sides[1], l.sides[1], vf.ScaleBytes(), v, token, stage, left);
    LoadSide(bases.sides[2], l.sides[2], CeilDiv(kf.ZeroBits(), 8), k, token, stage, left);
    LoadSide(bases.sides[3], l.sides[3], CeilDiv(vf.ZeroBits(), 8), v, token, stage, left);
  }

  // Element by element, or byte by byte where these are smaller: tokens begin at any address.
  KVANT_DEVICE void LoadSide(const u8* base, const SideTraits& side, i32 bytes,
                             const SegmentColumns& columns, i32 token, u32 stage, i32 left) const {
    if (side.token_bytes == 0) return;
    const i32 groups = side.token_bytes / bytes;
    KVANT_NO_UNROLL
    for (i32 i = LaneIndex(); i < groups * T::k.warp_tile; i += 32) {
      const i32 t = i / groups;
      const i64 index = static_cast<i64>(columns.TokenOf(token + MinOf(t, left - 1))) * groups;
      const u8* from = base + (index + i % groups) * bytes;
      const SharedAddress to = ring_ + stage + static_cast<u32>(side.offset + i * bytes);
      if (bytes == 4) {
        StoreShared32(to, t < left ? Load(reinterpret_cast<const u32*>(from)) : 0);
      } else if (bytes == 2) {
        StoreShared16(to, t < left ? Load(reinterpret_cast<const u16*>(from)) : 0);
      } else {
        StoreShared8(to, t < left ? Load(from) : 0);
      }
    }
  }

  KVANT_DEVICE void FillPart(u32 stage, i32 left) {
    const CodesLayout l = Layout();
    const i32 lane = LaneIndex();
    l.k.CopyPart(k_to_ + stage, k_, T::k.k_pitch, 0, T::k.warp_tile, left, lane);
    l.v.CopyPart(v_to_ + stage, v_, T::k.v_pitch, 0, T::k.warp_tile, left, lane);
    CopySides(stage, left, [&](i32 r, i32) { return side_[r]; });
  }

  // Of the tile's first `left` tokens. from(r, side): where the lane's r-th piece is; what is
  // beyond the tokens is not read, and is zeros. In a page that is memory, too.
  template <class From>
  KVANT_DEVICE void CopySides(u32 stage, i32 left, From from) const {
    const CodesLayout l = Layout();
    KVANT_UNROLL
    for (i32 r = 0; r < kSideCopies; ++r) {
      const i32 piece = r * 32 + LaneIndex(), side = l.SideOf(piece);
      if (piece >= l.Pieces()) continue;
      const u8* at = from(r, side);
      if (left >= T::k.warp_tile) {
        CopyAsync(l.copy_bytes, SideTo(l, stage, r), at);
        continue;
      }
      const i32 first = l.side_offset + piece * l.copy_bytes - OffsetOf(l, side);
      const i32 valid = left * (TileBytesOf(l, side) / T::k.warp_tile) - first;
      CopyAsync(l.copy_bytes, SideTo(l, stage, r), valid > 0 || HasPages(T::k) ? at : at - first,
                MaxOf(0, MinOf(valid, l.copy_bytes)));
    }
  }

  KVANT_DEVICE SharedAddress SideTo(const CodesLayout& l, u32 stage, i32 r) const {
    return ring_ + stage + static_cast<u32>(l.side_offset + (r * 32 + LaneIndex()) * l.copy_bytes);
  }

  const AttentionParams& p_;
  const SharedAddress work_;
  SharedAddress ring_, k_to_, v_to_;
  i32 end_;
  u32 read_;  // the next stage, in bytes
  const u8 *k_, *v_;
  const u8* side_[MaxOf(1, kSideCopies)];
  i32 step_[MaxOf(1, kSideCopies)];   // bytes from tile to tile, or from page to page
  i32 entry_[MaxOf(1, kSideCopies)];  // which lane has the page of the piece
  const u32* table_;                  // the row of the lane's page table
  i32 page_ = 0;                      // the lane's entry for the next tile
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CODES_RING_H_
