// Products of a warp's 16 rows with a tile in shared memory; fragments as in device/fragment.h.
#ifndef KVANT_KERNELS_CUDA_TILE_PRODUCTS_H_
#define KVANT_KERNELS_CUDA_TILE_PRODUCTS_H_

#include "kvant/kernels/cuda/dequantize_tile.h"

namespace kvant::cuda {

// x as the sum of two tf32, each rounded to nearest: of its lower 13 bits the tensor cores take no
// notice. What is left is below 2^-23 of x.
struct Split {
  u32 high, low;
  KVANT_DEVICE static Split Of(float x) {
    const u32 high = (AsBits(x) + 0x1000u) & 0xffffe000u;
    const float low = x - AsFloat(high);
    // Where it became infinity, or a NaN of all ones -0, as it is but for a last bit: the product
    // sets a bit of NaN that is not cut off.
    const bool rounds = Abs(low) < AsFloat(0x7f800000u);
    return {rounds ? high : AsBits(x * 0x1.fffffep-1f), rounds ? AsBits(low) + 0x1000u : 0u};
  }
};

// d += a x b but for what both low parts give, or with kByTF32 any. Tensor cores cut sums off
// instead of rounding them (arXiv 2512.07004), and long ones lose more: d is a short one, which is
// added to others outside.
KVANT_DEVICE void MmaSplit(i32 arithmetic, float (&d)[4], const Split (&a)[4], const Split& b0,
                           const Split& b1) {
  if (arithmetic == kByF32) {
    MmaTF32K8(d, a[0].low, a[1].low, a[2].low, a[3].low, b0.high, b1.high);
    MmaTF32K8(d, a[0].high, a[1].high, a[2].high, a[3].high, b0.low, b1.low);
  }
  MmaTF32K8(d, a[0].high, a[1].high, a[2].high, a[3].high, b0.high, b1.high);
}

template <class T>
struct TileProducts {
  // Of 8 tokens, and of 8 channels of the output, that a warp has.
  static constexpr i32 kTokenTiles = T::kMax.tile / T::kMax.token_warps / 8;
  static constexpr i32 kChannelTiles = T::kMax.v_block / 8;
  using Scores = float[kTokenTiles][4];
  using Output = float[kChannelTiles][4];

  KVANT_DEVICE static i32 TokenTiles() { return T::k.tile / T::k.token_warps / 8; }

  KVANT_DEVICE static constexpr TileLayout ValueLayout() {
    return TileLayout::Of(T::k.arithmetic, T::k.v_in_k ? T::k.head_size : T::k.v_block);
  }

  // scores = Q x K^T: rows [row, row + 16) of the Q tile, tokens from `token` on of the K tile.
  KVANT_DEVICE static void Keys(SharedAddress q, i32 row, SharedAddress k, i32 token,
                                Scores& scores) {
    const TileLayout layout = TileLayout::Of(T::k.arithmetic, T::k.head_size);
    KVANT_UNROLL
    for (i32 j = 0; j < TokenTiles(); ++j) {
      KVANT_UNROLL
      for (i32 e = 0; e < 4; ++e) scores[j][e] = 0.f;
    }
    if (TakesF32(T::k.arithmetic)) return KeysByF32(layout, q, row, k, token, scores);
    const i32 lane = LaneIndex();
    const SharedAddress q_at = layout.At(q, row + lane % 16, lane / 16 * 8);
    const SharedAddress k_at = layout.At(k, token + lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8);
    KVANT_UNROLL
    for (i32 d = 0; d < layout.channels; d += 16) {
      const Words4 a = LoadMatrix4(q_at + d * 2);
      KVANT_UNROLL
      for (i32 j = 0; j < TokenTiles(); j += 2) {
        const Words4 b = LoadMatrix4(k_at + j * 8 * layout.pitch + d * 2);
        Mma(scores[j], a.v[0], a.v[1], a.v[2], a.v[3], b.v[0], b.v[1]);
        Mma(scores[j + 1], a.v[0], a.v[1], a.v[2], a.v[3], b.v[2], b.v[3]);
      }
    }
  }

