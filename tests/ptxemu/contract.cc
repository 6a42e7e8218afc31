#include <cmath>
#include <iterator>
#include <map>

#include "kvant/tests/ptxemu/decoder.h"
#include "kvant/tests/ptxemu/numbers.h"

namespace kvant::ptxemu {
namespace {

// mode: 1 negates the product, 2 what it is added to.
template <class T>
void FusedMultiplyAdd(Warp& w, const Instruction& i) {
  const T* a = w.Src<T>(i.src[0]);
  const T* b = w.Src<T>(i.src[1]);
  const T* c = w.Src<T>(i.src[2]);
  const T product = i.mode == 1 ? T{-1} : T{1}, added = i.mode == 2 ? T{-1} : T{1};
  w.Put<T>(i.dst[0],
           [&](int l) { return Canonical(std::fma(product * a[l], b[l], added * c[l])); });
}

// Whether it is `name` without a rounding mode, which always happens.
bool IsOpen(const Instruction& i, const char* name) {
  const auto& opcode = i.text->opcode;
  return opcode.size() == 2 && opcode[0] == name && (opcode[1] == "f32" || opcode[1] == "f64") &&
         i.guard < 0;
}

// The multiplication that each register is known to come from.
using Products = std::map<int, const Instruction*>;

// An add or sub of a product, as an fma. False where neither operand is one.
bool Fuse(const Products& products, Instruction* i) {
  for (int side = 0; side < 2; ++side) {
    const auto found = i->src[side].reg < 0 ? products.end() : products.find(i->src[side].reg);
    if (found == products.end()) continue;
    const Instruction& mul = *found->second;
    const Slot added = i->src[1 - side];
    i->run = i->text->opcode[1] == "f32" ? FusedMultiplyAdd<float> : FusedMultiplyAdd<double>;
    i->srcs = 3;
    i->src[0] = mul.src[0];
    i->src[1] = mul.src[1];
    i->src[2] = added;
    if (i->text->opcode[0] == "sub") i->mode = side == 1 ? 1 : 2;
    return true;
  }
  return false;
}

// Products of, or in, a register that is written again are no longer known.
void Forget(int reg, Products* products) {
  for (auto it = products->begin(); it != products->end();) {
    const Instruction& mul = *it->second;
    const bool changed = it->first == reg || mul.src[0].reg == reg || mul.src[1].reg == reg;
    it = changed ? products->erase(it) : std::next(it);
  }
}

}  // namespace

void Contract(Kernel& kernel) {
  std::vector<bool> begins(kernel.program.size() + 1, false);
  for (const auto& [label, at] : kernel.entry->labels) begins[static_cast<size_t>(at)] = true;
  Products products;
  for (size_t n = 0; n < kernel.program.size(); ++n) {
    Instruction& i = kernel.program[n];
    if (begins[n] || i.flow == Flow::kBranch) products.clear();
    if ((IsOpen(i, "add") || IsOpen(i, "sub")) && Fuse(products, &i)) {
      ++GlobalCounters().contracted[kernel.name];
    }
    for (int d = 0; d < i.dsts; ++d) Forget(i.dst[d].reg, &products);
    const int to = i.dst[0].reg;
    if (IsOpen(i, "mul") && to != i.src[0].reg && to != i.src[1].reg) products[to] = &i;
  }
}

}  // namespace kvant::ptxemu
