#include "kvant/kernels/cpu/code_values.h"

#include <algorithm>
#include <cmath>

#include "kvant/kernels/cpu/code_layout.h"
#include "kvant/kernels/cpu/code_parameters.h"

namespace kvant::cpu {
namespace {

// A tile whose largest scale is below this, but not 0, is dequantized: weights have scales by token
// in them, and 2^-30 of such a scale, which the rest of a weight is, comes near the end of f32.
// Where codes stand for floats, weights are probabilities times scales, so the smallest scale
// counts: it must not be below this, nor below LeastFactor.
constexpr float kLeastScale = 1e-20f;
// The same of scales by channel outside of these, whose squares are summed.
constexpr float kLeastChannelScale = 1e-13f, kMostChannelScale = 1e8f;

int64_t Groups(const Segment& segment) { return segment.codes.groups; }
int64_t FloatGroups(const Segment& segment) {
  return segment.codes.floats ? segment.codes.groups : 0;
}

}  // namespace

CodeValues::CodeValues(const AttentionProblem& problem, Arena& own, Arena& shared)
    : channels_(problem.v_head_size),
      parameters_(AnyByChannel(problem.v, problem.v_segments), channels_, own) {
  const int64_t groups = Most(problem.v, problem.v_segments, Groups);
  const int64_t rows = groups == 0 ? 0 : problem.row_tile;
  const int64_t runs = groups == 0 ? 0 : kMostRuns * channels_;
  scales_ = shared.Take(std::max(groups * kTokenTile, runs));
  biases_ = shared.Take(std::max(groups * kTokenTile, runs));
  staging_ = shared.Take(groups * kTokenTile);
  probs_ = shared.Take(rows * kTokenTile);
  weight_scales_ = shared.Take(rows * groups);
  weight_biases_ = shared.Take(rows * groups);
  weights_ = shared.TakeAs<int16_t>(rows * groups * kTokenTile);
  float_weights_ =
      shared.Take(rows * Most(problem.v, problem.v_segments, FloatGroups) * kTokenTile);
  saved_ = shared.Take(rows * channels_);
  unused_ = shared.Take(rows * channels_);
  units_ = shared.Take(rows);
  lanes_ = shared.Take(rows * kSquareLanes);
  errors_ = shared.Take(rows);
  first_errors_ = shared.Take(rows);
  squares_ = shared.Take(rows);
  norms_ = shared.Take(rows);
}

bool CodeValues::Multiply(const Reader& reader, const Part& part, const float* probs, int64_t rows,
                          const float* shrink, float* out) {
  const Segment& segment = part.segment;
  const Call call{reader, part, probs, rows};
  if (segment.codes.floats) {
    TileParameters parameters{{kOnes.at, nullptr}};
    if (segment.dequantization.scales.present() &&
        !ReadParameters(reader, heads_.At(reader, part), part, {}, staging_, scales_, biases_,
                        &parameters)) {
      return false;
    }
    return MultiplyFloats(call, parameters.scales, shrink, out);
  }
  return segment.codes.by_channel ? AddRuns(call, shrink, out) : AddTokens(call, shrink, out);
}

float CodeValues::LeastScale(const Call& call, const float* shrink, const float* out) const {
  const Part& part = call.part;
  const Segment& segment = part.segment;
  if (!segment.dequantization.scales.present()) return 0.f;
  const float most = LargestOf({segment.data.type, segment.data.codebook});
  float least = kLeastScale;
  for (int64_t r = 0; r < call.rows; ++r) {
    least = std::max(least, LeastFactor(call.probs + r * kTokenTile + part.column, part.tokens,
                                        most, out + r * channels_, channels_, shrink[r]));
  }
  return least;
}

bool CodeValues::MultiplyFloats(const Call& call, const float* scales, const float* shrink,
                                float* out) {
  const FloatCodeKernels& kernels = *call.reader.kernels->codes->floats;
  const Segment& segment = call.part.segment;
  const TokenRows stored = CodeRowsAt(heads_.At(call.reader, call.part), call.part, channels_);
  PrefetchFirst(stored, FirstLines(segment.codes, call.rows));
  if (!kernels.weights(Columns(call, call.part), call.rows, WholeHalves(call.part.tokens), scales,
                       segment.codes.groups, LeastScale(call, shrink, out), float_weights_)) {
    return false;
  }
  kernels.values({.rows = stored,
                  .codes = {segment.data.type, segment.data.codebook},
                  .channels = channels_,
                  .group = segment.codes.group,
                  .groups = segment.codes.groups,
                  .weights = float_weights_},
                 call.rows, shrink, out);
  return true;
}

const float* CodeValues::Columns(const Call& call, const Part& part) {
  const int64_t columns = WholeHalves(part.tokens);
  if (part.column == 0 && part.tokens == columns) return call.probs;
  for (int64_t r = 0; r < call.rows; ++r) {
    float* const row = probs_ + r * kTokenTile;
    std::copy_n(call.probs + r * kTokenTile + part.column, part.tokens, row);
    std::fill(row + part.tokens, row + columns, 0.f);
  }
  return probs_;
}

bool CodeValues::AddTokens(const Call& call, const float* shrink, float* out) {
  const CodeLayout& codes = call.part.segment.codes;
  TileParameters parameters;
  const StoredHead& head = heads_.At(call.reader, call.part);
  if (!ReadParameters(call.reader, head, call.part,
                      {ValueOffset(codes), /*in_codes=*/true, ValueRange(codes)}, staging_, scales_,
                      biases_, &parameters)) {
    return false;
  }
  if (parameters.most_scale > 0.f && parameters.most_scale < kLeastScale) return false;
  const CodeKernels::Values values = {
      .rows = CodeRowsAt(head, call.part, channels_),
      .group = codes.group,
      .groups = codes.groups,
      .saved = saved_,
  };
  PrefetchFirst(values.rows, FirstLines(codes, call.rows));
  const float spread = static_cast<float>(call.part.tokens) * parameters.most * parameters.most;
  if (Add(call, Columns(call, call.part), parameters, spread, values, shrink, out)) {
    return true;
  }
  std::copy_n(saved_, call.rows * channels_, out);
  return false;
}

bool CodeValues::AddRuns(const Call& call, const float* shrink, float* out) {
  const CodeLayout& codes = call.part.segment.codes;
  const Dequantization& how = call.part.segment.dequantization;
  const CodeKernels& kernels = *call.reader.kernels->codes;
  // First all parameters, so that nothing is added unless they will do.
  int64_t at = 0;
  const bool will_do = ForRuns(call.part, [&](const Part& run) {
    float* scales = scales_ + at;
    float* biases = biases_ + at;
    at += channels_;
    parameters_.Read(call.reader, run.segment, run.first, scales, biases);
    const bool has_points = how.zero_points.present();
    const CodeBiases make{how.real_zero_points, /*in_codes=*/false, ValueOffset(codes)};
    const CodeLimits limits =
        kernels.biases(scales, has_points ? biases : nullptr, make, channels_, biases);
    const float most = limits.scale;
    return limits.finite &&
           (most == 0.f || (most >= kLeastChannelScale && most <= kMostChannelScale));
  });
  if (!will_do) return false;
  at = 0;
  const bool biased = how.zero_points.present() || ValueOffset(codes) != 0.f;
  const bool close = ForRuns(call.part, [&](const Part& run) {
    // What was there shrinks once.
    const bool first = run.column == call.part.column;
    const CodeKernels::Values values = {
        .rows = CodeRowsAt(heads_.At(call.reader, run), run, channels_),
        .group = channels_,
        .groups = 1,
        .channel_scales = scales_ + at,
        .channel_biases = biases_ + at,
        .saved = first ? saved_ : unused_,
    };
    const float spread = kernels.spread(values.channel_scales, values.channel_biases, channels_, 1,
                                        ValueRange(codes));
    at += channels_;
    return Add(call, Columns(call, run), {kOnes.at, biased ? kOnes.at : nullptr},
               static_cast<float>(run.tokens) * spread, values, first ? shrink : kOnes.at, out);
  });
  if (!close) std::copy_n(saved_, call.rows * channels_, out);
  return close;
}

bool CodeValues::Add(const Call& call, const float* probs, const CodeParameters& parameters,
                     float spread, CodeKernels::Values values, const float* shrink, float* out) {
  const CodeKernels& kernels = *call.reader.kernels->codes;
  const CodeLayout& codes = call.part.segment.codes;
  values.bits = codes.bits;
  values.is_signed = codes.is_signed;
  values.channels = channels_;
  values.weights = weights_;
  values.weight_scales = weight_scales_;
  values.weight_biases = weight_biases_;
  values.units = units_;
  values.lanes = lanes_;
  const int64_t columns = WholeHalves(values.rows.tokens);
  kernels.weights(probs, call.rows, columns, parameters, values.groups, weights_, weight_scales_,
                  weight_biases_, units_);  // in which no square over- or underflows that counts
  const bool biased = parameters.biases != nullptr;
  for (const bool rest : {false, true}) {
    std::fill_n(lanes_, call.rows * kSquareLanes, 0.f);
    if (rest) {
      WeighRest(kernels, probs, parameters, call.rows, columns, values.groups);
      values.saved = unused_;
    }
    kernels.values(values, call.rows, rest ? kOnes.at : shrink, out);
    kernels.costs(weight_scales_, units_, lanes_, call.rows, values.groups, errors_, squares_);
    // The norm of the sum of what was added and what is, is not below their difference.
    for (int64_t r = 0; r < call.rows; ++r) {
      norms_[r] = rest ? std::fabs(norms_[r] - std::sqrt(squares_[r])) : std::sqrt(squares_[r]);
    }
    if (!rest) std::copy_n(errors_, call.rows, first_errors_);
    if (IsClose(values, spread, call.rows, biased)) return true;
    if (rest || values.channel_scales != nullptr) continue;
    spread = kernels.spread(nullptr, parameters.biases, call.part.tokens, values.groups,
                            ValueRange(codes));
    if (IsClose(values, spread, call.rows, biased)) return true;
  }
  return false;
}

void CodeValues::WeighRest(const CodeKernels& kernels, const float* probs,
                           const CodeParameters& parameters, int64_t rows, int64_t columns,
                           int64_t groups) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = r * groups + g;
      int16_t* const weights = weights_ + at * kTokenTile;
      const CodeParameters own{
          parameters.scales + g * kTokenTile,
          parameters.biases == nullptr ? nullptr : parameters.biases + g * kTokenTile};
      WeighLost(kernels, probs + r * kTokenTile, columns, own, weights, weight_scales_[at], weights,
                weight_scales_ + at, weight_biases_ + at);
    }
  }
}

bool CodeValues::IsClose(const CodeKernels::Values& values, float spread, int64_t rows,
                         bool biased) const {
  const auto channels = static_cast<float>(channels_);
  const float width =
      values.channel_scales != nullptr ? 1.f : std::min(channels, static_cast<float>(values.group));
  // Zero points are subtracted after the first sums over codes became f32. A code and its zero
  // point are together at most four times what `spread` counts; roundings of both sums are taken as
  // one of 2^-24, with weights as large as they may be.
  const float lost = 4 * kEpsilon * kMostOfS16;
  const float of_f32 = biased ? lost * lost * static_cast<float>(values.rows.tokens) : 0.f;
  bool close = true;
  for (int64_t r = 0; r < rows; ++r) {
    const float error =
        width * spread * (errors_[r] * kSquareOfRounding + first_errors_[r] * of_f32);
    const float allowed = kValueError * kValueError * norms_[r] * norms_[r];
    close = close && ((error <= allowed && std::isfinite(allowed)) || units_[r] == 0.f);
  }
  return close;
}

}  // namespace kvant::cpu
