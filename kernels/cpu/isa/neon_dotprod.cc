// The inner loops for NEON with dot products of bytes.
#include "kvant/kernels/cpu/isa/codes_floats.h"
#include "kvant/kernels/cpu/isa/codes_kernels.h"
#include "kvant/kernels/cpu/isa/codes_neon.h"
#include "kvant/kernels/cpu/isa/floats_neon.h"
#include "kvant/kernels/cpu/isa/kernel_set.h"
#include "kvant/kernels/cpu/isa/values_neon.h"

namespace kvant::cpu {

const KernelSet& neon_dotprod_kernels() {
  static constexpr KernelSet kSet = KernelSetOf(
      "neon_dotprod",
      &kCodeKernels<NeonCodes, ValuesByBytes<NeonCodes>, &kFloatCodeKernels<NeonFloats>>);
  return kSet;
}

}  // namespace kvant::cpu
