// Arithmetic and logic on integers.
#include <algorithm>
#include <bit>
#include <type_traits>

#include "kvant/tests/ptxemu/operations.h"

namespace kvant::ptxemu {
namespace {

// Arithmetic wraps, which C++ promises of unsigned types of at least 32 bits.
template <class T>
using Wrapping = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
template <class T>
using Unsigned = std::make_unsigned_t<T>;

template <class T>
constexpr Wrapping<T> Wrap(T x) {
  return static_cast<Wrapping<T>>(x);
}

// Defines a function object of one or two operands of one type.
#define KVANT_OPERATION1(Name, expression) \
  struct Name {                            \
    template <class T>                     \
    T operator()(T a) const {              \
      return static_cast<T>(expression);   \
    }                                      \
  };
#define KVANT_OPERATION2(Name, expression) \
  struct Name {                            \
    template <class T>                     \
    T operator()(T a, T b) const {         \
      return static_cast<T>(expression);   \
    }                                      \
  };
KVANT_OPERATION1(Not, ~a)
KVANT_OPERATION1(Negate, Wrap(T{0}) - Wrap(a))
KVANT_OPERATION1(Absolute, a < 0 ? Wrap(T{0}) - Wrap(a) : Wrap(a))
KVANT_OPERATION2(Plus, Wrap(a) + Wrap(b))
KVANT_OPERATION2(Minus, Wrap(a) - Wrap(b))
KVANT_OPERATION2(Times, Wrap(a) * Wrap(b))
KVANT_OPERATION2(And, (a & b))
KVANT_OPERATION2(Or, a | b)
KVANT_OPERATION2(Xor, a ^ b)
KVANT_OPERATION2(Smaller, std::min(a, b))
KVANT_OPERATION2(Larger, std::max(a, b))
#undef KVANT_OPERATION1
#undef KVANT_OPERATION2

// The upper half of a product.
struct TimesHigh {
  template <class T>
  T operator()(T a, T b) const {
    using Signed = std::conditional_t<sizeof(T) == 8, __int128, int64_t>;
    using Plain = std::conditional_t<sizeof(T) == 8, unsigned __int128, uint64_t>;
    using Wide = std::conditional_t<std::is_signed_v<T>, Signed, Plain>;
    return static_cast<T>((static_cast<Wide>(a) * static_cast<Wide>(b)) >> (8 * sizeof(T)));
  }
};
template <class Wide>
struct TimesWide {
  template <class T>
  Wide operator()(T a, T b) const {
    return static_cast<Wide>(a) * static_cast<Wide>(b);
  }
};
// a * b + c, of any of these products.
template <class Product>
struct Mad {
  template <class T, class C>
  C operator()(T a, T b, C c) const {
    return Plus()(static_cast<C>(Product()(a, b)), c);
  }
};

// Amounts beyond the width give zeros, or signs.
struct ShiftLeft {
  template <class T>
  T operator()(T a, uint32_t n) const {
    constexpr uint32_t kBits = 8 * sizeof(T);
    return n >= kBits ? T{0} : static_cast<T>(Wrap(a) << (n & (kBits - 1)));
  }
};
struct ShiftRight {
  template <class T>
  T operator()(T a, uint32_t n) const {
    constexpr uint32_t kBits = 8 * sizeof(T);
    if (n >= kBits) return a < 0 ? static_cast<T>(-1) : T{0};
    return static_cast<T>(a >> (n & (kBits - 1)));
  }
};
// shf: a is the low word, b the high one.
template <bool kLeft, bool kWrap>
struct FunnelShift {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t c) const {
    const uint32_t n = kWrap ? c & 31 : std::min(c, 32u);
    const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
    return static_cast<uint32_t>(kLeft ? (both << n) >> 32 : both >> n);
  }
};

struct Population {
  template <class T>
  uint32_t operator()(T a) const {
    return static_cast<uint32_t>(std::popcount(a));
  }
};
struct LeadingZeros {
  template <class T>
  uint32_t operator()(T a) const {
    return static_cast<uint32_t>(std::countl_zero(a));
  }
};
struct ReverseBits {
  template <class T>
  T operator()(T a) const {
    T r = 0;
    for (size_t n = 0; n < 8 * sizeof(T); ++n) r = static_cast<T>(r << 1 | (a >> n & 1));
    return r;
  }
};
// bfind: the highest bit that is not the sign, or by how much to shift it to the top.
template <bool kShiftAmount>
struct HighestBit {
  template <class T>
  uint32_t operator()(T a) const {
    const auto u = static_cast<Unsigned<T>>(a < 0 ? ~a : a);
    if (u == 0) return ~0u;
    const auto shift = static_cast<uint32_t>(std::countl_zero(u));
    return kShiftAmount ? shift : static_cast<uint32_t>(8 * sizeof(T)) - 1 - shift;
  }
};
struct ExtractField {
  template <class T>
  T operator()(T a, uint32_t b, uint32_t c) const {
    using U = Unsigned<T>;
    constexpr uint32_t kBits = 8 * sizeof(T);
    const uint32_t at = b & 0xff, length = c & 0xff;
    if (length == 0) return 0;
    const auto bit = [&](uint32_t n) { return static_cast<U>(static_cast<U>(a) >> n & 1); };
    const U sign = std::is_signed_v<T> ? bit(std::min(at + length - 1, kBits - 1)) : U{0};
    U r = 0;
    for (uint32_t n = 0; n < kBits; ++n) {
      r |= (n < length && at + n < kBits ? bit(at + n) : sign) << n;
    }
    return static_cast<T>(r);
  }
};
struct InsertField {
  template <class T>
  T operator()(T a, T b, uint32_t c, uint32_t d) const {
    constexpr uint32_t kBits = 8 * sizeof(T);
    const uint32_t at = c & 0xff, length = d & 0xff;
    T r = b;
    for (uint32_t n = 0; n < length && at + n < kBits; ++n) {
      r = (r & ~(T{1} << (at + n))) | (a >> n & 1) << (at + n);
    }
    return r;
  }
};
// prmt without a mode.
struct Permute {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t c) const {
    const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
    uint32_t r = 0;
    for (int n = 0; n < 4; ++n) {
      const uint32_t selector = c >> (4 * n);
      uint32_t byte = static_cast<uint32_t>(both >> (8 * (selector & 7))) & 0xff;
      if (selector & 8) byte = byte & 0x80 ? 0xff : 0;
      r |= byte << (8 * n);
    }
    return r;
  }
};
// Bit 4a + 2b + c of the table.
struct Lop3 {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t c, uint32_t table) const {
    uint32_t r = 0;
    for (uint32_t n = 0; n < 8; ++n) {
      const uint32_t term = (n & 4 ? a : ~a) & (n & 2 ? b : ~b) & (n & 1 ? c : ~c);
      r |= table >> n & 1 ? term : 0;
    }
    return r;
  }
};

