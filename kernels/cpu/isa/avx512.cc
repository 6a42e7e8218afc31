// The inner loops for AVX-512 (F, BW, DQ, VL, VNNI, VBMI).
#include "kvant/kernels/cpu/isa/codes_avx512.h"
#include "kvant/kernels/cpu/isa/codes_floats.h"
#include "kvant/kernels/cpu/isa/codes_kernels.h"
#include "kvant/kernels/cpu/isa/codes_values.h"
#include "kvant/kernels/cpu/isa/floats_avx512.h"
#include "kvant/kernels/cpu/isa/kernel_set.h"

namespace kvant::cpu {

const KernelSet& avx512_kernels() {
  static constexpr KernelSet kSet = KernelSetOf(
      "avx512", &kCodeKernels<Avx512Codes, Values<Avx512Codes>, &kFloatCodeKernels<Avx512Floats>>);
  return kSet;
}

}  // namespace kvant::cpu
