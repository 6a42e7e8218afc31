// The codes of numbers, over a vector wrapper such as simd.h's: a coder per way of computing
// them, for the loops of quantize.h. A coder's Group has the parameters of a group in all lanes, or
// those of a group per lane; codes are integers that are not clamped yet, which is the packer's.
#ifndef KVANT_KERNELS_CPU_ISA_QUANTIZE_CODES_H_
#define KVANT_KERNELS_CPU_ISA_QUANTIZE_CODES_H_

#include <cstdint>
#include <type_traits>

#include "kvant/kernels/cpu/quantize_kernels.h"

namespace kvant::cpu {
namespace {

// Where the last place is 1, so that adding it rounds to an integer, ties to even, whose low bits
// are those of the sum.
inline constexpr float kRounder = 12582912.f;
// Corrected quotients are no larger in magnitude, so that they have integers (see Parameters).
inline constexpr float kMostQuotient = 0x1p29f;

enum class Quotient : uint8_t {
  kDivision,
  kCorrected,  // the product with the reciprocal, corrected by its remainder
  kProduct,    // ggml's
};

// What a code is the rounding of.
template <typename S, ZeroPoints kZeroPoints, Quotient kQuotient>
struct Quotients {
  using Vector = typename S::Vector;
  Vector scale, reciprocal, zero_point;

  template <typename LoadLanes>
  Quotients(const QuantizeParameters& how, LoadLanes load) {
    if constexpr (kQuotient != Quotient::kProduct) scale = load(how.scales);
    if constexpr (kQuotient != Quotient::kDivision) reciprocal = load(how.reciprocals);
    if constexpr (kZeroPoints != ZeroPoints::kNone) zero_point = load(how.values);
  }

  Vector Of(Vector x) const {
    if constexpr (kZeroPoints == ZeroPoints::kReal && kQuotient == Quotient::kDivision) {
      // Large numbers by halves, whose sum with the zero point f32 holds.
      const Vector half =
          S::Add(S::ZeroBelow(S::Abs(scale), S::Set1(1), S::Set1(-0.5f)), S::Set1(1));
      return S::Div(S::Add(S::Mul(x, half), S::Mul(zero_point, half)), S::Mul(scale, half));
    }
    if constexpr (kZeroPoints == ZeroPoints::kReal) x = S::Add(x, zero_point);
    if constexpr (kQuotient == Quotient::kDivision) return S::Div(x, scale);
    const Vector near = S::Mul(x, reciprocal);
    if constexpr (kQuotient == Quotient::kProduct) return near;
    return S::Fma(S::Fnma(near, scale, x), reciprocal, near);
  }
};

template <typename S, ZeroPoints kZeroPoints, Quotient kQuotient>
struct IntegerCoder {
  using Vector = typename S::Vector;
  using Index = typename S::Index;
  using Group = Quotients<S, kZeroPoints, kQuotient>;

  static constexpr int kBits = 0;  // any

  explicit IntegerCoder(const QuantizeParameters&) {}

