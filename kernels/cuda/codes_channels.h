// Scores where K has a scale, and maybe a zero point, for each channel of some tokens, which a tile
// is within. They differ along what is contracted, so they go on the queries, tile by tile:
//
//   q . k = sum over channels of code (s q)  -  sum over channels of zero (s q)       integer zeros
//           sum over channels of code (s q)  -  sum over channels of zero q           real ones
//
// s q is two f16, the product and what it leaves, so that no more is lost than by scales in f32.
// The second sum is that of one more token, whose codes are the zero points: its word is in all
// rows of A, and C has the sum in all of them. What signed codes have too much is such a token as
// well. Words of real ones are A as they lie side by side, without a copy: of four, rows 0 .. 7
// have the first and third, rows 8 .. 15 the second and fourth, each with a B and a C of its own,
// whose other rows do not count.
//
// Scales that are not f16, and real zero points with them, are normalised by a power of two, which
// brings the largest of a warp's first tile to 8 .. 16. Queries leave room in f16 for scales 8
// times as large as those of the first tile.
#ifndef KVANT_KERNELS_CUDA_CODES_CHANNELS_H_
#define KVANT_KERNELS_CUDA_CODES_CHANNELS_H_

#include "kvant/kernels/cuda/codes_queries.h"

namespace kvant::cuda {

template <class T>
class CodesChannels {
 public:
  static constexpr i32 kRowBlocks = T::kMax.row_blocks;
  static constexpr i32 kParts = PartsOf(T::kMax);
  static constexpr i32 kPairTiles = T::kMax.warp_tile / 16;
  using Sums = float[kRowBlocks][kPairTiles][4];

  // Before the first tile, which lies at `stage` where there is any. Returns the power of two that
  // queries are to be multiplied with.
  KVANT_DEVICE float Clear(SharedAddress stage, bool any) {
    largest_ = largest_zero_ = 0;
    normal_ = 1.f;
    if (any) See(stage);
    // Rounded down. Where there are only zeros, as in tokens that were never written, later scales
    // may be anything.
    const float largest = Largest();
    const i32 exponent = largest > 0.f ? static_cast<i32>(AsBits(largest) >> 23) - 127 : -3;
    if (Format().scale_type != kFloat16) {
      normal_ = AsFloat(static_cast<u32>(127 + MaxOf(-100, MinOf(100, 3 - exponent))) << 23);
      room_ = 0x1p-6f;
    } else {
      room_ = AsFloat(static_cast<u32>(127 - MaxOf(0, exponent + 3)) << 23);
    }
    largest_ = largest_zero_ = 0;
    return room_;
  }
  // What scales are multiplied with.
  KVANT_DEVICE float Normal() const { return normal_; }
  // What f16, and sums of f32, lose of scores, in the units of Multiply; code: the largest.
  // Infinity where queries times scales, or zero points, may be beyond f16.
  KVANT_DEVICE float Lost(float code) const {
    const CodeFormat f = Format();
    const float of_scale = f.scale_type == kFloat16 ? 0.f : 0x1p-25f;
    const float largest = Largest();  // by all lanes, before any returns
    const float of_sums = TakesOff() || f.zero == Zero::kReal ? largest * 0x1p-24f : 0.f;
    const float of_product = code * f.Factor(f.PairsPerWord() - 1) * 0x1p-21f;
    if (!(largest * CodesQueries<T>::kSum * room_ < 65504.f)) return Infinity();
    if (!(AsFloat(largest_zero_) * normal_ < 65504.f)) return Infinity();
    return code * CodesQueries<T>::kSum * room_ * (of_scale + of_sums) +
           of_product * (1.f + largest);
  }

  // sums[rb][j]: of row blocks 2j and 2j + 1 of tokens, in units of codes times normalised scales.
  // at: the lane's matrix row in the stage's K; stage: where the stage begins.
  KVANT_DEVICE void Multiply(const CodesQueries<T>& queries, const CodebookTable& table,
                             SharedAddress at, SharedAddress stage, u32& nan_marks, Sums& sums) {
    See(stage);
    KVANT_UNROLL
    for (i32 first = 0; first < T::k.warp_tile / 16; first += Pairs16()) {
      MultiplyGroup(queries, table, at, stage, first, nan_marks, sums);
    }
  }

 private:
  static constexpr i32 kMostPairs = 8;  // of a word, of 2 bits
  // The lane's channels of a chunk.
  using Floats = float[2 * kMostPairs];
  using Pairs = u32[kParts][kMostPairs];

