// cvt, among integers and floats.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "kvant/tests/ptxemu/numbers.h"
#include "kvant/tests/ptxemu/operations.h"

namespace kvant::ptxemu {
namespace {

// Registers may be wider than the type. What goes into one is extended by the sign of the type.
template <class T>
uint64_t Extended(T x) {
  return static_cast<uint64_t>(
      static_cast<std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>(x));
}

template <class To, class From, bool kSaturate>
void IntegerToInteger(Warp& w, const Instruction& i) {
  w.ForActive([&](int l) {
    const auto a = static_cast<From>(w.Get(i.src[0], l));
    auto d = static_cast<To>(a);
    if (kSaturate) {
      using Limits = std::numeric_limits<To>;
      d = static_cast<To>(std::clamp(static_cast<__int128>(a), static_cast<__int128>(Limits::min()),
                                     static_cast<__int128>(Limits::max())));
    }
    w.Set(i.dst[0], l, Extended(d));
  });
}
// The same, between registers of just these widths.
template <class To>
struct Cast {
  template <class From>
  To operator()(From a) const {
    return static_cast<To>(a);
  }
};
// mode: of RoundTo.
template <class To, class From>
void FloatToInteger(Warp& w, const Instruction& i) {
  const From* a = w.Src<From>(i.src[0]);
  w.ForActive([&](int l) {
    w.Set(i.dst[0], l, Extended(ToInteger<To>(RoundTo(a[l], static_cast<char>(i.mode)))));
  });
}
template <class To, class From>
void IntegerToFloat(Warp& w, const Instruction& i) {
  To* d = w.Dst<To>(i.dst[0]);
  w.ForActive([&](int l) { d[l] = static_cast<To>(static_cast<From>(w.Get(i.src[0], l))); });
}
template <class T>
void FloatToWhole(Warp& w, const Instruction& i) {
  const T* a = w.Src<T>(i.src[0]);
  w.Put<T>(i.dst[0], [&](int l) { return Canonical(RoundTo(a[l], static_cast<char>(i.mode))); });
}

struct Saturate {
  float operator()(float a) const { return a != a ? 0.0f : std::min(std::max(a, 0.0f), 1.0f); }
};
template <class To>
struct FloatToFloat {
  template <class From>
  To operator()(From a) const {
    return Canonical(static_cast<To>(a));
  }
};
struct FromF16 {
  float operator()(uint16_t a) const { return Canonical(OfF16(a)); }
};
struct FromBf16 {
  float operator()(uint16_t a) const { return Canonical(OfBf16(a)); }
};
struct IntoF16 {
  uint16_t operator()(float a) const { return ToF16(a); }
};
struct IntoBf16 {
  uint16_t operator()(float a) const { return ToBf16(a); }
};
// Of the upper byte to the upper half.
struct F16x2OfE4M3 {
  static uint32_t One(uint32_t byte) {
    const uint32_t magnitude = byte & 0x7f, exponent = magnitude >> 3, mantissa = magnitude & 7;
    if (magnitude == 0x7f) return 0x7fff;
    const float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                      : std::ldexp(static_cast<float>(8 + mantissa),
                                                   static_cast<int>(exponent) - 10);
    return ToF16(value) | (byte & 0x80) << 8;
  }
  uint32_t operator()(uint16_t bytes) const { return One(bytes >> 8) << 16 | One(bytes & 0xff); }
};
// a goes to the upper half.
template <class Into>
struct Pack {
  uint32_t operator()(float a, float b) const { return uint32_t{Into()(a)} << 16 | Into()(b); }
};

// Calls f<T>(name of T).
template <class F>
void ForIntegers(F f) {
  f.template operator()<uint8_t>("u8");
  f.template operator()<int8_t>("s8");
  f.template operator()<uint16_t>("u16");
  f.template operator()<int16_t>("s16");
  f.template operator()<uint32_t>("u32");
  f.template operator()<int32_t>("s32");
  f.template operator()<uint64_t>("u64");
  f.template operator()<int64_t>("s64");
}

std::string Opcode(const std::string& modifiers, const std::string& to, const std::string& from) {
  return "cvt." + modifiers + to + "." + from;
}

void AddBetweenIntegers(Operations& table) {
  ForIntegers([&]<class To>(const std::string& to) {
    ForIntegers([&]<class From>(const std::string& from) {
      table.Add(Opcode("", to, from), {IntegerToInteger<To, From, false>, 0, {0}});
      table.Add(Opcode("sat.", to, from), {IntegerToInteger<To, From, true>, 0, {0}});
      if constexpr (sizeof(To) > 1 && sizeof(From) > 1) {
        table.Add(Opcode("", to, from) + kExactWidths, Lanewise<Cast<To>, To, From>());
      }
    });
  });
}

template <class Float>
void AddWithIntegers(const std::string& type, Operations& table) {
  constexpr int kBytes = sizeof(Float);
  for (const char* mode : {"rni.", "rzi.", "rmi.", "rpi."}) {
    const auto letter = static_cast<uint32_t>(mode[1]);
    ForIntegers([&]<class To>(const std::string& to) {
      table.Add(Opcode(mode, to, type), {FloatToInteger<To, Float>, 0, {kBytes}, letter});
    });
    table.Add(Opcode(mode, type, type), {FloatToWhole<Float>, kBytes, {kBytes}, letter});
  }
  ForIntegers([&]<class From>(const std::string& from) {
    table.Add(Opcode("rn.", type, from), {IntegerToFloat<Float, From>, kBytes, {0}});
  });
}

}  // namespace

void AddConversions(Operations& table) {
  AddBetweenIntegers(table);
  AddWithIntegers<float>("f32", table);
  AddWithIntegers<double>("f64", table);
  table.Add("cvt.f64.f32", Lanewise<FloatToFloat<double>, double, float>());
  table.Add("cvt.rn.f32.f64", Lanewise<FloatToFloat<float>, float, double>());
  table.Add("cvt.sat.f32.f32", Lanewise<Saturate, float, float>());
  table.Add("cvt.f32.f16", Lanewise<FromF16, float, uint16_t>());
  table.Add("cvt.f32.bf16", Lanewise<FromBf16, float, uint16_t>());
  table.Add("cvt.rn.f16.f32", Lanewise<IntoF16, uint16_t, float>());
  table.Add("cvt.rn.bf16.f32", Lanewise<IntoBf16, uint16_t, float>());
  table.Add("cvt.rn.f16x2.f32", Lanewise<Pack<IntoF16>, uint32_t, float, float>());
  table.Add("cvt.rn.f16x2.e4m3x2", Lanewise<F16x2OfE4M3, uint32_t, uint16_t>());
  table.Add("cvt.rn.bf16x2.f32", Lanewise<Pack<IntoBf16>, uint32_t, float, float>());
}

}  // namespace kvant::ptxemu
