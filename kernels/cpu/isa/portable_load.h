// Reading stored elements as f32, in plain C++.
#ifndef KVANT_KERNELS_CPU_ISA_PORTABLE_LOAD_H_
#define KVANT_KERNELS_CPU_ISA_PORTABLE_LOAD_H_

#include <cstdint>

#include "kvant/graph/data_type.h"

namespace kvant::cpu::portable {

// KernelSet::load.
void Load(DataType type, const void* data, int64_t index, int64_t n, float* out);

}  // namespace kvant::cpu::portable

#endif  // KVANT_KERNELS_CPU_ISA_PORTABLE_LOAD_H_
