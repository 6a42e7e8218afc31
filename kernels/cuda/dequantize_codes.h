// 8 integer codes at a time to what products are computed in: (code - zero point) * scale, or
// code * scale - zero point, rounded once.
//
// A code is put below the leading bits of a power of two, M + code, from which M and the zero point
// are taken exactly: as pairs in 16-bit arithmetic where M + code, the zero point and the scale fit
// it, else in f32.
#ifndef KVANT_KERNELS_CUDA_DEQUANTIZE_CODES_H_
#define KVANT_KERNELS_CUDA_DEQUANTIZE_CODES_H_

#include "kvant/kernels/cuda/dequantize_tile.h"

namespace kvant::cuda {

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
    const i32 zero = traits_.zero_points.type;
    return IsInteger(traits_.data.type) && traits_.codebook == 0 && traits_.scales.type != kNone &&
           !TakesF32(arithmetic_) && (real_ || zero == kNone || IsInteger(zero));
  }

  // A group's scale and offset, as words.
  KVANT_DEVICE Words2 Parameters(const GroupParameters& group) const {
    const float offset = OffsetHasBias() ? Bias() - group.zero_point : -group.zero_point;
    if (!ByPairs()) return {{AsBits(group.scale), AsBits(offset)}};
    return {{Pack(arithmetic_, group.scale, group.scale), Pack(arithmetic_, offset, offset)}};
  }

  // From 8 codes to 8 values of 16 bits.
  KVANT_DEVICE Words4 Values(const Eight& codes, const Words2& parameters) const {
    u32 bytes[2];
    Bytes(codes, bytes);
    Words4 values;
    KVANT_UNROLL
    for (i32 i = 0; i < 4; ++i) {
      values.v[i] = ByPairs() ? PairOf(bytes[i / 2], i % 2, parameters)
                              : FloatsOf(bytes[i / 2], i % 2 * 2, parameters);
    }
    return values;
  }

 private:
  KVANT_DEVICE static constexpr bool IsSigned(i32 type) {
    return type == kInt8 || type == kInt4 || type == kInt2;
  }
  // Of 8 bits at most.
  KVANT_DEVICE static constexpr bool IsInteger(i32 type) {
    return IsSigned(type) || type == kUint8 || type == kUint4 || type == kUint2;
  }

  // bf16 has room for 128 + a code of 7 bits, and for differences up to 256.
  KVANT_DEVICE constexpr bool ByPairs() const {
    const i32 own = by_f16_ ? kFloat16 : kBFloat16, zero = traits_.zero_points.type;
    if (traits_.scales.type != own || (real_ && zero != own)) return false;
    return by_f16_ || (bits_ < 8 && !(signed_ && zero == kUint8));
  }
  // Whether the power of two is taken off with the zero point, for which 128 + a zero point of 8
  // bits is too much for bf16.
  KVANT_DEVICE constexpr bool OffsetHasBias() const {
    const bool wide = ByPairs() && !by_f16_ && BitsOf(traits_.zero_points.type) == 8;
    return !real_ && !wide;
  }
  // Less a power of two, and what signed codes are moved by to be above 0.
  KVANT_DEVICE constexpr float Bias() const {
    const float power = !ByPairs() ? 8388608.f : by_f16_ ? 1024.f : 128.f;
    return -(power + (signed_ ? static_cast<float>(1 << (bits_ - 1)) : 0.f));
  }

  // A code in each byte.
  KVANT_DEVICE void Bytes(const Eight& codes, u32 (&bytes)[2]) const {
    if (bits_ == 8) {
      KVANT_UNROLL
      for (i32 w = 0; w < 2; ++w) bytes[w] = signed_ ? codes.v[w] ^ 0x80808080u : codes.v[w];
      return;
    }
    if (bits_ == 4) {
      const u32 word = signed_ ? codes.v[0] ^ 0x88888888u : codes.v[0];
      const u32 even = word & 0x0f0f0f0fu, odd = word >> 4 & 0x0f0f0f0fu;
      bytes[0] = Permute(even, odd, 0x5140);
      bytes[1] = Permute(even, odd, 0x7362);
      return;
    }
    const u32 word = signed_ ? codes.v[0] ^ 0xaaaau : codes.v[0];
    // Codes 0 2 4 6, and 1 3 5 7, in 4 bits each.
    const u32 spread = AndOr(word, 0x3333u, (word & 0xccccu) << 14);
    const u32 low = spread & 0x0f0f0f0fu, high = spread >> 4 & 0x0f0f0f0fu;  // 0 4 1 5, 2 6 3 7
    bytes[0] = Permute(low, high, 0x6420);
    bytes[1] = Permute(low, high, 0x7531);
  }

  KVANT_DEVICE u32 PairOf(u32 bytes, i32 half, const Words2& parameters) const {
    const u32 power = by_f16_ ? 0x64646464u : 0x43434343u;
    const u32 pair = Permute(bytes, power, half == 0 ? 0x4140 : 0x4342);
    const u32 scale = parameters.v[0], offset = parameters.v[1];
    const u32 bias = OffsetHasBias() ? offset : Pack(arithmetic_, Bias(), Bias());
    u32 code = Shifted(pair, bias);
    if (real_) return by_f16_ ? FmaF16x2(code, scale, offset) : FmaBF16x2(code, scale, offset);
    if (!OffsetHasBias()) code = Shifted(code, offset);
    return by_f16_ ? MultiplyF16x2(code, scale) : FmaBF16x2(code, scale, 0x80008000u);
  }
  KVANT_DEVICE u32 Shifted(u32 pair, u32 by) const {
    return by_f16_ ? AddF16x2(pair, by) : FmaBF16x2(pair, 0x3f803f80u, by);
  }

  // Of bytes `first` and the one after it.
  KVANT_DEVICE u32 FloatsOf(u32 bytes, i32 first, const Words2& parameters) const {
    const float scale = AsFloat(parameters.v[0]), offset = AsFloat(parameters.v[1]);
    float x[2];
    KVANT_UNROLL
    for (i32 i = 0; i < 2; ++i) {
      const float above =
          AsFloat(Permute(bytes, 0x4b000000u, static_cast<u32>(0x7550 + first + i)));
      x[i] = real_ ? Fma(above + Bias(), scale, offset) : (above + offset) * scale;
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
