// setp, selp, and logic on predicates. A predicate is one mask of the lanes in which it is true.
#include <functional>
#include <string>
#include <unordered_map>

#include "kvant/tests/ptxemu/decoder.h"

namespace kvant::ptxemu {
namespace {

// Comparisons with a NaN are false, or, of those that are named so (".ltu"), true.
template <class Comparison>
struct Ordered {
  template <class T>
  bool operator()(T a, T b) const {
    return a == a && b == b && Comparison()(a, b);
  }
};
template <class Comparison>
struct Unordered {
  template <class T>
  bool operator()(T a, T b) const {
    return a != a || b != b || Comparison()(a, b);
  }
};
struct Always {
  template <class T>
  bool operator()(T, T) const {
    return true;
  }
};
struct Never {
  template <class T>
  bool operator()(T, T) const {
    return false;
  }
};

// mode of setp: what the comparison, and for a second result its opposite, is combined with src[2]
// by.
enum Combination : uint32_t { kNone, kAnd, kOr, kXor };
uint32_t Combine(uint32_t mode, uint32_t a, uint32_t b) {
  return mode == kAnd ? a & b : mode == kOr ? (a | b) : a ^ b;
}

template <class T, class Comparison>
void Set(Warp& w, const Instruction& i) {
  const T* a = w.Src<T>(i.src[0]);
  const T* b = w.Src<T>(i.src[1]);
  uint32_t p = 0;
  for (int l = 0; l < kLanes; ++l) p |= static_cast<uint32_t>(Comparison()(a[l], b[l])) << l;
  uint32_t q = ~p;
  if (i.mode != kNone) {
    const uint32_t c = w.Predicate(i.src[2]);
    p = Combine(i.mode, p, c);
    q = Combine(i.mode, q, c);
  }
  w.SetPredicate(i.dst[0], p);
  if (i.dsts > 1) w.SetPredicate(i.dst[1], q);
}

// lo, ls, hi, hs: other names of what lt, le, gt, ge mean of unsigned integers.
template <class T>
Handler SetBy(const std::string& comparison) {
  static const auto* const table =
      new std::unordered_map<std::string, Handler>{{"eq", Set<T, Ordered<std::equal_to<>>>},
                                                   {"ne", Set<T, Ordered<std::not_equal_to<>>>},
                                                   {"lt", Set<T, Ordered<std::less<>>>},
                                                   {"le", Set<T, Ordered<std::less_equal<>>>},
                                                   {"gt", Set<T, Ordered<std::greater<>>>},
                                                   {"ge", Set<T, Ordered<std::greater_equal<>>>},
                                                   {"lo", Set<T, Ordered<std::less<>>>},
                                                   {"ls", Set<T, Ordered<std::less_equal<>>>},
                                                   {"hi", Set<T, Ordered<std::greater<>>>},
                                                   {"hs", Set<T, Ordered<std::greater_equal<>>>},
                                                   {"equ", Set<T, Unordered<std::equal_to<>>>},
                                                   {"neu", Set<T, Unordered<std::not_equal_to<>>>},
                                                   {"ltu", Set<T, Unordered<std::less<>>>},
                                                   {"leu", Set<T, Unordered<std::less_equal<>>>},
                                                   {"gtu", Set<T, Unordered<std::greater<>>>},
                                                   {"geu", Set<T, Unordered<std::greater_equal<>>>},
                                                   {"num", Set<T, Ordered<Always>>},
                                                   {"nan", Set<T, Unordered<Never>>}};
  const auto found = table->find(comparison);
  return found == table->end() ? nullptr : found->second;
}

using SetByComparison = Handler (*)(const std::string&);
const std::unordered_map<std::string, SetByComparison>& SetByType() {
  static const auto* const table = new std::unordered_map<std::string, SetByComparison>{
      {"u16", SetBy<uint16_t>}, {"b16", SetBy<uint16_t>}, {"s16", SetBy<int16_t>},
      {"u32", SetBy<uint32_t>}, {"b32", SetBy<uint32_t>}, {"s32", SetBy<int32_t>},
      {"u64", SetBy<uint64_t>}, {"b64", SetBy<uint64_t>}, {"s64", SetBy<int64_t>},
      {"f32", SetBy<float>},    {"f64", SetBy<double>}};
  return *table;
}

// What is not chosen may be undefined.
template <class T>
void Select(Warp& w, const Instruction& i) {
  const T* a = w.Src<T>(i.src[0]);
  const T* b = w.Src<T>(i.src[1]);
  const uint32_t p = w.Predicate(i.src[2]);
  const auto valid = [&](const Slot& s) {
    return s.reg < 0 ? kAllLanes : w.valid[static_cast<size_t>(s.reg)];
  };
  const uint32_t chosen = (valid(i.src[0]) & p) | (valid(i.src[1]) & ~p);
  const uint32_t defined = chosen & valid(i.src[2]);
  if (i.dst[0].reg >= 0) {
    uint32_t& v = w.valid[static_cast<size_t>(i.dst[0].reg)];
    v = (v & ~w.active) | (defined & w.active);
  }
  w.Put<T>(i.dst[0], [&](int l) { return (p >> l & 1) ? a[l] : b[l]; });
}

template <Combination kHow>
void Logic(Warp& w, const Instruction& i) {
  w.SetPredicate(i.dst[0], Combine(kHow, w.Predicate(i.src[0]), w.Predicate(i.src[1])));
}
void Not(Warp& w, const Instruction& i) { w.SetPredicate(i.dst[0], ~w.Predicate(i.src[0])); }

}  // namespace

// setp.COMPARISON{.COMBINATION}.TYPE
void DecodeSetp(Decoder& d) {
  static const auto* const combinations =
      new std::unordered_map<std::string, Combination>{{"and", kAnd}, {"or", kOr}, {"xor", kXor}};
  const size_t parts = d.opcode().size();
  const auto by_type = SetByType().find(d.type());
  if (by_type == SetByType().end() || parts > 4) d.Unknown("comparison");
  d.now().run = by_type->second(d.opcode()[1]);
  const int bytes = TypeBytes(d.type());
  d.AddResult(d.operand(0), 0);
  d.AddSecondResult(d.operand(0));
  d.AddSource(d.operand(1), bytes);
  d.AddSource(d.operand(2), bytes);
  if (parts == 4) {
    const auto combination = combinations->find(d.opcode()[2]);
    if (combination == combinations->end()) d.Unknown("combination");
    d.now().mode = combination->second;
    d.AddPredicate(d.operand(3));
  }
}

void DecodeSelp(Decoder& d) {
  const int bytes = TypeBytes(d.type());
  Instruction& i = d.now();
  i.run = bytes == 2 ? Select<uint16_t> : bytes == 4 ? Select<uint32_t> : Select<uint64_t>;
  i.first_needed = 2;
  d.AddResult(d.operand(0), bytes);
  d.AddSource(d.operand(1), bytes);
  d.AddSource(d.operand(2), bytes);
  d.AddPredicate(d.operand(3));
}

void DecodePredicateLogic(Decoder& d) {
  static const auto* const handlers = new std::unordered_map<std::string, Handler>{
      {"and", Logic<kAnd>}, {"or", Logic<kOr>}, {"xor", Logic<kXor>}, {"not", Not}};
  const auto found = handlers->find(d.opcode()[0]);
  if (found == handlers->end() || d.opcode().size() != 2) d.Unknown("logic");
  d.now().run = found->second;
  d.AddResult(d.operand(0), 0);
  for (size_t n = 1; n < d.operands(); ++n) d.AddPredicate(d.operand(n));
}

}  // namespace kvant::ptxemu
