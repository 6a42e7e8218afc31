// Codes to what products are computed in, a word at a time: (code - zero point) * scale, or
// code * scale - zero point, rounded once; or the codebook's entry, as f16 or as two bf16, * scale.
// f8 are numbers that f16 holds.
//
// Pair i of a word are codes i of its lower and of its upper half, as they are at the same place of
// both, where one LOP3 cuts them out. It puts them below the leading bits of a power of two: a code
// n bits up becomes M + 2^n code, which, over 2^n, M and the zero point are taken from exactly.
// That is in 16-bit arithmetic where those and the scale fit it, else in f32. Tiles have channels
// in the order of pairs (ChannelOrder).
#ifndef KVANT_KERNELS_CUDA_DEQUANTIZE_CODES_H_
#define KVANT_KERNELS_CUDA_DEQUANTIZE_CODES_H_

#include "kvant/kernels/cuda/codes_codebook.h"
#include "kvant/kernels/cuda/dequantize_tile.h"

namespace kvant::cuda {

// Scales and offsets of the two codes of a pair: floats, or, where CodesToValues::HasHalves, the
// halves of scales[0] and of offsets[0].
struct PairParameters {
  u32 scales[2], offsets[2];

  KVANT_DEVICE static PairParameters Same(const Words2& of_group) {
    return {{of_group.v[0], of_group.v[0]}, {of_group.v[1], of_group.v[1]}};
  }
};

class CodesToValues {
 public:
  KVANT_DEVICE constexpr CodesToValues(i32 arithmetic, const SegmentTraits& traits)
      : bits_(BitsOf(traits.data.type)),
        signed_(IsSigned(traits.data.type)),
        by_f16_(arithmetic == kByF16),
        real_(traits.real_zero_points != 0 && traits.zero_points.type != kNone),
        arithmetic_(arithmetic),
        traits_(traits) {}

  CodesToValues(i32, const SegmentTraits&&) = delete;  // they are kept as a reference

  // Whether it is for such a segment.
  KVANT_DEVICE constexpr bool Takes() const {
    const i32 zero = traits_.zero_points.type, scale = traits_.scales.type;
    if (traits_.codebook != 0) {
      return traits_.codebook_table != 0 && !TakesF32(arithmetic_) &&
             scale == (by_f16_ ? kFloat16 : kBFloat16);
    }
    if (scale == kNone || TakesF32(arithmetic_)) return false;
    if (IsF8(traits_.data.type)) return zero == kNone;
    return IsInteger(traits_.data.type) && (real_ || zero == kNone || IsInteger(zero));
  }

  // Of the values.
  KVANT_DEVICE constexpr ChannelOrder Order() const {
    const bool in_order = traits_.codebook != 0 || IsF8(traits_.data.type);
    return in_order ? ChannelOrder::AsTheyAre() : ChannelOrder{32 / bits_};
  }
  // Of a word.
  KVANT_DEVICE constexpr i32 Pairs() const { return 16 / bits_; }

  // Whether scales and offsets are of 16 bits, else they are floats.
  KVANT_DEVICE constexpr bool HasHalves() const { return traits_.codebook != 0 || ByPairs(); }

  // A group's scale and offset: floats, or halves twice. Of a codebook, the scale is times what
  // `table` leaves to it.
  KVANT_DEVICE Words2 Parameters(const GroupParameters& group, float table) const {
    if (traits_.codebook != 0) return {{Twice(group.scale * table), 0}};
    const float offset = (Merges() ? -Above(0) : 0.f) - group.zero_point;
    if (!ByPairs()) return {{AsBits(group.scale), AsBits(offset)}};
    return {{Twice(group.scale), Twice(offset)}};
  }

