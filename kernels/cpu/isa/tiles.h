// KernelSet's scale, load_scaled and transpose over a vector wrapper such as simd_avx512.h's.
#ifndef KVANT_KERNELS_CPU_ISA_TILES_H_
#define KVANT_KERNELS_CPU_ISA_TILES_H_

#include <cstdint>

#include "kvant/kernels/cpu/isa/load.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {
namespace {

// What the zero point does, so that loops hold no choice.
enum class ZeroPoint { kNone, kCode, kReal };

template <typename S, ZeroPoint kZp>
inline typename S::Vector ScaleOne(typename S::Vector x, typename S::Vector scale,
                                   typename S::Vector zp) {
  if (kZp == ZeroPoint::kCode) return S::Mul(S::Sub(x, zp), scale);
  x = S::Mul(x, scale);
  return kZp == ZeroPoint::kReal ? S::Sub(x, zp) : x;
}

template <typename S, ZeroPoint kZp>
inline void ScaleRun(float scale, float zp, int64_t n, float* values) {
  const auto scales = S::Set1(scale), zps = S::Set1(zp);
  int64_t i = 0;
  for (; i + S::kWidth <= n; i += S::kWidth) {
    S::Store(values + i, ScaleOne<S, kZp>(S::Load(values + i), scales, zps));
  }
  if (i < n) {
    const auto x = S::LoadSome(values + i, n - i);
    S::StoreSome(values + i, ScaleOne<S, kZp>(x, scales, zps), n - i);
  }
}

template <typename S, ZeroPoint kZp>
inline void ScaleEach(const Scaling& how, int64_t n, float* values) {
  int64_t i = 0;
  for (; i + S::kWidth <= n; i += S::kWidth) {
    const auto zps = kZp == ZeroPoint::kNone ? S::Zero() : S::Load(how.zero_points + i);
    S::Store(values + i, ScaleOne<S, kZp>(S::Load(values + i), S::Load(how.scales + i), zps));
  }
  for (; i < n; ++i) {
    ScaleRun<S, kZp>(how.scales[i], kZp == ZeroPoint::kNone ? 0.f : how.zero_points[i], 1,
                     values + i);
  }
}

template <typename S, ZeroPoint kZp>
void ScaleAs(const Scaling& how, int64_t n, float* values) {
  if (how.group == 1 && how.stride == 1) return ScaleEach<S, kZp>(how, n, values);
  int64_t run = how.group - how.into_group;
  for (int64_t i = 0, at = 0; i < n; i += run, run = how.group, at += how.stride) {
    if (run > n - i) run = n - i;
    ScaleRun<S, kZp>(how.scales[at], kZp == ZeroPoint::kNone ? 0.f : how.zero_points[at], run,
                     values + i);
  }
}

template <typename S>
void Scale(const Scaling& how, int64_t n, float* values) {
  if (how.zero_points == nullptr) return ScaleAs<S, ZeroPoint::kNone>(how, n, values);
  if (how.real) return ScaleAs<S, ZeroPoint::kReal>(how, n, values);
  return ScaleAs<S, ZeroPoint::kCode>(how, n, values);
}

// Groups of whole vectors, from a group's and a byte's first element on.
template <typename S, ZeroPoint kZp, typename Type>
void LoadScaledAs(Type type, const void* data, int64_t index, int64_t n, const Scaling& how,
                  float* out) {
  constexpr int64_t kBytes = S::kWidth * Type::kBits / 8;
  const uint8_t* p = static_cast<const uint8_t*>(data) + index * Type::kBits / 8;
  for (int64_t i = 0, at = 0; i < n; at += how.stride) {
    const auto scale = S::Set1(how.scales[at]);
    const auto zp = kZp == ZeroPoint::kNone ? S::Zero() : S::Set1(how.zero_points[at]);
    const int64_t end = i + how.group < n ? i + how.group : n;
    for (; i + S::kWidth <= end; i += S::kWidth, p += kBytes) {
      const auto x = type.Convert(S::template LoadRaw<kBytes>(p));
      S::Store(out + i, ScaleOne<S, kZp>(x, scale, zp));
    }
    if (i < end) {
      const auto x = type.Convert(S::LoadRawSome(p, ((end - i) * Type::kBits + 7) / 8));
      S::StoreSome(out + i, ScaleOne<S, kZp>(x, scale, zp), end - i);
      i = end;
    }
  }
}

template <typename S>
void LoadScaled(DataType type, const void* data, int64_t index, int64_t n, const Scaling& how,
                float* out) {
  const bool whole = how.group % S::kWidth == 0 || how.group >= n;
  if (!whole || how.into_group != 0 || type == kS64 || index % 4 != 0) {
    if (how.codebook != nullptr) {
      LoadEntries<S>(how.codebook, type, data, index, n, out);
    } else {
      Load<S>(type, data, index, n, out);
    }
    return Scale<S>(how, n, out);
  }
  if (how.codebook != nullptr) {
    return WithEntries<S>(how.codebook, type, [&](auto entries) {
      LoadScaledAs<S, ZeroPoint::kNone>(entries, data, index, n, how, out);
    });
  }
  WithElements<S>(type, [&](auto stored) {
    if (how.zero_points == nullptr) {
      LoadScaledAs<S, ZeroPoint::kNone>(stored, data, index, n, how, out);
    } else if (how.real) {
      LoadScaledAs<S, ZeroPoint::kReal>(stored, data, index, n, how, out);
    } else {
      LoadScaledAs<S, ZeroPoint::kCode>(stored, data, index, n, how, out);
    }
  });
}

// kWidth dense rows of kCols, a power of two: unzipping rotates the bits of an element's index
// (row, column) by one.
template <typename S, int kCols>
void TransposeNarrow(const float* in, float* out, int64_t out_stride) {
  typename S::Vector v[kCols], turned[kCols];
  for (int i = 0; i < kCols; ++i) v[i] = S::Load(in + i * S::kWidth);
  for (int turn = 1; turn < kCols; turn *= 2) {
    for (int i = 0; i < kCols / 2; ++i) {
      S::Unzip(v[2 * i], v[2 * i + 1], &turned[i], &turned[i + kCols / 2]);
    }
    for (int i = 0; i < kCols; ++i) v[i] = turned[i];
  }
  for (int i = 0; i < kCols; ++i) S::Store(out + i * out_stride, v[i]);
}

template <typename S>
void Transpose(const float* in, int64_t in_stride, int64_t rows, int64_t cols, float* out,
               int64_t out_stride) {
  const bool dense = in_stride == cols;
  const auto narrow = dense && cols == 2   ? TransposeNarrow<S, 2>
                      : dense && cols == 4 ? TransposeNarrow<S, 4>
                      : dense && cols == 8 ? TransposeNarrow<S, 8>
                                           : nullptr;
  for (int64_t r = 0; r < rows; r += S::kWidth) {
    if (narrow != nullptr && r + S::kWidth <= rows) {
      narrow(in + r * in_stride, out + r, out_stride);
      continue;
    }
    const int64_t some_rows = rows - r < S::kWidth ? rows - r : S::kWidth;
    for (int64_t c = 0; c < cols; c += S::kWidth) {
      const int64_t some_cols = cols - c < S::kWidth ? cols - c : S::kWidth;
      const float* from = in + r * in_stride + c;
      float* to = out + c * out_stride + r;
      typename S::Vector block[S::kWidth];
      if (some_rows == S::kWidth && some_cols == S::kWidth) {
#pragma GCC unroll 16
        for (int i = 0; i < S::kWidth; ++i) block[i] = S::Load(from + i * in_stride);
        S::Transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < S::kWidth; ++i) S::Store(to + i * out_stride, block[i]);
        continue;
      }
      // Masks of a whole vector are not to be had from LoadSome.
      for (int64_t i = 0; i < some_rows; ++i) {
        for (int64_t j = 0; j < some_cols; ++j) to[j * out_stride + i] = from[i * in_stride + j];
      }
    }
  }
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_TILES_H_
