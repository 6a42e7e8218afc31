#include "kvant/kernels/cpu/kernels.h"

#include <cstdlib>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace kvant::cpu {

#define KVANT_CPU_KERNEL(name, supported) const KernelSet& name##_kernels();
#include "kvant/kernels/cpu/kernels.inc"
#undef KVANT_CPU_KERNEL

namespace {

#if defined(__aarch64__) && !defined(KVANT_PORTABLE_ONLY)
// Of bytes, optional from Armv8.2 on. Every Mac with an Arm processor has them.
bool HasDotProducts() {
#if defined(__linux__)
  constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP
  return (getauxval(AT_HWCAP) & kDotProducts) != 0;
#else
  return true;
#endif
}

// Of matrices of bytes, optional from Armv8.2 on. Not every Mac has them, and dot products do
// there.
bool HasMatrixProducts() {
#if defined(__linux__)
  constexpr unsigned long kMatrixProducts = 1ul << 13;  // HWCAP2_I8MM
  return (getauxval(AT_HWCAP2) & kMatrixProducts) != 0;
#else
  return false;
#endif
}

// Of matrices of bf16, as the above.
bool HasBf16Products() {
#if defined(__linux__)
  constexpr unsigned long kBf16Products = 1ul << 14;  // HWCAP2_BF16
  return (getauxval(AT_HWCAP2) & kBf16Products) != 0;
#else
  return false;
#endif
}
#endif

const KernelSet* Choose(const char* forced) {
  const KernelSet* chosen = nullptr;
  for (int i = 0; const KernelSet* set = KernelsAt(i); ++i) {
    if (forced == nullptr || *forced == '\0' || std::string_view(forced) == set->name) chosen = set;
  }
  return chosen;
}

}  // namespace

const KernelSet* KernelsAt(int position) {
#define KVANT_CPU_KERNEL(name, supported) \
  if ((supported) && position-- == 0) return &name##_kernels();
#include "kvant/kernels/cpu/kernels.inc"
#undef KVANT_CPU_KERNEL
  return nullptr;
}

std::string_view KernelNames() {
  static constexpr char kNames[] =
#define KVANT_CPU_KERNEL(name, supported) ", " #name
#include "kvant/kernels/cpu/kernels.inc"
#undef KVANT_CPU_KERNEL
      ;
  return std::string_view(kNames).substr(2);
}

const KernelSet* ChosenKernels() {
  static const KernelSet* const chosen = Choose(std::getenv("KVANT_CPU_ISA"));
  return chosen;
}

}  // namespace kvant::cpu
