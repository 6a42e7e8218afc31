// What codes_kernels.h and values_neon.h need of NEON with dot products of bytes (Armv8.2 DotProd).
//
// Queries and weights of s16 are two planes of bytes, 256 * high + low, both signed, and codes are
// bytes: two products and their sums are what one of s16 is, at twice the rate of multiplying s16.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_NEON_H_
#define KVANT_KERNELS_CPU_ISA_CODES_NEON_H_

#include <arm_neon.h>

#include <cstdint>

#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/isa/codes_common.h"
#include "kvant/kernels/cpu/isa/simd.h"

namespace kvant::cpu {
namespace {

struct NeonCodes : Simd, DwordColumns<NeonCodes> {
  using I = int32x4_t;
  // Each has two planes.
  static constexpr int kDotAccumulators = 8;
  // So that the high plane is a byte: (127 * 256 + 127).
  static constexpr float kMost = 32639.f;
  // Bytes of codes are signed: those of 8 bits become so.
  static constexpr uint8_t kByteFlip = 0x80;
  // Low and high, in turn.
  static constexpr int kPlanes = 2;
  template <int kBits>
  static constexpr int kFields = 8 / kBits;

  static I Dword(int32_t value) { return vdupq_n_s32(value); }
  static I LoadDwords(const int32_t* p) { return vld1q_s32(p); }
  static I ZeroDwords() { return vdupq_n_s32(0); }
  static I AddDwords(I a, I b) { return vaddq_s32(a, b); }
  static I Xor(I a, I b) { return veorq_s32(a, b); }
  static I And(I a, I b) { return vandq_s32(a, b); }
  // acc + the sum of the products of four signed bytes.
  static I Dot(I acc, I a, I b) {
    return vdotq_s32(acc, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
  }
  static Vector ToFloat(I a) { return Vector(vcvtq_f32_s32(a)); }
  static I ToDwords(Vector a) { return vcvtnq_s32_f32(a.raw); }
  static int32_t SumOfDwords(I a) { return vaddvq_s32(a); }

  // See PairedHalves. The fields of a dword are bytes, for a low and a high plane of queries.
  template <int kBits, int k>
  static I Field(I word) {
    return ByteField<kBits, k / 2>(word);
  }
  template <int kBits, int k>
  static I Centred(I word) {
    if constexpr (kBits == 8) return word;
    const int8x16_t middle = vdupq_n_s8(1 << (kBits - 1));
    return vreinterpretq_s32_s8(vsubq_s8(vreinterpretq_s8_s32(ByteField<kBits, k>(word)), middle));
  }
  static I Ones() { return Dword(0x01010101); }
  template <int kChains>
  static I SumOfChains(const I (&chains)[kChains]) {
    I low = chains[0], high = chains[1];
    for (int i = 2; i < kChains; i += 2) {
      low = AddDwords(low, chains[i]);
      high = AddDwords(high, chains[i + 1]);
    }
    return Joined(low, high);
  }
  // high * 256 + low.
  static I Joined(I low, I high) { return vaddq_s32(low, vshlq_n_s32(high, 8)); }

  // The k-th lowest field of kBits of each byte.
  template <int kBits, int k>
  static I ByteField(I word) {
    if constexpr (kBits == 8) return word;
    uint8x16_t bytes = vreinterpretq_u8_s32(word);
    if constexpr (k > 0) bytes = vshrq_n_u8(bytes, k * kBits);
    if constexpr ((k + 1) * kBits < 8) bytes = vandq_u8(bytes, vdupq_n_u8((1 << kBits) - 1));
    return vreinterpretq_s32_u8(bytes);
  }

  // Of a row, as columns at a time.
  static constexpr int64_t kColumnBytes = 16;
  // Up to so many of each of 4 rows, row min(i, last), as dword columns of kTokenTile, each dword
  // ^ flips.
  static void Columns(const uint8_t* p, int64_t stride, int64_t last, int64_t bytes, I flips,
                      int32_t* out) {
    I rows[kWidth];
    LoadRows(p, stride, last, bytes, rows);
    Vector columns[kWidth];
#pragma GCC unroll 4
    for (int i = 0; i < kWidth; ++i) columns[i] = Vector(vreinterpretq_f32_s32(rows[i]));
    Transpose(columns);
#pragma GCC unroll 4
    for (int i = 0; i < kWidth; ++i) {
      vst1q_s32(out + i * kTokenTile, Xor(vreinterpretq_s32_f32(columns[i].raw), flips));
    }
  }
  // kColumnBytes, or less, of each of 4 rows, row min(i, last). Most tiles are whole: these take as
  // few instructions for addresses as for loads.
  static HWY_INLINE void LoadRows(const uint8_t* p, int64_t stride, int64_t last, int64_t bytes,
                                  I (&rows)[kWidth]) {
    if (last >= kWidth - 1 && bytes >= kColumnBytes) {
#pragma GCC unroll 4
      for (int i = 0; i < kWidth; ++i) rows[i] = vreinterpretq_s32_u8(vld1q_u8(p + i * stride));
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < kWidth; ++i) {
        const uint8_t* const row = p + CodesMin(i, last) * stride;
        rows[i] = vreinterpretq_s32_u8(LoadRawSome(row, CodesMin(bytes, kColumnBytes)).raw);
      }
    }
  }

