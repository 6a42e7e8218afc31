// The products on codes of kernels/cpu/codes.h, for any instruction set that has
// the primitives of codes_avx512.h. Everything has internal linkage, so that the units of
// two instruction sets cannot share a function that only one CPU can run; for the same
// reason nothing of std:: that could be emitted out of line is used.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_KERNELS_H_
#define KVANT_KERNELS_CPU_ISA_CODES_KERNELS_H_

#include <immintrin.h>

#include <cstdint>

#include "kvant/kernels/cpu/codes.h"

namespace kvant::cpu {
namespace {

constexpr int64_t CodesMin(int64_t a, int64_t b) { return a < b ? a : b; }

// The first n elements, or a whole vector.
template <typename S>
typename S::Vector LoadPart(const float* p, int64_t n) {
  return n >= S::kWidth ? S::Load(p) : S::LoadSome(p, n);
}
template <typename S>
void StorePart(float* p, int64_t n, typename S::Vector v) {
  if (n >= S::kWidth) return S::Store(p, v);
  S::StoreSome(p, v, n);
}

// ---- queries ----

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
      const F a = d < columns.channels ? value(d) : S::Set1(0.f);
      const F b = d + kLanes < columns.channels ? value(d + kLanes) : S::Set1(0.f);
      S::StoreHalves(codes + i, S::Round(S::Mul(a, inverse)), S::Round(S::Mul(b, inverse)));
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

// ---- scores ----

// The fields of kBits in each 16-bit half, lowest first.
template <typename S, int kBits, int kFields>
inline __attribute__((always_inline)) void Fields(typename S::I word, typename S::I* field) {
  static_assert(kFields == 1 || kFields == 2 || kFields == 4 || kFields == 8);
  const typename S::I mask = S::Dword(((1 << kBits) - 1) * 0x10001);
  field[0] = S::And(word, mask);
  if constexpr (kFields > 1) field[1] = S::And(S::template ShiftHalves<kBits>(word), mask);
  if constexpr (kFields > 2) {
    field[2] = S::And(S::template ShiftHalves<2 * kBits>(word), mask);
    field[3] = S::And(S::template ShiftHalves<3 * kBits>(word), mask);
  }
  if constexpr (kFields > 4) {
    field[4] = S::And(S::template ShiftHalves<4 * kBits>(word), mask);
    field[5] = S::And(S::template ShiftHalves<5 * kBits>(word), mask);
    field[6] = S::And(S::template ShiftHalves<6 * kBits>(word), mask);
    field[7] = S::And(S::template ShiftHalves<7 * kBits>(word), mask);
  }
}

// kBlocks times kWidth tokens from `token` on times kRows rows of queries. Lanes are tokens: no
// sums across lanes, and the parameters of a group load as a vector. Two blocks share what is
// read of the queries, which would else be the limit.
template <typename S, int kBits, int kRows, int kBlocks>
void ScoresBlock(const CodeRows& rows, uint8_t flip, const CodeColumns& columns,
                 const CodeQueries& queries, int64_t row, const CodeParameters& parameters,
                 int64_t token, float* scores) {
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
  const int64_t ahead = row == 0 ? rows.ahead : 0;
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
          // What comes next, a line per token of this.
          for (int i = 0; ahead != 0 && i < S::kWidth; ++i) {
            _mm_prefetch(reinterpret_cast<const char*>(from + i * rows.stride + ahead),
                         _MM_HINT_T0);
          }
        }
        loaded += S::kWidth;
      }
      const int64_t begin = loaded - S::kWidth;
      for (const int64_t stop = CodesMin(end, loaded); c < stop; ++c) {
        I codes[kBlocks][kPairs];
        for (int b = 0; b < kBlocks; ++b) {
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
    for (int b = 0; b < kBlocks; ++b) {
      const F scale = S::Load(parameters.scales + at + b * S::kWidth);
      for (int r = 0; r < kRows; ++r) {
        for (int i = 1; i < kChains; ++i) acc[b][r][0] = S::AddDwords(acc[b][r][0], acc[b][r][i]);
        out[b][r] = S::Fma(S::ToFloat(acc[b][r][0]), scale, out[b][r]);
      }
      if (parameters.biases == nullptr) continue;
      const F bias = S::Load(parameters.biases + at + b * S::kWidth);
      for (int r = 0; r < kRows; ++r) {
        out[b][r] = S::Fnma(bias, S::Set1(sums[r * columns.parts + part]), out[b][r]);
      }
    }
  }
  for (int b = 0; b < kBlocks; ++b) {
    for (int r = 0; r < kRows; ++r) {
      S::Store(scores + (row + r) * kTokenTile + token + b * S::kWidth,
               S::Mul(out[b][r], S::Set1(queries.scales[row + r])));
    }
  }
}

template <typename S, int kBits, int kBlocks>
void ScoresRows(const CodeRows& rows, uint8_t flip, const CodeColumns& columns,
                const CodeQueries& queries, int64_t query_rows, const CodeParameters& parameters,
                int64_t token, float* scores) {
  for (int64_t row = 0; row < query_rows; row += RowBlock(query_rows - row)) {
    const auto run = RowBlock(query_rows - row) == 4   ? ScoresBlock<S, kBits, 4, kBlocks>
                     : RowBlock(query_rows - row) == 2 ? ScoresBlock<S, kBits, 2, kBlocks>
                                                       : ScoresBlock<S, kBits, 1, kBlocks>;
    run(rows, flip, columns, queries, row, parameters, token, scores);
  }
}

template <typename S, int kBits>
void ScoresOf(const CodeRows& rows, uint8_t flip, const CodeColumns& columns,
              const CodeQueries& queries, int64_t query_rows, const CodeParameters& parameters,
              float* scores) {
  int64_t token = 0;
  for (; token + 2 * S::kWidth <= rows.tokens; token += 2 * S::kWidth) {
    ScoresRows<S, kBits, 2>(rows, flip, columns, queries, query_rows, parameters, token, scores);
  }
  for (; token < rows.tokens; token += S::kWidth) {
    ScoresRows<S, kBits, 1>(rows, flip, columns, queries, query_rows, parameters, token, scores);
  }
}

template <typename S>
void Scores(const CodeRows& rows, uint8_t flip, const CodeColumns& columns,
            const CodeQueries& queries, int64_t query_rows, const CodeParameters& parameters,
            float* scores) {
  const auto run = columns.bits == 8   ? ScoresOf<S, 8>
                   : columns.bits == 4 ? ScoresOf<S, 4>
                                       : ScoresOf<S, 2>;
  run(rows, flip, columns, queries, query_rows, parameters, scores);
}

// ---- parameters ----

// Of kWidth tokens, groups a power of two: unzipping rotates the bits of
// an element's index (token, group) by one.
template <typename S, int kGroups>
void TransposeBlock(const float* from, float* to) {
  using F = typename S::Vector;
  F v[kGroups], t[kGroups];
  for (int i = 0; i < kGroups; ++i) v[i] = S::Load(from + i * S::kWidth);
  for (int turn = 1; turn < kGroups; turn *= 2) {
    for (int i = 0; i < kGroups / 2; ++i) {
      S::Unzip(v[2 * i], v[2 * i + 1], &t[i], &t[i + kGroups / 2]);
    }
    for (int i = 0; i < kGroups; ++i) v[i] = t[i];
  }
  for (int i = 0; i < kGroups; ++i) S::Store(to + i * kTokenTile, v[i]);
}

template <typename S>
void TransposeParameters(const float* from, int64_t n, int64_t groups, float* to) {
  const auto block = groups == 1   ? TransposeBlock<S, 1>
                     : groups == 2 ? TransposeBlock<S, 2>
                     : groups == 4 ? TransposeBlock<S, 4>
                     : groups == 8 ? TransposeBlock<S, 8>
                                   : nullptr;
  int64_t token = 0;
  if (block != nullptr) {
    for (; token + S::kWidth <= n; token += S::kWidth) block(from + token * groups, to + token);
  }
  for (; token < n; ++token) {
    for (int64_t g = 0; g < groups; ++g) to[g * kTokenTile + token] = from[token * groups + g];
  }
  for (; token < kTokenTile; ++token) {
    for (int64_t g = 0; g < groups; ++g) to[g * kTokenTile + token] = 0.f;
  }
}

template <typename S>
bool Biases(const float* scales, const float* zero_points, bool real, float offset, bool in_codes,
            int64_t n, float* biases) {
  using F = typename S::Vector;
  // Chains of their own, so that one element does not wait for the last.
  F scale_nans = S::Set1(0.f), bias_nans = S::Set1(0.f);
  const F zero = S::Set1(0.f), shift = S::Set1(offset);
  for (int64_t i = 0; i < n; i += S::kWidth) {
    const F scale = LoadPart<S>(scales + i, n - i);
    scale_nans = S::Fma(scale, zero, scale_nans);
    if (biases == nullptr) continue;
    F bias = shift;
    if (zero_points != nullptr) {
      const F point = LoadPart<S>(zero_points + i, n - i);
      bias = S::Add(real ? S::Div(point, scale) : point, shift);
      if (real && !in_codes) bias = S::Fma(scale, shift, point);
    }
    if (!in_codes && !(real && zero_points != nullptr)) bias = S::Mul(bias, scale);
    StorePart<S>(biases + i, n - i, bias);
    bias_nans = S::Fma(bias, zero, bias_nans);
  }
  return S::SumOf(S::Add(scale_nans, bias_nans)) == 0.f;
}

// ---- weights ----

// What Weights keeps of kWidth (row, group) until it reduces across lanes for all of them.
template <typename S>
struct WeightBatch {
  alignas(64) float most[S::kWidth][S::kWidth];
  const float* probs[S::kWidth];
  const float* scales[S::kWidth];
  const float* zero_points[S::kWidth];
};

// The sum, or the highest, of each of kWidth vectors, as one vector.
template <typename S, bool kHighest>
typename S::Vector ReduceEach(const float (&rows)[S::kWidth][S::kWidth]) {
  using F = typename S::Vector;
  F v[S::kWidth];
  for (int i = 0; i < S::kWidth; ++i) v[i] = S::Load(rows[i]);
  // Halves the vectors, and the lanes that remain of each, at every turn.
  S::FoldEach(v, [](F a, F b) { return kHighest ? S::Max(a, b) : S::Add(a, b); });
  return v[0];
}

// Rounds the first n of the batch to weights.
template <typename S>
void FinishWeights(WeightBatch<S>& batch, int64_t n, int16_t* weights, float* weight_scales,
                   float* weight_biases) {
  using F = typename S::Vector;
  constexpr float kTop = 32767.f;
  // So small that the reciprocal would overflow; nothing that counts is lost.
  constexpr float kTiny = 1e-33f;
  const F most = ReduceEach<S, true>(batch.most);
  const F scales = S::Mul(most, S::Set1(1.f / kTop));
  alignas(64) float factors[S::kWidth];
  S::Store(factors, S::WhereAbove(most, kTiny, S::Div(S::Set1(kTop), most)));
  for (int64_t i = 0; i < n; ++i) {
    const float *p = batch.probs[i], *s = batch.scales[i], *z = batch.zero_points[i];
    const F factor = S::Set1(factors[i]);
    F bias = S::Set1(0.f);
    for (int t = 0; t < kTokenTile; t += 2 * S::kWidth) {
      const F a = S::Round(S::Mul(S::Mul(S::Load(p + t), S::Load(s + t)), factor));
      const F b =
          S::Round(S::Mul(S::Mul(S::Load(p + t + S::kWidth), S::Load(s + t + S::kWidth)), factor));
      S::StoreHalves(weights + i * kTokenTile + t, a, b);
      if (z == nullptr) continue;
      // With the weights as rounded, so that what rounding loses multiplies code - zero point.
      bias = S::Fma(a, S::Load(z + t), S::Fma(b, S::Load(z + t + S::kWidth), bias));
    }
    S::Store(batch.most[i], bias);
  }
  StorePart<S>(weight_scales, n, scales);
  StorePart<S>(weight_biases, n, S::Mul(ReduceEach<S, false>(batch.most), scales));
}

template <typename S>
void Weights(const float* probs, int64_t rows, const CodeParameters& parameters, int64_t groups,
             int16_t* weights, float* weight_scales, float* weight_biases) {
  using F = typename S::Vector;
  constexpr int kVectors = kTokenTile / S::kWidth;
  WeightBatch<S> batch;
  int64_t done = 0, n = 0;
  for (int64_t row = 0; row < rows; ++row) {
    F p[kVectors];
    for (int i = 0; i < kVectors; ++i) p[i] = S::Load(probs + row * kTokenTile + i * S::kWidth);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t at = group * kTokenTile;
      const float* s = parameters.scales + at;
      F most = S::Mul(p[0], S::Load(s));
      for (int i = 1; i < kVectors; ++i) {
        most = S::MaxAbs(most, S::Mul(p[i], S::Load(s + i * S::kWidth)));
      }
      S::Store(batch.most[n], S::MaxAbs(most, most));
      batch.probs[n] = probs + row * kTokenTile;
      batch.scales[n] = s;
      batch.zero_points[n] = parameters.biases == nullptr ? nullptr : parameters.biases + at;
      if (++n < S::kWidth && (row + 1 < rows || group + 1 < groups)) continue;
      // Lanes past n hold what was there before, and are not used.
      FinishWeights<S>(batch, n, weights + done * kTokenTile, weight_scales + done,
                       weight_biases + done);
      done += n;
      n = 0;
    }
  }
}

