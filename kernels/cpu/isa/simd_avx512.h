// What simd.h needs of AVX-512 beside Highway's words. The members that are not private are those
// of every target.
#ifndef KVANT_KERNELS_CPU_ISA_SIMD_AVX512_H_
#define KVANT_KERNELS_CPU_ISA_SIMD_AVX512_H_

#include <cstdint>

#include "kvant/kernels/cpu/isa/simd_types.h"

namespace kvant::cpu {
namespace {

struct SimdTarget : SimdTypes {
  // Accumulators that fit the registers beside the operands they are made of.
  static constexpr int kAccumulators = 24;
  // Streams in turn in which rows are prefetched as they are stored (StreamBits): several where
  // that has been measured.
  static constexpr int kStreamBits = 0;

  // The first n < kWidth elements, and zeros beyond.
  static Vector LoadSome(const float* p, int64_t n) {
    return Vector{_mm512_maskz_loadu_ps(First(n), p)};
  }
  static void StoreSome(float* p, Vector v, int64_t n) {
    _mm512_mask_storeu_ps(p, First(n), v.raw);
  }
  // The first `bytes` of a vector or less, and zeros beyond.
  static Raw LoadRawSome(const uint8_t* p, int64_t bytes) {
    return Raw{_mm512_maskz_loadu_epi8(~uint64_t{0} >> (64 - bytes), p)};
  }

  // The first n lanes: all where n is more, none where it is less than 1.
  static __mmask16 FirstOf(int64_t n) {
    return n >= 16 ? __mmask16{0xffff} : n > 0 ? First(n) : __mmask16{0};
  }

  // a > b ? a : b, and a < b ? a : b.
  static Vector Max(Vector a, Vector b) { return hn::Max(a, b); }
  static Vector Min(Vector a, Vector b) { return hn::Min(a, b); }
  static float SumOf(Vector v) { return _mm512_reduce_add_ps(v.raw); }
  static float MaxOf(Vector v) { return _mm512_reduce_max_ps(v.raw); }
  // x < bound ? 0 : value.
  static Vector ZeroBelow(Vector x, Vector bound, Vector value) {
    return Vector{
        _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.raw, bound.raw, _CMP_NLT_UQ), value.raw)};
  }
  // value, or NaN where the mask of kWidth words is set.
  template <typename Mask>
  static Vector NanWhere(Mask words, Vector value) {
    return Vector{_mm512_mask_mov_ps(value.raw, static_cast<__mmask16>(words.raw),
                                     _mm512_set1_ps(__builtin_nanf("")))};
  }
  // |v| < 2^30 to the nearest integer, ties to even.
  static Index NearestInteger(Vector v) { return Index{_mm512_cvtps_epi32(v.raw)}; }

