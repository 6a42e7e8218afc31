// ByteKernels by AVX-512 VNNI.
#ifndef KVANT_KERNELS_CPU_ISA_BYTES_AVX512_H_
#define KVANT_KERNELS_CPU_ISA_BYTES_AVX512_H_

#include <immintrin.h>

#include <cstdint>

#include "kvant/kernels/cpu/isa/products.h"
#include "kvant/kernels/cpu/isa/simd.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {
namespace {

struct Avx512Bytes {
  using I = __m512i;
  static constexpr int kWidth = Simd::kWidth;
  static constexpr int kVectors = kHalfTile / kWidth;

  static int32_t Bytes(const float* values, int64_t n, float shift, int8_t* out) {
    const __m512 less = _mm512_set1_ps(shift);
    I sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += kWidth) {
      const __mmask16 some = Simd::FirstOf(n - i);
      const I whole = _mm512_maskz_cvtps_epi32(
          some, _mm512_sub_ps(_mm512_maskz_loadu_ps(some, values + i), less));
      sum = _mm512_add_epi32(sum, whole);
      _mm_mask_storeu_epi8(out + i, Simd::FirstOf((n - i + 3) / 4 * 4),
                           _mm512_cvtepi32_epi8(whole));
    }
    return _mm512_reduce_add_epi32(sum);
  }

  static void Zip(const uint8_t* const (&rows)[4], int64_t n, uint8_t flip, uint32_t* out) {
    const __m128i flips = _mm_set1_epi8(static_cast<char>(flip));
    for (int64_t i = 0; i < n; i += kWidth) {
      const __mmask16 some = Simd::FirstOf(n - i);
      __m128i row[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        row[j] = rows[j] == nullptr ? _mm_setzero_si128()
                                    : _mm_xor_si128(_mm_maskz_loadu_epi8(some, rows[j] + i), flips);
      }
      const __m128i low[] = {_mm_unpacklo_epi8(row[0], row[1]), _mm_unpackhi_epi8(row[0], row[1])};
      const __m128i high[] = {_mm_unpacklo_epi8(row[2], row[3]), _mm_unpackhi_epi8(row[2], row[3])};
      I all = _mm512_castsi128_si512(_mm_unpacklo_epi16(low[0], high[0]));
      all = _mm512_inserti32x4(all, _mm_unpackhi_epi16(low[0], high[0]), 1);
      all = _mm512_inserti32x4(all, _mm_unpacklo_epi16(low[1], high[1]), 2);
      all = _mm512_inserti32x4(all, _mm_unpackhi_epi16(low[1], high[1]), 3);
      _mm512_mask_storeu_epi32(out + i, some, all);
    }
  }

  static void Sums(const uint32_t* columns, int64_t stride, int64_t quads, int64_t n,
                   int32_t factor, int32_t* out) {
    const I ones = _mm512_set1_epi8(1), times = _mm512_set1_epi32(factor);
    for (int64_t c = 0; c < n; c += kWidth) {
      const __mmask16 some = Simd::FirstOf(n - c);
      I sum = _mm512_setzero_si512();
      for (int64_t i = 0; i < quads; ++i) {
        Dot(sum, _mm512_maskz_loadu_epi32(some, columns + i * stride + c), ones);
      }
      _mm512_mask_storeu_epi32(out + c, some, _mm512_mullo_epi32(sum, times));
    }
  }

