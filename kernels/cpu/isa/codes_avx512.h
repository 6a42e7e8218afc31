// What codes_kernels.h needs of AVX-512 with VNNI.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_AVX512_H_
#define KVANT_KERNELS_CPU_ISA_CODES_AVX512_H_

#include <immintrin.h>

#include <cstdint>

#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/isa/codes_common.h"
#include "kvant/kernels/cpu/isa/simd.h"

namespace kvant::cpu {
namespace {

struct Avx512Codes : Simd, PairedHalves<Avx512Codes> {
  static constexpr int kDotAccumulators = 16;
  using I = __m512i;

  static I Dword(int32_t value) { return _mm512_set1_epi32(value); }
  static I LoadDwords(const void* p) { return _mm512_loadu_si512(p); }
  static I ZeroDwords() { return _mm512_setzero_si512(); }
  static I AddDwords(I a, I b) { return _mm512_add_epi32(a, b); }
  static I SubHalves(I a, I b) { return _mm512_sub_epi16(a, b); }
  static I Xor(I a, I b) { return _mm512_xor_si512(a, b); }
  static I And(I a, I b) { return _mm512_and_si512(a, b); }
  // (a ^ b) & mask.
  static I XorAnd(I a, I b, I mask) { return _mm512_ternarylogic_epi32(a, b, mask, 0x28); }
  template <int kBits>
  static I ShiftHalves(I a) {
    return _mm512_srli_epi16(a, kBits);
  }
  // acc + a.low * b.low + a.high * b.high, of s16 halves.
  static I Dot(I acc, I a, I b) {
    // Not the intrinsic, for which GCC 12 copies every accumulator of a loop.
    asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
  }
  static Vector ToFloat(I a) { return Vector{_mm512_cvtepi32_ps(a)}; }
  static I ToDwords(Vector a) { return _mm512_cvtps_epi32(a.raw); }
  static int32_t SumOfDwords(I a) { return _mm512_reduce_add_epi32(a); }