  // The values of pair i of a word. entries: where a CodebookTable lies.
  KVANT_DEVICE u32 Pair(u32 word, i32 i, const PairParameters& parameters,
                        SharedAddress entries) const {
    const u32 scale = parameters.scales[0], offset = parameters.offsets[0];
    if (traits_.codebook != 0) {
      const CodebookTable table(entries);
      if (by_f16_) return MultiplyF16x2(table.Entries(word, i), scale);
      const Words2 parts = table.EntriesInTwo(word, i);
      return FmaBF16x2(parts.v[0], scale, Product(parts.v[1], scale));
    }
    if (IsF8(traits_.data.type)) return OfF8(word, i, parameters);
    if (!ByPairs()) return FloatsOf(word, i, parameters);
    u32 code = CodesOf(word, i, offset);
    if (real_) return by_f16_ ? FmaF16x2(code, scale, offset) : FmaBF16x2(code, scale, offset);
    if (HasZeroPoints() && !Merges()) code = Sum(code, offset);
    return Product(code, scale);
  }

 private:
  KVANT_DEVICE static constexpr bool IsSigned(i32 type) {
    return type == kInt8 || type == kInt4 || type == kInt2;
  }
  // Of 8 bits at most.
  KVANT_DEVICE static constexpr bool IsInteger(i32 type) {
    return IsSigned(type) || type == kUint8 || type == kUint4 || type == kUint2;
  }
  KVANT_DEVICE constexpr bool HasZeroPoints() const { return traits_.zero_points.type != kNone; }

  // bf16 has whole numbers up to 256.
  KVANT_DEVICE constexpr bool ByPairs() const {
    const i32 own = by_f16_ ? kFloat16 : kBFloat16, zero = traits_.zero_points.type;
    if (traits_.scales.type != own || (real_ && zero != own)) return false;
    if (by_f16_ || real_ || zero == kNone) return true;
    const i32 type = traits_.data.type;
    return HighestCode(type) - LowestCode(zero) <= 256 &&
           HighestCode(zero) - LowestCode(type) <= 256;
  }

  // Codes of 8 bits, for which the mantissa of bf16 has no room.
  KVANT_DEVICE constexpr bool InTwo() const { return !by_f16_ && bits_ == 8; }
  // Pairs that lie in the mantissa after the same shift of the word.
  KVANT_DEVICE constexpr i32 PairsPerShift() const { return MaxOf(1, (by_f16_ ? 10 : 7) / bits_); }
  KVANT_DEVICE constexpr i32 ShiftOf(i32 i) const {
    return i / PairsPerShift() * PairsPerShift() * bits_;
  }
  KVANT_DEVICE constexpr i32 UpOf(i32 i) const { return i % PairsPerShift() * bits_; }

  // Whether a pair is -(M + 2^n (highest - code)): with zero points up to 255, what is above it is
  // then at most 256.
  KVANT_DEVICE constexpr bool Negative() const {
    return ByPairs() && !by_f16_ && bits_ < 8 && traits_.zero_points.type == kUint8;
  }
  // What a code has too much as a float, or, over 2^n, in a pair that is n bits up; or what InTwo
  // leaves it.
  KVANT_DEVICE constexpr float Above(i32 n) const {
    if (ByPairs() && InTwo()) return signed_ ? 0.f : -128.f;
    const float power = (!ByPairs() ? 8388608.f
                         : by_f16_  ? 1024.f
                                    : 128.f) /
                        static_cast<float>(1 << n);
    const i32 below = signed_ ? 1 << (bits_ - 1) : 0;
    if (Negative()) return -power - static_cast<float>((1 << bits_) - 1 - below);
    return power + static_cast<float>(below);
  }
  // Whether that is taken off with the zero point, from which it must not differ by more than 16
  // bits hold exactly.
  KVANT_DEVICE constexpr bool Merges() const {
    const i32 zero = traits_.zero_points.type;
    if (!ByPairs()) return !real_;
    if (real_ || zero == kNone) return false;
    return by_f16_ || Negative() || InTwo() ||
           Above(0) + static_cast<float>(HighestCode(zero)) <= 256.f;
  }