  static void Qk(const int8_t* q, int64_t rows, int64_t quads, const uint32_t* k,
                 const ByteTerms& terms, float* scores) {
    ForBlocksOfRows(rows, [=](auto block, int64_t first) {
      constexpr int kRows = decltype(block)::value;
      I sum[kRows][kVectors];
      Multiply<true>(q + first * quads * 4, quads * 4, k, kHalfTile, quads, 0, sum);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const I column = _mm512_loadu_si512(terms.columns + v * kWidth);
          _mm512_storeu_ps(scores + (first + r) * kTokenTile + v * kWidth,
                           Whole(sum[r][v], terms.rows[first + r], column));
        }
      }
    });
  }

  static void Pv(const int8_t* probs, int64_t rows, int64_t quads, const uint32_t* v,
                 int64_t head_size, const ByteTerms& terms, const float* shrink, float* out) {
    ForBlocksOfRows(rows, [=](auto block, int64_t first) {
      constexpr int kRows = decltype(block)::value;
      const int8_t* const p = probs + first * kTokenTile;
      const ByteTerms own{terms.rows + first, terms.columns};
      float* const o = out + first * head_size;
      int64_t d = 0;
      for (; d + kVectors * kWidth <= head_size; d += kVectors * kWidth) {
        PvBlock<kRows, kVectors>(p, quads, v, head_size, d, own, shrink + first, o);
      }
      for (; d < head_size; d += kWidth) {
        PvBlock<kRows, 1>(p, quads, v, head_size, d, own, shrink + first, o);
      }
    });
  }

 private:
  // sum += four products each of unsigned and signed bytes. Not the intrinsic, for which GCC 12
  // copies every sum of a loop.
  static HWY_INLINE void Dot(I& sum, I unsigned_bytes, I signed_bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
  }
  static HWY_INLINE __m512 Whole(I sum, int32_t row, I column) {
    return _mm512_cvtepi32_ps(
        _mm512_add_epi32(_mm512_add_epi32(sum, column), _mm512_set1_epi32(row)));
  }
  // sum[r][v] = those over dwords i < n of a[r * a_row + 4 i ..] . b[i * b_row + column v * kWidth
  // and those that follow]. If not kWhole, only `last` columns exist.
  template <bool kWhole, int kRows, int kCount>
  static HWY_INLINE void Multiply(const int8_t* a, int64_t a_row, const uint32_t* b, int64_t b_row,
                                  int64_t n, int64_t last, I (&sum)[kRows][kCount]) {
    const __mmask16 mask = Simd::FirstOf(last);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kCount; ++v) sum[r][v] = _mm512_setzero_si512();
    }
    for (int64_t i = 0; i < n; ++i) {
      I right[kCount];
#pragma GCC unroll 8
      for (int v = 0; v < kCount; ++v) {
        const uint32_t* const from = b + i * b_row + v * kWidth;
        right[v] = kWhole ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi32(mask, from);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        int32_t four;
        __builtin_memcpy(&four, a + r * a_row + 4 * i, sizeof(four));
        const I left = _mm512_set1_epi32(four);
#pragma GCC unroll 8
        for (int v = 0; v < kCount; ++v) Dot(sum[r][v], right[v], left);
      }
    }
  }
  template <int kRows, int kCount>
  static void PvBlock(const int8_t* probs, int64_t quads, const uint32_t* v, int64_t head_size,
                      int64_t d, const ByteTerms& terms, const float* shrink, float* out) {
    I sum[kRows][kCount];
    const __mmask16 some = kCount > 1 ? 0xffff : Simd::FirstOf(head_size - d);
    Multiply<(kCount > 1)>(probs, kTokenTile, v + d, head_size, quads, head_size - d, sum);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i) {
        float* const to = out + r * head_size + d + i * kWidth;
        const I column = _mm512_maskz_loadu_epi32(some, terms.columns + d + i * kWidth);
        const __m512 before = _mm512_maskz_loadu_ps(some, to);
        _mm512_mask_storeu_ps(to, some,
                              _mm512_fmadd_ps(before, _mm512_set1_ps(shrink[r]),
                                              Whole(sum[r][i], terms.rows[r], column)));
      }
    }
  }
};

constexpr ByteKernels kByteKernels = {.bytes = Avx512Bytes::Bytes,
                                      .zip = Avx512Bytes::Zip,
                                      .sums = Avx512Bytes::Sums,
                                      .qk = Avx512Bytes::Qk,
                                      .pv = Avx512Bytes::Pv};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_BYTES_AVX512_H_