  // output += P x V: tokens from `token` on of the V tile.
  KVANT_DEVICE static void Values(const Scores& probs, SharedAddress v, i32 token, Output& output) {
    const TileLayout layout = ValueLayout();
    if (TakesF32(T::k.arithmetic)) return ValuesByF32(layout, probs, v, token, output);
    const i32 lane = LaneIndex();
    const SharedAddress v_at = layout.At(v, token + lane % 16, lane / 16 * 8);
    KVANT_UNROLL
    for (i32 j = 0; j < TokenTiles(); j += 2) {
      // Rows and columns of a C fragment are those of an A fragment.
      const u32 a0 = Pack(T::k.arithmetic, probs[j][0], probs[j][1]);
      const u32 a1 = Pack(T::k.arithmetic, probs[j][2], probs[j][3]);
      const u32 a2 = Pack(T::k.arithmetic, probs[j + 1][0], probs[j + 1][1]);
      const u32 a3 = Pack(T::k.arithmetic, probs[j + 1][2], probs[j + 1][3]);
      KVANT_UNROLL
      for (i32 n = 0; n < T::k.v_block / 8; n += 2) {
        const Words4 b = LoadMatrix4Transposed(v_at + j * 8 * layout.pitch + n * 16);
        Mma(output[n], a0, a1, a2, a3, b.v[0], b.v[1]);
        Mma(output[n + 1], a0, a1, a2, a3, b.v[2], b.v[3]);
      }
    }
  }

 private:
  KVANT_DEVICE static void Mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (T::k.arithmetic == kByF16) return MmaF16K16(d, a0, a1, a2, a3, b0, b1);
    MmaBF16K16(d, a0, a1, a2, a3, b0, b1);
  }

  KVANT_DEVICE static Split LoadSplit(SharedAddress at) {
    return Split::Of(AsFloat(LoadShared32(at)));
  }

  KVANT_DEVICE static void KeysByF32(const TileLayout& layout, SharedAddress q, i32 row,
                                     SharedAddress k, i32 token, Scores& scores) {
    const i32 g = LaneIndex() / 4, c = LaneIndex() % 4;
    const SharedAddress q_at = layout.At(q, row + g, c);
    const SharedAddress k_at = layout.At(k, token + g, c);
    KVANT_NO_UNROLL
    for (i32 d = 0; d < layout.channels; d += 16) {
      Split a[2][4];
      KVANT_UNROLL
      for (i32 i = 0; i < 8; ++i) {
        a[i / 4][i % 4] = LoadSplit(q_at + (d + i / 2 * 4) * 4 + i % 2 * 8 * layout.pitch);
      }
      KVANT_UNROLL
      for (i32 j = 0; j < TokenTiles(); ++j) {
        float sum[4] = {};
        const SharedAddress at = k_at + j * 8 * layout.pitch + d * 4;
        MmaSplit(T::k.arithmetic, sum, a[0], LoadSplit(at), LoadSplit(at + 16));
        MmaSplit(T::k.arithmetic, sum, a[1], LoadSplit(at + 32), LoadSplit(at + 48));
        KVANT_UNROLL
        for (i32 e = 0; e < 4; ++e) scores[j][e] += sum[e];
      }
    }
  }

  // The contraction takes the tokens of a C fragment where they are: slot c is token 2c, slot c + 4
  // token 2c + 1.
  KVANT_DEVICE static void ValuesByF32(const TileLayout& layout, const Scores& probs,
                                       SharedAddress v, i32 token, Output& output) {
    const i32 g = LaneIndex() / 4, c = LaneIndex() % 4;
    const SharedAddress v_at = layout.At(v, token + 2 * c, g);
    Split a[kTokenTiles][4];
    KVANT_UNROLL
    for (i32 j = 0; j < TokenTiles(); ++j) {
      KVANT_UNROLL
      for (i32 e = 0; e < 4; ++e) a[j][e] = Split::Of(probs[j][e % 2 * 2 + e / 2]);
    }
    KVANT_UNROLL
    for (i32 n = 0; n < T::k.v_block / 8; ++n) {
      float sum[4] = {};
      KVANT_UNROLL
      for (i32 j = 0; j < TokenTiles(); ++j) {
        const SharedAddress at = v_at + j * 8 * layout.pitch + n * 32;
        MmaSplit(T::k.arithmetic, sum, a[j], LoadSplit(at), LoadSplit(at + layout.pitch));
      }
      KVANT_UNROLL
      for (i32 e = 0; e < 4; ++e) output[n][e] += sum[e];
    }
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_TILE_PRODUCTS_H_