  Index Code(const Group& group, Vector x) const {
    const Vector quotient = group.Of(x);
    // Corrected ones are no larger. What is as large is far beyond any code, also with the zero
    // point.
    const Vector most = S::Set1(kMostQuotient), least = S::Set1(-kMostQuotient);
    Index code = S::NearestInteger(
        kQuotient == Quotient::kDivision ? S::Min(S::Max(quotient, least), most) : quotient);
    if constexpr (kZeroPoints == ZeroPoints::kCodes) {
      code = S::AddIndex(code, S::NearestInteger(group.zero_point));
    }
    if constexpr (kQuotient == Quotient::kDivision) {
      code = S::IndexFromBits(S::ZeroNan(quotient, S::BitsOfIndex(code)));
    }
    return code;
  }
};

// To an 8-bit format: bits of its mantissa, bias, and the code of infinity, below which is that of
// the largest number.
template <int kMantissa, int kBias, uint32_t kInfinity, uint32_t kNan>
struct Float8 {
  // What is beyond the largest number becomes that, or infinity.
  static uint8_t Encode(float x, bool saturates) {
    const uint32_t beyond = saturates ? kInfinity - 1 : kInfinity;
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof(bits));
    const uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    constexpr int kShift = 23 - kMantissa;
    const uint32_t even = magnitude >> kShift & 1;
    const uint32_t normal = ((magnitude + (1u << (kShift - 1)) - 1 + even) >> kShift) -
                            (static_cast<uint32_t>(127 - kBias) << kMantissa);
    // Below the normal numbers, the last place is that of the smallest.
    constexpr uint32_t kUnit = static_cast<uint32_t>(127 + 23 + 1 - kBias - kMantissa) << 23;
    float unit, small;
    __builtin_memcpy(&unit, &kUnit, sizeof(unit));
    __builtin_memcpy(&small, &magnitude, sizeof(small));
    small += unit;
    uint32_t subnormal;
    __builtin_memcpy(&subnormal, &small, sizeof(subnormal));
    subnormal -= kUnit;
    uint32_t code = magnitude < (static_cast<uint32_t>(128 - kBias) << 23) ? subnormal : normal;
    code = code >= kInfinity || magnitude >= 0x7f800000 ? beyond : code;
    code = magnitude > 0x7f800000 ? kNan : code;
    return static_cast<uint8_t>(sign | code);
  }
};
// Without infinity, which becomes NaN.
using E4M3 = Float8<3, 7, 0x7f, 0x7f>;
using E5M2 = Float8<2, 15, 0x7c, 0x7e>;

template <typename S, typename Format, Quotient kQuotient>
struct FloatCoder {
  using Group = Quotients<S, ZeroPoints::kNone, kQuotient>;

  static constexpr int kBits = 8;

  explicit FloatCoder(const QuantizeParameters&) {}

  typename S::Index Code(const Group& group, typename S::Vector x) const {
    float quotients[S::kWidth], numbers[S::kWidth];
    S::Store(quotients, group.Of(x));
    S::Store(numbers, x);
    uint8_t codes[S::kWidth];
    for (int i = 0; i < S::kWidth; ++i) {
      // Quotients that are corrected are of finite numbers (see Parameters).
      const bool finite =
          kQuotient == Quotient::kCorrected || __builtin_fabsf(numbers[i]) <= __FLT_MAX__;
      codes[i] = Format::Encode(quotients[i], finite);
    }
    return S::IndexU8(S::template LoadRaw<S::kWidth>(codes));
  }
};

// A lane descends the codebook's tree: its upper four levels from registers.
template <typename S, int bits, Quotient kQuotient>
struct CodebookCoder {
  using Vector = typename S::Vector;
  using Index = typename S::Index;
  using Group = Quotients<S, ZeroPoints::kNone, kQuotient>;
  static constexpr int kBits = bits;
  typename S::Table upper, lower;
  const float* nodes;

  explicit CodebookCoder(const QuantizeParameters& how)
      : upper(S::LoadTable(how.codebook->nodes, 16)),
        lower(S::LoadTable(how.codebook->nodes + 16, 16)),
        nodes(how.codebook->nodes) {}

  Vector Node(Index at, int level) const {
    if (level < 4) return S::Look(upper, at);
    return kBits == 4 ? S::Look(lower, at) : S::Gather(nodes, at);
  }

  Index Code(const Group& group, Vector x) const {
    const Vector quotient = group.Of(x);
    Index at = S::IndexOne();
#pragma GCC unroll 8
    for (int level = 0; level < kBits; ++level) at = S::Descend(at, quotient, Node(at, level));
    const Vector code = Node(at, kBits);
    // A product is NaN where the code is to be the leftmost.
    return S::IndexFromBits(kQuotient == Quotient::kDivision ? S::ZeroNan(quotient, code) : code);
  }
};

// q8_0, q4_0 and q4_1.
template <typename S, GgmlFormat kFormat>
struct GgmlCoder {
  using Vector = typename S::Vector;
  struct Group {
    Quotients<S, ZeroPoints::kNone, Quotient::kProduct> quotients;
    Vector offset;

