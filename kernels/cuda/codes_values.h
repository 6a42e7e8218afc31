// The output of a warp: V transposed, as packed codes, is the A operand of the mma, 16 channels;
// probabilities are B, 8 rows of queries. Scales of V go on the probabilities, so where there are
// groups every group of channels has its own B.
//
//   C, one per 16 channels (pairs 2s, 2s + 1) and 8 rows of queries
//     registers 0, 1:  channel ValueChannel(2s, g),      queries 2c, 2c + 1
//     registers 2, 3:  channel ValueChannel(2s + 1, g),  queries 2c, 2c + 1
//
// What codes have too much, zero points and bias, is summed apart and taken off at the end:
//
//   real, by row      in f32: every lane its own tokens
//   integer, by row   an mma with the zero point in all rows of A, B as for codes
//   in groups         an mma for all groups, channel by group: B is the probabilities alone, A has
//                     scale * zero point (or the real one). Tokens and groups of 16 bytes of scales
//                     are the 8 rows of a block of A: U = 8 / groups tokens. Row block 2j is in A's
//                     rows 0 .. 7, 2j + 1 in rows 8 .. 15; only their own tokens' rows count.
//   bias, in groups   an mma for each group with its B, which A takes to row `group`
#ifndef KVANT_KERNELS_CUDA_CODES_VALUES_H_
#define KVANT_KERNELS_CUDA_CODES_VALUES_H_

#include "kvant/kernels/cuda/codes_keys.h"

namespace kvant::cuda {

template <class T>
class CodesValues {
 public:
  static constexpr i32 kRowBlocks = T::kMax.row_blocks;
  static constexpr i32 kParts = PartsOf(T::kMax);
  static constexpr i32 kChannelTiles = T::kMax.v_head_size / 16;
  using Scores = typename CodesKeys<T>::Scores;

  KVANT_DEVICE static CodeTile Tile() { return CodesRing<T>::Layout().v; }
  KVANT_DEVICE static CodeFormat Format() { return Tile().format; }

  // zero_point: what all tokens have in common.
  KVANT_DEVICE CodesValues(const AttentionParams& p, float zero_point)
      : entries_(CodebookWords::Of(T::k.v[0], p.v[0])) {
    const float both = zero_point + static_cast<float>(Format().Bias());
    common_ = PackF16(both, both);
  }

