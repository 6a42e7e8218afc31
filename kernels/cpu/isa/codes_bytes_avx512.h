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

// Bytes of a token that are multiplied at a time.
inline constexpr int64_t kByteRun = 64;

struct Bytes {
  using I = __m512i;

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
    return bytes >= kByteRun ? ~__mmask64{0} : (__mmask64{1} << bytes) - 1;
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
  // Dword i of each quarter of the result: the sum of that quarter of v[i].
  static I SumsOfQuarters(const I (&v)[4]) {
    const I a =
        _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    const I b =
        _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
};

// Whether so many bytes of a token are worth runs of kByteRun: the last would be nearly full.
inline bool FillsRuns(int64_t bytes) {
  const int64_t rest = bytes % kByteRun;
  return rest == 0 || rest > kByteRun * 3 / 4;
}

// Whether a row of queries is multiplied with tokens where they lie, instead of with columns of
// several tokens: transposing codes into these pays for several rows only.
inline bool TakesTokens(const CodeColumns& columns, int64_t rows) {
  if (rows != 1 || columns.bits == 2) return false;
  // Sums are those of four dwords.
  for (int64_t part = 0; part + 1 < columns.parts; ++part) {
    if (columns.part_ends[part] % 4 != 0) return false;
  }
  return FillsRuns(columns.channels * columns.bits / 8);
}

// Queries as halves (see CodeQueries) become, for each run of bytes and field of a byte, the low
// plane of the numbers that multiply this field of the run, and the high one.
template <int kBits>
void MakePlanes(const CodeColumns& columns, int32_t* pairs) {
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
  for (int64_t column = 0; column < columns.columns; column += kByteRun / 4) {
    Bytes::Planes planes[kFields];
    const auto* const halves = reinterpret_cast<const int16_t*>(pairs);
    for (int i = 0; i < kFields; ++i) planes[i] = Bytes::PlanesOf(halves + i * 64);
    for (int field = 0; field < kFields; ++field) {
      const __m512i order = _mm512_load_si512(kOrder.at[field]);
      const auto in_order = [&](__m512i first, __m512i second) {
        return _mm512_permutex2var_epi8(first, order, second);
      };
      const Bytes::Planes &first = planes[0], &second = planes[kFields - 1];
      _mm512_storeu_si512(pairs, in_order(first.low, second.low));
      _mm512_storeu_si512(pairs + 16, in_order(first.high, second.high));
      pairs += 32;
    }
  }
}

inline bool PrepareBytes(const float* q, int64_t rows, const CodeFactors& factors,
                         const CodeColumns& columns, int32_t offset, const CodeQueries& out) {
  if (!Prepare<Avx512Codes>(q, rows, factors, columns, offset, out)) return false;
  if (TakesTokens(columns, rows)) {
    (columns.bits == 8 ? MakePlanes<8> : MakePlanes<4>)(columns, out.pairs);
  }
  return true;
}

// One row of queries times a run of bytes of each of 16 tokens, from `p` on. Dword i of quarter l
// of sums[q] is the sum of the products of token 4 q + i with 16 bytes, the l-th of the run.
// kWhole: all tokens and bytes are there; else tokens up to `last`, and the bytes in `there`.
// `next` moves on by what is prefetched. Requests of 8 bits stand apart, as these wait for memory;
// 4 bits gain nothing by it.
template <int kBits, bool kWhole>
inline __attribute__((always_inline)) void MultiplyTokens(const uint8_t* p, int64_t stride,
                                                          int64_t last, __mmask64 there,
                                                          __m512i flips, const int32_t* factors,
                                                          const uint8_t*& next,
                                                          __m512i (&sums)[4]) {
  using I = __m512i;
  using S = Avx512Codes;
  constexpr int kFields = 8 / kBits;
  I low[kFields], high[kFields];
  for (int f = 0; f < kFields; ++f) {
    low[f] = S::LoadDwords(factors + f * 32);
    high[f] = S::LoadDwords(factors + f * 32 + 16);
  }
  ForEachOf<4>([&](auto quad) __attribute__((always_inline)) {
    I of_token[4];
    ForEachOf<4>([&](auto i) __attribute__((always_inline)) {
      constexpr int kToken = 4 * quad.value + i.value;
      if constexpr (kBits == 8) {
        PrefetchLine(next);
      } else {
        __builtin_prefetch(next + kToken * kByteRun, 0, 2);
      }
      const uint8_t* const at = p + (kWhole ? i.value : CodesMin(kToken, last)) * stride;
      const I word = kWhole ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi8(there, at);
      I by_low = S::ZeroDwords(), by_high = S::ZeroDwords();
      ForEachOf<kFields>([&](auto f) __attribute__((always_inline)) {
        const I codes = Bytes::Field<kBits, f.value>(word, flips);
        by_low = Bytes::Dot(by_low, codes, low[f.value]);
        by_high = Bytes::Dot(by_high, codes, high[f.value]);
      });
      of_token[i.value] = Bytes::Joined(by_low, by_high);
    });
    if (kWhole) p += 4 * stride;
    sums[quad.value] = Bytes::SumsOfQuarters(of_token);
  });
  if (kBits == 4) next += 16 * kByteRun;
}

// One row of queries.
template <int kBits>
void TokenScores(const TokenRows& rows, bool flip, const CodeColumns& columns,
                 const CodeQueries& queries, const CodeParameters& parameters, float* scores) {
  using I = __m512i;
  using S = Avx512Codes;
  constexpr int kFactors = 8 / kBits * 32;  // of a run of bytes
  const I flips = Bytes::Flips(kBits, flip);
  for (int64_t token = 0; token < rows.tokens; token += 16) {
    const uint8_t* const first = rows.At(token);
    const uint8_t* next = rows.Next(token);
    const int64_t last = rows.tokens - token - 1;
    const int32_t* factors = queries.pairs;
    auto score = S::Zero();
    I sum = S::ZeroDwords();
    int64_t part = 0;
    for (int64_t byte = 0; part < columns.parts; byte += kByteRun) {
      I sums[4];
      if (last >= 15 && rows.row_bytes - byte >= kByteRun) {
        MultiplyTokens<kBits, true>(first + byte, rows.stride, last, 0, flips, factors, next, sums);
      } else {
        const __mmask64 there = Bytes::First(rows.row_bytes - byte);
        MultiplyTokens<kBits, false>(first + byte, rows.stride, last, there, flips, factors, next,
                                     sums);
      }
      factors += kFactors;
      Avx512Codes::TransposeQuarters(sums);
      ForEachOf<4>([&](auto quarter) __attribute__((always_inline)) {
        sum = S::AddDwords(sum, sums[quarter.value]);
        const int64_t end = byte / 4 + 4 * (quarter.value + 1);
        if (part == columns.parts || end < columns.part_ends[part]) return;
        const int64_t at = columns.part_groups[part] * kTokenTile + token;
        const auto of_part = S::ToFloat(S::AddDwords(sum, S::Dword(queries.starts[part])));
        score = S::Fma(of_part, S::Load(parameters.scales + at), score);
        if (parameters.biases != nullptr) {
          score = S::Fnma(S::Load(parameters.biases + at), S::Set1(queries.sums[part]), score);
        }
        sum = S::ZeroDwords();
        ++part;
      });
    }
    S::Store(scores + token, S::Mul(score, S::Set1(queries.scales[0])));
  }
}

inline bool ScoresByBytes(const TokenRows& rows, uint8_t flip, const CodeColumns& columns,
                          const CodeQueries& queries, int64_t query_rows,
                          const CodeParameters& parameters, int32_t* transposed, float* scores) {
  if (!TakesTokens(columns, query_rows)) {
    return Scores<Avx512Codes>(rows, flip, columns, queries, query_rows, parameters, transposed,
                               scores);
  }
  const auto run = columns.bits == 8 ? TokenScores<8> : TokenScores<4>;
  run(rows, flip != 0, columns, queries, parameters, scores);
  return false;
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_BYTES_AVX512_H_
