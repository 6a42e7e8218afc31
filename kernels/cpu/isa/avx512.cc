// The inner loops for AVX-512 (F, BW, DQ, VL, VNNI, VBMI).
#include "kvant/kernels/cpu/isa/codes_avx512.h"
#include "kvant/kernels/cpu/isa/codes_kernels.h"
#include "kvant/kernels/cpu/isa/load.h"
#include "kvant/kernels/cpu/isa/products.h"
#include "kvant/kernels/cpu/isa/simd_avx512.h"
#include "kvant/kernels/cpu/isa/softmax.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {

const KernelSet& avx512_kernels() {
  static constexpr KernelSet kSet = {
      "avx512",       Load<Avx512>, Qk<Avx512>,   Softmax<Avx512>,
      ExpRow<Avx512>, Pv<Avx512>,   Tanh<Avx512>, &kCodeKernels<Avx512Codes>};
  return kSet;
}

}  // namespace kvant::cpu
