// Float vectors of AVX2 with FMA and F16C for the templates that the instruction sets
// share. See simd_avx512.h, which has the same members.
//
// Everything here has internal linkage: another unit's copy is compiled for another CPU.
#ifndef KVANT_KERNELS_CPU_ISA_SIMD_AVX2_H_
#define KVANT_KERNELS_CPU_ISA_SIMD_AVX2_H_

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace kvant::cpu {
namespace {

struct Avx2 {
  static constexpr int kWidth = 8;
  // Accumulators that fit the registers beside the operands they are made of.
  static constexpr int kAccumulators = 12;
  using Vector = __m256;
  using Raw = __m256i;  // bytes as they are stored

  static Vector Zero() { return _mm256_setzero_ps(); }
  static Vector Set1(float x) { return _mm256_set1_ps(x); }
  static Vector Load(const float* p) { return _mm256_loadu_ps(p); }
  static void Store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
  // The first n < kWidth elements; zeros beyond.
  static Vector LoadSome(const float* p, int64_t n) { return _mm256_maskload_ps(p, First(n)); }
  static void StoreSome(float* p, Vector v, int64_t n) { _mm256_maskstore_ps(p, First(n), v); }

  static Vector Add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static Vector Sub(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
  static Vector Mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  static Vector Div(Vector a, Vector b) { return _mm256_div_ps(a, b); }
  static Vector Fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  // c - a * b.
  static Vector Fnma(Vector a, Vector b, Vector c) { return _mm256_fnmadd_ps(a, b, c); }
  // a > b ? a : b, and a < b ? a : b.
  static Vector Max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
  static Vector Min(Vector a, Vector b) { return _mm256_min_ps(a, b); }
  static float SumOf(Vector v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  static float MaxOf(Vector v) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  // Element i is op over the elements of v[i]. Halves of the vectors are folded into each
  // other's, then quarters, so that it takes two shuffles for each op.
  template <typename Op>
  static Vector FoldEach(const Vector (&v)[kWidth], Op op) {
    const Vector fours[] = {FoldFour(v[0], v[1], v[2], v[3], op),
                            FoldFour(v[4], v[5], v[6], v[7], op)};
    return FoldFours(fours, op);
  }
  // The same in two steps, with fewer vectors at a time.
  template <typename Op>
  static Vector FoldFour(Vector a, Vector b, Vector c, Vector d, Op op) {
    const auto halves = [op](Vector x, Vector y) {
      return op(_mm256_unpacklo_ps(x, y), _mm256_unpackhi_ps(x, y));
    };
    const __m256d x = _mm256_castps_pd(halves(a, b)), y = _mm256_castps_pd(halves(c, d));
    return op(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)),
              _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  }
  template <typename Op>
  static Vector FoldFours(const Vector (&v)[kWidth / 4], Op op) {
    return op(_mm256_permute2f128_ps(v[0], v[1], 0x20), _mm256_permute2f128_ps(v[0], v[1], 0x31));
  }
  // lo, hi: a0 b0 a1 b1 ...; even, odd: the reverse.
  static void Zip(Vector a, Vector b, Vector* lo, Vector* hi) {
    const Vector low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
    *lo = _mm256_permute2f128_ps(low, high, 0x20);
    *hi = _mm256_permute2f128_ps(low, high, 0x31);
  }
  static void Unzip(Vector a, Vector b, Vector* even, Vector* odd) {
    const Vector low = _mm256_permute2f128_ps(a, b, 0x20),
                 high = _mm256_permute2f128_ps(a, b, 0x31);
    *even = _mm256_shuffle_ps(low, high, 0x88);
    *odd = _mm256_shuffle_ps(low, high, 0xdd);
  }
  // Lane i has what lane i ^ step had.
  template <int step>
  static Vector Partner(Vector v) {
    if constexpr (step == 1) return _mm256_permute_ps(v, 0xb1);
    if constexpr (step == 2) return _mm256_permute_ps(v, 0x4e);
    if constexpr (step == 4) return _mm256_permute2f128_ps(v, v, 0x01);
  }
  // Row i becomes column i.
  static void Transpose(Vector (&v)[kWidth]) {
    __m256d pairs[kWidth];
#pragma GCC unroll 8
    for (int i = 0; i < kWidth; i += 2) {
      pairs[i] = _mm256_castps_pd(_mm256_unpacklo_ps(v[i], v[i + 1]));
      pairs[i + 1] = _mm256_castps_pd(_mm256_unpackhi_ps(v[i], v[i + 1]));
    }
    Vector quads[kWidth];
    // quads[4 * i + j]: of rows 4 * i to 4 * i + 3, columns j and j + 4.
#pragma GCC unroll 2
    for (int i = 0; i < kWidth; i += 4) {
      quads[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(pairs[i], pairs[i + 2]));
      quads[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(pairs[i], pairs[i + 2]));
      quads[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(pairs[i + 1], pairs[i + 3]));
      quads[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(pairs[i + 1], pairs[i + 3]));
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      v[j] = _mm256_permute2f128_ps(quads[j], quads[j + 4], 0x20);
      v[j + 4] = _mm256_permute2f128_ps(quads[j], quads[j + 4], 0x31);
    }
  }
  // x < bound ? 0 : value.
  static Vector ZeroBelow(Vector x, Vector bound, Vector value) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, bound, _CMP_LT_OQ), value);
  }
  // x is NaN ? 0 : value.
  static Vector ZeroNan(Vector x, Vector value) {
    return _mm256_and_ps(_mm256_cmp_ps(x, x, _CMP_ORD_Q), value);
  }
  // The bits as an integer that is in the order of the values; its own inverse.
  static Vector OrderKey(Vector x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i flip =
        _mm256_and_si256(_mm256_srai_epi32(bits, 31), _mm256_set1_epi32(0x7fffffff));
    return _mm256_castsi256_ps(_mm256_xor_si256(bits, flip));
  }
  // Of the absolute value: itself.
  static Vector MagnitudeKey(Vector x) {
    return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
  }
  static Vector MinKey(Vector a, Vector b) {
    return _mm256_castsi256_ps(_mm256_min_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
  }
  static Vector MaxKey(Vector a, Vector b) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
  }
  // The same of two numbers of 16 bits in each element.
  static Vector OrderKeys(Vector x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i flip = _mm256_and_si256(_mm256_srai_epi16(bits, 15), _mm256_set1_epi16(0x7fff));
    return _mm256_castsi256_ps(_mm256_xor_si256(bits, flip));
  }
  static Vector MagnitudeKeys(Vector x) {
    return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi16(0x7fff)));
  }
  static Vector MinKeys(Vector a, Vector b) {
    return _mm256_castsi256_ps(_mm256_min_epi16(_mm256_castps_si256(a), _mm256_castps_si256(b)));
  }
  static Vector MaxKeys(Vector a, Vector b) {
    return _mm256_castsi256_ps(_mm256_max_epi16(_mm256_castps_si256(a), _mm256_castps_si256(b)));
  }
  // kWidth numbers of 16 bits, rounded to nearest even.
  static void StoreF16(uint8_t* p, Vector v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void StoreBF16(uint8_t* p, Vector v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(p),
        _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
  }
  // Lane i has what lane at[i] < kWidth had.
  static Vector Permute(Vector v, __m256i at) { return _mm256_permutevar8x32_ps(v, at); }
  // Indices, and tables of up to 16 floats that are looked up by their low four bits.
  using Index = __m256i;
  struct Table {
    Vector low, high;
  };
  static Table LoadTable(const float* p, int64_t n) {
    if (n < kWidth) return {LoadSome(p, n), Zero()};
    return {Load(p), Load(p + kWidth)};
  }
  static Vector Look(Table table, Index i) {
    const Vector low = _mm256_permutevar8x32_ps(table.low, i);
    const Vector high = _mm256_permutevar8x32_ps(table.high, i);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
  }
  static Vector Gather(const float* p, Index i) { return _mm256_i32gather_ps(p, i, 4); }
  static Index IndexOne() { return _mm256_set1_epi32(1); }
  static Index IndexFromBits(Vector v) { return _mm256_castps_si256(v); }
  static Vector BitsOfIndex(Index i) { return _mm256_castsi256_ps(i); }
  // x > bound ? 2 i + 1 : 2 i.
  static Index Descend(Index i, Vector x, Vector bound) {
    const Index right = _mm256_castps_si256(_mm256_cmp_ps(x, bound, _CMP_GT_OQ));
    return _mm256_sub_epi32(_mm256_add_epi32(i, i), right);
  }
  // |v| < 2^30 to the nearest integer, ties to even.
  static Index NearestInteger(Vector v) { return _mm256_cvtps_epi32(v); }
  static Index AddIndex(Index a, Index b) { return _mm256_add_epi32(a, b); }
  // Integers within 2^31 - 1, plus `offset`, clamped to 0 .. limit <= 255: a byte each, and those
  // packed without gaps in kBits each, the first lowest.
  static Raw Words(int x) { return _mm256_set1_epi16(static_cast<int16_t>(x)); }
  static Raw Bytes(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }
  static Raw XorRaw(Raw a, Raw b) { return _mm256_xor_si256(a, b); }
  // Qwords: kWidth / 2 numbers of 64 bits.
  static Raw Qwords(uint64_t x) { return _mm256_set1_epi64x(static_cast<int64_t>(x)); }
  static Raw AddQwords(Raw a, Raw b) { return _mm256_add_epi64(a, b); }
  static Raw HighDwords(Raw a) { return _mm256_srli_epi64(a, 32); }
  // Of their low dwords.
  static Raw MulDwords(Raw a, Raw b) { return _mm256_mul_epu32(a, b); }
  static Raw XorEach(Raw a, Raw b, Raw c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
  // p[4 * i + j] becomes the low dword of the qword of words[j] that has i in QwordOrder.
  static Raw QwordOrder() { return _mm256_setr_epi64x(0, 2, 1, 3); }
  static void StoreInFours(uint32_t* p, const Raw (&words)[4]) {
    const Raw first = PairDwords(words[0], words[1]), second = PairDwords(words[2], words[3]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_unpacklo_epi64(first, second));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + kWidth),
                        _mm256_unpackhi_epi64(first, second));
  }
  // The bytes in some order of their own.
  static Raw ClampToBytes(const Index (&v)[4], Raw offset_words, Raw limit_bytes) {
    const Raw low = _mm256_adds_epi16(_mm256_packs_epi32(v[0], v[1]), offset_words);
    const Raw high = _mm256_adds_epi16(_mm256_packs_epi32(v[2], v[3]), offset_words);
    return _mm256_min_epu8(_mm256_packus_epi16(low, high), limit_bytes);
  }
  // In the order of v, and of their elements.
  template <int kBits>
  static Raw PackBytes(Raw bytes) {
    // Dword k of lane L is of elements 4 * L to 4 * L + 3 of v[k].
    const Raw order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    if constexpr (kBits == 8) return _mm256_permutevar8x32_epi32(bytes, order);
    if constexpr (kBits == 4) {
      const Raw words = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));
      const Raw ordered = _mm256_permutevar8x32_epi32(words, order);
      return _mm256_permute4x64_epi64(_mm256_packus_epi16(ordered, ordered), 0x08);
    }
    if constexpr (kBits == 2) {
      const Raw pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x0401));
      const Raw dwords = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00100001));
      const Raw ordered = _mm256_permutevar8x32_epi32(dwords, order);
      const Raw words = _mm256_packus_epi32(ordered, ordered);
      const Raw packed = _mm256_packus_epi16(words, words);
      return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
    }
  }
  template <int kBytes>
  static void StoreRaw(uint8_t* p, Raw raw) {
    if constexpr (kBytes == 32) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), raw);
    } else if constexpr (kBytes == 16) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(raw));
    } else {
      static_assert(kBytes == 8);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(raw));
    }
  }
  // 2^k, for k in the low bits of `shifted` (-127 < k < 128).
  static Vector PowerOfTwo(Vector shifted) {
    const __m256i biased = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
  }

  // Bytes of kWidth elements, or the first `bytes` of them.
  template <int kBytes>
  static Raw LoadRaw(const uint8_t* p) {
    if constexpr (kBytes == 32) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    } else if constexpr (kBytes == 16) {
      return _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    } else if constexpr (kBytes == 8) {
      return _mm256_zextsi128_si256(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    } else if constexpr (kBytes == 4) {
      return _mm256_zextsi128_si256(_mm_loadu_si32(p));
    } else {
      static_assert(kBytes == 2);
      return _mm256_zextsi128_si256(_mm_loadu_si16(p));
    }
  }
  static Raw LoadRawSome(const uint8_t* p, int64_t bytes) {
    if (bytes < 16) return _mm256_zextsi128_si256(SomeBytes(p, bytes));
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_set_m128i(SomeBytes(p + 16, bytes - 16), low);
  }

  static Vector FromF32(Raw raw) { return _mm256_castsi256_ps(raw); }
  static Vector FromF16(Raw raw) { return _mm256_cvtph_ps(_mm256_castsi256_si128(raw)); }
  static Vector FromBF16(Raw raw) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(raw));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static Vector FromE5M2(Raw raw) {
    const __m128i wide = _mm_cvtepu8_epi16(_mm256_castsi256_si128(raw));
    return _mm256_cvtph_ps(_mm_slli_epi16(wide, 8));
  }
  // With its exponent in f16's place, a code is worth 2^-8 of its value.
  static Vector FromE4M3(Raw raw) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm256_castsi256_si128(raw));
    const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(0x3f80));
    const __m128i sign = _mm_and_si128(wide, _mm_set1_epi16(int16_t{-0x8000}));
    const __m256 value =
        _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(half, sign)), _mm256_set1_ps(256.f));
    const __m128i nan = _mm_cmpeq_epi16(half, _mm_set1_epi16(0x3f80));
    return _mm256_or_ps(value, _mm256_castsi256_ps(_mm256_cvtepi16_epi32(nan)));
  }
  static Vector FromS32(Raw raw) { return _mm256_cvtepi32_ps(raw); }
  static Vector FromS8(Raw raw) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm256_castsi256_si128(raw)));
  }
  static Vector FromU8(Raw raw) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm256_castsi256_si128(raw)));
  }
  static Vector FromBoolean(Raw raw) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm256_castsi256_si128(raw));
    const __m256i zero = _mm256_cmpeq_epi32(wide, _mm256_setzero_si256());
    return _mm256_andnot_ps(_mm256_castsi256_ps(zero), _mm256_set1_ps(1.f));
  }
  static Vector FromU4(Raw raw) { return _mm256_cvtepi32_ps(IndexU4(raw)); }
  static Vector FromS4(Raw raw) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(TopBits(raw, kNibbles), 28));
  }
  static Vector FromU2(Raw raw) { return _mm256_cvtepi32_ps(IndexU2(raw)); }
  static Vector FromS2(Raw raw) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(TopBits(raw, kBitPairs), 30));
  }
  // The codes themselves.
  static Index IndexU8(Raw raw) { return _mm256_cvtepu8_epi32(_mm256_castsi256_si128(raw)); }
  static Index IndexU4(Raw raw) { return _mm256_srli_epi32(TopBits(raw, kNibbles), 28); }
  static Index IndexU2(Raw raw) { return _mm256_srli_epi32(TopBits(raw, kBitPairs), 30); }

 private:
  static __m256i PairDwords(__m256i low, __m256i high) {
    return _mm256_blend_epi32(low, _mm256_slli_epi64(high, 32), 0xaa);
  }
  // The first n <= 16 bytes, zeros beyond: the first and the last word, which may overlap.
  static __m128i SomeBytes(const uint8_t* p, int64_t n) {
    const auto qword = [p](int64_t at) {
      uint64_t x;
      std::memcpy(&x, p + at, sizeof(x));
      return x;
    };
    const auto dword = [p](int64_t at) -> uint64_t {
      uint32_t x;
      std::memcpy(&x, p + at, sizeof(x));
      return x;
    };
    uint64_t low = 0, high = 0;
    if (n >= 8) {
      low = qword(0);
      if (n > 8) high = qword(n - 8) >> (8 * (16 - n));
    } else if (n >= 4) {
      low = dword(0) | dword(n - 4) << (8 * (n - 4));
    } else if (n > 0) {
      low = p[0] | uint64_t{p[n / 2]} << (8 * (n / 2)) | uint64_t{p[n - 1]} << (8 * (n - 1));
    }
    return _mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(low));
  }
  static __m256i First(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  // Dword i holds element i of the first dword in its top bits.
  static constexpr int kNibbles = 28, kBitPairs = 30;
  static __m256i TopBits(Raw raw, int first_shift) {
    const int bits = 32 - first_shift;
    const __m256i shifts = _mm256_sub_epi32(
        _mm256_set1_epi32(first_shift),
        _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(bits)));
    return _mm256_sllv_epi32(_mm256_broadcastd_epi32(_mm256_castsi256_si128(raw)), shifts);
  }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_SIMD_AVX2_H_
