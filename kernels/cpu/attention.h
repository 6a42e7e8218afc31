// Fused attention forward: online softmax over tiles of tokens, O(tile) scratch.
//
// The work is a flat range of units, each (group of heads that share K and V, tile of
// query rows, chunk of tokens), then, if tokens were cut into chunks, a flat range of
// merges, one per (group, row tile). What a unit computes depends on the problem only,
// so results are the same however units are spread over threads.
#ifndef KVANT_KERNELS_CPU_ATTENTION_H_
#define KVANT_KERNELS_CPU_ATTENTION_H_

#include <cstdint>

#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {

int64_t RowTiles(const AttentionProblem& problem);  // over all groups
inline int64_t Units(const AttentionProblem& problem) { return RowTiles(problem) * problem.splits; }
// Scratch of a unit, and of the partial results of all of them.
int64_t UnitFloats(const AttentionProblem& problem);
int64_t PartialFloats(const AttentionProblem& problem);

void RunUnit(const KernelSet& kernels, const AttentionCall& call, int64_t unit, float* scratch);
// When there are splits, once all units have run: joins those of a row tile, in order.
// `scratch`: UnitFloats.
void RunMerge(const KernelSet& kernels, const AttentionCall& call, int64_t row_tile,
              float* scratch);

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ATTENTION_H_
