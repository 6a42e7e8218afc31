// Where a warp's tile of packed codes, and its scales and zero points, lie in shared memory.
//
//   stage = K codes | V codes | K scales | V scales | K zero points | V zero points
//
// Where V is the first channels of K, what V has is what K has. Of heads that warps share, codes
// are those of a warp's slice (codes_slices.h).
//
// Tokens of a tile are dealt to the lanes' g: token t = N g' + i is in row block i, and there row
// g'; N = tile / 8. So an ldmatrix of row block i gives lane 4g + c the token whose score it will
// have, and the lane's scales are side by side. Where keys by channel are in groups of less than a
// tile, it is several of that size, one after the other: N = group / 8, and row blocks go on.
//
// Row blocks of 8 rows lie one after the other. Neither an ldmatrix (the same chunk of 8 rows) nor
// a copy (8 chunks in a row, of consecutive tokens) is to meet a bank twice.
//
// Rows of a power of two of chunks of 16 bytes: with R = 128 / row bytes (1 if less) rows to a line
// of banks,
//
//   row   = g' ^ i % R
//   chunk = chunk ^ row / R % (8 / R)
//
// These are XORs in bits 4 .. 6 of the address; all other bits are sums.
//
// Other rows (heads of 80, 96, 192 channels) begin an odd number of chunks apart, which 8 rows
// cannot share a bank by. All bits of the address are sums.
#ifndef KVANT_KERNELS_CUDA_CODES_TILE_H_
#define KVANT_KERNELS_CUDA_CODES_TILE_H_

#include "kvant/kernels/cuda/codes_bases.h"
#include "kvant/kernels/cuda/codes_slices.h"

namespace kvant::cuda {

KVANT_DEVICE constexpr bool IsPowerOfTwo(i32 x) { return (x & (x - 1)) == 0; }

// Where one side's rows lie in a tile.
struct CodeTile {
  CodeFormat format;
  i32 tokens;
  i32 run;        // tokens of a lane that are side by side
  i32 width;      // bytes that a lane copies at once: 16, or 8
  i32 row_bytes;  // of which the format's are the first
  bool copied;    // else what it has comes with another tile

  KVANT_DEVICE constexpr bool Swizzles() const {
    return row_bytes % 16 == 0 && IsPowerOfTwo(row_bytes);
  }
  // In chunks of 16 bytes, from row to row and from row block to row block.
  KVANT_DEVICE constexpr i32 RowPitch() const {
    const i32 chunks = CeilDiv(row_bytes, 16);
    return Swizzles() ? chunks : chunks | 1;
  }
  KVANT_DEVICE constexpr i32 BlockPitch() const {
    // Rows of 3 chunks: two consecutive tokens are copied at once, so they lie side by side, too.
    return 8 * RowPitch() + (RowPitch() == 3 ? 3 : 0);
  }
  KVANT_DEVICE constexpr i32 Bytes() const { return tokens / 8 * BlockPitch() * 16; }

  // Of `chunk` of row g' of row block i.
  KVANT_DEVICE constexpr i32 Place(i32 i, i32 g, i32 chunk) const {
    if (!Swizzles()) return (i * BlockPitch() + g * RowPitch() + chunk) * 16;
    const i32 r = row_bytes >= 128 ? 1 : 128 / row_bytes;
    const i32 row = g ^ (i % r);
    return (i * 8 + row) * row_bytes + ((chunk ^ (row / r % (8 / r))) << 4);
  }
  KVANT_DEVICE constexpr i32 Place(i32 token, i32 chunk) const {
    return Place(token / (8 * run) * run + token % run, token / run % 8, chunk);
  }
  // Place is linear: that of a lane's part, and of the part that all lanes share.
  KVANT_DEVICE SharedAddress Join(SharedAddress lane, i32 shared) const {
    if (!Swizzles()) return lane + static_cast<u32>(shared);
    return (lane ^ static_cast<u32>(shared & 127)) + static_cast<u32>(shared & ~127);
  }

  // A copy is one instruction of 32 lanes: of so many tokens, each by `Slots()` lanes, of which the
  // first `Pieces()` have something to copy.
  KVANT_DEVICE constexpr i32 Pieces() const { return format.RowBytes() / width; }
  KVANT_DEVICE constexpr i32 Slots() const {
    const i32 pieces = Pieces();
    return pieces <= 2 ? 2 : pieces <= 4 ? 4 : pieces <= 8 ? 8 : pieces <= 16 ? 16 : 32;
  }
  KVANT_DEVICE constexpr i32 TokensPerCopy() const { return 32 / Slots(); }
  KVANT_DEVICE i32 LaneToken(i32 lane) const { return lane / Slots(); }
  KVANT_DEVICE i32 LaneByte(i32 lane) const { return lane % Slots() * width; }
  KVANT_DEVICE bool LaneCopies() const { return copied && LaneIndex() % Slots() < Pieces(); }
  KVANT_DEVICE i32 LanePlace(i32 lane) const {
    return Place(LaneToken(lane), LaneByte(lane) / 16) + LaneByte(lane) % 16;
  }

