// Queries as s16, and their integer products with codes: see kernels/cpu/codes.h.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_SCORES_H_
#define KVANT_KERNELS_CPU_ISA_CODES_SCORES_H_

#include <cstdint>

#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/isa/codes_common.h"

namespace kvant::cpu {
namespace {

// Elements of a row of queries times their factors; zeros beyond the channels.
template <typename S>
typename S::Vector QueriesAt(const float* q, const CodeFactors& factors, int64_t channels,
                             int64_t d) {
  const int64_t n = channels - d;
  if (n <= 0) return S::Zero();
  const typename S::Vector x = LoadPart<S>(q + d, n);
  return factors.scales == nullptr ? x : S::Mul(x, LoadPart<S>(factors.scales + d, n));
}

// The scale that uses all of s16; or a power of two, where that represents the row exactly, as it
// does small integers. NaN if an element is not finite.
template <typename S>
float ScaleOfRow(const float* q, const CodeFactors& factors, int64_t channels) {
  using F = typename S::Vector;
  F most = S::Zero(), nans = S::Zero();
  for (int64_t d = 0; d < channels; d += S::kWidth) {
    const F x = QueriesAt<S>(q, factors, channels, d);
    most = S::Max(most, S::Abs(x));
    nans = S::Fma(x, S::Zero(), nans);
  }
  const float top = S::MaxOf(most), nan = S::SumOf(nans);
  if (!(nan == 0.f)) return nan;
  // The inverse of smaller ones is near overflow.
  const float scale = top > 1e-33f ? top / S::kMost : 1.f;
  if (factors.scales != nullptr) return scale;
  int exponent = 0;
  __builtin_frexpf(scale, &exponent);
  const F power = S::Set1(__builtin_ldexpf(1.f, exponent)),
          inverse = S::Set1(__builtin_ldexpf(1.f, -exponent));
  F lost = S::Zero();
  for (int64_t d = 0; d < channels; d += S::kWidth) {
    const F x = QueriesAt<S>(q, factors, channels, d);
    lost = S::Max(lost, S::Abs(S::Sub(x, S::Mul(S::Round(S::Mul(x, inverse)), power))));
  }
  return S::MaxOf(lost) == 0.f ? __builtin_ldexpf(1.f, exponent) : scale;
}

// A row of queries over its scale.
template <typename S, int kBits>
void PrepareRow(const float* q, const CodeFactors& factors, const CodeColumns& columns,
                int32_t offset, float scale, int32_t* pairs, int32_t* starts, float* sums,
                float* lost, float* most_lost_of_row) {
  using F = typename S::Vector;
  using I = typename S::I;
  constexpr int kPerDword = 32 / kBits;
  const F inverse = S::Set1(1.f / scale);
  // Zero points are in the factors, or there are none.
  const bool has_points = factors.zero_points != nullptr;
  const bool sums_are_zero = has_points || factors.scales != nullptr;
  F zero_sum = S::Zero(), most_lost = S::Zero();
  I sum = S::ZeroDwords();
  int64_t part = 0;
  // What a code in the products is less than as an unsigned one.
  constexpr int32_t kLess = kBits == 8 ? S::kByteFlip : 0;
  // Whole dwords of the narrowest codes, and whole steps.
  constexpr int kWhole = S::kStep * kPerDword < 16 ? 16 : S::kStep * kPerDword;
  constexpr int kRun = S::kWidth < 8 ? kWhole : 2 * S::kWidth, kVectors = kRun / S::kWidth;
  // Columns behind the last part are not multiplied.
  const int64_t end = columns.part_ends[columns.parts - 1] * kPerDword;
  for (int64_t d = 0; d < end; d += kRun) {
    alignas(64) int16_t codes[kRun];
    F x[kVectors], exact[kVectors];
    for (int h = 0; h < kVectors; ++h) {
      exact[h] = x[h] = QueriesAt<S>(q, factors, columns.channels, d + h * S::kWidth);
    }
    for (int h = 0; h < kVectors; h += 2) {
      S::RoundToHalves(codes + h * S::kWidth, x[h], x[h + 1], inverse,
                       kDither.at + (d + h * S::kWidth) % kTokenTile);
    }
    S::template PairHalves<kPerDword>(codes, pairs);
    pairs += kRun / 2;
    for (int h = 0; h < kVectors; ++h) {
      const int64_t at = d + h * S::kWidth, left = columns.channels - at;
      if (lost != nullptr && left > 0) {
        const F rest = S::Fnma(x[h], S::Set1(scale), exact[h]);
        most_lost = S::Max(most_lost, S::Abs(rest));
        StorePart<S>(lost + at, left, rest);
      }
      if (has_points && left > 0) {
        zero_sum = S::Fma(x[h], LoadPart<S>(factors.zero_points + at, left), zero_sum);
      }
      if (sums_are_zero && offset == kLess) continue;
      sum = S::AddDwords(sum, S::ToDwords(x[h]));
      if (part == columns.parts || at + S::kWidth != columns.part_ends[part] * kPerDword) continue;
      const int32_t all = S::SumOfDwords(sum);
      starts[part] = (kLess - offset) * all;
      sums[part++] = sums_are_zero ? 0.f : static_cast<float>(all);
      sum = S::ZeroDwords();
    }
  }
  for (; part < columns.parts; ++part) {
    starts[part] = 0;
    sums[part] = 0.f;
  }
  if (has_points) sums[0] = S::SumOf(zero_sum);
  if (lost != nullptr) *most_lost_of_row = S::MaxOf(most_lost);
}

template <typename S>
bool Prepare(const float* q, int64_t rows, const CodeFactors& factors, const CodeColumns& columns,
             int32_t offset, const CodeQueries& out) {
  for (int64_t row = 0; row < rows; ++row) {
    const float scale = ScaleOfRow<S>(q + row * columns.channels, factors, columns.channels);
    if (!(scale > 0.f)) return false;
    out.scales[row] = scale;
  }
  const auto run = columns.bits == 8   ? PrepareRow<S, 8>
                   : columns.bits == 4 ? PrepareRow<S, 4>
                                       : PrepareRow<S, 2>;
  for (int64_t row = 0; row < rows; ++row) {
    run(q + row * columns.channels, factors, columns, offset, out.scales[row],
        out.pairs + row * columns.columns * (16 / columns.bits), out.starts + row * columns.parts,
        out.sums + row * columns.parts,
        out.lost == nullptr ? nullptr : out.lost + row * columns.channels,
        out.lost == nullptr ? nullptr : out.most_lost + row);
  }
  return true;
}

// What transposed codes are flipped by.
template <typename S>
uint8_t FlipOf(uint8_t signs, int bits) {
  return bits == 8 ? signs ^ S::kByteFlip : signs;
}

// Codes of tokens [begin, end) as dword columns, [column / kStep][kTokenTile][kStep], with sign
// bits flipped.
template <typename S>
void TransposeCodes(const TokenRows& rows, uint8_t flip, int64_t begin, int64_t end,
                    int32_t* transposed) {
  const auto flips = S::Dword(static_cast<int32_t>(flip * 0x01010101u));
  for (int64_t token = begin; token < end; token += S::kWidth) {
    const int64_t last = CodesMin(S::kWidth, end - token) - 1;
    for (int64_t byte = 0; byte < rows.row_bytes; byte += S::kColumnBytes) {
      S::Columns(rows.At(token) + byte, rows.stride, last, rows.row_bytes - byte, flips,
                 transposed + byte / 4 * kTokenTile + token * S::kStep);
    }
  }
}

// kBlocks times kWidth tokens from `token` on times kRows rows of queries. Lanes are tokens: no
// sums across lanes, and the parameters of a group load as a vector. Blocks share what is read of
// the queries, rows the codes' fields.
template <typename S, int kBits, int kRows, int kBlocks>
void ScoresBlock(const TokenRows& rows, const int32_t* transposed, const CodeColumns& columns,
                 const CodeQueries& queries, int64_t row, const CodeParameters& parameters,
                 int64_t token, float* scores) {
  using I = typename S::I;
  using F = typename S::Vector;
  constexpr int kPairs = 16 / kBits;  // of a dword
  constexpr int kStepPairs = S::kStep * kPairs;
  constexpr int kUnit = PartUnit(kBits);
  // Sums side by side, so that a product need not wait for the last.
  constexpr int kFit = S::kDotAccumulators / (kRows * kBlocks);
  constexpr int kSums = kFit < 4 ? 1 : kFit < 8 || kPairs == 2 ? 2 : 4;
  constexpr int kChains = kSums < S::kPlanes ? S::kPlanes : kSums;
  // Copies: else the compiler reads them again after every score that is stored.
  const int64_t row_pairs = columns.columns * kPairs, parts = columns.parts;
  const float *const scales = parameters.scales, *const biases = parameters.biases;
  const int32_t* pairs = queries.pairs + row * row_pairs;
  const int32_t* starts = queries.starts + row * parts;
  const float* sums = queries.sums + row * parts;
  // The next tile, spread over the columns: a burst would not overlap with computing. Later rows of
  // queries prefetch the same lines again, which by then costs nothing. Blocks of four tokens lie
  // side by side, and prefetch one line after another together.
  constexpr int kRuns = S::kWidth > 4 ? kBlocks : 1;
  constexpr int64_t kRunBytes = 4 * S::kWidth * (kBlocks / kRuns);
  constexpr int64_t kLineColumns = kRunBytes < 64 && S::kWidth == 4 ? 64 / kRunBytes : 1;
  const uint8_t* next[kRuns];
  for (int i = 0; i < kRuns; ++i) next[i] = rows.Next(token + i * S::kWidth);
  float* const block_scores = scores + row * kTokenTile + token;
  int64_t c = 0;
  for (int64_t part = 0; part < parts; ++part) {
    I acc[kBlocks][kRows][kChains];
    for (auto& block : acc) {
      for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < kChains; ++i) {
          block[r][i] = S::Start(i, starts[r * parts + part]);
        }
      }
    }
    // kStep columns from `first` on, of whose queries `choose` makes what counts.
    const auto multiply = [&](int64_t first, bool begins_line, auto choose)
        __attribute__((always_inline)) {
      using Codes = decltype(S::CodesAt(transposed, first, token));
      Codes word[kBlocks];
      for (int b = 0; b < kBlocks; ++b) {
        word[b] = S::CodesAt(transposed, first, token + b * S::kWidth);
      }
      for (int i = 0; i < kRuns && begins_line; ++i) {
        for (int64_t at = 0; at < S::kStep; at += kLineColumns) {
          __builtin_prefetch(next[i] + (first + at) * kRunBytes, 0, 2);
        }
      }
      const int32_t* pairs_of[kRows];
      for (int r = 0; r < kRows; ++r) {
        pairs_of[r] = pairs + r * row_pairs;
        // Else the compiler keeps a register for each row and each k.
        asm("" : "+r"(pairs_of[r]));
      }
      ForEachOf<kStepPairs / S::kQueryDwords>([&](auto k) {
        Codes codes[kBlocks];
        for (int b = 0; b < kBlocks; ++b) codes[b] = S::template Field<kBits, k.value>(word[b]);
        for (int r = 0; r < kRows; ++r) {
          const I q = choose(S::QueryAt(pairs_of[r] + k.value * S::kQueryDwords));
          for (int b = 0; b < kBlocks; ++b) {
            S::template AddProduct<k.value>(acc[b][r], codes[b], q);
          }
        }
      });
    };
    const auto step = [&](bool begins_line) __attribute__((always_inline)) {
      multiply(c, begins_line, [](I q) { return q; });
      pairs += kStepPairs;
      c += S::kStep;
    };
    const int64_t end = columns.part_ends[part];
    if constexpr (kUnit % S::kStep == 0) {
      // Parts are whole units, so that the usual ones are few jumps.
      int64_t units = (end - c) / kUnit;
      do {
        ForEachOf<kUnit / S::kStep>([&](auto i) __attribute__((always_inline)) {
          step(kUnit % kLineColumns == 0 ? i.value * S::kStep % kLineColumns == 0
                                         : c % kLineColumns == 0);
        });
      } while (--units != 0);
    } else {
      // A part may begin and end within a step, whose other columns do not count then.
      while (c < end) {
        const int64_t into = c % S::kStep;
        if (into == 0 && c + S::kStep <= end) {
          step(c % kLineColumns == 0);
          continue;
        }
        const auto only_own = [own = S::OwnQueries(into)](I q) { return S::And(q, own); };
        multiply(c - into, into == 0 && c % kLineColumns == 0, only_own);
        if (++c % S::kStep == 0) pairs += kStepPairs;
      }
    }
    const int64_t at = columns.part_groups[part] * kTokenTile + token;
    // Without a choice within, so that sums stay in registers.
    const auto add = [&](auto first, auto biased) __attribute__((always_inline)) {
      ForEachOf<kBlocks>([&](auto b) __attribute__((always_inline)) {
        const int64_t block = b.value * S::kWidth;
        const F scale = S::Load(scales + at + block);
        const F bias = biased.value ? S::Load(biases + at + block) : scale;
        for (int r = 0; r < kRows; ++r) {
          float* to = block_scores + r * kTokenTile + block;
          F score = S::ToFloat(S::SumOfChains(acc[b.value][r]));
          score = first.value ? S::Mul(score, scale) : S::Fma(score, scale, S::Load(to));
          if (biased.value) score = S::Fnma(bias, S::Set1(sums[r * parts + part]), score);
          S::Store(to, score);
        }
      });
    };
    using Yes = Constant<1>;
    using No = Constant<0>;
    if (biases == nullptr) {
      part == 0 ? add(Yes(), No()) : add(No(), No());
    } else {
      part == 0 ? add(Yes(), Yes()) : add(No(), Yes());
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const F scale = S::Set1(queries.scales[row + r]);
    for (int b = 0; b < kBlocks; ++b) {
      float* to = block_scores + r * kTokenTile + b * S::kWidth;
      S::Store(to, S::Mul(S::Load(to), scale));
    }
  }
}

template <typename S, int kBits, int kRows>
void ScoresRows(const TokenRows& rows, const int32_t* transposed, const CodeColumns& columns,
                const CodeQueries& queries, int64_t row, const CodeParameters& parameters,
                int64_t token, int64_t tokens, float* scores) {
  constexpr int kFit = S::kDotAccumulators / kRows;
  constexpr int kBlocks = kFit >= 4 ? 4 : kFit;
  const auto run = [&](auto blocks) {
    constexpr int kCount = decltype(blocks)::value;
    // A last block may be in part beyond the tokens.
    const int64_t whole = kCount > 1 ? kCount * S::kWidth : 1;
    for (; token + whole <= tokens; token += kCount * S::kWidth) {
      ScoresBlock<S, kBits, kRows, kCount>(rows, transposed, columns, queries, row, parameters,
                                           token, scores);
    }
  };
  run(Constant<kBlocks>());
  if constexpr (kBlocks == 4) run(Constant<2>());
  run(Constant<1>());
}

template <typename S, int kBits>
void ScoresOf(const TokenRows& rows, uint8_t flip, const CodeColumns& columns,
              const CodeQueries& queries, int64_t query_rows, const CodeParameters& parameters,
              int32_t* transposed, float* scores) {
  // Columns of so many tokens are made and used while they are in the first-level cache.
  constexpr int64_t step = 256 / kBits;
  for (int64_t token = 0; token < rows.tokens; token += step) {
    const int64_t end = CodesMin(token + step, rows.tokens);
    TransposeCodes<S>(rows, FlipOf<S>(flip, kBits), token, end, transposed);
    ForRowBlocks(query_rows, [&](auto block, int64_t row) {
      ScoresRows<S, kBits, decltype(block)::value>(rows, transposed, columns, queries, row,
                                                   parameters, token, end, scores);
    });
  }
}

template <typename S>
bool Scores(const TokenRows& rows, uint8_t flip, const CodeColumns& columns,
            const CodeQueries& queries, int64_t query_rows, const CodeParameters& parameters,
            int32_t* transposed, float* scores) {
  const auto run = columns.bits == 8   ? ScoresOf<S, 8>
                   : columns.bits == 4 ? ScoresOf<S, 4>
                                       : ScoresOf<S, 2>;
  run(rows, flip, columns, queries, query_rows, parameters, transposed, scores);
  return true;
}

template <typename S>
void TransposeAllCodes(const TokenRows& rows, uint8_t flip, const CodeColumns& columns,
                       int32_t* transposed) {
  TransposeCodes<S>(rows, FlipOf<S>(flip, columns.bits), 0, rows.tokens, transposed);
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_SCORES_H_
