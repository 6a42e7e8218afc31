// What AVX-512 BF16 adds to the AVX-512 set: products of bf16 pairs.
#include "kvant/kernels/cpu/isa/products.h"
#include "kvant/kernels/cpu/isa/simd.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {

const KernelSet& avx512_kernels();

namespace {

constexpr int kWidth = Simd::kWidth;

__m512i Bits(__m512bh v) { return reinterpret_cast<__m512i>(v); }
__m512bh Pairs(const uint32_t* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
__m512bh SomePairs(const uint32_t* p, __mmask16 mask) {
  return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi32(mask, p));
}
__m512bh OnePair(const uint32_t* p) {
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(*p)));
}

// Words of a pair of lines, [a's 16 | b's 16], to a0 b0 a1 b1 ...
__m512i Interleave(__m512i words) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, words);
}

void PairLines(const float* a, const float* b, int64_t n, uint32_t* out) {
  for (int64_t i = 0; i < n; i += kWidth) {
    const __mmask16 mask = n - i < kWidth ? (1u << (n - i)) - 1 : 0xffff;
    const __m512 low = _mm512_maskz_loadu_ps(mask, a + i);
    const __m512 high = b == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, b + i);
    _mm512_mask_storeu_epi32(out + i, mask, Interleave(Bits(_mm512_cvtne2ps_pbh(high, low))));
  }
}

// Pairs of a line's own neighbours.
void PairLine(const float* line, int64_t n, uint32_t* out) {
  for (int64_t i = 0; i < n; i += 2 * kWidth) {
    const int64_t rest = n - i < 2 * kWidth ? n - i : 2 * kWidth;
    const uint32_t some = static_cast<uint32_t>((uint64_t{1} << rest) - 1);
    const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(some), line + i);
    const __m512 high =
        _mm512_maskz_loadu_ps(static_cast<__mmask16>(some >> kWidth), line + i + kWidth);
    const __mmask16 pairs = static_cast<__mmask16>((1u << ((rest + 1) / 2)) - 1);
    _mm512_mask_storeu_epi32(out + i / 2, pairs, Bits(_mm512_cvtne2ps_pbh(high, low)));
  }
}

// sum[r][v] over pairs i of a[r * a_row + i] . b[i * b_row + v], in registers.
template <int kRows, int kVectors, bool kWhole>
inline void Accumulate(const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row,
                       int64_t n, __mmask16 mask, __m512 (&sum)[kRows][kVectors]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_setzero_ps();
  }
  for (int64_t i = 0; i < n; ++i) {
    __m512bh right[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t* from = b + i * b_row + v * kWidth;
      right[v] = kWhole ? Pairs(from) : SomePairs(from, mask);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512bh left = OnePair(a + r * a_row + i);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], left, right[v]);
    }
  }
}

constexpr int kVectors = kTokenTile / kWidth;

void QkPairs(const uint32_t* q, int64_t rows, int64_t pairs, const uint32_t* k, float* scores) {
  ForBlocksOfRows(rows, [=](auto block, int64_t first) {
    constexpr int kRows = decltype(block)::value;
    __m512 sum[kRows][kVectors];
    Accumulate<kRows, kVectors, true>(q + first * pairs, pairs, k, kTokenTile, pairs, 0, sum);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        _mm512_storeu_ps(scores + (first + r) * kTokenTile + v * kWidth, sum[r][v]);
      }
    }
  });
}

template <int kRows, int kCount, bool kWhole>
void PvPairsBlock(const uint32_t* probs, int64_t pairs, const uint32_t* v, int64_t head_size,
                  int64_t last, const float* shrink, float* out) {
  const __mmask16 mask = kWhole ? 0xffff : (1u << last) - 1;
  __m512 sum[kRows][kCount];
  Accumulate<kRows, kCount, kWhole>(probs, kTokenTile / 2, v, head_size, pairs, mask, sum);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const __m512 factor = _mm512_set1_ps(shrink[r]);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      float* to = out + r * head_size + i * kWidth;
      const __m512 before = _mm512_maskz_loadu_ps(mask, to);
      _mm512_mask_storeu_ps(to, mask, _mm512_fmadd_ps(before, factor, sum[r][i]));
    }
  }
}

void PvPairs(const float* probs, int64_t rows, int64_t tokens, const uint32_t* v, int64_t head_size,
             const float* shrink, float* out) {
  ForBlocksOfRows(rows, [=](auto block, int64_t first) {
    constexpr int kRows = decltype(block)::value;
    const int64_t pairs = (tokens + 1) / 2;
    uint32_t p[kRows * kTokenTile / 2];
    for (int r = 0; r < kRows; ++r) {
      PairLine(probs + (first + r) * kTokenTile, kTokenTile, p + r * kTokenTile / 2);
    }
    float* o = out + first * head_size;
    const float* factors = shrink + first;
    int64_t d = 0;
    for (; d + kVectors * kWidth <= head_size; d += kVectors * kWidth) {
      PvPairsBlock<kRows, kVectors, true>(p, pairs, v + d, head_size, 0, factors, o + d);
    }
    for (; d < head_size; d += kWidth) {
      if (head_size - d >= kWidth) {
        PvPairsBlock<kRows, 1, true>(p, pairs, v + d, head_size, 0, factors, o + d);
      } else {
        PvPairsBlock<kRows, 1, false>(p, pairs, v + d, head_size, head_size - d, factors, o + d);
      }
    }
  });
}

constexpr PairKernels kPairKernels = {PairLines, PairLine, QkPairs, PvPairs};

}  // namespace

const KernelSet& avx512_bf16_kernels() {
  static const KernelSet set = [] {
    KernelSet all = avx512_kernels();
    all.name = "avx512_bf16";
    all.pairs = &kPairKernels;
    return all;
  }();
  return set;
}

}  // namespace kvant::cpu
