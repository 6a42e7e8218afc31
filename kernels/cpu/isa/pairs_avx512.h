// The primitives of pairs.h by AVX-512 BF16.
#ifndef KVANT_KERNELS_CPU_ISA_PAIRS_AVX512_H_
#define KVANT_KERNELS_CPU_ISA_PAIRS_AVX512_H_

#include <cstdint>

#include "kvant/kernels/cpu/isa/simd.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {
namespace {

struct Avx512Pairs {
  static constexpr int kWidth = Simd::kWidth;
  static constexpr int kVectors = kHalfTile / kWidth;
  static constexpr int64_t kStoredRowsOfCodes = 48;

  static void Zip(const uint16_t* a, const uint16_t* b, int64_t n, uint32_t* out) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(kWidth));
    for (int64_t i = 0; i < n; i += 2 * kWidth) {
      const auto mask =
          static_cast<__mmask32>(Simd::FirstOf(n - i) | Simd::FirstOf(n - i - kWidth) << kWidth);
      const __m512i one = _mm512_maskz_loadu_epi16(mask, a + i);
      const __m512i other =
          b == nullptr ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(mask, b + i);
      _mm512_mask_storeu_epi32(out + i, Simd::FirstOf(n - i),
                               _mm512_permutex2var_epi16(one, low, other));
      _mm512_mask_storeu_epi32(out + i + kWidth, Simd::FirstOf(n - i - kWidth),
                               _mm512_permutex2var_epi16(one, high, other));
    }
  }

  static HWY_INLINE void StoreRounded(uint16_t* p, Simd::Vector v, int64_t n) {
    _mm256_mask_storeu_epi16(p, Simd::FirstOf(n),
                             reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v.raw)));
  }

  static void PairLine(const float* line, int64_t n, uint32_t* out) {
    PairEach(n, out, [line](int64_t i) { return _mm512_loadu_ps(line + i); });
  }

  static void PairRest(const float* line, int64_t n, uint32_t* out) {
    PairEach(n, out, [line](int64_t i) {
      const __m512 all = _mm512_loadu_ps(line + i);
      const __m256i first = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(all));
      return _mm512_sub_ps(
          all, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(first), 16)));
    });
  }

  static HWY_INLINE Simd::Vector Dot(Simd::Vector a, Simd::Vector b, Simd::Vector sum) {
    return {_mm512_dpbf16_ps(sum.raw, Pairs(a), Pairs(b))};
  }

  // Adds to sum[r][v] those over pairs i < n of a[r * a_row + i] . b[i * b_row + column v * kWidth
  // and those that follow]. If not kWhole, only `last` columns exist.
  template <bool kWhole, int kRows, int kCount>
  static HWY_INLINE void Multiply(const uint32_t* a, int64_t a_row, const uint32_t* b,
                                  int64_t b_row, int64_t n, int64_t last,
                                  Simd::Vector (&sum)[kRows][kCount]) {
    const __mmask16 mask = Simd::FirstOf(last);
    for (int64_t i = 0; i < n; ++i) {
      __m512bh right[kCount];
#pragma GCC unroll 8
      for (int v = 0; v < kCount; ++v) {
        const uint32_t* from = b + i * b_row + v * kWidth;
        right[v] = reinterpret_cast<__m512bh>(kWhole ? _mm512_loadu_si512(from)
                                                     : _mm512_maskz_loadu_epi32(mask, from));
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m512bh left =
            reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a[r * a_row + i])));
#pragma GCC unroll 8
        for (int v = 0; v < kCount; ++v) {
          sum[r][v].raw = _mm512_dpbf16_ps(sum[r][v].raw, left, right[v]);
        }
      }
    }
  }

 private:
  static HWY_INLINE __m512bh Pairs(Simd::Vector v) {
    return reinterpret_cast<__m512bh>(_mm512_castps_si512(v.raw));
  }
  // at(i): numbers i to i + kWidth - 1 of n, whole halves of a tile.
  template <typename At>
  static HWY_INLINE void PairEach(int64_t n, uint32_t* out, At at) {
    for (int64_t i = 0; i < n; i += 2 * kWidth) {
      const __m512bh pairs = _mm512_cvtne2ps_pbh(at(i + kWidth), at(i));
      _mm512_storeu_si512(out + i / 2, reinterpret_cast<__m512i>(pairs));
    }
  }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_PAIRS_AVX512_H_
