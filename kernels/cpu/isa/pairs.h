// Products of tiles of bf16 pairs (PairKernels), for any instruction set that has these primitives:
//
//   Zip                    as PairKernels has it
//   StoreRounded           the first n of a vector in bf16
//   PairLine               out[i] = pair(line[2i], line[2i + 1]) for i < n / 2, of floats, n even
//   PairRest               PairLine of what it loses of each number
//   kVectors               vectors of columns that a block of rows takes at a time
//   kStoredRowsOfCodes     as PairKernels has it
//   Multiply               a block's sums, as pairs_avx512.h says
//   Dot                    sum[i] + a[i] . b[i], of vectors of pairs
#ifndef KVANT_KERNELS_CPU_ISA_PAIRS_H_
#define KVANT_KERNELS_CPU_ISA_PAIRS_H_

#include <cstdint>

#include "kvant/kernels/cpu/isa/products.h"
#include "kvant/kernels/cpu/isa/simd.h"
#include "kvant/kernels/cpu/isa/tiles.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {
namespace {

// What is stored is rounded to bf16.
template <typename P>
struct RoundedLanes : Simd {
  static HWY_INLINE void Store(uint16_t* p, Vector v) { P::StoreRounded(p, v, kWidth); }
  static HWY_INLINE void StoreSome(uint16_t* p, Vector v, int64_t n) { P::StoreRounded(p, v, n); }
};

template <typename P>
void LoadRounded(DataType type, const void* data, int64_t index, int64_t n, const Scaling& how,
                 uint16_t* out) {
  using S = RoundedLanes<P>;
  if (how.scales != nullptr) return LoadScaledFromByte<S>(type, data, index, n, how, out);
  if (how.codebook != nullptr) {
    return WithEntries<S>(how.codebook, type,
                          [=](auto entries) { LoadAs<S>(entries, data, index, n, out); });
  }
  if (type == kBF16) {
    __builtin_memcpy(out, static_cast<const uint8_t*>(data) + index * 2, n * 2);
    return;
  }
  WithElements<S>(type, [=](auto stored) { LoadAs<S>(stored, data, index, n, out); });
}

template <int kRows, int kCount>
HWY_INLINE void SetZero(Simd::Vector (&sum)[kRows][kCount]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) sum[r][i] = Simd::Zero();
  }
}

template <typename P>
void QkPairs(const uint32_t* q, int64_t rows, int64_t pairs, const uint32_t* k, float* scores) {
  constexpr int kColumns = P::kVectors * Simd::kWidth;
  ForBlocksOfRows(rows, [=](auto block, int64_t first) {
    constexpr int kRows = decltype(block)::value;
    for (int64_t t = 0; t < kHalfTile; t += kColumns) {
      Simd::Vector sum[kRows][P::kVectors];
      SetZero(sum);
      P::template Multiply<true>(q + first * pairs, pairs, k + t, kHalfTile, pairs, 0, sum);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < P::kVectors; ++v) {
          Simd::Store(scores + (first + r) * kTokenTile + t + v * Simd::kWidth, sum[r][v]);
        }
      }
    }
  });
}

// kParts: of the rows' probabilities, one behind the other: rounded, and what that loses. kCount
// vectors of channels; or, if not kWhole, one of which `last` channels exist.
template <typename P, int kParts, int kRows, int kCount, bool kWhole>
void PvPairsBlock(const uint32_t* probs, int64_t pairs, const uint32_t* v, int64_t head_size,
                  int64_t last, const float* shrink, float* out) {
  constexpr int64_t kRowPairs = kTokenTile / 2;
  Simd::Vector sum[kRows][kCount];
  SetZero(sum);
#pragma GCC unroll 2
  for (int part = 0; part < kParts; ++part) {
    P::template Multiply<kWhole>(probs + part * kRows * kRowPairs, kRowPairs, v, head_size, pairs,
                                 last, sum);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const auto factor = Simd::Set1(shrink[r]);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      float* to = out + r * head_size + i * Simd::kWidth;
      if (kWhole) {
        Simd::Store(to, Simd::Fma(Simd::Load(to), factor, sum[r][i]));
      } else {
        Simd::StoreSome(to, Simd::Fma(Simd::LoadSome(to, last), factor, sum[r][i]), last);
      }
    }
  }
}

