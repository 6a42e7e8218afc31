// The ranges of groups for QuantizeKernels, over a vector wrapper such as simd.h's.
//
// Ranges are found on keys, floats as integers in the order of their values: so NaN is kept, beyond
// infinity, and the order of comparisons does not change the result.
#ifndef KVANT_KERNELS_CPU_ISA_QUANTIZE_RANGES_H_
#define KVANT_KERNELS_CPU_ISA_QUANTIZE_RANGES_H_

#include <cstdint>
#include <type_traits>

#include "kvant/kernels/cpu/isa/convert.h"
#include "kvant/kernels/cpu/quantize_kernels.h"

namespace kvant::cpu {
namespace {

// Goes from group to group.
struct RowCursor {
  const uint8_t* at;
  int64_t group, gap, run, left;  // bytes; groups

  RowCursor(const NumberRows& rows, const uint8_t* first, int64_t bytes)
      : at(first),
        group(rows.group * bytes),
        gap((rows.step - rows.run * rows.group) * bytes),
        run(rows.run),
        left(rows.run) {}

  const uint8_t* Next() {
    const uint8_t* const p = at;
    at += group;
    if (--left == 0) {
      at += gap;
      left = run;
    }
    return p;
  }
};

// Keys of the smallest and largest so far, lane by lane.
template <typename S, bool kMagnitude>
struct Range {
  using Vector = typename S::Vector;
  Vector low, high;

  static Vector Key(Vector x) { return kMagnitude ? S::MagnitudeKey(x) : S::OrderKey(x); }
  void Start(Vector x) { low = high = Key(x); }
  void Add(Vector x) {
    const Vector key = Key(x);
    if constexpr (!kMagnitude) low = S::MinKey(low, key);
    high = S::MaxKey(high, key);
  }
  struct Lower {
    Vector operator()(Vector a, Vector b) const { return S::MinKey(a, b); }
  };
  struct Higher {
    Vector operator()(Vector a, Vector b) const { return S::MaxKey(a, b); }
  };

  // Of one group.
  template <typename Type>
  static Range Find(const uint8_t* p, int64_t group) {
    constexpr int64_t kBytes = S::kWidth * Type::kBits / 8;
    Range range;
    const int64_t rest = group % S::kWidth, whole = group - rest;
    if (rest != 0) {
      // What is beyond the group becomes its first element, or 0 would count.
      float some[S::kWidth];
      S::Store(some, LoadSomeNumbers<S, Type>(p + whole * Type::kBits / 8, rest));
      for (int64_t i = rest; i < S::kWidth; ++i) some[i] = some[0];
      range.Start(S::Load(some));
    } else {
      range.Start(LoadNumbers<S, Type>(p));
    }
    for (int64_t i = rest != 0 ? 0 : S::kWidth; i < whole; i += S::kWidth) {
      range.Add(LoadNumbers<S, Type>(p + i / S::kWidth * kBytes));
    }
    return range;
  }
};

// The same of numbers of 16 bits in groups of whole vectors of them: two keys to a lane, so that
// only what is left of a group is converted.
template <typename S, bool kMagnitude>
struct HalfRange {
  using Vector = typename S::Vector;
  static constexpr int64_t kBytes = S::kWidth * 4;
  Vector low, high;

  static Vector Key(const uint8_t* from) {
    const Vector pairs = S::FromF32(S::template LoadRaw<kBytes>(from));
    return kMagnitude ? S::MagnitudeKeys(pairs) : S::OrderKeys(pairs);
  }
  struct Lower {
    Vector operator()(Vector a, Vector b) const { return S::MinKeys(a, b); }
  };
  struct Higher {
    Vector operator()(Vector a, Vector b) const { return S::MaxKeys(a, b); }
  };

  template <typename Type>
  static HalfRange Find(const uint8_t* p, int64_t group) {
    HalfRange range;
    range.low = range.high = Key(p);
    for (int64_t at = kBytes; at < group * 2; at += kBytes) {
      const Vector keys = Key(p + at);
      if constexpr (!kMagnitude) range.low = S::MinKeys(range.low, keys);
      range.high = S::MaxKeys(range.high, keys);
    }
    return range;
  }

