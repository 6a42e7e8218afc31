// Which tokens the columns of the scores are, and which of them lie in a tile.
#ifndef KVANT_KERNELS_CPU_PIECES_H_
#define KVANT_KERNELS_CPU_PIECES_H_

#include <algorithm>
#include <cstdint>

#include "kvant/kernels/cpu/attention_args.h"

namespace kvant::cpu {

// Of `count` heads that a worker takes in turn, tile by tile, which one this is. Heads in turn
// follow one another in K and V.
struct InTurn {
  int64_t index = 0, count = 1;
};

// Tokens [first, first + tokens) of a segment, which are the columns from `begin` on.
struct Piece {
  const Segment* segment = nullptr;
  int64_t first = 0;
  int64_t tokens = 0;
  int64_t begin = 0;
  // Not null: the pages of the batch row, `page_stride` apart, of segment->tokens each.
  const int32_t* pages = nullptr;
  int64_t page_stride = 0;
  // Of those in pages, none from this one on is prefetched ahead of its use.
  int64_t prefetch_end = 0;
  InTurn in_turn;

  int64_t end() const { return first + tokens; }
  // Where token `token` lies, as that of a batch row which is at `p` otherwise.
  Position At(Position p, int64_t token) const {
    p.at[kCol] = 0;
    p.at[kRow] = token;
    if (pages != nullptr) {
      p.at[0] = pages[token / segment->tokens * page_stride];
      p.at[kRow] = token % segment->tokens;
    }
    return p;
  }
};

// In the order of columns, without gaps.
struct Pieces {
  const Piece* at = nullptr;
  int count = 0;
};

// Of a tile, columns [column, column + tokens): tokens side by side, or of several pages.
struct Part {
  const Segment& segment;
  Position first;  // of the first token
  int64_t tokens = 0;
  int64_t column = 0;
  Position next;  // where they are in the next tile, to be prefetched
  // Not null: of this piece, from its token `token` on, in several pages.
  const Piece* joined = nullptr;
  int64_t token = 0;
  InTurn in_turn;
};

// Calls use(part) for what of each piece lies in columns [column, column + n) of the batch row at
// `p`. `join`: a part may be in several pages, where the segment is so multiplied.
template <typename Use>
void ForParts(const Pieces& pieces, const Position& p, int64_t column, int64_t n, bool join,
              Use use) {
  for (const Piece* piece = pieces.at; piece != pieces.at + pieces.count; ++piece) {
    int64_t begin = std::max(column, piece->begin);
    const int64_t end = std::min(column + n, piece->begin + piece->tokens);
    while (begin < end) {
      const int64_t token = piece->first + begin - piece->begin;
      const Position first = piece->At(p, token);
      int64_t tokens = end - begin;
      const Piece* joined = nullptr;
      if (piece->pages != nullptr && first.at[kRow] + tokens > piece->segment->tokens) {
        if (join && piece->segment->joins_pages && token % kPageUnit == 0) {
          joined = piece;
        } else {
          tokens = piece->segment->tokens - first.at[kRow];
        }
      }
      // There may be no page for a token after the last.
      const bool last = piece->pages != nullptr && token + n >= piece->prefetch_end;
      use(Part{*piece->segment, first, tokens, begin - column,
               last ? first : piece->At(p, token + n), joined, token, piece->in_turn});
      begin += tokens;
    }
  }
}

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_PIECES_H_
