// Hadamard rotations of rows of queries and of the output: a warp takes a row, of which lane l has
// channels l, l + 32, ...
#ifndef KVANT_KERNELS_CUDA_ROTATION_H_
#define KVANT_KERNELS_CUDA_ROTATION_H_

#include "kvant/kernels/cuda/elements.h"

namespace kvant::cuda {

// Of a power of two.
KVANT_DEVICE constexpr float RootOf(i32 block) {
  float root = 1.f;
  for (; block >= 4; block /= 4) root *= 2.f;
  return block == 2 ? root * 1.41421356f : root;
}

// Each run of `block` channels times a matrix of 1 and -1, Sylvester's, and `scale`. Runs divide
// the channels that there are.
template <i32 kSlots>
KVANT_DEVICE void Rotate(i32 block, float scale, float (&x)[kSlots]) {
  KVANT_UNROLL
  for (i32 n = 1; n < MinOf(block, 32); n *= 2) {
    KVANT_UNROLL
    for (i32 s = 0; s < kSlots; ++s) {
      const float other = ShuffleXor(x[s], n);
      x[s] = (LaneIndex() & n) != 0 ? other - x[s] : x[s] + other;
    }
  }
  KVANT_UNROLL
  for (i32 n = 1; n * 32 < block; n *= 2) {
    KVANT_UNROLL
    for (i32 s = 0; s < kSlots; ++s) {
      if ((s & n) != 0 || s + n >= kSlots) continue;
      const float low = x[s], high = x[(s + n) % kSlots];
      x[s] = low + high;
      x[(s + n) % kSlots] = low - high;
    }
  }
  KVANT_UNROLL
  for (i32 s = 0; s < kSlots; ++s) x[s] *= scale;
}

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_ROTATION_H_