  // Tokens [first, first + count) of the tile, `count` whole copies, from where they begin.
  KVANT_DEVICE void Copy(SharedAddress to, const u8* from, i32 pitch, i32 first, i32 count) const {
    if (!LaneCopies()) return;
    KVANT_UNROLL
    for (i32 i = 0; i < count / TokensPerCopy(); ++i) {
      CopyAsync(width, Join(to, Place(first + i * TokensPerCopy(), 0)),
                from + i * TokensPerCopy() * pitch);
    }
  }
  // Of these, the tile's tokens [skip, left); zeros around them.
  KVANT_DEVICE void CopyPart(SharedAddress to, const u8* from, i32 pitch, i32 first, i32 count,
                             i32 left) const {
    if (!LaneCopies()) return;
    KVANT_NO_UNROLL
    for (i32 i = 0; i < count / TokensPerCopy(); ++i) {
      const bool any = first + i * TokensPerCopy() + LaneToken(LaneIndex()) < left;
      CopyAsync(width, Join(to, Place(first + i * TokensPerCopy(), 0)),
                any ? from + i * TokensPerCopy() * pitch : from, any ? width : 0);
    }
  }

  // The tile's tokens [skip, left) from column `token` of a ring on, whose rows are `pitch` apart;
  // zeros around them. from: the lane's part of the first tokens in memory.
  KVANT_DEVICE void CopyRing(SharedAddress to, const u8* from, i32 pitch,
                             const SegmentColumns& columns, i32 token, i32 skip, i32 left) const {
    if (!LaneCopies()) return;
    const i32 lane_token = LaneToken(LaneIndex());
    KVANT_NO_UNROLL
    for (i32 i = 0; i < tokens / TokensPerCopy(); ++i) {
      const i32 t = i * TokensPerCopy() + lane_token;
      const i64 row = columns.TokenOf(token + MaxOf(skip, MinOf(t, left - 1))) - lane_token;
      CopyAsync(width, Join(to, Place(i * TokensPerCopy(), 0)), from + row * pitch,
                t >= skip && t < left ? width : 0);
    }
  }

  // Makes zeros of what no copy writes of the last chunk of each row, where rows end within one.
  KVANT_DEVICE void ClearEnds(SharedAddress tile) const {
    if (!copied || format.RowBytes() % 16 == 0) return;
    KVANT_NO_UNROLL
    for (i32 t = LaneIndex(); t < tokens; t += 32) {
      StoreShared64(tile + static_cast<u32>(Place(t, format.Chunks() - 1) + 8), {{0, 0}});
    }
  }

  // Words of the chunks of row blocks 2j and 2j + 1. `at`: MatrixRow() into the tile.
  template <i32 kWords>
  KVANT_DEVICE void LoadPair(SharedAddress at, i32 j, bool transposed, u32 (&low)[kWords],
                             u32 (&high)[kWords]) const {
    KVANT_UNROLL
    for (i32 m = 0; m < format.Chunks(); m += 4) {
      u32 l[4], h[4];
      LoadFour(at, j, m, transposed, l, h);
      KVANT_UNROLL
      for (i32 e = 0; e < MinOf(4, format.Chunks() - m); ++e) {
        low[m + e] = l[e];
        high[m + e] = h[e];
      }
    }
  }
  // Of chunks [m, m + 4), those that there are.
  KVANT_DEVICE void LoadFour(SharedAddress at, i32 j, i32 m, bool transposed, u32 (&low)[4],
                             u32 (&high)[4]) const {
    const i32 chunks = format.Chunks();
    if (chunks == 2) {
      // Of both row blocks at once.
      const Words4 x = LoadMatrix(Join(at, Place(2 * j, 0, 0)), transposed);
      KVANT_UNROLL
      for (i32 e = 0; e < 2; ++e) {
        low[e] = x.v[e];
        high[e] = x.v[2 + e];
      }
      return;
    }
    // A load is of four chunks. The last one begins earlier, to end with the row; swizzled rows
    // have whole fours.
    const i32 first = Swizzles() ? m : MaxOf(0, MinOf(m, chunks - 4));
    const Words4 x = LoadMatrix(Join(at, Place(2 * j, 0, first)), transposed);
    const Words4 y = LoadMatrix(Join(at, Place(2 * j + 1, 0, first)), transposed);
    KVANT_UNROLL
    for (i32 e = m - first; e < MinOf(4, chunks - first); ++e) {
      low[e - (m - first)] = x.v[e];
      high[e - (m - first)] = y.v[e];
    }
  }
  KVANT_DEVICE i32 MatrixRow(i32 lane) const {
    const i32 matrix = lane / 8, chunks = format.Chunks();
    if (chunks == 2) return Place(matrix / 2, lane % 8, matrix % 2);
    return Place(0, lane % 8, MinOf(matrix, chunks - 1));
  }

