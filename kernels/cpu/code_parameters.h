// Scales and zero points of stored codes, and what else the products on codes share.
#ifndef KVANT_KERNELS_CPU_CODE_PARAMETERS_H_
#define KVANT_KERNELS_CPU_CODE_PARAMETERS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kvant/kernels/cpu/arena.h"
#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/dequantize.h"
#include "kvant/kernels/cpu/stored_heads.h"

namespace kvant::cpu {

// Rounding to s16 may move scores by so much, root mean square, once all steps are done: the
// exponential makes an error of a score one of the probability, relative to it. It counts twice
// where two scores move in opposite directions: that of a token whose values make the output, and
// that of a sink that has most of the probability and next to no values ...
inline constexpr float kScoreError = 2.85e-4f;
// ... and what the values of a tile sum to by so much of their L2 norm. Both together are about
// 7.1e-4, of which Executable::rounding promises four times.
inline constexpr float kValueError = 4.2e-4f;
// Mean square of what rounding with a dither is off by, in steps: f * (1 - f) for a fraction f, and
// this over all fractions. Rounding to the nearest has 1/12.
inline constexpr float kSquareOfRounding = 1.f / 6;
inline constexpr float kOfRounding = 0.40824829f;  // its root
// L2 norms of tokens below this may be so small because their squares underflow.
inline constexpr float kLeastNorm = 1e-15f;
// Whole numbers under one scale.
inline constexpr float kMostOfS16 = 32767.f;
// What f32 rounds to, relative to the number.
inline constexpr float kEpsilon = 0x1p-24f;

// kTokenTile of the same.
struct Same {
  explicit constexpr Same(float value) {
    for (float& x : at) x = value;
  }
  float at[kTokenTile] = {};
};
inline constexpr Same kOnes(1.f), kZeros(0.f);

// NaN does not count: it shows in its own row whatever multiplies it.
float LargestMagnitude(const float* x, int64_t n);

// Of what codes stand for; of f8 of either type.
float LargestOf(const FloatCodes& codes);

// A product of one of the row's probabilities with a number below this, other than 0, may be below
// f32's normal numbers, and so off by 2^-150. It is then multiplied by up to `most`. 0 if that
// cannot show in the row's output, out * shrink.
float LeastFactor(const float* probs, int64_t tokens, float most, const float* out,
                  int64_t channels, float shrink);

// What flipping the sign bit of signed codes adds to them.
inline int32_t OffsetOf(const CodeLayout& codes) {
  return codes.is_signed ? int32_t{1} << (codes.bits - 1) : 0;
}
// What they are in CodeScores' products, of which flipping is no part of the zero points ...
inline CodeRange ScoreRange(const CodeLayout& codes) {
  const auto half = static_cast<float>(int32_t{1} << (codes.bits - 1));
  return {codes.is_signed ? 0.f : half, half};
}
// ... and where CodeKernels::values reads them.
inline CodeRange ValueRange(const CodeLayout& codes) {
  const auto half = static_cast<float>(int32_t{1} << (codes.bits - 1));
  return {codes.is_signed && codes.bits == 8 ? 0.f : half, half};
}
// The same where CodeKernels::values reads them, which takes signed codes of 8 bits as they are.
inline float ValueOffset(const CodeLayout& codes) {
  return codes.bits == 8 ? 0.f : static_cast<float>(OffsetOf(codes));
}

// Lines of the next tile to prefetch before a tile's parameters are read, and before its weights
// are made, which is when no kernel prefetches any, if a tile waits for memory. Narrow codes with
// several rows wait for products, which so many at once hold up.
inline int64_t FirstLines(const CodeLayout& codes, int64_t rows) {
  return codes.bits == 8 || (codes.bits == 4 && rows == 1 && !codes.floats) ? 24 : 0;
}

// What a unit's queries were last prepared for: a segment, and where its scales vary by channel a
// run of its tokens.
class PreparedFor {
 public:
  // Whether that was another than the segment's at `p`, which it is from now on.
  bool Change(const Segment& segment, const Position& p) {
    const bool by_channel = segment.codes.by_channel;
    const int64_t run = by_channel ? p.at[kRow] / segment.codes.run : 0;
    const int64_t page = by_channel ? p.at[0] : 0;
    if (segment_ == &segment && run_ == run && page_ == page) return false;
    segment_ = &segment;
    run_ = run;
    page_ = page;
    return true;
  }

