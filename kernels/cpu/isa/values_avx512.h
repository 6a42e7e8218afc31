// CodeKernels::values of codes of 4 bits and one row by vpdpbusd, four tokens at a time, where
// codes_values.h takes two. More rows, and codes of 8 bits, would take longer.
//
//   16 bytes of each of four tokens, unpacked twice: dword j = byte j of tokens t to t + 3
//   acc low  += nibbles . the low plane of four weights, of the group that the 16 bytes are of
//   acc high += nibbles . the high plane
#ifndef KVANT_KERNELS_CPU_ISA_VALUES_AVX512_H_
#define KVANT_KERNELS_CPU_ISA_VALUES_AVX512_H_

#include <immintrin.h>

#include <cstdint>

#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/isa/codes_bytes_avx512.h"
#include "kvant/kernels/cpu/isa/codes_tokens.h"
#include "kvant/kernels/cpu/isa/codes_values.h"
#include "kvant/kernels/cpu/isa/codes_weights.h"

namespace kvant::cpu {
namespace {

// One row's weights for the quarters of a run of bytes.
struct QuarterWeights {
  // Of four tokens, those of each quarter's group, a dword.
  alignas(64) int32_t low[kTokenTile / 4][4], high[kTokenTile / 4][4];

  void Read(const int16_t* weights, int64_t tokens, const int64_t (&groups)[4]) {
    for (int64_t t = 0; t < tokens; t += kAtOnce) {
      __m512i lows[4], highs[4];
#pragma GCC unroll 4
      for (int l = 0; l < 4; ++l) {
        const Bytes::Planes planes = Bytes::PlanesOf(weights + groups[l] * kTokenTile + t);
        lows[l] = planes.low;
        highs[l] = planes.high;
      }
      Store(lows, low + t / 4);
      Store(highs, high + t / 4);
    }
  }

 private:
  static constexpr int64_t kAtOnce = 64;
  static_assert(kHalfTile % kAtOnce == 0);

  // Dword q of by_quarter[l] becomes dword l of out[q].
  static void Store(const __m512i (&by_quarter)[4], int32_t (*out)[4]) {
    const __m512i a = _mm512_unpacklo_epi32(by_quarter[0], by_quarter[1]);
    const __m512i b = _mm512_unpackhi_epi32(by_quarter[0], by_quarter[1]);
    const __m512i c = _mm512_unpacklo_epi32(by_quarter[2], by_quarter[3]);
    const __m512i d = _mm512_unpackhi_epi32(by_quarter[2], by_quarter[3]);
    // Quarter q of the i-th is for tokens 4 (4 q + i) on.
    __m512i four[4] = {_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c),
                       _mm512_unpacklo_epi64(b, d), _mm512_unpackhi_epi64(b, d)};
    Avx512Codes::TransposeQuarters(four);
    for (int q = 0; q < 4; ++q) _mm512_store_si512(out[4 * q], four[q]);
  }
};

// Channels of 16 bytes.
inline constexpr int64_t kQuarter = 32;

// Sums over tokens of a run of bytes, in the order of channels: sums[n][l] is of channels
// kQuarter * l + 16 * n on. kWhole: all bytes are there, and tokens are whole fours.
template <bool kWhole>
inline __attribute__((always_inline)) void SumTokens(const TokenRows& rows, int64_t byte,
                                                     __m512i flips, const QuarterWeights& weights,
                                                     __m512i (&sums)[2][4]) {
  using I = __m512i;
  const __mmask64 there = Bytes::First(rows.row_bytes - byte);
  const I quarters = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  I acc[4][2][2];  // of word, nibble and plane
#pragma GCC unroll 4
  for (auto& word : acc) {
#pragma GCC unroll 2
    for (auto& nibble : word) nibble[0] = nibble[1] = _mm512_setzero_si512();
  }
  for (int64_t block = 0; block < rows.tokens; block += kPageUnit) {
    const uint8_t* p = rows.blocks[block / kPageUnit] + byte;
    const uint8_t* next = rows.next[block / kPageUnit] + byte * kPageUnit;
    const int64_t end = CodesMin(block + kPageUnit, rows.tokens);
    for (int64_t t = block; t < end; t += 4, p += 4 * rows.stride, next += 4 * Bytes::kRun) {
      I token[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        __builtin_prefetch(next + i * Bytes::kRun, 0, 2);
        const uint8_t* const at = p + (kWhole ? i : CodesMin(i, end - 1 - t)) * rows.stride;
        token[i] = kWhole ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi8(there, at);
      }
      const auto factors = [&](const int32_t(&from)[4]) __attribute__((always_inline)) {
        const auto* const four = reinterpret_cast<const __m128i*>(from);
        return _mm512_permutexvar_epi32(quarters, _mm512_castsi128_si512(_mm_load_si128(four)));
      };
      const I low = factors(weights.low[t / 4]), high = factors(weights.high[t / 4]);
      const I a = _mm512_unpacklo_epi8(token[0], token[1]);
      const I b = _mm512_unpackhi_epi8(token[0], token[1]);
      const I c = _mm512_unpacklo_epi8(token[2], token[3]);
      const I d = _mm512_unpackhi_epi8(token[2], token[3]);
      // Dword j of each quarter of the i-th: byte 4 i + j of the quarter, of four tokens.
      const I words[4] = {_mm512_unpacklo_epi16(a, c), _mm512_unpackhi_epi16(a, c),
                          _mm512_unpacklo_epi16(b, d), _mm512_unpackhi_epi16(b, d)};
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        ForEachOf<2>([&](auto f) __attribute__((always_inline)) {
          const I codes = Bytes::Field<4, f.value>(words[i], flips);
          acc[i][f.value][0] = Bytes::Dot(acc[i][f.value][0], codes, low);
          acc[i][f.value][1] = Bytes::Dot(acc[i][f.value][1], codes, high);
        });
      }
    }
  }
  // Four channels of each quarter a vector, then 16 of one quarter.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const I even = Bytes::Joined(acc[i][0][0], acc[i][0][1]);
    const I odd = Bytes::Joined(acc[i][1][0], acc[i][1][1]);
    sums[i / 2][i % 2 * 2] = _mm512_unpacklo_epi32(even, odd);
    sums[i / 2][i % 2 * 2 + 1] = _mm512_unpackhi_epi32(even, odd);
  }
  for (auto& vectors : sums) Avx512Codes::TransposeQuarters(vectors);
}

