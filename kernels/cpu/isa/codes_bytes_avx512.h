// Products of codes by vpdpbusd, bytes times bytes, where codes_scores.h and codes_values.h
// multiply halves: queries and weights are two planes of bytes, 256 * high + low, both signed.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_BYTES_AVX512_H_
#define KVANT_KERNELS_CPU_ISA_CODES_BYTES_AVX512_H_

#include <immintrin.h>

#include <cstdint>

#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/isa/codes_avx512.h"
#include "kvant/kernels/cpu/isa/codes_common.h"
#include "kvant/kernels/cpu/isa/codes_scores.h"

namespace kvant::cpu {
namespace {

struct Bytes {
  using Codes = Avx512Codes;
  using I = __m512i;
  // Bytes of a token that are multiplied at a time.
  static constexpr int64_t kRun = 64;
  // Of a run, for each field of a byte: the low and the high plane.
  template <int kBits>
  static constexpr int kFactors = 16 / kBits;

  // acc + the sums of four products of unsigned bytes with signed ones.
  static I Dot(I acc, I codes, I factors) {
    // Not the intrinsic, for which GCC 12 copies every accumulator of a loop.
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(codes), "v"(factors));
    return acc;
  }
  // high * 256 + low.
  static I Joined(I low, I high) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }
  // The k-th lowest field of kBits of each byte, with the bits of `flips` flipped.
  template <int kBits, int k>
  static I Field(I word, I flips) {
    if constexpr (kBits == 8) return _mm512_xor_si512(word, flips);
    const I shifted = k == 0 ? word : _mm512_srli_epi16(word, k * kBits);
    return Avx512Codes::XorAnd(shifted, flips, _mm512_set1_epi8((1 << kBits) - 1));
  }
  // What Field takes for signed codes of kBits, to make them unsigned.
  static I Flips(int bits, bool flip) {
    return flip ? _mm512_set1_epi8(static_cast<char>(1 << (bits - 1))) : _mm512_setzero_si512();
  }
  static __mmask64 First(int64_t bytes) {
    return bytes >= kRun ? ~__mmask64{0} : (__mmask64{1} << bytes) - 1;
  }
  // The low and the high plane of 64 numbers of s16.
  struct Planes {
    I low, high;
  };
  static Planes PlanesOf(const int16_t* from) {
    const I a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 32);
    const auto joined = [](I x, I y) {
      return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(x)),
                                _mm512_cvtepi16_epi8(y), 1);
    };
    // low is from -128 to 127.
    const I half = _mm512_set1_epi16(128);
    return {joined(a, b), joined(_mm512_srli_epi16(_mm512_add_epi16(a, half), 8),
                                 _mm512_srli_epi16(_mm512_add_epi16(b, half), 8))};
  }
  // The first `bytes` at p, at most a run; zeros beyond.
  static I LoadSome(const uint8_t* p, int64_t bytes) {
    return _mm512_maskz_loadu_epi8(First(bytes), p);
  }
  // Sums of products, of four bytes each.
  template <int kBits>
  static inline __attribute__((always_inline)) I Sums(I word, I flips,
                                                      const I (&factors)[kFactors<kBits>]) {
    I low = Codes::ZeroDwords(), high = Codes::ZeroDwords();
    ForEachOf<8 / kBits>([&](auto f) __attribute__((always_inline)) {
      const I codes = Field<kBits, f.value>(word, flips);
      low = Dot(low, codes, factors[2 * f.value]);
      high = Dot(high, codes, factors[2 * f.value + 1]);
    });
    return Joined(low, high);
  }
  // Dword i of each quarter of the result: the sum of that quarter of v[i].
  static I SumsInLanes(const I (&v)[4]) {
    const I a =
        _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    const I b =
        _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
  static void TransposeLanes(I (&v)[4]) { Codes::TransposeQuarters(v); }

  // Queries as halves (see CodeQueries) become, for each field of the bytes of a run, the low plane
  // of the numbers that multiply it, and the high one.
  template <int kBits>
  static void MakeFactors(int32_t* pairs) {
    constexpr int kFields = 8 / kBits, kPerColumn = 4 * kFields;
    struct Order {
      uint8_t at[kFields][64];
    };
    alignas(64) static constexpr auto kOrder = [] {
      Order order{};
      for (int field = 0; field < kFields; ++field) {
        for (int i = 0; i < 64; ++i) {
          const int number = i % 4 * kFields + field, half = kPerColumn / 2;
          order.at[field][i] =
              static_cast<uint8_t>(i / 4 * kPerColumn + number % half * 2 + number / half);
        }
      }
      return order;
    }();
    Planes planes[kFields];
    const auto* const halves = reinterpret_cast<const int16_t*>(pairs);
    for (int i = 0; i < kFields; ++i) planes[i] = PlanesOf(halves + i * 64);
    for (int field = 0; field < kFields; ++field) {
      const I order = _mm512_load_si512(kOrder.at[field]);
      const auto in_order = [&](I first, I second) {
        return _mm512_permutex2var_epi8(first, order, second);
      };
      const Planes &first = planes[0], &second = planes[kFields - 1];
      _mm512_storeu_si512(pairs + field * 32, in_order(first.low, second.low));
      _mm512_storeu_si512(pairs + field * 32 + 16, in_order(first.high, second.high));
    }
  }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_BYTES_AVX512_H_
