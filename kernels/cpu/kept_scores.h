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
  // [rows][kTokenTile] of the tile of tokens that is next.
  float* scores() const { return scores_ + tile_ * rows_ * kTokenTile; }
  // What softmax subtracted of `rows` rows from `from` on, in the tile before the next: the highest
  // scores so far.
  void KeepMax(int64_t from, int64_t rows, const State& state) const;
  // Makes e^(score - a number of the row) of the scores in the tile before the next, as softmax has
  // done if they are kept, and sets divisors[r] to what makes probabilities of these. divisors:
  // WholeHalves(rows) floats.
  void Exponentials(const KernelSet& kernels, int64_t from, int64_t rows, int64_t columns,
                    const State& state, float* scores, float* divisors) const;

 private:
  float* MaxOf(int64_t from) const { return max_ + (tile_ - 1) * rows_ + from; }

  const int64_t rows_;
  float *scores_ = nullptr, *max_ = nullptr;  // [tiles][rows][kTokenTile], [tiles][rows]
  int64_t tile_ = 0;
};

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_KEPT_SCORES_H_
