// What orders the accesses of a block's threads.
#ifndef KVANT_KERNELS_DEVICE_SIMT_MOMENT_H_
#define KVANT_KERNELS_DEVICE_SIMT_MOMENT_H_

#include <cstdint>

namespace kvant::simt {

// How far a thread is: those of two threads are ordered if a barrier of the block lies between
// them, or a barrier of the warp that they share.
struct Moment {
  uint32_t block_barriers = 0;  // since the launch
  uint32_t warp_barriers = 0;   // of the thread's warp
};

inline bool SameWarp(int thread, int other) { return thread / 32 == other / 32; }

// Whether what `thread` did comes before what `other` does later, in the same block.
inline bool IsOrdered(int thread, Moment when, int other, Moment later) {
  return thread == other || when.block_barriers != later.block_barriers ||
         (SameWarp(thread, other) && when.warp_barriers != later.warp_barriers);
}

}  // namespace kvant::simt

#endif  // KVANT_KERNELS_DEVICE_SIMT_MOMENT_H_
