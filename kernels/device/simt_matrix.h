// What the matrix instructions of a warp compute, from the 32 lanes' registers at once.
#ifndef KVANT_KERNELS_DEVICE_SIMT_MATRIX_H_
#define KVANT_KERNELS_DEVICE_SIMT_MATRIX_H_

#include <cstdint>

#include "kvant/kernels/device/simt.h"
#include "kvant/kernels/device/simt_calls.h"

namespace kvant::simt {

inline constexpr int kLanes = 32;

struct MmaArguments {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};
void MultiplyMatrices(MmaKind kind, const MmaModel& model, const MmaArguments* const lanes[kLanes]);

// Four matrices of 8 x 8 from their rows of 16 bytes, dealt out to `words` of each lane.
void DealMatrices(const unsigned char* const rows[kLanes], bool transposed,
                  uint32_t (*const words[kLanes])[4]);

// One matrix of 8 x 8, a word per lane, transposed in place.
void TransposeWords(uint32_t* const words[kLanes]);

}  // namespace kvant::simt

#endif  // KVANT_KERNELS_DEVICE_SIMT_MATRIX_H_
