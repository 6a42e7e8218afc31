// Fused attention forward: online softmax over tiles of tokens, O(tile) scratch.
//
// The work is a flat range of units (schedule.h). Where tokens were cut into chunks, units join
// their results as soon as there are two. What is computed depends on the problem, lengths and
// offsets only, so results are the same however units are spread over threads.
#ifndef KVANT_KERNELS_CPU_ATTENTION_H_
#define KVANT_KERNELS_CPU_ATTENTION_H_

#include <cstdint>

#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/kernels.h"
#include "kvant/kernels/cpu/schedule.h"

namespace kvant::cpu {

// Scratch of a unit.
int64_t UnitFloats(const AttentionProblem& problem);
// Of AttentionCall::partials.
int64_t PartialFloats(const AttentionProblem& problem);

// `scratch`, of UnitFloats, is left to the units of the same schedule that run in it next, and
// `tile` says which row tile is ready there: kNoTile before the first.
inline constexpr int64_t kNoTile = -1;
void RunUnit(const KernelSet& kernels, const AttentionCall& call, const Schedule& schedule,
             int64_t unit, int64_t& tile, float* scratch);

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ATTENTION_H_