// kFirst: with probabilities rounded to bf16. kRest: adds the product of what that loses of them.
template <typename P, bool kFirst, bool kRest>
void PvPairs(const float* probs, int64_t rows, int64_t tokens, const uint32_t* v, int64_t head_size,
             const float* shrink, float* out) {
  ForBlocksOfRows(rows, [=](auto block, int64_t first) {
    constexpr int kRows = decltype(block)::value;
    constexpr int kParts = kFirst && kRest ? 2 : 1;
    constexpr int kCount = P::kVectors, kWidth = Simd::kWidth;
    constexpr int64_t kRowPairs = kTokenTile / 2;
    const int64_t pairs = (tokens + 1) / 2;
    uint32_t p[kParts * kRows * kRowPairs];
    float factors[kRows];
    for (int r = 0; r < kRows; ++r) {
      const float* const row = probs + (first + r) * kTokenTile;
      if (kFirst) P::PairLine(row, WholeHalves(tokens), p + r * kRowPairs);
      if (kRest) P::PairRest(row, WholeHalves(tokens), p + ((kParts - 1) * kRows + r) * kRowPairs);
      factors[r] = kFirst ? shrink[first + r] : 1.f;
    }
    float* const o = out + first * head_size;
    int64_t d = 0;
    for (; d + kCount * kWidth <= head_size; d += kCount * kWidth) {
      PvPairsBlock<P, kParts, kRows, kCount, true>(p, pairs, v + d, head_size, 0, factors, o + d);
    }
    for (; d + kWidth <= head_size; d += kWidth) {
      PvPairsBlock<P, kParts, kRows, 1, true>(p, pairs, v + d, head_size, 0, factors, o + d);
    }
    if (d < head_size) {
      PvPairsBlock<P, kParts, kRows, 1, false>(p, pairs, v + d, head_size, head_size - d, factors,
                                               o + d);
    }
  });
}

inline constexpr uint32_t kExponent = 0x7f80;  // of a number of bf16; all set: it is not finite

inline bool IsFinite(const uint32_t* pairs, int64_t n) {
  uint32_t wrong = 0;
  for (int64_t i = 0; i < n; ++i) {
    wrong |= (pairs[i] & kExponent) == kExponent ? 1u : 0u;
    wrong |= (pairs[i] >> 16 & kExponent) == kExponent ? 1u : 0u;
  }
  return wrong == 0;
}

inline void ClearNonFinite(uint32_t* pairs, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if ((pairs[i] & kExponent) == kExponent) pairs[i] &= 0xffff0000;
    if ((pairs[i] >> 16 & kExponent) == kExponent) pairs[i] &= 0xffff;
  }
}

using PvOfPairs = void(const float* probs, int64_t rows, int64_t tokens, const uint32_t* v,
                       int64_t head_size, const float* shrink, float* out);

// pv_split of products that take probabilities rounded (kFirst), what that loses (kRest), or both.
template <PvOfPairs kFirst, PvOfPairs kRest, PvOfPairs kBoth>
void PvSplit(const float* probs, int64_t rows, int64_t tokens, uint32_t* v, int64_t head_size,
             const float* shrink, float* out) {
  const int64_t n = (tokens + 1) / 2 * head_size;
  if (IsFinite(v, n)) return kBoth(probs, rows, tokens, v, head_size, shrink, out);
  // Infinity x 0, which is what a probability of 1 loses, would be NaN.
  kFirst(probs, rows, tokens, v, head_size, shrink, out);
  ClearNonFinite(v, n);
  kRest(probs, rows, tokens, v, head_size, shrink, out);
}

// A pair is a lane, whatever its bits mean as f32.
template <typename P>
struct PairLanes : Simd {
  static HWY_INLINE Vector Fma(Vector a, Vector b, Vector sum) { return P::Dot(a, b, sum); }
};

template <typename P>
void QkStoredPairs(const TokenRows& tokens, const uint32_t* q, int64_t rows, int64_t pairs,
                   float* scores) {
  QkStored<PairLanes<P>>(kF32, tokens, reinterpret_cast<const float*>(q), rows, pairs, scores);
}

template <typename P>
constexpr PairKernels kPairKernels = {
    .load = LoadRounded<P>,
    .zip = P::Zip,
    .qk = QkPairs<P>,
    .pv = PvPairs<P, true, false>,
    .pv_split = PvSplit<PvPairs<P, true, false>, PvPairs<P, false, true>, PvPairs<P, true, true>>,
    .qk_stored = QkStoredPairs<P>,
    .most_rows = 256,
    .stored_rows_of_codes = P::kStoredRowsOfCodes};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_PAIRS_H_
