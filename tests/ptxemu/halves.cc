// Arithmetic on f16, f16x2 and bf16x2. Subnormal numbers are kept, and NaN results have one form.
#include "kvant/tests/ptxemu/numbers.h"
#include "kvant/tests/ptxemu/operations.h"

namespace kvant::ptxemu {
namespace {

// f32 has more than twice the bits of f16 and two: rounding its sum or product once more is right.
struct Plus {
  uint16_t operator()(uint16_t a, uint16_t b) const { return ToF16(OfF16(a) + OfF16(b)); }
};
struct Minus {
  uint16_t operator()(uint16_t a, uint16_t b) const { return ToF16(OfF16(a) - OfF16(b)); }
};
struct Times {
  uint16_t operator()(uint16_t a, uint16_t b) const { return ToF16(OfF16(a) * OfF16(b)); }
};
struct Fma {
  uint16_t operator()(uint16_t a, uint16_t b, uint16_t c) const { return FmaF16(a, b, c); }
};
struct FmaOfBf16 {
  uint16_t operator()(uint16_t a, uint16_t b, uint16_t c) const { return FmaBf16(a, b, c); }
};
// A NaN gives the other operand; two give the canonical one.
struct Smaller {
  uint16_t operator()(uint16_t a, uint16_t b) const { return ToF16(MinOf(OfF16(a), OfF16(b))); }
};
struct Larger {
  uint16_t operator()(uint16_t a, uint16_t b) const { return ToF16(MaxOf(OfF16(a), OfF16(b))); }
};
// A NaN gives some NaN. Here its payload stays, as the ISA says that it may come to be.
struct Negate {
  uint16_t operator()(uint16_t a) const { return a ^ 0x8000; }
};
struct Absolute {
  uint16_t operator()(uint16_t a) const { return a & 0x7fff; }
};

template <class Op>
struct OfBoth {
  template <class... T>
  uint32_t operator()(T... a) const {
    const uint32_t low = Op()(static_cast<uint16_t>(a)...);
    const uint32_t high = Op()(static_cast<uint16_t>(a >> 16)...);
    return high << 16 | low;
  }
};

template <class Op>
void AddUnary(const std::string& name, Operations& table) {
  table.Add(name + ".f16", Lanewise<Op, uint16_t, uint16_t>());
  table.Add(name + ".f16x2", Lanewise<OfBoth<Op>, uint32_t, uint32_t>());
}
template <class Op>
void AddBinary(const std::string& name, Operations& table) {
  table.Add(name + ".f16", Lanewise<Op, uint16_t, uint16_t, uint16_t>());
  table.Add(name + ".f16x2", Lanewise<OfBoth<Op>, uint32_t, uint32_t, uint32_t>());
}
template <class Op>
void AddTernary(const std::string& name, Operations& table) {
  table.Add(name + ".f16", Lanewise<Op, uint16_t, uint16_t, uint16_t, uint16_t>());
  table.Add(name + ".f16x2", Lanewise<OfBoth<Op>, uint32_t, uint32_t, uint32_t, uint32_t>());
}

}  // namespace

void AddHalves(Operations& table) {
  AddBinary<Plus>("add", table);
  AddBinary<Minus>("sub", table);
  AddBinary<Times>("mul", table);
  AddBinary<Smaller>("min", table);
  AddBinary<Larger>("max", table);
  AddTernary<Fma>("fma", table);
  table.Add("fma.bf16x2", Lanewise<OfBoth<FmaOfBf16>, uint32_t, uint32_t, uint32_t, uint32_t>());
  AddUnary<Negate>("neg", table);
  AddUnary<Absolute>("abs", table);
}

}  // namespace kvant::ptxemu
