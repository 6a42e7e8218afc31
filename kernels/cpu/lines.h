// Elements of an array in a row, with any stride, as f32 and back.
#ifndef KVANT_KERNELS_CPU_LINES_H_
#define KVANT_KERNELS_CPU_LINES_H_

#include <cstdint>

#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {

// out[i] = element index + i * stride.
inline void LoadLine(const KernelSet& kernels, DataType type, const void* data, int64_t index,
                     int64_t stride, int64_t n, float* out) {
  if (stride == 1) return kernels.load(type, data, index, n, out);
  for (int64_t i = 0; i < n; ++i) kernels.load(type, data, index + i * stride, 1, out + i);
}

// The other way round, rounded to the type.
inline void StoreLine(const KernelSet& kernels, DataType type, void* data, int64_t index,
                      int64_t stride, int64_t n, const float* values) {
  if (IsComputeFloat(type) && stride == 1) {
    return kernels.quantize->convert(kF32, values, 0, n, type, data, index);
  }
  for (int64_t i = 0; i < n; ++i) StoreElement(type, data, index + i * stride, values[i]);
}

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_LINES_H_
