// Schedule: the units of one execution.
//
// A unit is (batch row, heads that share K and V, tile of query rows, chunk of tokens). The tokens
// of all tiles together are cut into so many units, whatever the number of threads, so a long batch
// row has more chunks than a short one. Units follow from shapes, lengths and offsets, never from
// the threads.
//
// The units of a batch row go tile by tile, and through the chunks of each: a head's tokens are
// read in the order they lie in. Of pages, and of tokens whose heads lie side by side, they go
// chunk by chunk, and through the tiles of each. Where rows are few, a worker takes several of
// these in turn, a tile of tokens of each, so that it reads what lies side by side at about the
// same time. How many take turns depends on the number of workers; results do not. Heads of a token
// prefetch one another's rows, so all of them must take turns. Chunks are then small enough that
// many workers have turns of all heads.
#ifndef KVANT_KERNELS_CPU_SCHEDULE_H_
#define KVANT_KERNELS_CPU_SCHEDULE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/dequantize.h"
#include "kvant/kernels/cpu/finish.h"

namespace kvant::cpu {

inline constexpr int64_t kMostInTurn = 16;

class Schedule {
 public:
  // Of a batch row.
  struct Row {
    Extent extent;
    const AttentionProblem* problem = nullptr;
    int64_t tiles_of_group = 0, splits = 1;
    int64_t unit = 0, partial = 0;  // the first
    int64_t partial_floats = 0;     // where that is
    int64_t turn = 0, in_turn = 1;  // the first, and the units of one
  };
  // Units [unit, unit + count) of a row, all of one chunk where they are several.
  struct Turn {
    const Row* row = nullptr;
    int64_t unit = 0, count = 0;
  };
  // Where a unit is.
  struct Place {
    const Row* row = nullptr;
    int64_t b0 = 0;
    int64_t tile = 0;  // of the batch row's
    int64_t split = 0;
    int64_t partial = 0;  // of the tile's first split

    // No other tile has this.
    int64_t tile_id() const { return row->unit + tile; }
    // Where the partial result of a split of the tile is in AttentionCall::partials.
    int64_t PartialFloats(int64_t of_split) const {
      return row->partial_floats +
             (partial + of_split - row->partial) * FloatsOfPartial(*row->problem);
    }
  };

  // Bytes that `room` must have, and floats of all partial results, for a call with these problems;
  // few: may be null.
  static size_t Bytes(const AttentionProblem& problem, const AttentionProblem* few);
  static int64_t PartialFloats(const AttentionProblem& problem, const AttentionProblem* few);
  // Splits of every tile, where shapes alone say how many tokens and queries there are.
  static std::optional<int64_t> StaticSplits(const AttentionProblem& problem);
  // Partial results that a problem's rows may have: the states of the chunks of tiles that have
  // several.
  static int64_t MostPartials(const AttentionProblem& problem);
  // Room for one.
  static int64_t FloatsOfPartial(const AttentionProblem& problem);

  // Tokens of a tile of a batch row with so many: half of what there may be where they are few, and
  // where tiles of all heads in turn would be too large.
  static int64_t TokenTile(const AttentionProblem& problem, int64_t tokens);
  // Units of a turn, at most.
  static int64_t MostInTurn(const AttentionProblem& problem);

  Schedule(const AttentionCall& call, const Reader& reader, int workers, void* room);

  int64_t units() const { return units_; }
  Place UnitAt(int64_t unit) const;
  int64_t turns() const { return turns_; }
  // Of that after the last, no units.
  Turn TurnAt(int64_t turn) const;
  // Of the two who have made what is to be joined, the second, who sees what both have written.
  // Each calls it once, with the partial result that joins another.
  bool ComesSecond(int64_t partial) const {
    return came_[partial].exchange(true, std::memory_order_acq_rel);
  }

 private:
  const AttentionProblem& problem_;
  Row* const rows_;
  std::atomic<bool>* const came_;  // by partial result
  const bool by_chunks_;           // else by tiles
  int64_t units_ = 0, turns_ = 0;
};

// The rows of a unit.
RowTile MakeRowTile(const Schedule::Place& place);

// Rows that share K and V, of so many queries.
inline int64_t RowsPerGroup(const AttentionProblem& problem, int64_t queries) {
  return queries * (problem.kv_varies_over_b2 ? 1 : problem.batch[2]);
}
// Heads, or groups of them, that have K and V of their own in a batch row.
inline int64_t Groups(const AttentionProblem& problem) {
  return problem.batch[1] * (problem.kv_varies_over_b2 ? problem.batch[2] : 1);
}

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_SCHEDULE_H_
