// Queries as B operands for packed codes of K. Lane 4g + c has, of row 8 rb + g, the channels of
// its words of K: pair q of a row of codes meets word q here, divided by what those codes arrive
// multiplied with (CodeFormat::Factor).
//
// A row is scaled by a power of two, its own, that brings the sum of its magnitudes to 2^14 ..
// 2^15: f16 neither overflows, sums over a head included, nor is short of bits beside an outlier,
// and queries of one head do not show in another.
#ifndef KVANT_KERNELS_CUDA_CODES_QUERIES_H_
#define KVANT_KERNELS_CUDA_CODES_QUERIES_H_

#include "kvant/kernels/cuda/codes_ring.h"
#include "kvant/kernels/cuda/finish.h"

namespace kvant::cuda {

inline constexpr i32 kMaxGroups = 8;  // of a token's channels

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

template <class T>
class CodesQueries {
 public:
  static constexpr i32 kRowBlocks = T::kMax.row_blocks;
  static constexpr i32 kParts = PartsOf(T::kMax);
  static constexpr i32 kPairs = CeilDiv(KeySlice(T::kMax), 64) * 8;

  KVANT_DEVICE static CodeFormat Format() { return CodesRing<T>::Layout().k.format; }
  // Sums of magnitudes of rows are less than this.
  static constexpr float kSum = 0x1p15f;

  // Loads row block rb; rotated: where rotated queries lie, if there are any. Returns the lane's
  // row's power of two. sums: of groups of row 8 rb + g, of what operands hold.
  KVANT_DEVICE float Load(const AttentionParams& p, const BlockRows& block, i32 rb,
                          SharedAddress rotated, float (&sums)[kMaxGroups]) {
    const CodeFormat f = Format();
    const float power = Power(p, block, rb, rotated);
    KVANT_UNROLL
    for (i32 n = 0; n < f.groups; ++n) sums[n] = 0.f;
    KVANT_UNROLL
    for (i32 m = 0; m < f.Chunks(); ++m) {
      float x[16];
      LoadChunk(p, block, rb, m, rotated, x);
      KVANT_UNROLL
      for (i32 i = 0; i < f.PairsPerWord(); ++i) {
        const i32 q = m * f.PairsPerWord() + i;
        const float by = power / f.Factor(q);
        u32 words[kParts];
        PackParts(PartsOf(T::k), x[f.FirstOfPair(i)] * by, x[f.SecondOfPair(i)] * by, words);
        float held = 0.f;
        KVANT_UNROLL
        for (i32 part = 0; part < PartsOf(T::k); ++part) {
          KVANT_UNROLL
          for (i32 half = 0; half < f.Halves(); ++half) {
            // Selected once, not anew for each tile.
            const u32 word = words[part] & f.HalfOfKeys(half);
            words_[rb][part][q + half * kPairs] = f.Halves() == 1 ? word : Opaque(word);
          }
          held += F16Low(words[part]) + F16High(words[part]);
        }
        AddTo(sums, q, held * f.Factor(q));
      }
      if (KeepsPlain()) KeepPlain(rb, m);
    }
    KVANT_UNROLL
    for (i32 n = 0; n < f.groups; ++n) {
      sums[n] += ShuffleXor(sums[n], 1);
      sums[n] += ShuffleXor(sums[n], 2);
    }
    return power;
  }

  // half: of groups that are half a chunk, zeros in the other half.
  KVANT_DEVICE u32 Word(i32 rb, i32 part, i32 q, i32 half = 0) const {
    return words_[rb][part][q + half * kPairs];
  }
  // Not divided by what codes arrive multiplied with; of channels side by side, or of K's pairs.
  KVANT_DEVICE static bool PlainSideBySide() { return KeepsPlain() || Format().SideBySide(); }
  KVANT_DEVICE u32 PlainWord(i32 rb, i32 part, i32 q) const {
    return KeepsPlain() ? words_[rb][part][q + kPairs] : TimesFactor(words_[rb][part][q], q);
  }

  // Multiplies all by a power of two.
  KVANT_DEVICE void Multiply(float power) {
    const u32 by = PackF16(power, power);
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 part = 0; part < PartsOf(T::k); ++part) {
        KVANT_UNROLL
        for (i32 q = 0; q < Format().Pairs(); ++q) {
          u32(&words)[2 * kPairs] = words_[rb][part];
          words[q] = MultiplyF16x2(words[q], by);
          if (KeepsPlain()) words[q + kPairs] = MultiplyF16x2(words[q + kPairs], by);
        }
      }
    }
  }

 private:
  // Where real zero points by channel ask for them for every group, and registers are left.
  KVANT_DEVICE static bool KeepsPlain() {
    const CodeFormat f = Format();
    return f.ByChannel() && f.zero == Zero::kReal && f.bits == 2 && PartsOf(T::k) == 1 &&
           T::k.row_blocks == 1;
  }
  // Of chunk m.
  KVANT_DEVICE void KeepPlain(i32 rb, i32 m) {
    const i32 count = Format().PairsPerWord();
    u32(&words)[2 * kPairs] = words_[rb][0];
    KVANT_UNROLL
    for (i32 i = 0; i < count; ++i) {
      // The lower halves are the first channels.
      const i32 q = m * count + 2 * i % count;
      words[m * count + i + kPairs] =
          Permute(TimesFactor(words[q], q), TimesFactor(words[q + 1], q + 1),
                  2 * i < count ? 0x5410 : 0x7632);
    }
  }
  KVANT_DEVICE static u32 TimesFactor(u32 query, i32 q) {
    const float factor = Format().Factor(q);
    return factor == 1.f ? query : MultiplyF16x2(query, PackF16(factor, factor));
  }
  KVANT_DEVICE static void AddTo(float (&sums)[kMaxGroups], i32 q, float x) {
    const CodeFormat f = Format();
    const i32 first = q / f.PairsPerRun() * f.Halves();
    if (f.Halves() == 1) {
      sums[first] += x;
      return;
    }
    const bool upper = LaneIndex() % 4 >= 2;
    sums[first] += upper ? 0.f : x;
    if (first + 1 < f.groups) sums[(first + 1) % kMaxGroups] += upper ? x : 0.f;
  }

  KVANT_DEVICE static float Power(const AttentionParams& p, const BlockRows& block, i32 rb,
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

  // The channels of chunk m that lane 4g + c has, of row 8 rb + g; zeros for rows beyond the last,
  // and channels beyond the slice.
  KVANT_DEVICE static void LoadChunk(const AttentionParams& p, const BlockRows& block, i32 rb,
                                     i32 m, SharedAddress rotated, float (&x)[16]) {
    const i32 r = rb * 8 + LaneIndex() / 4, count = Format().ChunkCodes() / 4;
    const i32 lane_d = (m * 4 + LaneIndex() % 4) * count;
    const bool exists = r < block.rows && lane_d < KeySlice(T::k);
    const i32 d = WarpSlice<T>::KeyChannel(MinOf(lane_d, KeySlice(T::k) - count));
    if (T::k.q_hadamard != 0) {
      KVANT_UNROLL
      for (i32 i = 0; i < count; ++i) {
        const i32 at = (r * T::k.head_size + d + i) * 4;
        x[i] = exists ? LoadSharedFloat(rotated + static_cast<u32>(at)) : 0.f;
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
    for (i32 i = 0; i < count; ++i) x[i] = exists ? x[i] : 0.f;
  }

  u32 words_[kRowBlocks][kParts][2 * kPairs];
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CODES_QUERIES_H_
