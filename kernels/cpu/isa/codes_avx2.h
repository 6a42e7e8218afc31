// What codes_kernels.h needs of AVX2 with FMA.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_AVX2_H_
#define KVANT_KERNELS_CPU_ISA_CODES_AVX2_H_

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/isa/codes_common.h"
#include "kvant/kernels/cpu/isa/simd.h"

namespace kvant::cpu {
namespace {

struct Avx2Codes : Simd, PairedHalves<Avx2Codes> {
  static constexpr int kDotAccumulators = 8;
  using I = __m256i;

  static I Dword(int32_t value) { return _mm256_set1_epi32(value); }
  static I LoadDwords(const void* p) { return _mm256_loadu_si256(static_cast<const I*>(p)); }
  static I ZeroDwords() { return _mm256_setzero_si256(); }
  static I AddDwords(I a, I b) { return _mm256_add_epi32(a, b); }
  static I SubHalves(I a, I b) { return _mm256_sub_epi16(a, b); }
  static I Xor(I a, I b) { return _mm256_xor_si256(a, b); }
  static I And(I a, I b) { return _mm256_and_si256(a, b); }
  // (a ^ b) & mask.
  static I XorAnd(I a, I b, I mask) { return And(Xor(a, b), mask); }
  template <int kBits>
  static I ShiftHalves(I a) {
    return _mm256_srli_epi16(a, kBits);
  }
  // acc + a.low * b.low + a.high * b.high, of s16 halves.
  static I Dot(I acc, I a, I b) {
    I sum = _mm256_add_epi32(acc, _mm256_madd_epi16(a, b));
    // Else GCC multiplies all that it can before it adds, and stores what the registers do not
    // hold.
    asm("" : "+x"(sum));
    return sum;
  }
  static Vector ToFloat(I a) { return Vector{_mm256_cvtepi32_ps(a)}; }
  static I ToDwords(Vector a) { return _mm256_cvtps_epi32(a.raw); }
  static int32_t SumOfDwords(I a) {
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
  }

  // Of a row, as columns at a time.
  static constexpr int64_t kColumnBytes = 32;
  // Up to so many of each of 8 rows, row min(i, last), as dword columns of kTokenTile, each dword
  // ^ flips.
  static void Columns(const uint8_t* p, int64_t stride, int64_t last, int64_t bytes, I flips,
                      int32_t* out) {
    Vector rows[kWidth];
    const auto load = [&](auto raw) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int i = 0; i < kWidth; ++i) rows[i] = FromF32(raw(p + (i < last ? i : last) * stride));
    };
    if (bytes >= kColumnBytes) {
      load([](const uint8_t* row) { return LoadRaw<32>(row); });
    } else {
      load([bytes](const uint8_t* row) { return LoadRawSome(row, bytes); });
    }
    Transpose(rows);
    for (int i = 0; i < kWidth; ++i) {
      _mm256_storeu_si256(reinterpret_cast<I*>(out + i * kTokenTile),
                          Xor(_mm256_castps_si256(rows[i].raw), flips));
    }
  }

  // The high or the low byte of each half, as s16.
  template <bool kHigh>
  static I SignedBytes(I a) {
    return _mm256_srai_epi16(kHigh ? a : _mm256_slli_epi16(a, 8), 8);
  }

