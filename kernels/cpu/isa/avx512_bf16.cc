// What AVX-512 BF16 adds to the AVX-512 set.
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {

const KernelSet& avx512_kernels();

const KernelSet& avx512_bf16_kernels() {
  static const KernelSet set = [] {
    KernelSet all = avx512_kernels();
    all.name = "avx512_bf16";
    return all;
  }();
  return set;
}

}  // namespace kvant::cpu