  KVANT_DEVICE static CodeFormat Format() { return CodesRing<T>::Layout().k.format; }
  // 16 tokens each, of a group or of the tile.
  KVANT_DEVICE static i32 Pairs16() { return CodesRing<T>::Layout().k.run / 2; }
  KVANT_DEVICE static i32 Parts() { return PartsOf(T::k); }
  KVANT_DEVICE static i32 Count() { return Format().ChunkCodes() / 4; }
  KVANT_DEVICE static bool TakesOff() {
    return Format().zero == Zero::kInteger || Format().Bias() != 0;
  }
  KVANT_DEVICE static SharedAddress Side(SharedAddress stage, i32 side) {
    return stage + static_cast<u32>(CodesRing<T>::Layout().sides[side].offset);
  }
  // The lane's first channel of chunk m; another one's where there is none, whose queries are 0.
  KVANT_DEVICE static i32 Channel(i32 m) {
    return MinOf((m * 4 + LaneIndex() % 4) * Count(), T::k.head_size - Count());
  }

  // The largest of the tile's scales, and of zero points that f16 may not hold: each lane looks at
  // its share.
  KVANT_DEVICE void See(SharedAddress stage) {
    const CodeFormat f = Format();
    See(f.scale_type, Side(stage, 0), largest_);
    if (f.zero == Zero::kReal && f.zero_type != kFloat16) {
      See(f.zero_type, Side(stage, 2), largest_zero_);
    }
  }
  KVANT_DEVICE static void See(i32 type, SharedAddress side, u32& largest) {
    const i32 rows = T::k.warp_tile / (Pairs16() * 16);
    const i32 words = rows * T::k.head_size * BitsOf(type) / 32;
    KVANT_UNROLL
    for (i32 i = 0; i < CeilDiv(words, 32); ++i) {
      const i32 at = MinOf(i * 32 + LaneIndex(), words - 1);
      const u32 word[1] = {LoadShared32(side + static_cast<u32>(at * 4))};
      if (type == kFloat16) {
        largest = MaxAbsF16x2(largest, word[0]);
      } else {
        KVANT_UNROLL
        for (i32 e = 0; e < 32 / BitsOf(type); ++e) {
          largest = AsBits(Max(AsFloat(largest), Abs(FloatAt(type, word, e))));
        }
      }
    }
  }
  // Of all lanes' shares, normalised.
  KVANT_DEVICE float Largest() const {
    float largest = AsFloat(largest_);
    if (Format().scale_type == kFloat16) largest = Max(F16Low(largest_), F16High(largest_));
    KVANT_UNROLL
    for (i32 mask = 1; mask < 32; mask *= 2) largest = Max(largest, ShuffleXor(largest, mask));
    return largest * normal_;
  }

  // Elements as words, as they are stored.
  KVANT_DEVICE static void LoadWords(i32 bits, SharedAddress side, i32 m, u32 (&words)[16]) {
    LoadSharedBits(side + static_cast<u32>(Channel(m) * bits / 8), Count() * bits, words);
  }
  KVANT_DEVICE static void LoadFloats(i32 type, SharedAddress side, i32 m, Floats& values) {
    u32 words[16];
    LoadWords(BitsOf(type), side, m, words);
    KVANT_UNROLL
    for (i32 i = 0; i < Count(); ++i) values[i] = FloatAt(type, words, i);
  }
  // Normalised floats as operands: of two channels side by side, or by pairs of K's codes.
  KVANT_DEVICE void LoadPairs(i32 type, SharedAddress side, i32 m, bool side_by_side,
                              Pairs& pairs) const {
    const CodeFormat f = Format();
    const i32 half = Count() / 2;
    if (type == kFloat16 && f.scale_type == kFloat16) {
      u32 words[16];
      LoadWords(16, side, m, words);
      KVANT_UNROLL
      for (i32 i = 0; i < half; ++i) {
        const u32 apart =
            Permute(words[i / 2], words[(i + half) / 2], i % 2 == 0 ? 0x5410 : 0x7632);
        pairs[0][i] = side_by_side ? words[i] : apart;
        if (Parts() == 2) pairs[1 % kParts][i] = 0;
      }
      return;
    }
    Floats values;
    LoadFloats(type, side, m, values);
    KVANT_UNROLL
    for (i32 i = 0; i < half; ++i) {
      u32 words[kParts];
      const i32 first = side_by_side ? 2 * i : f.FirstOfPair(i);
      const i32 second = side_by_side ? 2 * i + 1 : f.SecondOfPair(i);
      PackParts(Parts(), values[first] * normal_, values[second] * normal_, words);
      KVANT_UNROLL
      for (i32 part = 0; part < Parts(); ++part) pairs[part][i] = words[part];
    }
  }

