// The products of a unit on stored codes: reads parameters, keeps the queries prepared, and
// calls the kernels of codes.h.
#ifndef KVANT_KERNELS_CPU_CODE_PRODUCTS_H_
#define KVANT_KERNELS_CPU_CODE_PRODUCTS_H_

#include <cstdint>
#include <string>

#include "kvant/kernels/cpu/arena.h"
#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/code_parameters.h"
#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/dequantize.h"

namespace kvant::cpu {

// Sets segment.codes for tokens of `channels` channels; returns why it stays unusable, in words,
// or nothing. Only keys may be channel-major.
std::string DescribeCodes(int64_t channels, bool keys, Segment& segment);

// Scores of one unit.
class CodeScores {
 public:
  // Takes scratch from `arena`.
  CodeScores(const AttentionProblem& problem, Arena& arena);

  // scores[r][at + t] = q[r] . k[token + t] for tokens [token, token + n) of the segment at batch
  // position `p`, at + n <= kTokenTile; columns after those may be overwritten. False, with
  // scores unspecified, if a query or a parameter is not finite. `q` and `rows` are the same in
  // every call.
  bool Multiply(const Reader& reader, const Segment& segment, Position p, int64_t token, int64_t n,
                const float* q, int64_t rows, float* scores, int64_t at);

 private:
  bool MultiplyRun(const Reader& reader, const Segment& segment, const Position& p, int64_t n,
                   const float* q, int64_t rows, float* scores);
  bool Prepare(const Reader& reader, const Segment& segment, const Position& p, const float* q,
               int64_t rows);
  // False: sums of a part might exceed f32, whose scales come after them.
  bool MultiplyFloats(const Reader& reader, const Segment& segment, const Position& p,
                      const CodeRows& stored, const float* q, int64_t rows, const float* scales,
                      float* scores);

  const int64_t channels_;
  ChannelParameters parameters_;
  PreparedFor prepared_;  // what queries_ holds
  bool finite_ = false;
  CodeQueries queries_;
  float* float_queries_;  // [rows][channels of all columns]
  float *scales_, *biases_, *staging_, *scores_;
  int32_t* turned_;
};

// Weighted sums of values of one unit.
class CodeValues {
 public:
  CodeValues(const AttentionProblem& problem, Arena& arena);

  // out[r] = out[r] * shrink[r] + sum_{t < n} probs[r][at + t] * v[token + t]; at + n <=
  // kTokenTile. False, with out as it was, if a parameter is not finite.
  bool Multiply(const Reader& reader, const Segment& segment, Position p, int64_t token, int64_t n,
                const float* probs, int64_t at, int64_t rows, const float* shrink, float* out);

 private:
  bool MultiplyByRuns(const Reader& reader, const Segment& segment, Position p, int64_t n,
                      const float* probs, int64_t at, int64_t rows, const float* shrink,
                      float* out);
  // probs, or those columns alone, with zeros around them.
  const float* Columns(const float* probs, int64_t at, int64_t n, int64_t rows);

  const int64_t channels_;
  ChannelParameters parameters_;
  float *scales_, *biases_, *staging_, *probs_, *weight_scales_, *weight_biases_;
  int16_t* weights_;
  float* float_weights_;  // [rows][groups][kTokenTile]
};

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_CODE_PRODUCTS_H_
