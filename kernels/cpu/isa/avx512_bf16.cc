// What AVX-512 BF16 adds to the AVX-512 set: products of bf16 pairs.
#include "kvant/kernels/cpu/isa/pairs.h"
#include "kvant/kernels/cpu/isa/pairs_avx512.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {

const KernelSet& avx512_kernels();

const KernelSet& avx512_bf16_kernels() {
  static const KernelSet set = [] {
    KernelSet all = avx512_kernels();
    all.name = "avx512_bf16";
    // An Emerald Rapids does fewer products a cycle by these than in f32, and few rows of floats
    // gain less from how they are stored (docs/cpu_kernels.md); Intel's others are taken to be
    // alike.
    if (__builtin_cpu_is("intel")) {
      all.stored_rows = 16;
    } else {
      all.pairs = &kPairKernels<Avx512Pairs>;
    }
    return all;
  }();
  return set;
}

}  // namespace kvant::cpu