// ---- values ----

template <typename S>
inline __attribute__((always_inline)) void AddToOutput(const CodeKernels::Values& args, int64_t row,
                                                       int64_t channel, int64_t group,
                                                       const float* shrink, typename S::Vector sum,
                                                       float* out) {
  using F = typename S::Vector;
  const int64_t n = args.channels - channel;
  if (n <= 0) return;
  const int64_t at = row * args.groups + group;
  F x = S::Mul(sum, S::Set1(args.weight_scales[at]));
  F bias = S::Set1(args.weight_biases[at]);
  if (args.channel_scales != nullptr) {
    x = S::Mul(x, LoadPart<S>(args.channel_scales + channel, n));
    bias = S::Mul(bias, LoadPart<S>(args.channel_biases + channel, n));
  }
  float* to = out + row * args.channels + channel;
  StorePart<S>(to, n, S::Fma(LoadPart<S>(to, n), S::Set1(shrink[row]), S::Sub(x, bias)));
}

// kChunks runs of kWidth bytes of each token times kRows rows of weights; kGroups of
// them share a run.
template <typename S, int kBits, bool kSigned, int kRows, int kGroups, int kChunks>
void ValuesBlock(const CodeKernels::Values& args, int64_t row, int64_t byte, const float* shrink,
                 float* out) {
  using I = typename S::I;
  using F = typename S::Vector;
  constexpr int kPlanes = 8 / kBits;
  constexpr int64_t kChannels = S::kWidth * kPlanes;
  const I flips = S::Dword(!args.is_signed ? 0 : kBits == 4 ? 0x00880088 : 0x00aa00aa);
  const CodeRows& rows = args.rows;
  const int64_t bytes = rows.row_bytes - byte;
  const int64_t row_step = args.groups * kTokenTile;
  // Lanes past the last channel have no group; what they multiply is not used.
  const int16_t* weights[kChunks][kGroups];
  int64_t groups[kChunks][kGroups];
  for (int ch = 0; ch < kChunks; ++ch) {
    for (int i = 0; i < kGroups; ++i) {
      const int64_t channel = byte * kPlanes + ch * kChannels + i * (kChannels / kGroups);
      groups[ch][i] = CodesMin(channel / args.group, args.groups - 1);
      weights[ch][i] = args.weights + (row * args.groups + groups[ch][i]) * kTokenTile;
    }
  }
  I acc[kChunks][kRows][kPlanes];
  for (auto& chunk : acc) {
    for (auto& of_row : chunk) {
      for (I& a : of_row) a = S::ZeroDwords();
    }
  }
  const bool prefetch = row == 0 && rows.ahead != 0 && byte % 64 == 0;
  for (int64_t t = 0; t < rows.tokens; t += 2) {
    const uint8_t* p0 = rows.data + t * rows.stride + byte;
    const uint8_t* p1 = t + 1 < rows.tokens ? p0 + rows.stride : p0;
    if (prefetch) {
      _mm_prefetch(reinterpret_cast<const char*>(p0 + rows.ahead), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(p1 + rows.ahead), _MM_HINT_T0);
    }
    for (int ch = 0; ch < kChunks; ++ch) {
      const int64_t skip = ch * S::kWidth;
      I word =
          S::template TokenPair<kSigned>(p0 + skip, p1 + skip, kChunks > 1 ? S::kWidth : bytes);
      I plane[kPlanes];
      if constexpr (kPlanes == 1) {
        plane[0] = word;  // of either sign
      } else {
        Fields<S, kBits, kPlanes>(S::Xor(word, flips), plane);
      }
      for (int r = 0; r < kRows; ++r) {
        const I weight = S::template Weights<kGroups>(weights[ch], r * row_step + t);
        for (int k = 0; k < kPlanes; ++k) acc[ch][r][k] = S::Dot(acc[ch][r][k], plane[k], weight);
      }
    }
  }
  for (int ch = 0; ch < kChunks; ++ch) {
    const int64_t channel = byte * kPlanes + ch * kChannels;
    for (int r = 0; r < kRows; ++r) {
      F v[kPlanes];
      for (int k = 0; k < kPlanes; ++k) v[k] = S::ToFloat(acc[ch][r][k]);
      // Lane j of plane k is channel j * kPlanes + k.
      if constexpr (kPlanes == 2) S::Zip(v[0], v[1], &v[0], &v[1]);
      if constexpr (kPlanes == 4) {
        F even[2], odd[2];
        S::Zip(v[0], v[2], &even[0], &even[1]);
        S::Zip(v[1], v[3], &odd[0], &odd[1]);
        S::Zip(even[0], odd[0], &v[0], &v[1]);
        S::Zip(even[1], odd[1], &v[2], &v[3]);
      }
      for (int k = 0; k < kPlanes; ++k) {
        AddToOutput<S>(args, row + r, channel + k * S::kWidth, groups[ch][k * kGroups / kPlanes],
                       shrink, v[k], out);
      }
    }
  }
}

