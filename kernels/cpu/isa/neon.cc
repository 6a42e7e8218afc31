// The inner loops for NEON.
#include "kvant/kernels/cpu/isa/kernel_set.h"

namespace kvant::cpu {

const KernelSet& neon_kernels() {
  static constexpr KernelSet kSet = KernelSetOf("neon", /*codes=*/nullptr);
  return kSet;
}

}  // namespace kvant::cpu
