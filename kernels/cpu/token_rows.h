// Rows of tokens as they are stored.
#ifndef KVANT_KERNELS_CPU_TOKEN_ROWS_H_
#define KVANT_KERNELS_CPU_TOKEN_ROWS_H_

#include <cstdint>

#include "kvant/kernels/cpu/attention_args.h"

namespace kvant::cpu {

// Tokens of one head, in blocks of kPageUnit that may lie in different pages, and the blocks of
// what to prefetch meanwhile, the next tokens.
struct TokenRows {
  const uint8_t* blocks[kTileBlocks];
  int64_t stride = 0;                // bytes from token to token of a block
  int64_t row_bytes = 0;             // that hold channels
  int64_t tokens = 0;                // at most kTokenTile
  const uint8_t* next[kTileBlocks];  // need not be readable
  int64_t next_stride = 0;           // there

  const uint8_t* At(int64_t token) const {
    return blocks[token / kPageUnit] + token % kPageUnit * stride;
  }
  const uint8_t* Next(int64_t token) const {
    return next[token / kPageUnit] + token % kPageUnit * next_stride;
  }
};

// Tokens from `first` on, `stride` bytes apart, of which `row_bytes` are taken. What comes next is
// not known: they prefetch their own.
TokenRows RowsFrom(const void* first, int64_t stride, int64_t row_bytes, int64_t tokens);

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_TOKEN_ROWS_H_
