// Codes that stand for floats, by NEON: what codes_floats.h needs of it. floats_avx512.h says what
// members do; here a vector of bytes is of one token, and its values are in the order of channels.
#ifndef KVANT_KERNELS_CPU_ISA_FLOATS_NEON_H_
#define KVANT_KERNELS_CPU_ISA_FLOATS_NEON_H_

#include <arm_neon.h>

#include <cstdint>

#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/isa/codes_neon.h"

namespace kvant::cpu {
namespace {

struct NeonFloats : NeonCodes {
  // Positions in a table of 16: its floats by their first bytes, their second ones, and so on.
  class Entries {
   public:
    static constexpr int kBits = 4;
    struct Words {
      Vector values[8];
    };

    explicit Entries(const FloatCodes& codes)
        : planes_(vld4q_u8(reinterpret_cast<const uint8_t*>(codes.codebook))) {}

    HWY_INLINE Words Open(uint8x16_t bytes) const {
      const uint8x16_t low = vandq_u8(bytes, vdupq_n_u8(15)), high = vshrq_n_u8(bytes, 4);
      Words words;
      Look16(vzip1q_u8(low, high), words.values);
      Look16(vzip2q_u8(low, high), words.values + 4);
      return words;
    }
    template <int k>
    static HWY_INLINE Vector Value(const Words& words) {
      return words.values[k];
    }
    static int PlaceOf(int c) { return c; }

    // Of which Open makes the first four values.
    static constexpr int kRunBytes = 8;
    static HWY_INLINE uint8x16_t LoadRun(const uint8_t* p, int64_t bytes) {
      return bytes >= kRunBytes ? vcombine_u8(vld1_u8(p), vdup_n_u8(0)) : LoadRawSome(p, bytes).raw;
    }
    static HWY_INLINE void Sort(const Vector (&values)[4], Vector (&channels)[4]) {
      CopyFour(values, channels);
    }
    static HWY_INLINE Vector Worth(Vector sum) { return sum; }

   private:
    HWY_INLINE void Look16(uint8x16_t at, Vector* values) const {
      const uint8x16_t b0 = vqtbl1q_u8(planes_.val[0], at), b1 = vqtbl1q_u8(planes_.val[1], at);
      const uint8x16_t b2 = vqtbl1q_u8(planes_.val[2], at), b3 = vqtbl1q_u8(planes_.val[3], at);
      const uint16x8_t low0 = vreinterpretq_u16_u8(vzip1q_u8(b0, b1)),
                       low1 = vreinterpretq_u16_u8(vzip2q_u8(b0, b1)),
                       high0 = vreinterpretq_u16_u8(vzip1q_u8(b2, b3)),
                       high1 = vreinterpretq_u16_u8(vzip2q_u8(b2, b3));
      values[0] = Vector(vreinterpretq_f32_u16(vzip1q_u16(low0, high0)));
      values[1] = Vector(vreinterpretq_f32_u16(vzip2q_u16(low0, high0)));
      values[2] = Vector(vreinterpretq_f32_u16(vzip1q_u16(low1, high1)));
      values[3] = Vector(vreinterpretq_f32_u16(vzip2q_u16(low1, high1)));
    }

    uint8x16x4_t planes_;
  };

  // f8, by way of f16. E5M2 is the upper byte of one. E4M3 with its exponent in f16's place is
  // worth 2^-8 of its value, and its last code is no number; that of E5M2 is none anyway.
  class Bytes {
   public:
    static constexpr int kBits = 8;
    struct Words {
      Vector values[4];
    };

    explicit Bytes(const FloatCodes& codes)
        : up_(vdupq_n_s8(codes.type == kF8E4M3 ? -1 : 0)),
          down_(vdupq_n_s8(codes.type == kF8E4M3 ? 7 : 8)),
          factor_(Set1(codes.type == kF8E4M3 ? 256.f : 1.f)) {}

    HWY_INLINE Words Open(uint8x16_t bytes) const {
      const uint8x16_t magnitude = vandq_u8(bytes, vdupq_n_u8(0x7f));
      const uint8x16_t nan = vandq_u8(vceqq_u8(magnitude, vdupq_n_u8(0x7f)), vdupq_n_u8(0x7e));
      const uint8x16_t upper =
          vorrq_u8(vbslq_u8(vdupq_n_u8(0x80), bytes, vshlq_u8(magnitude, up_)), nan);
      const uint8x16_t lower = vshlq_u8(bytes, down_);
      const float16x8_t low = vreinterpretq_f16_u8(vzip1q_u8(lower, upper)),
                        high = vreinterpretq_f16_u8(vzip2q_u8(lower, upper));
      return {{Mul(Vector(vcvt_f32_f16(vget_low_f16(low))), factor_),
               Mul(Vector(vcvt_high_f32_f16(low)), factor_),
               Mul(Vector(vcvt_f32_f16(vget_low_f16(high))), factor_),
               Mul(Vector(vcvt_high_f32_f16(high)), factor_)}};
    }
    template <int k>
    static HWY_INLINE Vector Value(const Words& words) {
      return words.values[k];
    }
    static int PlaceOf(int c) { return c; }

    static constexpr int kRunBytes = 16;
    static HWY_INLINE uint8x16_t LoadRun(const uint8_t* p, int64_t bytes) {
      return bytes >= kRunBytes ? vld1q_u8(p) : LoadRawSome(p, bytes).raw;
    }
    static HWY_INLINE void Sort(const Vector (&values)[4], Vector (&channels)[4]) {
      CopyFour(values, channels);
    }
    static HWY_INLINE Vector Worth(Vector sum) { return sum; }

   private:
    int8x16_t up_, down_;  // shifts to the left
    Vector factor_;
  };

  static constexpr int kTokensOfVector = 1;
  template <int kRows>
  static constexpr int kAtOnce = 4;
  template <int kRows>
  static constexpr int kValueSums = 4;
  // Loads of queries cost less than registers.
  template <int kRows>
  static constexpr int kShared = 1;
  static HWY_INLINE uint8x16_t LoadPieces(const uint8_t* p, int64_t) { return vld1q_u8(p); }
  static HWY_INLINE uint8x16_t LoadSomePieces(const uint8_t* const (&p)[1], int64_t bytes) {
    return LoadRawSome(p[0], bytes).raw;
  }
  static HWY_INLINE Vector QueriesOfTokens(const float* p) { return Load(p); }
  static HWY_INLINE Vector SumsOfTokens(const Vector (&v)[4]) {
    return FoldFour(v[0], v[1], v[2], v[3], Add);
  }
  // Groups are whole runs.
  static HWY_INLINE Vector FloatWeights(const float* const (&groups)[1], int64_t at) {
    return Set1(groups[0][at]);
  }

 private:
  static HWY_INLINE void CopyFour(const Vector (&from)[4], Vector (&to)[4]) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) to[i] = from[i];
  }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_FLOATS_NEON_H_
