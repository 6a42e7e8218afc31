// Codes that stand for floats, by AVX-512 (BW, VBMI): what codes_floats.h needs of it.
#ifndef KVANT_KERNELS_CPU_ISA_FLOATS_AVX512_H_
#define KVANT_KERNELS_CPU_ISA_FLOATS_AVX512_H_

#include <immintrin.h>

#include <cstdint>

#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/isa/codes_avx512.h"
#include "kvant/kernels/cpu/isa/codes_common.h"

namespace kvant::cpu {
namespace {

// Every f8 is a bf16. Those of the 128 codes without a sign: their upper and their lower bytes.
struct HalvesOfF8 {
  uint8_t upper[128], lower[128];
};

// With `exponent_bits` above the mantissa's; `has_infinity`: the highest exponent is no number's,
// as in IEEE formats, else only the last code is none.
constexpr HalvesOfF8 MakeHalves(int exponent_bits, bool has_infinity) {
  const int mantissa_bits = 7 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const int last = (1 << exponent_bits) - 1, mantissas = 1 << mantissa_bits;
  HalvesOfF8 halves{};
  for (int code = 0; code < 128; ++code) {
    int exponent = code >> mantissa_bits, mantissa = code & (mantissas - 1);
    int bits = 0;
    if (has_infinity ? exponent == last : code == 127) {
      bits = has_infinity && mantissa == 0 ? 0x7f80 : 0x7fc0;
    } else if (code != 0) {
      if (exponent == 0) {
        for (exponent = 1; mantissa < mantissas; --exponent) mantissa *= 2;
      }
      bits = (exponent - bias + 127) << 7 | (mantissa % mantissas) << (7 - mantissa_bits);
    }
    halves.upper[code] = static_cast<uint8_t>(bits >> 8);
    halves.lower[code] = static_cast<uint8_t>(bits);
  }
  return halves;
}

struct Avx512Floats : Avx512Codes {
  // Positions in a table of 16.
  class Entries {
   public:
    static constexpr int kBits = 4;
    // Of a vector of bytes.
    struct Words {
      I codes;
    };

    explicit Entries(const FloatCodes& codes) : table_(Load(codes.codebook)) {}

    Words Open(I bytes) const { return {bytes}; }
    // The k-th of the 8 codes of each dword.
    template <int k>
    Vector Value(const Words& words) const {
      // A permute takes the low four bits of an index.
      const I index = k == 0 ? words.codes : _mm512_srli_epi32(words.codes, k * 4);
      return Look(table_, Index{index});
    }
    // Where channel c of those of 16 bytes is: number i of value k is at 4 * k + i.
    static int PlaceOf(int c) { return c % 8 * 4 + c / 8; }

    // A run of channels of one token: 16 bytes, or as many as are left.
    static constexpr int kRunBytes = 16;
    static I LoadRun(const uint8_t* p, int64_t bytes) {
      return _mm512_cvtepu8_epi32(bytes >= 16 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))
                                              : _mm_maskz_loadu_epi8((1u << bytes) - 1, p));
    }
    // From values 0 and 1 of a run to vectors of channels.
    static void Sort(const Vector (&values)[2], Vector (&channels)[2]) {
      Zip(values[0], values[1], &channels[0], &channels[1]);
    }
    // What a sum of values is worth.
    static Vector Worth(Vector sum) { return sum; }

   private:
    Vector table_;
  };

  // f8, by a table of the bf16 that they are. Permutes of two tables take a port from
  // multiplications, unpacking does not.
  class Bytes {
   public:
    static constexpr int kBits = 8;
    struct Words {
      I low, high;  // bf16 of the lower and the upper 8 bytes of each quarter
    };

