// The products on codes of kernels/cpu/codes.h, for any instruction set that has the primitives of
// codes_avx512.h.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_KERNELS_H_
#define KVANT_KERNELS_CPU_ISA_CODES_KERNELS_H_

#include <cstdint>

#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/isa/codes_common.h"
#include "kvant/kernels/cpu/isa/codes_errors.h"
#include "kvant/kernels/cpu/isa/codes_scores.h"
#include "kvant/kernels/cpu/isa/codes_weights.h"
#include "kvant/kernels/cpu/isa/load.h"

namespace kvant::cpu {
namespace {

// Turns scales and zero points into scales and biases, a vector at a time.
template <typename S>
class BiasMaker {
 public:
  using F = typename S::Vector;
  BiasMaker(const CodeBiases& how, bool has_points)
      : how_(how), has_points_(has_points), shift_(S::Set1(how.offset)) {}

  // Magnitudes compare as their bits do, and infinity and NaN are above all others.
  void AddScale(F scale) { most_scale_ = S::MaxKey(most_scale_, S::MagnitudeKey(scale)); }
  // What Bias is where zero points are integers of up to 8 bits, in codes.
  template <bool kInCodes>
  F BiasOfInteger(F scale, F point) {
    low_ = S::Min(low_, point);
    high_ = S::Max(high_, point);
    const F in_codes = S::Add(point, shift_);
    return kInCodes ? in_codes : S::Mul(in_codes, scale);
  }
  F Bias(F scale, F point) {
    const F unit = how_.in_codes ? S::Set1(1.f) : scale;
    F bias = S::Mul(shift_, unit);
    if (has_points_) {
      // Real zero points are multiplied by the scale already.
      const F in_unit = !how_.real      ? S::Mul(point, unit)
                        : how_.in_codes ? NotNan(S::Div(point, scale))
                                        : point;
      bias = S::Add(in_unit, bias);
      bias_nans_ = S::Fma(point, S::Zero(), bias_nans_);
    }
    bias_nans_ = S::Fma(bias, S::Zero(), bias_nans_);
    const F x = how_.in_codes ? bias : point;
    low_ = S::Min(low_, x);
    high_ = S::Max(high_, x);
    return bias;
  }
  CodeLimits limits() const {
    CodeLimits limits = {.finite = S::SumOf(S::Fma(most_scale_, S::Zero(), bias_nans_)) == 0.f,
                         .scale = S::MaxOf(most_scale_)};
    const float low = -S::MaxOf(S::Sub(S::Zero(), low_)), high = S::MaxOf(high_);
    if (low <= high) limits.low = low, limits.high = high;
    return limits;
  }
  // Those where BiasOfInteger made the biases.
  CodeLimits LimitsOfIntegers() const {
    CodeLimits all = limits();
    const float low = all.low + how_.offset, high = all.high + how_.offset;
    if (how_.in_codes) {
      all.low = low;
      all.high = high;
    } else {
      const float most = -low > high ? -low : high;
      all.finite = all.finite && __builtin_isfinite(all.scale * most);
    }
    return all;
  }

 private:
  // Beyond the last token zero points and scales are 0.
  static F NotNan(F x) { return S::ZeroNan(x, x); }