// The ISA does not say what division by zero gives. Here it is a fault.
template <class T, bool kRemainder>
void Divide(Warp& w, const Instruction& i) {
  const T* a = w.Src<T>(i.src[0]);
  const T* b = w.Src<T>(i.src[1]);
  T* d = w.Dst<T>(i.dst[0]);
  w.ForActive([&](int l) {
    if (b[l] == 0) w.Fail(kLaunchFailed, "division by zero", l);
    if (std::is_signed_v<T> && b[l] == static_cast<T>(-1)) {
      d[l] = kRemainder ? T{0} : Negate()(a[l]);
    } else {
      d[l] = static_cast<T>(kRemainder ? a[l] % b[l] : a[l] / b[l]);
    }
  });
}

template <class T>
void AddAll(const std::string& type, Operations& table) {
  constexpr int kBytes = sizeof(T);
  table.Add("add." + type, Lanewise<Plus, T, T, T>());
  table.Add("sub." + type, Lanewise<Minus, T, T, T>());
  table.Add("mul.lo." + type, Lanewise<Times, T, T, T>());
  table.Add("mul.hi." + type, Lanewise<TimesHigh, T, T, T>());
  table.Add("mad.lo." + type, Lanewise<Mad<Times>, T, T, T, T>());
  table.Add("mad.hi." + type, Lanewise<Mad<TimesHigh>, T, T, T, T>());
  table.Add("div." + type, {Divide<T, false>, kBytes, {kBytes, kBytes}});
  table.Add("rem." + type, {Divide<T, true>, kBytes, {kBytes, kBytes}});
  table.Add("min." + type, Lanewise<Smaller, T, T, T>());
  table.Add("max." + type, Lanewise<Larger, T, T, T>());
  table.Add("neg." + type, Lanewise<Negate, T, T>());
  table.Add("abs." + type, Lanewise<Absolute, T, T>());
  table.Add("shr." + type, Lanewise<ShiftRight, T, T, uint32_t>());
  table.Add("bfe." + type, Lanewise<ExtractField, T, T, uint32_t, uint32_t>());
  table.Add("bfind." + type, Lanewise<HighestBit<false>, uint32_t, T>());
  table.Add("bfind.shiftamt." + type, Lanewise<HighestBit<true>, uint32_t, T>());
}