  // Of pair i, less zero points where that merges. offset: of the group.
  KVANT_DEVICE u32 CodesOf(u32 word, i32 i, u32 offset) const {
    if (InTwo()) {
      // 128 + the lower 7 bits, less 128 or 256 by bit 7.
      const u32 x = i == 0 ? word : word >> 8;
      const u32 low = AndXor(x, 0x007f007fu, 0x43004300u);
      const u32 high = AndXor(x, 0x00800080u, signed_ ? 0x43004300u : 0x43804380u);
      const u32 code = FmaBF16x2(high, 0xbf80bf80u, low);
      if (Merges()) return Sum(code, offset);
      return signed_ ? code : Sum(code, Constant(-Above(0)));
    }
    const i32 n = UpOf(i);
    const u32 mask = ((1u << bits_) - 1) << n, sign = signed_ ? 1u << (bits_ - 1 + n) : 0u;
    const u32 power = by_f16_ ? 0x6400u : Negative() ? 0xc300u : 0x4300u;
    const u32 flip = power | (Negative() ? mask ^ sign : sign);
    const u32 pair = AndXor(word >> ShiftOf(i), mask * 0x10001u, flip * 0x10001u);
    if (!Merges()) return Scaled(pair, n, Constant(-Above(n)));
    return Scaled(pair, n, n == 0 ? offset : Sum(offset, Constant(Above(0) - Above(n))));
  }
  // pair / 2^n + by
  KVANT_DEVICE u32 Scaled(u32 pair, i32 n, u32 by) const {
    if (n == 0) return Sum(pair, by);
    const u32 factor = Constant(1.f / static_cast<float>(1 << n));
    return by_f16_ ? FmaF16x2(pair, factor, by) : FmaBF16x2(pair, factor, by);
  }
  KVANT_DEVICE u32 Sum(u32 pair, u32 by) const {
    return by_f16_ ? AddF16x2(pair, by) : FmaBF16x2(pair, 0x3f803f80u, by);
  }
  KVANT_DEVICE u32 Product(u32 pair, u32 scale) const {
    return by_f16_ ? MultiplyF16x2(pair, scale) : FmaBF16x2(pair, scale, 0x80008000u);
  }
  KVANT_DEVICE u32 Twice(float x) const { return Pack(arithmetic_, x, x); }
  // Twice a normal number that 16 bits hold; the compiler knows its bits.
  KVANT_DEVICE u32 Constant(float x) const {
    const u32 bits = AsBits(x), magnitude = bits & 0x7fffffffu;
    const u32 half =
        by_f16_ ? (bits >> 16 & 0x8000u) | (magnitude - 0x38000000u) >> 13 : bits >> 16;
    return half * 0x10001u;
  }

  KVANT_DEVICE u32 OfF8(u32 word, i32 i, const PairParameters& parameters) const {
    const u32 pair = traits_.data.type == kFloat8E5M2 ? Permute(word, 0, i == 0 ? 0x1404 : 0x3424)
                                                      : F16x2OfE4M3(word >> 16 * i);
    if (by_f16_ && ByPairs()) return Product(pair, parameters.scales[0]);
    const float low = F16Low(pair), high = F16High(pair);
    if (ByPairs()) return Product(PackBF16(low, high), parameters.scales[0]);
    return Pack(arithmetic_, low * AsFloat(parameters.scales[0]),
                high * AsFloat(parameters.scales[1]));
  }

  KVANT_DEVICE u32 FloatsOf(u32 word, i32 i, const PairParameters& parameters) const {
    const i32 per_byte = 8 / bits_;
    const u32 mask = ((1u << bits_) - 1) * 0x01010101u, sign = signed_ ? 1u << (bits_ - 1) : 0u;
    const u32 bytes = AndXor(word >> i % per_byte * bits_, mask, sign * 0x01010101u);
    float x[2];
    KVANT_UNROLL
    for (i32 h = 0; h < 2; ++h) {
      const float scale = AsFloat(parameters.scales[h]), offset = AsFloat(parameters.offsets[h]);
      const i32 byte = i / per_byte + 2 * h;
      const float above = AsFloat(Permute(bytes, 0x4b000000u, static_cast<u32>(0x7550 + byte)));
      x[h] = real_ ? Fma(above - Above(0), scale, offset) : (above + offset) * scale;
    }
    return Pack(arithmetic_, x[0], x[1]);
  }

  const i32 bits_;
  const bool signed_, by_f16_, real_;
  const i32 arithmetic_;
  const SegmentTraits& traits_;
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_DEQUANTIZE_CODES_H_
