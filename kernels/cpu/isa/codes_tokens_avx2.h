// What codes_tokens.h needs of AVX2: codes of 4 bits are multiplied as bytes by vpmaddubsw, those
// of 8 bits as halves.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_TOKENS_AVX2_H_
#define KVANT_KERNELS_CPU_ISA_CODES_TOKENS_AVX2_H_

#include <immintrin.h>

#include <cstdint>

#include "kvant/kernels/cpu/isa/codes_avx2.h"

namespace kvant::cpu {
namespace {

struct Avx2Tokens {
  using Codes = Avx2Codes;
  using I = __m256i;
  static constexpr int64_t kRun = 32;
  // Of a run: of 4 bits the low planes of the numbers that multiply low and high nibbles, and the
  // high planes of both (256 * high + low, both signed); of 8 bits the halves of even and odd
  // bytes.
  template <int kBits>
  static constexpr int kFactors = 16 / kBits;

  // What makes signed codes unsigned.
  static I Flips(int bits, bool flip) {
    return _mm256_set1_epi8(static_cast<char>(!flip ? 0 : bits == 8 ? 0x80 : 0x88));
  }
  // The first `bytes` at p, fewer than a run or all of it; zeros beyond.
  static I LoadSome(const uint8_t* p, int64_t bytes) {
    return bytes >= kRun ? Codes::LoadDwords(p) : Codes::LoadRawSome(p, bytes).raw;
  }
  // Sums of products, of four bytes each.
  template <int kBits>
  static inline __attribute__((always_inline)) I Sums(I word, I flips,
                                                      const I (&factors)[kFactors<kBits>]) {
    word = Codes::Xor(word, flips);
    if constexpr (kBits == 8) {
      const I even = Codes::And(word, Codes::Dword(0x00ff00ff)), odd = _mm256_srli_epi16(word, 8);
      return Codes::AddDwords(_mm256_madd_epi16(even, factors[0]),
                              _mm256_madd_epi16(odd, factors[1]));
    } else {
      const I mask = Codes::Dword(0x0f0f0f0f);
      const I even = Codes::And(word, mask), odd = Codes::And(_mm256_srli_epi16(word, 4), mask);
      // Four products of up to 15 * 128 are within s16.
      const auto products = [&](I of_even, I of_odd) {
        return _mm256_add_epi16(_mm256_maddubs_epi16(even, of_even),
                                _mm256_maddubs_epi16(odd, of_odd));
      };
      const I low = products(factors[0], factors[1]), high = products(factors[2], factors[3]);
      I sum = Codes::AddDwords(_mm256_madd_epi16(low, Codes::Dword(0x00010001)),
                               _mm256_madd_epi16(high, Codes::Dword(0x01000100)));
      // Else GCC keeps the sums of several tokens apart, and stores what registers do not hold.
      asm("" : "+x"(sum));
      return sum;
    }
  }
  // Dword i of each half of the result: the sum of that half of v[i].
  static I SumsInLanes(const I (&v)[4]) {
    const I a =
        Codes::AddDwords(_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
    const I b =
        Codes::AddDwords(_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
    return Codes::AddDwords(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
  }
  static void TransposeLanes(I (&v)[2]) {
    const I low = _mm256_permute2x128_si256(v[0], v[1], 0x20);
    v[1] = _mm256_permute2x128_si256(v[0], v[1], 0x31);
    v[0] = low;
  }

  // Queries as halves (see CodeQueries) become the factors of a run.
  template <int kBits>
  static void MakeFactors(int32_t* pairs) {
    if constexpr (kBits == 8) {
      // Pairs of even and of odd bytes, in turn.
      const I a = Codes::LoadDwords(pairs), b = Codes::LoadDwords(pairs + 8);
      const I first = _mm256_shuffle_epi32(a, 0xd8), last = _mm256_shuffle_epi32(b, 0xd8);
      const auto store = [](int32_t* to, I halves) {
        _mm256_storeu_si256(reinterpret_cast<I*>(to), _mm256_permute4x64_epi64(halves, 0xd8));
      };
      store(pairs, _mm256_unpacklo_epi64(first, last));
      store(pairs + 8, _mm256_unpackhi_epi64(first, last));
    } else {
      // Of each column, of bytes 0 to 3: the low planes of low nibbles and of high ones, and the
      // high planes of both.
      const I order = _mm256_broadcastsi128_si256(
          _mm_setr_epi8(0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15));
      I v[4];
      for (int i = 0; i < 4; ++i) {
        const I halves = Codes::LoadDwords(pairs + 8 * i);
        // low is from -128 to 127.
        const I high = _mm256_add_epi16(halves, _mm256_set1_epi16(128));
        const I planes =
            _mm256_blendv_epi8(halves, high, Codes::Dword(static_cast<int>(0xff00ff00)));
        v[i] = _mm256_shuffle_epi8(planes, order);
      }
      // Dword i of columns 0 2 4 6 1 3 5 7.
      const I a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpacklo_epi32(v[2], v[3]);
      const I c = _mm256_unpackhi_epi32(v[0], v[1]), d = _mm256_unpackhi_epi32(v[2], v[3]);
      const I planes[4] = {_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b),
                           _mm256_unpacklo_epi64(c, d), _mm256_unpackhi_epi64(c, d)};
      const I in_turn = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      for (int i = 0; i < 4; ++i) {
        _mm256_storeu_si256(reinterpret_cast<I*>(pairs + 8 * i),
                            _mm256_permutevar8x32_epi32(planes[i], in_turn));
      }
    }
  }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_TOKENS_AVX2_H_
