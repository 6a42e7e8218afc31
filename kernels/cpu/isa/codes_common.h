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

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_COMMON_H_
