// Where the tokens of a head lie, and where those that come next do.
#ifndef KVANT_KERNELS_CPU_STORED_HEADS_H_
#define KVANT_KERNELS_CPU_STORED_HEADS_H_

#include <cstdint>

#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/dequantize.h"
#include "kvant/kernels/cpu/kernels.h"
#include "kvant/kernels/cpu/pieces.h"
#include "kvant/kernels/cpu/token_rows.h"

namespace kvant::cpu {

// Where the tokens of a head begin in an array that they lie in.
class TokenAddresses {
 public:
  TokenAddresses() = default;
  // group: of the array's axes; head: any of its tokens.
  TokenAddresses(const Reader& reader, const Array& array, const int64_t* group, Position head);

  bool present() const { return data_ != nullptr; }
  // From a head to the next, 0 where heads share what is there; and from a token, 0 where those of
  // a page do.
  int64_t head_bytes() const { return head_stride_ * bits_ / 8; }
  int64_t token_bytes() const { return token_stride_ * bits_ / 8; }
  bool dense(int64_t elements) const { return token_stride_ == elements; }
  // Whether only every other token begins at a byte: `At` then takes even ones only.
  bool in_pairs() const { return token_stride_ * bits_ % 8 != 0; }
  // Where tokens begin in their first byte.
  int shift() const { return static_cast<int>(first_ * bits_ % 8); }
  // page: or the batch row.
  const uint8_t* At(int64_t page, int64_t token) const {
    if (pages_in_group_ != 1) [[unlikely]]
      page /= pages_in_group_;
    return data_ + (first_ + page * page_stride_ + token * token_stride_) * bits_ / 8;
  }
  // From a block of kPageUnit tokens to the next.
  int64_t block_bytes() const { return kPageUnit / 8 * token_stride_ * bits_; }

 private:
  const uint8_t* data_ = nullptr;
  int bits_ = 0;
  int64_t pages_in_group_ = 1, page_stride_ = 0, head_stride_ = 0, token_stride_ = 0, first_ = 0;
};

// What is the same for all tokens of a head in a segment.
struct StoredHead {
  TokenAddresses data;
  TokenAddresses scales, zero_points;  // where these have tokens
};

// That of a unit in the segment that is read.
class StoredHeads {
 public:
  // part: of any tokens of the segment.
  const StoredHead& At(const Reader& reader, const Part& part);

 private:
  const Segment* segment_ = nullptr;
  StoredHead head_;
};

// Where the blocks of a part and of what comes after it begin.
class PartBlocks {
 public:
  explicit PartBlocks(const Part& part) : part_(part) {
    if (part.joined == nullptr) return;
    const int64_t end = part.token + part.tokens;
    FindBlocks(part.token, end, at_);
    // There may be no page for tokens after the last.
    FindBlocks(end / kPageUnit * kPageUnit, part.joined->prefetch_end, at_ + kTileBlocks);
  }

  const InTurn& in_turn() const { return part_.in_turn; }
  void Find(const TokenAddresses& array, const uint8_t* (&blocks)[kTileBlocks],
            const uint8_t* (&next)[kTileBlocks]) const {
    if (part_.joined != nullptr) {
      for (int i = 0; i < kTileBlocks; ++i) {
        blocks[i] = array.At(at_[i].page, at_[i].token);
        next[i] = array.At(at_[kTileBlocks + i].page, at_[kTileBlocks + i].token);
      }
      return;
    }
    const uint8_t* const first = array.At(part_.first.at[0], part_.first.at[kRow]);
    const uint8_t* const after = array.At(part_.next.at[0], part_.next.at[kRow]);
    for (int i = 0; i < kTileBlocks; ++i) {
      blocks[i] = first + i * array.block_bytes();
      next[i] = after + i * array.block_bytes();
    }
  }

 private:
  struct Block {
    int64_t page, token;
  };
  // Those of tokens [from, end); blocks from `end` on are the part's first.
  void FindBlocks(int64_t from, int64_t end, Block* blocks) const {
    const Piece& piece = *part_.joined;
    const int64_t page_tokens = piece.segment->tokens;
    int64_t page = from / page_tokens, token = from % page_tokens;
    for (int i = 0; i < kTileBlocks; ++i, from += kPageUnit) {
      blocks[i] = from < end ? Block{piece.pages[page * piece.page_stride], token} : at_[0];
      token += kPageUnit;
      if (token < page_tokens) continue;
      token = 0;
      ++page;
    }
  }

  const Part& part_;
  Block at_[2 * kTileBlocks];  // of what lies in several pages
};

// What a head prefetches of the next tile of all heads in turn, where their rows lie side by side
// in a token: as many bytes as its own rows have, in the order of memory, so that each prefetches
// some of the others'.
//
//   token   heads in turn                 runs of kPageUnit rows, of which a head prefetches four
//     0     0 1 2 3 4 5 6 7
//     1     0 1 2 3 4 5 6 7               0: tokens 0, 1 of all; head 0 prefetches runs 0 to 3,
//     2     0 1 2 3 4 5 6 7               1: tokens 2, 3         head 1 runs 4 to 7 ...
//
// `rows` of `bytes`, in so many blocks at `next`, of which a head prefetches as many. False where
// that is no whole run: with other heads' rows in a token, unless kPageUnit heads take turns.
bool FindShare(const TokenAddresses& rows, int64_t bytes, const InTurn& in_turn, int64_t blocks,
               const uint8_t* const (&next)[kTileBlocks], const uint8_t* (&share)[kTileBlocks]);

// Whether qk_channels reads the segment's keys where they lie.
inline bool ChannelsTakenAsStored(const Segment& segment) {
  return !segment.dequantization.scales.present() && StoredProductsTake(segment.data.type) &&
         segment.data.strides[kRow] == 1 && segment.data.strides[kCol] > 1;
}
// Whether qk_stored and pv_stored read the segment where it lies.
inline bool TakenAsStored(const Segment& segment) {
  return !segment.dequantization.scales.present() && StoredProductsTake(segment.data.type) &&
         segment.data.strides[kCol] == 1;
}
// A part as it is stored.
TokenRows RowsAt(const StoredHead& head, const Part& part, int64_t channels);
// A part of codes, whose kernels prefetch the next rows as if these were dense: where they lie
// apart, they are prefetched here.
TokenRows CodeRowsAt(const StoredHead& head, const Part& part, int64_t channels);
// Prefetches the last line of each next block, where blocks begin amid a line: kernels prefetch
// line by line from the first byte, and miss the end then.
void PrefetchEnds(const TokenRows& rows);
// The same, and the first lines of the next tile.
void PrefetchFirst(const TokenRows& rows, int64_t most_lines);

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_STORED_HEADS_H_
