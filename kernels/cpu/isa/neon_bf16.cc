// What products of matrices of bf16 (Armv8.6 BF16) add to NEON with those of bytes: products of
// bf16 pairs.
#include <arm_neon.h>

#include <type_traits>

#include "kvant/kernels/cpu/isa/pairs.h"
#include "kvant/kernels/cpu/isa/simd.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {

const KernelSet& neon_i8mm_kernels();

namespace {

// A product of matrices takes four numbers of each of two rows of a and of two columns of b: two
// pairs, of lines that follow one another, whose dwords are zipped for that.
//
//   b   line i      c0 c1 c2 c3       zip    c0 of i | c0 of i + 1 | c1 of i | c1 of i + 1
//       line i + 1  c0 c1 c2 c3     ------>  c2 ..
//   a   row r       i | i + 1                four sums: r c0 | r c1 | r + 1 c0 | r + 1 c1
//       row r + 1   i | i + 1
struct NeonPairs {
  static constexpr int kWidth = Simd::kWidth;
  static constexpr int kVectors = 4;
  static constexpr int64_t kStoredRowsOfCodes = 24;

  static void Zip(const uint16_t* a, const uint16_t* b, int64_t n, uint32_t* out) {
    int64_t i = 0;
    for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
      const uint16x8_t one = vld1q_u16(a + i);
      const uint16x8_t other = b == nullptr ? vdupq_n_u16(0) : vld1q_u16(b + i);
      vst1q_u32(out + i, vreinterpretq_u32_u16(vzip1q_u16(one, other)));
      vst1q_u32(out + i + kWidth, vreinterpretq_u32_u16(vzip2q_u16(one, other)));
    }
    for (; i < n; ++i) out[i] = a[i] | (b == nullptr ? 0u : uint32_t{b[i]} << 16);
  }

  static HWY_INLINE void StoreRounded(uint16_t* p, Simd::Vector v, int64_t n) {
    if (n >= kWidth) return vst1_u16(p, Words(v.raw));
    uint16_t some[kWidth];
    vst1_u16(some, Words(v.raw));
    for (int64_t i = 0; i < n; ++i) p[i] = some[i];
  }

  static void PairLine(const float* line, int64_t n, uint32_t* out) {
    PairEach(n, out, [line](int64_t i) { return vld1q_f32(line + i); });
  }

  static void PairRest(const float* line, int64_t n, uint32_t* out) {
    PairEach(n, out, [line](int64_t i) { return Rest(vld1q_f32(line + i)); });
  }

  static HWY_INLINE Simd::Vector Dot(Simd::Vector a, Simd::Vector b, Simd::Vector sum) {
    return Simd::Vector{
        vbfdotq_f32(sum.raw, vreinterpretq_bf16_f32(a.raw), vreinterpretq_bf16_f32(b.raw))};
  }

