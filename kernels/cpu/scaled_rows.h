// Products by stored row of f8 that have scales by channel, in runs of tokens: those of
// keys go on the queries, those of values on what the values of a run sum to.
#ifndef KVANT_KERNELS_CPU_SCALED_ROWS_H_
#define KVANT_KERNELS_CPU_SCALED_ROWS_H_

#include <cstdint>

#include "kvant/kernels/cpu/arena.h"
#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/code_parameters.h"
#include "kvant/kernels/cpu/dequantize.h"
#include "kvant/kernels/cpu/pieces.h"
#include "kvant/kernels/cpu/stored_heads.h"

namespace kvant::cpu {

// Of more rows, each four of which convert numbers anew, a tile that is dequantized once is
// cheaper, and nothing is multiplied here.
inline constexpr int64_t kMostScaledRows = 8;
// Whether products take the segment so, which is described (code_layout.h).
bool TakesScaledRows(const Segment& segment);

// Of the keys or the values of a unit.
class ScaledRows {
 public:
  // Takes scratch from both, for tiles of `rows`, unless none is `wanted`.
  ScaledRows(bool wanted, int64_t channels, int64_t rows, Arena& own, Arena& shared);

  // scores[r][column + t] = q[r] . k[t] for the tokens of the part. False, with scores unspecified,
  // if a query times a scale may not be finite, or rows are too many. `q` and `rows` are the same
  // in every call.
  bool MultiplyByKeys(const Reader& reader, const Part& part, const float* q, int64_t rows,
                      float* scores);
  // out = out * shrink + probabilities * values, for the same. False, with nothing added, if a
  // scale is not finite, products before it is applied are too small, or rows are too many.
  bool MultiplyByValues(const Reader& reader, const Part& part, const float* probs, int64_t rows,
                        const float* shrink, float* out);

 private:
  // Of the part's runs, side by side. Returns the largest magnitude; not finite if any is not.
  float ReadScales(const Reader& reader, const Part& part);

  const int64_t channels_;
  StoredHeads heads_;
  ChannelParameters parameters_;
  float largest_ = -1.f;  // query; less than 0: not known
  float* scales_;         // [runs][channels]
  float* scaled_;         // [rows][channels]: queries, or sums of values
  float* zeros_;          // [rows]
};

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_SCALED_ROWS_H_
