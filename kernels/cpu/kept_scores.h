// Scores of a row tile that are kept where probabilities are rounded: that takes the statistics of
// all columns first.
#ifndef KVANT_KERNELS_CPU_KEPT_SCORES_H_
#define KVANT_KERNELS_CPU_KEPT_SCORES_H_

#include <cstdint>

#include "kvant/kernels/cpu/arena.h"
#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/finish.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {

// Whether probabilities are rounded once the statistics of all columns are known.
inline bool RoundsProbabilities(const AttentionProblem& problem) {
  return problem.pass != SoftmaxPass::kProbabilities && problem.probs_rounding.type != kUndef;
}

// Of tiles of tokens one after another, in the same order each time.
class KeptScores {
 public:
  // Rows of a row tile, at most, whose scores are kept; 0 where probabilities are not rounded.
  // Those of more rows are computed twice.
  static int64_t MostRows(const AttentionProblem& problem);

  KeptScores(const AttentionProblem& problem, Arena& own);

  bool any() const { return scores_ != nullptr; }
  void Rewind() { tile_ = 0; }
  void Next() { ++tile_; }
  // [rows][kTokenTile]: the scores of the next tile of tokens.
  float* scores() const { return scores_ + tile_ * rows_ * kTokenTile; }
  // Of the tile that Next has passed: keeps the highest scores so far of rows [from, from + rows),
  // which softmax has subtracted there.
  void KeepMax(int64_t from, int64_t rows, const State& state) const;
  // Of the same: sets divisors[r] so that what softmax has left, over it, is a probability.
  // divisors: WholeHalves(rows) floats.
  void Divisors(const KernelSet& kernels, int64_t from, int64_t rows, const State& state,
                float* divisors) const;

 private:
  float* MaxOf(int64_t from) const { return max_ + (tile_ - 1) * rows_ + from; }

  const int64_t rows_;
  float *scores_ = nullptr, *max_ = nullptr;  // [tiles][rows][kTokenTile], [tiles][rows]
  int64_t tile_ = 0;
};

// Where scores are not kept: makes e^(score - the highest of the row) of them, and sets divisors[r]
// likewise.
void ExponentialsOf(const KernelSet& kernels, int64_t rows, int64_t columns, const State& state,
                    float* scores, float* divisors);

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_KEPT_SCORES_H_
