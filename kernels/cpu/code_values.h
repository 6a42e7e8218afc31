// The weighted sums of values of a unit on stored codes: reads parameters and calls the kernels of
// codes.h.
#ifndef KVANT_KERNELS_CPU_CODE_VALUES_H_
#define KVANT_KERNELS_CPU_CODE_VALUES_H_

#include <cstdint>

#include "kvant/kernels/cpu/arena.h"
#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/code_parameters.h"
#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/dequantize.h"

namespace kvant::cpu {

class CodeValues {
 public:
  // Takes scratch from `own`, and from `shared` what is needed within a call only.
  CodeValues(const AttentionProblem& problem, Arena& own, Arena& shared);

  // out[r] = out[r] * shrink[r] + sum of probs[r][column + t] * v[t] over the tokens t of the part.
  // False, with out as it was, if a parameter is not finite or weights would lose too much of
  // what the tokens sum to.
  bool Multiply(const Reader& reader, const Part& part, const float* probs, int64_t rows,
                const float* shrink, float* out);

 private:
  // The tokens that are multiplied, and what by.
  struct Call {
    const Reader& reader;
    const Part& part;
    const float* probs;  // [rows][kTokenTile], of which tokens are at part.column
    int64_t rows;
  };
  // Of codes that stand for floats: what no scale but 0 may be below.
  float LeastScale(const Call& call, const float* shrink, const float* out) const;
  // All as Multiply.
  bool MultiplyFloats(const Call& call, const float* scales, const float* shrink, float* out);
  bool AddTokens(const Call& call, const float* shrink, float* out);
  bool AddRuns(const Call& call, const float* shrink, float* out);
  // Of tokens with a set of parameters per group, adds the sums with s16 weights, and where these
  // lost too much also those with what they lost. False: that was not enough. `spread`: not below
  // CodeKernels::spread of the tokens' distances from their zero points; of runs, of all
  // channels together.
  bool Add(const Call& call, const float* probs, const CodeParameters& parameters, float spread,
           CodeKernels::Values values, const float* shrink, float* out);
  // Makes weights_ of what they, once made of `probs`, lost.
  void WeighRest(const CodeKernels& kernels, const float* probs, const CodeParameters& parameters,
                 int64_t rows, int64_t columns, int64_t groups);
  // Whether rounding the weights costs no row more than kValueError of what is added to it.
  bool IsClose(const CodeKernels::Values& values, float spread, int64_t rows, bool biased) const;
  // The columns of `part`, which is one of the call's runs, of probs, with zeros around them.
  const float* Columns(const Call& call, const Part& part);

  const int64_t channels_;
  StoredHeads heads_;
  ChannelParameters parameters_;
  float *scales_, *biases_, *staging_, *probs_, *weight_scales_, *weight_biases_;
  int16_t* weights_;
  float* float_weights_;    // [rows][groups][kTokenTile]
  float *saved_, *unused_;  // [rows][channels]: out as it was
  float* lanes_;            // [rows][kSquareLanes]
  // [rows]: one over the largest scale of weights; the square of what rounding costs, that of
  // the first products, and that of what is added, in that unit; and the norm of all that was
  // added.
  float *units_, *errors_, *first_errors_, *squares_, *norms_;
};

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_CODE_VALUES_H_
