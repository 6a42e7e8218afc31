// Scores of keys that are stored channel by channel, tokens side by side, on their codes.
#ifndef KVANT_KERNELS_CPU_CHANNEL_MAJOR_SCORES_H_
#define KVANT_KERNELS_CPU_CHANNEL_MAJOR_SCORES_H_

#include <cstdint>

#include "kvant/kernels/cpu/arena.h"
#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/code_parameters.h"
#include "kvant/kernels/cpu/dequantize.h"

namespace kvant::cpu {

// What CodeValues does with tokens and channels swapped: channels are summed, at most kTokenTile at
// a time and of one group, with queries as the weights.
class ChannelMajorScores {
 public:
  // Takes scratch from `own`, and from `shared` what is needed within a call only.
  ChannelMajorScores(const AttentionProblem& problem, Arena& own, Arena& shared);

  // As CodeScores::Allow.
  void Allow(float error) { allowed_ = error; }
  // As CodeScores::Multiply; false also where tokens do not begin at a byte.
  bool Multiply(const Reader& reader, const Part& part, const float* q, int64_t rows,
                float* scores);

 private:
  ChannelMajorScores(const AttentionProblem& problem, int64_t chunks, Arena& own, Arena& shared);
  // Channels [begin, end), of a group.
  struct Chunk {
    int64_t begin, end, group;
  };
  // From channel `begin` on.
  Chunk ChunkAt(const CodeLayout& codes, int64_t begin) const;
  bool Prepare(const Reader& reader, const Segment& segment, const Position& p, const float* q,
               int64_t rows);
  // Makes rest_ of what weights_ lost.
  void PrepareRest(const CodeKernels& kernels, const CodeLayout& codes, const float* q,
                   int64_t rows);
  bool MultiplyRun(const Reader& reader, const Part& run, const float* q, int64_t rows,
                   float* scores);

  const int64_t channels_;
  float allowed_ = kScoreError;
  StoredHeads heads_;
  ChannelParameters parameters_;
  PreparedFor prepared_;  // what the weights are for
  bool finite_ = false;
  // Queries by chunk: [chunk][row][kTokenTile], and [chunk][row].
  struct Weights {
    Weights(int64_t count, Arena& arena);
    int16_t* weights;
    float *scales, *biases;
  };
  // What weights_ lost by rounding is in rest_, once a tile wants it.
  Weights weights_, rest_;
  bool rest_is_prepared_ = false;
  float largest_ = 0.f, rest_largest_ = 0.f;  // scales of weights_, of rest_
  float reach_ = 0.f;  // with scales by channel: the most that a token's L2 norm may be
  // Of a run of channels, rows of kTokenTile with zeros at their end, and their parameters.
  CodeParameters Pad(const CodeLayout& codes, const Chunk& chunk, const float* q, int64_t rows);
  void Add(const CodeKernels& kernels, const Weights& weights, const CodeLayout& codes,
           const CodeParameters& parameters, CodeKernels::Values values, int64_t rows,
           float* scores) const;

  float *scales_, *biases_, *staging_, *padded_, *scores_, *unused_;
};

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_CHANNEL_MAJOR_SCORES_H_
