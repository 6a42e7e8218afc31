// Reading stored elements as f32, in plain C++.
#ifndef KVANT_KERNELS_CPU_ISA_PORTABLE_LOAD_H_
#define KVANT_KERNELS_CPU_ISA_PORTABLE_LOAD_H_

#include <bit>
#include <cstdint>

#include "kvant/graph/data_type.h"

namespace kvant::cpu::portable {

inline float FromF16(uint16_t bits) {
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fff) << 13;
  // Exponents are off by 112; multiplying also normalizes subnormals.
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t special = (bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | special |
                              static_cast<uint32_t>(bits & 0x8000) << 16);
}

// KernelSet::load.
void Load(DataType type, const void* data, int64_t index, int64_t n, float* out);

}  // namespace kvant::cpu::portable

#endif  // KVANT_KERNELS_CPU_ISA_PORTABLE_LOAD_H_