  // Half to even.
  static Vector Round(Vector a) { return Vector(vrndnq_f32(a.raw)); }
  // Rounds a * factor and b * factor, within s16, each with its dither, and stores them as such.
  static void RoundToHalves(int16_t* to, Vector& a, Vector& b, Vector factor, const float* dither) {
    a = Round(Fma(a, factor, Load(dither)));
    b = Round(Fma(b, factor, Load(dither + kWidth)));
    vst1q_s16(to, vcombine_s16(vqmovn_s32(ToDwords(a)), vqmovn_s32(ToDwords(b))));
  }

  // 16 numbers of s16 within kMost by planes, the low bytes and the high ones.
  static int8x16x2_t PlanesOf(const int16_t* from) {
    const int16x8_t a = vld1q_s16(from), b = vld1q_s16(from + 8);
    return {{vcombine_s8(vmovn_s16(a), vmovn_s16(b)),
             vcombine_s8(vrshrn_n_s16(a, 8), vrshrn_n_s16(b, 8))}};
  }
  // Of 16 numbers, kPerDword for each dword of codes: for the k-th field of its bytes, the low
  // plane of the four numbers as a dword, then the high one.
  template <int kPerDword>
  static void PairHalves(const int16_t* from, int32_t* to) {
    PairPlanes<4, kPerDword / 4>(from, to);
  }

  // Values: what multiplies codes of kBits by so many rows.
  template <int kBits, int kRows>
  using OfValues = NeonCodes;
  // A lane sums products of so many tokens, whose bytes lie side by side.
  static constexpr int kTokens = 4;
  // Of each quad of kTokens tokens, four vectors of four dwords, which are a byte of each.
  static void StoreTransposed(const I (&quads)[1][4], int32_t* out) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) vst1q_s32(out + 4 * j, quads[0][j]);
  }
  // Weights of 16 tokens, as their products take them: by planes.
  static int8x16x2_t WeightsOf(const int16_t* from) { return PlanesOf(from); }
  // 16 tokens are multiplied in four steps. Where the v-th four bytes of each are, in dwords behind
  // the first token's, and their products.
  template <int step>
  static constexpr int64_t TransposedAt(int64_t v) {
    return step * 16 + v * 4;
  }
  template <int step>
  static HWY_INLINE void AddTokens(I (&sums)[2], I codes, const int8x16x2_t& weights) {
    const int8x16_t bytes = vreinterpretq_s8_s32(codes);
    sums[0] = vdotq_laneq_s32(sums[0], bytes, weights.val[0], step);
    sums[1] = vdotq_laneq_s32(sums[1], bytes, weights.val[1], step);
  }

 protected:
  // The same of whole operands: kBytes bytes, of kFieldsOfByte fields each, are multiplied by as
  // many numbers in each plane.
  template <int kBytes, int kFieldsOfByte>
  static void PairPlanes(const int16_t* from, int32_t* to) {
    constexpr int kNumbers = kBytes * kFieldsOfByte < 16 ? 16 : kBytes * kFieldsOfByte;
    alignas(16) static constexpr auto kOrder = [] {
      ByteOrder<2 * kNumbers> order{};
      for (int i = 0; i < 2 * kNumbers; ++i) {
        const int of_byte = i % kBytes, plane = i / kBytes % 2;
        const int field = i / (2 * kBytes) % kFieldsOfByte, run = i / (2 * kBytes * kFieldsOfByte);
        const int number = (run * kBytes + of_byte) * kFieldsOfByte + field;
        order.at[i] = static_cast<uint8_t>(number / 16 * 32 + plane * 16 + number % 16);
      }
      return order;
    }();
    const int8x16x2_t some = PlanesOf(from);
    const int8x16x2_t more = kNumbers > 16 ? PlanesOf(from + 16) : some;
    const int8x16x4_t planes = {{some.val[0], some.val[1], more.val[0], more.val[1]}};
    for (int i = 0; i < 2 * kNumbers; i += 16) {
      const uint8x16_t order = vld1q_u8(kOrder.at + i);
      const int8x16_t bytes = kNumbers > 16 ? vqtbl4q_s8(planes, order) : vqtbl2q_s8(some, order);
      vst1q_s8(reinterpret_cast<int8_t*>(to) + i, bytes);
    }
  }

 private:
  template <int kCount>
  struct ByteOrder {
    uint8_t at[kCount];
  };
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_NEON_H_
