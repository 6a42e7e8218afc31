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

#include "kvant/kernels/cuda/codes_channels.h"

namespace kvant::cuda {

template <class T>
class CodesKeys {
 public:
  static constexpr i32 kRowBlocks = T::kMax.row_blocks;
  static constexpr i32 kPairTiles = T::kMax.warp_tile / 16;  // of row blocks
  static constexpr i32 kParts = PartsOf(T::kMax);
  using Scores = float[kRowBlocks][kPairTiles][4];

  KVANT_DEVICE static CodeTile Tile() { return CodesRing<T>::Layout().k; }
  KVANT_DEVICE static CodeFormat Format() { return Tile().format; }

  // multiplier: of the scores. rotated: where rotated queries lie, if there are any; codebook:
  // where a CodebookTable lies.
  KVANT_DEVICE CodesKeys(const AttentionParams& p, const BlockRows& block, float multiplier,
                         const CommonParameters& common, SharedAddress rotated,
                         SharedAddress codebook)
      : table_(codebook), largest_scale_(Format().scale_type == kNone ? 1.f : 0.f) {
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      float sums[kMaxGroups];
      const float power = queries_.Load(p, block, rb, rotated, sums);
      float own[2];  // multipliers of queries 2c and 2c + 1, which lanes 8c and 8c + 4 have
      KVANT_UNROLL
      for (i32 h = 0; h < 2; ++h) {
        own[h] = multiplier / Shuffle(power, LaneIndex() % 4 * 8 + 4 * h);
        multiplier_[rb][h] = own[h] * common.scale / Format().Unit();
      }
      KeepSums(rb, sums, own, common.zero_point);
    }
  }