template <typename S, int kBits, bool kSigned, int kRows, int kGroups>
void ValuesRows(const CodeKernels::Values& args, int64_t row, const float* shrink, float* out) {
  constexpr int kFit = S::kDotAccumulators / (kRows * (8 / kBits));
  constexpr int kChunks = kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  int64_t byte = 0;
  for (; byte + kChunks * S::kWidth <= args.rows.row_bytes; byte += kChunks * S::kWidth) {
    ValuesBlock<S, kBits, kSigned, kRows, kGroups, kChunks>(args, row, byte, shrink, out);
  }
  for (; byte < args.rows.row_bytes; byte += S::kWidth) {
    ValuesBlock<S, kBits, kSigned, kRows, kGroups, 1>(args, row, byte, shrink, out);
  }
}

template <typename S, int kBits, bool kSigned, int kGroups>
void ValuesOf(const CodeKernels::Values& args, int64_t query_rows, const float* shrink,
              float* out) {
  for (int64_t row = 0; row < query_rows; row += RowBlock(query_rows - row)) {
    const auto run = RowBlock(query_rows - row) == 4   ? ValuesRows<S, kBits, kSigned, 4, kGroups>
                     : RowBlock(query_rows - row) == 2 ? ValuesRows<S, kBits, kSigned, 2, kGroups>
                                                       : ValuesRows<S, kBits, kSigned, 1, kGroups>;
    run(args, row, shrink, out);
  }
}

