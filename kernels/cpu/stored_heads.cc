#include "kvant/kernels/cpu/stored_heads.h"

#include <algorithm>

#include "kvant/kernels/cpu/code_layout.h"

namespace kvant::cpu {

TokenAddresses::TokenAddresses(const Reader& reader, const Array& array, const int64_t* group,
                               Position head)
    : bits_(BitsOf(array.type)),
      pages_in_group_(group[0]),
      page_stride_(array.strides[0]),
      token_stride_(array.strides[kRow]) {
  // Else several heads share what is there.
  if (group[1] == 1) head_stride_ = array.strides[1];
  head.at[0] = head.at[kRow] = 0;
  for (int axis = 0; axis < kAxes; ++axis) head.at[axis] /= group[axis];
  data_ = static_cast<const uint8_t*>(reader.Data(array));
  first_ = array.IndexOf(head);
}

const StoredHead& StoredHeads::At(const Reader& reader, const Part& part) {
  if (segment_ == &part.segment) return head_;
  segment_ = &part.segment;
  constexpr int64_t kNoGroups[kAxes] = {1, 1, 1, 1, 1};
  const Dequantization& how = segment_->dequantization;
  head_.data = TokenAddresses(reader, segment_->data, kNoGroups, part.first);
  const auto of = [&](const Array& array) {
    return HasTokens(*segment_, array) ? TokenAddresses(reader, array, how.group, part.first)
                                       : TokenAddresses();
  };
  head_.scales = of(how.scales);
  head_.zero_points = of(how.zero_points);
  return head_;
}

bool FindShare(const TokenAddresses& rows, int64_t bytes, const InTurn& in_turn, int64_t blocks,
               const uint8_t* const (&next)[kTileBlocks], const uint8_t* (&share)[kTileBlocks]) {
  const int64_t count = in_turn.count;
  const bool dense = rows.token_bytes() == count * bytes;
  if (rows.head_bytes() != bytes || rows.token_bytes() == 0 || (!dense && count != kPageUnit)) {
    return false;
  }
  for (int64_t i = 0; i < blocks; ++i) {
    // With kPageUnit heads a run is a token.
    const int64_t run = in_turn.index * blocks + i;
    const int64_t block = run / count, at = run % count;
    share[i] =
        next[block] - in_turn.index * bytes + at * (dense ? kPageUnit * bytes : rows.token_bytes());
  }
  return true;
}

TokenRows RowsAt(const StoredHead& head, const Part& part, int64_t channels) {
  const int bits = BitsOf(part.segment.data.type);
  TokenRows rows;
  rows.stride = rows.next_stride = head.data.token_bytes();
  rows.row_bytes = CeilDiv(channels * bits, 8);
  rows.tokens = part.tokens;
  PartBlocks(part).Find(head.data, rows.blocks, rows.next);
  const uint8_t* share[kTileBlocks];
  const int64_t blocks = rows.tokens / kPageUnit;
  if (rows.stride >= 2 * rows.row_bytes && rows.tokens % kPageUnit == 0 &&
      FindShare(head.data, rows.row_bytes, part.in_turn, blocks, rows.next, share)) {
    std::copy_n(share, blocks, rows.next);
    rows.next_stride = rows.row_bytes;
  }
  return rows;
}

TokenRows CodeRowsAt(const StoredHead& head, const Part& part, int64_t channels) {
  TokenRows rows = RowsAt(head, part, channels);
  if (rows.next_stride < 2 * rows.row_bytes) return rows;
  for (int64_t token = 0; token < rows.tokens; token += kPageUnit) {
    const int64_t n = std::min(kPageUnit, rows.tokens - token);
    PrefetchRows(rows.Next(token), rows.next_stride, rows.row_bytes, n);
  }
  // Nothing is left for kernels to prefetch.
  alignas(64) static constexpr uint8_t kNothing[64] = {};
  std::fill_n(rows.next, kTileBlocks, kNothing);
  rows.next_stride = 0;
  return rows;
}

void PrefetchEnds(const TokenRows& rows) {
  uintptr_t begin = 0;
  for (const uint8_t* block : rows.next) begin |= reinterpret_cast<uintptr_t>(block);
  if (begin % 64 == 0) return;
  for (int64_t token = 0; token < rows.tokens; token += kPageUnit) {
    const int64_t last = std::min(kPageUnit, rows.tokens - token) - 1;
    __builtin_prefetch(rows.Next(token + last) + rows.row_bytes - 1, 0, 2);
  }
}

void PrefetchFirst(const TokenRows& rows, int64_t most_lines) {
  int64_t left = most_lines;
  for (int64_t token = 0; token < rows.tokens && left > 0; token += kPageUnit) {
    const int64_t lines = std::min(left, CeilDiv(kPageUnit * rows.row_bytes, 64));
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(rows.Next(token) + i * 64, 0, 2);
    left -= lines;
  }
  PrefetchEnds(rows);
}

}  // namespace kvant::cpu
