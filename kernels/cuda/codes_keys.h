// Scores of a warp's tile: K as packed codes is the A operand of the mma, 16 tokens; the queries
// are B, 8 rows a block. So all that differs between tokens stays with lanes' g.
//
//   C, one per 16 tokens (row blocks 2j, 2j + 1) and 8 rows of queries
//     registers 0, 1:  token N g + 2j,      queries 2c, 2c + 1
//     registers 2, 3:  token N g + 2j + 1,  queries 2c, 2c + 1
//
// A group of channels has an accumulator of its own, which the token's scale is multiplied to.
// Integer zero points are a few more columns of the contraction, of 8 slots: A has the token's zero
// point of group c in slots 2c, 2c + 1; B less the sum of the group's queries, in two f16.
#ifndef KVANT_KERNELS_CUDA_CODES_KEYS_H_
#define KVANT_KERNELS_CUDA_CODES_KEYS_H_

#include "kvant/kernels/cuda/codes_ring.h"
#include "kvant/kernels/cuda/finish.h"

namespace kvant::cuda {

// By f32, queries and probabilities go as the sum of two f16.
KVANT_DEVICE constexpr i32 PartsOf(const AttentionTraits& t) {
  return t.arithmetic == kByF32 ? 2 : 1;
}

// The words of two floats: the second has what the first leaves.
template <i32 kParts>
KVANT_DEVICE void PackParts(i32 parts, float lo, float hi, u32 (&words)[kParts]) {
  words[0] = PackF16(lo, hi);
  if (parts == 2) words[1 % kParts] = PackF16(lo - F16Low(words[0]), hi - F16High(words[0]));
}

inline constexpr i32 kMaxGroups = 8;

template <class T>
class CodesKeys {
 public:
  static constexpr i32 kRowBlocks = T::kMax.row_blocks;
  static constexpr i32 kPairTiles = T::kMax.warp_tile / 16;  // of row blocks
  static constexpr i32 kParts = PartsOf(T::kMax);
  using Scores = float[kRowBlocks][kPairTiles][4];

  KVANT_DEVICE static CodeTile Tile() { return CodesRing<T>::Layout().k; }
  KVANT_DEVICE static CodeFormat Format() { return Tile().format; }

  // multiplier: of the scores. rotated: where rotated queries lie, if there are any.
  KVANT_DEVICE CodesKeys(const AttentionParams& p, const BlockRows& block, float multiplier,
                         const CommonParameters& common, SharedAddress rotated)
      : entries_(CodebookWords::Of(T::k.k[0], p.k[0])),
        largest_scale_(Format().scale_type == kNone ? 1.f : 0.f) {
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      const float guard = Guard(p, block, rb, rotated);
      float own[2];  // multipliers of queries 2c and 2c + 1, which lanes 8c and 8c + 4 have
      KVANT_UNROLL
      for (i32 h = 0; h < 2; ++h) {
        own[h] = multiplier / Shuffle(guard, LaneIndex() % 4 * 8 + 4 * h);
        multiplier_[rb][h] = own[h] * common.scale / Format().Unit();
      }
      float sums[kMaxGroups];
      LoadQueries(p, block, rb, rotated, guard, sums);
      KeepSums(rb, sums, own, common.zero_point);
    }
  }

