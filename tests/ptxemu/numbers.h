// Arithmetic as the PTX ISA defines it, on one lane.
#ifndef KVANT_TESTS_PTXEMU_NUMBERS_H_
#define KVANT_TESTS_PTXEMU_NUMBERS_H_

#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace kvant::ptxemu {

inline float FloatOf(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t BitsOf(float value) { return std::bit_cast<uint32_t>(value); }

// NaN results of arithmetic have one form.
inline float Canonical(float x) { return x != x ? FloatOf(0x7fffffffu) : x; }
inline double Canonical(double x) {
  return x != x ? std::bit_cast<double>(0x7fffffffffffffffull) : x;
}

inline float Ftz(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

inline float OfF16(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t ToF16(float x) {
  return x != x ? uint16_t{0x7fff} : static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
}
inline float OfBf16(uint16_t h) { return FloatOf(uint32_t{h} << 16); }
inline uint16_t ToBf16(float x) {
  if (x != x) return 0x7fff;
  const uint32_t bits = BitsOf(x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Of a rounded result and the sign of what rounding took away: the result rounded to odd instead.
// What is rounded to odd may be rounded once more, to fewer bits, as if it were exact.
template <class Bits, class T>
T ToOdd(T rounded, double lost) {
  auto bits = std::bit_cast<Bits>(rounded);
  if (lost == 0 || (bits & 1) != 0) return rounded;
  bits += (lost > 0) == (rounded > 0) ? Bits{1} : ~Bits{0};
  return std::bit_cast<T>(bits);
}

// a * b + c of 16-bit floats rounded to odd, as an f32. The product is exact as a double.
inline float FmaToOdd(float a, float b, float c) {
  const double x = static_cast<double>(a) * static_cast<double>(b);
  const auto y = static_cast<double>(c);
  const double sum = x + y;
  const double y_part = sum - x;
  const double odd = ToOdd<uint64_t>(sum, (x - (sum - y_part)) + (y - y_part));
  const auto single = static_cast<float>(odd);
  // What is no f32 is none of 16 bits either, and what is far below them rounds to 0.
  if (!std::isfinite(single)) return single;
  if (std::fabs(odd) < 0x1p-140) return std::copysign(0.0f, single);
  return ToOdd<uint32_t>(single, odd - static_cast<double>(single));
}
inline uint16_t FmaF16(uint16_t a, uint16_t b, uint16_t c) {
  return ToF16(FmaToOdd(OfF16(a), OfF16(b), OfF16(c)));
}
inline uint16_t FmaBf16(uint16_t a, uint16_t b, uint16_t c) {
  return ToBf16(FmaToOdd(OfBf16(a), OfBf16(b), OfBf16(c)));
}

// max and min: a NaN gives the other operand, and +0 is above -0.
template <class T>
T MaxOf(T a, T b) {
  if (a != a) return b != b ? Canonical(a) : b;
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}
template <class T>
T MinOf(T a, T b) {
  if (a != a) return b != b ? Canonical(a) : b;
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}

// A value up to `ulps` units beside x, by a hash of its bits: what an approximation may give.
inline float Nearby(float x, int ulps, uint32_t salt) {
  if (ulps == 0 || !std::isfinite(x) || x == 0) return x;
  uint32_t h = BitsOf(x) * 0x9e3779b1u ^ salt;
  h ^= h >> 15;
  h *= 0x85ebca77u;
  h ^= h >> 13;
  const int by = static_cast<int>(h % static_cast<uint32_t>(2 * ulps + 1)) - ulps;
  const float moved = FloatOf(BitsOf(x) + static_cast<uint32_t>(by));
  const bool is_normal =
      std::isfinite(moved) && std::fabs(moved) >= std::numeric_limits<float>::min();
  return is_normal && (moved > 0) == (x > 0) ? moved : x;
}

// To integers: what is out of range goes to the nearest that there is, NaN to 0.
template <class To, class From>
To ToInteger(From x) {
  if (x != x) return 0;
  // Both bounds are exact, or one above what there is.
  constexpr auto kLowest = static_cast<From>(std::numeric_limits<To>::min());
  const From above = std::ldexp(From{1}, std::numeric_limits<To>::digits);
  if (x <= kLowest) return std::numeric_limits<To>::min();
  if (x >= above) return std::numeric_limits<To>::max();
  return static_cast<To>(x);
}

// mode: n, z, m or p, as in .rni.
template <class T>
T RoundTo(T x, char mode) {
  switch (mode) {
    case 'n':
      return std::nearbyint(x);
    case 'z':
      return std::trunc(x);
    case 'm':
      return std::floor(x);
    default:
      return std::ceil(x);
  }
}

}  // namespace kvant::ptxemu

#endif  // KVANT_TESTS_PTXEMU_NUMBERS_H_
