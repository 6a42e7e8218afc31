#include "kvant/kernels/cpu/tile_products.h"

#include <algorithm>

namespace kvant::cpu {
namespace {

// Calls use(begin, count) for n columns, `most` at a time; so many are dequantized at once.
template <typename Use>
void ForDequantized(int64_t n, Use use, int64_t most = kHalfTile) {
  for (int64_t begin = 0; begin < n; begin += most) use(begin, std::min(most, n - begin));
}

// Calls use(type, rows, column) for the tokens of a part: where they lie, or dequantized into
// `tile`, and the tile's column that they begin at.
template <typename Use>
void WithRows(const Reader& reader, const Part& part, int64_t channels, StoredHeads& heads,
              float* tile, float* scratch, Use use) {
  const Segment& segment = part.segment;
  if (TakenAsStored(segment)) {
    const TokenRows rows = RowsAt(heads.At(reader, part), part, channels);
    PrefetchEnds(rows);
    return use(segment.data.type, rows, part.column);
  }
  Piece piece{&segment, part.first.at[kRow], part.tokens, 0};
  if (part.joined != nullptr) {
    piece = *part.joined;
    piece.first = part.token;
    piece.begin = 0;
  }
  const int64_t bytes = channels * static_cast<int64_t>(sizeof(float));
  ForDequantized(part.tokens, [&](int64_t begin, int64_t n) {
    DequantizeTile(reader, {&piece, 1}, part.first, begin, n, channels, /*by_channel=*/false, tile,
                   scratch);
    use(kF32, RowsFrom(tile, bytes, bytes, n), part.column + begin);
  });
}

// Prefetches n rows of an array, `columns` of each, from those of `p` on, if these are side by
// side.
void PrefetchArray(const Reader& reader, const Array& array, const Position& p, int64_t n,
                   int64_t columns) {
  constexpr int64_t kMostBytes = kTokenTile * 128;  // a tile of heads of 128 with 8 bits
  if (!array.present() || array.strides[kCol] > 1) return;
  const auto* const data = static_cast<const uint8_t*>(reader.Data(array));
  const int64_t bits = BitsOf(array.type), row_bytes = CeilDiv(columns * bits, 8);
  if (row_bytes == 0) return;
  PrefetchRows(data + array.IndexOf(p) * bits / 8, array.strides[kRow] * bits / 8, row_bytes,
               std::min(n, CeilDiv(kMostBytes, row_bytes)));
}

void PrefetchParts(const Reader& reader, const Pieces& pieces, const Position& batch,
                   int64_t column, int64_t n, int64_t channels) {
  ForParts(pieces, batch, column, n, /*join=*/false, [&](const Part& part) {
    const Dequantization& how = part.segment.dequantization;
    Position group = part.first;
    for (int axis = 0; axis < kAxes; ++axis) group.at[axis] /= how.group[axis];
    const int64_t runs = CeilDiv(part.tokens, how.group[kRow]);
    const int64_t groups = CeilDiv(channels, how.group[kCol]);
    PrefetchArray(reader, how.scales, group, runs, groups);
    PrefetchArray(reader, how.zero_points, group, runs, groups);
    PrefetchArray(reader, part.segment.data, part.first, part.tokens, channels);
  });
}

bool MultipliesPairsOfKeys(const AttentionProblem& problem) {
  return problem.products == Products::kPairs || problem.exact_keys;
}

bool AnyScaledRows(const Segment* segments, int count) {
  return std::any_of(segments, segments + count, [](const Segment& s) { return s.scaled_rows; });
}

}  // namespace

TileBuffers::TileBuffers(const AttentionProblem& problem, Arena& own, Arena& shared)
    : q(own.Take(problem.row_tile * problem.head_size)),
      scores(shared.Take(problem.row_tile * kTokenTile)),
      line(shared.Take(TileScratchFloats(std::max(problem.head_size, problem.v_head_size)))),
      k_scaled(AnyScaledRows(problem.k, problem.k_segments), problem.head_size, problem.row_tile,
               own, shared),
      v_scaled(AnyScaledRows(problem.v, problem.v_segments), problem.v_head_size, problem.row_tile,
               own, shared),
      code_scores(problem, own, shared),
      channel_major_scores(problem, own, shared),
      code_values(problem, own, shared),
      bytes(problem, own, shared) {
  if (MultipliesPairsOfKeys(problem)) {
    q_pairs = own.TakeAs<uint32_t>(problem.row_tile * Pairs(problem.head_size));
  }
  if (problem.products == Products::kBytes) return;
  if (problem.products != Products::kPairs) {
    k = shared.Take(kHalfTile * problem.head_size);
    v = shared.Take(kHalfTile * problem.v_head_size);
    return;
  }
  const int64_t largest = std::max(problem.head_size, problem.v_head_size);
  lines = shared.TakeAs<uint16_t>(kHalfTile * 2 * Pairs(largest));
  k_pairs = shared.TakeAs<uint32_t>(kHalfTile * Pairs(problem.head_size));
  v_pairs = shared.TakeAs<uint32_t>(Pairs(kTokenTile) * problem.v_head_size);
}

void TileProducts::PrefetchFirst(const Position& batch, int64_t column, int64_t n) const {
  if (problem_.products != Products::kStoredRows) return;
  PrefetchParts(reader_, columns_.k(), batch, column, n, problem_.head_size);
  PrefetchParts(reader_, columns_.v(), batch, column, n, problem_.v_head_size);
}

void TileProducts::PrepareQueries(int64_t rows, float amplification) const {
  buffers_.code_scores.Allow(kScoreError / amplification);
  buffers_.channel_major_scores.Allow(kScoreError / amplification);
  if (problem_.products == Products::kBytes) {
    return buffers_.bytes.PrepareQueries(reader_, buffers_.q, rows);
  }
  if (!MultipliesPairsOfKeys(problem_)) return;
  const int64_t size = problem_.head_size, words = 2 * Pairs(size);
  auto* const pairs = reinterpret_cast<uint16_t*>(buffers_.q_pairs);
  for (int64_t r = 0; r < rows; ++r) {
    if (size % 2 != 0) pairs[r * words + size] = 0;
    kernels_.pairs->load(kF32, buffers_.q, r * size, size, {}, pairs + r * words);
  }
}

void TileProducts::MultiplyByKeyTile(int64_t column, int64_t n, int64_t from, int64_t rows,
                                     float* scores) const {
  const int64_t size = problem_.head_size;
  DequantizeTile(reader_, columns_.k(), batch_, column, n, size, /*by_channel=*/true, buffers_.k,
                 buffers_.line);
  kernels_.qk(buffers_.q + from * size, rows, size, buffers_.k, n, scores);
}

void TileProducts::MultiplyByKeyPairs(int64_t column, int64_t n, int64_t from, int64_t rows,
                                      float* scores) const {
  const int64_t size = problem_.head_size, pairs = Pairs(size);
  PairTile(reader_, columns_.k(), batch_, column, n, size, PairsOf::kChannels, buffers_.k_pairs,
           buffers_.lines, buffers_.line);
  kernels_.pairs->qk(buffers_.q_pairs + from * pairs, rows, pairs, buffers_.k_pairs, scores);
}

void TileProducts::MultiplyByValueTile(int64_t column, int64_t n, const float* probs, int64_t rows,
                                       const float* shrink, float* out) const {
  const int64_t size = problem_.v_head_size;
  DequantizeTile(reader_, columns_.v(), batch_, column, n, size, /*by_channel=*/false, buffers_.v,
                 buffers_.line);
  kernels_.pv(probs, rows, n, buffers_.v, size, shrink, out);
}

void TileProducts::MultiplyByValuePairs(int64_t column, int64_t n, const float* probs, int64_t rows,
                                        const float* shrink, float* out) const {
  const int64_t size = problem_.v_head_size;
  ForDequantized(n, [&](int64_t begin, int64_t count) {
    PairTile(reader_, columns_.v(), batch_, column + begin, count, size, PairsOf::kTokens,
             buffers_.v_pairs + begin / 2 * size, buffers_.lines, buffers_.line);
  });
  if (problem_.split_probs) {
    kernels_.pairs->pv_split(probs, rows, n, buffers_.v_pairs, size, shrink, out);
  } else {
    kernels_.pairs->pv(probs, rows, n, buffers_.v_pairs, size, shrink, out);
  }
}

TileProducts::Way TileProducts::WayOf(Products products) {
  switch (products) {
    case Products::kBytes:
      return {&TileProducts::MultiplyByKeyBytes, &TileProducts::MultiplyByValueBytes, kTokenTile};
    case Products::kPairs:
      return {&TileProducts::MultiplyByKeyPairs, &TileProducts::MultiplyByValuePairs, kTokenTile};
    case Products::kTiles:
    case Products::kStoredRows:  // keys by channel
      break;
  }
  return {&TileProducts::MultiplyByKeyTile, &TileProducts::MultiplyByValueTile, kHalfTile};
}

void TileProducts::MultiplyByKeys(int64_t column, int64_t n, int64_t from, int64_t rows) const {
  const int64_t size = problem_.head_size;
  const float* const q = buffers_.q + from * size;
  float* const scores = buffers_.scores + from * kTokenTile;
  if (size == 0) {
    std::fill_n(scores, rows * kTokenTile, 0.f);
    return;
  }
  if (problem_.products != Products::kStoredRows || problem_.k_by_channel) {
    const auto multiply = WayOf(problem_.products).keys;
    return ForDequantized(n, [&](int64_t begin, int64_t count) {
      (this->*multiply)(column + begin, count, from, rows, scores + begin);
    });
  }
  ForParts(columns_.k(), batch_, column, n, /*join=*/true, [&](const Part& part) {
    const auto multiply = [&](auto& product) {
      return product.Multiply(reader_, part, q, rows, scores);
    };
    const CodeLayout& codes = part.segment.codes;
    if (codes.usable && (codes.channel_major ? multiply(buffers_.channel_major_scores)
                                             : multiply(buffers_.code_scores))) {
      return;
    }
    if (part.segment.scaled_rows &&
        buffers_.k_scaled.MultiplyByKeys(reader_, part, q, rows, scores)) {
      return;
    }
    if (ChannelsTakenAsStored(part.segment)) {
      const TokenAddresses& data = buffers_.k_heads.At(reader_, part).data;
      const Array& array = part.segment.data;
      kernels_.qk_channels(array.type, data.At(part.first.at[0], part.first.at[kRow]),
                           data.At(part.next.at[0], part.next.at[kRow]),
                           array.strides[kCol] * BitsOf(array.type) / 8, part.tokens, q, rows, size,
                           scores + part.column);
      return;
    }
    WithRows(reader_, part, size, buffers_.k_heads, buffers_.k, buffers_.line,
             [&](DataType type, const TokenRows& tokens, int64_t at) {
               if (!problem_.exact_keys) {
                 return kernels_.qk_stored(type, tokens, q, rows, size, scores + at);
               }
               const int64_t pairs = Pairs(size);
               kernels_.pairs->qk_stored(tokens, buffers_.q_pairs + from * pairs, rows, pairs,
                                         scores + at);
             });
  });
}

void TileProducts::MultiplyByValues(int64_t column, int64_t n, int64_t from, int64_t rows,
                                    float* shrink, float* out) const {
  const int64_t size = problem_.v_head_size;
  const float* const probs = buffers_.scores + from * kTokenTile;
  if (problem_.products != Products::kStoredRows) {
    const Way way = WayOf(problem_.products);
    return ForDequantized(
        n,
        [&](int64_t begin, int64_t count) {
          (this->*way.values)(column + begin, count, probs + begin, rows, shrink, out);
          std::fill_n(shrink, rows, 1.f);
        },
        way.values_at_once);
  }
  ForParts(columns_.v(), batch_, column, n, /*join=*/true, [&](const Part& part) {
    const bool done =
        part.segment.codes.usable
            ? buffers_.code_values.Multiply(reader_, part, probs, rows, shrink, out)
            : part.segment.scaled_rows &&
                  buffers_.v_scaled.MultiplyByValues(reader_, part, probs, rows, shrink, out);
    if (done) {
      std::fill_n(shrink, rows, 1.f);
      return;
    }
    WithRows(reader_, part, size, buffers_.v_heads, buffers_.v, buffers_.line,
             [&](DataType type, const TokenRows& tokens, int64_t at) {
               kernels_.pv_stored(type, tokens, probs + at, rows, shrink, size, out);
               std::fill_n(shrink, rows, 1.f);
             });
  });
}

}  // namespace kvant::cpu
