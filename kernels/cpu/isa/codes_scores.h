// Queries as s16, and their integer products with codes: see kernels/cpu/codes.h.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_SCORES_H_
#define KVANT_KERNELS_CPU_ISA_CODES_SCORES_H_

#include <immintrin.h>

#include <cstdint>

#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/isa/codes_common.h"

namespace kvant::cpu {
namespace {

template <typename S>
bool PrepareRow(const float* q, const CodeFactors& factors, const CodeColumns& columns,
                int32_t offset, int64_t rows, int64_t row, int64_t block, int64_t in_block,
                const CodeQueries& out) {
  using F = typename S::Vector;
  constexpr int kLanes = S::kWidth;
  const auto value = [&](int64_t d) {
    const int64_t n = columns.channels - d;
    const F x = LoadPart<S>(q + d, n);
    return factors.scales == nullptr ? x : S::Mul(x, LoadPart<S>(factors.scales + d, n));
  };
  F most = S::Set1(0.f), nans = S::Set1(0.f);
  for (int64_t d = 0; d < columns.channels; d += kLanes) {
    const F x = value(d);
    most = S::MaxAbs(most, x);
    nans = S::Fma(x, S::Set1(0.f), nans);  // NaN for what is not finite
  }
  const float top = S::MaxOf(most);
  if (!(S::SumOf(nans) == 0.f)) return false;
  // The scale that uses all of s16; or a power of two, where that represents the row exactly,
  // as it does small integers.
  float scale = top > 1e-30f ? top / 32767.f : 1.f;
  int exponent = 0;
  __builtin_frexpf(scale, &exponent);
  const F power = S::Set1(__builtin_ldexpf(1.f, exponent)),
          inverse_power = S::Set1(__builtin_ldexpf(1.f, -exponent));
  F lost = S::Set1(0.f);
  for (int64_t d = 0; d < columns.channels; d += kLanes) {
    const F x = value(d);
    lost = S::MaxAbs(lost, S::Sub(x, S::Mul(S::Round(S::Mul(x, inverse_power)), power)));
  }
  if (S::MaxOf(lost) == 0.f) scale = __builtin_ldexpf(1.f, exponent);
  out.scales[row] = scale;
  const F inverse = S::Set1(1.f / scale);

  const int64_t per_dword = 32 / columns.bits, pairs = per_dword / 2;
  int32_t* to = out.pairs + block * columns.columns * pairs;
  const int64_t block_rows = RowBlock(rows - block);
  int16_t codes[kColumnChunk * 16];
  int64_t part = 0;
  int32_t sum = 0;
  float zero_sum = 0.f;
  for (int64_t first = 0; first < columns.columns; first += kColumnChunk) {
    const int64_t begin = first * per_dword;
    for (int64_t i = 0; i < kColumnChunk * per_dword; i += 2 * kLanes) {
      const int64_t d = begin + i;
      F a = d < columns.channels ? value(d) : S::Set1(0.f);
      F b = d + kLanes < columns.channels ? value(d + kLanes) : S::Set1(0.f);
      S::RoundToHalves(codes + i, a, b, inverse);
    }
    for (int64_t i = 0; factors.zero_points != nullptr && i < kColumnChunk * per_dword; ++i) {
      if (begin + i >= columns.channels) break;
      zero_sum += static_cast<float>(codes[i]) * factors.zero_points[begin + i];
    }
    for (int64_t c = 0; c < kColumnChunk; ++c) {
      const int16_t* dword = codes + c * per_dword;
      for (int64_t k = 0; k < pairs; ++k) {
        const uint16_t low = static_cast<uint16_t>(dword[k]);
        const uint16_t high = static_cast<uint16_t>(dword[k + pairs]);
        to[((first + c) * pairs + k) * block_rows + in_block] =
            static_cast<int32_t>(low | static_cast<uint32_t>(high) << 16);
        sum += dword[k] + dword[k + pairs];
      }
      if (first + c + 1 != columns.part_ends[part]) continue;
      out.sums[row * columns.parts + part] =
          factors.scales != nullptr ? 0.f : static_cast<float>(sum);
      out.starts[row * columns.parts + part] = -offset * sum;
      sum = 0;
      if (++part == columns.parts) break;
    }
  }
  if (factors.scales != nullptr) out.sums[row * columns.parts] = zero_sum;
  return true;
}

template <typename S>
bool Prepare(const float* q, int64_t rows, const CodeFactors& factors, const CodeColumns& columns,
             int32_t offset, const CodeQueries& out) {
  for (int64_t block = 0; block < rows; block += RowBlock(rows - block)) {
    for (int64_t r = 0; r < RowBlock(rows - block); ++r) {
      if (!PrepareRow<S>(q + (block + r) * columns.channels, factors, columns, offset, rows,
                         block + r, block, r, out)) {
        return false;
      }
    }
  }
  return true;
}

// kBlocks times kWidth tokens from `token` on times kRows rows of queries. Lanes are tokens: no
// sums across lanes, and the parameters of a group load as a vector. Two blocks share what is
// read of the queries, which would else be the limit.
template <typename S, int kBits, int kRows, int kBlocks>
void ScoresBlock(const CodeRows& rows, uint8_t flip, const CodeColumns& columns,
                 const CodeQueries& queries, int64_t row, const CodeParameters& parameters,
                 int64_t token, float* scores, typename S::Vector* most) {
  using I = typename S::I;
  using F = typename S::Vector;
  constexpr int kPairs = 16 / kBits;  // of a dword
  // Sums side by side, so that a product need not wait for the last.
  constexpr int kChains = kRows * kBlocks >= 4 ? 1 : kRows * kBlocks == 2 ? 2 : kPairs == 2 ? 2 : 4;
  const I flips = S::Dword(static_cast<int32_t>(flip * 0x01010101u));
  const uint8_t* data = rows.data + token * rows.stride;
  const int32_t* pairs = queries.pairs + row * columns.columns * kPairs;
  const int32_t* starts = queries.starts + row * columns.parts;
  const float* sums = queries.sums + row * columns.parts;
  // Later rows of queries ask for the same lines again, which by then costs nothing.
  const char* next = reinterpret_cast<const char*>(rows.next) + token * rows.row_bytes;
  F out[kBlocks][kRows];
  for (auto& block : out) {
    for (F& o : block) o = S::Set1(0.f);
  }
  I column[kBlocks][S::kWidth];
  int64_t c = 0, loaded = 0;
  for (int64_t part = 0; part < columns.parts; ++part) {
    I acc[kBlocks][kRows][kChains];
    for (auto& block : acc) {
      for (int r = 0; r < kRows; ++r) {
        block[r][0] = S::Dword(starts[r * columns.parts + part]);
        for (int i = 1; i < kChains; ++i) block[r][i] = S::ZeroDwords();
      }
    }
    for (const int64_t end = columns.part_ends[part]; c < end;) {
      if (c == loaded) {
        for (int b = 0; b < kBlocks; ++b) {
          const uint8_t* from = data + b * S::kWidth * rows.stride + c * 4;
          const int64_t last = CodesMin(S::kWidth, rows.tokens - token - b * S::kWidth) - 1;
          S::Columns(from, rows.stride, last, rows.row_bytes - c * 4, column[b]);
        }
        loaded += S::kWidth;
      }
      const int64_t begin = loaded - S::kWidth;
      for (const int64_t stop = CodesMin(end, loaded); c < stop; ++c) {
        I codes[kBlocks][kPairs];
        for (int b = 0; b < kBlocks; ++b) {
          // The next tile, line after line as memory is fastest, and a line per column: a burst
          // would not overlap with computing.
          _mm_prefetch(next + b * S::kWidth * rows.row_bytes + c * 4 * S::kWidth, _MM_HINT_T1);
          Fields<S, kBits, kPairs>(S::Xor(column[b][c - begin], flips), codes[b]);
        }
        for (int k = 0; k < kPairs; ++k) {
          for (int r = 0; r < kRows; ++r) {
            const I q = S::Dword(pairs[k * kRows + r]);
            for (int b = 0; b < kBlocks; ++b) {
              I& sum = acc[b][r][k % kChains];
              sum = S::Dot(sum, codes[b][k], q);
            }
          }
        }
        pairs += kPairs * kRows;
      }
    }
    const int64_t at = columns.part_groups[part] * kTokenTile + token;
    const bool biased = parameters.biases != nullptr;
    for (int b = 0; b < kBlocks; ++b) {
      const F scale = S::Load(parameters.scales + at + b * S::kWidth);
      const F bias = biased ? S::Load(parameters.biases + at + b * S::kWidth) : S::Zero();
      for (int r = 0; r < kRows; ++r) {
        for (int i = 1; i < kChains; ++i) acc[b][r][0] = S::AddDwords(acc[b][r][0], acc[b][r][i]);
        const F sum = S::Fma(S::ToFloat(acc[b][r][0]), scale, out[b][r]);
        out[b][r] = S::Fnma(bias, S::Set1(sums[r * columns.parts + part]), sum);
      }
    }
  }
  for (int b = 0; b < kBlocks; ++b) {
    for (int r = 0; r < kRows; ++r) {
      const F score = S::Mul(out[b][r], S::Set1(queries.scales[row + r]));
      S::Store(scores + (row + r) * kTokenTile + token + b * S::kWidth, score);
      *most = S::MaxAbs(*most, score);
    }
  }
}

template <typename S, int kBits, int kBlocks>
void ScoresRows(const CodeRows& rows, uint8_t flip, const CodeColumns& columns,
                const CodeQueries& queries, int64_t query_rows, const CodeParameters& parameters,
                int64_t token, float* scores, typename S::Vector* most) {
  for (int64_t row = 0; row < query_rows; row += RowBlock(query_rows - row)) {
    const auto run = RowBlock(query_rows - row) == 4   ? ScoresBlock<S, kBits, 4, kBlocks>
                     : RowBlock(query_rows - row) == 2 ? ScoresBlock<S, kBits, 2, kBlocks>
                                                       : ScoresBlock<S, kBits, 1, kBlocks>;
    run(rows, flip, columns, queries, row, parameters, token, scores, most);
  }
}

template <typename S, int kBits>
float ScoresOf(const CodeRows& rows, uint8_t flip, const CodeColumns& columns,
               const CodeQueries& queries, int64_t query_rows, const CodeParameters& parameters,
               float* scores) {
  typename S::Vector most = S::Set1(0.f);
  int64_t token = 0;
  for (; token + 2 * S::kWidth <= rows.tokens; token += 2 * S::kWidth) {
    ScoresRows<S, kBits, 2>(rows, flip, columns, queries, query_rows, parameters, token, scores,
                            &most);
  }
  for (; token < rows.tokens; token += S::kWidth) {
    ScoresRows<S, kBits, 1>(rows, flip, columns, queries, query_rows, parameters, token, scores,
                            &most);
  }
  return S::MaxOf(most);
}

template <typename S>
float Scores(const CodeRows& rows, uint8_t flip, const CodeColumns& columns,
             const CodeQueries& queries, int64_t query_rows, const CodeParameters& parameters,
             float* scores) {
  const auto run = columns.bits == 8   ? ScoresOf<S, 8>
                   : columns.bits == 4 ? ScoresOf<S, 4>
                                       : ScoresOf<S, 2>;
  return run(rows, flip, columns, queries, query_rows, parameters, scores);
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_SCORES_H_