    template <typename LoadLanes>
    Group(const QuantizeParameters& how, LoadLanes load) : quotients(how, load) {
      if constexpr (kFormat == GgmlFormat::kQ4_1) offset = load(how.offsets);
    }
  };

  static constexpr int kBits = kFormat == GgmlFormat::kQ8_0 ? 8 : 4;

  explicit GgmlCoder(const QuantizeParameters&) {}

  static Vector RoundEven(Vector x) {
    return S::Sub(S::Add(x, S::Set1(kRounder)), S::Set1(kRounder));
  }
  // Halves away from 0.
  static Vector Round(Vector x) {
    const Vector even = RoundEven(x), half = S::Set1(0.5f);
    const Vector rest = S::Sub(x, even), minus = S::Sub(S::Zero(), x);
    const Vector up = S::ZeroBelow(x, S::Zero(), S::Set1(1));
    const Vector down = S::ZeroBelow(minus, S::Zero(), S::Set1(1));
    const Vector high = S::Add(even, S::ZeroBelow(rest, half, up));
    return S::Sub(high, S::ZeroBelow(S::Sub(S::Zero(), rest), half, down));
  }
  // x >= 0 truncated, at most 15.
  static Vector Nibble(Vector x) {
    const Vector even = RoundEven(x), one = S::Set1(1);
    const Vector floor = S::Add(S::Sub(even, one), S::ZeroBelow(x, even, one));
    return S::Min(floor, S::Set1(15));
  }

  typename S::Index Code(const Group& group, Vector x) const {
    if constexpr (kFormat == GgmlFormat::kQ4_1) x = S::Sub(x, group.offset);
    const Vector product = group.quotients.Of(x);
    // Beyond the codes only where the scale or minimum is the largest of its type.
    constexpr float kLow = kFormat == GgmlFormat::kQ8_0   ? -128
                           : kFormat == GgmlFormat::kQ4_0 ? -8
                                                          : 0;
    constexpr float kHigh = kFormat == GgmlFormat::kQ8_0   ? 127
                            : kFormat == GgmlFormat::kQ4_0 ? 8
                                                           : 15;
    const Vector within = S::Min(S::Max(product, S::Set1(kLow)), S::Set1(kHigh));
    Vector code;
    if constexpr (kFormat == GgmlFormat::kQ8_0) code = Round(within);
    if constexpr (kFormat == GgmlFormat::kQ4_0) {
      code = S::Sub(Nibble(S::Add(within, S::Set1(8.5f))), S::Set1(8));
    }
    if constexpr (kFormat == GgmlFormat::kQ4_1) code = Nibble(S::Add(within, S::Set1(0.5f)));
    return S::NearestInteger(S::ZeroNan(product, code));
  }
};

// Codes as they are stored: clamped to the range of their type, 8 / bits to a byte, four vectors of
// them at a time.
template <typename S>
struct Packer {
  using Raw = typename S::Raw;
  static constexpr int64_t kBlock = 4 * S::kWidth;
  int bits;
  Raw offset, limit, signs;

  // `stored_bits`: how.bits, or 8.
  Packer(const QuantizeParameters& how, int stored_bits)
      : bits(stored_bits),
        offset(S::Words(-how.lowest)),
        limit(S::Bytes((1 << how.bits) - 1)),
        signs(S::Bytes(how.lowest == 0 ? 0 : SignsOf(how.bits, stored_bits))) {}

