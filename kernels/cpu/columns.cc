#include "kvant/kernels/cpu/columns.h"

#include <memory>

namespace kvant::cpu {
namespace {

// A range that wraps is two pieces.
Piece* TakePieces(int segments, Arena& arena) {
  constexpr int64_t kFloats = sizeof(Piece) / sizeof(float);
  return reinterpret_cast<Piece*>(arena.Take(2 * segments * kFloats));
}

}  // namespace

Columns::Columns(const AttentionProblem& problem, Arena& arena)
    : k_room_(TakePieces(problem.k_segments, arena)),
      v_room_(TakePieces(problem.v_segments, arena)) {}

void Columns::Read(const AttentionProblem& problem, const Reader& reader, const Position& batch) {
  Position at;
  at.at[0] = batch.at[0];
  k_ = ReadPieces(problem, reader, at, problem.k, problem.k_segments, k_room_);
  at.at[kRow] = problem.k_segments;
  v_ = ReadPieces(problem, reader, at, problem.v, problem.v_segments, v_room_);
  if (problem.segment_ranges.present()) {
    count_ = k_.count == 0 ? 0 : k_.at[k_.count - 1].begin + k_.at[k_.count - 1].tokens;
  } else {
    count_ = problem.kv_lengths.present() ? reader.Integer(problem.kv_lengths, at) : problem.kv_len;
  }
  lead_ = LeadOf(k_);
  if (lead_ < 0) lead_ = std::max<int64_t>(LeadOf(v_), 0);
  const int64_t all = std::max<int64_t>(count_ + lead_, 1);
  const int64_t most = std::min(CeilDiv(all, kMinChunk), problem.splits);
  chunk_ = CeilDiv(CeilDiv(all, most), kTokenTile) * kTokenTile;
  chunks_ = CeilDiv(all, chunk_);
}

Pieces Columns::ReadPieces(const AttentionProblem& problem, const Reader& reader, Position at,
                           const Segment* segments, int count, Piece* room) {
  Pieces pieces{room, 0};
  int64_t begin = 0;
  const auto add = [&](const Segment& segment, int64_t first, int64_t tokens) {
    if (tokens == 0) return;
    std::construct_at(room + pieces.count++, Piece{&segment, first, tokens, begin});
    begin += tokens;
  };
  for (int s = 0; s < count; ++s, ++at.at[kRow]) {
    const Segment& segment = segments[s];
    if (!problem.segment_ranges.present()) {
      add(segment, 0, segment.tokens);
      continue;
    }
    at.at[kCol] = 0;
    const int64_t first = reader.Integer(problem.segment_ranges, at);
    at.at[kCol] = 1;
    const int64_t tokens = reader.Integer(problem.segment_ranges, at);
    const int64_t to_end = std::min(tokens, segment.tokens - first);
    add(segment, first, to_end);
    add(segment, 0, tokens - to_end);
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
