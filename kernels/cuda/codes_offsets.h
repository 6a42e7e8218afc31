// What codes of V have too much, zero points and bias: it is summed apart, and taken off at the
// end.
//
//   real, by row      in f32: every lane its own tokens; in groups too where they are f32
//   integer, by row   an mma with the zero point in all rows of A, B as for codes
//   real, in groups   an mma for all groups, channel by group: B is the probabilities alone, A has
//                     the zero point. The groups of U = 8 / groups tokens are rows of a block of A.
//                     Row block 2j is in A's rows 0 .. 7, 2j + 1 in rows 8 .. 15; only their own
//                     tokens' rows count.
//   integer and       an mma for each group with its B, of which row `group` counts: what a token
//   of bias, in groups   zeros adds is taken off to the last bit, whatever its scale
#ifndef KVANT_KERNELS_CUDA_CODES_OFFSETS_H_
#define KVANT_KERNELS_CUDA_CODES_OFFSETS_H_

#include "kvant/kernels/cuda/codes_keys.h"

namespace kvant::cuda {

template <class T>
class CodesOffsets {
 public:
  static constexpr i32 kRowBlocks = T::kMax.row_blocks;
  static constexpr i32 kParts = PartsOf(T::kMax);
  static constexpr i32 kTokenTiles = T::kMax.warp_tile / 8;
  using Scores = typename CodesKeys<T>::Scores;
  using RowZeros = u32[2][4];

  KVANT_DEVICE static CodeFormat Format() { return CodesRing<T>::Layout().v.format; }
  KVANT_DEVICE static i32 Parts() { return PartsOf(T::k); }
  KVANT_DEVICE static bool RealByMma() { return Format().RealByMma(Parts()); }

  // zero_point: what all tokens have in common.
  KVANT_DEVICE explicit CodesOffsets(float zero_point) {
    const float both = zero_point + static_cast<float>(Format().Bias());
    common_ = PackF16(both, both);
  }