  static int SignsOf(int bits, int stored_bits) {
    int signs = 0;
    for (int bit = bits - 1; bit < 8; bit += stored_bits) signs |= 1 << bit;
    return signs;
  }
  // Calls f(a constant with the value of bits), of those that codes of `own` bits (0: any) may
  // take.
  template <int own, typename F>
  void WithBits(F f) const {
    if constexpr (own == 0 || own == 4) {
      if (bits == 4) return f(std::integral_constant<int, 4>());
    }
    if constexpr (own == 0 || own == 2) {
      if (bits == 2) return f(std::integral_constant<int, 2>());
    }
    f(std::integral_constant<int, 8>());
  }

  // kBlock codes; or the first n of them.
  template <int kBits>
  void Store(const typename S::Index (&codes)[4], uint8_t* out) const {
    const Raw clamped = S::ClampToBytes(codes, offset, limit);
    const Raw packed = S::XorRaw(S::template PackBytes<kBits>(clamped), signs);
    S::template StoreRaw<kBlock * kBits / 8>(out, packed);
  }
  void StoreSome(const typename S::Index (&codes)[4], int64_t n, uint8_t* out) const {
    uint8_t block[kBlock];
    WithBits<0>([&](auto bits_of) { Store<bits_of()>(codes, block); });
    const int64_t size = n * bits / 8;
    int64_t i = 0;
    if constexpr (kBlock >= 8) {
      for (; i + 8 <= size; i += 8) __builtin_memcpy(out + i, block + i, 8);
    }
    for (; i < size; ++i) out[i] = block[i];
  }
};

template <typename T>
struct TypeTag {
  using type = T;
};

template <typename S, int kBits, typename F>
void WithCodebookCoder(const QuantizeParameters& how, F f) {
  if (how.ggml != GgmlFormat::kNone) {
    return f(TypeTag<CodebookCoder<S, kBits, Quotient::kProduct>>());
  }
  if (how.divide) return f(TypeTag<CodebookCoder<S, kBits, Quotient::kDivision>>());
  f(TypeTag<CodebookCoder<S, kBits, Quotient::kCorrected>>());
}

template <typename S, Quotient kQuotient, typename F>
void WithRoundingCoder(const QuantizeParameters& how, F f) {
  if (how.codes == kF8E4M3) return f(TypeTag<FloatCoder<S, E4M3, kQuotient>>());
  if (how.codes == kF8E5M2) return f(TypeTag<FloatCoder<S, E5M2, kQuotient>>());
  switch (how.zero_points) {
    case ZeroPoints::kNone:
      return f(TypeTag<IntegerCoder<S, ZeroPoints::kNone, kQuotient>>());
    case ZeroPoints::kCodes:
      return f(TypeTag<IntegerCoder<S, ZeroPoints::kCodes, kQuotient>>());
    case ZeroPoints::kReal:
      return f(TypeTag<IntegerCoder<S, ZeroPoints::kReal, kQuotient>>());
  }
}

// Calls f(TypeTag<the coder that `how` asks for>()).
template <typename S, typename F>
void WithCoder(const QuantizeParameters& how, F f) {
  if (how.codebook != nullptr) {
    if (how.codebook->bits == 2) return WithCodebookCoder<S, 2>(how, f);
    if (how.codebook->bits == 4) return WithCodebookCoder<S, 4>(how, f);
    return WithCodebookCoder<S, 8>(how, f);
  }
  switch (how.ggml) {
    case GgmlFormat::kQ8_0:
      return f(TypeTag<GgmlCoder<S, GgmlFormat::kQ8_0>>());
    case GgmlFormat::kQ4_0:
      return f(TypeTag<GgmlCoder<S, GgmlFormat::kQ4_0>>());
    case GgmlFormat::kQ4_1:
      return f(TypeTag<GgmlCoder<S, GgmlFormat::kQ4_1>>());
    case GgmlFormat::kIq4Nl:
    case GgmlFormat::kNone:
      break;
  }
  if (how.divide) return WithRoundingCoder<S, Quotient::kDivision>(how, f);
  WithRoundingCoder<S, Quotient::kCorrected>(how, f);
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_QUANTIZE_CODES_H_
