// What the rounding of queries and weights to s16 can cost: see kernels/cpu/codes.h.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_ERRORS_H_
#define KVANT_KERNELS_CPU_ISA_CODES_ERRORS_H_

#include <cstdint>

#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/isa/codes_common.h"

namespace kvant::cpu {
namespace {

// |bias - middle * scale| + half * |scale|: the most that a code times its scale is from its zero.
template <typename S>
inline __attribute__((always_inline)) typename S::Vector MostOf(typename S::Vector scale,
                                                                typename S::Vector bias,
                                                                const CodeRange& range) {
  return S::Fma(S::Abs(scale), S::Set1(range.half),
                S::Abs(S::Fnma(scale, S::Set1(range.middle), bias)));
}

template <typename S>
float Reach(const CodeParameters& parameters, const CodeRange& range, int64_t columns,
            int64_t group, int64_t channels) {
  using F = typename S::Vector;
  const int vectors = static_cast<int>(columns / S::kWidth);
  F squares[kTokenTile / S::kWidth];
  for (F& square : squares) square = S::Zero();
  const float *scale = parameters.scales, *bias = parameters.biases;
  for (int64_t channel = 0; channel < channels; channel += group, scale += kTokenTile) {
    const F n = S::Set1(static_cast<float>(CodesMin(group, channels - channel)));
    for (int i = 0; i < vectors; ++i) {
      const F x = MostOf<S>(S::Load(scale + i * S::kWidth),
                            bias == nullptr ? S::Zero() : S::Load(bias + i * S::kWidth), range);
      squares[i] = S::Fma(S::Mul(x, n), x, squares[i]);
    }
    if (bias != nullptr) bias += kTokenTile;
  }
  for (int i = 1; i < vectors; ++i) squares[0] = S::Max(squares[0], squares[i]);
  return S::MaxOf(squares[0]);
}

// Sums over codes less the middle of all that have so many bits, which for signed ones is zero.
template <typename S, int kBits>
void NormsOf(const int32_t* transposed, const CodeColumns& columns,
             const CodeParameters& parameters, float middle, int64_t tokens, float* squares) {
  using I = typename S::I;
  using F = typename S::Vector;
  constexpr int64_t kPerDword = 32 / kBits;
  constexpr int kMiddle = kBits == 8 ? 0x80 ^ S::kByteFlip : 1 << (kBits - 1);
  // Of a last dword that is partly of channels, the rest becomes middles.
  const int64_t whole = columns.channels / kPerDword;
  const int used = static_cast<int>(columns.channels % kPerDword) * kBits;
  const uint32_t mask = (uint32_t{1} << used) - 1;
  const uint32_t all_middles = 0xffffffffu / ((1u << kBits) - 1) * kMiddle;
  const int64_t end = whole + (used != 0);
  for (int64_t token = 0; token < tokens; token += S::kWidth) {
    F total = S::Zero();
    int64_t c = 0;
    for (int64_t part = 0; part < columns.parts; ++part) {
      const int64_t first = c * kPerDword;
      I square = S::ZeroDwords(), sum = S::ZeroDwords();
      for (const int64_t last = CodesMin(columns.part_ends[part], end); c < last; ++c) {
        I word = S::ColumnAt(transposed, c, token);
        if (c == whole) {
          word = S::Xor(S::And(word, S::Dword(static_cast<int32_t>(mask))),
                        S::Dword(static_cast<int32_t>(all_middles & ~mask)));
        }
        ForEachOf<S::template kFields<kBits>>([&](auto k) __attribute__((always_inline)) {
          const I x = S::template Centred<kBits, k.value>(word);
          square = S::Dot(square, x, x);
          sum = S::Dot(sum, x, S::Ones());
        });
      }
      const int64_t n = CodesMin(c * kPerDword, columns.channels) - first;
      const int64_t at = columns.part_groups[part] * kTokenTile + token;
      const F scale = S::Load(parameters.scales + at);
      const F bias = parameters.biases == nullptr ? S::Zero() : S::Load(parameters.biases + at);
      // Of the zero point, too, what is left without the middle, and times the scale.
      const F zero = S::Fnma(scale, S::Set1(middle), bias);
      // scale^2 square - 2 scale zero sum + n zero^2
      const F twice = S::Mul(S::Set1(2.f), S::Mul(scale, S::ToFloat(sum)));
      const F of_zero =
          S::Fnma(zero, twice, S::Mul(S::Set1(static_cast<float>(n)), S::Mul(zero, zero)));
      total = S::Add(total, S::Fma(S::Mul(scale, scale), S::ToFloat(square), of_zero));
    }
    S::Store(squares + token, S::Max(total, S::Zero()));
  }
}

template <typename S>
void Norms(const int32_t* transposed, const CodeColumns& columns, const CodeParameters& parameters,
           float middle, int64_t tokens, float* squares) {
  const auto run = columns.bits == 8   ? NormsOf<S, 8>
                   : columns.bits == 4 ? NormsOf<S, 4>
                                       : NormsOf<S, 2>;
  run(transposed, columns, parameters, middle, tokens, squares);
}

template <typename S>
float Spread(const float* scales, const float* biases, int64_t n, int64_t groups,
             const CodeRange& range) {
  using F = typename S::Vector;
  F sum = S::Zero();
  for (int64_t i = 0; i < n; i += S::kWidth) {
    const int64_t left = n - i;
    const F scale = scales == nullptr ? S::Set1(1.f) : LoadPart<S>(scales + i, left);
    F most = S::Zero();
    for (int64_t g = 0; g < groups; ++g) {
      const F bias = biases == nullptr ? S::Zero() : LoadPart<S>(biases + g * kTokenTile + i, left);
      most = S::Max(most, MostOf<S>(scale, bias, range));
    }
    // Beyond the last there is nothing.
    if (left < S::kWidth) {
      alignas(64) float some[S::kWidth];
      S::Store(some, most);
      most = S::LoadSome(some, left);
    }
    sum = S::Fma(most, most, sum);
  }
  return S::SumOf(sum);
}

template <typename S>
void Costs(const float* weight_scales, const float* units, const float* lanes, int64_t rows,
           int64_t groups, float* errors, float* squares) {
  using F = typename S::Vector;
  for (int64_t r = 0; r < rows; ++r, weight_scales += groups, lanes += kSquareLanes) {
    F error = S::Zero();
    for (int64_t g = 0; g < groups; g += S::kWidth) {
      const F x = S::Mul(LoadPart<S>(weight_scales + g, groups - g), S::Set1(units[r]));
      error = S::Fma(x, x, error);
    }
    F square = S::Load(lanes);
    for (int i = S::kWidth; i < kSquareLanes; i += S::kWidth) {
      square = S::Add(square, S::Load(lanes + i));
    }
    errors[r] = S::SumOf(error);
    squares[r] = S::SumOf(square);
  }
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_ERRORS_H_
