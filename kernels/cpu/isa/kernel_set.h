// The set of inner loops that the templates over Simd are for the unit's instruction set.
#ifndef KVANT_KERNELS_CPU_ISA_KERNEL_SET_H_
#define KVANT_KERNELS_CPU_ISA_KERNEL_SET_H_

#include "kvant/kernels/cpu/isa/hadamard.h"
#include "kvant/kernels/cpu/isa/load.h"
#include "kvant/kernels/cpu/isa/philox.h"
#include "kvant/kernels/cpu/isa/products.h"
#include "kvant/kernels/cpu/isa/quantize.h"
#include "kvant/kernels/cpu/isa/round.h"
#include "kvant/kernels/cpu/isa/simd.h"
#include "kvant/kernels/cpu/isa/softmax.h"
#include "kvant/kernels/cpu/isa/tiles.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {
namespace {

// `codes` may be null.
constexpr KernelSet KernelSetOf(const char* name, const CodeKernels* codes) {
  return {
      .name = name,
      .load = Load<Simd>,
      .load_entries = LoadEntries<Simd>,
      .expand = Expand<Simd>,
      .scale = Scale<Simd>,
      .load_scaled = LoadScaled<Simd>,
      .transpose = Transpose<Simd>,
      .qk = Qk<Simd>,
      .softmax = Softmax<Simd>,
      .exp_row = ExpRow<Simd>,
      .round = Round<Simd>,
      .pv = Pv<Simd>,
      .tanh = Tanh<Simd>,
      .hadamard = Hadamard<Simd>,
      .philox = Philox<Simd>,
      .quantize = &kQuantizeKernels<Simd>,
      .codes = codes,
      .qk_channels = QkChannels<Simd>,
      .qk_stored = QkStored<Simd>,
      .pv_stored = PvStored<Simd>,
  };
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_KERNEL_SET_H_
