// Heads of more channels than a warp has registers for: `channel_warps` warps share the tiles of a
// block, each with a slice of K's channels and of V's, in a ring of its own.
//
// Where V is the first channels of K, a slice of K is that of V and a share of the rest, so that
// what a warp reads serves as both:
//
//   K's channels   | V 0 | V 1 | V 2 | V 3 | rest 0 | rest 1 | rest 2 | rest 3 |
//   of warp 1              ^^^^^                      ^^^^^^
//
// A warp's scores are those of its slice. They are exchanged once per tile, and added up in the
// same order by each, so that all warps have the same bits, and go on alike.
#ifndef KVANT_KERNELS_CUDA_CODES_SLICES_H_
#define KVANT_KERNELS_CUDA_CODES_SLICES_H_

#include "kvant/kernels/cuda/attention_params.h"

namespace kvant::cuda {

inline constexpr i32 kChannelWarps = 4;  // or 1: a warp has all channels

// Channels of a warp.
KVANT_DEVICE constexpr i32 KeySlice(const AttentionTraits& t) {
  return t.head_size / t.channel_warps;
}
KVANT_DEVICE constexpr i32 ValueSlice(const AttentionTraits& t) {
  return t.v_head_size / t.channel_warps;
}

template <class T>
struct WarpSlice {
  KVANT_DEVICE static bool Shares() { return T::k.channel_warps > 1; }
  KVANT_DEVICE static i32 Index() { return Shares() ? WarpIndex() : 0; }
  // Among warps that take tiles of their own.
  KVANT_DEVICE static i32 TokenWarp() { return Shares() ? 0 : WarpIndex(); }

  // Of the head: the i-th channel of the warp's slice.
  KVANT_DEVICE static i32 KeyChannel(i32 i) {
    const i32 warp = Index();  // by all lanes, whatever their i
    if (!T::k.v_in_k) return warp * KeySlice(T::k) + i;
    const i32 values = ValueSlice(T::k), rest = KeySlice(T::k) - values;
    return i < values ? warp * values + i : T::k.v_head_size + warp * rest + (i - values);
  }
  KVANT_DEVICE static i32 ValueChannel(i32 i) { return Index() * ValueSlice(T::k) + i; }
};

// Of the scores of a tile, which a warp leaves for the others.
KVANT_DEVICE constexpr i32 ScoreBytes(const AttentionTraits& t) {
  return t.row_blocks * 8 * t.warp_tile * 4;
}
// Of the scores of all warps, of two tiles: a warp may be a tile ahead of another that still reads.
KVANT_DEVICE constexpr i32 ExchangeBytes(const AttentionTraits& t) {
  return t.channel_warps > 1 ? 2 * t.channel_warps * ScoreBytes(t) : 0;
}

template <class T>
class ScoreExchange {
 public:
  KVANT_DEVICE explicit ScoreExchange(SharedAddress memory)
      : tile_(memory), both_(memory + memory + static_cast<u32>(ExchangeBytes(T::k) / 2)) {}

  // scores[rb][j] become the sums of all warps', plus `add`. Four of a lane lie side by side, so
  // that a warp's come and go in whole lines of banks.
  template <i32 kRowBlocks, i32 kPairTiles>
  KVANT_DEVICE void Add(const float (&add)[kRowBlocks][2],
                        float (&scores)[kRowBlocks][kPairTiles][4]) {
    const i32 pairs = T::k.warp_tile / 16, own = WarpSlice<T>::Index();
    const auto at = [&](i32 warp, i32 rb, i32 j) {
      return tile_ + static_cast<u32>(warp * ScoreBytes(T::k) + LaneIndex() * 16) +
             static_cast<u32>((rb * pairs + j) * 512);
    };
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 j = 0; j < pairs; ++j) {
        Words4 words;
        KVANT_UNROLL
        for (i32 e = 0; e < 4; ++e) words.v[e] = AsBits(scores[rb][j][e]);
        StoreShared128(at(own, rb, j), words);
      }
    }
    BlockSync();
    // (0 + 1) + (2 + 3) is what each warp has, as sums of two do not depend on their order.
    static_assert(kChannelWarps == 4);
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 j = 0; j < pairs; ++j) {
        const Words4 a = LoadShared128(at(own ^ 1, rb, j));
        const Words4 b = LoadShared128(at(own ^ 2, rb, j));
        const Words4 c = LoadShared128(at(own ^ 3, rb, j));
        KVANT_UNROLL
        for (i32 e = 0; e < 4; ++e) {
          const float with_next = scores[rb][j][e] + AsFloat(a.v[e]);
          const float of_others = AsFloat(b.v[e]) + AsFloat(c.v[e]);
          scores[rb][j][e] = (with_next + of_others) + add[rb][e % 2];
        }
      }
    }
    tile_ = both_ - tile_;
  }

 private:
  SharedAddress tile_, both_;  // the tile's half of the memory; the sum of both halves' addresses
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CODES_SLICES_H_