template <class T, class Wide>
void AddWide(const std::string& type, Operations& table) {
  table.Add("mul.wide." + type, Lanewise<TimesWide<Wide>, Wide, T, T>());
  table.Add("mad.wide." + type, Lanewise<Mad<TimesWide<Wide>>, Wide, T, T, Wide>());
}

template <class T>
void AddBits(const std::string& type, Operations& table) {
  table.Add("and." + type, Lanewise<And, T, T, T>());
  table.Add("or." + type, Lanewise<Or, T, T, T>());
  table.Add("xor." + type, Lanewise<Xor, T, T, T>());
  table.Add("not." + type, Lanewise<Not, T, T>());
  table.Add("shl." + type, Lanewise<ShiftLeft, T, T, uint32_t>());
  table.Add("shr." + type, Lanewise<ShiftRight, T, T, uint32_t>());
  table.Add("popc." + type, Lanewise<Population, uint32_t, T>());
  table.Add("clz." + type, Lanewise<LeadingZeros, uint32_t, T>());
  table.Add("brev." + type, Lanewise<ReverseBits, T, T>());
  table.Add("bfi." + type, Lanewise<InsertField, T, T, T, uint32_t, uint32_t>());
}

}  // namespace

void AddIntegers(Operations& table) {
  AddAll<uint16_t>("u16", table);
  AddAll<int16_t>("s16", table);
  AddAll<uint32_t>("u32", table);
  AddAll<int32_t>("s32", table);
  AddAll<uint64_t>("u64", table);
  AddAll<int64_t>("s64", table);
  AddWide<uint16_t, uint32_t>("u16", table);
  AddWide<int16_t, int32_t>("s16", table);
  AddWide<uint32_t, uint64_t>("u32", table);
  AddWide<int32_t, int64_t>("s32", table);
  AddBits<uint16_t>("b16", table);
  AddBits<uint32_t>("b32", table);
  AddBits<uint64_t>("b64", table);
  using Word = uint32_t;
  table.Add("shf.l.wrap.b32", Lanewise<FunnelShift<true, true>, Word, Word, Word, Word>());
  table.Add("shf.l.clamp.b32", Lanewise<FunnelShift<true, false>, Word, Word, Word, Word>());
  table.Add("shf.r.wrap.b32", Lanewise<FunnelShift<false, true>, Word, Word, Word, Word>());
  table.Add("shf.r.clamp.b32", Lanewise<FunnelShift<false, false>, Word, Word, Word, Word>());
  table.Add("prmt.b32", Lanewise<Permute, Word, Word, Word, Word>());
  table.Add("lop3.b32", Lanewise<Lop3, Word, Word, Word, Word, Word>());
}

}  // namespace kvant::ptxemu
