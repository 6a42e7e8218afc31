// Float vectors of AVX-512 (F, BW, DQ, VL) for the templates that the instruction sets
// share. See simd_avx2.h, which has the same members.
//
// Everything here has internal linkage: another unit's copy is compiled for another CPU.
#ifndef KVANT_KERNELS_CPU_ISA_SIMD_AVX512_H_
#define KVANT_KERNELS_CPU_ISA_SIMD_AVX512_H_

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace kvant::cpu {
namespace {

struct Avx512 {
  static constexpr int kWidth = 16;
  // Accumulators that fit the registers beside the operands they are made of.
  static constexpr int kAccumulators = 24;
  using Vector = __m512;
  using Raw = __m512i;  // bytes as they are stored

  static Vector Zero() { return _mm512_setzero_ps(); }
  static Vector Set1(float x) { return _mm512_set1_ps(x); }
  static Vector Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
  // The first n < kWidth elements; zeros beyond.
  static Vector LoadSome(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(First(n), p); }
  static void StoreSome(float* p, Vector v, int64_t n) { _mm512_mask_storeu_ps(p, First(n), v); }

  static Vector Add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  static Vector Sub(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
  static Vector Mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  static Vector Div(Vector a, Vector b) { return _mm512_div_ps(a, b); }
  static Vector Fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  // c - a * b.
  static Vector Fnma(Vector a, Vector b, Vector c) { return _mm512_fnmadd_ps(a, b, c); }
  // a > b ? a : b, and a < b ? a : b.
  static Vector Max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
  static Vector Min(Vector a, Vector b) { return _mm512_min_ps(a, b); }
  static float SumOf(Vector v) { return _mm512_reduce_add_ps(v); }
  static float MaxOf(Vector v) { return _mm512_reduce_max_ps(v); }
  // Element i is op over the elements of v[i]. Halves of the vectors are folded into each
  // other's, then quarters, so that it takes two shuffles for each op.
  template <typename Op>
  static Vector FoldEach(const Vector (&v)[kWidth], Op op) {
    Vector fours[kWidth / 4];
#pragma GCC unroll 4
    for (int i = 0; i < kWidth; i += 4) {
      fours[i / 4] = FoldFour(v[i], v[i + 1], v[i + 2], v[i + 3], op);
    }
    return FoldFours(fours, op);
  }
  // The same in two steps, with fewer vectors at a time.
  template <typename Op>
  static Vector FoldFour(Vector a, Vector b, Vector c, Vector d, Op op) {
    const auto halves = [op](Vector x, Vector y) {
      return op(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
    };
    const __m512d x = _mm512_castps_pd(halves(a, b)), y = _mm512_castps_pd(halves(c, d));
    return op(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
              _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  template <typename Op>
  static Vector FoldFours(const Vector (&v)[kWidth / 4], Op op) {
    const auto lanes = [op](Vector a, Vector b) {
      return op(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    return lanes(lanes(v[0], v[1]), lanes(v[2], v[3]));
  }
  // lo, hi: a0 b0 a1 b1 ...; even, odd: the reverse.
  static void Zip(Vector a, Vector b, Vector* lo, Vector* hi) {
    const Raw low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const Raw high =
        _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    *lo = _mm512_permutex2var_ps(a, low, b);
    *hi = _mm512_permutex2var_ps(a, high, b);
  }
  static void Unzip(Vector a, Vector b, Vector* even, Vector* odd) {
    const Raw evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const Raw odds = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    *even = _mm512_permutex2var_ps(a, evens, b);
    *odd = _mm512_permutex2var_ps(a, odds, b);
  }
  // Lane i has what lane i ^ step had.
  template <int step>
  static Vector Partner(Vector v) {
    if constexpr (step == 1) return _mm512_permute_ps(v, 0xb1);
    if constexpr (step == 2) return _mm512_permute_ps(v, 0x4e);
    if constexpr (step == 4) return _mm512_shuffle_f32x4(v, v, 0xb1);
    if constexpr (step == 8) return _mm512_shuffle_f32x4(v, v, 0x4e);
  }
  // Row i becomes column i.
  static void Transpose(Vector (&v)[kWidth]) {
    __m512d pairs[kWidth];
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; i += 2) {
      pairs[i] = _mm512_castps_pd(_mm512_unpacklo_ps(v[i], v[i + 1]));
      pairs[i + 1] = _mm512_castps_pd(_mm512_unpackhi_ps(v[i], v[i + 1]));
    }
    // v[4 * i + j]: of rows 4 * i to 4 * i + 3, columns j, j + 4, j + 8 and j + 12.
#pragma GCC unroll 4
    for (int i = 0; i < kWidth; i += 4) {
      v[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pairs[i], pairs[i + 2]));
      v[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pairs[i], pairs[i + 2]));
      v[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pairs[i + 1], pairs[i + 3]));
      v[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pairs[i + 1], pairs[i + 3]));
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Vector low = _mm512_shuffle_f32x4(v[j], v[j + 4], 0x44);
      const Vector high = _mm512_shuffle_f32x4(v[j], v[j + 4], 0xee);
      const Vector low2 = _mm512_shuffle_f32x4(v[j + 8], v[j + 12], 0x44);
      const Vector high2 = _mm512_shuffle_f32x4(v[j + 8], v[j + 12], 0xee);
      v[j] = _mm512_shuffle_f32x4(low, low2, 0x88);
      v[j + 4] = _mm512_shuffle_f32x4(low, low2, 0xdd);
      v[j + 8] = _mm512_shuffle_f32x4(high, high2, 0x88);
      v[j + 12] = _mm512_shuffle_f32x4(high, high2, 0xdd);
    }
  }
  // x < bound ? 0 : value.
  static Vector ZeroBelow(Vector x, Vector bound, Vector value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, bound, _CMP_NLT_UQ), value);
  }
  // x is NaN ? 0 : value.
  static Vector ZeroNan(Vector x, Vector value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), value);
  }
  // The bits as an integer that is in the order of the values; its own inverse.
  static Vector OrderKey(Vector x) {
    const __m512i bits = _mm512_castps_si512(x);
    return _mm512_castsi512_ps(
        FlipWhere(bits, _mm512_srai_epi32(bits, 31), _mm512_set1_epi32(0x7fffffff)));
  }
  // Of the absolute value: itself.
  static Vector MagnitudeKey(Vector x) { return _mm512_abs_ps(x); }
  static Vector MinKey(Vector a, Vector b) {
    return _mm512_castsi512_ps(_mm512_min_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }
  static Vector MaxKey(Vector a, Vector b) {
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }
  // The same of two numbers of 16 bits in each element.
  static Vector OrderKeys(Vector x) {
    const __m512i bits = _mm512_castps_si512(x);
    return _mm512_castsi512_ps(
        FlipWhere(bits, _mm512_srai_epi16(bits, 15), _mm512_set1_epi16(0x7fff)));
  }
  static Vector MagnitudeKeys(Vector x) {
    return _mm512_and_ps(x, _mm512_castsi512_ps(_mm512_set1_epi16(0x7fff)));
  }
  static Vector MinKeys(Vector a, Vector b) {
    return _mm512_castsi512_ps(_mm512_min_epi16(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }
  static Vector MaxKeys(Vector a, Vector b) {
    return _mm512_castsi512_ps(_mm512_max_epi16(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }
  // kWidth numbers of 16 bits, rounded to nearest even.
  static void StoreF16(uint8_t* p, Vector v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void StoreBF16(uint8_t* p, Vector v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i rounded =
        _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
  // Lane i has what lane at[i] < kWidth had.
  static Vector Permute(Vector v, __m512i at) { return _mm512_permutexvar_ps(at, v); }
  // Indices, and tables of up to 16 floats that are looked up by their low four bits.
  using Index = __m512i;
  using Table = __m512;
  static Table LoadTable(const float* p, int64_t n) { return n < 16 ? LoadSome(p, n) : Load(p); }
  static Vector Look(Table table, Index i) { return _mm512_permutexvar_ps(i, table); }
  static Vector Gather(const float* p, Index i) { return _mm512_i32gather_ps(i, p, 4); }
  static Index IndexOne() { return _mm512_set1_epi32(1); }
  static Index IndexFromBits(Vector v) { return _mm512_castps_si512(v); }
  static Vector BitsOfIndex(Index i) { return _mm512_castsi512_ps(i); }
  // x > bound ? 2 i + 1 : 2 i.
  static Index Descend(Index i, Vector x, Vector bound) {
    const Index left = _mm512_add_epi32(i, i);
    const __mmask16 right = _mm512_cmp_ps_mask(x, bound, _CMP_GT_OQ);
    return _mm512_mask_add_epi32(left, right, left, IndexOne());
  }
  // |v| < 2^30 to the nearest integer, ties to even.
  static Index NearestInteger(Vector v) { return _mm512_cvtps_epi32(v); }
  static Index AddIndex(Index a, Index b) { return _mm512_add_epi32(a, b); }
  // Integers within 2^31 - 1, plus `offset`, clamped to 0 .. limit <= 255: a byte each, and those
  // packed without gaps in kBits each, the first lowest.
  static Raw Words(int x) { return _mm512_set1_epi16(static_cast<int16_t>(x)); }
  static Raw Bytes(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
  static Raw XorRaw(Raw a, Raw b) { return _mm512_xor_si512(a, b); }
  // Qwords: kWidth / 2 numbers of 64 bits.
  static Raw Qwords(uint64_t x) { return _mm512_set1_epi64(static_cast<int64_t>(x)); }
  static Raw AddQwords(Raw a, Raw b) { return _mm512_add_epi64(a, b); }
  static Raw HighDwords(Raw a) { return _mm512_srli_epi64(a, 32); }
  // Of their low dwords.
  static Raw MulDwords(Raw a, Raw b) { return _mm512_mul_epu32(a, b); }
  static Raw XorEach(Raw a, Raw b, Raw c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
  // p[4 * i + j] becomes the low dword of the qword of words[j] that has i in QwordOrder.
  static Raw QwordOrder() { return _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); }
  static void StoreInFours(uint32_t* p, const Raw (&words)[4]) {
    const Raw first = PairDwords(words[0], words[1]), second = PairDwords(words[2], words[3]);
    _mm512_storeu_si512(p, _mm512_unpacklo_epi64(first, second));
    _mm512_storeu_si512(p + kWidth, _mm512_unpackhi_epi64(first, second));
  }
  // The bytes in some order of their own.
  static Raw ClampToBytes(const Index (&v)[4], Raw offset_words, Raw limit_bytes) {
    const Raw low = _mm512_adds_epi16(_mm512_packs_epi32(v[0], v[1]), offset_words);
    const Raw high = _mm512_adds_epi16(_mm512_packs_epi32(v[2], v[3]), offset_words);
    return _mm512_min_epu8(_mm512_packus_epi16(low, high), limit_bytes);
  }
  // In the order of v, and of their elements.
  template <int kBits>
  static Raw PackBytes(Raw bytes) {
    // Dword k of lane L is of elements 4 * L to 4 * L + 3 of v[k].
    if constexpr (kBits == 8) {
      return _mm512_permutexvar_epi32(
          _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
    } else if constexpr (kBits == 4) {
      const Raw order = _mm512_castsi256_si512(
          _mm256_setr_epi8(0, 2, 16, 18, 32, 34, 48, 50, 4, 6, 20, 22, 36, 38, 52, 54, 8, 10, 24,
                           26, 40, 42, 56, 58, 12, 14, 28, 30, 44, 46, 60, 62));
      return _mm512_permutexvar_epi8(order, _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x1001)));
    } else {
      static_assert(kBits == 2);
      const Raw order = _mm512_castsi128_si512(
          _mm_setr_epi8(0, 16, 32, 48, 4, 20, 36, 52, 8, 24, 40, 56, 12, 28, 44, 60));
      const Raw pairs = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x0401));
      return _mm512_permutexvar_epi8(order,
                                     _mm512_madd_epi16(pairs, _mm512_set1_epi32(0x00100001)));
    }
  }
  template <int kBytes>
  static void StoreRaw(uint8_t* p, Raw raw) {
    if constexpr (kBytes == 64) {
      _mm512_storeu_si512(p, raw);
    } else if constexpr (kBytes == 32) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(raw));
    } else {
      static_assert(kBytes == 16);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_castsi512_si128(raw));
    }
  }
  // 2^k, for k in the low bits of `shifted` (-127 < k < 128).
  static Vector PowerOfTwo(Vector shifted) {
    const __m512i biased = _mm512_add_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
  }

  // Bytes of kWidth elements, or the first `bytes` of them.
  template <int kBytes>
  static Raw LoadRaw(const uint8_t* p) {
    if constexpr (kBytes == 64) {
      return _mm512_loadu_si512(p);
    } else if constexpr (kBytes == 32) {
      return _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    } else if constexpr (kBytes == 16) {
      return _mm512_zextsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    } else if constexpr (kBytes == 8) {
      return _mm512_zextsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    } else {
      static_assert(kBytes == 4);
      return _mm512_zextsi128_si512(_mm_loadu_si32(p));
    }
  }
  static Raw LoadRawSome(const uint8_t* p, int64_t bytes) {
    return _mm512_maskz_loadu_epi8(~uint64_t{0} >> (64 - bytes), p);
  }

  static Vector FromF32(Raw raw) { return _mm512_castsi512_ps(raw); }
  static Vector FromF16(Raw raw) { return _mm512_cvtph_ps(_mm512_castsi512_si256(raw)); }
  static Vector FromBF16(Raw raw) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(raw));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static Vector FromE5M2(Raw raw) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm512_castsi512_si128(raw));
    return _mm512_cvtph_ps(_mm256_slli_epi16(wide, 8));
  }
  // With its exponent in f16's place, a code is worth 2^-8 of its value.
  static Vector FromE4M3(Raw raw) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm512_castsi512_si128(raw));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80));
    const __m256i sign = _mm256_and_si256(wide, _mm256_set1_epi16(int16_t{-0x8000}));
    const __m512 value =
        _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(half, sign)), _mm512_set1_ps(256.f));
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(half, _mm256_set1_epi16(0x3f80));
    return _mm512_mask_mov_ps(value, nan, _mm512_set1_ps(__builtin_nanf("")));
  }
  static Vector FromS32(Raw raw) { return _mm512_cvtepi32_ps(raw); }
  static Vector FromS8(Raw raw) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm512_castsi512_si128(raw)));
  }
  static Vector FromU8(Raw raw) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_castsi512_si128(raw)));
  }
  static Vector FromBoolean(Raw raw) {
    const __m128i bytes = _mm512_castsi512_si128(raw);
    return _mm512_maskz_mov_ps(_mm_test_epi8_mask(bytes, bytes), _mm512_set1_ps(1.f));
  }
  // Codes in the low bits; of those that do not fill a table, in all.
  static Index IndexU8(Raw raw) { return _mm512_cvtepu8_epi32(_mm512_castsi512_si128(raw)); }
  static Index IndexU4(Raw raw) { return Nibbles(raw); }
  static Index IndexU2(Raw raw) { return _mm512_and_si512(BitPairs(raw), _mm512_set1_epi32(3)); }
  // Permutes by index take the low four (two) bits of a dword and ignore the rest.
  static Vector FromU4(Raw raw) {
    return _mm512_permutexvar_ps(
        Nibbles(raw), _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }
  static Vector FromS4(Raw raw) {
    return _mm512_permutexvar_ps(
        Nibbles(raw), _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1));
  }
  static Vector FromU2(Raw raw) {
    return _mm512_permutevar_ps(_mm512_set4_ps(3, 2, 1, 0), BitPairs(raw));
  }
  static Vector FromS2(Raw raw) {
    return _mm512_permutevar_ps(_mm512_set4_ps(-1, -2, 1, 0), BitPairs(raw));
  }

 protected:
  static __mmask16 First(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }

 private:
  static __m512i PairDwords(__m512i low, __m512i high) {
    return _mm512_mask_blend_epi32(0xaaaa, low, _mm512_slli_epi64(high, 32));
  }
  // The bits of `flip` in lanes of -1.
  static __m512i FlipWhere(__m512i bits, __m512i lanes, __m512i flip) {
    return _mm512_ternarylogic_epi32(bits, lanes, flip, 0x78);
  }
  // Dword i holds nibble i of the first 8 bytes, or bit pair i of the first 4, lowest.
  static __m512i Nibbles(Raw raw) {
    const __m512i halves = _mm512_permutexvar_epi32(
        _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), raw);
    return _mm512_srlv_epi32(
        halves, _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28));
  }
  static __m512i BitPairs(Raw raw) {
    return _mm512_srlv_epi32(
        _mm512_broadcastd_epi32(_mm512_castsi512_si128(raw)),
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30));
  }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_SIMD_AVX512_H_
