// ld, st, atom and red.
#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>

#include "kvant/tests/ptxemu/decoder.h"
#include "kvant/tests/ptxemu/numbers.h"

namespace kvant::ptxemu {
namespace {

// The address in a lane: of 32 bits where its register is. Without a register, mode is kNoBase.
enum AddressMode : uint32_t { kWithBase, kNoBase };
uint64_t AddressOf(const Warp& w, const Instruction& i, int lane) {
  const auto offset = static_cast<uint64_t>(i.offset);
  if (i.mode == kNoBase) return offset;
  const uint64_t address = w.Get(i.src[0], lane) + offset;
  return i.src[0].bytes == 4 ? address & 0xffffffffu : address;
}

void LoadVector(Warp& w, const Instruction& i) {
  w.ForActive([&](int l) {
    uint8_t data[32];
    w.Read(i.space, l, AddressOf(w, i, l), i.element * i.count, data, i.coherent);
    for (int n = 0; n < i.count; ++n) {
      uint64_t value = 0;
      std::memcpy(&value, data + n * i.element, static_cast<size_t>(i.element));
      if (i.is_signed) {
        const int up = 64 - 8 * i.element;
        value = static_cast<uint64_t>(static_cast<int64_t>(value << up) >> up);
      }
      w.Set(i.dst[n], l, value);
    }
  });
}

void StoreVector(Warp& w, const Instruction& i) {
  const int first = i.mode == kNoBase ? 0 : 1;
  w.ForActive([&](int l) {
    uint8_t data[32];
    for (int n = 0; n < i.count; ++n) {
      const uint64_t value = w.Get(i.src[first + n], l);
      std::memcpy(data + n * i.element, &value, static_cast<size_t>(i.element));
    }
    w.Write(i.space, l, AddressOf(w, i, l), i.element * i.count, data);
  });
}

// The new value, of the old one and an operand or two.
using Update = uint64_t (*)(uint64_t old, uint64_t b, uint64_t c);

// src: the address, where there is one in a register, then the operands.
template <Update kUpdate>
void Atomic(Warp& w, const Instruction& i) {
  const int first = i.mode == kNoBase ? 0 : 1;
  w.ForActive([&](int l) {
    const uint64_t address = AddressOf(w, i, l);
    const uint64_t b = w.Get(i.src[first], l);
    const uint64_t c = i.srcs > first + 1 ? w.Get(i.src[first + 1], l) : 0;
    uint64_t old = 0;
    w.Read(i.space, l, address, i.element, &old, true);
    const uint64_t now = kUpdate(old, b, c);
    w.Write(i.space, l, address, i.element, &now);
    if (i.dsts > 0) w.Set(i.dst[0], l, old);
  });
}

uint64_t Inc(uint64_t old, uint64_t b, uint64_t) { return old >= b ? 0 : old + 1; }
uint64_t Dec(uint64_t old, uint64_t b, uint64_t) { return old == 0 || old > b ? b : old - 1; }
uint64_t Add(uint64_t old, uint64_t b, uint64_t) { return old + b; }
uint64_t AddFloat(uint64_t old, uint64_t b, uint64_t) {
  return BitsOf(Canonical(FloatOf(static_cast<uint32_t>(old)) + FloatOf(static_cast<uint32_t>(b))));
}
uint64_t Exchange(uint64_t, uint64_t b, uint64_t) { return b; }
uint64_t CompareAndSwap(uint64_t old, uint64_t b, uint64_t c) { return old == b ? c : old; }
uint64_t And(uint64_t old, uint64_t b, uint64_t) { return old & b; }
uint64_t Or(uint64_t old, uint64_t b, uint64_t) { return old | b; }
uint64_t Xor(uint64_t old, uint64_t b, uint64_t) { return old ^ b; }
template <class T>
uint64_t Min(uint64_t old, uint64_t b, uint64_t) {
  return static_cast<uint64_t>(std::min(static_cast<T>(old), static_cast<T>(b)));
}
template <class T>
uint64_t Max(uint64_t old, uint64_t b, uint64_t) {
  return static_cast<uint64_t>(std::max(static_cast<T>(old), static_cast<T>(b)));
}

// By operation and type.
const std::unordered_map<std::string, Handler>& Atomics() {
  static const auto* const table = [] {
    auto* made = new std::unordered_map<std::string, Handler>{
        {"inc.u32", Atomic<Inc>},           {"dec.u32", Atomic<Dec>},
        {"add.u32", Atomic<Add>},           {"add.s32", Atomic<Add>},
        {"add.u64", Atomic<Add>},           {"add.f32", Atomic<AddFloat>},
        {"min.u32", Atomic<Min<uint32_t>>}, {"max.u32", Atomic<Max<uint32_t>>},
        {"min.s32", Atomic<Min<int32_t>>},  {"max.s32", Atomic<Max<int32_t>>},
        {"min.u64", Atomic<Min<uint64_t>>}, {"max.u64", Atomic<Max<uint64_t>>},
        {"min.s64", Atomic<Min<int64_t>>},  {"max.s64", Atomic<Max<int64_t>>}};
    for (const char* type : {"b32", "b64"}) {
      const auto add = [&](const char* name, Handler run) {
        (*made)[std::string(name) + "." + type] = run;
      };
      add("exch", Atomic<Exchange>);
      add("cas", Atomic<CompareAndSwap>);
      add("and", Atomic<And>);
      add("or", Atomic<Or>);
      add("xor", Atomic<Xor>);
    }
    return made;
  }();
  return *table;
}

// Of ld and st: element, vector and space.
void UseAccess(Decoder& d, Handler run) {
  Instruction& i = d.now();
  i.run = run;
  i.space = d.space();
  i.element = TypeBytes(d.type());
  i.is_signed = d.type()[0] == 's';
  i.count = d.Has("v4") ? 4 : d.Has("v2") ? 2 : 1;
  i.sink = true;
}

void AddAddress(Decoder& d, size_t n) {
  d.now().mode = d.AddAddress(d.operand(n), &d.now().offset) ? kWithBase : kNoBase;
}

}  // namespace

void DecodeLoad(Decoder& d) {
  UseAccess(d, LoadVector);
  d.now().coherent = !d.Has("nc");
  d.AddResults(d.operand(0), 0);
  if (d.now().dsts != d.now().count) d.Unknown("vector");
  AddAddress(d, 1);
}

void DecodeStore(Decoder& d) {
  UseAccess(d, StoreVector);
  AddAddress(d, 0);
  const OperandText& from = d.operand(1);
  const auto count = from.kind == OperandText::kVector ? from.parts.size() : 1;
  if (static_cast<int>(count) != d.now().count) d.Unknown("vector");
  if (from.kind != OperandText::kVector) return d.AddStored(from, d.now().element);
  for (const OperandText& one : from.parts) d.AddStored(one, d.now().element);
}

// {atom,red}{.sem}{.scope}{.space}.OPERATION.TYPE
void DecodeAtomic(Decoder& d) {
  const std::string& operation = d.opcode()[d.opcode().size() - 2];
  const auto found = Atomics().find(operation + "." + d.type());
  if (found == Atomics().end()) d.Unknown("atomic");
  UseAccess(d, found->second);
  size_t n = 0;
  if (d.opcode()[0] == "atom") d.AddResult(d.operand(n++), d.now().element);
  AddAddress(d, n++);
  while (n < d.operands()) d.AddSource(d.operand(n++), d.now().element);
}

}  // namespace kvant::ptxemu
