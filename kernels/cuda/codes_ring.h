// Tiles of packed codes on their way through shared memory: every warp has a ring of its own, which
// it fills by cp.async some tiles ahead of what it multiplies. No ring waits for another's.
// codes_tile.h says where a tile lies.
#ifndef KVANT_KERNELS_CUDA_CODES_RING_H_
#define KVANT_KERNELS_CUDA_CODES_RING_H_

#include "kvant/kernels/cuda/codes_tile.h"

namespace kvant::cuda {

template <class T>
class CodesRing {
 public:
  // Loops over copies have a bound that the compiler needs not find.
  static constexpr i32 kSideCopies = CodesLayout::Of(T::kMax).SideCopies();

  KVANT_DEVICE static CodesLayout Layout() { return CodesLayout::Of(T::k); }
  KVANT_DEVICE static i32 RingBytes() { return Layout().stage_bytes * T::k.stages; }

  // Asks for the first of the tiles that begin at columns `first`, first + warps * tile, ... before
  // `end`, where the last one is cut. work: CodesWork, in shared memory.
  KVANT_DEVICE CodesRing(const AttentionParams& p, SharedAddress work, SharedAddress ring,
                         i32 first, i32 end)
      : p_(p), work_(work), ring_(ring), end_(end), read_(0) {
    const CodesLayout l = Layout();
    const CodesBases<T> bases = CodesBases<T>::Of(p, work);
    const i32 lane = LaneIndex();
    k_ = bases.k + static_cast<i64>(l.k.LaneToken(lane)) * T::k.k_pitch + KeyByte(lane);
    v_ = bases.v + static_cast<i64>(l.v.LaneToken(lane)) * T::k.v_pitch + ValueByte(lane);
    k_to_ = ring + l.k.LanePlace(lane);
    v_to_ = ring + l.v_offset + l.v.LanePlace(lane);
    KVANT_UNROLL
    for (i32 r = 0; r < kSideCopies; ++r) {
      const i32 side = l.SideOf(r * 32 + lane), at = PlaceInSide(l, r, side);
      const u8* base = side == 0   ? bases.sides[0]
                       : side == 1 ? bases.sides[1]
                       : side == 2 ? bases.sides[2]
                                   : bases.sides[3];
      side_[r] = base + at;
      step_[r] = Advances() ? TileBytes(l, side) : UnitBytes(l, side);
      if (HasPages(T::k)) {
        const i32 run = RunBytes(l, side);
        side_[r] -= at / MaxOf(run, 1) * run;
        entry_[r] = side % 2 * kEntries + at / MaxOf(run, 1);
        const SegmentTraits& traits = side % 2 == 0 ? T::k.k[0] : T::k.v[0];
        const SegmentParams& segment = side % 2 == 0 ? KeySegment<T>(p) : ValueSegment<T>(p);
        step_[r] = static_cast<i32>(side < 2 ? PageBytes(traits.scales, segment.scales)
                                             : PageBytes(traits.zero_points, segment.zero_points));
      }
    }
    if (!Advances()) {
      // Hidden, so that tokens, or a page, are added in one instruction.
      k_ = Opaque(k_);
      v_ = Opaque(v_);
      KVANT_UNROLL
      for (i32 r = 0; r < kSideCopies; ++r) side_[r] = Opaque(side_[r]);
    }
    if (HasPages(T::k)) {
      FindTable();
      LoadPages(first);
    } else if (Advances()) {
      Advance(first / T::k.warp_tile);
    }
    KVANT_UNROLL
    for (i32 s = 0; s < T::k.stages; ++s) {
      const u32 stage = static_cast<u32>(s * l.stage_bytes);
      l.k.ClearEnds(ring_ + stage);
      l.v.ClearEnds(ring_ + stage + static_cast<u32>(l.v_offset));
      if (s < T::k.stages - 1) Fill(first + s * Step(), stage);
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
  // Of a token's codes, where the lane's piece is.
  KVANT_DEVICE static i32 KeyByte(i32 lane) {
    const CodeTile k = Layout().k;
    if (!WarpSlice<T>::Shares()) return k.LaneByte(lane);
    return WarpSlice<T>::KeyChannel(k.LaneByte(lane) * 8 / k.format.bits) * k.format.bits / 8;
  }
  KVANT_DEVICE static i32 ValueByte(i32 lane) {
    const CodeTile v = Layout().v;
    return WarpSlice<T>::ValueChannel(0) * v.format.bits / 8 + v.LaneByte(lane);
  }

  // Whether pointers go from tile to tile. Else they stay where the first token is.
  KVANT_DEVICE static bool Advances() {
    return !HasRanges(T::k) && !HasPages(T::k) && !Layout().k.format.ByChannel();
  }

  // of(side), of the lane's side. There is nothing to choose where it is alike for all.
  template <class Of>
  KVANT_DEVICE static i32 Chosen(const CodesLayout& l, i32 side, Of of) {
    i32 chosen = of(0);
    KVANT_UNROLL
    for (i32 a = 1; a < kSides; ++a) {
      if (l.sides[a].bits != 0 && side == a) chosen = of(a);
    }
    return chosen;
  }
  KVANT_DEVICE static i32 TileBytes(const CodesLayout& l, i32 side) {
    return Chosen(l, side, [&](i32 a) { return l.sides[a].TileBytes(T::k.warp_tile); });
  }
  // A unit is what begins at whole bytes: the row of a token, or of 8; by channel, of a group.
  KVANT_DEVICE static i32 UnitTokens(const SideTraits& side) {
    return side.tokens != 1 ? side.tokens : side.bits % 8 == 0 ? 1 : 8;
  }
  KVANT_DEVICE static i32 UnitBytes(const CodesLayout& l, i32 side) {
    return Chosen(l, side, [&](i32 a) {
      const SideTraits& s = l.sides[a];
      return s.tokens == 1 ? s.bits * UnitTokens(s) / 8 : s.bits / 8;
    });
  }
  // The unit of `token`, which begins one; by channel, which is in one.
  KVANT_DEVICE static i32 UnitOf(const CodesLayout& l, i32 side, i32 token) {
    return Chosen(l, side, [&](i32 a) {
      return static_cast<i32>(static_cast<u32>(token) / static_cast<u32>(UnitTokens(l.sides[a])));
    });
  }
  KVANT_DEVICE static i32 PlaceInSide(const CodesLayout& l, i32 r, i32 side) {
    const i32 offset = side == 0   ? l.sides[0].offset
                       : side == 1 ? l.sides[1].offset
                       : side == 2 ? l.sides[2].offset
                                   : l.sides[3].offset;
    return l.side_offset + (r * 32 + LaneIndex()) * l.copy_bytes - offset;
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
      FillFrom(Advances() ? 0 : token, Advances() ? 0 : token, stage, T::k.warp_tile);
    } else if (left > 0) {
      FillFrom(Advances() ? 0 : token, Advances() ? 0 : token, stage, left);
    }
    CopyAsyncCommit();
    if (Advances()) Advance(T::k.token_warps);
  }

  // Of `left` tokens, a tile's at most, `k` and `v` and on from where pointers are.
  KVANT_DEVICE void FillFrom(i32 k, i32 v, u32 stage, i32 left) {
    const CodesLayout l = Layout();
    const u8* const k_at = k_ + static_cast<i64>(k) * T::k.k_pitch;
    const u8* const v_at = v_ + static_cast<i64>(v) * T::k.v_pitch;
    if (left >= T::k.warp_tile) {
      l.k.Copy(k_to_ + stage, k_at, T::k.k_pitch, 0, T::k.warp_tile);
      l.v.Copy(v_to_ + stage, v_at, T::k.v_pitch, 0, T::k.warp_tile);
    } else {
      l.k.CopyPart(k_to_ + stage, k_at, T::k.k_pitch, 0, T::k.warp_tile, left);
      l.v.CopyPart(v_to_ + stage, v_at, T::k.v_pitch, 0, T::k.warp_tile, left);
    }
    CopySides(stage, left, [&](i32 r, i32 side) {
      if (Advances()) return side_[r];
      return side_[r] + static_cast<i64>(UnitOf(l, side, side % 2 == 0 ? k : v)) * step_[r];
    });
  }

  // Where pages are: of page tables lanes [0, kEntries) have K's entries from a tile's first page
  // on, and the next kEntries lanes V's.
  static constexpr i32 kEntries = 16;
  KVANT_DEVICE static i32 PageOf(i32 side) { return side % 2 == 0 ? T::k.k_page : T::k.v_page; }
  // Tokens of a tile that are in one page: a page has whole tiles, or a tile whole pages.
  KVANT_DEVICE static i32 RunOf(i32 page) { return MinOf(page, T::k.warp_tile); }
  KVANT_DEVICE static i32 RunBytes(const CodesLayout& l, i32 side) {
    return Chosen(l, side, [&](i32 a) { return l.sides[a].TileBytes(RunOf(PageOf(a))); });
  }
  KVANT_DEVICE static i32 InPage(i32 page, i32 token) {
    return page > T::k.warp_tile ? token % page : 0;
  }

  KVANT_DEVICE void FindTable() {
    const i32 b0 = CodesWork<T>::Load(p_, work_).rows.b0;
    const IndexArray &k = KeySegment<T>(p_).load, &v = ValueSegment<T>(p_).load;
    const u32* const of_k = static_cast<const u32*>(k.data) + k.offset + i64{b0} * k.stride;
    const u32* const of_v = static_cast<const u32*>(v.data) + v.offset + i64{b0} * v.stride;
    table_ = LaneIndex() < kEntries ? of_k : of_v;
  }
  // Entries for the tile at `token`, a tile ahead of their use. Those of tokens that do not exist
  // are of the last that does.
  KVANT_DEVICE void LoadPages(i32 token) {
    if (token >= end_) return;
    const bool keys = LaneIndex() < kEntries;
    const i32 tokens = keys ? T::k.k_page : T::k.v_page;
    const i32 entry = token / tokens + LaneIndex() % kEntries;
    const u32 last =
        static_cast<u32>((keys ? KeySegment<T>(p_).pages : ValueSegment<T>(p_).pages) - 1);
    const u32 page = Load(table_ + MinOf(entry, (end_ - 1) / tokens));
    page_ = page < last ? page : last;
  }

  // The pages of a tile: of runs of K and of V, 4 of 16 tokens at most, and of the lane's pieces of
  // parameters.
  struct Pages {
    u32 k[4], v[4], sides[MaxOf(1, kSideCopies)];
  };
  // All lanes take part, whatever the tile holds: shuffles are of whole warps.
  KVANT_DEVICE Pages FindPages() const {
    Pages pages;
    KVANT_UNROLL
    for (i32 i = 0; i < T::k.warp_tile / 16; ++i) {
      if (i * RunOf(T::k.k_page) < T::k.warp_tile) pages.k[i] = Shuffle(page_, i);
      if (i * RunOf(T::k.v_page) < T::k.warp_tile) pages.v[i] = Shuffle(page_, kEntries + i);
    }
    KVANT_UNROLL
    for (i32 r = 0; r < kSideCopies; ++r) pages.sides[r] = Shuffle(page_, entry_[r]);
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
    CopyCodes(l.k, T::k.k_page, PageBytes(T::k.k[0].data, KeySegment<T>(p_).data), pages.k,
              k_to_ + stage, k_, T::k.k_pitch, token, left);
    CopyCodes(l.v, T::k.v_page, PageBytes(T::k.v[0].data, ValueSegment<T>(p_).data), pages.v,
              v_to_ + stage, v_, T::k.v_pitch, token, left);
    CopySides(stage, left, [&](i32 r, i32 side) {
      const i32 unit = UnitOf(l, side, InPage(PageOf(side), token));
      return OfPage(side_[r], pages.sides[r], static_cast<u32>(step_[r])) +
             unit * UnitBytes(l, side);
    });
  }
  // From page to page, of which axis b0 is.
  KVANT_DEVICE static u32 PageBytes(const ArrayTraits& traits, const Array& array) {
    return static_cast<u32>(array.strides[0] * BitsOf(traits.type) / 8);
  }
  // In one instruction: both factors are of 32 bits.
  KVANT_DEVICE static const u8* OfPage(const u8* first, u32 page, u32 bytes) {
    return first + u64{page} * bytes;
  }
  KVANT_DEVICE void CopyCodes(const CodeTile& tile, i32 page, u32 page_bytes, const u32* of_runs,
                              SharedAddress to, const u8* from, i32 pitch, i32 token,
                              i32 left) const {
    const i32 run = RunOf(page);
    KVANT_UNROLL
    for (i32 first = 0; first < T::k.warp_tile; first += run) {
      const u8* in_page = OfPage(from, of_runs[first / run], page_bytes);
      const u8* at = Opaque(in_page + InPage(page, token) * pitch);
      if (left >= T::k.warp_tile) {
        tile.Copy(to, at, pitch, first, run);
      } else {
        tile.CopyPart(to, at, pitch, first, run, left);
      }
    }
  }

  // The segments are rings, of which column `lead` is any token; `token` is a column.
  KVANT_DEVICE void FillFromRings(i32 token, u32 stage, i32 left) {
    const CodesLayout l = Layout();
    const CodesWork<T> work = CodesWork<T>::Load(p_, work_);
    const SegmentColumns k = work.KeyColumns(p_), v = work.ValueColumns(p_);
    const i32 skip = MaxOf(0, work.Lead() - token), k_at = k.TokenOf(token),
              v_at = v.TokenOf(token);
    bool whole = skip == 0 && left >= T::k.warp_tile && k_at + T::k.warp_tile <= k.capacity &&
                 v_at + T::k.warp_tile <= v.capacity;
    KVANT_UNROLL
    for (i32 s = 0; s < kSides; ++s) {
      if (l.sides[s].tokens != 1) continue;
      whole &= (s % 2 == 0 ? k_at : v_at) * l.sides[s].bits % (8 * l.copy_bytes) == 0;
    }
    if (whole) return FillFrom(k_at, v_at, stage, T::k.warp_tile);
    l.k.CopyRing(k_to_ + stage, k_, T::k.k_pitch, k, token, skip, left);
    l.v.CopyRing(v_to_ + stage, v_, T::k.v_pitch, v, token, skip, left);
    const CodesBases<T> bases = CodesBases<T>::Of(p_, work_);
    const CodeFormat &kf = l.k.format, &vf = l.v.format;
    LoadSide(bases.sides[0], l.sides[0], BitsOf(kf.scale_type), k, token, skip, stage, left);
    LoadSide(bases.sides[2], l.sides[2], kf.ZeroBits(), k, token, skip, stage, left);
    if (T::k.v_in_k) return;
    LoadSide(bases.sides[1], l.sides[1], BitsOf(vf.scale_type), v, token, skip, stage, left);
    LoadSide(bases.sides[3], l.sides[3], vf.ZeroBits(), v, token, skip, stage, left);
  }

  // Element by element of `element_bits`, or byte by byte where these are smaller: tokens begin at
  // any address. Zeros where there is no token.
  KVANT_DEVICE void LoadSide(const u8* base, const SideTraits& side, i32 element_bits,
                             const SegmentColumns& columns, i32 token, i32 skip, u32 stage,
                             i32 left) const {
    if (side.bits == 0) return;
    // Rows of an odd number of 4 bits: a byte is of two tokens.
    const i32 bits = element_bits == 4 && side.bits % 8 == 0 ? 8 : element_bits;
    const i32 of_row = side.bits / bits, rows = side.Rows(T::k.warp_tile);
    const i32 bytes = MaxOf(1, bits / 8), at_once = bits == 4 ? 2 : 1;
    KVANT_NO_UNROLL
    for (i32 i = LaneIndex(); i < of_row * rows / at_once; i += 32) {
      u32 x = 0;
      KVANT_UNROLL
      for (i32 e = 0; e < at_once; ++e) {
        // The first of the row's tokens that exists.
        const i32 element = i * at_once + e, first = element / of_row * side.tokens;
        const i32 t = MaxOf(first, skip);
        if (t >= MinOf(first + side.tokens, left)) continue;
        const i64 row = columns.TokenOf(token + t) / side.tokens;
        const i64 index = row * of_row + element % of_row;
        if (bits == 4) {
          x |= (static_cast<u32>(Load(base + index / 2)) >> index % 2 * 4 & 15) << 4 * e;
        } else if (bits == 8) {
          x = Load(base + index);
        } else if (bits == 16) {
          x = Load(reinterpret_cast<const u16*>(base) + index);
        } else {
          x = Load(reinterpret_cast<const u32*>(base) + index);
        }
      }
      const SharedAddress to = ring_ + stage + static_cast<u32>(side.offset + i * bytes);
      if (bytes == 4) {
        StoreShared32(to, x);
      } else if (bytes == 2) {
        StoreShared16(to, x);
      } else {
        StoreShared8(to, x);
      }
    }
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
      const i32 first = PlaceInSide(l, r, side);
      const i32 bytes = Chosen(l, side, [&](i32 a) { return l.sides[a].TileBytes(left); });
      CopyAsync(l.copy_bytes, SideTo(l, stage, r),
                bytes > first || HasPages(T::k) ? at : at - first,
                MaxOf(0, MinOf(bytes - first, l.copy_bytes)));
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
  i32 step_[MaxOf(
      1, kSideCopies)];  // bytes from tile to tile, from unit to unit, or from page to page
  i32 entry_[MaxOf(1, kSideCopies)];  // which lane has the page of the piece
  const u32* table_;                  // the row of the lane's page table
  u32 page_ = 0;                      // the lane's entry for the next tile
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CODES_RING_H_
