// What the templates for products on codes share. They are written over the primitives of
// codes_avx512.h; like all of isa/*.h, they have internal linkage and call nothing of std::.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_COMMON_H_
#define KVANT_KERNELS_CPU_ISA_CODES_COMMON_H_

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

template <int k>
struct Constant {
  static constexpr int value = k;
};
// Calls f(Constant<0>()) to f(Constant<n - 1>()).
template <int n, int k = 0, typename F>
inline __attribute__((always_inline)) void ForEachOf(F f) {
  if constexpr (k < n) {
    f(Constant<k>());
    ForEachOf<n, k + 1>(f);
  }
}

// Calls f(Constant<rows>(), first row) for blocks of rows.
template <typename F>
void ForRowBlocks(int64_t rows, F f) {
  for (int64_t row = 0; row < rows; row += RowBlock(rows - row)) {
    switch (RowBlock(rows - row)) {
      case 4:
        f(Constant<4>(), row);
        break;
      case 3:
        f(Constant<3>(), row);
        break;
      case 2:
        f(Constant<2>(), row);
        break;
      default:
        f(Constant<1>(), row);
    }
  }
}

// The k-th lowest field of kBits in each 16-bit half.
template <typename S, int kBits, int k>
inline __attribute__((always_inline)) typename S::I Field(typename S::I word) {
  const typename S::I mask = S::Dword(((1 << kBits) - 1) * 0x10001);
  if constexpr (k == 0) return S::And(word, mask);
  const typename S::I shifted = S::template ShiftHalves<k * kBits>(word);
  return (k + 1) * kBits == 16 ? shifted : S::And(shifted, mask);
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_COMMON_H_
