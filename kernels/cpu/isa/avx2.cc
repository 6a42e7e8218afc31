// The inner loops for AVX2, FMA and F16C.
#include "kvant/kernels/cpu/isa/codes_avx2.h"
#include "kvant/kernels/cpu/isa/codes_kernels.h"
#include "kvant/kernels/cpu/isa/hadamard.h"
#include "kvant/kernels/cpu/isa/load.h"
#include "kvant/kernels/cpu/isa/philox.h"
#include "kvant/kernels/cpu/isa/products.h"
#include "kvant/kernels/cpu/isa/quantize.h"
#include "kvant/kernels/cpu/isa/simd_avx2.h"
#include "kvant/kernels/cpu/isa/softmax.h"
#include "kvant/kernels/cpu/isa/tiles.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {

const KernelSet& avx2_kernels() {
  static constexpr KernelSet kSet = {
      .name = "avx2",
      .load = Load<Avx2>,
      .load_entries = LoadEntries<Avx2>,
      .expand = Expand<Avx2>,
      .scale = Scale<Avx2>,
      .load_scaled = LoadScaled<Avx2>,
      .transpose = Transpose<Avx2>,
      .qk = Qk<Avx2>,
      .softmax = Softmax<Avx2>,
      .exp_row = ExpRow<Avx2>,
      .pv = Pv<Avx2>,
      .tanh = Tanh<Avx2>,
      .hadamard = Hadamard<Avx2>,
      .philox = Philox<Avx2>,
      .quantize = &kQuantizeKernels<Avx2>,
      .codes = &kCodeKernels<Avx2Codes, nullptr>,
      .qk_stored = QkStored<Avx2>,
      .pv_stored = PvStored<Avx2>,
  };
  return kSet;
}

}  // namespace kvant::cpu
