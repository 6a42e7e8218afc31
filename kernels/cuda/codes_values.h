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
//   real, in groups   an mma for all groups, channel by group: B is the probabilities alone, A has
//                     the zero point. Tokens and groups of 16 bytes of scales are the 8 rows of a
//                     block of A: U = 8 / groups tokens. Row block 2j is in A's rows 0 .. 7, 2j + 1
//                     in rows 8 .. 15; only their own tokens' rows count.
//   integer and       an mma for each group with its B, which A takes to row `group`: what a token
//   bias, in groups   of zeros adds is taken off to the last bit, whatever its scale
//
// Scales are normalised: by a power of two, those of a warp's first tile are about 1, so that f16
// has room for the larger and bits for the smaller.
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

  // Of powers of two on scales: in f16, and in f32.
  static constexpr i32 kMostExponent = 15, kLeastExponent = -14, kFarExponent = 40;

  // zero_point: what all tokens have in common.
  KVANT_DEVICE CodesValues(const AttentionParams& p, float zero_point)
      : entries_(CodebookWords::Of(T::k.v[0], p.v[0])) {
    const float both = zero_point + static_cast<float>(Format().Bias());
    common_ = PackF16(both, both);
  }

  // The exponent of a power of two that brings scales to about 1: those of the first tile, by their
  // geometric mean. first: the stage; tokens: that are in it.
  KVANT_DEVICE static i32 NormalExponent(SharedAddress first, i32 tokens) {
    const CodeFormat f = Format();
    if (f.scale_type == kNone || tokens <= 0) return 0;
    const i32 count = MinOf(tokens, T::k.warp_tile) * f.groups;
    const i32 bytes = f.ScaleBytes(), index = LaneIndex() * count / 32;
    const SharedAddress at =
        first + static_cast<u32>(CodesRing<T>::Layout().sides[1].offset + index * bytes);
    const float scale =
        bytes == 4 ? LoadSharedFloat(at) : CodeToFloat(f.scale_type, LoadShared16(at));
    i32 exponent = static_cast<i32>(AsBits(scale) >> 23 & 255) - 127;
    exponent = MaxOf(-kFarExponent, MinOf(kFarExponent, exponent));
    KVANT_UNROLL
    for (i32 mask = 1; mask < 32; mask *= 2) {
      exponent += static_cast<i32>(ShuffleXor(static_cast<u32>(exponent), mask));
    }
    return -exponent / 32;
  }

  // exponent: of the power of two by which scales are normalised.
  KVANT_DEVICE void Clear(i32 exponent) {
    const bool in_f16 = Format().scale_type == kFloat16;
    if (in_f16) exponent = MaxOf(kLeastExponent, MinOf(kMostExponent, exponent));
    const float power = AsFloat(static_cast<u32>(127 + exponent) << 23);
    normal_ = in_f16 ? PackF16(power, power) : AsBits(power);
    nan_marks_ = 0;
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
      Normalise(n, scales);
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
        if (f.groups > 1 && !RealByMma()) continue;
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
      f.MarkNan(low, nan_marks_);
      f.MarkNan(high, nan_marks_);
      if (f.groups == 1) {
        if (f.TakesOffSums()) AddZeroRows(bytes, j, columns);
        MultiplyGroup(0, low, high, columns, 2 * j);
      } else {
        if (RealByMma()) AddRealGroups(stage, j, columns);
        u32 zeros[2];
        KVANT_UNROLL
        for (i32 b = 0; b < 2; ++b) zeros[b] = GroupZeros(stage, 2 * j + b);
        const i32 bytes_of_two = 2 * f.groups * f.ScaleBytes();
        u32 pair[16];
        LoadSharedWords(stage + l.sides[1].offset + (g * (n / 2) + j) * bytes_of_two,
                        bytes_of_two / 4, pair);
        Normalise(2 * f.groups, pair);
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
          if (f.TakesOffSums()) AddGroupZeros(group, zeros, b);
          MultiplyGroup(group, low, high, b, 0);
        }
      }
    }
  }

  // Makes the output of sums: what codes have too much is taken off, and a scale that all tokens
  // have in common multiplied to it. Whether it may have lost more than `limit` of itself (of a
  // row, L2), as it does where f16 overflows: of weights of up to `tokens` tokens 2^-25 each, and
  // 2^-24 of sums that cancel. any: rows that have seen a token.
  KVANT_DEVICE bool Complete(float scale, i32 tokens, const bool (&any)[kRowBlocks][2],
                             float limit) {
    const CodeFormat f = Format();
    const float power = f.scale_type == kFloat16 ? F16Low(normal_) : AsFloat(normal_);
    scale = Divide(scale, power);
    // Roundings add up like random numbers, but for those of a few.
    const float count = static_cast<float>(MaxOf(MinOf(tokens, 64), tokens / 64));
    const float of_weights = count * f.LargestCode() * scale * 0x1p-25f;
    bool loses = CodeFormat::HasNan(nan_marks_);
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 h = 0; h < 2; ++h) {
        float squares = 0.f, taken = 0.f;
        KVANT_UNROLL
        for (i32 group = 0; group < f.groups; ++group) {
          const float off = OffSums(rb, group, h, scale);
          const float less = Fma(RealZero(rb, group, h), RealNormalised() ? scale : 1.f, off);
          taken = Max(taken, Abs(off));
          KVANT_UNROLL
          for (i32 s = group * f.PairsPerGroup() / 2; s < (group + 1) * f.PairsPerGroup() / 2;
               ++s) {
            KVANT_UNROLL
            for (i32 b = 0; b < 2; ++b) {
              float& out = out_[rb][s][h + 2 * b];
              out = Fma(out, scale / f.Unit() / f.Factor(2 * s + b), -less);
              squares = Fma(out, out, squares);
            }
          }
        }
        KVANT_UNROLL
        for (i32 mask = 4; mask < 32; mask *= 2) squares += ShuffleXor(squares, mask);
        const float error = Fma(taken, 0x1p-23f, Abs(of_weights));
        // A sum that is not finite loses, too.
        const float channels = static_cast<float>(T::k.v_head_size);
        const float allowed = limit * limit * squares;
        const bool keeps = error * error * channels <= allowed && allowed < Infinity();
        loses |= any[rb][h] && !keeps;
      }
    }
    return loses;
  }

  // Stores the completed output as [8 rb + 2c + h][channel].
  KVANT_DEVICE void Store(SharedAddress rows) const {
    const CodeFormat f = Format();
    const i32 g = LaneIndex() / 4, c = LaneIndex() % 4;
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 s = 0; s < T::k.v_head_size / 16; ++s) {
        KVANT_UNROLL
        for (i32 h = 0; h < 2; ++h) {
          const u32 low = AsBits(out_[rb][s][h]), high = AsBits(out_[rb][s][h + 2]);
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

 private:
  static constexpr i32 kTokenTiles = T::kMax.warp_tile / 8;
  static constexpr i32 kWords = T::kMax.v_head_size / 8;

  KVANT_DEVICE static i32 Parts() { return PartsOf(T::k); }
  KVANT_DEVICE static void Zero4(float (&c)[4]) {
    KVANT_UNROLL
    for (i32 e = 0; e < 4; ++e) c[e] = 0.f;
  }
  KVANT_DEVICE static bool RealByMma() {
    return Format().groups > 1 && Format().zero == Zero::kReal;
  }

  // Of words of `count` scales.
  template <i32 kScales>
  KVANT_DEVICE void Normalise(i32 count, u32 (&scales)[kScales]) const {
    if (Format().scale_type != kFloat16) return;
    KVANT_UNROLL
    for (i32 i = 0; i < count / 2; ++i) scales[i] = MultiplyF16x2(scales[i], normal_);
  }

  // Probabilities (in f32, and packed) times scale `index`.
  template <i32 kScales>
  KVANT_DEVICE void Scaled(float x0, float x1, u32 packed, const u32 (&scales)[kScales], i32 index,
                           u32 (&words)[kParts]) const {
    const CodeFormat f = Format();
    if (f.scale_type == kFloat16 && Parts() == 1) {
      words[0] = index % 2 == 0 ? MultiplyByLowF16(packed, scales[index / 2])
                                : MultiplyByHighF16(packed, scales[index / 2]);
      return;
    }
    float scale = f.scale_type == kNone ? 1.f : FloatAt(f.scale_type, scales, index);
    if (f.scale_type == kFloat32 || f.scale_type == kBFloat16) scale *= AsFloat(normal_);
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
    LoadSharedWords(stage + CodesRing<T>::Layout().sides[3].offset + g * n * f.ZeroBits() / 8,
                    n * f.ZeroBits() / 32, zeros);
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

  // Whether zero points come with the same bias as codes, and so may stay subnormal.
  KVANT_DEVICE static bool ZeroAsBits() {
    const CodeFormat f = Format();
    return f.subnormal && !f.common_zero && (f.zero != Zero::kInteger || f.ZeroBias() == f.Bias());
  }
  // Zero points, one in each half, as what is to be taken off codes.
  KVANT_DEVICE static u32 ZeroNumber(u32 x) {
    const CodeFormat f = Format();
    const u32 flip = 0x64006400u + static_cast<u32>(f.ZeroBias()) * 0x10001u;
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
      a[h] = ZeroPair(x & 0x00ff00ffu);
    }
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 part = 0; part < Parts(); ++part) {
        MmaF16K16(bias_[rb], a[0], a[0], a[1], a[1], b[rb][part][2 * j], b[rb][part][2 * j + 1]);
      }
    }
  }
  // x: a zero point in each half.
  KVANT_DEVICE static u32 ZeroPair(u32 x) {
    if (!ZeroAsBits()) return ZeroNumber(x);
    return x ^ static_cast<u32>(Format().ZeroBias()) * 0x10001u;
  }

  // Whether real zero points go into f16 by the power of two of scales.
  KVANT_DEVICE static bool RealNormalised() {
    return RealByMma() && Format().zero_type == kBFloat16;
  }

  // The real zero point of element g of the `unit`-th 16 bytes of scales of the tokens of g' = 2c
  // and 2c + 1.
  KVANT_DEVICE u32 RealUnit(SharedAddress stage, i32 unit) const {
    const CodeFormat f = Format();
    const CodesLayout l = CodesRing<T>::Layout();
    const i32 n = T::k.warp_tile / 8, c = LaneIndex() % 4, of_token = n * f.groups;
    // The lanes' g are more than elements where a tile is small.
    const i32 g = LaneIndex() / 4 % MinOf(8, of_token);
    const i32 index = 2 * c * of_token + unit * 8 + g;
    const SharedAddress zeros = stage + l.sides[3].offset + index * f.ZeroBits() / 8;
    const u32 pair = Permute(LoadShared16(zeros), LoadShared16(zeros + of_token * 2), 0x5410);
    if (!RealNormalised()) return pair;
    return PackF16(BF16Low(pair) * AsFloat(normal_), BF16High(pair) * AsFloat(normal_));
  }

  KVANT_DEVICE void AddRealGroups(SharedAddress stage, i32 j,
                                  const u32 (&b)[kRowBlocks][kParts][kTokenTiles]) {
    const i32 tokens = 8 / Format().groups;  // of a unit
    u32 low = RealUnit(stage, 2 * j / tokens), high = low;
    if (tokens == 1) high = RealUnit(stage, 2 * j + 1);
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

  // What codes have too much in group g of tokens 2c, 2c + 1 of row block i.
  KVANT_DEVICE static u32 GroupZeros(SharedAddress stage, i32 i) {
    const CodeFormat f = Format();
    if (f.zero != Zero::kInteger) return static_cast<u32>(f.Bias()) * 0x10001u;
    const i32 n = T::k.warp_tile / 8, g = LaneIndex() / 4 % f.groups, c = LaneIndex() % 4;
    const i32 bits = f.ZeroBits(), of_token = n * f.groups * bits / 8;
    const SharedAddress zeros = stage + CodesRing<T>::Layout().sides[3].offset + 2 * c * of_token +
                                (i * f.groups + g) * bits / 8;
    const u32 pair = Permute(LoadShared8(zeros), LoadShared8(zeros + of_token), 0x5410);
    return ZeroPair(bits == 8 ? pair : pair >> (g % 2 * 4) & 0x000f000fu);
  }

  KVANT_DEVICE void AddGroupZeros(i32 group, const u32 (&zeros)[2],
                                  const u32 (&b)[kRowBlocks][kParts][2]) {
    const bool mine = LaneIndex() / 4 == group;
    const u32 low = mine ? zeros[0] : 0, high = mine ? zeros[1] : 0;
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 part = 0; part < Parts(); ++part) {
        MmaF16K16(bias_[rb], low, 0, high, 0, b[rb][part][0], b[rb][part][1]);
      }
    }
  }

  // What is to be taken off the sums of a group, of queries 2c + h.
  KVANT_DEVICE float OffSums(i32 rb, i32 group, i32 h, float scale) const {
    const CodeFormat f = Format();
    if (!f.TakesOffSums()) return 0.f;
    const float sum =
        f.groups == 1 ? bias_[rb][h] : Shuffle(bias_[rb][h], group * 4 + LaneIndex() % 4);
    return sum * (ZeroAsBits() ? scale / f.Unit() : scale);
  }
  KVANT_DEVICE float RealZero(i32 rb, i32 group, i32 h) const {
    const CodeFormat f = Format();
    if (f.zero != Zero::kReal) return 0.f;
    float less = 0.f;
    if (f.groups == 1) {
      less = real_[rb][h];
      KVANT_UNROLL
      for (i32 mask = 4; mask < 32; mask *= 2) less += ShuffleXor(less, mask);
      return less;
    }
    const i32 tokens = 8 / f.groups;
    KVANT_UNROLL
    for (i32 token = 0; token < MaxOf(tokens, 2); ++token) {
      const i32 row = token % tokens * f.groups + group;
      less += Shuffle(zero_[rb][h + token % 2 * 2], row * 4 + LaneIndex() % 4);
    }
    return less;
  }

  const CodebookWords entries_;
  u32 common_;  // what is to be taken off all codes
  u32 normal_;  // the power of two on scales: twice as f16 where they are f16, else as f32
  u32 nan_marks_;
  float out_[kRowBlocks][kChannelTiles][4];
  float zero_[kRowBlocks][4], bias_[kRowBlocks][4], real_[kRowBlocks][2];
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CODES_VALUES_H_
