#include "kvant/kernels/cpu/kernels.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvant::cpu {

#define KVANT_CPU_KERNEL(name, supported) const KernelSet& name##_kernels();
#include "kvant/kernels/cpu/kernels.inc"

namespace {

// Dot products of bytes, and products of matrices of bytes and of bf16: optional from Armv8.2 on.
#if defined(__aarch64__) && !defined(KVANT_PORTABLE_ONLY)
#if defined(__linux__)
bool HasCapability(unsigned long list, int bit) { return (getauxval(list) >> bit & 1) != 0; }
bool HasDotProducts() { return HasCapability(AT_HWCAP, 20); }      // HWCAP_ASIMDDP
bool HasMatrixProducts() { return HasCapability(AT_HWCAP2, 13); }  // HWCAP2_I8MM
bool HasBf16Products() { return HasCapability(AT_HWCAP2, 14); }    // HWCAP2_BF16
#else
// Every Mac with an Arm processor has the first, and not every one the others.
bool HasDotProducts() { return true; }
bool HasMatrixProducts() { return false; }
bool HasBf16Products() { return false; }
#endif
#endif

// AMX with bf16, and Linux lets this process use it: it asks once, for all threads.
#if defined(__x86_64__) && !defined(KVANT_PORTABLE_ONLY)
bool HasTileRegisters() {
#if defined(__linux__)
  static const bool has = [] {
    constexpr unsigned kBf16AndTiles = 1u << 22 | 1u << 24;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, of XTILEDATA
    return (d & kBf16AndTiles) == kBf16AndTiles &&
           syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return has;
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
  return nullptr;
}

std::string_view KernelNames() {
  static constexpr char kNames[] =
#define KVANT_CPU_KERNEL(name, supported) ", " #name
#include "kvant/kernels/cpu/kernels.inc"
      ;
  return std::string_view(kNames).substr(2);
}

const KernelSet* ChosenKernels() {
  static const KernelSet* const chosen = [] {
    const char* const forced = std::getenv("KVANT_CPU_ISA");
    const KernelSet* const set = Choose(forced);
    // Nothing is fused then, which is slow and would pass unseen.
    if (set == nullptr) {
      std::fprintf(stderr, "kvant: KVANT_CPU_ISA: '%.64s' is none of what this CPU has of: %s\n",
                   forced, std::string(KernelNames()).c_str());
    }
    return set;
  }();
  return chosen;
}

}  // namespace kvant::cpu
