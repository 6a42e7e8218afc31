// What happens to scores between the first product and softmax.
#ifndef KVANT_KERNELS_CPU_SCORE_STEPS_H_
#define KVANT_KERNELS_CPU_SCORE_STEPS_H_

#include <cstdint>

#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/columns.h"
#include "kvant/kernels/cpu/dequantize.h"

namespace kvant::cpu {

// Columns of the row at `p` whose scores may be other than -inf after all steps, of those of its
// batch row: what bands that write -inf leave, where no later step revives it.
// (An additive operand of +inf is not taken for one that does.)
ColumnRange LiveColumns(const AttentionProblem& problem, const Reader& reader, const Position& p,
                        const Extent& extent);

// Of the columns of its batch row, those that no band changes for the row at `p`.
ColumnRange UnbandedColumns(const AttentionProblem& problem, const Reader& reader,
                            const Position& p, const Extent& extent);

// How many of the first steps multiply or divide a row by one number, which the row's query
// can be multiplied by instead; and the product of the first `leading` of them for the
// row at `p`.
int LeadingFactors(const AttentionProblem& problem);
float Factor(const AttentionProblem& problem, const Reader& reader, const Position& p, int leading);

// What steps from `first` on, and rounding probabilities, multiply an error of a score of the row
// at `p` by, at most; infinite where that varies over columns, or is not finite.
float Amplification(const AttentionProblem& problem, const Reader& reader, const Position& p,
                    int first);

// Which steps are left to do.
struct StepRange {
  int first = 0;            // those before it are in the queries
  bool skip_bands = false;  // the columns are in every band
};
// Those from `first` on, where `in_bands` says whether the columns are in every band; none are
// left if the range begins at step_count.
StepRange StepsLeft(const AttentionProblem& problem, int first, bool in_bands);

// The operand that was read last, for rows of a tile that have the same.
struct StepOperand {
  float* scratch = nullptr;  // 2 * kTokenTile
  const Step* step = nullptr;
  int64_t index = 0;  // in its array
};

// Applies steps to scores of n columns from position `p` on. `operand` is for one tile of tokens.
void ApplySteps(const AttentionProblem& problem, const Reader& reader, const StepRange& steps,
                const Position& p, int64_t n, const Extent& extent, float* scores,
                StepOperand& operand);

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_SCORE_STEPS_H_
