// What codes_kernels.h and values_neon.h need of NEON with products of matrices of bytes (Armv8.6
// I8MM).
//
// A product of two rows of eight bytes with two others adds to four lanes. Two rows are codes, of
// two tokens for scores and of two channels for values; the others are the two planes of queries or
// weights. So lanes are low and high sums in turn, and an instruction does what two dot products
// do.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_NEON_I8MM_H_
#define KVANT_KERNELS_CPU_ISA_CODES_NEON_I8MM_H_

#include <arm_neon.h>

#include <cstdint>
#include <type_traits>

#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/isa/codes_neon.h"

namespace kvant::cpu {
namespace {

struct NeonMatrixCodes : NeonCodes {
  // Of each of kWidth tokens, two dwords.
  struct Codes {
    I first, second;
  };
  static constexpr int kStep = 2;
  static constexpr int kQueryDwords = 4;
  static I QueryAt(const int32_t* pairs) { return vld1q_s32(pairs); }
  // Keeps both planes of the i-th dword of queries.
  static I OwnQueries(int64_t i) {
    return vreinterpretq_s32_u64(vdupq_n_u64(i == 0 ? 0xffffffffu : ~uint64_t{0xffffffffu}));
  }
  static Codes CodesAt(const int32_t* transposed, int64_t c, int64_t token) {
    const int32_t* const at = transposed + c * kTokenTile + token * kStep;
    return {vld1q_s32(at), vld1q_s32(at + 4)};
  }
  static I ColumnAt(const int32_t* transposed, int64_t c, int64_t token) {
    const Codes codes = CodesAt(transposed, c / kStep * kStep, token);
    return c % kStep == 0 ? vuzp1q_s32(codes.first, codes.second)
                          : vuzp2q_s32(codes.first, codes.second);
  }
  template <int kBits, int k>
  static Codes Field(Codes codes) {
    return {ByteField<kBits, k>(codes.first), ByteField<kBits, k>(codes.second)};
  }
  // Chains, two and two, hold two tokens or channels each.
  static I Start(int i, int32_t start) {
    return i >= 2 ? ZeroDwords() : vreinterpretq_s32_u64(vdupq_n_u64(static_cast<uint32_t>(start)));
  }
  template <int k, int kChains>
  static HWY_INLINE void AddProduct(I (&chains)[kChains], Codes codes, I query) {
    I& first = chains[2 * k % kChains];
    I& second = chains[2 * k % kChains + 1];
    first = MatrixDot(first, codes.first, query);
    second = MatrixDot(second, codes.second, query);
  }
  template <int kChains>
  static HWY_INLINE I SumOfChains(const I (&chains)[kChains]) {
    I first = chains[0], second = chains[1];
#pragma GCC unroll 4
    for (int i = 2; i < kChains; i += 2) {
      first = AddDwords(first, chains[i]);
      second = AddDwords(second, chains[i + 1]);
    }
    return Joined(vuzp1q_s32(first, second), vuzp2q_s32(first, second));
  }

  // Up to so many of each of 4 rows, row min(i, last), as pairs of dword columns, ^ flips.
  static void Columns(const uint8_t* p, int64_t stride, int64_t last, int64_t bytes, I flips,
                      int32_t* out) {
    I rows[kWidth];
    LoadRows(p, stride, last, bytes, rows);
#pragma GCC unroll 2
    for (int i = 0; i < kWidth; i += 2) {
      const int64x2_t a = vreinterpretq_s64_s32(Xor(rows[i], flips)),
                      b = vreinterpretq_s64_s32(Xor(rows[i + 1], flips));
      int32_t* const to = out + i * kStep;
      vst1q_s32(to, vreinterpretq_s32_s64(vzip1q_s64(a, b)));
      vst1q_s32(to + kStep * kTokenTile, vreinterpretq_s32_s64(vzip2q_s64(a, b)));
    }
  }
  template <int kPerDword>
  static void PairHalves(const int16_t* from, int32_t* to) {
    PairPlanes<8, kPerDword / 4>(from, to);
  }

  // One row's products of 8 bits take fewer instructions, but to transpose eight tokens takes as
  // many more.
  template <int kBits, int kRows>
  using OfValues = std::conditional_t<kBits == 8 && kRows == 1, NeonCodes, NeonMatrixCodes>;
  static constexpr int kTokens = 8;
  static void StoreTransposed(const I (&quads)[2][4], int32_t* out) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      vst1q_s32(out + 8 * j, vzip1q_s32(quads[0][j], quads[1][j]));
      vst1q_s32(out + 8 * j + 4, vzip2q_s32(quads[0][j], quads[1][j]));
    }
  }
  // Of eight tokens both planes, then of the others.
  static int8x16x2_t WeightsOf(const int16_t* from) {
    const int8x16x2_t planes = PlanesOf(from);
    const int64x2_t low = vreinterpretq_s64_s8(planes.val[0]),
                    high = vreinterpretq_s64_s8(planes.val[1]);
    return {
        {vreinterpretq_s8_s64(vzip1q_s64(low, high)), vreinterpretq_s8_s64(vzip2q_s64(low, high))}};
  }
  template <int step>
  static constexpr int64_t TransposedAt(int64_t v) {
    return step / 2 * 32 + v * 8 + step % 2 * 4;
  }
  template <int step>
  static HWY_INLINE void AddTokens(I (&sums)[2], I codes, const int8x16x2_t& weights) {
    I& sum = sums[step % 2];
    sum = MatrixDot(sum, codes, vreinterpretq_s32_s8(weights.val[step / 2]));
  }

 private:
  static HWY_INLINE I MatrixDot(I sum, I a, I b) {
    // Not the intrinsic, for which GCC 12 copies sums.
    asm("smmla %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b));
    return sum;
  }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_NEON_I8MM_H_
