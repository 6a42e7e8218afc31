// Instructions that do one thing in each lane, from operands of fixed widths: a table of them by
// their whole opcode, such as "mad.wide.u32". The types of a row give its handler and its operands'
// widths.
#ifndef KVANT_TESTS_PTXEMU_OPERATIONS_H_
#define KVANT_TESTS_PTXEMU_OPERATIONS_H_

#include <cstdint>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvant/tests/ptxemu/warp.h"

namespace kvant::ptxemu {

struct Operation {
  Handler run = nullptr;
  // Bytes; 0 takes a register of any width.
  int result = 0;
  std::vector<int> sources;
  uint32_t mode = 0;  // Instruction::mode
};

class Operations {
 public:
  void Add(const std::string& opcode, Operation operation) { rows_[opcode] = std::move(operation); }
  const Operation* Find(const std::string& opcode) const {
    const auto found = rows_.find(opcode);
    return found == rows_.end() ? nullptr : &found->second;
  }

 private:
  std::unordered_map<std::string, Operation> rows_;
};

// Conversions between integers are of registers of any width, and once more, with this after their
// opcode, of those of just their types' widths, which is faster.
inline constexpr char kExactWidths[] = " exact";

// The families. Rounding to nearest is what an opcode without a mode means, so ".rn" is left out,
// but not of conversions, which have it to be told from others.
void AddIntegers(Operations& table);
void AddFloats(Operations& table);
void AddHalves(Operations& table);
void AddConversions(Operations& table);

// d = Op()(a, b, ..) in each lane.
template <class Op, class To, class... From>
void EachLane(Warp& w, const Instruction& i) {
  const auto run = [&]<size_t... n>(std::index_sequence<n...>) {
    const std::tuple sources(w.Src<From>(i.src[n])...);
    w.Put<To>(i.dst[0], [&](int lane) -> To { return Op()(std::get<n>(sources)[lane]...); });
  };
  run(std::index_sequence_for<From...>());
}

template <class Op, class To, class... From>
Operation Lanewise() {
  return {EachLane<Op, To, From...>, sizeof(To), {static_cast<int>(sizeof(From))...}};
}

}  // namespace kvant::ptxemu

#endif  // KVANT_TESTS_PTXEMU_OPERATIONS_H_
