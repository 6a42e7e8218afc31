// K and V as packed codes, and how their words become operands of an mma.
//
// A row (a token's channels) is chunks of 16 bytes, E = 128 / bits codes each. ldmatrix hands lane
// 4g + c of a warp one word of chunk m for each block of 8 rows:
//
//   K, plain:       row g,                           channels E m + (E / 4) c + 0, 1, ...
//   V, transposed:  rows 2c (low half), 2c + 1,      channels E m + (E / 8) g + 0, 1, ...
//
// A word is unpacked into E / 8 pairs of 16 bits, pair q = E / 8 * m + i of the row:
//
//   4 bits  w & 000f000f  w & 00f000f0  w >> 8 & 000f000f  w >> 8 & 00f000f0     i = 0 .. 3
//   8 bits  w & 00ff00ff  w >> 8 & 00ff00ff                                      i = 0, 1
//
//   2 bits  w & 00030003, w & 000c000c, ..., w >> 8 & 00030003, ...              i = 0 .. 7
//   e5m2    an f16 but for its lower 8 bits, which are zeros                     i = 0, 1
//   e4m3    the same with one bit more of mantissa; as an f16 it is 256 times too small (and a NaN
//           becomes a number, which MarkNan finds). Or by an instruction (`converts`), which takes
//           bytes side by side
//   f16     as it is                                                             i = 0
//   codes of 4 bits that are positions in a codebook: two entries                i = 0 .. 3
//
//   K:  codes of channels d and d + E / 8 of one token, d = E m + (E / 4) c + i; entries of two
//       channels side by side, d and d + 1, d = E m + (E / 4) c + 2i
//   V:  codes of one channel E m + (E / 8) g + i of tokens 2c, 2c + 1
//
// so that pairs 2s and 2s + 1 are half of an A operand, K's k-step s or V's rows of the s-th 16
// channels. What is in the upper bits of a byte arrives times 4, 16 or 64. The other operand, or
// the result, makes up for it.
//
// No arithmetic is needed to get a number: as an f16 the bits are a subnormal, code * 2^-24, whose
// product with an f16 is exact in f32. Signed codes have their sign bit flipped, and arrive with
// Bias() added.
#ifndef KVANT_KERNELS_CUDA_CODES_FORMAT_H_
#define KVANT_KERNELS_CUDA_CODES_FORMAT_H_

#include "kvant/kernels/cuda/codes_codebook.h"

namespace kvant::cuda {

enum class Zero : i32 {
  kNone,
  kInteger,  // (code - zero point) * scale
  kReal,     // code * scale - zero point
};

// A scale and a zero point that all tokens of a block have in common.
struct CommonParameters {
  float scale, zero_point;
};

// K or V; all of it is known when the kernel is compiled. What tokens have in common is not in
// scale_type, zero_type and zero.
struct CodeFormat {
  i32 type, channels, bits;
  i32 groups;        // of a token's channels
  i32 group_tokens;  // 1, or by channel: scales and zero points of each channel are for so many
                     // tokens
  bool is_signed, subnormal, codebook;
  bool converts;  // of e4m3: by an instruction
  i32 scale_type, zero_type;
  Zero zero;
  bool common_zero;
  bool has_scale;      // of whatever tokens and channels
  bool output_scales;  // V by channel: scales are those of the output's channels

