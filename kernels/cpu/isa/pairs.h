// Products of tiles of bf16 pairs (PairKernels), for any instruction set that has these primitives:
//
//   PairLines, PairLine    as PairKernels has them
//   kVectors               vectors of columns that a block of rows takes at a time
//   Multiply               a block's sums, as pairs_avx512.h says
#ifndef KVANT_KERNELS_CPU_ISA_PAIRS_H_
#define KVANT_KERNELS_CPU_ISA_PAIRS_H_

#include <cstdint>

#include "kvant/kernels/cpu/isa/products.h"
#include "kvant/kernels/cpu/isa/simd.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {
namespace {

template <typename P>
void QkPairs(const uint32_t* q, int64_t rows, int64_t pairs, const uint32_t* k, float* scores) {
  constexpr int kColumns = P::kVectors * Simd::kWidth;
  ForBlocksOfRows(rows, [=](auto block, int64_t first) {
    constexpr int kRows = decltype(block)::value;
    for (int64_t t = 0; t < kHalfTile; t += kColumns) {
      Simd::Vector sum[kRows][P::kVectors];
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

// kCount vectors of channels; or, if not kWhole, one of which `last` channels exist.
template <typename P, int kRows, int kCount, bool kWhole>
void PvPairsBlock(const uint32_t* probs, int64_t pairs, const uint32_t* v, int64_t head_size,
                  int64_t last, const float* shrink, float* out) {
  Simd::Vector sum[kRows][kCount];
  P::template Multiply<kWhole>(probs, kHalfTile / 2, v, head_size, pairs, last, sum);
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

template <typename P>
void PvPairs(const float* probs, int64_t rows, int64_t tokens, const uint32_t* v, int64_t head_size,
             const float* shrink, float* out) {
  ForBlocksOfRows(rows, [=](auto block, int64_t first) {
    constexpr int kRows = decltype(block)::value;
    constexpr int kCount = P::kVectors, kWidth = Simd::kWidth;
    const int64_t pairs = (tokens + 1) / 2;
    constexpr int64_t kRowPairs = kHalfTile / 2;
    uint32_t p[kRows * kRowPairs];
    for (int r = 0; r < kRows; ++r) {
      P::PairLine(probs + (first + r) * kTokenTile, kHalfTile, p + r * kRowPairs);
    }
    float* o = out + first * head_size;
    const float* factors = shrink + first;
    int64_t d = 0;
    for (; d + kCount * kWidth <= head_size; d += kCount * kWidth) {
      PvPairsBlock<P, kRows, kCount, true>(p, pairs, v + d, head_size, 0, factors, o + d);
    }
    for (; d + kWidth <= head_size; d += kWidth) {
      PvPairsBlock<P, kRows, 1, true>(p, pairs, v + d, head_size, 0, factors, o + d);
    }
    if (d < head_size) {
      PvPairsBlock<P, kRows, 1, false>(p, pairs, v + d, head_size, head_size - d, factors, o + d);
    }
  });
}

template <typename P>
constexpr PairKernels kPairKernels = {P::PairLines, P::PairLine, QkPairs<P>, PvPairs<P>,
                                      nullptr,      256,         kHalfTile};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_PAIRS_H_