  const CodeBiases how_;
  const bool has_points_;
  const F shift_;
  // Chains of their own, so that one element does not wait for the last.
  F bias_nans_ = S::Zero(), most_scale_ = S::Zero();
  F low_ = S::Set1(__builtin_inff()), high_ = S::Set1(-__builtin_inff());
};

template <typename S>
CodeLimits Biases(const float* scales, const float* zero_points, const CodeBiases& how, int64_t n,
                  float* biases) {
  BiasMaker<S> maker(how, zero_points != nullptr);
  for (int64_t i = 0; i < n; i += S::kWidth) {
    const auto scale = LoadPart<S>(scales + i, n - i);
    maker.AddScale(scale);
    if (biases == nullptr) continue;
    const auto point = zero_points == nullptr ? S::Zero() : LoadPart<S>(zero_points + i, n - i);
    StorePart<S>(biases + i, n - i, maker.Bias(scale, point));
  }
  return maker.limits();
}

// Calls f(Stored<...>()) for a type that scales have, or zero points.
template <typename S, typename F>
void WithScales(DataType type, F f) {
  if (type == kF16) return f(Stored<16, S::FromF16>());
  if (type == kBF16) return f(Stored<16, S::FromBF16>());
  f(Stored<32, S::FromF32>());
}
template <typename S, typename F>
void WithPoints(DataType type, F f) {
  if (type == kS8) return f(Stored<8, S::FromS8>());
  if (type == kU8) return f(Stored<8, S::FromU8>());
  if (type == kS4) return f(Stored<4, S::FromS4>());
  if (type == kU4) return f(Stored<4, S::FromU4>());
  WithScales<S>(type, f);
}

// v holds kLists lists, one after another, of the elements that are equal modulo kLists; until
// there are kGroups. Lists are halved while their vectors are even in number, and then dealt out.
template <typename S, int kGroups, int kLists = 1>
inline __attribute__((always_inline)) void SplitGroups(typename S::Vector (&v)[kGroups]) {
  constexpr int kLength = kGroups / kLists;
  typename S::Vector split[kGroups];
  if constexpr (kLength == 1) {
    return;
  } else if constexpr (kLength % 2 == 0) {
    for (int list = 0; list < kLists; ++list) {
      for (int i = 0; i < kLength; i += 2) {
        const int at = list * kLength / 2 + i / 2;
        S::Unzip(v[list * kLength + i], v[list * kLength + i + 1], &split[at],
                 &split[at + kGroups / 2]);
      }
    }
    for (int i = 0; i < kGroups; ++i) v[i] = split[i];
    SplitGroups<S, kGroups, 2 * kLists>(v);
  } else {
    for (int list = 0; list < kLists; ++list) {
      typename S::Vector lists[kLength];
      for (int i = 0; i < kLength; ++i) lists[i] = v[list * kLength + i];
      S::Deal(lists);
      for (int i = 0; i < kLength; ++i) split[i * kLists + list] = lists[i];
    }
    for (int i = 0; i < kGroups; ++i) v[i] = split[i];
  }
}

// kGroups elements of each of kWidth tokens as floats, a vector per group.
template <typename S, typename Type, int kGroups>
inline __attribute__((always_inline)) void LoadTransposed(const StoredParameters& stored,
                                                          int64_t token,
                                                          typename S::Vector (&v)[kGroups]) {
  constexpr int kBytes = S::kWidth * Type::kBits / 8;
  const uint8_t* p =
      stored.blocks[token / kPageUnit] + token % kPageUnit * kGroups * Type::kBits / 8;
  if constexpr (S::template kSplitsStored<Type::kBits, kGroups>) {
    typename S::Raw raw[kGroups];
    S::template LoadSplit<Type::kBits>(p, raw);
    for (int i = 0; i < kGroups; ++i) v[i] = Type::kConvert(raw[i]);
  } else {
    for (int i = 0; i < kGroups; ++i) {
      v[i] = Type::kConvert(S::template LoadRaw<kBytes>(p + i * kBytes));
    }
    SplitGroups<S, kGroups>(v);
  }
}

template <typename S, typename Type, int kGroups>
void TransposeScales(const StoredParameters& stored, BiasMaker<S>& maker, int64_t columns,
                     float* scales) {
  for (int64_t t = 0; t < columns; t += S::kWidth) {
    typename S::Vector v[kGroups];
    LoadTransposed<S, Type>(stored, t, v);
    for (int g = 0; g < kGroups; ++g) {
      maker.AddScale(v[g]);
      S::Store(scales + g * kTokenTile + t, v[g]);
    }
  }
}

// make(scale, point) is a bias.
template <typename S, typename Type, int kGroups, typename Make>
void TransposePoints(const StoredParameters& stored, int64_t columns, const float* scales,
                     Make make, float* biases) {
  for (int64_t t = 0; t < columns; t += S::kWidth) {
    typename S::Vector v[kGroups];
    LoadTransposed<S, Type>(stored, t, v);
    for (int g = 0; g < kGroups; ++g) {
      const int64_t at = g * kTokenTile + t;
      S::Store(biases + at, make(S::Load(scales + at), v[g]));
    }
  }
}

template <typename S, int kGroups>
CodeLimits TransposeGroups(const StoredParameters& stored_scales,
                           const StoredParameters& stored_points, const CodeBiases& how,
                           int64_t columns, float* scales, float* biases) {
  BiasMaker<S> maker(how, stored_points.present());
  WithScales<S>(stored_scales.type, [&](auto type) {
    TransposeScales<S, decltype(type), kGroups>(stored_scales, maker, columns, scales);
  });
  if (stored_points.present()) {
    CodeLimits limits;
    WithPoints<S>(stored_points.type, [&](auto type) {
      using Type = decltype(type);
      const auto transpose = [&](auto make) {
        TransposePoints<S, Type, kGroups>(stored_points, columns, scales, make, biases);
      };
      if constexpr (Type::kBits <= 8) {
        if (!how.real) {
          if (how.in_codes) {
            transpose([&](auto scale, auto point) {
              return maker.template BiasOfInteger<true>(scale, point);
            });
          } else {
            transpose([&](auto scale, auto point) {
              return maker.template BiasOfInteger<false>(scale, point);
            });
          }
          limits = maker.LimitsOfIntegers();
          return;
        }
      }
      transpose([&](auto scale, auto point) { return maker.Bias(scale, point); });
      limits = maker.limits();
    });
    return limits;
  } else if (biases != nullptr) {
    for (int64_t g = 0; g < kGroups; ++g) {
      for (int64_t i = g * kTokenTile; i < g * kTokenTile + columns; i += S::kWidth) {
        S::Store(biases + i, maker.Bias(S::Load(scales + i), S::Zero()));
      }
    }
  }
  return maker.limits();
}

template <typename S>
CodeLimits TransposeParameters(const StoredParameters& scales_of, const StoredParameters& points_of,
                               const CodeBiases& how, int64_t columns, int64_t groups,
                               float* scales, float* biases) {
  constexpr decltype(&TransposeGroups<S, 1>) kOfGroups[] = {
      TransposeGroups<S, 1>, TransposeGroups<S, 2>, TransposeGroups<S, 3>, TransposeGroups<S, 4>,
      TransposeGroups<S, 5>, TransposeGroups<S, 6>, TransposeGroups<S, 7>, TransposeGroups<S, 8>,
  };
  const auto run = kOfGroups[groups - 1];
  return run(scales_of, points_of, how, columns, scales, biases);
}

// `floats` may be null.
template <typename S, auto values, const FloatCodeKernels* floats, auto prepare = Prepare<S>,
          auto scores = Scores<S>>
constexpr CodeKernels kCodeKernels = {
    prepare,   scores,    TransposeAllCodes<S>,   Reach<S>,   Norms<S>,
    Spread<S>, Biases<S>, TransposeParameters<S>, Weights<S>, values,
    Costs<S>,  floats};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_KERNELS_H_
