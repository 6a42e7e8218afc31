// The two products of a unit for one tile of tokens, by whichever kernels the plan chose.
#ifndef KVANT_KERNELS_CPU_TILE_PRODUCTS_H_
#define KVANT_KERNELS_CPU_TILE_PRODUCTS_H_

#include <cstdint>

#include "kvant/kernels/cpu/arena.h"
#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/byte_tiles.h"
#include "kvant/kernels/cpu/channel_major_scores.h"
#include "kvant/kernels/cpu/code_scores.h"
#include "kvant/kernels/cpu/code_values.h"
#include "kvant/kernels/cpu/columns.h"
#include "kvant/kernels/cpu/dequantize.h"
#include "kvant/kernels/cpu/kernels.h"
#include "kvant/kernels/cpu/scaled_rows.h"
#include "kvant/kernels/cpu/stored_heads.h"

namespace kvant::cpu {

// What a row tile holds for its products. Tiles are laid out as KernelSet says. What is filled and
// read within a tile of tokens, all but queries, is from `shared`.
struct TileBuffers {
  TileBuffers(const AttentionProblem& problem, Arena& own, Arena& shared);

  float* q;  // [rows][head_size], to be filled before PrepareQueries
  // Of dequantized tiles; as pairs, with Products::kPairs, below.
  float* k = nullptr;  // kHalfTile * head_size
  float* v = nullptr;  // kHalfTile * v_head_size
  float* scores;       // [rows][kTokenTile]: scores, then probabilities
  float* line;         // TileScratchFloats of the larger head size
  // Where keys are multiplied as pairs; what follows it with Products::kPairs only.
  uint32_t* q_pairs = nullptr;   // [rows][pairs]
  uint16_t* lines = nullptr;     // for PairTile, of the larger head size
  uint32_t* k_pairs = nullptr;   // [pairs][kHalfTile]
  uint32_t* v_pairs = nullptr;   // [kTokenTile / 2][v_head_size]
  StoredHeads k_heads, v_heads;  // of tokens that are taken as they are stored
  ScaledRows k_scaled, v_scaled;
  CodeScores code_scores;
  ChannelMajorScores channel_major_scores;
  CodeValues code_values;
  ByteTiles bytes;
};

class TileProducts {
 public:
  TileProducts(const AttentionProblem& problem, const Reader& reader, const Position& batch,
               const Columns& columns, TileBuffers& buffers)
      : problem_(problem),
        reader_(reader),
        kernels_(*reader.kernels),
        batch_(batch),
        columns_(columns),
        buffers_(buffers) {}

  // Prefetches the tile that a unit of the same batch row begins with, of few rows: every other
  // tile is prefetched by the one before. `batch`: where the unit's keys and values lie.
  void PrefetchFirst(const Position& batch, int64_t column, int64_t n) const;
  // Once the queries of all rows are in place. amplification: what steps after the product multiply
  // an error of a score by.
  void PrepareQueries(int64_t rows, float amplification) const;
  // Scores of rows [from, from + rows), with kStoredRows all of the tile, and columns [column,
  // column + n); those beyond n are left undefined.
  void MultiplyByKeys(int64_t column, int64_t n, int64_t from, int64_t rows) const;
  // out = out * shrink + probabilities * values, for the same; `shrink` and `out` are of the
  // row `from` on, and `shrink` may be overwritten.
  void MultiplyByValues(int64_t column, int64_t n, int64_t from, int64_t rows, float* shrink,
                        float* out) const;

 private:
  // Of up to kHalfTile columns, which are dequantized first; by pairs, values of up to kTokenTile.
  void MultiplyByKeyTile(int64_t column, int64_t n, int64_t from, int64_t rows,
                         float* scores) const;
  void MultiplyByKeyBytes(int64_t column, int64_t n, int64_t from, int64_t rows,
                          float* scores) const {
    buffers_.bytes.MultiplyByKeys(reader_, columns_.k(), batch_, column, n, from, rows, scores);
  }
  void MultiplyByKeyPairs(int64_t column, int64_t n, int64_t from, int64_t rows,
                          float* scores) const;
  void MultiplyByValueTile(int64_t column, int64_t n, const float* probs, int64_t rows,
                           const float* shrink, float* out) const;
  void MultiplyByValueBytes(int64_t column, int64_t n, const float* probs, int64_t rows,
                            const float* shrink, float* out) const {
    buffers_.bytes.MultiplyByValues(reader_, columns_.v(), batch_, column, n, probs, rows, shrink,
                                    out);
  }
  void MultiplyByValuePairs(int64_t column, int64_t n, const float* probs, int64_t rows,
                            const float* shrink, float* out) const;

  // How tiles are multiplied, and columns of values at once.
  struct Way {
    decltype(&TileProducts::MultiplyByKeyTile) keys;
    decltype(&TileProducts::MultiplyByValueTile) values;
    int64_t values_at_once;
  };
  static Way WayOf(Products products);

  const AttentionProblem& problem_;
  const Reader& reader_;
  const KernelSet& kernels_;
  const Position batch_;
  const Columns& columns_;
  TileBuffers& buffers_;
};

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_TILE_PRODUCTS_H_
