#include "kvant/kernels/cpu/byte_tiles.h"

#include <algorithm>

#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {
namespace {

constexpr int64_t Quads(int64_t n) { return CeilDiv(n, 4); }

// What makes stored codes unsigned.
uint8_t FlipOf(const Array& codes) { return codes.type == kS8 ? 0x80 : 0; }

// n bytes, flipped, and zeros up to the next multiple of four.
void CopyFlipped(const uint8_t* __restrict from, int64_t n, uint8_t flip, uint8_t* __restrict to) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i] ^ flip;
  for (int64_t i = n; i % 4 != 0; ++i) to[i] = 0;
}

// Calls use(codes of a token, its number in the tile, what flips them).
template <typename Use>
void ForTokens(const Reader& reader, const Pieces& pieces, const Position& batch, int64_t column,
               int64_t n, Use use) {
  ForParts(pieces, batch, column, n, /*join=*/false, [&](const Part& part) {
    const Array& array = part.segment.data;
    const auto* data = static_cast<const uint8_t*>(reader.Data(array)) + array.IndexOf(part.first);
    for (int64_t i = 0; i < part.tokens; ++i, data += array.strides[kRow]) {
      use(data, part.column + i, FlipOf(array));
    }
  });
}

}  // namespace

ByteTiles::ByteTiles(const AttentionProblem& problem, Arena& own, Arena& shared)
    : channels_(problem.head_size),
      v_channels_(problem.v_head_size),
      offsets_(problem.byte_offsets) {
  if (problem.products != Products::kBytes) return;
  const int64_t rows = problem.row_tile;
  q_ = own.TakeAs<int8_t>(rows * Quads(channels_) * 4);
  q_terms_ = own.TakeAs<int32_t>(rows);
  probs_ = shared.TakeAs<int8_t>(rows * kTokenTile);
  terms_ = shared.TakeAs<int32_t>(rows);
  columns_ = shared.TakeAs<int32_t>(std::max(kHalfTile, v_channels_));
  lines_ = shared.TakeAs<uint32_t>(kHalfTile * Quads(channels_));
  k_ = shared.TakeAs<uint32_t>(kHalfTile * Quads(channels_));
  v_ = shared.TakeAs<uint32_t>(Quads(kTokenTile) * v_channels_);
}

void ByteTiles::PrepareQueries(const Reader& reader, const float* q, int64_t rows) {
  const ByteKernels& kernels = *reader.kernels->bytes;
  const auto offset = static_cast<float>(offsets_.q);
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t sum =
        kernels.bytes(q + r * channels_, channels_, offset, q_ + r * Quads(channels_) * 4);
    q_terms_[r] = offsets_.k * (sum + static_cast<int32_t>(channels_) * offsets_.q);
  }
}

void ByteTiles::MultiplyByKeys(const Reader& reader, const Pieces& pieces, const Position& batch,
                               int64_t column, int64_t n, int64_t from, int64_t rows,
                               float* scores) {
  const ByteKernels& kernels = *reader.kernels->bytes;
  const int64_t quads = Quads(channels_);
  ForTokens(
      reader, pieces, batch, column, n, [&](const uint8_t* codes, int64_t token, uint8_t flip) {
        CopyFlipped(codes, channels_, flip, reinterpret_cast<uint8_t*>(lines_ + token * quads));
      });
  reader.kernels->transpose(reinterpret_cast<const float*>(lines_), quads, n, quads,
                            reinterpret_cast<float*>(k_), kHalfTile);
  kernels.sums(k_, kHalfTile, quads, kHalfTile, offsets_.q, columns_);
  kernels.qk(q_ + from * quads * 4, rows, quads, k_, {q_terms_ + from, columns_}, scores);
}

void ByteTiles::MultiplyByValues(const Reader& reader, const Pieces& pieces, const Position& batch,
                                 int64_t column, int64_t n, const float* probs, int64_t rows,
                                 const float* shrink, float* out) {
  const ByteKernels& kernels = *reader.kernels->bytes;
  const uint8_t* four[4] = {};
  ForTokens(reader, pieces, batch, column, n,
            [&](const uint8_t* codes, int64_t token, uint8_t flip) {
              four[token % 4] = codes;
              if (token % 4 != 3 && token != n - 1) return;
              std::fill(four + token % 4 + 1, four + 4, nullptr);
              kernels.zip(four, v_channels_, flip, v_ + token / 4 * v_channels_);
            });
  const int64_t quads = Quads(n);
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t sum = kernels.bytes(probs + r * kTokenTile, n, static_cast<float>(offsets_.probs),
                                      probs_ + r * kTokenTile);
    terms_[r] = offsets_.v * (sum + static_cast<int32_t>(n) * offsets_.probs);
  }
  kernels.sums(v_, v_channels_, quads, v_channels_, offsets_.probs, columns_);
  kernels.pv(probs_, rows, quads, v_, v_channels_, {terms_, columns_}, shrink, out);
}

}  // namespace kvant::cpu
