// What simd.h needs of NEON beside Highway's words; simd_avx512.h says what members do.
#ifndef KVANT_KERNELS_CPU_ISA_SIMD_NEON_H_
#define KVANT_KERNELS_CPU_ISA_SIMD_NEON_H_

#include <cstdint>

#include "kvant/kernels/cpu/isa/simd_types.h"

namespace kvant::cpu {
namespace {

struct SimdTarget : NarrowTarget<SimdTarget> {
  static constexpr int kAccumulators = 24;
  static constexpr int kStreamBits = 0;

  static Vector LoadSome(const float* p, int64_t n) {
    float32x4_t v = vdupq_n_f32(0.f);
    if (n >= 2) {
      v = vcombine_f32(vld1_f32(p), vdup_n_f32(0.f));
      if (n == 3) v = vld1q_lane_f32(p + 2, v, 2);
    } else if (n == 1) {
      v = vld1q_lane_f32(p, v, 0);
    }
    return Vector(v);
  }
  static void StoreSome(float* p, Vector v, int64_t n) {
    if (n >= 2) {
      vst1_f32(p, vget_low_f32(v.raw));
      if (n == 3) vst1q_lane_f32(p + 2, v.raw, 2);
    } else if (n == 1) {
      vst1q_lane_f32(p, v.raw, 0);
    }
  }
  static Raw LoadRawSome(const uint8_t* p, int64_t bytes) {
    const TwoQwords words = SomeBytes(p, bytes);
    return Raw(vreinterpretq_u8_u64(vcombine_u64(vcreate_u64(words.low), vcreate_u64(words.high))));
  }

  // Arm's own keep every NaN.
  static Vector Max(Vector a, Vector b) { return hn::IfThenElse(hn::Gt(a, b), a, b); }
  static Vector Min(Vector a, Vector b) { return hn::IfThenElse(hn::Lt(a, b), a, b); }
  static float SumOf(Vector v) { return vaddvq_f32(v.raw); }
  static float MaxOf(Vector v) { return vmaxvq_f32(v.raw); }
  static Index NearestInteger(Vector v) { return hn::NearestInt(v); }

  // There is one quarter.
  static HWY_INLINE void TransposeBlocks(Vector (&)[kWidth]) {}
  template <typename Op>
  static HWY_INLINE Vector FoldFours(const Vector (&v)[1], Op) {
    return v[0];
  }
  static void Zip(Vector a, Vector b, Vector* lo, Vector* hi) {
    *lo = hn::InterleaveLower(kFloats, a, b);
    *hi = hn::InterleaveUpper(kFloats, a, b);
  }
  static Vector Permute(Vector v, Index at) {
    return Vector(vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(v.raw), BytesOf(at))));
  }
  using Table = uint8x16x4_t;
  static Table LoadTable(const float* p, int64_t n) {
    const auto four = [p, n](int64_t at) {
      const int64_t left = n - at;
      const Vector v = left >= 4  ? hn::LoadU(kFloats, p + at)
                       : left > 0 ? LoadSome(p + at, left)
                                  : hn::Zero(kFloats);
      return vreinterpretq_u8_f32(v.raw);
    };
    return {{four(0), four(4), four(8), four(12)}};
  }
  static Vector Look(Table table, Index i) {
    const Index low = hn::And(i, hn::Set(kInt32s, 15));
    return Vector(vreinterpretq_f32_u8(vqtbl4q_u8(table, BytesOf(low))));
  }

  static Raw ClampWords(Int16s low, Int16s high) {
    return Raw(vcombine_u8(vqmovun_s16(low.raw), vqmovun_s16(high.raw)));
  }
  template <int kBits>
  static Raw PackBytes(Raw bytes) {
    if constexpr (kBits == 8) {
      return bytes;
    } else {
      // Pairs side by side in the low byte of each word, then pairs of these.
      const uint16x8_t words = vreinterpretq_u16_u8(bytes.raw);
      const uint8x8_t pairs = vmovn_u16(vsraq_n_u16(words, words, 8 - kBits));
      if constexpr (kBits == 4) return Raw(vcombine_u8(pairs, pairs));
      const uint16x4_t fours = vreinterpret_u16_u8(pairs);
      const uint8x8_t packed = vmovn_u16(vcombine_u16(vsra_n_u16(fours, fours, 4), vdup_n_u16(0)));
      return Raw(vcombine_u8(packed, packed));
    }
  }

  template <typename V>
  static Uint32s FirstDword(V v) {
    return Uint32s(vdupq_lane_u32(vreinterpret_u32_u8(v.raw), 0));
  }

 private:
  // Of dwords of which each has a position below 16, those of their bytes.
  static uint8x16_t BytesOf(Index at) {
    const uint32x4_t bytes =
        vmlaq_n_u32(vdupq_n_u32(0x03020100), vreinterpretq_u32_s32(at.raw), 0x04040404);
    return vreinterpretq_u8_u32(bytes);
  }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_SIMD_NEON_H_