  // Tokens whose bytes share a vector, 16 of each.
  static constexpr int kTokensOfVector = 4;
  // The 16 bytes at p and at one, two and three strides from it.
  static I LoadPieces(const uint8_t* p, int64_t stride) {
    const auto at = [&](int i) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * stride));
    };
    I bytes = _mm512_castsi128_si512(at(0));
    bytes = _mm512_inserti32x4(bytes, at(1), 1);
    bytes = _mm512_inserti32x4(bytes, at(2), 2);
    return _mm512_inserti32x4(bytes, at(3), 3);
  }
  // The first `bytes`, at most 16, at each of four places; zeros beyond.
  static I LoadSomePieces(const uint8_t* const (&p)[4], int64_t bytes) {
    const __mmask16 mask = static_cast<__mmask16>((1u << bytes) - 1);
    I all = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(mask, p[0]));
    all = _mm512_inserti32x4(all, _mm_maskz_loadu_epi8(mask, p[1]), 1);
    all = _mm512_inserti32x4(all, _mm_maskz_loadu_epi8(mask, p[2]), 2);
    return _mm512_inserti32x4(all, _mm_maskz_loadu_epi8(mask, p[3]), 3);
  }
  // Of a row, as columns at a time.
  static constexpr int64_t kColumnBytes = 64;
  // Up to so many of each of 16 rows, row min(i, last), as dword columns of kTokenTile, each dword
  // ^ flips.
  static void Columns(const uint8_t* p, int64_t stride, int64_t last, int64_t bytes, I flips,
                      int32_t* out) {
    if (last == kWidth - 1 && bytes >= kColumnBytes) return WholeColumns(p, stride, flips, out);
    constexpr int64_t kPiece = 16;
    for (; bytes > 0; bytes -= kPiece, p += kPiece, out += 4 * kTokenTile) {
      // Quarter q of vector i is of row 4 q + i.
      I v[4];
      for (int i = 0; i < 4; ++i) {
        if (last == kWidth - 1 && bytes >= kPiece) {
          v[i] = LoadPieces(p + i * stride, 4 * stride);
          continue;
        }
        const uint8_t* rows[4];
        for (int q = 0; q < 4; ++q) rows[q] = p + (4 * q + i < last ? 4 * q + i : last) * stride;
        v[i] = LoadSomePieces(rows, bytes < kPiece ? bytes : kPiece);
      }
      TransposeInQuarters(v);
      for (int c = 0; c < 4; ++c) _mm512_storeu_si512(out + c * kTokenTile, Xor(v[c], flips));
    }
  }

  // The high or the low byte of each half, as s16.
  template <bool kHigh>
  static I SignedBytes(I a) {
    return _mm512_srai_epi16(kHigh ? a : _mm512_slli_epi16(a, 8), 8);
  }

  // Dword j: the j-th kUnit bytes of one token and those of the next, as 16-bit halves.
  template <int kUnit>
  static I TokenPair(const uint8_t* p0, const uint8_t* p1, int64_t bytes) {
    if constexpr (kUnit == 2) {
      const auto load = [bytes](const uint8_t* p) {
        return bytes >= 2 * kWidth ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                                   : _mm256_maskz_loadu_epi8((uint32_t{1} << bytes) - 1, p);
      };
      alignas(64) static constexpr auto kInTurn = [] {
        HalfOrder order{};
        for (int i = 0; i < 32; ++i) order.at[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
        return order;
      }();
      return _mm512_permutexvar_epi16(
          _mm512_load_si512(kInTurn.at),
          _mm512_inserti64x4(_mm512_castsi256_si512(load(p0)), load(p1), 1));
    } else {
      const auto load = [bytes](const uint8_t* p) {
        return bytes >= kWidth ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))
                               : _mm_maskz_loadu_epi8(First(bytes), p);
      };
      alignas(32) static constexpr auto kInTurn = [] {
        ByteOrder order{};
        for (int i = 0; i < 32; ++i) order.at[i] = static_cast<uint8_t>(i / 2 + i % 2 * 16);
        return order;
      }();
      return _mm512_cvtepu8_epi16(
          _mm256_permutexvar_epi8(_mm256_load_si256(reinterpret_cast<const __m256i*>(kInTurn.at)),
                                  _mm256_set_m128i(load(p1), load(p0))));
    }
  }

  // The pair of weights at `at` of each of kGroups, over equal runs of lanes.
  template <int kGroups>
  static I Weights(const int16_t* const (&groups)[kGroups], int64_t at) {
    I weight = Dword(Pair(groups[0] + at));
    if constexpr (kGroups == 2) {
      weight = _mm512_mask_set1_epi32(weight, 0xff00, Pair(groups[1] + at));
    } else if constexpr (kGroups == 4) {
      weight = _mm512_mask_set1_epi32(weight, 0x00f0, Pair(groups[1] + at));
      weight = _mm512_mask_set1_epi32(weight, 0x0f00, Pair(groups[2] + at));
      weight = _mm512_mask_set1_epi32(weight, 0xf000, Pair(groups[3] + at));
    }
    return weight;
  }

  template <int kBits, int kGroups>
  static constexpr bool kSplitsStored = (kBits == 16 || kBits == 8) &&
                                        (kGroups == 2 || kGroups == 4);
  // kGroups elements of each of the 16 tokens at p: those of a group begin a vector of its own.
  template <int kBits, int kGroups>
  static void LoadSplit(const uint8_t* p, Raw (&groups)[kGroups]) {
    constexpr int kBytes = kBits / 8, kAll = 16 * kGroups * kBytes;
    if constexpr (kBits == 16) {
      // All elements of one group, then of the next.
      struct Orders {
        HalfOrder of[kGroups / 2];
      };
      alignas(64) static constexpr auto kOrders = [] {
        Orders orders{};
        for (int pair = 0; pair < kGroups / 2; ++pair) {
          for (int i = 0; i < 32; ++i) {
            orders.of[pair].at[i] = static_cast<uint16_t>(i % 16 * kGroups + 2 * pair + i / 16);
          }
        }
        return orders;
      }();
      const I first = _mm512_loadu_si512(p), last = _mm512_loadu_si512(p + kAll - 64);
      for (int pair = 0; pair < kGroups / 2; ++pair) {
        const I both =
            _mm512_permutex2var_epi16(first, _mm512_load_si512(kOrders.of[pair].at), last);
        groups[2 * pair] = Raw{both};
        groups[2 * pair + 1] = Raw{_mm512_castsi256_si512(_mm512_extracti64x4_epi64(both, 1))};
      }
    } else {
      alignas(64) static constexpr auto kOrder = [] {
        struct {
          uint8_t at[64];
        } order{};
        for (int i = 0; i < 64; ++i) {
          order.at[i] = static_cast<uint8_t>(i % 16 * kGroups + i / 16 % kGroups);
        }
        return order;
      }();
      const I all =
          kAll == 64
              ? _mm512_loadu_si512(p)
              : _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
      const I split = _mm512_permutexvar_epi8(_mm512_load_si512(kOrder.at), all);
      ForEachOf<kGroups>([&](auto g) {
        groups[g.value] = Raw{_mm512_castsi128_si512(_mm512_extracti32x4_epi32(split, g.value))};
      });
    }
  }

  // Half to even, for |a| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction.
  static Vector Round(Vector a) {
    const Vector magic = Set1(12582912.f);
    return Sub(Add(a, magic), magic);
  }
  // Rounds a * factor and b * factor, within s16, each with its dither, and stores them as such.
  static void RoundToHalves(int16_t* to, Vector& a, Vector& b, Vector factor, const float* dither) {
    const Vector magic = Set1(12582912.f);
    const Vector x = Add(Fma(a, factor, Load(dither)), magic);
    const Vector y = Add(Fma(b, factor, Load(dither + kWidth)), magic);
    // The sums' low halves are the integers.
    alignas(64) static constexpr uint16_t kLowHalves[32] = {
        0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
        32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
    _mm512_storeu_si512(
        to, _mm512_permutex2var_epi16(_mm512_castps_si512(x.raw), _mm512_load_si512(kLowHalves),
                                      _mm512_castps_si512(y.raw)));
    a = Sub(x, magic);
    b = Sub(y, magic);
  }

  // Of each kPerDword numbers, the k-th of the first and of the second half as a dword.
  template <int kPerDword>
  static void PairHalves(const int16_t* from, int32_t* to) {
    alignas(64) static constexpr auto kOrder = [] {
      HalfOrder order{};
      for (int i = 0; i < 32; ++i) {
        const int dword = i / 2, half = i % 2 * kPerDword / 2;
        order.at[i] = static_cast<uint16_t>(dword / (kPerDword / 2) * kPerDword +
                                            dword % (kPerDword / 2) + half);
      }
      return order;
    }();
    _mm512_storeu_si512(
        to, _mm512_permutexvar_epi16(_mm512_load_si512(kOrder.at), _mm512_loadu_si512(from)));
  }

  // Quarter i of the l-th becomes quarter l of the i-th.
  static void TransposeQuarters(I (&v)[4]) {
    const I a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[0], v[1], 0xee);
    const I c = _mm512_shuffle_i32x4(v[2], v[3], 0x44), d = _mm512_shuffle_i32x4(v[2], v[3], 0xee);
    v[0] = _mm512_shuffle_i32x4(a, c, 0x88);
    v[1] = _mm512_shuffle_i32x4(a, c, 0xdd);
    v[2] = _mm512_shuffle_i32x4(b, d, 0x88);
    v[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }

 private:
  // In each quarter, dword i of the l-th becomes dword l of the i-th.
  static void TransposeInQuarters(I (&v)[4]) {
    const I a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpacklo_epi32(v[2], v[3]);
    const I c = _mm512_unpackhi_epi32(v[0], v[1]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm512_unpacklo_epi64(a, b);
    v[1] = _mm512_unpackhi_epi64(a, b);
    v[2] = _mm512_unpacklo_epi64(c, d);
    v[3] = _mm512_unpackhi_epi64(c, d);
  }
  // Columns of kColumnBytes of each of 16 rows.
  static void WholeColumns(const uint8_t* p, int64_t stride, I flips, int32_t* out) {
    // [c][g]: quarter l is column 4 l + c of rows 4 g to 4 g + 3.
    I quads[4][4];
    ForEachOf<4>([&](auto g) __attribute__((always_inline)) {
      I v[4];
      for (int i = 0; i < 4; ++i) v[i] = LoadDwords(p + (4 * g.value + i) * stride);
      TransposeInQuarters(v);
      for (int c = 0; c < 4; ++c) quads[c][g.value] = v[c];
    });
    ForEachOf<4>([&](auto c) __attribute__((always_inline)) {
      TransposeQuarters(quads[c.value]);
      for (int l = 0; l < 4; ++l) {
        _mm512_storeu_si512(out + (4 * l + c.value) * kTokenTile, Xor(quads[c.value][l], flips));
      }
    });
  }

  struct HalfOrder {
    uint16_t at[32];
  };
  struct ByteOrder {
    uint8_t at[32];
  };
  static int32_t Pair(const int16_t* pair) {
    int32_t value;
    __builtin_memcpy(&value, pair, sizeof(value));
    return value;
  }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_AVX512_H_
