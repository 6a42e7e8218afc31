#include "kvant/kernels/cpu/token_rows.h"

namespace kvant::cpu {

TokenRows RowsFrom(const void* first, int64_t stride, int64_t row_bytes, int64_t tokens) {
  TokenRows rows;
  rows.stride = rows.next_stride = stride;
  rows.row_bytes = row_bytes;
  rows.tokens = tokens;
  for (int64_t i = 0; i < kTileBlocks; ++i) {
    rows.blocks[i] = rows.next[i] = static_cast<const uint8_t*>(first) + i * kPageUnit * stride;
  }
  return rows;
}

}  // namespace kvant::cpu
