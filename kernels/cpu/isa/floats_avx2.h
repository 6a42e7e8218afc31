// Codes that stand for floats, by AVX2 with F16C: what codes_floats.h needs of it.
// floats_avx512.h says what members do; here a vector of values is of one token.
#ifndef KVANT_KERNELS_CPU_ISA_FLOATS_AVX2_H_
#define KVANT_KERNELS_CPU_ISA_FLOATS_AVX2_H_

#include <immintrin.h>

#include <cstdint>

#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/isa/codes_avx2.h"

namespace kvant::cpu {
namespace {

struct Avx2Floats : Avx2Codes {
  // Positions in a table of 16: its floats by their first bytes, their second ones, and so on.
  class Entries {
   public:
    static constexpr int kBits = 4;
    // The codes of the low nibbles of 16 bytes in the lower half, of the high ones in the upper.
    struct Words {
      I codes;
    };

    explicit Entries(const FloatCodes& codes) {
      alignas(16) uint8_t planes[4][16];
      for (int i = 0; i < 16; ++i) {
        uint32_t bits;
        __builtin_memcpy(&bits, codes.codebook + i, sizeof(bits));
        for (int byte = 0; byte < 4; ++byte) {
          planes[byte][i] = static_cast<uint8_t>(bits >> (8 * byte));
        }
      }
      for (int byte = 0; byte < 4; ++byte) {
        planes_[byte] = _mm256_broadcastsi128_si256(
            _mm_load_si128(reinterpret_cast<const __m128i*>(planes[byte])));
      }
    }

    HWY_INLINE Words Open(__m128i bytes) const {
      const __m128i nibble = _mm_set1_epi8(15);
      return {_mm256_set_m128i(_mm_and_si128(_mm_srli_epi16(bytes, 4), nibble),
                               _mm_and_si128(bytes, nibble))};
    }
    // Those of bytes 4 k to 4 k + 3.
    template <int k>
    HWY_INLINE Vector Value(const Words& words) const {
      const auto look = [&](int byte) { return _mm256_shuffle_epi8(planes_[byte], words.codes); };
      const auto zip = [](I a, I b) {
        return k < 2 ? _mm256_unpacklo_epi8(a, b) : _mm256_unpackhi_epi8(a, b);
      };
      const I low = zip(look(0), look(1)), high = zip(look(2), look(3));
      return Vector{_mm256_castsi256_ps(k % 2 == 0 ? _mm256_unpacklo_epi16(low, high)
                                                   : _mm256_unpackhi_epi16(low, high))};
    }
    static int PlaceOf(int c) { return c / 8 * 8 + c % 2 * 4 + c % 8 / 2; }

    // Of which values 0 and 1 are made.
    static constexpr int kRunBytes = 8;
    static HWY_INLINE __m128i LoadRun(const uint8_t* p, int64_t bytes) {
      if (bytes >= kRunBytes) return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
      return SomePiece(p, bytes);
    }
    static HWY_INLINE void Sort(const Vector (&values)[2], Vector (&channels)[2]) {
      const Index order{_mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)};
      for (int i = 0; i < 2; ++i) channels[i] = Permute(values[i], order);
    }
    static HWY_INLINE Vector Worth(Vector sum) { return sum; }

   private:
    I planes_[4];
  };

  // f8, by way of f16. E5M2 is the upper byte of one. E4M3 with its exponent in f16's place is
  // worth 2^-8 of its value, and its last code is no number; that of E5M2 is none anyway.
  class Bytes {
   public:
    static constexpr int kBits = 8;
    struct Words {
      Vector values[2];
    };

    explicit Bytes(const FloatCodes& codes)
        : up_(_mm_cvtsi32_si128(codes.type == kF8E4M3 ? 7 : 8)),
          number_(_mm256_set1_epi16(static_cast<int16_t>(codes.type == kF8E4M3 ? 0xbf80 : 0xff00))),
          factor_(Set1(codes.type == kF8E4M3 ? 256.f : 1.f)) {}

    HWY_INLINE Words Open(__m128i bytes) const {
      const I wide = _mm256_cvtepi8_epi16(bytes), magnitude = _mm256_slli_epi16(wide, 9);
      const I number = And(_mm256_sll_epi16(wide, up_), number_);
      const I last = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(-0x200));
      const I halves = _mm256_or_si256(number, last);
      return {{Vector{_mm256_cvtph_ps(_mm256_castsi256_si128(halves))},
               Vector{_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))}}};
    }
    template <int k>
    static HWY_INLINE Vector Value(const Words& words) {
      return words.values[k];
    }
    static int PlaceOf(int c) { return c; }

    static constexpr int kRunBytes = 16;
    static HWY_INLINE __m128i LoadRun(const uint8_t* p, int64_t bytes) {
      return bytes >= kRunBytes ? LoadPieces(p, 0) : SomePiece(p, bytes);
    }
    static HWY_INLINE void Sort(const Vector (&values)[2], Vector (&channels)[2]) {
      channels[0] = values[0];
      channels[1] = values[1];
    }
    HWY_INLINE Vector Worth(Vector sum) const { return Mul(sum, factor_); }

   private:
    __m128i up_;
    I number_;
    Vector factor_;
  };

  static constexpr int kTokensOfVector = 1;
  // Twelve registers are for sums and values.
  template <int kRows>
  static constexpr int kAtOnce = kRows > 2 ? 2 : 8 / kRows;
  template <int kRows>
  static constexpr int kShared = kRows > 2 ? 2 : 1;
  template <int kRows>
  static constexpr int kValueSums = kRows > 2 ? 2 : 8 / kRows;

  static HWY_INLINE __m128i LoadPieces(const uint8_t* p, int64_t) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  static HWY_INLINE __m128i LoadSomePieces(const uint8_t* const (&p)[1], int64_t bytes) {
    return SomePiece(p[0], bytes);
  }
  static HWY_INLINE Vector QueriesOfTokens(const float* p) { return Load(p); }
  static HWY_INLINE Vector SumsOfTokens(const Vector (&v)[8]) {
    const Vector fours[] = {FoldFour(v[0], v[1], v[2], v[3], Add),
                            FoldFour(v[4], v[5], v[6], v[7], Add)};
    return FoldFours(fours, Add);
  }
  // Groups are whole runs.
  static HWY_INLINE Vector FloatWeights(const float* const (&groups)[1], int64_t at) {
    return Set1(groups[0][at]);
  }

 private:
  static HWY_INLINE __m128i SomePiece(const uint8_t* p, int64_t bytes) {
    return _mm256_castsi256_si128(LoadRawSome(p, bytes).raw);
  }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_FLOATS_AVX2_H_