 private:
  const Segment* segment_ = nullptr;
  int64_t run_ = 0, page_ = 0;
};

// Parameters of a unit that vary by channel, of one run of tokens after another.
class ChannelParameters {
 public:
  // Takes scratch from `arena`, unless none is `wanted`.
  ChannelParameters(bool wanted, int64_t channels, Arena& arena);
  // Scales, and zero points if there are any, of the run of tokens at `p`; `channels` floats each.
  void Read(const Reader& reader, const Segment& segment, const Position& p, float* scales,
            float* points);

 private:
  // Runs that are read at a time where they, not channels, are side by side.
  static constexpr int64_t kRuns = 16;
  struct Block {
    const Array* array = nullptr;
    int64_t first = -1;  // run
    int64_t page = 0;
    float* values = nullptr;  // [kRuns][channels]
  };
  void ReadOne(const Reader& reader, const Segment& segment, const Array& array, Position p,
               Block& block, float* out);

  const int64_t channels_;
  Block scales_, points_;
  float* lines_;  // [channels][kRuns]
};

// Parameter tiles, and the most that a code of the range may be from its zero point, times the
// scale unless biases are in codes. `most` may be above that of any one code. most_scale: the
// largest magnitude of a scale.
struct TileParameters : CodeParameters {
  float most = 0.f;
  float most_scale = 1.f;
};
struct WantedBiases {
  float offset = 0.f;
  bool in_codes = false;
  CodeRange range;
};
// Those of a part, biases as CodeBiases says; null biases if there is neither zero point
// nor offset. False if one is not finite. `staging`, `scales`, `biases`: groups * kTokenTile
// floats.
bool ReadParameters(const Reader& reader, const StoredHead& head, const Part& part,
                    const WantedBiases& wanted, float* staging, float* scales, float* biases,
                    TileParameters* out);

// Calls use(run) for what of the part lies in each run of tokens that have parameters of their own,
// as long as it returns true.
template <typename Use>
bool ForRuns(const Part& part, Use use) {
  const CodeLayout& codes = part.segment.codes;
  if (!codes.by_channel) return use(part);
  for (int64_t first = 0; first < part.tokens;) {
    Position p = part.first;
    p.at[kRow] += first;
    // Prefetches the same run of what follows the part: other heads' turns may come in between.
    Position next = part.next;
    const int64_t tokens = std::min(part.tokens - first, codes.run - p.at[kRow] % codes.run);
    next.at[kRow] += first;
    Part one{part.segment, p, tokens, part.column + first, next};
    one.in_turn = part.in_turn;
    if (!use(one)) return false;
    first += tokens;
  }
  return true;
}

// Weights of what `columns` of a row lost when their products with the parameters' scales became
// `weights` of `scale`.
void WeighLost(const CodeKernels& kernels, const float* row, int64_t columns,
               const CodeParameters& parameters, const int16_t* weights, float scale,
               int16_t* lost_weights, float* lost_scale, float* lost_bias);

// Whether f32 holds the scores of queries up to `largest` and tokens of an L2 norm up to `reach`.
// Scores must be finite, and so must sums over codes, which are not yet multiplied by what queries
// were divided by. With zero points these sums are up to twice as large, and rounded before what
// the zero points add up to is subtracted: that must cost `allowed` at most, root mean square.
inline bool SurvivesCancelling(bool biased, int64_t channels, float largest, float reach,
                               float allowed) {
  const float of_ones = std::sqrt(static_cast<float>(channels)) * reach, most = of_ones * largest;
  // A code and its zero point are together at most four times what `reach` counts.
  return std::isfinite(most) && std::isfinite(4 * kMostOfS16 * of_ones) &&
         (!biased || kEpsilon * most <= allowed);
}

// The most that any segment needs, of `get(segment)`.
template <typename Get>
int64_t Most(const Segment* segments, int count, Get get) {
  int64_t most = 0;
  for (int i = 0; i < count; ++i) {
    if (segments[i].codes.usable) most = std::max<int64_t>(most, get(segments[i]));
  }
  return most;
}

// Whether codes of any have parameters by channel.
inline bool AnyByChannel(const Segment* segments, int count) {
  return Most(segments, count, [](const Segment& s) { return int64_t{s.codes.by_channel}; }) != 0;
}

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_CODE_PARAMETERS_H_