  // What is to be taken off codes, times their pair's factor: integer zero points, and the bias.
  KVANT_DEVICE static void LoadZeros(SharedAddress side, i32 m, u32 (&pairs)[kMostPairs]) {
    const CodeFormat f = Format();
    const i32 half = Count() / 2;
    u32 words[16];
    if (f.zero == Zero::kInteger) LoadWords(f.ZeroBits(), side, m, words);
    KVANT_UNROLL
    for (i32 i = 0; i < half; ++i) {
      const float factor = f.Factor(i);
      if (f.zero != Zero::kInteger) {
        const float bias = static_cast<float>(f.Bias()) * factor;
        pairs[i] = PackF16(bias, bias);
        continue;
      }
      // As an f16 its bits are 1024 and the zero point.
      const float off = static_cast<float>(f.Bias() - f.ZeroBias() - 1024);
      const u32 flip = static_cast<u32>(f.ZeroBias()) * 0x10001u;
      pairs[i] = AddF16x2(ZeroBits(words, i) ^ flip, PackF16(off, off));
      if (factor != 1.f) pairs[i] = MultiplyF16x2(pairs[i], PackF16(factor, factor));
    }
  }
  // Zero points i and i + Count() / 2 of the lane's words.
  KVANT_DEVICE static u32 ZeroBits(const u32 (&words)[16], i32 i) {
    const i32 half = Count() / 2, bits = Format().ZeroBits();
    const auto at = static_cast<u32>(i);
    if (bits == 8 && half == 2) return Permute(words[0], 0x64, 0x4240 + at * 0x101);
    if (bits == 8) {
      const u32 both = Permute(words[i / 4], words[(i + half) / 4], 0x400 + at % 4 * 0x101);
      return AndOr(both, 0x00ff00ffu, 0x64006400u);
    }
    const u32 word = half == 2   ? Permute(words[0], 0, 0x100)
                     : half == 4 ? words[0] >> (i / 2 * 8)
                                 : Permute(words[0], words[1], 0x400 + at / 2 * 0x101);
    return AndOr(word >> (i % 2 * 4), 0x000f000fu, 0x64006400u);
  }

