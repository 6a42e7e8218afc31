// Which tokens of which segments the columns of a batch row are, and how they are cut into tiles
// and chunks.
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

// What there is of batch row b0.
Extent ExtentOf(const AttentionProblem& problem, const Reader& reader, int64_t b0);

// The columns of one batch row.
class Columns {
 public:
  // Takes scratch from `arena`.
  Columns(const AttentionProblem& problem, Arena& arena);

  // To be called before all others: columns of `extent`, in up to `splits` chunks.
  void Read(const AttentionProblem& problem, const Reader& reader, int64_t b0, const Extent& extent,
            int64_t splits);

  // Of what is in pages, nothing from this column on is prefetched ahead of its use.
  void PrefetchUntil(int64_t column);
  // Whose tiles come between two of these.
  void TakeTurns(const InTurn& in_turn);

  Pieces k() const { return k_; }
  Pieces v() const { return v_; }

  // Where the tile of a column begins and ends. Tiles are cut so that those of quantized tokens
  // begin at multiples of their size in their segment, where their groups do.
  int64_t TileBegin(int64_t column) const { return (column + lead_) / tile_ * tile_ - lead_; }
  int64_t TileEnd(int64_t column) const { return ((column + lead_) / tile_ + 1) * tile_ - lead_; }
  // The columns are cut into chunks() of them, of whole tiles; at least one.
  int64_t chunks() const { return chunks_; }
  ColumnRange Chunk(int64_t index) const {
    const int64_t begin = base_ + index * chunk_ - lead_;
    return {std::max(begin, first_), std::min(begin + chunk_, end_)};
  }

 private:
  // Of one side.
  static Pieces ReadPieces(const AttentionProblem& problem, const Reader& reader, Position at,
                           const Segment* segments, int count, Piece* room);
  // By the longest quantized piece; -1 without any.
  static int64_t LeadOf(const Pieces& pieces);

  Piece *k_room_, *v_room_;
  Pieces k_, v_;
  int64_t first_ = 0, end_ = 0;  // columns that exist
  int64_t tile_ = kTokenTile;    // columns of a tile
  int64_t lead_ = 0;             // those that the first lacks
  int64_t base_ = 0;             // of the first chunk, with lead_
  int64_t chunks_ = 1, chunk_ = 0;
};

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_COLUMNS_H_