inline void ValuesOfRow(const CodeKernels::Values& args, const float* shrink, float* out) {
  using S = Avx512Codes;
  const __m512i flips = Bytes::Flips(4, args.is_signed);
  QuarterWeights weights;
  auto square = S::Load(args.lanes);
  int64_t read = -1;
  for (int64_t byte = 0; byte < args.rows.row_bytes; byte += Bytes::kRun) {
    const int64_t channel = byte * 2;
    int64_t groups[4];
    for (int l = 0; l < 4; ++l) {
      groups[l] = CodesMin((channel + l * kQuarter) / args.group, args.groups - 1);
    }
    // All quarters of a group, or the first of several.
    if (read != groups[3]) weights.Read(args.weights, args.rows.tokens, groups);
    read = groups[0] == groups[3] ? groups[3] : -1;
    __m512i sums[2][4];
    const bool whole = args.rows.tokens % 4 == 0 && args.rows.row_bytes - byte >= Bytes::kRun;
    (whole ? SumTokens<true> : SumTokens<false>)(args.rows, byte, flips, weights, sums);
    const auto add = [&](auto plain) __attribute__((always_inline)) {
      for (int l = 0; l < 4; ++l) {
        for (int n = 0; n < 2; ++n) {
          AddToOutput<S, plain.value>(args, 0, channel + l * kQuarter + n * 16, groups[l], shrink,
                                      S::ToFloat(sums[n][l]), out, &square);
        }
      }
    };
    const bool plain = args.channel_scales == nullptr && channel + 4 * kQuarter <= args.channels;
    plain ? add(Constant<1>()) : add(Constant<0>());
  }
  S::Store(args.lanes, square);
}

inline void ValuesByBytes(const CodeKernels::Values& args, int64_t query_rows, const float* shrink,
                          float* out) {
  // A quarter is of one group.
  const bool fits = args.bits == 4 && (args.groups == 1 || args.group % kQuarter == 0) &&
                    FillsRuns<Bytes>(args.rows.row_bytes);
  if (query_rows == 1 && fits) return ValuesOfRow(args, shrink, out);
  Values<Avx512Codes>(args, query_rows, shrink, out);
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_VALUES_AVX512_H_
