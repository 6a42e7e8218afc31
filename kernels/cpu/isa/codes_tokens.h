// CodeKernels::prepare and scores of one row of queries that is multiplied with tokens where they
// lie: transposing codes into columns pays for several rows only.
//
// T is an instruction set's way: kRun bytes of a token are multiplied at a time, by the factors
// that MakeFactors has made of the queries' halves, in place.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_TOKENS_H_
#define KVANT_KERNELS_CPU_ISA_CODES_TOKENS_H_

#include <cstdint>

#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/isa/codes_common.h"
#include "kvant/kernels/cpu/isa/codes_scores.h"
#include "kvant/kernels/cpu/isa/streams.h"

namespace kvant::cpu {
namespace {

// What bytes of a vector share: a sum of products is of so many bytes of one token.
inline constexpr int64_t kLaneBytes = 16;

// Whether so many bytes of a token are worth runs: the last would be nearly full.
template <typename T>
bool FillsRuns(int64_t bytes) {
  const int64_t rest = bytes % T::kRun;
  return rest == 0 || rest > T::kRun * 3 / 4;
}

template <typename T>
bool TakesTokens(const CodeColumns& columns, int64_t rows) {
  if (rows != 1 || columns.bits == 2) return false;
  for (int64_t part = 0; part + 1 < columns.parts; ++part) {
    if (columns.part_ends[part] % (kLaneBytes / 4) != 0) return false;
  }
  return FillsRuns<T>(columns.channels * columns.bits / 8);
}

template <typename T>
bool PrepareForTokens(const float* q, int64_t rows, const CodeFactors& factors,
                      const CodeColumns& columns, int32_t offset, const CodeQueries& out) {
  if (!Prepare<typename T::Codes>(q, rows, factors, columns, offset, out)) return false;
  if (TakesTokens<T>(columns, rows)) {
    const auto make = columns.bits == 8 ? T::template MakeFactors<8> : T::template MakeFactors<4>;
    for (int64_t column = 0; column < columns.columns; column += T::kRun / 4) {
      make(out.pairs + column * (16 / columns.bits));
    }
  }
  return true;
}

// One row of queries times a run of bytes of each of kWidth tokens, from `p` on. Dword i of lane l
// of sums[q] is the sum of the products of token 4 q + i with the l-th 16 bytes of the run.
// kWhole: all tokens and bytes are there; else tokens up to `last`, and `bytes`.
// `next` moves on by what is prefetched. Requests of 8 bits stand apart, as these wait for memory;
// 4 bits gain nothing by it.
template <typename T, int kBits, bool kWhole, int kLanes>
inline __attribute__((always_inline)) void MultiplyTokens(
    const uint8_t* p, int64_t stride, int64_t last, int64_t bytes, typename T::I flips,
    const int32_t* queries, const uint8_t*& next, typename T::I (&sums)[kLanes]) {
  using I = typename T::I;
  using S = typename T::Codes;
  constexpr int kTokensOfLine = 64 / T::kRun;
  I factors[T::template kFactors<kBits>];
  for (int i = 0; i < T::template kFactors<kBits>; ++i) {
    factors[i] = S::LoadDwords(queries + i * S::kWidth);
  }
  ForEachOf<kLanes>([&](auto quad) __attribute__((always_inline)) {
    I of_token[4];
    ForEachOf<4>([&](auto i) __attribute__((always_inline)) {
      constexpr int kToken = 4 * quad.value + i.value;
      if constexpr (kToken % kTokensOfLine == 0) {
        if constexpr (kBits == 8) {
          PrefetchLine(next);
        } else {
          __builtin_prefetch(next + kToken * T::kRun, 0, 2);
        }
      }
      const uint8_t* const at = p + (kWhole ? i.value : CodesMin(kToken, last)) * stride;
      const I word = kWhole ? S::LoadDwords(at) : T::LoadSome(at, bytes);
      of_token[i.value] = T::template Sums<kBits>(word, flips, factors);
    });
    if (kWhole) p += 4 * stride;
    sums[quad.value] = T::SumsInLanes(of_token);
  });
  if (kBits == 4) next += S::kWidth * T::kRun;
}

// Scores of kWidth tokens from `token` on. kWhole: all of them and all bytes of their runs are
// there.
template <typename T, int kBits, bool kWhole>
void TokenScoresBlock(const TokenRows& rows, typename T::I flips, const CodeColumns& columns,
                      const CodeQueries& queries, const CodeParameters& parameters, int64_t token,
                      int stream_bits, float* scores) {
  using I = typename T::I;
  using S = typename T::Codes;
  constexpr int kLanes = T::kRun / kLaneBytes;
  const uint8_t* at = rows.At(token);
  const uint8_t* next = NextOf(rows, stream_bits, token / S::kWidth, S::kWidth);
  const int64_t last = rows.tokens - token - 1, parts = columns.parts;
  const int32_t* factors = queries.pairs;
  const float *const scales = parameters.scales + token, *const biases =
                                                             parameters.biases == nullptr
                                                                 ? nullptr
                                                                 : parameters.biases + token;
  auto score = S::Zero();
  I sum = S::ZeroDwords();
  int64_t part = 0;
  for (int64_t byte = 0; part < parts; byte += T::kRun, at += T::kRun) {
    I sums[kLanes];
    MultiplyTokens<T, kBits, kWhole>(at, rows.stride, last, rows.row_bytes - byte, flips, factors,
                                     next, sums);
    factors += T::template kFactors<kBits> * S::kWidth;
    T::TransposeLanes(sums);
    ForEachOf<kLanes>([&](auto lane) __attribute__((always_inline)) {
      sum = S::AddDwords(sum, sums[lane.value]);
      const int64_t end = (byte + kLaneBytes * (lane.value + 1)) / 4;
      if (part == parts || end < columns.part_ends[part]) return;
      const int64_t group = columns.part_groups[part] * kTokenTile;
      const auto of_part = S::ToFloat(S::AddDwords(sum, S::Dword(queries.starts[part])));
      score = S::Fma(of_part, S::Load(scales + group), score);
      if (biases != nullptr) {
        score = S::Fnma(S::Load(biases + group), S::Set1(queries.sums[part]), score);
      }
      sum = S::ZeroDwords();
      ++part;
    });
  }
  S::Store(scores + token, S::Mul(score, S::Set1(queries.scales[0])));
}

template <typename T, int kBits>
void TokenScores(const TokenRows& rows, bool flip, const CodeColumns& columns,
                 const CodeQueries& queries, const CodeParameters& parameters, float* scores) {
  constexpr int64_t kTokens = T::Codes::kWidth;
  const auto flips = T::Flips(kBits, flip);
  const bool whole_runs = rows.row_bytes % T::kRun == 0;
  const int stream_bits = StreamBits(rows, kCodeStreamBits<typename T::Codes>);
  for (int64_t token = 0; token < rows.tokens; token += kTokens) {
    const auto run = whole_runs && rows.tokens - token >= kTokens
                         ? TokenScoresBlock<T, kBits, true>
                         : TokenScoresBlock<T, kBits, false>;
    run(rows, flips, columns, queries, parameters, token, stream_bits, scores);
  }
}

template <typename T>
bool ScoresByTokens(const TokenRows& rows, uint8_t flip, const CodeColumns& columns,
                    const CodeQueries& queries, int64_t query_rows,
                    const CodeParameters& parameters, int32_t* transposed, float* scores) {
  if (!TakesTokens<T>(columns, query_rows)) {
    return Scores<typename T::Codes>(rows, flip, columns, queries, query_rows, parameters,
                                     transposed, scores);
  }
  const auto run = columns.bits == 8 ? TokenScores<T, 8> : TokenScores<T, 4>;
  run(rows, flip != 0, columns, queries, parameters, scores);
  return false;
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_TOKENS_H_
