// The inner loops for NEON with products of matrices of bytes.
#include "kvant/kernels/cpu/isa/codes_floats.h"
#include "kvant/kernels/cpu/isa/codes_kernels.h"
#include "kvant/kernels/cpu/isa/codes_neon_i8mm.h"
#include "kvant/kernels/cpu/isa/floats_neon.h"
#include "kvant/kernels/cpu/isa/kernel_set.h"
#include "kvant/kernels/cpu/isa/values_neon.h"

namespace kvant::cpu {

const KernelSet& neon_i8mm_kernels() {
  static constexpr KernelSet kSet =
      KernelSetOf("neon_i8mm", &kCodeKernels<NeonMatrixCodes, ValuesByBytes<NeonMatrixCodes>,
                                             &kFloatCodeKernels<NeonFloats>>);
  return kSet;
}

}  // namespace kvant::cpu
