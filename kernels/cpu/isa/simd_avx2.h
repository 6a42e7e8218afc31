// What simd.h needs of AVX2 beside Highway's words; simd_avx512.h says what members do.
#ifndef KVANT_KERNELS_CPU_ISA_SIMD_AVX2_H_
#define KVANT_KERNELS_CPU_ISA_SIMD_AVX2_H_

#include <cstdint>

#include "kvant/kernels/cpu/isa/simd_types.h"

namespace kvant::cpu {
namespace {

struct SimdTarget : NarrowTarget<SimdTarget> {
  static constexpr int kAccumulators = 12;
  static constexpr int kStreamBits = 2;

  static Vector LoadSome(const float* p, int64_t n) {
    return Vector{_mm256_maskload_ps(p, First(n))};
  }
  static void StoreSome(float* p, Vector v, int64_t n) { _mm256_maskstore_ps(p, First(n), v.raw); }
  static Raw LoadRawSome(const uint8_t* p, int64_t bytes) {
    const auto some = [](const uint8_t* from, int64_t n) {
      const TwoQwords words = SomeBytes(from, n);
      return _mm_set_epi64x(static_cast<int64_t>(words.high), static_cast<int64_t>(words.low));
    };
    if (bytes < 16) return Raw{_mm256_castsi128_si256(some(p, bytes))};
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return Raw{_mm256_set_m128i(some(p + 16, bytes - 16), low)};
  }

  static Vector Max(Vector a, Vector b) { return hn::Max(a, b); }
  static Vector Min(Vector a, Vector b) { return hn::Min(a, b); }
  static float SumOf(Vector v) {
    return hn::GetLane(hn::SumOfLanes(kHalf, hn::Add(LowerHalf(v), UpperHalf(v))));
  }
  static float MaxOf(Vector v) {
    return hn::GetLane(hn::MaxOfLanes(kHalf, hn::Max(LowerHalf(v), UpperHalf(v))));
  }
  static Index NearestInteger(Vector v) { return Index{_mm256_cvtps_epi32(v.raw)}; }

  static Vector EvenBlocks(Vector a, Vector b) { return hn::ConcatLowerLower(kFloats, b, a); }
  static Vector OddBlocks(Vector a, Vector b) { return hn::ConcatUpperUpper(kFloats, b, a); }
  static HWY_INLINE void TransposeBlocks(Vector (&v)[kWidth]) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Vector low = v[j], high = v[j + 4];
      v[j] = EvenBlocks(low, high);
      v[j + 4] = OddBlocks(low, high);
    }
  }
  template <typename Op>
  static HWY_INLINE Vector FoldFours(const Vector (&v)[kWidth / 4], Op op) {
    return op(EvenBlocks(v[0], v[1]), OddBlocks(v[0], v[1]));
  }
  static void Zip(Vector a, Vector b, Vector* lo, Vector* hi) {
    const Vector low = hn::InterleaveLower(kFloats, a, b),
                 high = hn::InterleaveUpper(kFloats, a, b);
    *lo = EvenBlocks(low, high);
    *hi = OddBlocks(low, high);
  }
  static Vector Permute(Vector v, Index at) {
    return Vector{_mm256_permutevar8x32_ps(v.raw, at.raw)};
  }
  struct Table {
    Vector low, high;
  };
  static Table LoadTable(const float* p, int64_t n) {
    if (n < kWidth) return {LoadSome(p, n), hn::Zero(kFloats)};
    return {hn::LoadU(kFloats, p), hn::LoadU(kFloats, p + kWidth)};
  }
  static Vector Look(Table table, Index i) {
    const Vector upper = Floating(hn::ShiftLeft<28>(i));
    return Vector{
        _mm256_blendv_ps(Permute(table.low, i).raw, Permute(table.high, i).raw, upper.raw)};
  }

  static Raw ClampWords(Int16s low, Int16s high) {
    return Raw{_mm256_packus_epi16(low.raw, high.raw)};
  }
  template <int kBits>
  static Raw PackBytes(Raw bytes) {
    // Dword k of half h is of elements 4 * h to 4 * h + 3 of the k-th vector.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    if constexpr (kBits == 8) {
      return Raw{_mm256_permutevar8x32_epi32(bytes.raw, order)};
    } else if constexpr (kBits == 4) {
      const __m256i words = _mm256_maddubs_epi16(bytes.raw, _mm256_set1_epi16(0x1001));
      const __m256i ordered = _mm256_permutevar8x32_epi32(words, order);
      return Raw{_mm256_permute4x64_epi64(_mm256_packus_epi16(ordered, ordered), 0x08)};
    } else {
      static_assert(kBits == 2);
      const __m256i pairs = _mm256_maddubs_epi16(bytes.raw, _mm256_set1_epi16(0x0401));
      const __m256i dwords = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00100001));
      const __m256i ordered = _mm256_permutevar8x32_epi32(dwords, order);
      const __m256i words = _mm256_packus_epi32(ordered, ordered);
      const __m256i packed = _mm256_packus_epi16(words, words);
      return Raw{_mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4))};
    }
  }

  template <typename V>
  static Uint32s FirstDword(V v) {
    return Uint32s{_mm256_broadcastd_epi32(v.raw)};
  }

 private:
  static constexpr hn::CappedTag<float, 4> kHalf{};
  static hn::Vec<decltype(kHalf)> LowerHalf(Vector v) { return hn::LowerHalf(v); }
  static hn::Vec<decltype(kHalf)> UpperHalf(Vector v) { return hn::UpperHalf(kHalf, v); }
  static __m256i First(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_SIMD_AVX2_H_
