// In which order rows of the next tile are prefetched: from several of its parts in turn, where
// memory answers faster so.
#ifndef KVANT_KERNELS_CPU_ISA_STREAMS_H_
#define KVANT_KERNELS_CPU_ISA_STREAMS_H_

#include <cstdint>

#include "kvant/kernels/cpu/token_rows.h"

namespace kvant::cpu {
namespace {

// Memory answers late, so each row prefetches one of the next tile, into the second-level cache:
// the first cannot wait for so many lines.
inline constexpr int64_t kLineBytes = 64;

inline int64_t LinesOf(int64_t bytes) { return (bytes + kLineBytes - 1) / kLineBytes; }

// 2^k parts of the next tile, at most 2^most: each has two pages of memory of 4 KiB or more, as
// requests for several parts of one are answered slower. Pages of tokens stay in order, and so do
// rows that are no whole lines.
inline int StreamBits(const TokenRows& rows, int most) {
  constexpr int64_t kOfStream = 2 * 4096;
  if (most == 0 || rows.tokens != kTokenTile) return 0;
  if (rows.next_stride != rows.row_bytes || rows.row_bytes % kLineBytes != 0) return 0;
  for (int64_t i = 1; i < kTileBlocks; ++i) {
    if (rows.next[i] != rows.next[0] + i * kPageUnit * rows.row_bytes) return 0;
  }
  while (most > 0 && kTokenTile * rows.row_bytes < kOfStream << most) --most;
  return most;
}

// The rows to prefetch with the `at`-th run of `run` tokens.
inline const uint8_t* NextOf(const TokenRows& rows, int stream_bits, int64_t at, int64_t run) {
  if (stream_bits == 0) return rows.Next(at * run);
  const int64_t stream = at & ((1 << stream_bits) - 1);
  const int64_t token = (stream * kTokenTile >> stream_bits) + (at >> stream_bits) * run;
  return rows.next[0] + token * rows.row_bytes;
}

// Prefetches lines of the next tile's rows one after another; with several streams, one line of
// each in turn.
class NextLines {
 public:
  // Those from token `begin` on, without so many.
  NextLines(const TokenRows& rows, int stream_bits, int64_t begin, int64_t skipped) {
    const int64_t of_row = LinesOf(rows.row_bytes) * kLineBytes;
    if (stream_bits > 0) {
      const int64_t all = kTokenTile * of_row;
      at_ = rows.next[0] + ((begin * of_row + skipped * kLineBytes) >> stream_bits);
      end_ = rows.next[0] + all;
      step_ = all >> stream_bits;
      back_ = kLineBytes - all;
      further_ = 0;
    } else {
      const int64_t lines = LinesOf(rows.row_bytes);
      const uint8_t* const row = rows.Next(begin) + skipped / lines * rows.next_stride;
      at_ = row + skipped % lines * kLineBytes;
      end_ = row + of_row;
      step_ = kLineBytes;
      back_ = rows.next_stride - of_row;
      further_ = rows.next_stride;
    }
  }

  void Ask() {
    __builtin_prefetch(at_, 0, 2);
    at_ += step_;
    if (at_ < end_) return;
    at_ += back_;
    end_ += further_;
  }

 private:
  const uint8_t *at_, *end_;
  int64_t step_, back_, further_;
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_STREAMS_H_
