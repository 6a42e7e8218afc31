// Which tokens the columns of the scores are, and which of them lie in a tile.
#ifndef KVANT_KERNELS_CPU_PIECES_H_
#define KVANT_KERNELS_CPU_PIECES_H_

#include <algorithm>
#include <cstdint>

#include "kvant/kernels/cpu/attention_args.h"

namespace kvant::cpu {

// Tokens [first, first + tokens) of a segment, which are the columns from `begin` on.
struct Piece {
  const Segment* segment = nullptr;
  int64_t first = 0;
  int64_t tokens = 0;
  int64_t begin = 0;
};

// In the order of columns, without gaps.
struct Pieces {
  const Piece* at = nullptr;
  int count = 0;
};

// Calls use(segment, its first token, tokens, where they are in the tile) for what of each piece
// lies in columns [column, column + n).
template <typename Use>
void ForParts(const Pieces& pieces, int64_t column, int64_t n, Use use) {
  for (const Piece* piece = pieces.at; piece != pieces.at + pieces.count; ++piece) {
    const int64_t begin = std::max(column, piece->begin);
    const int64_t end = std::min(column + n, piece->begin + piece->tokens);
    if (begin >= end) continue;
    use(*piece->segment, piece->first + begin - piece->begin, end - begin, begin - column);
  }
}

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_PIECES_H_
