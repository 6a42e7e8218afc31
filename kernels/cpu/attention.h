// Fused attention forward: online softmax over tiles of tokens, O(tile) scratch.
//
// The work is a flat range of turns of units (schedule.h). Where tokens were cut into chunks, units
// join their results as soon as there are two. What is computed depends on the problem, lengths and
// offsets only, so results are the same however units are spread over threads.
#ifndef KVANT_KERNELS_CPU_ATTENTION_H_
#define KVANT_KERNELS_CPU_ATTENTION_H_

#include <array>
#include <cstdint>

#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/kernels.h"
#include "kvant/kernels/cpu/schedule.h"

namespace kvant::cpu {

// Sets own_floats and shared_floats of a problem that is complete otherwise.
void MeasureScratch(AttentionProblem& problem);
// Scratch of a worker; of a call with two problems, the larger one.
int64_t WorkerFloats(const AttentionProblem& problem);

// Who runs turns of a schedule, one after another.
struct Worker {
  float* scratch;  // WorkerFloats of the largest of the call's problems
  // Whose row tiles are ready there, and which: scratch is divided by the problem.
  const AttentionProblem* problem = nullptr;
  std::array<int64_t, kMostInTurn> tiles;
};

void RunTurn(const KernelSet& kernels, const AttentionCall& call, const Schedule& schedule,
             int64_t turn, Worker& worker);

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ATTENTION_H_
