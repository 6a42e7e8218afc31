// The inner loops for AVX2, FMA and F16C.
#include "kvant/kernels/cpu/isa/codes_avx2.h"
#include "kvant/kernels/cpu/isa/codes_floats.h"
#include "kvant/kernels/cpu/isa/codes_kernels.h"
#include "kvant/kernels/cpu/isa/codes_tokens.h"
#include "kvant/kernels/cpu/isa/codes_tokens_avx2.h"
#include "kvant/kernels/cpu/isa/codes_values.h"
#include "kvant/kernels/cpu/isa/floats_avx2.h"
#include "kvant/kernels/cpu/isa/kernel_set.h"

namespace kvant::cpu {

const KernelSet& avx2_kernels() {
  static constexpr auto* kFloats = &kFloatCodeKernels<Avx2Floats>;
  static constexpr KernelSet kSet = [] {
    KernelSet set = KernelSetOf(
        "avx2", &kCodeKernels<Avx2Codes, Values<Avx2Codes>, kFloats, PrepareForTokens<Avx2Tokens>,
                              ScoresByTokens<Avx2Tokens>>);
    set.stored_rows = 16;  // of floats: measured (docs/cpu_kernels.md)
    set.stored_rows_of_runs = 8;
    return set;
  }();
  return kSet;
}

}  // namespace kvant::cpu