  KVANT_DEVICE static constexpr CodeFormat Of(const AttentionTraits& t, const SegmentTraits& s,
                                              i32 channels) {
    const i32 type = s.data.type;
    const bool is_float = type == kFloat16 || type == kFloat8E4M3 || type == kFloat8E5M2;
    const bool by_channel = IsByChannel(s);
    const i32 groups = by_channel || s.group[kCol] >= channels ? 1 : channels / s.group[kCol];
    const i32 group_tokens = !by_channel ? 1 : Varies(s.scales) ? s.group[kRow] : kAllTokensInOne;
    const bool in_groups = groups > 1 || by_channel;
    const bool common_scale = !in_groups && !Varies(s.scales);
    const bool common_zero = s.zero_points.type != kNone && !in_groups && !Varies(s.zero_points);
    const bool has_zero = s.zero_points.type != kNone && !common_zero;
    return {type,
            channels,
            BitsOf(type),
            groups,
            group_tokens,
            type == kInt8 || type == kInt4 || type == kInt2,
            t.subnormal_codes != 0 && !is_float && s.codebook == 0,
            s.codebook != 0,
            t.converts_e4m3 != 0 && type == kFloat8E4M3,
            common_scale ? kNone : s.scales.type,
            has_zero ? s.zero_points.type : kNone,
            !has_zero            ? Zero::kNone
            : s.real_zero_points ? Zero::kReal
                                 : Zero::kInteger,
            common_zero,
            s.scales.type != kNone,
            false};
  }
  // Scales of V's channels that all tokens have in common go on the output.
  KVANT_DEVICE static constexpr CodeFormat OfValues(const AttentionTraits& t,
                                                    const SegmentTraits& s, i32 channels) {
    CodeFormat f = Of(t, s, channels);
    if (!f.ByChannel()) return f;
    f.scale_type = kNone;
    f.group_tokens = 1;
    f.output_scales = true;
    return f;
  }
  KVANT_DEVICE static constexpr bool Varies(const ArrayTraits& array) {
    return (array.varies >> kRow & 1) != 0;
  }
  KVANT_DEVICE static constexpr bool IsByChannel(const SegmentTraits& s) {
    return s.scales.type != kNone && s.group[kCol] == 1;
  }
  static constexpr i32 kAllTokensInOne = 1 << 30;
  KVANT_DEVICE constexpr bool ByChannel() const { return group_tokens > 1; }
  // Of a row of scales, or of zero points.
  KVANT_DEVICE constexpr i32 SideElements() const { return ByChannel() ? channels : groups; }

  KVANT_DEVICE constexpr i32 RowBytes() const { return channels * bits / 8; }
  // The last one may be half a chunk.
  KVANT_DEVICE constexpr i32 Chunks() const { return CeilDiv(channels * bits, 128); }
  KVANT_DEVICE constexpr i32 ChunkCodes() const { return 128 / bits; }
  KVANT_DEVICE constexpr i32 PairsPerWord() const { return 16 / bits; }
  KVANT_DEVICE constexpr i32 Pairs() const { return Chunks() * PairsPerWord(); }

  // 2: groups are half a chunk, of which the first is that of lanes' lower c (K), or g (V). Both
  // have the same pairs.
  KVANT_DEVICE constexpr i32 Halves() const {
    return channels / groups * 2 == ChunkCodes() ? 2 : 1;
  }
  // ~0 in lanes that have the half of K's channels, else 0.
  KVANT_DEVICE u32 HalfOfKeys(i32 half) const {
    return Halves() == 1 || LaneIndex() % 4 / 2 == half ? ~0u : 0u;
  }
  // Groups [run * Halves(), ...) have pairs [run * PairsPerRun(), ...).
  KVANT_DEVICE constexpr i32 Runs() const { return CeilDiv(groups, Halves()); }
  KVANT_DEVICE constexpr i32 PairsPerRun() const { return Pairs() / Runs(); }
  KVANT_DEVICE constexpr i32 ScaleBytes() const { return BitsOf(scale_type) / 8; }
  KVANT_DEVICE constexpr i32 ZeroBits() const { return BitsOf(zero_type); }

