// Products of tiles whose queries, keys, probabilities and values are whole numbers of 8 bits:
// bytes, four of which are multiplied and added at a time, exactly.
//
//   value = byte + offset       bytes of queries and probabilities are signed, those of K and V not
//   sum q k = sum q' k' + offset of q * sum k' + offset of k * (sum q' + channels * offset of q)
#ifndef KVANT_KERNELS_CPU_BYTE_TILES_H_
#define KVANT_KERNELS_CPU_BYTE_TILES_H_

#include <cstdint>

#include "kvant/kernels/cpu/arena.h"
#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/dequantize.h"
#include "kvant/kernels/cpu/pieces.h"

namespace kvant::cpu {

class ByteTiles {
 public:
  // Without scratch where the problem's products are others.
  ByteTiles(const AttentionProblem& problem, Arena& own, Arena& shared);

  // The queries of all rows, whole numbers.
  void PrepareQueries(const Reader& reader, const float* q, int64_t rows);
  // Of up to kHalfTile columns; scores of rows from `from` on.
  void MultiplyByKeys(const Reader& reader, const Pieces& pieces, const Position& batch,
                      int64_t column, int64_t n, int64_t from, int64_t rows, float* scores);
  // Of up to kTokenTile columns, as KernelSet::pv has it.
  void MultiplyByValues(const Reader& reader, const Pieces& pieces, const Position& batch,
                        int64_t column, int64_t n, const float* probs, int64_t rows,
                        const float* shrink, float* out);

 private:
  const int64_t channels_, v_channels_;
  const ByteOffsets offsets_;
  int8_t *q_ = nullptr, *probs_ = nullptr;         // [rows][four times quads], [rows][kTokenTile]
  int32_t *q_terms_ = nullptr, *terms_ = nullptr;  // of rows
  int32_t* columns_ = nullptr;                     // terms of columns
  uint32_t* lines_ = nullptr;                      // [kHalfTile][quads]: tokens as they are stored
  uint32_t *k_ = nullptr, *v_ = nullptr;  // [quads][kHalfTile], [kTokenTile / 4][v_channels]
};

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_BYTE_TILES_H_
