// Which tokens of which segments the columns of a batch row are, and how they are cut into tiles
// and chunks. All follow from shapes, KV lengths and ranges alone.
#ifndef KVANT_KERNELS_CPU_COLUMNS_H_
#define KVANT_KERNELS_CPU_COLUMNS_H_

#include <algorithm>
#include <cstdint>

#include "kvant/kernels/cpu/arena.h"
#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/dequantize.h"
#include "kvant/kernels/cpu/pieces.h"

namespace kvant::cpu {

// Columns [begin, end).
struct ColumnRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// The columns of one batch row.
class Columns {
 public:
  // Takes scratch from `arena`.
  Columns(const AttentionProblem& problem, Arena& arena);

  // To be called before all others.
  void Read(const AttentionProblem& problem, const Reader& reader, const Position& batch);

  int64_t count() const { return count_; }  // those beyond do not exist
  Pieces k() const { return k_; }
  Pieces v() const { return v_; }

  // Where the tile of a column begins and ends. Tiles are cut so that those of quantized tokens
  // begin at multiples of kTokenTile in their segment, where their groups do.
  int64_t TileBegin(int64_t column) const {
    return std::max<int64_t>((column + lead_) / kTokenTile * kTokenTile - lead_, 0);
  }
  int64_t TileEnd(int64_t column) const {
    return ((column + lead_) / kTokenTile + 1) * kTokenTile - lead_;
  }
  // The columns are cut into chunks() of them, of whole tiles; at most problem.splits.
  int64_t chunks() const { return chunks_; }
  ColumnRange Chunk(int64_t index) const {
    const int64_t begin = index * chunk_ - lead_;
    return {std::max<int64_t>(begin, 0), std::min(begin + chunk_, count_)};
  }

 private:
  // Of one side; `at` is its first range.
  static Pieces ReadPieces(const AttentionProblem& problem, const Reader& reader, Position at,
                           const Segment* segments, int count, Piece* room);
  // By the longest quantized piece; -1 without any.
  static int64_t LeadOf(const Pieces& pieces);

  Piece *k_room_, *v_room_;
  Pieces k_, v_;
  int64_t count_ = 0;
  int64_t lead_ = 0;  // columns that the first tile lacks
  int64_t chunks_ = 1, chunk_ = 0;
};

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_COLUMNS_H_