  // Of one group: row blocks from 2 * first on.
  KVANT_DEVICE void MultiplyGroup(const CodesQueries<T>& queries, const CodebookTable& table,
                                  SharedAddress at, SharedAddress stage, i32 first, u32& nan_marks,
                                  Sums& sums) const {
    const CodeFormat f = Format();
    float zero[kRowBlocks][4] = {};
    float real[kRowBlocks][2][4] = {};  // of rows 0 .. 7, and of rows 8 .. 15
    u32 low[kPairTiles][4], high[kPairTiles][4];
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 j = 0; j < Pairs16(); ++j) {
        KVANT_UNROLL
        for (i32 e = 0; e < 4; ++e) sums[rb][first + j][e] = 0.f;
      }
    }
    KVANT_UNROLL
    for (i32 m = 0; m < f.Chunks(); ++m) {
      KVANT_UNROLL
      for (i32 j = 0; j < Pairs16() && m % 4 == 0; ++j) {
        CodesRing<T>::Layout().k.LoadFour(at, first + j, m, false, low[j], high[j]);
        f.MarkNan(low[j], MinOf(4, f.Chunks() - m), nan_marks);
        f.MarkNan(high[j], MinOf(4, f.Chunks() - m), nan_marks);
      }
      MultiplyChunk(queries, table, stage, m, first, low, high, sums, zero, real);
    }
    if (!TakesOff() && f.zero != Zero::kReal) return;
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 j = 0; j < Pairs16(); ++j) {
        KVANT_UNROLL
        for (i32 e = 0; e < 4; ++e) {
          float off = zero[rb][e];
          if (f.zero == Zero::kReal) {
            const float both = real[rb][0][e % 2] + real[rb][1][2 + e % 2];
            off = TakesOff() ? off + both : both;
          }
          sums[rb][first + j][e] = Fma(-f.Unit(), off, sums[rb][first + j][e]);
        }
      }
    }
  }

  KVANT_DEVICE void MultiplyChunk(const CodesQueries<T>& queries, const CodebookTable& table,
                                  SharedAddress stage, i32 m, i32 first,
                                  const u32 (&low)[kPairTiles][4], const u32 (&high)[kPairTiles][4],
                                  Sums& sums, float (&zero)[kRowBlocks][4],
                                  float (&real)[kRowBlocks][2][4]) const {
    const CodeFormat f = Format();
    const CodesLayout l = CodesRing<T>::Layout();
    const i32 row = first / Pairs16();
    const SharedAddress of_scales = Side(stage, 0) + static_cast<u32>(row * l.sides[0].bits / 8);
    const SharedAddress of_zeros = Side(stage, 2) + static_cast<u32>(row * l.sides[2].bits / 8);
    Pairs scales;
    u32 zeros[kMostPairs];
    LoadPairs(f.scale_type, of_scales, m, f.SideBySide(), scales);
    if (TakesOff()) LoadZeros(of_zeros, m, zeros);
    if (f.zero == Zero::kReal) AddReals(queries, of_zeros, m, real);
    KVANT_UNROLL
    for (i32 i = 0; i < f.PairsPerWord(); i += 2) {
      const i32 q = m * f.PairsPerWord() + i;
      u32 product[kRowBlocks][2], rest[kRowBlocks][2];
      KVANT_UNROLL
      for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
        KVANT_UNROLL
        for (i32 h = 0; h < 2; ++h) {
          const u32 query = queries.Word(rb, 0, q + h), scale = scales[0][i + h];
          u32& x = product[rb][h];
          x = MultiplyF16x2(query, scale);
          rest[rb][h] = FmsF16x2(query, scale, x);
          if (Parts() == 1) continue;
          rest[rb][h] = FmaF16x2(query, scales[1 % kParts][i + h], rest[rb][h]);
          rest[rb][h] = FmaF16x2(queries.Word(rb, 1 % kParts, q + h), scale, rest[rb][h]);
        }
        if (!TakesOff()) continue;
        MmaF16K16(zero[rb], zeros[i], zeros[i], zeros[i + 1], zeros[i + 1], product[rb][0],
                  product[rb][1]);
        MmaF16K16(zero[rb], zeros[i], zeros[i], zeros[i + 1], zeros[i + 1], rest[rb][0],
                  rest[rb][1]);
      }
      KVANT_UNROLL
      for (i32 j = 0; j < Pairs16(); ++j) {
        const i32 in_four = m % 4 * f.PairsPerWord() + i;
        u32 a[2], b[2];  // of row blocks 2j and 2j + 1
        f.UnpackKeys(low[j], in_four, table, a);
        f.UnpackKeys(high[j], in_four, table, b);
        KVANT_UNROLL
        for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
          float(&sum)[4] = sums[rb][first + j];
          MmaF16K16(sum, a[0], b[0], a[1], b[1], product[rb][0], product[rb][1]);
          MmaF16K16(sum, a[0], b[0], a[1], b[1], rest[rb][0], rest[rb][1]);
        }
      }
    }
  }
  // Of chunk m.
  KVANT_DEVICE void AddReals(const CodesQueries<T>& queries, SharedAddress of_zeros, i32 m,
                             float (&real)[kRowBlocks][2][4]) const {
    const i32 pairs = Format().PairsPerWord(), first = m * pairs;
    Pairs reals;
    LoadPairs(Format().zero_type, of_zeros, m, CodesQueries<T>::PlainSideBySide(), reals);
    KVANT_UNROLL
    for (i32 part = 0; part < Parts(); ++part) {
      const u32(&a)[kMostPairs] = reals[part];
      KVANT_UNROLL
      for (i32 of_query = 0; of_query < Parts() - part; ++of_query) {
        KVANT_UNROLL
        for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
          const auto query = [&](i32 i) { return queries.PlainWord(rb, of_query, first + i); };
          KVANT_UNROLL
          for (i32 h = 0; h < 2; ++h) {
            if (pairs == 2) MmaF16K8(real[rb][h], a[0], a[1], query(h));
            KVANT_UNROLL
            for (i32 i = 0; i + 4 <= pairs; i += 4) {
              MmaF16K16(real[rb][h], a[i], a[i + 1], a[i + 2], a[i + 3], query(i + h),
                        query(i + 2 + h));
            }
          }
        }
      }
    }
  }

  float normal_, room_;  // on scales; on queries
  // Of what the lane has seen: two f16 where scales are, else as f32.
  u32 largest_, largest_zero_;
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CODES_CHANNELS_H_