  // Of V: the channel of a lane in pair q.
  KVANT_DEVICE constexpr i32 ValueChannel(i32 q, i32 g) const {
    return q / PairsPerWord() * ChunkCodes() + g * (ChunkCodes() / 8) + q % PairsPerWord();
  }
  // What codes of pair q arrive multiplied by, beside Unit().
  KVANT_DEVICE constexpr float Factor(i32 q) const {
    return codebook    ? 1.f
           : bits == 4 ? q % 2 == 1 ? 16.f : 1.f
           : bits == 2 ? static_cast<float>(1 << q % 4 * 2)
                       : 1.f;
  }
  KVANT_DEVICE constexpr float Unit() const {
    return subnormal ? 1.f / 16777216.f : type == kFloat8E4M3 && !converts ? 1.f / 256.f : 1.f;
  }
  // What is added to codes, and to integer zero points, when they are made unsigned.
  KVANT_DEVICE constexpr i32 Bias() const { return is_signed && subnormal ? 1 << (bits - 1) : 0; }
  KVANT_DEVICE constexpr i32 ZeroBias() const {
    return zero != Zero::kInteger ? 0 : zero_type == kInt8 ? 128 : zero_type == kInt4 ? 8 : 0;
  }

  KVANT_DEVICE constexpr bool IsFloat() const {
    return !codebook && (type == kFloat16 || type == kFloat8E4M3 || type == kFloat8E5M2);
  }
  // Whether codes are to be seen, to know the largest: floats that have no scale may be anything.
  // f16 never has one.
  KVANT_DEVICE constexpr bool SeesCodes() const { return IsFloat() && !has_scale; }
  KVANT_DEVICE void See(const u32 (&pairs)[2], u32& largest) const {
    if (SeesCodes()) largest = MaxAbsF16x2(MaxAbsF16x2(largest, pairs[0]), pairs[1]);
  }
  // What a code, less its zero point, is at most. seen: what each lane has seen.
  KVANT_DEVICE float LargestCode(u32 seen) const {
    if (SeesCodes()) {
      float largest = Max(F16Low(seen), F16High(seen));
      KVANT_UNROLL
      for (i32 mask = 1; mask < 32; mask *= 2) largest = Max(largest, ShuffleXor(largest, mask));
      return largest / Unit();
    }
    return codebook              ? 128.f
           : type == kFloat8E4M3 ? 448.f
           : type == kFloat8E5M2 ? 57344.f
                                 : static_cast<float>(1 << bits);
  }
  // Whether real zero points in groups go by an mma, as f16 or, normalised as scales are, bf16.
  // Else each is multiplied and added by f32. parts: f16 of a query.
  KVANT_DEVICE constexpr bool RealByMma(i32 parts) const {
    const bool as_scales = zero_type == kBFloat16 && scale_type != kFloat16;
    return groups > 1 && zero == Zero::kReal && parts == 1 && (zero_type == kFloat16 || as_scales);
  }
  // Whether what codes have too much is taken off sums of products, rather than codes.
  KVANT_DEVICE constexpr bool TakesOffSums() const {
    return Bias() != 0 || zero == Zero::kInteger || common_zero;
  }

  // Sets bit 7 of a byte of `marks` where one of `count` words has the code of a NaN.
  template <i32 kWords>
  KVANT_DEVICE void MarkNan(const u32 (&words)[kWords], i32 count, u32& marks) const {
    if (type != kFloat8E4M3 || converts) return;
    // 7f and ff are the bytes whose bit 7 changes when 1 is added. What ff carries to the next byte
    // may hide no other.
    KVANT_UNROLL
    for (i32 i = 0; i < count; ++i) marks |= (words[i] + 0x01010101u) ^ words[i];
  }
  KVANT_DEVICE static bool HasNan(u32 marks) { return (marks & 0x80808080u) != 0; }

  // The channels of pair i of a word of K, of those that the lane has in a chunk.
  KVANT_DEVICE constexpr bool SideBySide() const { return codebook || converts; }
  KVANT_DEVICE constexpr i32 FirstOfPair(i32 i) const { return SideBySide() ? 2 * i : i; }
  KVANT_DEVICE constexpr i32 SecondOfPair(i32 i) const {
    return SideBySide() ? 2 * i + 1 : i + ChunkCodes() / 8;
  }

