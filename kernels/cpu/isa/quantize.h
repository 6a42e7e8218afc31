// QuantizeKernels over a vector wrapper such as simd_avx512.h's.
//
// Ranges are found on keys, floats as integers in the order of their values: so NaN is kept, beyond
// infinity, and the order of comparisons does not change the result.
#ifndef KVANT_KERNELS_CPU_ISA_QUANTIZE_H_
#define KVANT_KERNELS_CPU_ISA_QUANTIZE_H_

#include <cstdint>

#include "kvant/kernels/cpu/isa/convert.h"
#include "kvant/kernels/cpu/isa/quantize_codes.h"
#include "kvant/kernels/cpu/quantize_kernels.h"

namespace kvant::cpu {
namespace {

// Keys of the smallest and largest so far, lane by lane.
template <typename S, bool kMagnitude>
struct Range {
  typename S::Vector low, high;

  static typename S::Vector Key(typename S::Vector x) {
    return kMagnitude ? S::MagnitudeKey(x) : S::OrderKey(x);
  }
  void Start(typename S::Vector x) { low = high = Key(x); }
  void Add(typename S::Vector x) {
    const typename S::Vector key = Key(x);
    if constexpr (!kMagnitude) low = S::MinKey(low, key);
    high = S::MaxKey(high, key);
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

// Of one group; the lanes are not folded yet.
template <typename S, typename Type, bool kMagnitude>
Range<S, kMagnitude> GroupRange(const uint8_t* p, int64_t group) {
  constexpr int64_t kBytes = S::kWidth * Type::kBits / 8;
  Range<S, kMagnitude> range;
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
  for (int64_t i = 0; i < whole; i += S::kWidth, p += kBytes) range.Add(LoadNumbers<S, Type>(p));
  return range;
}

template <typename S, typename Type, bool kMagnitude>
void RowRangesOf(const uint8_t* p, int64_t group, int64_t groups, float* min, float* max) {
  const int64_t bytes = group * Type::kBits / 8;
  for (int64_t g = 0; g < groups; g += S::kWidth) {
    typename S::Vector low[S::kWidth], high[S::kWidth];
    const int64_t some = groups - g < S::kWidth ? groups - g : S::kWidth;
    for (int64_t i = 0; i < S::kWidth; ++i) {
      if (i < some) {
        const auto range = GroupRange<S, Type, kMagnitude>(p + (g + i) * bytes, group);
        low[i] = range.low;
        high[i] = range.high;
      } else {
        low[i] = high[i] = S::Zero();
      }
    }
    const auto most = S::FoldEach(high, [](auto a, auto b) { return S::MaxKey(a, b); });
    const auto least =
        kMagnitude ? most : S::FoldEach(low, [](auto a, auto b) { return S::MinKey(a, b); });
    StoreRange<S, kMagnitude>(least, most, some, min + g, max + g);
  }
}

// The same of numbers of 16 bits in groups of whole vectors of them: two keys to a lane, so that
// only what is left of a group is converted.
template <typename S, typename Type, bool kMagnitude>
void HalfRowRanges(const uint8_t* p, int64_t group, int64_t groups, float* min, float* max) {
  constexpr int64_t kBytes = S::kWidth * 4;
  const auto key = [](const uint8_t* from) {
    const typename S::Vector pairs = S::FromF32(S::template LoadRaw<kBytes>(from));
    return kMagnitude ? S::MagnitudeKeys(pairs) : S::OrderKeys(pairs);
  };
  const auto lower = [](auto a, auto b) { return S::MinKeys(a, b); };
  const auto higher = [](auto a, auto b) { return S::MaxKeys(a, b); };
  // The two numbers of lane i, as the elements i of two vectors.
  const auto split = [](typename S::Vector keys, typename S::Vector* even,
                        typename S::Vector* odd) {
    float pairs[S::kWidth];
    S::Store(pairs, kMagnitude ? keys : S::OrderKeys(keys));
    const uint8_t* numbers = reinterpret_cast<const uint8_t*>(pairs);
    S::Unzip(LoadNumbers<S, Type>(numbers), LoadNumbers<S, Type>(numbers + kBytes / 2), even, odd);
  };
  for (int64_t g = 0; g < groups; g += S::kWidth) {
    typename S::Vector low[S::kWidth], high[S::kWidth];
    const int64_t some = groups - g < S::kWidth ? groups - g : S::kWidth;
    for (int64_t i = 0; i < S::kWidth; ++i) {
      low[i] = high[i] = i < some ? key(p) : S::Zero();
      if (i >= some) continue;
      for (int64_t at = kBytes; at < group * 2; at += kBytes) {
        const typename S::Vector keys = key(p + at);
        if constexpr (!kMagnitude) low[i] = S::MinKeys(low[i], keys);
        high[i] = S::MaxKeys(high[i], keys);
      }
      p += group * 2;
    }
    using Keys = Range<S, kMagnitude>;
    typename S::Vector even, odd;
    split(S::FoldEach(high, higher), &even, &odd);
    const auto most = S::MaxKey(Keys::Key(even), Keys::Key(odd));
    auto least = most;
    if constexpr (!kMagnitude) {
      split(S::FoldEach(low, lower), &even, &odd);
      least = S::MinKey(Keys::Key(even), Keys::Key(odd));
    }
    StoreRange<S, kMagnitude>(least, most, some, min + g, max + g);
  }
}

template <typename S>
void RowRanges(DataType type, const void* src, int64_t index, int64_t group, int64_t groups,
               bool magnitude, float* min, float* max) {
  WithNumbers<S>(type, [=](auto stored) {
    using Type = decltype(stored);
    const uint8_t* p = NumberAt<Type>(src, index);
    if constexpr (S::kWidth > 1 && Type::kBits == 16) {
      if (group % (2 * S::kWidth) == 0) {
        return magnitude ? HalfRowRanges<S, Type, true>(p, group, groups, min, max)
                         : HalfRowRanges<S, Type, false>(p, group, groups, min, max);
      }
    }
    if (magnitude) {
      RowRangesOf<S, Type, true>(p, group, groups, min, max);
    } else {
      RowRangesOf<S, Type, false>(p, group, groups, min, max);
    }
  });
}

// kCount whole vectors of columns, or the first n < kWidth columns of one.
template <typename S, typename Type, bool kMagnitude, int kCount, bool kWhole>
void ColumnBlock(const uint8_t* p, int64_t stride, int64_t lines, int64_t n, float* min,
                 float* max) {
  constexpr int64_t kBytes = S::kWidth * Type::kBits / 8;
  const auto load = [n](const uint8_t* from) {
    return kWhole ? LoadNumbers<S, Type>(from) : LoadSomeNumbers<S, Type>(from, n);
  };
  Range<S, kMagnitude> range[kCount];
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) range[i].Start(load(p + i * kBytes));
  for (int64_t line = 1; line < lines; ++line) {
    p += stride;
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) range[i].Add(load(p + i * kBytes));
  }
  for (int i = 0; i < kCount; ++i) {
    StoreRange<S, kMagnitude>(range[i].low, range[i].high, kWhole ? S::kWidth : n,
                              min + i * S::kWidth, max + i * S::kWidth);
  }
}

template <typename S, typename Type, bool kMagnitude>
void ColumnRangesOf(const uint8_t* p, int64_t stride, int64_t lines, int64_t n, float* min,
                    float* max) {
  constexpr int kCount = 4;
  const auto at = [p](int64_t c) { return p + c * Type::kBits / 8; };
  int64_t c = 0;
  for (; c + kCount * S::kWidth <= n; c += kCount * S::kWidth) {
    ColumnBlock<S, Type, kMagnitude, kCount, true>(at(c), stride, lines, 0, min + c, max + c);
  }
  for (; c + S::kWidth <= n; c += S::kWidth) {
    ColumnBlock<S, Type, kMagnitude, 1, true>(at(c), stride, lines, 0, min + c, max + c);
  }
  if (c < n) {
    ColumnBlock<S, Type, kMagnitude, 1, false>(at(c), stride, lines, n - c, min + c, max + c);
  }
}

template <typename S>
void ColumnRanges(DataType type, const void* src, int64_t index, int64_t stride, int64_t lines,
                  int64_t n, bool magnitude, float* min, float* max) {
  WithNumbers<S>(type, [=](auto stored) {
    using Type = decltype(stored);
    const uint8_t* p = NumberAt<Type>(src, index);
    const int64_t bytes = stride * Type::kBits / 8;
    if (magnitude) {
      ColumnRangesOf<S, Type, true>(p, bytes, lines, n, min, max);
    } else {
      ColumnRangesOf<S, Type, false>(p, bytes, lines, n, min, max);
    }
  });
}

template <ZeroPoints kZeroPoints>
bool ParametersOfAll(const ParameterRule rule, int64_t n, const float* __restrict min,
                     const float* __restrict max, float* __restrict scales,
                     float* __restrict reciprocals, float* __restrict zero_points) {
  for (int64_t i = 0; i < n; ++i) {
    const GroupParameters parameters = ParametersOf<kZeroPoints>(rule, min[i], max[i]);
    scales[i] = static_cast<float>(parameters.scale);
    if constexpr (kZeroPoints != ZeroPoints::kNone) {
      zero_points[i] = static_cast<float>(parameters.zero_point);
    }
  }
  // Quotients by reciprocals need both to be ordinary numbers, remainders included.
  int ordinary = 1;
  for (int64_t i = 0; i < n; ++i) {
    ordinary &= (scales[i] >= 0x1p-100f ? 1 : 0) & (scales[i] <= 0x1p100f ? 1 : 0);
    reciprocals[i] = 1.f / scales[i];
  }
  return ordinary != 0;
}

inline bool Parameters(const ParameterRule& rule, int64_t n, const float* min, const float* max,
                       float* scales, float* reciprocals, float* zero_points) {
  switch (rule.zero_points) {
    case ZeroPoints::kNone:
      return ParametersOfAll<ZeroPoints::kNone>(rule, n, min, max, scales, reciprocals,
                                                zero_points);
    case ZeroPoints::kCodes:
      return ParametersOfAll<ZeroPoints::kCodes>(rule, n, min, max, scales, reciprocals,
                                                 zero_points);
    case ZeroPoints::kReal:
      return ParametersOfAll<ZeroPoints::kReal>(rule, n, min, max, scales, reciprocals,
                                                zero_points);
  }
  return false;
}

template <typename S, typename Type, typename Coder>
void RowCodesOf(const uint8_t* p, int64_t group, int64_t groups, QuantizeParameters how,
                uint8_t* codes) {
  constexpr int64_t kBytes = S::kWidth * Type::kBits / 8;
  for (int64_t g = 0; g < groups; ++g) {
    const Coder coder(how, [g](const float* values) { return S::Set1(values[g]); });
    int64_t i = 0;
    for (; i + S::kWidth <= group; i += S::kWidth, p += kBytes) {
      coder.Store(LoadNumbers<S, Type>(p), codes + i);
    }
    if (i < group) {
      coder.Store(LoadSomeNumbers<S, Type>(p, group - i), codes + i);
      p += (group - i) * Type::kBits / 8;
    }
    codes += group;
  }
}

// Lines of a block are read while the parameters of a vector of columns are in registers.
template <typename S, typename Type, typename Coder>
void ColumnCodesOf(const uint8_t* p, int64_t stride, int64_t lines, int64_t n,
                   QuantizeParameters how, uint8_t* codes, int64_t codes_stride) {
  for (int64_t c = 0; c < n; c += S::kWidth) {
    const Coder coder(how, [c](const float* values) { return S::Load(values + c); });
    const uint8_t* from = p + c * Type::kBits / 8;
    uint8_t* to = codes + c;
    for (int64_t i = 0; i < lines; ++i, from += stride, to += codes_stride) {
      const auto x =
          n - c < S::kWidth ? LoadSomeNumbers<S, Type>(from, n - c) : LoadNumbers<S, Type>(from);
      coder.Store(x, to);
    }
  }
}

// Calls f(Stored<...>(), a tag of a coder) for what `how` says.
template <typename S, typename F>
void WithNumbersAndCoder(DataType type, const QuantizeParameters& how, F f) {
  WithNumbers<S>(type,
                 [&](auto stored) { WithCoder<S>(how, [&](auto coder) { f(stored, coder); }); });
}

template <typename S>
void RowCodes(DataType type, const void* src, int64_t index, int64_t group, int64_t groups,
              const QuantizeParameters& how, uint8_t* out) {
  WithNumbersAndCoder<S>(type, how, [&](auto stored, auto coder) {
    using Type = decltype(stored);
    RowCodesOf<S, Type, typename decltype(coder)::type>(NumberAt<Type>(src, index), group, groups,
                                                        how, out);
  });
}

template <typename S>
void ColumnCodes(DataType type, const void* src, int64_t index, int64_t stride, int64_t lines,
                 int64_t n, const QuantizeParameters& how, uint8_t* out, int64_t out_stride) {
  WithNumbersAndCoder<S>(type, how, [&](auto stored, auto coder) {
    using Type = decltype(stored);
    ColumnCodesOf<S, Type, typename decltype(coder)::type>(
        NumberAt<Type>(src, index), stride * Type::kBits / 8, lines, n, how, out, out_stride);
  });
}

template <typename S, typename Type>
void RowFitsOf(const uint8_t* p, int64_t group, int64_t groups, QuantizeParameters how,
               float* sum_qx, float* sum_qq) {
  const auto values = S::LoadTable(how.codebook->values, 16);
  for (int64_t g = 0; g < groups; ++g) {
    const CodebookCoder<S, 4, Quotient::kProduct> coder(
        how, [g](const float* factors) { return S::Set1(factors[g]); });
    float qx = sum_qx[g], qq = sum_qq[g];
    for (int64_t i = 0; i < group; i += S::kWidth) {
      const int64_t n = group - i < S::kWidth ? group - i : S::kWidth;
      const auto x = n < S::kWidth ? LoadSomeNumbers<S, Type>(p, n) : LoadNumbers<S, Type>(p);
      const auto q = S::Look(values, coder.Code(x));
      const auto weighted = S::Mul(S::Mul(x, x), q);
      float by_x[S::kWidth], by_q[S::kWidth];
      S::Store(by_x, S::Mul(weighted, x));
      S::Store(by_q, S::Mul(weighted, q));
      for (int64_t j = 0; j < n; ++j) {
        qx += by_x[j];
        qq += by_q[j];
      }
      p += n * Type::kBits / 8;
    }
    sum_qx[g] = qx;
    sum_qq[g] = qq;
  }
}

template <typename S>
void RowFits(DataType type, const void* src, int64_t index, int64_t group, int64_t groups,
             const QuantizeParameters& how, float* sum_qx, float* sum_qq) {
  WithNumbers<S>(type, [&](auto stored) {
    using Type = decltype(stored);
    RowFitsOf<S, Type>(NumberAt<Type>(src, index), group, groups, how, sum_qx, sum_qq);
  });
}

// A word holds the codes of one byte, the first lowest.
inline void Pack(int bits, const uint8_t* __restrict codes, int64_t n, uint8_t* __restrict out) {
  if (bits == 4) {
    for (int64_t i = 0; i < n / 2; ++i) {
      uint16_t word;
      __builtin_memcpy(&word, codes + 2 * i, sizeof(word));
      out[i] = static_cast<uint8_t>((word & 0xf) | (word >> 4 & 0xf0));
    }
    return;
  }
  for (int64_t i = 0; i < n / 4; ++i) {
    uint32_t word;
    __builtin_memcpy(&word, codes + 4 * i, sizeof(word));
    out[i] = static_cast<uint8_t>((word & 0x3) | (word >> 6 & 0xc) | (word >> 12 & 0x30) |
                                  (word >> 18 & 0xc0));
  }
}

template <typename S>
constexpr QuantizeKernels kQuantizeKernels = {
    RowRanges<S>, ColumnRanges<S>, Parameters, RowCodes<S>, ColumnCodes<S>, RowFits<S>, Pack,
    Convert<S>,
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_QUANTIZE_H_
