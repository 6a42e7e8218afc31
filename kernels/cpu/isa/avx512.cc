// The inner loops for AVX-512 (F, BW, DQ, VL, VNNI, VBMI).
#include "kvant/kernels/cpu/isa/bytes_avx512.h"
#include "kvant/kernels/cpu/isa/codes_avx512.h"
#include "kvant/kernels/cpu/isa/codes_bytes_avx512.h"
#include "kvant/kernels/cpu/isa/codes_floats.h"
#include "kvant/kernels/cpu/isa/codes_kernels.h"
#include "kvant/kernels/cpu/isa/codes_tokens.h"
#include "kvant/kernels/cpu/isa/codes_values.h"
#include "kvant/kernels/cpu/isa/floats_avx512.h"
#include "kvant/kernels/cpu/isa/kernel_set.h"
#include "kvant/kernels/cpu/isa/values_avx512.h"

namespace kvant::cpu {

const KernelSet& avx512_kernels() {
  static constexpr KernelSet kSet = [] {
    KernelSet all = KernelSetOf(
        "avx512", &kCodeKernels<Avx512Codes, ValuesByBytes, &kFloatCodeKernels<Avx512Floats>,
                                PrepareForTokens<Bytes>, ScoresByTokens<Bytes>>);
    all.bytes = &kByteKernels;
    return all;
  }();
  return kSet;
}

}  // namespace kvant::cpu