  KVANT_DEVICE void Clear() {
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 s = 0; s < T::k.v_head_size / 16; ++s) Zero4(out_[rb][s]);
      Zero4(zero_[rb]);
      Zero4(bias_[rb]);
      real_[rb][0] = real_[rb][1] = 0.f;
    }
  }

  // Output of queries 2c + h of row block rb times `factor`.
  KVANT_DEVICE void Shrink(i32 rb, i32 h, float factor) {
    KVANT_UNROLL
    for (i32 e = h; e < 4; e += 2) {
      KVANT_UNROLL
      for (i32 s = 0; s < T::k.v_head_size / 16; ++s) out_[rb][s][e] *= factor;
      zero_[rb][e] *= factor;
      bias_[rb][e] *= factor;
    }
    real_[rb][h] *= factor;
  }

  // Takes a tile in. at: the lane's matrix row in the stage's V; stage: where the stage begins.
  KVANT_DEVICE void Add(SharedAddress at, SharedAddress stage, const Scores& probs) {
    const CodeFormat f = Format();
    const CodesLayout l = CodesRing<T>::Layout();
    const i32 n = T::k.warp_tile / 8, g = LaneIndex() / 4;
    u32 scales[8], bytes[2][2];
    u32 plain[kRowBlocks][kTokenTiles];            // probabilities, as they are
    u32 columns[kRowBlocks][kParts][kTokenTiles];  // B operands; in groups, of unscaled ones
    if (f.groups == 1 && f.scale_type != kNone) {
      LoadSharedWords(stage + l.sides[1].offset + g * n * f.ScaleBytes(), n * f.ScaleBytes() / 4,
                      scales);
    }
    if (f.groups == 1 && f.zero == Zero::kReal) AddRealRows(stage, probs);
    if (f.groups == 1 && f.zero == Zero::kInteger) LoadZeroBytes(stage, bytes);
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 i = 0; i < n; ++i) {
        const float x0 = probs[rb][i / 2][i % 2 * 2], x1 = probs[rb][i / 2][i % 2 * 2 + 1];
        plain[rb][i] = PackF16(x0, x1);
        u32 words[kParts] = {plain[rb][i]};
        if (f.groups == 1) Scaled(x0, x1, plain[rb][i], scales, i, words);
        if (f.groups > 1 && !ZeroMma()) continue;
        KVANT_UNROLL
        for (i32 part = 0; part < Parts(); ++part) {
          columns[rb][part][i] = TransposeMatrix(words[part]);
        }
      }
    }
    KVANT_UNROLL
    for (i32 j = 0; j < n / 2; ++j) {
      u32 low[kWords], high[kWords];
      Tile().LoadPair(at, j, true, low, high);
      if (f.groups == 1) {
        if (ZeroRows()) AddZeroRows(bytes, j, columns);
        MultiplyGroup(0, low, high, columns, 2 * j);
      } else {
        if (ZeroMma()) AddZeroGroups(stage, j, columns);
        const i32 bytes_of_two = 2 * f.groups * f.ScaleBytes();
        u32 pair[16];
        LoadSharedWords(stage + l.sides[1].offset + (g * (n / 2) + j) * bytes_of_two,
                        bytes_of_two / 4, pair);
        KVANT_UNROLL
        for (i32 group = 0; group < f.groups; ++group) {
          u32 b[kRowBlocks][kParts][2];
          KVANT_UNROLL
          for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
            KVANT_UNROLL
            for (i32 h = 0; h < 2; ++h) {
              u32 words[kParts];
              Scaled(probs[rb][j][2 * h], probs[rb][j][2 * h + 1], plain[rb][2 * j + h], pair,
                     h * f.groups + group, words);
              KVANT_UNROLL
              for (i32 part = 0; part < Parts(); ++part) {
                b[rb][part][h] = TransposeMatrix(words[part]);
              }
            }
          }
          if (f.Bias() != 0 && f.zero != Zero::kInteger) AddBias(group, b);
          MultiplyGroup(group, low, high, b, 0);
        }
      }
    }
  }

  // Stores the output, times a scale that all tokens have in common, as [8 rb + 2c + h][channel].
  KVANT_DEVICE void Store(SharedAddress rows, float scale) {
    const CodeFormat f = Format();
    const i32 g = LaneIndex() / 4, c = LaneIndex() % 4;
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      float less[kMaxGroups][2];
      KVANT_UNROLL
      for (i32 group = 0; group < f.groups; ++group) {
        KVANT_UNROLL
        for (i32 h = 0; h < 2; ++h) less[group][h] = TooMuch(rb, group, h, scale);
      }
      KVANT_UNROLL
      for (i32 s = 0; s < T::k.v_head_size / 16; ++s) {
        const i32 group = 2 * s / f.PairsPerGroup();
        KVANT_UNROLL
        for (i32 h = 0; h < 2; ++h) {
          const float by = scale / f.Unit();
          const u32 low = AsBits(Fma(out_[rb][s][h], by / f.Factor(2 * s), -less[group][h]));
          const u32 high =
              AsBits(Fma(out_[rb][s][h + 2], by / f.Factor(2 * s + 1), -less[group][h]));
          const SharedAddress row = rows + (8 * rb + 2 * c + h) * T::k.v_head_size * 4;
          if (f.bits == 16) {
            StoreShared32(row + f.ValueChannel(2 * s, g) * 4, low);
            StoreShared32(row + f.ValueChannel(2 * s + 1, g) * 4, high);
          } else {
            StoreShared64(row + f.ValueChannel(2 * s, g) * 4, {{low, high}});
          }
        }
      }
    }
  }

  // Whether f16 could hold all that was multiplied, as far as the output tells.
  KVANT_DEVICE bool Finite() const {
    float sum = 0.f;
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 h = 0; h < 4; ++h) {
        KVANT_UNROLL
        for (i32 s = 0; s < T::k.v_head_size / 16; ++s) sum = Fma(out_[rb][s][h], 0.f, sum);
        if (ZeroMma()) sum = Fma(zero_[rb][h], 0.f, sum);
      }
    }
    return sum == 0.f;
  }

 private:
  static constexpr i32 kTokenTiles = T::kMax.warp_tile / 8;
  static constexpr i32 kWords = T::kMax.v_head_size / 8;

  KVANT_DEVICE static i32 Parts() { return PartsOf(T::k); }
  KVANT_DEVICE static void Zero4(float (&c)[4]) {
    KVANT_UNROLL
    for (i32 e = 0; e < 4; ++e) c[e] = 0.f;
  }
  // Zero points in groups.
  KVANT_DEVICE static bool ZeroMma() { return Format().groups > 1 && Format().zero != Zero::kNone; }

  // Probabilities (in f32, and packed) times scale `index`.
  template <i32 kScales>
  KVANT_DEVICE static void Scaled(float x0, float x1, u32 packed, const u32 (&scales)[kScales],
                                  i32 index, u32 (&words)[kParts]) {
    const CodeFormat f = Format();
    if (f.scale_type == kFloat16 && Parts() == 1) {
      words[0] = index % 2 == 0 ? MultiplyByLowF16(packed, scales[index / 2])
                                : MultiplyByHighF16(packed, scales[index / 2]);
      return;
    }
    const float scale = f.scale_type == kNone ? 1.f : FloatAt(f.scale_type, scales, index);
    PackParts(Parts(), x0 * scale, x1 * scale, words);
  }

  template <i32 kColumns>
  KVANT_DEVICE void MultiplyGroup(i32 group, const u32 (&low)[kWords], const u32 (&high)[kWords],
                                  const u32 (&b)[kRowBlocks][kParts][kColumns], i32 at) {
    const CodeFormat f = Format();
    KVANT_UNROLL
    for (i32 q = group * f.PairsPerGroup(); q < (group + 1) * f.PairsPerGroup(); q += 2) {
      const u32 a0 = f.Unpack(low, q, entries_), a1 = f.Unpack(low, q + 1, entries_);
      const u32 a2 = f.Unpack(high, q, entries_), a3 = f.Unpack(high, q + 1, entries_);
      KVANT_UNROLL
      for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
        KVANT_UNROLL
        for (i32 part = 0; part < Parts(); ++part) {
          MmaF16K16(out_[rb][q / 2], a0, a1, a2, a3, b[rb][part][at], b[rb][part][at + 1]);
        }
      }
    }
  }

  KVANT_DEVICE void AddRealRows(SharedAddress stage, const Scores& probs) {
    const CodeFormat f = Format();
    const i32 n = T::k.warp_tile / 8, g = LaneIndex() / 4;
    u32 zeros[8];
    LoadSharedWords(stage + CodesRing<T>::Layout().sides[3].offset + g * n * f.ZeroBytes(),
                    n * f.ZeroBytes() / 4, zeros);
    KVANT_UNROLL
    for (i32 i = 0; i < n; ++i) {
      const float zero = FloatAt(f.zero_type, zeros, i);
      KVANT_UNROLL
      for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
        KVANT_UNROLL
        for (i32 h = 0; h < 2; ++h) {
          real_[rb][h] = Fma(probs[rb][i / 2][i % 2 * 2 + h], zero, real_[rb][h]);
        }
      }
    }
  }

  // Row-wise zero points of the tokens of g' = 2c and 2c + 1.
  KVANT_DEVICE static void LoadZeroBytes(SharedAddress stage, u32 (&bytes)[2][2]) {
    const i32 n = T::k.warp_tile / 8, c = LaneIndex() % 4;
    const SharedAddress side = stage + CodesRing<T>::Layout().sides[3].offset;
    KVANT_UNROLL
    for (i32 h = 0; h < 2; ++h) {
      if (n == 2) {
        bytes[h][0] = LoadShared16(side + (2 * c + h) * n);
      } else {
        LoadSharedWords(side + (2 * c + h) * n, n / 4, bytes[h]);
      }
    }
  }

  KVANT_DEVICE static bool ZeroRows() {
    const CodeFormat f = Format();
    return f.zero == Zero::kInteger || f.common_zero || f.Bias() != 0;
  }
  // Whether zero points come with the same bias as codes, and so may stay subnormal.
  KVANT_DEVICE static bool ZeroAsBits() {
    const CodeFormat f = Format();
    return f.subnormal && !f.common_zero && (f.zero != Zero::kInteger || f.ZeroBias() == f.Bias());
  }
  // Zero points, a byte in each half, as what is to be taken off codes.
  KVANT_DEVICE static u32 ZeroNumber(u32 x) {
    const CodeFormat f = Format();
    const u32 flip = f.zero_type == kInt8 ? 0x64806480u : 0x64006400u;
    const u32 base = static_cast<u32>(1024 + f.ZeroBias() - f.Bias());
    // As an f16 1024 .. 2047 is its bits from 0x6400 on; below it they are twice as dense.
    const u32 half = base >= 1024 ? 0xe400u + (base - 1024) : 0xe000u + (base - 512) * 2;
    return AddF16x2(x ^ flip, half * 0x10001u);
  }

  KVANT_DEVICE void AddZeroRows(const u32 (&bytes)[2][2], i32 j,
                                const u32 (&b)[kRowBlocks][kParts][kTokenTiles]) {
    const CodeFormat f = Format();
    u32 a[2];
    KVANT_UNROLL
    for (i32 h = 0; h < 2; ++h) {
      const u32 i = static_cast<u32>(2 * j + h);
      if (f.zero != Zero::kInteger) {
        a[h] = f.common_zero ? common_ : static_cast<u32>(f.Bias()) * 0x10001u;
        continue;
      }
      const u32 x = Permute(bytes[0][i / 4], bytes[1][i / 4], 0x0400 + 0x0101 * (i % 4));
      a[h] = ZeroPair(x);
    }
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 part = 0; part < Parts(); ++part) {
        MmaF16K16(bias_[rb], a[0], a[0], a[1], a[1], b[rb][part][2 * j], b[rb][part][2 * j + 1]);
      }
    }
  }
  KVANT_DEVICE static u32 ZeroPair(u32 x) {
    x &= 0x00ff00ffu;
    if (!ZeroAsBits()) return ZeroNumber(x);
    return Format().zero_type == kInt8 ? x ^ 0x00800080u : x;
  }

  // scale * zero point, or the real one, of element g of the `unit`-th 16 bytes of scales of the
  // tokens of g' = 2c and 2c + 1.
  KVANT_DEVICE static u32 ZeroUnit(SharedAddress stage, i32 unit) {
    const CodeFormat f = Format();
    const CodesLayout l = CodesRing<T>::Layout();
    const i32 n = T::k.warp_tile / 8, c = LaneIndex() % 4, of_token = n * f.groups;
    // The lanes' g are more than elements where a tile is small.
    const i32 g = LaneIndex() / 4 % MinOf(8, of_token);
    const i32 index = 2 * c * of_token + unit * 8 + g;
    const SharedAddress zeros = stage + l.sides[3].offset + index * f.ZeroBytes();
    if (f.zero == Zero::kReal) {
      return Permute(LoadShared16(zeros), LoadShared16(zeros + of_token * 2), 0x5410);
    }
    const u32 x = Permute(LoadShared8(zeros), LoadShared8(zeros + of_token), 0x5410);
    const SharedAddress scales = stage + l.sides[1].offset + index * 2;
    const u32 by = Permute(LoadShared16(scales), LoadShared16(scales + of_token * 2), 0x5410);
    return MultiplyF16x2(ZeroNumber(x), by);
  }

  KVANT_DEVICE void AddZeroGroups(SharedAddress stage, i32 j,
                                  const u32 (&b)[kRowBlocks][kParts][kTokenTiles]) {
    const i32 tokens = 8 / Format().groups;  // of a unit
    u32 low = ZeroUnit(stage, 2 * j / tokens), high = low;
    if (tokens == 1) high = ZeroUnit(stage, 2 * j + 1);
    // Of four tokens two have rows that are other ones' with the next j.
    if (tokens == 4) low = high = LaneIndex() / 16 == j % 2 ? low : 0;
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 part = 0; part < Parts(); ++part) {
        MmaF16K16(zero_[rb], low, 0, 0, high, b[rb][part][2 * j], b[rb][part][2 * j + 1]);
      }
    }
  }

  KVANT_DEVICE void AddBias(i32 group, const u32 (&b)[kRowBlocks][kParts][2]) {
    const u32 a = LaneIndex() / 4 == group ? static_cast<u32>(Format().Bias()) * 0x10001u : 0;
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 part = 0; part < Parts(); ++part) {
        MmaF16K16(bias_[rb], a, 0, a, 0, b[rb][part][0], b[rb][part][1]);
      }
    }
  }

  // What the output of a group has too much, of queries 2c + h.
  KVANT_DEVICE float TooMuch(i32 rb, i32 group, i32 h, float scale) const {
    const CodeFormat f = Format();
    const i32 c = LaneIndex() % 4;
    float less = 0.f;
    if (f.groups == 1) {
      if (ZeroRows()) less = bias_[rb][h] * (ZeroAsBits() ? scale / f.Unit() : scale);
      if (f.zero == Zero::kReal) {
        float real = real_[rb][h];
        KVANT_UNROLL
        for (i32 mask = 4; mask < 32; mask *= 2) real += ShuffleXor(real, mask);
        less += real;
      }
      return less;
    }
    if (f.Bias() != 0 && f.zero != Zero::kInteger) {
      less = Shuffle(bias_[rb][h], group * 4 + c) / f.Unit();
    }
    if (ZeroMma()) {
      const i32 tokens = 8 / f.groups;
      KVANT_UNROLL
      for (i32 token = 0; token < MaxOf(tokens, 2); ++token) {
        const i32 row = token % tokens * f.groups + group;
        less += Shuffle(zero_[rb][h + token % 2 * 2], row * 4 + c);
      }
    }
    return less;
  }

  const CodebookWords entries_;
  u32 common_;  // what is to be taken off all codes
  float out_[kRowBlocks][kChannelTiles][4];
  float zero_[kRowBlocks][4], bias_[kRowBlocks][4], real_[kRowBlocks][2];
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CODES_VALUES_H_
