#include "kvant/kernels/cpu/columns.h"

#include <algorithm>
#include <utility>

#include "kvant/kernels/cpu/schedule.h"

namespace kvant::cpu {
namespace {

// A range that wraps is two pieces.
Piece* TakePieces(int segments, Arena& arena) { return arena.TakeAs<Piece>(2 * segments); }

struct Range {
  int64_t first = 0, tokens = 0;
};

Range ReadRange(const Reader& reader, const Segment& segment, Position at) {
  Range range;
  at.at[kCol] = 0;
  range.first = reader.Integer(segment.range, at);
  at.at[kCol] = 1;
  range.tokens = reader.Integer(segment.range, at);
  return range;
}

}  // namespace

Extent ExtentOf(const AttentionProblem& problem, const Reader& reader, int64_t b0) {
  Position at;
  at.at[0] = b0;
  Extent extent{0, problem.kv_len, 0, problem.q_len};
  if (problem.k_segments > 0 && problem.k[0].range.present()) {
    extent.kv_len = 0;
    for (int s = 0; s < problem.k_segments; ++s) {
      extent.kv_len += ReadRange(reader, problem.k[s], at).tokens;
    }
  } else if (problem.kv_lengths.present()) {
    extent.kv_len = reader.Integer(problem.kv_lengths, at);
  }
  extent.kv_first = std::min(reader.Integer(problem.kv_first, at), extent.kv_len);
  if (problem.query_offsets.present()) {
    extent.q_first = reader.Integer(problem.query_offsets, at);
    ++at.at[0];
    extent.q_len = reader.Integer(problem.query_offsets, at) - extent.q_first;
  }
  return extent;
}

Columns::Columns(const AttentionProblem& problem, Arena& arena)
    : k_room_(TakePieces(problem.k_segments, arena)),
      v_room_(TakePieces(problem.v_segments, arena)) {}

void Columns::Read(const AttentionProblem& problem, const Reader& reader, int64_t b0,
                   const Extent& extent, int64_t splits) {
  Position at;
  at.at[0] = b0;
  k_ = ReadPieces(problem, reader, at, problem.k, problem.k_segments, k_room_);
  v_ = ReadPieces(problem, reader, at, problem.v, problem.v_segments, v_room_);
  first_ = extent.kv_first;
  end_ = extent.kv_len;
  tile_ = Schedule::TokenTile(problem, end_ - first_);
  lead_ = LeadOf(k_);
  if (lead_ < 0) lead_ = std::max<int64_t>(LeadOf(v_), 0);
  base_ = (first_ + lead_) / kTokenTile * kTokenTile;
  const int64_t all = std::max<int64_t>(end_ + lead_ - base_, 1);
  chunk_ = CeilDiv(CeilDiv(all, splits), tile_) * tile_;
  chunks_ = CeilDiv(all, chunk_);
  PrefetchUntil(end_);
}

void Columns::PrefetchUntil(int64_t column) {
  for (const auto& [room, pieces] : {std::pair(k_room_, k_), std::pair(v_room_, v_)}) {
    for (Piece* piece = room; piece != room + pieces.count; ++piece) {
      piece->prefetch_end = std::min(piece->end(), piece->first + column - piece->begin);
    }
  }
}

void Columns::TakeTurns(const InTurn& in_turn) {
  for (int i = 0; i < k_.count; ++i) k_room_[i].in_turn = in_turn;
  for (int i = 0; i < v_.count; ++i) v_room_[i].in_turn = in_turn;
}

Pieces Columns::ReadPieces(const AttentionProblem& problem, const Reader& reader, Position at,
                           const Segment* segments, int count, Piece* room) {
  Pieces pieces{room, 0};
  int64_t begin = 0;
  const auto add = [&](const Segment& segment, int64_t first, int64_t tokens) {
    if (tokens == 0) return;
    Piece* piece = std::construct_at(room + pieces.count++, Piece{&segment, first, tokens, begin});
    begin += tokens;
    const Array& table = segment.page_table;
    if (!table.present()) return;
    at.at[kCol] = 0;
    piece->pages = static_cast<const int32_t*>(reader.Data(table)) + table.IndexOf(at);
    piece->page_stride = table.strides[kCol];
  };
  for (int s = 0; s < count; ++s) {
    const Segment& segment = segments[s];
    if (segment.page_table.present()) {
      add(segment, 0,
          problem.kv_lengths.present() ? reader.Integer(problem.kv_lengths, at) : problem.kv_len);
    } else if (segment.range.present()) {
      const Range range = ReadRange(reader, segment, at);
      const int64_t to_end = std::min(range.tokens, segment.tokens - range.first);
      add(segment, range.first, to_end);
      add(segment, 0, range.tokens - to_end);
    } else {
      add(segment, 0, segment.tokens);
    }
  }
  return pieces;
}

int64_t Columns::LeadOf(const Pieces& pieces) {
  const Piece* longest = nullptr;
  for (int i = 0; i < pieces.count; ++i) {
    const Piece& piece = pieces.at[i];
    const bool quantized = piece.segment->dequantization.scales.present();
    if (quantized && (longest == nullptr || piece.tokens > longest->tokens)) longest = &piece;
  }
  if (longest == nullptr) return -1;
  const int64_t phase = (longest->first - longest->begin) % kTokenTile;
  return phase < 0 ? phase + kTokenTile : phase;
}

}  // namespace kvant::cpu
