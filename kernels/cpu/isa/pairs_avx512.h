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

  static void PairLines(const float* a, const float* b, int64_t n, uint32_t* out) {
    for (int64_t i = 0; i < n; i += kWidth) {
      const __mmask16 mask = FirstOf(n - i);
      const __m512 low = _mm512_maskz_loadu_ps(mask, a + i);
      const __m512 high = b == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, b + i);
      _mm512_mask_storeu_epi32(out + i, mask, Interleave(Bits(_mm512_cvtne2ps_pbh(high, low))));
    }
  }

  static void PairLine(const float* line, int64_t n, uint32_t* out) {
    for (int64_t i = 0; i < n; i += 2 * kWidth) {
      const __m512 low = _mm512_maskz_loadu_ps(FirstOf(n - i), line + i);
      const __m512 high = _mm512_maskz_loadu_ps(FirstOf(n - i - kWidth), line + i + kWidth);
      _mm512_mask_storeu_epi32(out + i / 2, FirstOf((n - i + 1) / 2),
                               Bits(_mm512_cvtne2ps_pbh(high, low)));
    }
  }

  static void PairRest(const float* line, int64_t n, uint32_t* out) {
    const auto rest = [&](int64_t i) {
      const __m512 all = _mm512_maskz_loadu_ps(FirstOf(n - i), line + i);
      const __m256i first = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(all));
      return _mm512_sub_ps(
          all, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(first), 16)));
    };
    for (int64_t i = 0; i < n; i += 2 * kWidth) {
      _mm512_mask_storeu_epi32(out + i / 2, FirstOf((n - i + 1) / 2),
                               Bits(_mm512_cvtne2ps_pbh(rest(i + kWidth), rest(i))));
    }
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
    const __mmask16 mask = FirstOf(last);
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
  static __m512i Bits(__m512bh v) { return reinterpret_cast<__m512i>(v); }
  static __mmask16 FirstOf(int64_t n) {
    return static_cast<__mmask16>(n >= kWidth ? 0xffff : n > 0 ? (1u << n) - 1 : 0);
  }
  // Words of a pair of lines, [a's 16 | b's 16], to a0 b0 a1 b1 ...
  static __m512i Interleave(__m512i words) {
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, words);
  }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_PAIRS_AVX512_H_
