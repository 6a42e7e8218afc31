// The inner loops for AVX2, FMA and F16C.
#include "kvant/kernels/cpu/isa/codes_avx2.h"
#include "kvant/kernels/cpu/isa/codes_kernels.h"
#include "kvant/kernels/cpu/isa/load.h"
#include "kvant/kernels/cpu/isa/products.h"
#include "kvant/kernels/cpu/isa/simd_avx2.h"
#include "kvant/kernels/cpu/isa/softmax.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {

const KernelSet& avx2_kernels() {
  static constexpr KernelSet kSet = {
      "avx2",       Load<Avx2>, Qk<Avx2>,   Softmax<Avx2>,
      ExpRow<Avx2>, Pv<Avx2>,   Tanh<Avx2>, &kCodeKernels<Avx2Codes>};
  return kSet;
}

}  // namespace kvant::cpu
