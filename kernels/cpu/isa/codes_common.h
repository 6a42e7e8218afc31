// What the templates for products on codes share. They are written over the primitives of
// codes_avx512.h; like all of isa/*.h, they have internal linkage and call nothing of std::.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_COMMON_H_
#define KVANT_KERNELS_CPU_ISA_CODES_COMMON_H_

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

// Rows of codes are prefetched a kilobyte or two at a time, from two streams in turn.
template <typename S>
inline constexpr int kCodeStreamBits = S::kStreamBits > 0 ? 1 : 0;

// Prefetches the line at `at`, into the second-level cache, and moves on to the next. The compiler
// leaves the request where it is: several together leave memory idle before and after them.
inline __attribute__((always_inline)) void PrefetchLine(const uint8_t*& at) {
  asm volatile("" : "+r"(at));
  __builtin_prefetch(at, 0, 2);
  at += 64;
}

// Numbers between -1/2 and 1/2, added before rounding, so that what is alike is not all rounded to
// one side: fractions of multiples of the golden ratio, which are spread evenly in any run of
// channels or tokens and at strides that are powers of two. Each tile, and each kTokenTile
// channels, has the same. They stay so far from a half that whole numbers up to S::kMost, whose
// sums f32 rounds, stay what they are.
struct Dither {
  constexpr Dither() {
    constexpr double kStep = 0.6180339887498949;
    double x = 0.5 * kStep;
    for (float& each : at) {
      each = static_cast<float>(0.98 * (x - 0.5));
      x += x + kStep < 1 ? kStep : kStep - 1;
    }
  }
  constexpr bool Within(float most) const {
    for (const float x : at) {
      if (x > most || x < -most) return false;
    }
    return true;
  }
  alignas(64) float at[kTokenTile] = {};
};
constexpr Dither kDither;
static_assert(kDither.Within(0.5f - 0x1p-8f));

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

// Lane j of planes[k] is channel j * kPlanes + k; lane j of out[k] is channel k * kWidth + j.
template <typename S, int kPlanes>
inline __attribute__((always_inline)) void ZipPlanes(const typename S::Vector (&planes)[kPlanes],
                                                     typename S::Vector (&out)[kPlanes]) {
  static_assert(kPlanes <= 4);
  if constexpr (kPlanes == 1) {
    out[0] = planes[0];
  } else if constexpr (kPlanes == 2) {
    S::Zip(planes[0], planes[1], &out[0], &out[1]);
  } else {
    typename S::Vector even[2], odd[2];
    S::Zip(planes[0], planes[2], &even[0], &even[1]);
    S::Zip(planes[1], planes[3], &odd[0], &odd[1]);
    S::Zip(even[0], odd[0], &out[0], &out[1]);
    S::Zip(even[1], odd[1], &out[2], &out[3]);
  }
}

// What sets have in common whose products for scores take a dword of codes of each of kWidth
// tokens, a column, and the same dword of queries for all.
template <typename Own>
struct DwordColumns {
  // Columns that are multiplied in one step; transposed, they lie side by side for each token.
  static constexpr int kStep = 1;
  // Dwords of queries that a product takes, and these.
  static constexpr int kQueryDwords = 1;
  static auto QueryAt(const int32_t* pairs) { return Own::Dword(*pairs); }
  // Whether there is a LoadSplit for parameters of kBits in kGroups.
  template <int kBits, int kGroups>
  static constexpr bool kSplitsStored = false;
  // Transposed codes from `token` on: dwords of column c.
  static auto ColumnAt(const int32_t* transposed, int64_t c, int64_t token) {
    return Own::LoadDwords(transposed + c * kTokenTile + token);
  }
  // The same of a step, where c is a multiple of kStep.
  static auto CodesAt(const int32_t* transposed, int64_t c, int64_t token) {
    return ColumnAt(transposed, c, token);
  }
  // What the i-th of the chains of sums of products begins at, so that all together do at `start`.
  static auto Start(int i, int32_t start) { return i == 0 ? Own::Dword(start) : Own::ZeroDwords(); }
  // Adds the k-th product of a step.
  template <int k, int kChains, typename I>
  static inline __attribute__((always_inline)) void AddProduct(I (&chains)[kChains], I codes,
                                                               I query) {
    I& sum = chains[k % kChains];
    sum = Own::Dot(sum, codes, query);
  }
};

// What products of s16 with s16 have in common: a dword of codes holds a pair in the halves of each
// of its fields.
template <typename Own>
struct PairedHalves : DwordColumns<Own> {
  // The largest magnitude of queries and weights, so that each is two bytes, 256 * high + low, for
  // products of tokens (codes_tokens.h).
  static constexpr float kMost = 127 * 256 + 127;
  // Codes are multiplied as they are stored, with signs flipped.
  static constexpr uint8_t kByteFlip = 0;
  // Sums of a product that count differently.
  static constexpr int kPlanes = 1;
  // Fields of a dword of codes, each of which is one operand.
  template <int kBits>
  static constexpr int kFields = 16 / kBits;

  // The operand of the k-th dword of the 16 / kBits that a dword of codes has of queries.
  template <int kBits, int k, typename I>
  static inline __attribute__((always_inline)) I Field(I word) {
    const I mask = Own::Dword(((1 << kBits) - 1) * 0x10001);
    if constexpr (k == 0) return Own::And(word, mask);
    const I shifted = Own::template ShiftHalves<k * kBits>(word);
    return (k + 1) * kBits == 16 ? shifted : Own::And(shifted, mask);
  }
  // The same less the middle of all codes of kBits.
  template <int kBits, int k, typename I>
  static inline __attribute__((always_inline)) I Centred(I word) {
    return Own::SubHalves(Field<kBits, k>(word), Own::Dword((1 << (kBits - 1)) * 0x10001));
  }
  // The k-th field of each half, codes of kBits of a pair of tokens. Narrow ones become unsigned
  // where `flips` has sign bits, and stay where they are in their byte, kFieldShift bits up: 128
  // tokens fit s32 even so.
  template <int kBits, int k>
  static constexpr int kFieldShift = k* kBits % 8;
  template <int kBits, bool kSigned, int k, typename I>
  static inline __attribute__((always_inline)) I ValueField(I units, I flips) {
    constexpr bool kHigh = k * kBits >= 8;
    if constexpr (kBits == 8 && kSigned) {
      return Own::template SignedBytes<kHigh>(units);
    } else {
      const I byte = kHigh ? Own::template ShiftHalves<8>(units) : units;
      if constexpr (kBits == 8) return kHigh ? byte : Own::And(byte, Own::Dword(0x00ff00ff));
      constexpr int kMask = ((1 << kBits) - 1) << kFieldShift<kBits, k>;
      return Own::XorAnd(byte, flips, Own::Dword(kMask * 0x10001));
    }
  }
  static auto Ones() { return Own::Dword(0x10001); }
  // The sum that sums of products by chains are.
  template <int kChains, typename I>
  static inline __attribute__((always_inline)) I SumOfChains(const I (&chains)[kChains]) {
    I sum = chains[0];
    for (int i = 1; i < kChains; ++i) sum = Own::AddDwords(sum, chains[i]);
    return sum;
  }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_COMMON_H_