  // Keys of f32 of what a fold has left.
  template <typename Type, typename Op>
  static Vector Widen(Vector keys, Op op) {
    float pairs[S::kWidth];
    S::Store(pairs, kMagnitude ? keys : S::OrderKeys(keys));
    const uint8_t* numbers = reinterpret_cast<const uint8_t*>(pairs);
    // The two numbers of lane i, as the elements i of two vectors.
    Vector even, odd;
    S::Unzip(LoadNumbers<S, Type>(numbers), LoadNumbers<S, Type>(numbers + kBytes / 2), &even,
             &odd);
    using Keys = Range<S, kMagnitude>;
    return op(Keys::Key(even), Keys::Key(odd));
  }
};

template <typename S, bool kMagnitude>
void StoreRange(typename S::Vector low, typename S::Vector high, int64_t n, float* min,
                float* max) {
  // A magnitude is its own key; the other keys turn back the way they came.
  const typename S::Vector smallest = kMagnitude ? high : S::OrderKey(low);
  const typename S::Vector largest = kMagnitude ? high : S::OrderKey(high);
  if (n >= S::kWidth) {
    S::Store(min, smallest);
    S::Store(max, largest);
  } else {
    S::StoreSome(min, smallest, n);
    S::StoreSome(max, largest, n);
  }
}

// The ranges of kWidth groups, or the `some` that are left, a group to a lane: those of four groups
// are folded before the next are looked at, so that they stay in registers.
template <typename S, typename Type, typename Found, bool kMagnitude, bool kAll>
void FoldRanges(RowCursor& cursor, int64_t elements, int64_t some, typename S::Vector* least,
                typename S::Vector* most) {
  using Vector = typename S::Vector;
  Vector lows[S::kWidth / 4], highs[S::kWidth / 4];
#pragma GCC unroll 4
  for (int64_t i = 0; i < S::kWidth; i += 4) {
    Vector low[4], high[4];
#pragma GCC unroll 4
    for (int64_t j = 0; j < 4; ++j) {
      low[j] = high[j] = S::Zero();
      if (!kAll && i + j >= some) continue;
      const auto range = Found::template Find<Type>(cursor.Next(), elements);
      low[j] = range.low;
      high[j] = range.high;
    }
    if constexpr (!kMagnitude) {
      lows[i / 4] = S::FoldFour(low[0], low[1], low[2], low[3], typename Found::Lower());
    }
    highs[i / 4] = S::FoldFour(high[0], high[1], high[2], high[3], typename Found::Higher());
  }
  *most = S::FoldFours(highs, typename Found::Higher());
  if constexpr (!kMagnitude) *least = S::FoldFours(lows, typename Found::Lower());
}

template <typename S, typename Type, bool kMagnitude, bool kHalves>
void RowRangesOf(const NumberRows& rows, float* min, float* max) {
  using Vector = typename S::Vector;
  using Keys = Range<S, kMagnitude>;
  RowCursor cursor(rows, NumberAt<Type>(rows.src, rows.index), Type::kBits / 8);
  if constexpr (S::kWidth == 1) {
    for (int64_t g = 0; g < rows.groups; ++g) {
      const Keys range = Keys::template Find<Type>(cursor.Next(), rows.group);
      StoreRange<S, kMagnitude>(range.low, range.high, 1, min + g, max + g);
    }
  } else {
    using Found = std::conditional_t<kHalves, HalfRange<S, kMagnitude>, Keys>;
    for (int64_t g = 0; g < rows.groups; g += S::kWidth) {
      const int64_t some = rows.groups - g;
      Vector low = S::Zero(), high;
      if (some >= S::kWidth) {
        FoldRanges<S, Type, Found, kMagnitude, true>(cursor, rows.group, some, &low, &high);
      } else {
        FoldRanges<S, Type, Found, kMagnitude, false>(cursor, rows.group, some, &low, &high);
      }
      if constexpr (kHalves) {
        high = Found::template Widen<Type>(high, typename Keys::Higher());
        if constexpr (!kMagnitude) low = Found::template Widen<Type>(low, typename Keys::Lower());
      }
      StoreRange<S, kMagnitude>(low, high, some, min + g, max + g);
    }
  }
}

template <typename S>
void RowRanges(const NumberRows& rows, bool magnitude, float* min, float* max) {
  WithNumbers<S>(rows.type, [&](auto stored) {
    using Type = decltype(stored);
    if constexpr (S::kWidth > 1 && Type::kBits == 16) {
      if (rows.group % (2 * S::kWidth) == 0) {
        return magnitude ? RowRangesOf<S, Type, true, true>(rows, min, max)
                         : RowRangesOf<S, Type, false, true>(rows, min, max);
      }
    }
    return magnitude ? RowRangesOf<S, Type, true, false>(rows, min, max)
                     : RowRangesOf<S, Type, false, false>(rows, min, max);
  });
}

// kCount whole vectors of columns, or the first n < kWidth columns of one.
template <typename S, typename Type, bool kMagnitude, int kCount, bool kWhole>
void ColumnBlock(const uint8_t* p, int64_t stride, int64_t lines, int64_t n, int64_t ahead,
                 float* min, float* max) {
  constexpr int64_t kBytes = S::kWidth * Type::kBits / 8;
  const auto load = [n](const uint8_t* from) {
    return kWhole ? LoadNumbers<S, Type>(from) : LoadSomeNumbers<S, Type>(from, n);
  };
  Range<S, kMagnitude> range[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) range[i].Start(load(p + i * kBytes));
  for (int64_t line = 1; line < lines; ++line) {
    p += stride;
    Prefetch<S>(p + ahead, kCount * kBytes);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) range[i].Add(load(p + i * kBytes));
  }
  for (int i = 0; i < kCount; ++i) {
    StoreRange<S, kMagnitude>(range[i].low, range[i].high, kWhole ? S::kWidth : n,
                              min + i * S::kWidth, max + i * S::kWidth);
  }
}

template <typename S, typename Type, bool kMagnitude>
void ColumnRangesOf(const NumberColumns& columns, float* min, float* max) {
  constexpr int kCount = S::kWidth >= 16 ? 8 : 4;  // two registers each
  const uint8_t* const first = NumberAt<Type>(columns.src, columns.index);
  const int64_t stride = columns.stride * Type::kBits / 8, n = columns.n;
  int64_t c = 0;
  const auto block = [&](auto count, auto whole) {
    ColumnBlock<S, Type, kMagnitude, count(), whole()>(
        first + c * Type::kBits / 8, stride, columns.lines, n - c, columns.ahead, min + c, max + c);
    c += count() * S::kWidth;
  };
  using Many = std::integral_constant<int, kCount>;
  using One = std::integral_constant<int, 1>;
  while (c + kCount * S::kWidth <= n) block(Many(), std::true_type());
  while (c + S::kWidth <= n) block(One(), std::true_type());
  if (c < n) block(One(), std::false_type());
}

template <typename S>
void ColumnRanges(const NumberColumns& columns, bool magnitude, float* min, float* max) {
  WithNumbers<S>(columns.type, [&](auto stored) {
    using Type = decltype(stored);
    if (magnitude) {
      ColumnRangesOf<S, Type, true>(columns, min, max);
    } else {
      ColumnRangesOf<S, Type, false>(columns, min, max);
    }
  });
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_QUANTIZE_RANGES_H_
