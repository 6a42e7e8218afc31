// KernelSet's two products of f32 tiles over a vector wrapper such as simd_avx512.h's.
#ifndef KVANT_KERNELS_CPU_ISA_PRODUCTS_H_
#define KVANT_KERNELS_CPU_ISA_PRODUCTS_H_

#include <cstdint>

#include "kvant/kernels/cpu/attention_args.h"

namespace kvant::cpu {
namespace {

// Vectors of a block of kRows rows: as many accumulators as there are registers for,
// and a power of two that divides a tile.
template <typename S, int kRows>
constexpr int VectorsFor(int most) {
  int vectors = 1;
  while (vectors * 2 <= most && vectors * 2 * kRows <= S::kAccumulators) vectors *= 2;
  return vectors;
}

template <int kRows>
struct Rows {
  static constexpr int value = kRows;
};

// Calls f(Rows<n>(), first row) for blocks of six rows, then for what is left.
template <typename F>
void ForBlocksOfRows(int64_t rows, F f) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) f(Rows<6>(), r);
  switch (rows - r) {
    case 5:
      return f(Rows<5>(), r);
    case 4:
      return f(Rows<4>(), r);
    case 3:
      return f(Rows<3>(), r);
    case 2:
      return f(Rows<2>(), r);
    case 1:
      return f(Rows<1>(), r);
    default:
      return;
  }
}

// Head sizes are summed in blocks: the error of a long f32 sum grows with its length.
constexpr int64_t kSumBlock = 64;

template <typename S, int kRows, int kVectors>
void QkBlock(const float* q, int64_t head_size, const float* k, float* scores) {
  for (int64_t begin = 0; begin < head_size; begin += kSumBlock) {
    const int64_t end = begin + kSumBlock < head_size ? begin + kSumBlock : head_size;
    typename S::Vector sum[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = S::Zero();
    }
    for (int64_t d = begin; d < end; ++d) {
      typename S::Vector right[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) right[v] = S::Load(k + d * kTokenTile + v * S::kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto left = S::Set1(q[r * head_size + d]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[r][v] = S::Fma(left, right[v], sum[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        float* to = scores + r * kTokenTile + v * S::kWidth;
        S::Store(to, begin == 0 ? sum[r][v] : S::Add(S::Load(to), sum[r][v]));
      }
    }
  }
}

template <typename S>
void Qk(const float* q, int64_t rows, int64_t head_size, const float* k, float* scores) {
  ForBlocksOfRows(rows, [=](auto block, int64_t r) {
    constexpr int kRows = decltype(block)::value;
    constexpr int kVectors = VectorsFor<S, kRows>(kTokenTile / S::kWidth);
    for (int64_t t = 0; t < kTokenTile; t += kVectors * S::kWidth) {
      QkBlock<S, kRows, kVectors>(q + r * head_size, head_size, k + t, scores + r * kTokenTile + t);
    }
  });
}

// kVectors vectors of channels; or, if not kWhole, one of which `last` channels exist.
template <typename S, int kRows, int kVectors, bool kWhole>
void PvBlock(const float* probs, int64_t tokens, const float* v, int64_t head_size,
             const float* shrink, float* out, int64_t last) {
  typename S::Vector sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) sum[r][i] = S::Zero();
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const float* from = v + t * head_size;
    typename S::Vector right[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      right[i] = kWhole ? S::Load(from + i * S::kWidth) : S::LoadSome(from + i * S::kWidth, last);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto left = S::Set1(probs[r * kTokenTile + t]);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) sum[r][i] = S::Fma(left, right[i], sum[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const auto factor = S::Set1(shrink[r]);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      float* to = out + r * head_size + i * S::kWidth;
      if (kWhole) {
        S::Store(to, S::Fma(S::Load(to), factor, sum[r][i]));
      } else {
        S::StoreSome(to, S::Fma(S::LoadSome(to, last), factor, sum[r][i]), last);
      }
    }
  }
}

template <typename S>
void Pv(const float* probs, int64_t rows, int64_t tokens, const float* v, int64_t head_size,
        const float* shrink, float* out) {
  ForBlocksOfRows(rows, [=](auto block, int64_t r) {
    constexpr int kRows = decltype(block)::value;
    constexpr int kVectors = VectorsFor<S, kRows>(8);
    const float* p = probs + r * kTokenTile;
    float* o = out + r * head_size;
    int64_t d = 0;
    for (; d + kVectors * S::kWidth <= head_size; d += kVectors * S::kWidth) {
      PvBlock<S, kRows, kVectors, true>(p, tokens, v + d, head_size, shrink + r, o + d, 0);
    }
    for (; d + S::kWidth <= head_size; d += S::kWidth) {
      PvBlock<S, kRows, 1, true>(p, tokens, v + d, head_size, shrink + r, o + d, 0);
    }
    if (d < head_size) {
      PvBlock<S, kRows, 1, false>(p, tokens, v + d, head_size, shrink + r, o + d, head_size - d);
    }
  });
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_PRODUCTS_H_
