#include "kvant/kernels/cpu/kept_scores.h"

#include <algorithm>
#include <limits>

#include "kvant/kernels/cpu/schedule.h"

namespace kvant::cpu {
namespace {

// Of the row tiles of a worker. With half as much 4k tokens take 1.13 of the time, with twice as
// much 0.93 (Zen 4).
constexpr int64_t kMostFloats = int64_t{1} << 19;

// Tiles of tokens of a batch row, at most. The first and the last may have fewer tokens than
// others, and all have half as many where there are few.
int64_t MostTiles(const AttentionProblem& problem) {
  return CeilDiv(problem.kv_len, Schedule::TokenTile(problem, problem.kv_len)) + 4;
}

// Of an empty row, Finish decides what the output is.
float BaseOf(float max) { return max == -std::numeric_limits<float>::infinity() ? 0.f : max; }
float SumOf(float sum) { return sum == 0.f ? 1.f : sum; }

}  // namespace

int64_t KeptScores::MostRows(const AttentionProblem& problem) {
  if (!RoundsProbabilities(problem)) return 0;
  return kMostFloats / (Schedule::MostInTurn(problem) * MostTiles(problem) * (kTokenTile + 1));
}

KeptScores::KeptScores(const AttentionProblem& problem, Arena& own) : rows_(problem.row_tile) {
  if (rows_ > MostRows(problem)) return;
  scores_ = own.Take(MostTiles(problem) * rows_ * kTokenTile);
  max_ = own.Take(MostTiles(problem) * rows_);
}

void KeptScores::KeepMax(int64_t from, int64_t rows, const State& state) const {
  std::copy_n(state.max, rows, MaxOf(from));
}

void KeptScores::Divisors(const KernelSet& kernels, int64_t from, int64_t rows, const State& state,
                          float* divisors) const {
  const float* const then = MaxOf(from);
  for (int64_t r = 0; r < rows; ++r) divisors[r] = then[r] - BaseOf(state.max[r]);
  std::fill(divisors + rows, divisors + WholeHalves(rows), 0.f);
  kernels.exp_row(divisors, WholeHalves(rows), 0.f);
  // Of a tile far below later ones, infinity.
  for (int64_t r = 0; r < rows; ++r) divisors[r] = SumOf(state.sum[r]) / divisors[r];
}

void ExponentialsOf(const KernelSet& kernels, int64_t rows, int64_t columns, const State& state,
                    float* scores, float* divisors) {
  for (int64_t r = 0; r < rows; ++r) {
    kernels.exp_row(scores + r * kTokenTile, columns, BaseOf(state.max[r]));
    divisors[r] = SumOf(state.sum[r]);
  }
}

}  // namespace kvant::cpu