 private:
  KVANT_DEVICE static Words4 LoadMatrix(SharedAddress row, bool transposed) {
    return transposed ? LoadMatrix4Transposed(row) : LoadMatrix4(row);
  }
};

// One of the arrays of scales and zero points: dense rows of so many bits, each for so many tokens.
// A tile has whole rows, or is within one.
struct SideTraits {
  i32 bits;    // 0: there is none
  i32 tokens;  // 1; by channel more
  i32 offset;  // in a stage
  KVANT_DEVICE constexpr i32 Rows(i32 tile) const { return CeilDiv(tile, tokens); }
  KVANT_DEVICE constexpr i32 TileBytes(i32 tile) const { return CeilDiv(bits * Rows(tile), 8); }
  KVANT_DEVICE constexpr i32 End(i32 tile) const { return offset + TileBytes(tile); }
};

struct CodesLayout {
  CodeTile k, v;
  i32 v_offset;
  SideTraits sides[kSides];
  i32 side_offset, side_bytes;
  i32 copy_bytes;  // width of copies of sides
  i32 stage_bytes;

  KVANT_DEVICE static constexpr CodesLayout Of(const AttentionTraits& t) {
    const CodeFormat k = CodeFormat::Of(t, t.k[0], KeySlice(t));
    const CodeFormat v = CodeFormat::OfValues(t, t.v[0], ValueSlice(t));
    const bool in_k = t.v_in_k != 0;
    CodesLayout l{};
    const i32 run = (k.ByChannel() ? MinOf(k.group_tokens, t.warp_tile) : t.warp_tile) / 8;
    l.k = {k, t.warp_tile, run, t.k_copy, k.RowBytes(), true};
    l.v = {v, t.warp_tile, run, t.v_copy, in_k ? k.RowBytes() : v.RowBytes(), !in_k};
    l.v_offset = in_k ? 0 : l.k.Bytes();
    // Chunks are swizzled by their address, from where a line of banks begins.
    if (l.v.Swizzles()) l.v_offset = CeilDiv(l.v_offset, 128) * 128;
    l.side_offset = l.v_offset + l.v.Bytes();
    // No loop over them, so that all of this is known when it is compiled.
    const i32 n = t.warp_tile;
    l.sides[0] = {k.SideElements() * BitsOf(k.scale_type), k.group_tokens, l.side_offset};
    const i32 v_scales = in_k ? l.sides[0].offset : l.sides[0].End(n);
    l.sides[1] = {v.SideElements() * BitsOf(v.scale_type), v.group_tokens, v_scales};
    l.sides[2] = {k.SideElements() * k.ZeroBits(), k.group_tokens, l.sides[1].End(n)};
    const i32 v_zeros = in_k ? l.sides[2].offset : l.sides[2].End(n);
    l.sides[3] = {v.SideElements() * v.ZeroBits(), v.group_tokens, v_zeros};
    l.side_bytes = l.sides[3].End(n) - l.side_offset;
    l.copy_bytes = t.side_copy;
    l.stage_bytes = CeilDiv(l.side_offset + l.side_bytes, 128) * 128;
    return l;
  }

  // The token of row g of row block i.
  KVANT_DEVICE constexpr i32 Token(i32 g, i32 i) const {
    return (i / k.run * 8 + g) * k.run + i % k.run;
  }
  // Of how many pairs 2j, 2j + 1 of row g a lane loads at once what they have in an array: more
  // than one where its words are odd in number, as those of several are fewer and wider loads.
  KVANT_DEVICE constexpr i32 PairsAtOnce(i32 words) const {
    return words % 2 == 0 ? 1 : MinOf(4, k.run / 2);
  }
  // What the tokens of row g have in an array, `bits` each.
  template <i32 kWords>
  KVANT_DEVICE void LoadOfRow(SharedAddress side, i32 bits, i32 g, u32 (&words)[kWords]) const {
    const i32 of_run = k.run * bits;
    KVANT_UNROLL
    for (i32 r = 0; r < k.tokens / 8 / k.run; ++r) {
      u32 part[kWords];
      LoadSharedBits(side + static_cast<u32>(Token(g, r * k.run) * bits / 8), of_run, part);
      const i32 first = r * of_run / 32, shift = r * of_run % 32;
      if (shift != 0) words[first] |= part[0] << shift;
      KVANT_UNROLL
      for (i32 w = 0; w < CeilDiv(of_run, 32) && shift == 0; ++w) words[first + w] = part[w];
    }
  }

  // A piece is what one lane copies at once; the pieces of all sides are dealt to lanes in order.
  KVANT_DEVICE constexpr i32 Pieces() const { return side_bytes / copy_bytes; }
  KVANT_DEVICE constexpr i32 SideCopies() const { return CeilDiv(Pieces(), 32); }
  KVANT_DEVICE constexpr i32 SideOf(i32 piece) const {
    const i32 at = side_offset + piece * copy_bytes;
    return at >= sides[3].offset ? 3 : at >= sides[2].offset ? 2 : at >= sides[1].offset ? 1 : 0;
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CODES_TILE_H_
