// Arithmetic on f32 and f64, and approximations.
#include <algorithm>
#include <cmath>

#include "kvant/tests/ptxemu/numbers.h"
#include "kvant/tests/ptxemu/operations.h"

namespace kvant::ptxemu {
namespace {

struct Plus {
  template <class T>
  T operator()(T a, T b) const {
    return Canonical(a + b);
  }
};
struct Minus {
  template <class T>
  T operator()(T a, T b) const {
    return Canonical(a - b);
  }
};
struct Times {
  template <class T>
  T operator()(T a, T b) const {
    return Canonical(a * b);
  }
};
struct Over {
  template <class T>
  T operator()(T a, T b) const {
    return Canonical(a / b);
  }
};
struct Fma {
  template <class T>
  T operator()(T a, T b, T c) const {
    return Canonical(std::fma(a, b, c));
  }
};
struct Smaller {
  template <class T>
  T operator()(T a, T b) const {
    return MinOf(a, b);
  }
};
struct Larger {
  template <class T>
  T operator()(T a, T b) const {
    return MaxOf(a, b);
  }
};
// "copies the sign bit of a into the value of b".
struct CopySign {
  template <class T>
  T operator()(T a, T b) const {
    return std::copysign(b, a);
  }
};
struct Negate {
  template <class T>
  T operator()(T a) const {
    return -a;
  }
};
struct Absolute {
  template <class T>
  T operator()(T a) const {
    return std::fabs(a);
  }
};
struct SquareRoot {
  template <class T>
  T operator()(T a) const {
    return Canonical(std::sqrt(a));
  }
};
struct Reciprocal {
  template <class T>
  T operator()(T a) const {
    return Canonical(T{1} / a);
  }
};
// .ftz: subnormal operands are zeros of their sign, and so are subnormal results.
template <class Op>
struct Flushed {
  template <class... T>
  float operator()(T... a) const {
    return Ftz(Op()(Ftz(a)...));
  }
};

// ---- Approximations. What the ISA leaves open is used: results are moved within the stated error,
// but not those of zeros, which the tables of special cases give.

struct Exp2 {
  static constexpr int kUlps = 2;
  static float Of(float x) { return std::exp2(x); }
};
struct Log2 {
  static constexpr int kUlps = 2;
  static float Of(float x) { return std::log2(x); }
};
struct Invert {
  static constexpr int kUlps = 1;
  static float Of(float x) { return 1.0f / x; }
};
struct InvertRoot {
  static constexpr int kUlps = 2;
  static float Of(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
};

template <class Function, bool kFtz>
void Approximate(Warp& w, const Instruction& i) {
  const Options& options = *w.launch->options;
  const int ulps = std::min(Function::kUlps, options.approx_ulps);
  const auto salt = static_cast<uint32_t>(options.seed * 77);
  const auto* a = w.Src<float>(i.src[0]);
  auto* d = w.Dst<float>(i.dst[0]);
  w.ForActive([&](int l) {
    const float x = kFtz ? Ftz(a[l]) : a[l];
    const float y = Canonical(Function::Of(x));
    d[l] = x == 0 ? y : Nearby(kFtz ? Ftz(y) : y, ulps, salt);
  });
}
template <class Function, bool kFtz>
Operation Approximation() {
  return {Approximate<Function, kFtz>, 4, {4}};
}

// Of a stated relative error of 2^-11.
void Tanh(Warp& w, const Instruction& i) {
  const auto* a = w.Src<float>(i.src[0]);
  w.Put<float>(i.dst[0],
               [&](int l) { return Canonical(std::tanh(a[l]) * (1 + (l & 1 ? 4e-4f : -4e-4f))); });
}

void DivideApproximately(Warp& w, const Instruction& i) {
  const Options& options = *w.launch->options;
  const int ulps = std::min(2, options.approx_ulps);
  const auto salt = static_cast<uint32_t>(options.seed * 99);
  const auto* a = w.Src<float>(i.src[0]);
  const auto* b = w.Src<float>(i.src[1]);
  w.Put<float>(i.dst[0], [&](int l) { return Nearby(Canonical(a[l] / b[l]), ulps, salt); });
}

template <class T>
void AddAll(const std::string& type, Operations& table) {
  table.Add("add." + type, Lanewise<Plus, T, T, T>());
  table.Add("sub." + type, Lanewise<Minus, T, T, T>());
  table.Add("mul." + type, Lanewise<Times, T, T, T>());
  table.Add("div." + type, Lanewise<Over, T, T, T>());
  table.Add("fma." + type, Lanewise<Fma, T, T, T, T>());
  table.Add("mad." + type, Lanewise<Fma, T, T, T, T>());
  table.Add("min." + type, Lanewise<Smaller, T, T, T>());
  table.Add("max." + type, Lanewise<Larger, T, T, T>());
  table.Add("copysign." + type, Lanewise<CopySign, T, T, T>());
  table.Add("neg." + type, Lanewise<Negate, T, T>());
  table.Add("abs." + type, Lanewise<Absolute, T, T>());
  table.Add("sqrt." + type, Lanewise<SquareRoot, T, T>());
  table.Add("rcp." + type, Lanewise<Reciprocal, T, T>());
}

}  // namespace

void AddFloats(Operations& table) {
  AddAll<float>("f32", table);
  AddAll<double>("f64", table);
  table.Add("add.ftz.f32", Lanewise<Flushed<Plus>, float, float, float>());
  table.Add("mul.ftz.f32", Lanewise<Flushed<Times>, float, float, float>());
  table.Add("ex2.approx.f32", Approximation<Exp2, false>());
  table.Add("ex2.approx.ftz.f32", Approximation<Exp2, true>());
  table.Add("lg2.approx.f32", Approximation<Log2, false>());
  table.Add("lg2.approx.ftz.f32", Approximation<Log2, true>());
  table.Add("rcp.approx.f32", Approximation<Invert, false>());
  table.Add("rcp.approx.ftz.f32", Approximation<Invert, true>());
  table.Add("rsqrt.approx.f32", Approximation<InvertRoot, true>());
  table.Add("rsqrt.approx.ftz.f32", Approximation<InvertRoot, true>());
  table.Add("tanh.approx.f32", {Tanh, 4, {4}});
  for (const char* opcode :
       {"div.approx.f32", "div.approx.ftz.f32", "div.full.f32", "div.full.ftz.f32"}) {
    table.Add(opcode, {DivideApproximately, 4, {4, 4}});
  }
}

}  // namespace kvant::ptxemu
