// KernelSet's expand, scale, load_scaled and transpose over a vector wrapper such as
// simd.h's.
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

// The elements of a vector lie in at most kWidth groups, whose parameters are permuted.
template <typename S>
void Expand(const float* in, int64_t group, int64_t into_group, int64_t n, float* out) {
  static constexpr float kLanes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  // Of groups of more than a vector, at most one ends in it: as if they began a vector before that.
  const int64_t span = group < S::kWidth ? group : S::kWidth;
  // floor(x / span) is the integer nearest to (x - (span - 1) / 2) / span.
  const auto per_group = S::Set1(1.f / static_cast<float>(span));
  const float middle = 0.5f * static_cast<float>(span - 1);
  const auto lanes = [&] {
    const int64_t into_span = into_group - (group - span);
    const float first = static_cast<float>(into_span > 0 ? into_span : 0) - middle;
    return S::NearestInteger(S::Mul(S::Add(S::Load(kLanes), S::Set1(first)), per_group));
  };
  const int64_t whole = S::kWidth / group, part = S::kWidth % group;
  int64_t left = (into_group + n - 1) / group + 1;  // groups
  auto at = lanes();
  for (int64_t i = 0; i < n; i += S::kWidth) {
    const auto some = left < S::kWidth ? S::LoadSome(in, left) : S::Load(in);
    const auto x = S::Permute(some, at);
    if (n - i < S::kWidth) return S::StoreSome(out + i, x, n - i);
    S::Store(out + i, x);
    int64_t passed = whole;
    // Where groups divide a vector, every vector is like the first.
    if (part != 0) {
      into_group += part;
      passed += into_group < group ? 0 : 1;
      into_group -= into_group < group ? 0 : group;
      at = lanes();
    }
    in += passed;
    left -= passed;
  }
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
  if (i < n) {
    const auto zps = kZp == ZeroPoint::kNone ? S::Zero() : S::LoadSome(how.zero_points + i, n - i);
    const auto x = S::LoadSome(values + i, n - i);
    const auto scales = S::LoadSome(how.scales + i, n - i);
    S::StoreSome(values + i, ScaleOne<S, kZp>(x, scales, zps), n - i);
  }
}

template <typename S, ZeroPoint kZp>
void ScaleAs(const Scaling& how, int64_t n, float* values) {
  if (how.group == 1) return ScaleEach<S, kZp>(how, n, values);
  for (int64_t i = 0, at = 0; i < n; i += how.group, ++at) {
    ScaleRun<S, kZp>(how.scales[at], kZp == ZeroPoint::kNone ? 0.f : how.zero_points[at],
                     how.group < n - i ? how.group : n - i, values + i);
  }
}

template <typename S>
void Scale(const Scaling& how, int64_t n, float* values) {
  if (how.zero_points == nullptr) return ScaleAs<S, ZeroPoint::kNone>(how, n, values);
  if (how.real) return ScaleAs<S, ZeroPoint::kReal>(how, n, values);
  return ScaleAs<S, ZeroPoint::kCode>(how, n, values);
}

// From a byte's first element on. Groups are whole vectors, or with kEach elements.
template <typename S, ZeroPoint kZp, bool kEach, typename Type, typename Out>
void LoadScaledAs(Type type, const void* data, int64_t index, int64_t n, const Scaling& how,
                  Out* out) {
  constexpr int64_t kBytes = S::kWidth * Type::kBits / 8;
  const uint8_t* p = static_cast<const uint8_t*>(data) + index * Type::kBits / 8;
  for (int64_t i = 0, at = 0; i < n; ++at) {
    auto scale = S::Set1(how.scales[at]);
    auto zp = kZp == ZeroPoint::kNone ? S::Zero() : S::Set1(how.zero_points[at]);
    const int64_t end = !kEach && how.group < n - i ? i + how.group : n;
    for (; i + S::kWidth <= end; i += S::kWidth, p += kBytes) {
      if (kEach) {
        scale = S::Load(how.scales + i);
        if (kZp != ZeroPoint::kNone) zp = S::Load(how.zero_points + i);
      }
      const auto x = type.Convert(S::template LoadRaw<kBytes>(p));
      S::Store(out + i, ScaleOne<S, kZp>(x, scale, zp));
    }
    if (i < end) {
      if (kEach) {
        scale = S::LoadSome(how.scales + i, end - i);
        if (kZp != ZeroPoint::kNone) zp = S::LoadSome(how.zero_points + i, end - i);
      }
      const auto x = type.Convert(S::LoadRawSome(p, ((end - i) * Type::kBits + 7) / 8));
      S::StoreSome(out + i, ScaleOne<S, kZp>(x, scale, zp), end - i);
      i = end;
    }
  }
}

