// MergeAttention: attention over all tokens, made of that over parts of them.
#ifndef KVANT_KERNELS_CPU_MERGE_H_
#define KVANT_KERNELS_CPU_MERGE_H_

#include <cstdint>

#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {

inline constexpr int kMaxMergeAxes = 12;

// Rows of channels, or one number for each row.
struct MergeArray {
  int buffer = -1;             // index into MergeCall::inputs (or outputs)
  const void* data = nullptr;  // used when buffer is -1; null too: absent
  DataType type = kUndef;
  int64_t strides[kMaxMergeAxes] = {};  // of rows, in elements
  int64_t channel = 0;                  // stride
};

struct MergePart {
  MergeArray output, stats;
};

struct MergeProblem {
  int64_t extents[kMaxMergeAxes] = {};  // of the axes of rows
  int axes = 0;
  int64_t rows = 1, channels = 0;
  const MergePart* parts = nullptr;
  int64_t part_count = 0;
  MergeArray output, stats;  // stats may be absent
  int64_t run = 1;           // the plan: units are so many rows
};

struct MergeCall {
  const MergeProblem* problem = nullptr;
  const KernelSet* kernels = nullptr;
  const void* const* inputs = nullptr;
  void* const* outputs = nullptr;
};

int64_t MergeUnits(const MergeProblem& problem);
// What a unit computes in.
int64_t MergeFloats(const MergeProblem& problem);
void MergeUnit(const MergeCall& call, int64_t unit, float* buffer);

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_MERGE_H_