template <typename S>
void Values(const CodeKernels::Values& args, int64_t query_rows, const float* shrink, float* out) {
  // Groups that share a run of kWidth bytes, at least 16 channels each.
  const int64_t channels = S::kWidth * 8 / args.bits;
  const bool whole = args.groups == 1 || args.group % channels == 0;
  const bool halves = args.group % (channels / 2) == 0;
  const auto pick = [&]() -> decltype(&ValuesOf<S, 8, true, 1>) {
    if (args.bits == 8) return args.is_signed ? ValuesOf<S, 8, true, 1> : ValuesOf<S, 8, false, 1>;
    if (args.bits == 4) {
      if constexpr (S::kWidth * 2 > 16) {
        if (!whole) return ValuesOf<S, 4, false, 2>;
      }
      return ValuesOf<S, 4, false, 1>;
    }
    if (whole) return ValuesOf<S, 2, false, 1>;
    if constexpr (S::kWidth * 4 > 32) {
      if (!halves) return ValuesOf<S, 2, false, 4>;
    }
    return ValuesOf<S, 2, false, 2>;
  };
  pick()(args, query_rows, shrink, out);
}

template <typename S>
constexpr CodeKernels kCodeKernels = {Prepare<S>, Scores<S>,  TransposeParameters<S>,
                                      Biases<S>,  Weights<S>, Values<S>};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_KERNELS_H_