  template <bool kWhole, int kRows, int kCount>
  static HWY_INLINE void Multiply(const uint32_t* a, int64_t a_row, const uint32_t* b,
                                  int64_t b_row, int64_t n, int64_t last,
                                  Simd::Vector (&sum)[kRows][kCount]) {
    constexpr int kTwos = (kRows + 1) / 2;
    float32x4_t acc[kTwos][kCount][2];
#pragma GCC unroll 8
    for (int r = 0; r < kTwos; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kCount; ++v) {
        const int next = 2 * r + 1 < kRows ? 2 * r + 1 : 2 * r;
        acc[r][v][0] = ZipTwos<false>(sum[2 * r][v].raw, sum[next][v].raw);
        acc[r][v][1] = ZipTwos<true>(sum[2 * r][v].raw, sum[next][v].raw);
      }
    }
    const auto columns = [&](const uint32_t* line, int v) HWY_ATTR {
      return kWhole ? vld1q_u32(line + v * kWidth) : DwordsAt(line, last);
    };
    // Lines i and i + 1, of which the latter may be missing: zeros on both sides.
    const auto add = [&](int64_t i, auto both) __attribute__((always_inline)) {
      constexpr bool kBoth = decltype(both)::value;
      uint32x4_t left[kTwos];
#pragma GCC unroll 8
      for (int r = 0; r < kTwos; ++r) {
        const uint32_t* const first = a + 2 * r * a_row + i;
        const uint32_t* const second = 2 * r + 1 < kRows ? first + a_row : first;
        left[r] = kBoth ? vcombine_u32(vld1_u32(first), vld1_u32(second))
                        : vcombine_u32(vset_lane_u32(*first, vdup_n_u32(0), 0),
                                       vset_lane_u32(*second, vdup_n_u32(0), 0));
      }
      const uint32_t* const line = b + i * b_row;
#pragma GCC unroll 8
      for (int v = 0; v < kCount; ++v) {
        const uint32x4_t one = columns(line, v);
        const uint32x4_t next = kBoth ? columns(line + b_row, v) : vdupq_n_u32(0);
        const uint32x4_t low = vzip1q_u32(one, next), high = vzip2q_u32(one, next);
#pragma GCC unroll 8
        for (int r = 0; r < kTwos; ++r) {
          AddProduct(acc[r][v][0], left[r], low);
          AddProduct(acc[r][v][1], left[r], high);
        }
      }
    };
    int64_t i = 0;
    for (; i + 2 <= n; i += 2) add(i, std::true_type());
    if (i < n) add(i, std::false_type());
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kCount; ++v) {
        const float32x4_t low = acc[r / 2][v][0], high = acc[r / 2][v][1];
        sum[r][v].raw = r % 2 == 0 ? ZipTwos<false>(low, high) : ZipTwos<true>(low, high);
      }
    }
  }

 private:
  static HWY_INLINE void AddProduct(float32x4_t& sum, uint32x4_t rows, uint32x4_t columns) {
    sum = vbfmmlaq_f32(sum, vreinterpretq_bf16_u32(rows), vreinterpretq_bf16_u32(columns));
  }
  // The lower, or upper, two of a, then those of b.
  template <bool kUpper>
  static HWY_INLINE float32x4_t ZipTwos(float32x4_t a, float32x4_t b) {
    const float64x2_t first = vreinterpretq_f64_f32(a), second = vreinterpretq_f64_f32(b);
    return vreinterpretq_f32_f64(kUpper ? vzip2q_f64(first, second) : vzip1q_f64(first, second));
  }
  static uint32x4_t DwordsAt(const uint32_t* p, int64_t n) {
    uint32_t some[kWidth] = {};
    for (int64_t i = 0; i < n; ++i) some[i] = p[i];
    return vld1q_u32(some);
  }
  static uint16x4_t Words(float32x4_t x) { return vreinterpret_u16_bf16(vcvt_bf16_f32(x)); }
  // What is lost of x in bf16.
  static float32x4_t Rest(float32x4_t x) {
    return vsubq_f32(x, vreinterpretq_f32_u32(vshll_n_u16(Words(x), 16)));
  }
  // at(i): numbers i to i + kWidth - 1 of n, whole halves of a tile.
  template <typename At>
  static HWY_INLINE void PairEach(int64_t n, uint32_t* out, At at) {
    for (int64_t i = 0; i < n; i += 2 * kWidth) {
      const uint16x8_t words = vcombine_u16(Words(at(i)), Words(at(i + kWidth)));
      vst1q_u32(out + i / 2, vreinterpretq_u32_u16(words));
    }
  }
};

}  // namespace

const KernelSet& neon_bf16_kernels() {
  static const KernelSet set = [] {
    KernelSet all = neon_i8mm_kernels();
    all.name = "neon_bf16";
    all.pairs = &kPairKernels<NeonPairs>;
    return all;
  }();
  return set;
}

}  // namespace kvant::cpu