    explicit Bytes(const FloatCodes& codes) {
      alignas(64) static constexpr HalvesOfF8 kE4M3 = MakeHalves(4, false);
      alignas(64) static constexpr HalvesOfF8 kE5M2 = MakeHalves(5, true);
      const HalvesOfF8& halves = codes.type == kF8E4M3 ? kE4M3 : kE5M2;
      for (int i = 0; i < 2; ++i) {
        upper_[i] = _mm512_load_si512(halves.upper + 64 * i);
        lower_[i] = _mm512_load_si512(halves.lower + 64 * i);
      }
    }

    Words Open(I bytes) const {
      // A permute takes the low seven bits of an index, all but the sign.
      const I lower = _mm512_permutex2var_epi8(lower_[0], bytes, lower_[1]);
      const I magnitude = _mm512_permutex2var_epi8(upper_[0], bytes, upper_[1]);
      // magnitude | (bytes & 0x80).
      const I upper = _mm512_ternarylogic_epi32(magnitude, bytes, Dword(0x80808080), 0xf8);
      return {_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)};
    }
    // Bytes 4 k to 4 k + 3 of each quarter.
    template <int k>
    Vector Value(const Words& words) const {
      const I zero = _mm512_setzero_si512(), from = k < 2 ? words.low : words.high;
      return Vector{_mm512_castsi512_ps(k % 2 == 0 ? _mm512_unpacklo_epi16(zero, from)
                                                   : _mm512_unpackhi_epi16(zero, from))};
    }
    static int PlaceOf(int c) { return c; }

    static constexpr int kRunBytes = 64;
    static I LoadRun(const uint8_t* p, int64_t bytes) {
      return bytes >= 64 ? _mm512_loadu_si512(p)
                         : _mm512_maskz_loadu_epi8((uint64_t{1} << bytes) - 1, p);
    }
    static void Sort(const Vector (&values)[4], Vector (&channels)[4]) {
      const Vector low0 = hn::ConcatLowerLower(kFloats, values[1], values[0]);
      const Vector low1 = hn::ConcatLowerLower(kFloats, values[3], values[2]);
      const Vector high0 = hn::ConcatUpperUpper(kFloats, values[1], values[0]);
      const Vector high1 = hn::ConcatUpperUpper(kFloats, values[3], values[2]);
      channels[0] = EvenBlocks(low0, low1);
      channels[1] = OddBlocks(low0, low1);
      channels[2] = EvenBlocks(high0, high1);
      channels[3] = OddBlocks(high0, high1);
    }
    static Vector Worth(Vector sum) { return sum; }

   private:
    I upper_[2], lower_[2];
  };

  // Vectors of tokens whose sums are made together, and those that share what is read of kRows
  // queries.
  template <int kRows>
  static constexpr int kAtOnce = 4;
  template <int kRows>
  static constexpr int kShared = kRows > 2 ? 4 : 1;
  // Of values, for each row.
  template <int kRows>
  static constexpr int kValueSums = 4;
  // Four floats, in each quarter.
  static Vector QueriesOfTokens(const float* p) {
    return Vector{_mm512_broadcast_f32x4(_mm_loadu_ps(p))};
  }
  // Element 4 q + i is the sum over quarter q of v[i].
  static Vector SumsOfTokens(const Vector (&v)[4]) { return FoldFour(v[0], v[1], v[2], v[3], Add); }

  // The floats at `at` of each of kGroups, over equal runs of lanes.
  template <int kGroups>
  static Vector FloatWeights(const float* const (&groups)[kGroups], int64_t at) {
    Vector weight = Set1(groups[0][at]);
    const auto put = [&](__mmask16 lanes, int group) {
      weight.raw = _mm512_mask_mov_ps(weight.raw, lanes, Set1(groups[group][at]).raw);
    };
    if constexpr (kGroups == 2) {
      put(0xff00, 1);
    } else if constexpr (kGroups == 4) {
      put(0x00f0, 1);
      put(0x0f00, 2);
      put(0xf000, 3);
    }
    return weight;
  }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_FLOATS_AVX512_H_
