// The scores of a unit on stored codes: keeps the queries prepared, reads parameters, and calls the
// kernels of codes.h.
#ifndef KVANT_KERNELS_CPU_CODE_SCORES_H_
#define KVANT_KERNELS_CPU_CODE_SCORES_H_

#include <cstdint>

#include "kvant/kernels/cpu/arena.h"
#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/code_parameters.h"
#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/dequantize.h"

namespace kvant::cpu {

class CodeScores {
 public:
  // Takes scratch from `own`, and from `shared` what is needed within a call only.
  CodeScores(const AttentionProblem& problem, Arena& own, Arena& shared);

  // What rounding may move scores by, root mean square.
  void Allow(float error) { allowed_ = error; }
  // scores[r][column + t] = q[r] . k[t] for the tokens of the part; columns after those may be
  // overwritten. False, with scores unspecified, if a query or a parameter is not finite, or so
  // large beside the others that sums on codes lose these. `q` and `rows` are the same in every
  // call.
  bool Multiply(const Reader& reader, const Part& part, const float* q, int64_t rows,
                float* scores);

 private:
  bool MultiplyRun(const Reader& reader, const Part& run, const float* q, int64_t rows,
                   float* scores);
  bool Prepare(const Reader& reader, const Segment& segment, const Position& p, const float* q,
               int64_t rows);
  // Whether scores are exact enough if no token's L2 norm is above reach_.
  bool IsExact(bool biased) const;
  // What rounding may move scores by, of tokens whose parameters and codes these are: by what the
  // tile's limits allow; if that is too much by all of its parameters, then by its codes, which
  // transposed_ may hold.
  float ErrorOf(const CodeKernels& kernels, const CodeLayout& codes,
                const TileParameters& parameters, const TokenRows& rows, bool transposed);
  // False: sums of a part might exceed f32, whose scales come after them.
  bool MultiplyFloats(const Reader& reader, const Segment& segment, const Position& p,
                      const TokenRows& stored, const float* q, int64_t rows, const float* scales,
                      float* scores);

  const int64_t channels_;
  float allowed_ = kScoreError;
  StoredHeads heads_;
  ChannelParameters parameters_;
  PreparedFor prepared_;  // what queries_ and what follows hold
  bool finite_ = false;
  CodeQueries queries_;
  // What queries_ lost, itself rounded to s16 once a tile wants it.
  CodeQueries rest_;
  bool rest_is_prepared_ = false;
  float largest_ = 0.f;  // query
  // Errors of a query and of rest_, root mean square, in the row that has the largest.
  float rounding_ = 0.f, rest_rounding_ = 0.f;
  // With scales by channel, which are in the queries: the L2 norm of zero points less the middle of
  // codes, and the most that a token's norm may be.
  float zeros_ = 0.f, reach_ = 0.f;
  float* float_queries_;  // [rows][channels of all columns]
  float *scales_, *biases_, *staging_, *scores_, *rest_scores_, *norms_;
  int32_t* transposed_;
};

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_CODE_SCORES_H_