  KVANT_DEVICE void Clear() {
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 e = 0; e < 4; ++e) {
        zero_[rb][e] = 0.f;
        KVANT_UNROLL
        for (i32 n = 0; n < Biases(); ++n) bias_[rb][n][e] = 0.f;
      }
      KVANT_UNROLL
      for (i32 n = 0; n < Format().groups; ++n) real_[rb][n][0] = real_[rb][n][1] = 0.f;
    }
  }
  // Those of queries 2c + h of row block rb times `factor`.
  KVANT_DEVICE void Shrink(i32 rb, i32 h, float factor) {
    KVANT_UNROLL
    for (i32 e = h; e < 4; e += 2) {
      zero_[rb][e] *= factor;
      KVANT_UNROLL
      for (i32 n = 0; n < Biases(); ++n) bias_[rb][n][e] *= factor;
    }
    KVANT_UNROLL
    for (i32 n = 0; n < Format().groups; ++n) real_[rb][n][h] *= factor;
  }

  // Row-wise zero points of the tokens of g' = 2c and 2c + 1.
  KVANT_DEVICE static void Load(SharedAddress stage, RowZeros& zeros) {
    const CodesLayout l = CodesRing<T>::Layout();
    KVANT_UNROLL
    for (i32 h = 0; h < 2; ++h) {
      const i32 row = LaneIndex() % 4 * 2 + h;
      l.LoadOfRow(stage + l.sides[3].offset, Format().ZeroBits(), row, zeros[h]);
    }
  }

  KVANT_DEVICE void AddRows(const RowZeros& zeros, i32 j,
                            const u32 (&b)[kRowBlocks][kParts][kTokenTiles]) {
    const CodeFormat f = Format();
    u32 a[2];
    KVANT_UNROLL
    for (i32 h = 0; h < 2; ++h) {
      if (f.zero != Zero::kInteger) {
        a[h] = f.common_zero ? common_ : static_cast<u32>(f.Bias()) * 0x10001u;
        continue;
      }
      // Two zero points of 4 bits share a byte.
      const i32 i = 2 * j + h, byte = f.ZeroBits() == 8 ? i : i / 2;
      const u32 x = Permute(zeros[0][byte / 4], zeros[1][byte / 4],
                            static_cast<u32>(0x0400 + 0x0101 * (byte % 4)));
      a[h] = ZeroPair(f.ZeroBits() == 8 ? x & 0x00ff00ffu : x >> (i % 2 * 4) & 0x000f000fu);
    }
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 part = 0; part < Parts(); ++part) {
        MmaF16K16(bias_[rb][0], a[0], a[0], a[1], a[1], b[rb][part][2 * j], b[rb][part][2 * j + 1]);
      }
    }
  }
  // What codes have too much in group g of tokens 2c, 2c + 1 of row block i.
  KVANT_DEVICE static u32 OfGroups(SharedAddress stage, i32 i) {
    const CodeFormat f = Format();
    if (f.zero != Zero::kInteger) return static_cast<u32>(f.Bias()) * 0x10001u;
    const CodesLayout l = CodesRing<T>::Layout();
    const i32 bits = f.ZeroBits(), group = MinOf(LaneIndex() / 4, f.groups - 1);
    const i32 at = l.Token(LaneIndex() % 4 * 2, i) * f.groups + group;
    const i32 of_lane = l.v.run * f.groups * bits / 8;  // from g' = 2c to 2c + 1
    const SharedAddress zeros = stage + l.sides[3].offset + at * bits / 8;
    const u32 pair = Permute(LoadShared8(zeros), LoadShared8(zeros + of_lane), 0x5410);
    return ZeroPair(bits == 8 ? pair : pair >> (at % 2 * 4) & 0x000f000fu);
  }

  KVANT_DEVICE void AddGroup(i32 group, const u32 (&zeros)[2],
                             const u32 (&b)[kRowBlocks][kParts][2]) {
    const bool mine = Separate() || LaneIndex() / 4 == group;
    const u32 x = mine ? zeros[0] : 0, y = mine ? zeros[1] : 0;
    const bool upper = Separate() && group % 2 == 1;
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      float(&sum)[4] = bias_[rb][Separate() ? group / 2 : 0];
      KVANT_UNROLL
      for (i32 part = 0; part < Parts(); ++part) {
        MmaF16K16(sum, upper ? 0 : x, upper ? x : 0, upper ? 0 : y, upper ? y : 0, b[rb][part][0],
                  b[rb][part][1]);
      }
    }
  }

  // Every lane those of its own tokens.
  KVANT_DEVICE void AddReals(SharedAddress stage, const Scores& probs) {
    const CodeFormat f = Format();
    const CodesLayout l = CodesRing<T>::Layout();
    const i32 bits = 2 * f.groups * f.ZeroBits();
    KVANT_UNROLL
    for (i32 j = 0; j < T::k.warp_tile / 16; ++j) {
      u32 zeros[16];
      const i32 token = l.Token(LaneIndex() / 4, 2 * j);
      LoadSharedBits(stage + l.sides[3].offset + static_cast<u32>(token * bits / 16), bits, zeros);
      KVANT_UNROLL
      for (i32 i = 0; i < 2 * f.groups; ++i) {
        const float zero = FloatAt(f.zero_type, zeros, i);
        KVANT_UNROLL
        for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
          KVANT_UNROLL
          for (i32 h = 0; h < 2; ++h) {
            float& sum = real_[rb][i % f.groups][h];
            sum = Fma(probs[rb][j][i / f.groups * 2 + h], zero, sum);
          }
        }
      }
    }
  }

  // normal: the power of two on scales. b: of unscaled probabilities.
  KVANT_DEVICE void AddRealGroups(SharedAddress stage, float normal, i32 j,
                                  const u32 (&b)[kRowBlocks][kParts][kTokenTiles]) {
    const i32 tokens = UnitTokens();
    u32 low = RealUnit(stage, normal, 2 * j / tokens), high = low;
    if (tokens == 1) high = RealUnit(stage, normal, 2 * j + 1);
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

  // What is to be taken off the sums of a group, of queries 2c + h.
  KVANT_DEVICE float OfCodes(i32 rb, i32 group, i32 h, float scale) const {
    const CodeFormat f = Format();
    if (!f.TakesOffSums()) return 0.f;
    float sum = bias_[rb][0][h];
    const i32 row = group * 4 + LaneIndex() % 4;
    if (f.groups > 1 && !Separate()) sum = Shuffle(sum, row);
    KVANT_UNROLL
    for (i32 n = 0; n < f.groups && Separate(); ++n) {
      const float own = Shuffle(bias_[rb][n / 2][h + n % 2 * 2], row);
      sum = n == group ? own : sum;
    }
    return sum * (ZeroAsBits() ? scale / f.Unit() : scale);
  }
  // Of real zero points. scale: what sums of scaled probabilities are multiplied with.
  KVANT_DEVICE float Real(i32 rb, i32 group, i32 h, float scale) const {
    if (Format().zero != Zero::kReal) return 0.f;
    return RealSum(rb, group, h) * (RealNormalised() ? scale : 1.f);
  }

 private:
  // Where registers are left, groups 2n and 2n + 1 have sums of their own, in A's rows 0 .. 7 and
  // 8 .. 15. Else all groups are in the same, each in its row.
  KVANT_DEVICE static bool Separate() {
    return Format().groups > 1 && Format().groups * T::k.row_blocks <= 4;
  }
  KVANT_DEVICE static i32 Biases() { return Separate() ? CeilDiv(Format().groups, 2) : 1; }
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

  // x: a zero point in each half.
  KVANT_DEVICE static u32 ZeroPair(u32 x) {
    if (!ZeroAsBits()) return ZeroNumber(x);
    return x ^ static_cast<u32>(Format().ZeroBias()) * 0x10001u;
  }

  // Tokens whose groups are the 8 rows of a block of A.
  KVANT_DEVICE static i32 UnitTokens() { return 8 / Format().groups; }
  // Whether real zero points go into f16 by the power of two of scales.
  KVANT_DEVICE static bool RealNormalised() {
    return RealByMma() && Format().zero_type == kBFloat16;
  }

  // The real zero point of element g of the `unit`-th UnitTokens() of each of the lanes g' = 2c and
  // 2c + 1.
  KVANT_DEVICE static u32 RealUnit(SharedAddress stage, float normal, i32 unit) {
    const CodeFormat f = Format();
    const CodesLayout l = CodesRing<T>::Layout();
    const i32 c = LaneIndex() % 4, of_run = l.v.run * f.groups;
    // The lanes' g are more than elements where a tile is small, or not all rows are needed.
    const i32 g = MinOf(LaneIndex() / 4, MinOf(UnitTokens() * f.groups, of_run) - 1);
    const i32 index = l.Token(2 * c, unit * UnitTokens()) * f.groups + g;
    const SharedAddress zeros = stage + l.sides[3].offset + index * f.ZeroBits() / 8;
    const u32 pair = Permute(LoadShared16(zeros), LoadShared16(zeros + of_run * 2), 0x5410);
    if (!RealNormalised()) return pair;
    return PackF16(BF16Low(pair) * normal, BF16High(pair) * normal);
  }

  KVANT_DEVICE float RealSum(i32 rb, i32 group, i32 h) const {
    const CodeFormat f = Format();
    float less = 0.f;
    if (!RealByMma()) {
      KVANT_UNROLL
      for (i32 n = 0; n < f.groups; ++n) {
        float sum = real_[rb][n][h];
        KVANT_UNROLL
        for (i32 mask = 4; mask < 32; mask *= 2) sum += ShuffleXor(sum, mask);
        less = n == group ? sum : less;
      }
      return less;
    }
    const i32 tokens = UnitTokens();
    KVANT_UNROLL
    for (i32 token = 0; token < MaxOf(tokens, 2); ++token) {
      const i32 row = token % tokens * f.groups + group;
      less += Shuffle(zero_[rb][h + token % 2 * 2], row * 4 + LaneIndex() % 4);
    }
    return less;
  }

  u32 common_;  // what is to be taken off all codes
  float zero_[kRowBlocks][4], bias_[kRowBlocks][2][4], real_[kRowBlocks][kMaxGroups][2];
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CODES_OFFSETS_H_
