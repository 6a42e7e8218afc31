// Scales and zero points of groups by ggml's formulas: quantize_row_{q8_0,q4_0,q4_1,iq4_nl}_ref in
// ggml/src/ggml-quants.c, in f32 as there.
#ifndef KVANT_KERNELS_CPU_GGML_GROUPS_H_
#define KVANT_KERNELS_CPU_GGML_GROUPS_H_

#include <cstdint>

#include "kvant/kernels/cpu/quantize_kernels.h"

namespace kvant::cpu {

// Groups side by side, from element `index` on, and what there is of each.
struct GgmlGroups {
  DataType type = kUndef;
  const void* src = nullptr;
  int64_t index = 0, group = 0, groups = 0;
  float* min = nullptr;  // as QuantizeKernels::row_ranges gives them; may be overwritten
  float* max = nullptr;
  // Written; zero points, those as stored, where the rule has them.
  float* scales = nullptr;
  float* reciprocals = nullptr;  // QuantizeParameters::reciprocals
  float* zero_points = nullptr;
};

// Where a scale or minimum would be infinite in its type it is the largest number, from which codes
// follow. 0 stays 0.
void FindGgmlParameters(const QuantizeKernels& kernels, const ParameterRule& rule,
                        const GgmlGroups& groups);

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_GGML_GROUPS_H_