inline int64_t ElementsPerByte(DataType type) {
  if (type == kS4 || type == kU4) return 2;
  return type == kS2 || type == kU2 ? 4 : 1;
}

template <typename S, bool kEach, typename Out>
void LoadScaledBy(DataType type, const void* data, int64_t index, int64_t n, const Scaling& how,
                  Out* out) {
  if (how.codebook != nullptr) {
    return WithEntries<S>(how.codebook, type, [&](auto entries) {
      LoadScaledAs<S, ZeroPoint::kNone, kEach>(entries, data, index, n, how, out);
    });
  }
  WithElements<S>(type, [&](auto stored) {
    if (how.zero_points == nullptr) {
      LoadScaledAs<S, ZeroPoint::kNone, kEach>(stored, data, index, n, how, out);
    } else if (how.real) {
      LoadScaledAs<S, ZeroPoint::kReal, kEach>(stored, data, index, n, how, out);
    } else {
      LoadScaledAs<S, ZeroPoint::kCode, kEach>(stored, data, index, n, how, out);
    }
  });
}

template <typename S, typename Out>
void LoadScaledFromByte(DataType type, const void* data, int64_t index, int64_t n,
                        const Scaling& how, Out* out) {
  const bool each = how.group == 1 && n > 1;
  return (each ? LoadScaledBy<S, true, Out> : LoadScaledBy<S, false, Out>)(type, data, index, n,
                                                                           how, out);
}

template <typename S>
void LoadScaled(DataType type, const void* data, int64_t index, int64_t n, const Scaling& how,
                float* out) {
  if (type == kS64 || index % ElementsPerByte(type) != 0) {
    if (how.codebook != nullptr) {
      LoadEntries<S>(how.codebook, type, data, index, n, out);
    } else {
      Load<S>(type, data, index, n, out);
    }
    return Scale<S>(how, n, out);
  }
  LoadScaledFromByte<S>(type, data, index, n, how, out);
}

// kWidth dense rows of kCols, a power of two: unzipping rotates the bits of an element's index
// (row, column) by one.
template <typename S, int kCols>
void TransposeNarrow(const float* in, float* out, int64_t out_stride) {
  typename S::Vector v[kCols], transposed[kCols];
  for (int i = 0; i < kCols; ++i) v[i] = S::Load(in + i * S::kWidth);
  for (int turn = 1; turn < kCols; turn *= 2) {
    for (int i = 0; i < kCols / 2; ++i) {
      S::Unzip(v[2 * i], v[2 * i + 1], &transposed[i], &transposed[i + kCols / 2]);
    }
    for (int i = 0; i < kCols; ++i) v[i] = transposed[i];
  }
  for (int i = 0; i < kCols; ++i) S::Store(out + i * out_stride, v[i]);
}

// A block of less than kWidth rows or columns.
template <typename S>
void TransposePart(const float* in, int64_t in_stride, int64_t rows, int64_t cols, float* out,
                   int64_t out_stride) {
  constexpr int64_t kFew = 3;
  if (rows <= kFew || cols <= kFew) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) out[j * out_stride + i] = in[i * in_stride + j];
    }
    return;
  }
  typename S::Vector block[S::kWidth];
  for (int64_t i = 0; i < S::kWidth; ++i) {
    block[i] = i >= rows          ? S::Zero()
               : cols < S::kWidth ? S::LoadSome(in + i * in_stride, cols)
                                  : S::Load(in + i * in_stride);
  }
  S::Transpose(block);
  for (int64_t j = 0; j < cols; ++j) {
    float* to = out + j * out_stride;
    rows < S::kWidth ? S::StoreSome(to, block[j], rows) : S::Store(to, block[j]);
  }
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
      if (some_rows < S::kWidth || some_cols < S::kWidth) {
        TransposePart<S>(from, in_stride, some_rows, some_cols, to, out_stride);
        continue;
      }
      typename S::Vector block[S::kWidth];
#pragma GCC unroll 16
      for (int i = 0; i < S::kWidth; ++i) block[i] = S::Load(from + i * in_stride);
      S::Transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < S::kWidth; ++i) S::Store(to + i * out_stride, block[i]);
    }
  }
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_TILES_H_
