// The inner loops for AVX-512 (F, BW, DQ, VL, VNNI, VBMI).
#include "kvant/kernels/cpu/isa/codes_avx512.h"
#include "kvant/kernels/cpu/isa/codes_floats.h"
#include "kvant/kernels/cpu/isa/codes_kernels.h"
#include "kvant/kernels/cpu/isa/floats_avx512.h"
#include "kvant/kernels/cpu/isa/hadamard.h"
#include "kvant/kernels/cpu/isa/load.h"
#include "kvant/kernels/cpu/isa/philox.h"
#include "kvant/kernels/cpu/isa/products.h"
#include "kvant/kernels/cpu/isa/quantize.h"
#include "kvant/kernels/cpu/isa/simd_avx512.h"
#include "kvant/kernels/cpu/isa/softmax.h"
#include "kvant/kernels/cpu/isa/tiles.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {

const KernelSet& avx512_kernels() {
  static constexpr KernelSet kSet = {
      .name = "avx512",
      .load = Load<Avx512>,
      .load_entries = LoadEntries<Avx512>,
      .expand = Expand<Avx512>,
      .scale = Scale<Avx512>,
      .load_scaled = LoadScaled<Avx512>,
      .transpose = Transpose<Avx512>,
      .qk = Qk<Avx512>,
      .softmax = Softmax<Avx512>,
      .exp_row = ExpRow<Avx512>,
      .pv = Pv<Avx512>,
      .tanh = Tanh<Avx512>,
      .hadamard = Hadamard<Avx512>,
      .philox = Philox<Avx512>,
      .quantize = &kQuantizeKernels<Avx512>,
      .codes = &kCodeKernels<Avx512Codes, &kFloatCodeKernels<Avx512Floats>>,
      .qk_stored = QkStored<Avx512>,
      .pv_stored = PvStored<Avx512>,
  };
  return kSet;
}

}  // namespace kvant::cpu
