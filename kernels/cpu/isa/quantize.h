// QuantizeKernels over a vector wrapper such as simd.h's.
#ifndef KVANT_KERNELS_CPU_ISA_QUANTIZE_H_
#define KVANT_KERNELS_CPU_ISA_QUANTIZE_H_

#include <cstdint>

#include "kvant/kernels/cpu/isa/convert.h"
#include "kvant/kernels/cpu/isa/quantize_codes.h"
#include "kvant/kernels/cpu/isa/quantize_ranges.h"
#include "kvant/kernels/cpu/quantize_kernels.h"

namespace kvant::cpu {
namespace {

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
  // Quotients by reciprocals need both to be ordinary numbers, remainders included; and are to be
  // rounded to integers.
  int ordinary = 1;
  for (int64_t i = 0; i < n; ++i) {
    const float low = __builtin_fabsf(min[i]), high = __builtin_fabsf(max[i]);
    float most = low > high ? low : high;
    if constexpr (kZeroPoints == ZeroPoints::kReal) most += __builtin_fabsf(zero_points[i]);
    ordinary &= (scales[i] >= 0x1p-100f ? 1 : 0) & (scales[i] <= 0x1p100f ? 1 : 0) &
                (most <= kMostQuotient * scales[i] ? 1 : 0);
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

// A byte holds the first of its codes lowest.
inline void PackBytes(int bits, const uint8_t* __restrict codes, int64_t bytes,
                      uint8_t* __restrict out) {
  if (bits == 4) {
    for (int64_t i = 0; i < bytes; ++i) {
      uint16_t word;
      __builtin_memcpy(&word, codes + 2 * i, sizeof(word));
      out[i] = static_cast<uint8_t>((word & 0xf) | (word >> 4 & 0xf0));
    }
    return;
  }
  for (int64_t i = 0; i < bytes; ++i) {
    uint32_t word;
    __builtin_memcpy(&word, codes + 4 * i, sizeof(word));
    out[i] = static_cast<uint8_t>((word & 0x3) | (word >> 6 & 0xc) | (word >> 12 & 0x30) |
                                  (word >> 18 & 0xc0));
  }
}

[[gnu::noinline]] inline void Pack(int bits, const uint8_t* codes, int64_t n, void* out,
                                   int64_t out_index) {
  const int64_t per_byte = 8 / bits;
  uint8_t* to = static_cast<uint8_t*>(out) + out_index / per_byte;
  if (bits == 8) {
    __builtin_memcpy(to, codes, n);
    return;
  }
  const auto merge = [bits](uint8_t code, int64_t place, uint8_t* byte) {
    const int64_t shift = place * bits;
    const int mask = ((1 << bits) - 1) << shift;
    *byte = static_cast<uint8_t>((*byte & ~mask) | (code << shift & mask));
  };
  int64_t i = 0;
  if (int64_t place = out_index % per_byte; place != 0) {
    for (; place < per_byte && i < n; ++place) merge(codes[i++], place, to);
    ++to;
  }
  const int64_t whole = (n - i) / per_byte;
  PackBytes(bits, codes + i, whole, to);
  i += whole * per_byte;
  for (int64_t place = 0; i < n; ++place) merge(codes[i++], place, to + whole);
}

// While codes are found, those lines are prefetched that are not while ranges are.
inline constexpr int64_t kLine = 64;

// The first n of four vectors.
template <typename S, typename Type>
void LoadBlock(const uint8_t* p, int64_t n, typename S::Vector (&x)[4]) {
  constexpr int64_t kBytes = S::kWidth * Type::kBits / 8;
#pragma GCC unroll 4
  for (int64_t j = 0; j < 4; ++j) {
    const int64_t left = n - j * S::kWidth;
    if (left >= S::kWidth) {
      x[j] = LoadNumbers<S, Type>(p + j * kBytes);
    } else {
      x[j] = left > 0 ? LoadSomeNumbers<S, Type>(p + j * kBytes, left) : S::Zero();
    }
  }
}

// Codes of groups that are whole vectors, or of a part of one group, vector after vector;
// parameters are those from group g on.
template <typename S, typename Coder>
struct RowCoder {
  using Vector = typename S::Vector;
  const Coder& coder;
  const QuantizeParameters how;
  const int64_t group;
  int64_t g;
  int64_t left = group;

  void Codes(const Vector (&x)[4], typename S::Index (&codes)[4]) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const auto at = [this](const float* values) { return S::Set1(values[g]); };
      codes[j] = coder.Code(typename Coder::Group(how, at), x[j]);
      left -= S::kWidth;
      g += left == 0 ? 1 : 0;
      left = left == 0 ? group : left;
    }
  }
};

// Of n numbers side by side, which are whole groups of whole vectors, or a part of one group. With
// kSlack, up to a block beyond may be overwritten.
template <typename S, typename Type, bool kSlack, typename Coder>
void RunCodes(const Coder& coder, const Packer<S>& packer, const QuantizeParameters& how,
              const uint8_t* p, int64_t n, int64_t group, int64_t g, uint8_t* out) {
  constexpr int64_t kBlock = Packer<S>::kBlock;
  RowCoder<S, Coder> row{coder, how, group, g};
  const int64_t rest = n % kBlock;
  packer.template WithBits<Coder::kBits>([&](auto bits) {
    const Packer<S> pack = packer;
    RowCoder<S, Coder> blocks = row;
    for (const uint8_t* const end = out + (n - rest) * bits() / 8; out != end;) {
      typename S::Vector x[4];
      typename S::Index codes[4];
      LoadBlock<S, Type>(p, kBlock, x);
      blocks.Codes(x, codes);
      pack.template Store<bits()>(codes, out);
      p += kBlock * Type::kBits / 8;
      out += kBlock * bits() / 8;
    }
    row.g = blocks.g;
    row.left = blocks.left;
  });
  if (rest == 0) return;
  typename S::Vector x[4];
  typename S::Index codes[4];
  LoadBlock<S, Type>(p, rest, x);
  row.Codes(x, codes);
  if constexpr (kSlack) {
    packer.template Store<8>(codes, out);
  } else {
    packer.StoreSome(codes, rest, out);
  }
}

// Where groups are not whole vectors, or codes begin or end within a byte: a byte for each code
// first, then packed.
template <typename S, typename Type, typename Coder>
void RunCodesApart(const Coder& coder, const QuantizeParameters& how, const uint8_t* p,
                   int64_t groups, int64_t group, int64_t g, void* out, int64_t index) {
  constexpr int64_t kBuffer = 1024;
  const Packer<S> packer(how, 8);
  uint8_t buffer[kBuffer + Packer<S>::kBlock];
  int64_t filled = 0;
  for (const int64_t end = g + groups; g < end; ++g) {
    for (int64_t i = 0; i < group;) {
      const int64_t n = group - i < kBuffer - filled ? group - i : kBuffer - filled;
      RunCodes<S, Type, true>(coder, packer, how, p, n, group, g, buffer + filled);
      i += n;
      p += n * Type::kBits / 8;
      filled += n;
      if (filled == kBuffer || (i == group && g + 1 == end)) {
        Pack(how.bits, buffer, filled, out, index);
        index += filled;
        filled = 0;
      }
    }
  }
}

template <typename S, typename Type, typename Coder>
void RowCodesOf(const NumberRows& rows, const QuantizeParameters& how, const CodeRuns& out) {
  const Coder coder(how);
  const Packer<S> packer(how, how.bits);
  const int64_t n = rows.run * rows.group;
  const uint8_t* p = NumberAt<Type>(rows.src, rows.index);
  int64_t index = out.index;
  for (int64_t g = 0; g < rows.groups; g += rows.run) {
    const bool whole_bytes = index * how.bits % 8 == 0 && n * how.bits % 8 == 0;
    if (whole_bytes && (rows.run == 1 || rows.group % S::kWidth == 0)) {
      RunCodes<S, Type, false>(coder, packer, how, p, n, rows.group, g,
                               static_cast<uint8_t*>(out.codes) + index * how.bits / 8);
    } else {
      RunCodesApart<S, Type>(coder, how, p, rows.run, rows.group, g, out.codes, index);
    }
    p += rows.step * Type::kBits / 8;
    index += out.step;
  }
}

// A block of columns, line by line, while their parameters are in registers.
template <typename S, typename Type, int kBits, typename Coder, typename Group>
void ColumnBlockCodes(const Coder coder, const Packer<S> packer, const Group (&groups)[4],
                      int64_t ahead, const uint8_t* p, int64_t stride, int64_t lines, uint8_t* out,
                      int64_t out_stride) {
  constexpr int64_t kBlock = Packer<S>::kBlock;
  for (int64_t i = 0; i < lines; ++i, p += stride, out += out_stride) {
    typename S::Vector x[4];
    Prefetch<S>(p + ahead, kBlock * Type::kBits / 8);
    LoadBlock<S, Type>(p, kBlock, x);
    typename S::Index codes[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) codes[j] = coder.Code(groups[j], x[j]);
    packer.template Store<kBits>(codes, out);
  }
}

// The same of n columns of codes that may begin and end within a byte.
template <typename S, typename Type, typename Coder, typename Group>
void ColumnBlockCodesApart(const Coder& coder, const QuantizeParameters& how,
                           const Group (&groups)[4], const uint8_t* p, int64_t stride,
                           int64_t lines, int64_t n, CodeRuns out) {
  const Packer<S> packer(how, 8);
  for (int64_t i = 0; i < lines; ++i, p += stride, out.index += out.step) {
    typename S::Vector x[4];
    LoadBlock<S, Type>(p, n, x);
    typename S::Index codes[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) codes[j] = coder.Code(groups[j], x[j]);
    uint8_t block[Packer<S>::kBlock];
    packer.template Store<8>(codes, block);
    Pack(how.bits, block, n, out.codes, out.index);
  }
}

template <typename S, typename Type, typename Coder>
void ColumnCodesOf(const NumberColumns& columns, const QuantizeParameters& how, CodeRuns out) {
  constexpr int64_t kBlock = Packer<S>::kBlock;
  const uint8_t* p = NumberAt<Type>(columns.src, columns.index);
  const int64_t stride = columns.stride * Type::kBits / 8, lines = columns.lines, n = columns.n;
  using Group = typename Coder::Group;
  const Coder coder(how);
  const Packer<S> packer(how, how.bits);
  const bool whole_bytes = out.index * how.bits % 8 == 0 && out.step * how.bits % 8 == 0;
  for (int64_t c = 0; c < n; c += kBlock) {
    const auto at = [c](int64_t j) {
      return [=](const float* values) { return S::Load(values + c + j * S::kWidth); };
    };
    const Group groups[4] = {Group(how, at(0)), Group(how, at(1)), Group(how, at(2)),
                             Group(how, at(3))};
    if (whole_bytes && n - c >= kBlock) {
      uint8_t* const to = static_cast<uint8_t*>(out.codes) + out.index * how.bits / 8;
      packer.template WithBits<Coder::kBits>([&](auto bits) {
        ColumnBlockCodes<S, Type, bits()>(coder, packer, groups, columns.ahead + kLine, p, stride,
                                          lines, to, out.step * bits() / 8);
      });
    } else {
      ColumnBlockCodesApart<S, Type>(coder, how, groups, p, stride, lines,
                                     n - c < kBlock ? n - c : kBlock, out);
    }
    p += kBlock * Type::kBits / 8;
    out.index += kBlock;
  }
}

// Calls f(Stored<...>(), a tag of a coder) for what `how` says.
template <typename S, typename F>
void WithNumbersAndCoder(DataType type, const QuantizeParameters& how, F f) {
  WithNumbers<S>(type,
                 [&](auto stored) { WithCoder<S>(how, [&](auto coder) { f(stored, coder); }); });
}

template <typename S>
void RowCodes(const NumberRows& rows, const QuantizeParameters& how, const CodeRuns& out) {
  WithNumbersAndCoder<S>(rows.type, how, [&](auto stored, auto coder) {
    RowCodesOf<S, decltype(stored), typename decltype(coder)::type>(rows, how, out);
  });
}

template <typename S>
void ColumnCodes(const NumberColumns& columns, const QuantizeParameters& how, const CodeRuns& out) {
  WithNumbersAndCoder<S>(columns.type, how, [&](auto stored, auto coder) {
    ColumnCodesOf<S, decltype(stored), typename decltype(coder)::type>(columns, how, out);
  });
}

template <typename S, typename Type>
void RowFitsOf(const uint8_t* p, int64_t group, int64_t groups, QuantizeParameters how,
               float* sum_qx, float* sum_qq) {
  using Coder = CodebookCoder<S, 4, Quotient::kProduct>;
  const Coder coder(how);
  const auto values = S::LoadTable(how.codebook->values, 16);
  for (int64_t g = 0; g < groups; ++g) {
    const typename Coder::Group at(how, [g](const float* factors) { return S::Set1(factors[g]); });
    float qx = sum_qx[g], qq = sum_qq[g];
    for (int64_t i = 0; i < group; i += S::kWidth) {
      const int64_t n = group - i < S::kWidth ? group - i : S::kWidth;
      const auto x = n < S::kWidth ? LoadSomeNumbers<S, Type>(p, n) : LoadNumbers<S, Type>(p);
      const auto q = S::Look(values, coder.Code(at, x));
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

template <typename S>
constexpr QuantizeKernels kQuantizeKernels = {
    RowRanges<S>,   ColumnRanges<S>, Parameters, RowCodes<S>,
    ColumnCodes<S>, RowFits<S>,      Pack,       Convert<S>,
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_QUANTIZE_H_
