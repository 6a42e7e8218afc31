// mov, of registers, vectors, special registers and addresses; and cvta.
#include <string>

#include "kvant/tests/ptxemu/decoder.h"

namespace kvant::ptxemu {
namespace {

struct Copied {
  template <class T>
  T operator()(T a) const {
    return a;
  }
};
struct Plus {
  uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};
struct Minus {
  uint64_t operator()(uint64_t a, uint64_t b) const { return a - b; }
};

void MovePredicate(Warp& w, const Instruction& i) {
  w.SetPredicate(i.dst[0], w.Predicate(i.src[0]));
}

void MoveAddress(Warp& w, const Instruction& i) {
  w.ForActive([&](int l) { w.Set(i.dst[0], l, static_cast<uint64_t>(i.offset)); });
}

// A vector to a scalar, or back: the first is the lowest.
void Pack(Warp& w, const Instruction& i) {
  const int bits = 8 * i.dst[0].bytes / i.srcs;
  w.ForActive([&](int l) {
    uint64_t value = 0;
    for (int n = i.srcs - 1; n >= 0; --n) value = value << bits | w.Get(i.src[n], l);
    w.Set(i.dst[0], l, value);
  });
}
void Unpack(Warp& w, const Instruction& i) {
  const int bits = 8 * i.src[0].bytes / i.dsts;
  w.ForActive([&](int l) {
    const uint64_t value = w.Get(i.src[0], l);
    for (int n = 0; n < i.dsts; ++n) w.Set(i.dst[n], l, value >> (bits * n));
  });
}

// ---- Special registers

using Special = uint64_t (*)(const Warp&, unsigned lane);

unsigned ThreadOf(const Warp& w, unsigned lane) {
  return static_cast<unsigned>(w.index) * kLanes + lane;
}

struct NamedSpecial {
  const char* name;
  Special value;
};
constexpr NamedSpecial kSpecials[] = {
    {"%tid.x",
     [](const Warp& w, unsigned lane) -> uint64_t {
       return ThreadOf(w, lane) % w.launch->shape->block[0];
     }},
    {"%tid.y",
     [](const Warp& w, unsigned lane) -> uint64_t {
       const auto& block = w.launch->shape->block;
       return ThreadOf(w, lane) / block[0] % block[1];
     }},
    {"%tid.z",
     [](const Warp& w, unsigned lane) -> uint64_t {
       const auto& block = w.launch->shape->block;
       return ThreadOf(w, lane) / block[0] / block[1];
     }},
    {"%ntid.x", [](const Warp& w, unsigned) -> uint64_t { return w.launch->shape->block[0]; }},
    {"%ntid.y", [](const Warp& w, unsigned) -> uint64_t { return w.launch->shape->block[1]; }},
    {"%ntid.z", [](const Warp& w, unsigned) -> uint64_t { return w.launch->shape->block[2]; }},
    {"%ctaid.x", [](const Warp& w, unsigned) -> uint64_t { return w.block->index[0]; }},
    {"%ctaid.y", [](const Warp& w, unsigned) -> uint64_t { return w.block->index[1]; }},
    {"%ctaid.z", [](const Warp& w, unsigned) -> uint64_t { return w.block->index[2]; }},
    {"%nctaid.x", [](const Warp& w, unsigned) -> uint64_t { return w.launch->shape->grid[0]; }},
    {"%nctaid.y", [](const Warp& w, unsigned) -> uint64_t { return w.launch->shape->grid[1]; }},
    {"%nctaid.z", [](const Warp& w, unsigned) -> uint64_t { return w.launch->shape->grid[2]; }},
    {"%laneid", [](const Warp&, unsigned lane) -> uint64_t { return lane; }},
    {"%warpid", [](const Warp& w, unsigned) -> uint64_t { return static_cast<uint64_t>(w.index); }},
    {"%lanemask_eq", [](const Warp&, unsigned lane) -> uint64_t { return 1u << lane; }},
    {"%lanemask_lt", [](const Warp&, unsigned lane) -> uint64_t { return (1u << lane) - 1; }},
    {"%lanemask_le", [](const Warp&, unsigned lane) -> uint64_t { return (2ull << lane) - 1; }},
    {"%lanemask_gt",
     [](const Warp&, unsigned lane) -> uint64_t { return kAllLanes - ((2ull << lane) - 1); }},
    {"%lanemask_ge",
     [](const Warp&, unsigned lane) -> uint64_t { return kAllLanes - ((1u << lane) - 1); }},
    {"%dynamic_smem_size",
     [](const Warp& w, unsigned) -> uint64_t { return w.launch->shape->dynamic_shared; }},
    {"%clock", [](const Warp& w, unsigned) -> uint64_t { return w.launch->instructions; }},
    {"%clock64", [](const Warp& w, unsigned) -> uint64_t { return w.launch->instructions; }},
};

// mode: which.
void MoveSpecial(Warp& w, const Instruction& i) {
  const Special value = kSpecials[i.mode].value;
  w.ForActive([&](int l) { w.Set(i.dst[0], l, value(w, static_cast<unsigned>(l))); });
}

void UseSpecial(Decoder& d, const std::string& name) {
  for (const NamedSpecial& special : kSpecials) {
    if (name != special.name) continue;
    d.now().run = MoveSpecial;
    d.now().mode = static_cast<uint32_t>(&special - kSpecials);
    return;
  }
  d.Unknown("special register");
}

uint64_t WindowOf(Space space) {
  switch (space) {
    case kShared:
      return kSharedWindow;
    case kLocal:
      return kLocalWindow;
    case kParam:
      return kParamWindow;
    default:
      return 0;
  }
}

}  // namespace

void DecodeMove(Decoder& d) {
  const OperandText& to = d.operand(0);
  const OperandText& from = d.operand(1);
  const int bytes = TypeBytes(d.type());
  Instruction& i = d.now();
  if (d.type() == "pred") {
    i.run = MovePredicate;
    d.AddResult(to, 0);
    d.AddPredicate(from);
  } else if (to.kind == OperandText::kVector) {
    i.run = Unpack;
    d.AddSource(from, bytes);
    d.AddResults(to, bytes / static_cast<int>(to.parts.size()));
  } else if (from.kind == OperandText::kVector) {
    i.run = Pack;
    d.AddResult(to, bytes);
    d.AddSources(from, bytes / static_cast<int>(from.parts.size()));
  } else if (from.kind == OperandText::kSpecial) {
    UseSpecial(d, from.name);
    d.AddResult(to, bytes);
  } else if (from.kind == OperandText::kSymbol) {
    i.run = MoveAddress;
    i.offset = static_cast<int64_t>(d.symbol(from.name)) + from.offset;
    d.AddResult(to, bytes);
  } else if (bytes == 2) {
    d.Use(Lanewise<Copied, uint16_t, uint16_t>());
  } else if (bytes == 4) {
    d.Use(Lanewise<Copied, uint32_t, uint32_t>());
  } else {
    d.Use(Lanewise<Copied, uint64_t, uint64_t>());
  }
}

// Generic addresses of global memory are those of global memory.
void DecodeCvta(Decoder& d) {
  const OperandText& from = d.operand(1);
  const uint64_t window = WindowOf(d.space());
  const bool to_space = d.Has("to");
  Instruction& i = d.now();
  if (from.kind == OperandText::kSymbol && !to_space) {
    i.run = MoveAddress;
    i.offset = static_cast<int64_t>(d.symbol(from.name) + window) + from.offset;
    d.AddResult(d.operand(0), 8);
  } else if (window == 0) {
    d.Use(Lanewise<Copied, uint64_t, uint64_t>());
  } else {
    i.run = to_space ? EachLane<Minus, uint64_t, uint64_t, uint64_t>
                     : EachLane<Plus, uint64_t, uint64_t, uint64_t>;
    d.AddResult(d.operand(0), 8);
    d.AddSource(from, 8);
    d.AddConstant(window, 8);
  }
}

}  // namespace kvant::ptxemu