  // Quarters 0 and 2 of a, then of b; 1 and 3.
  static Vector EvenBlocks(Vector a, Vector b) {
    return Vector{_mm512_shuffle_f32x4(a.raw, b.raw, 0x88)};
  }
  static Vector OddBlocks(Vector a, Vector b) {
    return Vector{_mm512_shuffle_f32x4(a.raw, b.raw, 0xdd)};
  }
  // Of v[j], v[j + 4] and so on: their i-th quarters become the i-th vector.
  static HWY_INLINE void TransposeBlocks(Vector (&v)[kWidth]) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Vector low = hn::ConcatLowerLower(kFloats, v[j + 4], v[j]);
      const Vector high = hn::ConcatUpperUpper(kFloats, v[j + 4], v[j]);
      const Vector low2 = hn::ConcatLowerLower(kFloats, v[j + 12], v[j + 8]);
      const Vector high2 = hn::ConcatUpperUpper(kFloats, v[j + 12], v[j + 8]);
      v[j] = EvenBlocks(low, low2);
      v[j + 4] = OddBlocks(low, low2);
      v[j + 8] = EvenBlocks(high, high2);
      v[j + 12] = OddBlocks(high, high2);
    }
  }
  // Quarter g is op over the quarters of v[g].
  template <typename Op>
  static HWY_INLINE Vector FoldFours(const Vector (&v)[kWidth / 4], Op op) {
    const auto blocks = [op](Vector a, Vector b) { return op(EvenBlocks(a, b), OddBlocks(a, b)); };
    return blocks(blocks(v[0], v[1]), blocks(v[2], v[3]));
  }
  // lo, hi: a0 b0 a1 b1 ...
  static void Zip(Vector a, Vector b, Vector* lo, Vector* hi) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high =
        _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    *lo = Vector{_mm512_permutex2var_ps(a.raw, low, b.raw)};
    *hi = Vector{_mm512_permutex2var_ps(a.raw, high, b.raw)};
  }
  // Lane i has what lane at[i] < kWidth had.
  static Vector Permute(Vector v, Index at) { return Vector{_mm512_permutexvar_ps(at.raw, v.raw)}; }
  using Table = Vector;
  static Table LoadTable(const float* p, int64_t n) {
    return n < 16 ? LoadSome(p, n) : hn::LoadU(kFloats, p);
  }
  static Vector Look(Table table, Index i) { return Permute(table, i); }

  // Words within s16 to bytes.
  static Raw ClampWords(Int16s low, Int16s high) {
    return Raw{_mm512_packus_epi16(low.raw, high.raw)};
  }
  // Raw of four vectors in the order of ClampToBytes, without gaps in kBits each, the first
  // lowest.
  template <int kBits>
  static Raw PackBytes(Raw bytes) {
    // Dword k of quarter q is of elements 4 * q to 4 * q + 3 of the k-th vector.
    if constexpr (kBits == 8) {
      return Raw{_mm512_permutexvar_epi32(
          _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes.raw)};
    } else if constexpr (kBits == 4) {
      const __m512i order = _mm512_castsi256_si512(
          _mm256_setr_epi8(0, 2, 16, 18, 32, 34, 48, 50, 4, 6, 20, 22, 36, 38, 52, 54, 8, 10, 24,
                           26, 40, 42, 56, 58, 12, 14, 28, 30, 44, 46, 60, 62));
      return Raw{_mm512_permutexvar_epi8(
          order, _mm512_maddubs_epi16(bytes.raw, _mm512_set1_epi16(0x1001)))};
    } else {
      static_assert(kBits == 2);
      const __m512i order = _mm512_castsi128_si512(
          _mm_setr_epi8(0, 16, 32, 48, 4, 20, 36, 52, 8, 24, 40, 56, 12, 28, 44, 60));
      const __m512i pairs = _mm512_maddubs_epi16(bytes.raw, _mm512_set1_epi16(0x0401));
      return Raw{
          _mm512_permutexvar_epi8(order, _mm512_madd_epi16(pairs, _mm512_set1_epi32(0x00100001)))};
    }
  }

  // Codes in the low bits; of those that do not fill a table, in all.
  static Index IndexU4(Narrow<8> raw) { return Nibbles(raw); }
  static Index IndexU2(Narrow<4> raw) {
    return Index{_mm512_and_si512(BitPairs(raw).raw, _mm512_set1_epi32(3))};
  }
  // Permutes by index take the low four (two) bits of a dword and ignore the rest.
  static Vector FromU4(Narrow<8> raw) {
    return Permute(Vector{_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)},
                   Nibbles(raw));
  }
  static Vector FromS4(Narrow<8> raw) {
    return Permute(Vector{_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1)},
                   Nibbles(raw));
  }
  static Vector FromU2(Narrow<4> raw) {
    return Vector{_mm512_permutevar_ps(_mm512_set4_ps(3, 2, 1, 0), BitPairs(raw).raw)};
  }
  static Vector FromS2(Narrow<4> raw) {
    return Vector{_mm512_permutevar_ps(_mm512_set4_ps(-1, -2, 1, 0), BitPairs(raw).raw)};
  }

 protected:
  static __mmask16 First(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }

 private:
  // Dword i holds nibble i, or bit pair i, lowest.
  static Index Nibbles(Narrow<8> raw) {
    const __m512i halves =
        _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),
                                 _mm512_castsi128_si512(raw.vector.raw));
    return Index{_mm512_srlv_epi32(
        halves, _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28))};
  }
  static Index BitPairs(Narrow<4> raw) {
    return Index{_mm512_srlv_epi32(
        _mm512_broadcastd_epi32(raw.vector.raw),
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30))};
  }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_SIMD_AVX512_H_
