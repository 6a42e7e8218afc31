// Around the two products: the online-softmax state, its merging, dropout, rounding,
// and the writing of results.
#ifndef KVANT_KERNELS_CPU_FINISH_H_
#define KVANT_KERNELS_CPU_FINISH_H_

#include <cstdint>

#include "kvant/kernels/cpu/arena.h"
#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/dequantize.h"
#include "kvant/kernels/cpu/kernels.h"
#include "kvant/kernels/cpu/score_steps.h"

namespace kvant::cpu {

// Rows [first, first + rows) of those that share K and V at `batch`; row b2 * q_len + q.
struct RowTile {
  Position batch;
  int64_t first = 0;
  int64_t rows = 0;
  Extent extent;  // of the batch row

  Position At(int64_t r) const {
    Position p = batch;
    p.at[2] += (first + r) / extent.q_len;
    p.at[kRow] = extent.q_first + (first + r) % extent.q_len;
    return p;
  }
};

// Of each row, over the columns seen so far: the highest score, sum exp(score - max), and
// sum exp(score - max) * v.
struct State {
  float* max = nullptr;
  float* sum = nullptr;
  float* out = nullptr;

  static State In(Arena& arena, int64_t rows, int64_t v_head_size) {
    State state;
    state.max = arena.Take(rows);
    state.sum = arena.Take(rows);
    state.out = arena.Take(rows * v_head_size);
    return state;
  }
  // That of the rows from `row` on.
  State From(int64_t row, int64_t v_head_size) const {
    return {max + row, sum + row, out + row * v_head_size};
  }
};

// Adds what `other` has of the columns behind those of `state`.
void JoinStates(const KernelSet& kernels, int64_t rows, int64_t v_head_size, const State& state,
                const State& other);
// Lets each row's sink logit, if there are any, join the denominator.
void AddSinks(const AttentionProblem& problem, const Reader& reader, const RowTile& tile,
              State& state);
// Writes output and statistics. With `normalize`, the output is divided by the sum; then it is
// rotated, where the problem says so, and rounded.
void Finish(const KernelSet& kernels, const AttentionProblem& problem, const RowTile& tile,
            const State& state, bool normalize, void* const* outputs);

// Where the statistics of the `count` rows or columns at a batch position lie, as the two passes
// of a softmax over rows exchange them: [b0][b1][b2][2][count] in all. The maximum and ln(sum
// exp(x - maximum)) are apart because of masks like -1e30, in which the logarithm would be lost.
struct Statistics {
  float* max;
  float* log_sum;
};
Statistics StatisticsAt(const AttentionProblem& problem, const Position& batch, int64_t count,
                        float* all);
// Writes those of the rows. Of a row without any finite score, such that exp(-inf - max - log_sum)
// is what its softmax has.
void StoreStatistics(const AttentionProblem& problem, const RowTile& tile, const State& state,
                     float* all);
// Subtracts those of the columns [token, token + n); scores: [rows][kTokenTile].
void SubtractStatistics(const AttentionProblem& problem, const RowTile& tile, int64_t token,
                        int64_t n, float* all, float* scores);

struct DropoutState {
  uint64_t seed = 0, offset = 0;
  uint64_t threshold = 0;  // words below it are dropped
  float factor = 1.f;      // what is kept is multiplied by
};
DropoutState ReadDropout(const AttentionProblem& problem, const Reader& reader);
// Drops and rescales among n columns from `token` on; probs: [rows][kTokenTile].
void ApplyDropout(const KernelSet& kernels, const AttentionProblem& problem,
                  const DropoutState& dropout, const RowTile& tile, int64_t token, int64_t n,
                  float* probs);
void WriteDropoutMask(const KernelSet& kernels, const AttentionProblem& problem,
                      const DropoutState& dropout, const RowTile& tile, ColumnRange columns,
                      void* const* outputs);

// Of rows [rows][kTokenTile] the first n: value / divisor of the row, and, if there is a rounding,
// -> code -> value. Others up to WholeHalves(n) become 0. `divisors` may be overwritten.
void RoundQuotients(const KernelSet& kernels, const Rounding& rounding, int64_t rows, int64_t n,
                    float* divisors, float* values);

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_FINISH_H_