  // Pairs q and q + 1 from the words of a row of K; q is even.
  template <i32 kWords>
  KVANT_DEVICE void UnpackKeys(const u32 (&words)[kWords], i32 q, const CodebookTable& table,
                               u32 (&pairs)[2]) const {
    if (converts) return Convert(words[q / 2], pairs);
    KVANT_UNROLL
    for (i32 h = 0; h < 2; ++h) {
      pairs[h] = codebook ? table.Entries(words[q / PairsPerWord()], (q + h) % PairsPerWord())
                          : Unpack(words, q + h);
    }
  }
  // The same of V.
  template <i32 kWords>
  KVANT_DEVICE void UnpackValues(const u32 (&words)[kWords], i32 q, const CodebookTable& table,
                                 u32 (&pairs)[2]) const {
    if (codebook) {
      const u32 w = words[q / PairsPerWord()];
      const i32 byte = q % PairsPerWord() / 2;
      const u32 first = table.Entries(w, byte), second = table.Entries(w, byte + 2);
      pairs[0] = Permute(first, second, 0x5410);
      pairs[1] = Permute(first, second, 0x7632);
      return;
    }
    if (converts) return Convert(Permute(words[q / 2], 0, 0x3120), pairs);
    pairs[0] = Unpack(words, q);
    pairs[1] = Unpack(words, q + 1);
  }

 private:
  KVANT_DEVICE static void Convert(u32 word, u32 (&pairs)[2]) {
    pairs[0] = F16x2OfE4M3(word);
    pairs[1] = F16x2OfE4M3(word >> 16);
  }

  template <i32 kWords>
  KVANT_DEVICE u32 Unpack(const u32 (&words)[kWords], i32 q) const {
    const u32 w = words[q / PairsPerWord()];
    const i32 i = q % PairsPerWord();
    if (bits == 16) return w;
    if (type == kFloat8E5M2) return i == 0 ? Permute(w, 0, 0x2404) : w & 0xff00ff00u;
    if (type == kFloat8E4M3) {
      const u32 x = i == 0 ? w << 8 : w;
      return AndOr(x >> 1, 0x3f803f80u, x & 0x80008000u);
    }
    if (bits == 4) {
      const u32 x = i < 2 ? w : w >> 8;
      return i % 2 == 0 ? Number(x, 0x000f000fu, 0x00080008u) : Number(x, 0x00f000f0u, 0x00800080u);
    }
    if (bits == 2) {
      const u32 x = i < 4 ? w : w >> 8;
      return Number(x, 0x00030003u << i % 4 * 2, 0x00020002u << i % 4 * 2);
    }
    if (i == 0) return Number(w, 0x00ff00ffu, 0x00800080u);
    if (!subnormal) return Number(w >> 8, 0x00ff00ffu, 0x00800080u);
    return Permute(is_signed ? w ^ 0x80808080u : w, 0, 0x4341);
  }

  // The bits of a mask; or, where tensor cores should not take subnormals, 1024 + code less 1024.
  KVANT_DEVICE u32 Number(u32 w, u32 mask, u32 sign) const {
    if (subnormal) return is_signed ? AndXor(w, mask, sign) : w & mask;
    const u32 flip = 0x64006400u | (is_signed ? sign : 0u);
    return AddF16x2(AndXor(w, mask, flip), 0x80008000u | flip);
  }
};

// Element `index` of a row of 16-bit or 32-bit floats in words.
template <i32 kWords>
KVANT_DEVICE float FloatAt(i32 type, const u32 (&words)[kWords], i32 index) {
  if (type == kFloat32) return AsFloat(words[index]);
  const u32 w = words[index / 2];
  if (type == kFloat16) return index % 2 == 0 ? F16Low(w) : F16High(w);
  return index % 2 == 0 ? BF16Low(w) : BF16High(w);
}

// `bits` of shared memory, which may be less than a word.
template <i32 kWords>
KVANT_DEVICE void LoadSharedBits(SharedAddress from, i32 bits, u32 (&words)[kWords]) {
  if (bits == 8) {
    words[0] = LoadShared8(from);
  } else if (bits == 16) {
    words[0] = LoadShared16(from);
  } else {
    LoadSharedWords(from, bits / 32, words);
  }
}

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CODES_FORMAT_H_