  // scores = multiplier * Q K + add. at: the lane's matrix row in the stage's K; stage: where the
  // stage begins.
  KVANT_DEVICE void Multiply(SharedAddress at, SharedAddress stage,
                             const float (&add)[kRowBlocks][2], Scores& scores) {
    const CodeFormat f = Format();
    const CodesLayout l = CodesRing<T>::Layout();
    const i32 n = T::k.warp_tile / 8, g = LaneIndex() / 4;
    u32 scales[8], zeros[8], bytes[4];
    const bool by_row = f.groups == 1;
    if (by_row && f.scale_type != kNone) {
      LoadSharedWords(stage + l.sides[0].offset + g * n * f.ScaleBytes(), n * f.ScaleBytes() / 4,
                      scales);
      SeeScales(scales, n);
    }
    if (by_row && f.zero == Zero::kReal) {
      LoadSharedWords(stage + l.sides[2].offset + g * n * f.ZeroBits() / 8, n * f.ZeroBits() / 32,
                      zeros);
    }
    if (by_row && f.zero == Zero::kInteger) LoadZeroBytes(stage + l.sides[2].offset, bytes);
    KVANT_UNROLL
    for (i32 j = 0; j < T::k.warp_tile / 16; ++j) {
      float sum[kRowBlocks][4];
      MultiplyPair(at, stage, j, bytes, sum);
      KVANT_UNROLL
      for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
        KVANT_UNROLL
        for (i32 e = 0; e < 4; ++e) {
          const i32 i = 2 * j + e / 2;
          const bool scaled = by_row && f.scale_type != kNone;
          const float multiplier = multiplier_[rb][e % 2];
          const float by = scaled ? FloatAt(f.scale_type, scales, i) * multiplier : multiplier;
          float to = add[rb][e % 2];
          if (by_row && f.zero == Zero::kReal) {
            to = Fma(FloatAt(f.zero_type, zeros, i), less_sum_[rb][e % 2], to);
          }
          scores[rb][j][e] = Fma(sum[rb][e], by, to);
        }
      }
    }
  }

  // Whether scores of the lane's tokens may be off by more than `limit`; by: what scores are
  // multiplied with once more. Sums are of magnitudes up to 2^15 times the codes' and lose 2^-24 of
  // themselves, where what codes have too much is taken off them; else f16 loses 2^-25 of a query.
  KVANT_DEVICE bool Loses(float by, float limit) const {
    const CodeFormat f = Format();
    const bool takes_off = f.TakesOffSums() || f.zero != Zero::kNone;
    const float of_sums = takes_off ? f.LargestCode() * 0x1p-9f : 0.f;
    const float of_queries = f.LargestCode() * f.Factor(f.PairsPerWord() - 1) * 0x1p-21f;
    const float of_f16 = Max(F16Low(largest_f16_), F16High(largest_f16_));
    const float largest = Max(largest_scale_, of_f16);
    const float of_scale = (of_sums + of_queries) * f.Unit() * largest * Abs(by);
    bool loses = CodeFormat::HasNan(nan_marks_);
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 h = 0; h < 2; ++h) loses |= of_scale * Abs(multiplier_[rb][h]) > limit;
    }
    return loses;
  }

 private:
  static constexpr i32 kPairs = T::kMax.head_size / 8;
  static constexpr i32 kWords = T::kMax.head_size / 8;  // of a row, at 16 bits

  // In groups, what all of a group's codes have too much goes by one mma for all groups: scales
  // times the bias, and real zero points.
  KVANT_DEVICE static bool BiasByScales() {
    const CodeFormat f = Format();
    return f.groups > 1 && f.zero != Zero::kInteger && f.Bias() != 0 && f.scale_type == kFloat16;
  }
  KVANT_DEVICE static bool RealByMma() {
    return Format().groups > 1 && Format().zero == Zero::kReal;
  }
  // They are no f16. Sums of queries go in three parts then, and lose as little.
  KVANT_DEVICE static bool ZerosInBF16() { return RealByMma() && Format().zero_type == kBFloat16; }
  KVANT_DEVICE static bool ZeroMma() { return Format().zero == Zero::kInteger; }
  // What is left to add to codes, times the sum of queries.
  KVANT_DEVICE static i32 Rest() {
    const CodeFormat f = Format();
    return BiasByScales() ? 0 : f.ZeroBias() - f.Bias();
  }

  // A power of two that brings the sum of magnitudes of query 8 rb + g to 2^14 .. 2^15: f16 neither
  // overflows, sums over a head included, nor is short of bits beside an outlier. Of each row its
  // own, so that queries of one head do not show in another.
  KVANT_DEVICE static float Guard(const AttentionParams& p, const BlockRows& block, i32 rb,
                                  SharedAddress rotated) {
    float sum = 0.f;
    KVANT_NO_UNROLL
    for (i32 m = 0; m < Format().Chunks(); ++m) {
      float x[16];
      LoadChunk(p, block, rb, m, rotated, x);
      KVANT_UNROLL
      for (i32 i = 0; i < Format().ChunkCodes() / 4; ++i) sum += Abs(x[i]);
    }
    sum += ShuffleXor(sum, 1);
    sum += ShuffleXor(sum, 2);
    const i32 exponent = MaxOf(static_cast<i32>(AsBits(sum) >> 23), 16);
    return AsFloat(static_cast<u32>(127 + 14 + 127 - exponent) << 23);
  }

  // The channels of chunk m that lane 4g + c has, of row 8 rb + g; zeros for rows beyond the last.
  KVANT_DEVICE static void LoadChunk(const AttentionParams& p, const BlockRows& block, i32 rb,
                                     i32 m, SharedAddress rotated, float (&x)[16]) {
    const i32 r = rb * 8 + LaneIndex() / 4, count = Format().ChunkCodes() / 4;
    const i32 d = (m * 4 + LaneIndex() % 4) * count;
    if (T::k.q_hadamard != 0) {
      KVANT_UNROLL
      for (i32 i = 0; i < count; ++i) {
        const i32 at = (r * T::k.head_size + d + i) * 4;
        x[i] = r < block.rows ? LoadSharedFloat(rotated + static_cast<u32>(at)) : 0.f;
      }
      return;
    }
    const i64 index = IndexOf(T::k.q.data, p.q.data, block.At(r), d);
    if (T::k.q.vectors && T::k.q.contiguous == kCol && count % 4 == 0) {
      KVANT_UNROLL
      for (i32 i = 0; i < count; i += 4) {
        float four[4];
        LoadFour(T::k.q.data.type, p.q.data.data, index + i, four);
        KVANT_UNROLL
        for (i32 e = 0; e < 4; ++e) x[i + e] = four[e];
      }
    } else {
      KVANT_UNROLL
      for (i32 i = 0; i < count; ++i) {
        x[i] = LoadElement(T::k.q.data.type, p.q.data.data, index + i * p.q.data.strides[kCol]);
      }
    }
    KVANT_UNROLL
    for (i32 i = 0; i < count; ++i) x[i] = r < block.rows ? x[i] : 0.f;
  }

  // Queries as B operands, and the sums of groups of row 8 rb + g, of what operands hold.
  KVANT_DEVICE void LoadQueries(const AttentionParams& p, const BlockRows& block, i32 rb,
                                SharedAddress rotated, float guard, float (&sums)[kMaxGroups]) {
    const CodeFormat f = Format();
    KVANT_UNROLL
    for (i32 n = 0; n < f.groups; ++n) sums[n] = 0.f;
    KVANT_UNROLL
    for (i32 m = 0; m < f.Chunks(); ++m) {
      float x[16];
      LoadChunk(p, block, rb, m, rotated, x);
      KVANT_UNROLL
      for (i32 i = 0; i < f.PairsPerWord(); ++i) {
        const i32 q = m * f.PairsPerWord() + i;
        const float by = guard / f.Factor(q);
        u32 words[kParts];
        PackParts(PartsOf(T::k), x[i] * by, x[i + f.ChunkCodes() / 8] * by, words);
        float held = 0.f;
        KVANT_UNROLL
        for (i32 part = 0; part < PartsOf(T::k); ++part) {
          queries_[rb][part][q] = words[part];
          held += F16Low(words[part]) + F16High(words[part]);
        }
        sums[q / f.PairsPerGroup()] += held * f.Factor(q);
      }
    }
    KVANT_UNROLL
    for (i32 n = 0; n < f.groups; ++n) {
      sums[n] += ShuffleXor(sums[n], 1);
      sums[n] += ShuffleXor(sums[n], 2);
    }
  }

  KVANT_DEVICE void KeepSums(i32 rb, const float (&sums)[kMaxGroups], const float (&multiplier)[2],
                             float zero_point) {
    const CodeFormat f = Format();
    const i32 c = LaneIndex() % 4;
    KVANT_UNROLL
    for (i32 n = 0; n < f.groups; ++n) {
      if (ZeroMma()) less_sum_slots_[rb][n] = c == n % 4 ? InTwo(-sums[n]) : 0;
      KVANT_UNROLL
      for (i32 h = 0; h < 2; ++h) {
        // Of queries 2c and 2c + 1, which lanes 8c and 8c + 4 have.
        const bool begins = Rest() != 0 || f.common_zero;
        const bool needed = begins || (f.zero == Zero::kReal && f.groups == 1);
        const float sum = needed ? Shuffle(sums[n], 8 * c + 4 * h) : 0.f;
        const float rest = static_cast<float>(Rest()) - zero_point;
        first_[rb][n][h] = begins ? rest * f.Unit() * sum : 0.f;
        if (f.groups == 1) less_sum_[rb][h] = -sum * multiplier[h];
      }
    }
    if (BiasByScales() || RealByMma()) {
      // One operand for all groups of four: no lane has two.
      KVANT_UNROLL
      for (i32 n = 0; n < f.groups; n += 4) {
        float own = 0.f;
        KVANT_UNROLL
        for (i32 i = n; i < MinOf(n + 4, f.groups); ++i) own = c == i % 4 ? -sums[i] : own;
        u32(&slots)[2] = less_sums_slots_[rb][n / 4];
        if (ZerosInBF16()) {
          InThree(own, slots);
        } else {
          slots[0] = InTwo(own);
        }
      }
    }
  }
  KVANT_DEVICE static u32 InTwo(float x) {
    const float high = F16Low(PackF16(x, 0.f));
    return PackF16(high, x - high);
  }

  KVANT_DEVICE static void InThree(float x, u32 (&words)[2]) {
    words[0] = PackBF16(x, x - BF16Low(PackBF16(x, 0.f)));
    words[1] = PackBF16(x - BF16Low(words[0]) - BF16High(words[0]), 0.f);
  }

  // Row-wise zero points of a lane's tokens.
  KVANT_DEVICE static void LoadZeroBytes(SharedAddress side, u32 (&bytes)[4]) {
    const i32 n = T::k.warp_tile / 8, g = LaneIndex() / 4;
    if (n == 2) {
      bytes[0] = LoadShared16(side + g * 2);
    } else {
      LoadSharedWords(side + g * n, n / 4, bytes);
    }
  }

  // A word's byte, or its nibble, in both halves, as the number it is for an mma.
  KVANT_DEVICE static u32 ZeroOf(u32 word, u32 index) {
    const CodeFormat f = Format();
    u32 x = f.ZeroBits() == 8 ? Permute(word, 0, 0x4040 + 0x0101 * index)
                              : (word >> 4 * index & 15u) * 0x10001u;
    x ^= static_cast<u32>(f.ZeroBias()) * 0x10001u;
    return f.subnormal ? x : AddF16x2(x | 0x64006400u, 0xe400e400u);
  }

  // The A operands of integer zero points, of both row blocks of pair j, groups 4 n4 and on.
  KVANT_DEVICE static void ZeroWords(SharedAddress stage, i32 j, i32 n4, const u32 (&bytes)[4],
                                     u32 (&a)[2]) {
    const CodeFormat f = Format();
    const i32 n = T::k.warp_tile / 8, g = LaneIndex() / 4;
    const u32 c = static_cast<u32>(LaneIndex() % 4);
    // Of both tokens' groups, and how many are in a word.
    const i32 bytes_of_two = f.groups * f.ZeroBits() / 4, of_word = 32 / MaxOf(f.ZeroBits(), 1);
    u32 words[4];
    if (f.groups > 1) {
      const SharedAddress at =
          stage + CodesRing<T>::Layout().sides[2].offset + (g * n + 2 * j) * bytes_of_two / 2;
      if (bytes_of_two == 2) {
        words[0] = LoadShared16(at);
      } else {
        LoadSharedWords(at, bytes_of_two / 4, words);
      }
    }
    KVANT_UNROLL
    for (i32 b = 0; b < 2; ++b) {
      const i32 i = 2 * j + b, first = b * f.groups + n4 * 4;
      a[b] = f.groups == 1 ? ZeroOf(bytes[i / 4], static_cast<u32>(i % 4))
                           : ZeroOf(words[first / of_word],
                                    static_cast<u32>(first % of_word) + c % MinOf(f.groups, 4));
    }
  }

  // sum += by * (less the queries' sums of groups x a side's 16-bit floats of groups).
  KVANT_DEVICE void AddSide(SharedAddress side, i32 j, float by,
                            float (&sum)[kRowBlocks][4]) const {
    const CodeFormat f = Format();
    const i32 n = T::k.warp_tile / 8, g = LaneIndex() / 4, c = LaneIndex() % 4;
    float all[kRowBlocks][4] = {};
    KVANT_UNROLL
    for (i32 n4 = 0; n4 < CeilDiv(f.groups, 4); ++n4) {
      u32 a[2];
      KVANT_UNROLL
      for (i32 b = 0; b < 2; ++b) {
        const i32 index = (g * n + 2 * j + b) * f.groups + n4 * 4 + c % MinOf(4, f.groups);
        a[b] = Permute(LoadShared16(side + index * 2), 0, 0x1010);
      }
      KVANT_UNROLL
      for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
        const u32(&slots)[2] = less_sums_slots_[rb][n4];
        if (ZerosInBF16()) {
          MmaBF16K16(all[rb], a[0], a[1], a[0], a[1], slots[0], slots[1]);
        } else {
          MmaF16K8(all[rb], a[0], a[1], slots[0]);
        }
      }
    }
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 e = 0; e < 4; ++e) sum[rb][e] = Fma(all[rb][e], by, sum[rb][e]);
    }
  }

  template <i32 kWords>
  KVANT_DEVICE void SeeScales(const u32 (&scales)[kWords], i32 count) {
    if (Format().scale_type == kFloat16) {
      KVANT_UNROLL
      for (i32 i = 0; i < count / 2; ++i) largest_f16_ = MaxAbsF16x2(largest_f16_, scales[i]);
      return;
    }
    KVANT_UNROLL
    for (i32 i = 0; i < count; ++i) {
      largest_scale_ = Max(largest_scale_, Abs(FloatAt(Format().scale_type, scales, i)));
    }
  }

  // Row blocks 2j and 2j + 1: sums in units of codes, times scales where there are groups.
  KVANT_DEVICE void MultiplyPair(SharedAddress at, SharedAddress stage, i32 j,
                                 const u32 (&bytes)[4], float (&sum)[kRowBlocks][4]) {
    const CodeFormat f = Format();
    u32 low[kWords], high[kWords], scales[16], zeros[2];
    if (f.groups > 1) {
      const i32 bytes_of_two = 2 * f.groups * f.ScaleBytes();
      const i32 pair = LaneIndex() / 4 * (T::k.warp_tile / 16) + j;
      LoadSharedWords(stage + CodesRing<T>::Layout().sides[0].offset + pair * bytes_of_two,
                      bytes_of_two / 4, scales);
      SeeScales(scales, 2 * f.groups);
    }
    Tile().LoadPair(at, j, false, low, high);
    f.MarkNan(low, nan_marks_);
    f.MarkNan(high, nan_marks_);
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 e = 0; e < 4; ++e) sum[rb][e] = 0.f;
    }
    const CodesLayout l = CodesRing<T>::Layout();
    if (BiasByScales()) {
      AddSide(stage + l.sides[0].offset, j, static_cast<float>(f.Bias()) * f.Unit(), sum);
    }
    if (RealByMma()) AddSide(stage + l.sides[2].offset, j, f.Unit(), sum);
    KVANT_UNROLL
    for (i32 n = 0; n < f.groups; ++n) {
      if (ZeroMma() && n % 4 == 0) ZeroWords(stage, j, n / 4, bytes, zeros);
      float group[kRowBlocks][4];
      KVANT_UNROLL
      for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
        KVANT_UNROLL
        for (i32 e = 0; e < 4; ++e) group[rb][e] = first_[rb][n][e % 2];
        if (ZeroMma()) MmaF16K8(group[rb], zeros[0], zeros[1], less_sum_slots_[rb][n]);
      }
      KVANT_UNROLL
      for (i32 q = n * f.PairsPerGroup(); q < (n + 1) * f.PairsPerGroup(); q += 2) {
        const u32 a0 = f.Unpack(low, q, entries_), a1 = f.Unpack(high, q, entries_);
        const u32 a2 = f.Unpack(low, q + 1, entries_), a3 = f.Unpack(high, q + 1, entries_);
        KVANT_UNROLL
        for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
          KVANT_UNROLL
          for (i32 part = 0; part < PartsOf(T::k); ++part) {
            MmaF16K16(group[rb], a0, a1, a2, a3, queries_[rb][part][q], queries_[rb][part][q + 1]);
          }
        }
      }
      KVANT_UNROLL
      for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
        KVANT_UNROLL
        for (i32 e = 0; e < 4; ++e) {
          const float scale =
              f.groups > 1 ? FloatAt(f.scale_type, scales, e / 2 * f.groups + n) : 1.f;
          const bool begins = n == 0 && !BiasByScales() && !RealByMma();
          sum[rb][e] = f.groups == 1 ? group[rb][e]
                       : begins      ? group[rb][e] * scale
                                     : Fma(group[rb][e], scale, sum[rb][e]);
        }
      }
    }
  }

  const CodebookWords entries_;
  u32 queries_[kRowBlocks][kParts][kPairs];
  u32 less_sum_slots_[kRowBlocks][kMaxGroups];
  u32 less_sums_slots_[kRowBlocks][kMaxGroups / 4][2];
  float first_[kRowBlocks][kMaxGroups][2];  // what accumulators begin with
  float less_sum_[kRowBlocks][2];           // of queries 2c, 2c + 1, times the multiplier
  float multiplier_[kRowBlocks][2];         // of queries 2c, 2c + 1
  float largest_scale_;                     // of the lane's tokens; 1 where they have none
  u32 largest_f16_ = 0;                     // where they are f16
  u32 nan_marks_ = 0;
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CODES_KEYS_H_