  // Dword j: the j-th kUnit bytes of one token and those of the next, as 16-bit halves.
  template <int kUnit>
  static I TokenPair(const uint8_t* p0, const uint8_t* p1, int64_t bytes) {
    constexpr int64_t kBytes = kUnit * kWidth;
    uint8_t some[2][kBytes];
    if (bytes < kBytes) {
      std::memset(some, 0, sizeof(some));
      std::memcpy(some[0], p0, static_cast<size_t>(bytes));
      std::memcpy(some[1], p1, static_cast<size_t>(bytes));
      p0 = some[0];
      p1 = some[1];
    }
    if constexpr (kUnit == 2) {
      const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p0));
      const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p1));
      return _mm256_set_m128i(_mm_unpackhi_epi16(a, b), _mm_unpacklo_epi16(a, b));
    } else {
      const auto load = [](const uint8_t* p) {
        int64_t eight;
        __builtin_memcpy(&eight, p, sizeof(eight));
        return _mm256_set1_epi64x(eight);
      };
      // Bytes 4 h to 4 h + 3 of both tokens in half h, each of which becomes 16 bits. Widening by
      // one instruction takes 2.5 times as long as a shuffle (Zen 3).
      const I pairs = _mm256_unpacklo_epi8(load(p0), load(p1));
      const I spread =
          _mm256_setr_epi8(0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 6, -1, 7, -1,  //
                           8, -1, 9, -1, 10, -1, 11, -1, 12, -1, 13, -1, 14, -1, 15, -1);
      return _mm256_shuffle_epi8(pairs, spread);
    }
  }

  // The pair of weights at `at` of each of kGroups, over equal runs of lanes.
  template <int kGroups>
  static I Weights(const int16_t* const (&groups)[kGroups], int64_t at) {
    const I weight = Dword(Pair(groups[0] + at));
    if constexpr (kGroups == 1) {
      return weight;
    } else {
      return _mm256_blend_epi32(weight, Dword(Pair(groups[1] + at)), 0xf0);
    }
  }

  template <int kBits, int kGroups>
  static constexpr bool kSplitsStored = (kBits == 16 || kBits == 8) &&
                                        (kGroups == 2 || kGroups == 4);
  // kGroups elements of each of the 8 tokens at p: those of a group begin a vector of its own.
  template <int kBits, int kGroups>
  static void LoadSplit(const uint8_t* p, Raw (&groups)[kGroups]) {
    constexpr int kBytes = kBits / 8, kTokens = 16 / (kGroups * kBytes);  // of half a vector
    // Of each half: all elements of one group, then of the next.
    alignas(16) static constexpr auto kOrder = [] {
      struct {
        uint8_t at[16];
      } order{};
      for (int i = 0; i < 16; ++i) {
        const int group = i / (kTokens * kBytes), token = i / kBytes % kTokens;
        order.at[i] = static_cast<uint8_t>((token * kGroups + group) * kBytes + i % kBytes);
      }
      return order;
    }();
    const __m128i order = _mm_load_si128(reinterpret_cast<const __m128i*>(kOrder.at));
    if constexpr (kTokens == kWidth) {
      const __m128i split =
          _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), order);
      groups[0] = Raw{_mm256_castsi128_si256(split)};
      groups[1] = Raw{_mm256_castsi128_si256(_mm_srli_si128(split, 8))};
    } else {
      const auto load = [&](int i) {
        return _mm256_shuffle_epi8(LoadDwords(p + i * 32), _mm256_broadcastsi128_si256(order));
      };
      const auto upper = [](I v) { return _mm256_castsi128_si256(_mm256_extracti128_si256(v, 1)); };
      if constexpr (kTokens == 4 && kGroups == 2) {
        const I split = _mm256_permute4x64_epi64(load(0), 0xd8);
        groups[0] = Raw{split};
        groups[1] = Raw{upper(split)};
      } else {
        const I in_turn = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        if constexpr (kBits == 16) {
          const I first = load(0), last = load(1);
          const I low = _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi32(first, last), in_turn);
          const I high = _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi32(first, last), in_turn);
          groups[0] = Raw{low};
          groups[1] = Raw{upper(low)};
          groups[2] = Raw{high};
          groups[3] = Raw{upper(high)};
        } else {
          const I split = _mm256_permutevar8x32_epi32(load(0), in_turn);
          const I odd = _mm256_srli_si256(split, 8);
          groups[0] = Raw{split};
          groups[1] = Raw{odd};
          groups[2] = Raw{upper(split)};
          groups[3] = Raw{upper(odd)};
        }
      }
    }
  }

  // Half to even.
  static Vector Round(Vector a) { return hn::Round(a); }
  // Rounds a * factor and b * factor, within s16, each with its dither, and stores them as such.
  static void RoundToHalves(int16_t* to, Vector& a, Vector& b, Vector factor, const float* dither) {
    a = Round(Fma(a, factor, Load(dither)));
    b = Round(Fma(b, factor, Load(dither + kWidth)));
    const I packed = _mm256_packs_epi32(ToDwords(a), ToDwords(b));
    _mm256_storeu_si256(reinterpret_cast<I*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
  }

  // Of each kPerDword numbers, the k-th of the first and of the second half as a dword.
  template <int kPerDword>
  static void PairHalves(const int16_t* from, int32_t* to) {
    I halves = _mm256_loadu_si256(reinterpret_cast<const I*>(from));
    if constexpr (kPerDword == 16) {
      // Quarters 0 2 1 3, so that numbers of a pair are in the same half of the vector.
      halves = _mm256_permute4x64_epi64(halves, 0xd8);
    }
    if constexpr (kPerDword == 4) {
      // Within quarters 0 2 1 3, as pairs are to be.
      halves = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(halves, 0xd8), 0xd8);
    } else {
      halves = _mm256_unpacklo_epi16(halves, _mm256_unpackhi_epi64(halves, halves));
    }
    _mm256_storeu_si256(reinterpret_cast<I*>(to), halves);
  }

 private:
  static int32_t Pair(const int16_t* pair) {
    int32_t value;
    __builtin_memcpy(&value, pair, sizeof(value));
    return value;
  }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_AVX2_H_
