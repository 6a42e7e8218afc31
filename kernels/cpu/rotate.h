// Hadamard: runs along the last axis of an array times H / sqrt(run).
#ifndef KVANT_KERNELS_CPU_ROTATE_H_
#define KVANT_KERNELS_CPU_ROTATE_H_

#include <cstdint>

#include "kvant/kernels/cpu/kernels.h"
#include "kvant/kernels/cpu/quantize.h"

namespace kvant::cpu {

// Elements by which source and result move along an axis.
struct RotateAxis {
  int64_t extent = 1, src = 0, dst = 0;
};

inline constexpr int kMaxRotateAxes = 12;

// Lines of `line.extent` elements, one for each index into the outer axes.
struct RotateProblem {
  DataType src_type = kUndef, dst_type = kUndef;
  int64_t block = 1;
  RotateAxis line;
  RotateAxis outer[kMaxRotateAxes];
  int outer_axes = 0;
  int64_t lines = 1, lines_of_row = 1;  // of all, and of one index into the first axis
  // The plan: lines are cut into pieces of whole blocks, and units are `run` pieces.
  int64_t piece = 1, run = 1;
};

int64_t RotateUnits(const RotateProblem& problem);
// Rows, of the first axis, that go nowhere are passed over. `buffer` holds problem.piece floats.
void RotateUnit(const KernelSet& kernels, const RotateProblem& problem,
                const RowPositions& positions, const void* src, void* dst, int64_t unit,
                float* buffer);

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ROTATE_H_