  // Before the first tile, which lies at `stage` where there is any.
  KVANT_DEVICE void Clear(SharedAddress stage, bool any) {
    if (!Format().ByChannel()) return;
    const float power = channels_.Clear(stage, any);
    queries_.Multiply(power);
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 h = 0; h < 2; ++h) {
        multiplier_[rb][h] = Divide(multiplier_[rb][h], power * channels_.Normal());
      }
    }
  }

  // scores = multiplier * Q K + add. at: the lane's matrix row in the stage's K; stage: where the
  // stage begins.
  KVANT_DEVICE void Multiply(SharedAddress at, SharedAddress stage,
                             const float (&add)[kRowBlocks][2], Scores& scores) {
    if (Format().ByChannel()) return MultiplyByChannel(at, stage, add, scores);
    const CodeFormat f = Format();
    const CodesLayout l = CodesRing<T>::Layout();
    const i32 n = T::k.warp_tile / 8, g = LaneIndex() / 4;
    u32 scales[32], zeros[8], bytes[4];
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
      MultiplyPair(at, stage, j, bytes, scales, sum);
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
    const float code = f.LargestCode(largest_code_);
    float lost = 0.f;
    if (f.ByChannel()) {
      lost = channels_.Lost(code);
    } else {
      const bool takes_off = f.TakesOffSums() || f.zero != Zero::kNone;
      const float of_sums = takes_off ? code * 0x1p-9f : 0.f;
      const float of_queries = code * f.Factor(f.PairsPerWord() - 1) * 0x1p-21f;
      const float of_f16 = Max(F16Low(largest_f16_), F16High(largest_f16_));
      lost = (of_sums + of_queries) * Max(largest_scale_, of_f16);
    }
    bool loses = CodeFormat::HasNan(nan_marks_);
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 h = 0; h < 2; ++h) {
        loses |= !(lost * f.Unit() * Abs(by) * Abs(multiplier_[rb][h]) <= limit);
      }
    }
    return loses;
  }

 private:
  static constexpr i32 kWords = CeilDiv(KeySlice(T::kMax), 8);  // of a row, at 16 bits

  // In groups, what all of a group's codes have too much goes by one mma for all groups: scales
  // times the bias, and real zero points.
  KVANT_DEVICE static bool BiasByScales() {
    const CodeFormat f = Format();
    return f.groups > 1 && f.zero != Zero::kInteger && f.Bias() != 0 && f.scale_type == kFloat16;
  }
  KVANT_DEVICE static bool RealByMma() { return Format().RealByMma(PartsOf(T::k)); }
  KVANT_DEVICE static bool RealByFma() {
    return Format().groups > 1 && Format().zero == Zero::kReal && !RealByMma();
  }
  // They are no f16. Sums of queries go in three parts then, and lose as little.
  KVANT_DEVICE static bool ZerosInBF16() { return RealByMma() && Format().zero_type == kBFloat16; }
  KVANT_DEVICE static bool ZeroMma() { return Format().zero == Zero::kInteger; }
  // What is left to add to codes, times the sum of queries.
  KVANT_DEVICE static i32 Rest() {
    const CodeFormat f = Format();
    return BiasByScales() ? 0 : f.ZeroBias() - f.Bias();
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
        const bool needed = begins || (f.zero == Zero::kReal && f.groups == 1) || RealByFma();
        const float sum = needed ? Shuffle(sums[n], 8 * c + 4 * h) : 0.f;
        group_sum_[rb][n][h] = sum;
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
    const i32 n = T::k.warp_tile / 8, bits = n * Format().ZeroBits();
    LoadSharedBits(side + static_cast<u32>(LaneIndex() / 4 * bits / 8), bits, bytes);
  }

  // The zero point at `index` of words, in both halves, as the number it is for an mma.
  template <i32 kWords>
  KVANT_DEVICE static u32 ZeroOf(const u32 (&words)[kWords], i32 first, u32 c) {
    const CodeFormat f = Format();
    const i32 of_word = 32 / MaxOf(f.ZeroBits(), 1);
    const u32 word = words[first / of_word], index = static_cast<u32>(first % of_word) + c;
    u32 x = f.ZeroBits() == 8 ? Permute(word, 0, 0x4040 + 0x0101 * index)
                              : (word >> 4 * index & 15u) * 0x10001u;
    x ^= static_cast<u32>(f.ZeroBias()) * 0x10001u;
    return f.subnormal ? x : AddF16x2(x | 0x64006400u, 0xe400e400u);
  }

  // The A operands of integer zero points, of both row blocks of pair j, groups 4 n4 and on.
  KVANT_DEVICE static void ZeroWords(SharedAddress stage, i32 j, i32 n4, const u32 (&bytes)[4],
                                     u32 (&a)[2]) {
    const CodeFormat f = Format();
    const i32 n = T::k.warp_tile / 8, g = LaneIndex() / 4, c = LaneIndex() % 4;
    const SharedAddress side = stage + static_cast<u32>(CodesRing<T>::Layout().sides[2].offset);
    // Of groups of a power of two those of both tokens are words; each lane takes its own.
    const bool whole = f.groups > 1 && IsPowerOfTwo(f.groups);
    const i32 bits = 2 * f.groups * f.ZeroBits();
    u32 words[4];
    if (whole) LoadSharedBits(side + static_cast<u32>((g * n / 2 + j) * bits / 8), bits, words);
    KVANT_UNROLL
    for (i32 b = 0; b < 2; ++b) {
      const i32 i = 2 * j + b;
      if (f.groups == 1) {
        a[b] = ZeroOf(bytes, i, 0);
      } else if (whole) {
        a[b] = ZeroOf(words, b * f.groups + n4 * 4, static_cast<u32>(c % MinOf(f.groups, 4)));
      } else {
        const i32 at = (g * n + i) * f.groups + MinOf(n4 * 4 + c, f.groups - 1);
        const u32 byte = LoadShared8(side + static_cast<u32>(at * f.ZeroBits() / 8));
        const u32 one[1] = {byte >> (f.ZeroBits() == 4 ? at % 2 * 4 : 0)};
        a[b] = ZeroOf(one, 0, 0);
      }
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
        const i32 group = MinOf(n4 * 4 + c % MinOf(4, f.groups), f.groups - 1);
        const i32 index = (g * n + 2 * j + b) * f.groups + group;
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

  // Of all groups of both tokens of `count` pairs from j on.
  template <i32 kCount>
  KVANT_DEVICE static void LoadOfPairs(SharedAddress stage, i32 side, i32 bits, i32 j, i32 count,
                                       u32 (&words)[kCount]) {
    const i32 pair = LaneIndex() / 4 * (T::k.warp_tile / 16) + j;
    const i32 bytes = 2 * Format().groups * bits / 8;
    LoadSharedWords(stage + CodesRing<T>::Layout().sides[side].offset + pair * bytes,
                    bytes / 4 * count, words);
  }
  KVANT_DEVICE static i32 PairsAtOnce() {
    const CodeFormat f = Format();
    return CodesRing<T>::Layout().PairsAtOnce(2 * f.groups * BitsOf(f.scale_type) / 32);
  }

  // Row blocks 2j and 2j + 1: sums in units of codes, times scales where there are groups.
  KVANT_DEVICE void MultiplyPair(SharedAddress at, SharedAddress stage, i32 j,
                                 const u32 (&bytes)[4], u32 (&scales)[32],
                                 float (&sum)[kRowBlocks][4]) {
    const CodeFormat f = Format();
    u32 low[kWords], high[kWords], reals[16], zeros[2];
    if (f.groups > 1 && j % PairsAtOnce() == 0) {
      LoadOfPairs(stage, 0, BitsOf(f.scale_type), j, PairsAtOnce(), scales);
      SeeScales(scales, 2 * f.groups * PairsAtOnce());
    }
    if (RealByFma()) LoadOfPairs(stage, 2, f.ZeroBits(), j, 1, reals);
    Tile().LoadPair(at, j, false, low, high);
    f.MarkNan(low, f.Chunks(), nan_marks_);
    f.MarkNan(high, f.Chunks(), nan_marks_);
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
    for (i32 run = 0; run < f.Runs(); ++run) {
      const i32 first = run * f.Halves(), end = MinOf(first + f.Halves(), f.groups);
      float group[2][kRowBlocks][4];
      KVANT_UNROLL
      for (i32 n = first; n < end; ++n) {
        if (ZeroMma() && n % 4 == 0) ZeroWords(stage, j, n / 4, bytes, zeros);
        KVANT_UNROLL
        for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
          float(&own)[4] = group[n - first][rb];
          KVANT_UNROLL
          for (i32 e = 0; e < 4; ++e) own[e] = first_[rb][n][e % 2];
          if (ZeroMma()) MmaF16K8(own, zeros[0], zeros[1], less_sum_slots_[rb][n]);
        }
      }
      KVANT_UNROLL
      for (i32 q = run * f.PairsPerRun(); q < (run + 1) * f.PairsPerRun(); q += 2) {
        u32 a[2], b[2];  // of row blocks 2j and 2j + 1
        f.UnpackKeys(low, q, table_, a);
        f.UnpackKeys(high, q, table_, b);
        f.See(a, largest_code_);
        f.See(b, largest_code_);
        KVANT_UNROLL
        for (i32 half = 0; half < end - first; ++half) {
          KVANT_UNROLL
          for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
            KVANT_UNROLL
            for (i32 part = 0; part < PartsOf(T::k); ++part) {
              MmaF16K16(group[half][rb], a[0], b[0], a[1], b[1], queries_.Word(rb, part, q, half),
                        queries_.Word(rb, part, q + 1, half));
            }
          }
        }
      }
      KVANT_UNROLL
      for (i32 n = first; n < end; ++n) {
        KVANT_UNROLL
        for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
          KVANT_UNROLL
          for (i32 e = 0; e < 4; ++e) {
            const float x = group[n - first][rb][e];
            const i32 index = (j % PairsAtOnce() * 2 + e / 2) * f.groups + n;
            const float scale = f.groups > 1 ? FloatAt(f.scale_type, scales, index) : 1.f;
            const bool begins = n == 0 && !BiasByScales() && !RealByMma();
            sum[rb][e] = f.groups == 1 ? x : begins ? x * scale : Fma(x, scale, sum[rb][e]);
            if (!RealByFma()) continue;
            const float zero = FloatAt(f.zero_type, reals, e / 2 * f.groups + n);
            sum[rb][e] = Fma(-zero * f.Unit(), group_sum_[rb][n][e % 2], sum[rb][e]);
          }
        }
      }
    }
  }

  KVANT_DEVICE void MultiplyByChannel(SharedAddress at, SharedAddress stage,
                                      const float (&add)[kRowBlocks][2], Scores& scores) {
    channels_.Multiply(queries_, table_, at, stage, nan_marks_, scores);
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 j = 0; j < T::k.warp_tile / 16; ++j) {
        KVANT_UNROLL
        for (i32 e = 0; e < 4; ++e) {
          scores[rb][j][e] = Fma(scores[rb][j][e], multiplier_[rb][e % 2], add[rb][e % 2]);
        }
      }
    }
  }

  const CodebookTable table_;
  CodesQueries<T> queries_;
  CodesChannels<T> channels_;
  u32 less_sum_slots_[kRowBlocks][kMaxGroups];
  u32 less_sums_slots_[kRowBlocks][kMaxGroups / 4][2];
  float first_[kRowBlocks][kMaxGroups][2];  // what accumulators begin with
  float less_sum_[kRowBlocks][2];           // of queries 2c, 2c + 1, times the multiplier
  float group_sum_[kRowBlocks][kMaxGroups][2];
  float multiplier_[kRowBlocks][2];  // of queries 2c, 2c + 1
  float largest_scale_;              // of the lane's tokens; 1 where they have none
  u32 largest_f16_ = 0;              // where they are f16
  u32 largest_code_ = 0;             // that the lane has seen, where codes are to be
  u32 nan_marks_ = 0;
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CODES_KEYS_H_
