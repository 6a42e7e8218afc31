#include "kvant/kernels/device/simt_matrix.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "kvant/kernels/device/fragment.h"

namespace kvant::simt {
namespace {

using device::Fragment;
using device::FragmentLayout;
using device::LayoutOf;

// Per lane, register and half in turn: the element's index in a row-major matrix.
template <Fragment kFragment>
constexpr auto MakeIndices() {
  constexpr FragmentLayout kLayout = LayoutOf(kFragment);
  constexpr int kPerLane = kLayout.registers * kLayout.halves;
  std::array<std::array<uint16_t, kPerLane>, kLanes> indices{};
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < kPerLane; ++i) {
      const device::Element e = kLayout.At(lane, i / kLayout.halves, i % kLayout.halves);
      indices[lane][i] = static_cast<uint16_t>(e.row * kLayout.columns + e.column);
    }
  }
  return indices;
}
template <Fragment kFragment>
constexpr auto kIndices = MakeIndices<kFragment>();

// Exact, subnormals included. Scaling by 2^112 moves the exponent's bias from 15 to 127.
inline float FromF16(uint32_t bits) {
  const float magnitude = std::bit_cast<float>((bits & 0x7fffu) << 13) * 0x1p112f;
  const uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | special |
                              (bits & 0x8000u) << 16);
}
inline float FromBF16(uint32_t bits) { return std::bit_cast<float>(bits << 16); }
inline float FromTF32(uint32_t bits) { return std::bit_cast<float>(bits & 0xffffe000u); }

struct F16 {
  static constexpr int kHalves = 2;
  static float ToF32(uint32_t bits) { return FromF16(bits); }
};
struct BF16 {
  static constexpr int kHalves = 2;
  static float ToF32(uint32_t bits) { return FromBF16(bits); }
};
struct TF32 {
  static constexpr int kHalves = 1;
  static float ToF32(uint32_t bits) { return FromTF32(bits); }
};

template <class Type, Fragment kFragment, size_t kCount>
void Gather(const uint32_t* const words[kLanes], float (&matrix)[kCount]) {
  constexpr auto& indices = kIndices<kFragment>;
  uint32_t bits[kCount];
  for (int lane = 0; lane < kLanes; ++lane) {
    for (size_t i = 0; i < indices[lane].size(); ++i) {
      const uint32_t word = words[lane][i / Type::kHalves];
      bits[indices[lane][i]] = Type::kHalves == 1 ? word : i % 2 == 0 ? word & 0xffffu : word >> 16;
    }
  }
  for (size_t i = 0; i < kCount; ++i) matrix[i] = Type::ToF32(bits[i]);
}

// c + the sum of x[i] * y[i * 8], as MmaModel says.
float AddTruncated(float c, const float* x, const float* y, int count, int extra_bits) {
  double terms[17];
  int top = -1000;
  bool finite = std::isfinite(c);
  for (int i = 0; i <= count; ++i) {
    terms[i] = i == 0 ? c : static_cast<double>(x[i - 1]) * y[(i - 1) * 8];
    finite = finite && std::isfinite(terms[i]);
    if (terms[i] != 0) top = std::max(top, std::ilogb(terms[i]));
  }
  if (!finite) {
    double sum = 0;
    for (int i = 0; i <= count; ++i) sum += terms[i];
    return static_cast<float>(sum);
  }
  if (top == -1000) return 0;
  // In units of the last bit kept, the terms are whole numbers of at most 24 + extra_bits bits.
  const int unit = top - 23 - extra_bits;
  double sum = 0;
  for (int i = 0; i <= count; ++i) sum += std::trunc(std::ldexp(terms[i], -unit));
  if (sum == 0) return 0;
  const int excess = std::max(std::ilogb(sum) - 23, -149 - unit);
  if (excess > 0) sum = std::ldexp(std::trunc(std::ldexp(sum, -excess)), excess);
  return static_cast<float>(std::ldexp(sum, unit));
}

template <class Type, Fragment kFragmentA, Fragment kFragmentB>
void Multiply(const MmaModel& model, const MmaArguments* const lanes[kLanes]) {
  constexpr int kRows = 16;
  constexpr int kColumns = 8;
  constexpr int kDepth = LayoutOf(kFragmentA).columns;
  const uint32_t* words[kLanes];
  float a[kRows * kDepth];
  float b[kDepth * kColumns];
  float c[kRows * kColumns];
  for (int lane = 0; lane < kLanes; ++lane) words[lane] = lanes[lane]->a;
  Gather<Type, kFragmentA>(words, a);
  for (int lane = 0; lane < kLanes; ++lane) words[lane] = lanes[lane]->b;
  Gather<Type, kFragmentB>(words, b);
  constexpr auto& indices = kIndices<Fragment::kMmaC>;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) c[indices[lane][i]] = lanes[lane]->d[i];
  }
  if (model.products == 0) {
    for (int m = 0; m < kRows; ++m) {
      for (int k = 0; k < kDepth; ++k) {
        for (int n = 0; n < kColumns; ++n) {
          c[m * kColumns + n] += a[m * kDepth + k] * b[k * kColumns + n];
        }
      }
    }
  } else {
    const int step = std::min(model.products, kDepth);
    for (int i = 0; i < kRows * kColumns; ++i) {
      for (int k = 0; k < kDepth; k += step) {
        c[i] = AddTruncated(c[i], a + i / kColumns * kDepth + k, b + k * kColumns + i % kColumns,
                            std::min(step, kDepth - k), model.extra_bits);
      }
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) lanes[lane]->d[i] = c[indices[lane][i]];
  }
}

}  // namespace

void MultiplyMatrices(MmaKind kind, const MmaModel& model,
                      const MmaArguments* const lanes[kLanes]) {
  switch (kind) {
    case MmaKind::kF16K16:
      return Multiply<F16, Fragment::kMmaK16A, Fragment::kMmaK16B>(model, lanes);
    case MmaKind::kF16K8:
      return Multiply<F16, Fragment::kMmaK8A, Fragment::kMmaK8B>(model, lanes);
    case MmaKind::kBF16K16:
      return Multiply<BF16, Fragment::kMmaK16A, Fragment::kMmaK16B>(model, lanes);
    case MmaKind::kTF32K8:
      return Multiply<TF32, Fragment::kMmaTF32A, Fragment::kMmaTF32B>(model, lanes);
  }
}

void DealMatrices(const unsigned char* const rows[kLanes], bool transposed,
                  uint32_t (*const words[kLanes])[4]) {
  uint16_t elements[kLanes * 8];
  for (int row = 0; row < kLanes; ++row) memcpy(elements + row * 8, rows[row], 16);
  constexpr auto& plain = kIndices<Fragment::kMatrix4>;
  constexpr auto& columns = kIndices<Fragment::kMatrix4Transposed>;
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto& indices = transposed ? columns[lane] : plain[lane];
    for (int r = 0; r < 4; ++r) {
      (*words[lane])[r] = elements[indices[2 * r]] | uint32_t{elements[indices[2 * r + 1]]} << 16;
    }
  }
}

void TransposeWords(uint32_t* const words[kLanes]) {
  uint16_t elements[8 * 8];
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int half = 0; half < 2; ++half) {
      elements[kIndices<Fragment::kMatrix>[lane][half]] =
          static_cast<uint16_t>(*words[lane] >> (16 * half));
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto& indices = kIndices<Fragment::kMatrixTransposed>[lane];
    *words[lane] = elements[indices[0]] | uint32_t{elements[indices[1]]} << 16;
  }
}

}  // namespace kvant::simt
