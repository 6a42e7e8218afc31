#include "kvant/kernels/cpu/channel_major_scores.h"

#include <algorithm>
#include <cmath>

#include "kvant/kernels/cpu/code_parameters.h"

namespace kvant::cpu {
namespace {

bool IsChannelMajor(const Segment& segment) { return segment.codes.channel_major; }

int64_t Chunks(const Segment& segment, int64_t channels) {
  const CodeLayout& codes = segment.codes;
  if (!IsChannelMajor(segment)) return 0;
  return codes.groups * CeilDiv(std::min(codes.group, channels), kTokenTile);
}

int64_t MostChunks(const AttentionProblem& problem) {
  return Most(problem.k, problem.k_segments,
              [&](const Segment& s) { return Chunks(s, problem.head_size); });
}

}  // namespace

// Of `count` rows of a chunk.
ChannelMajorScores::Weights::Weights(int64_t count, Arena& arena)
    : weights(arena.TakeAs<int16_t>(count * kTokenTile)),
      scales(arena.Take(count)),
      biases(arena.Take(count)) {}

ChannelMajorScores::ChannelMajorScores(const AttentionProblem& problem, Arena& own, Arena& shared)
    : ChannelMajorScores(problem, MostChunks(problem), own, shared) {}

ChannelMajorScores::ChannelMajorScores(const AttentionProblem& problem, int64_t chunks, Arena& own,
                                       Arena& shared)
    : channels_(problem.head_size),
      parameters_(AnyByChannel(problem.k, problem.k_segments), channels_, own),
      weights_(chunks * problem.row_tile, own),
      rest_(chunks * problem.row_tile, own) {
  const int64_t groups = Most(problem.k, problem.k_segments, [](const Segment& s) {
    return IsChannelMajor(s) ? s.codes.groups : 0;
  });
  const int64_t rows = chunks == 0 ? 0 : problem.row_tile;
  // Parameters are a tile of groups, or one per channel and zeros to the end of the last chunk.
  const int64_t parameters =
      chunks == 0 ? 0 : std::max(groups * kTokenTile, channels_ + kTokenTile);
  scales_ = own.Take(parameters);
  biases_ = own.Take(parameters);
  staging_ = shared.Take(groups * kTokenTile);
  padded_ = shared.Take(rows * kTokenTile);
  scores_ = shared.Take(rows * kTokenTile);
  unused_ = shared.Take(rows * kTokenTile);
}

ChannelMajorScores::Chunk ChannelMajorScores::ChunkAt(const CodeLayout& codes,
                                                      int64_t begin) const {
  const int64_t group = begin / codes.group;
  const int64_t end = std::min({begin + kTokenTile, (group + 1) * codes.group, channels_});
  return {begin, end, group};
}

CodeParameters ChannelMajorScores::Pad(const CodeLayout& codes, const Chunk& chunk, const float* q,
                                       int64_t rows) {
  std::fill_n(padded_, rows * kTokenTile, 0.f);
  for (int64_t r = 0; r < rows; ++r) {
    std::copy_n(q + r * channels_ + chunk.begin, chunk.end - chunk.begin, padded_ + r * kTokenTile);
  }
  if (codes.by_channel) return {scales_ + chunk.begin, biases_ + chunk.begin};
  return {kOnes.at, kOnes.at};
}

bool ChannelMajorScores::Prepare(const Reader& reader, const Segment& segment, const Position& p,
                                 const float* q, int64_t rows) {
  const CodeLayout& codes = segment.codes;
  if (!prepared_.Change(segment, p)) return finite_;
  finite_ = rest_is_prepared_ = false;
  const CodeKernels& kernels = *reader.kernels->codes;
  if (codes.by_channel) {
    const Dequantization& how = segment.dequantization;
    const bool has_points = how.zero_points.present();
    parameters_.Read(reader, segment, p, scales_, biases_);
    const CodeBiases make{how.real_zero_points, /*in_codes=*/true, ValueOffset(codes)};
    const float* const points = has_points ? biases_ : nullptr;
    if (!kernels.biases(scales_, points, make, channels_, biases_).finite) return false;
    std::fill_n(scales_ + channels_, kTokenTile, 0.f);
    std::fill_n(biases_ + channels_, kTokenTile, 0.f);
    reach_ = std::sqrt(kernels.spread(nullptr, biases_, channels_, 1, ValueRange(codes)));
  }
  int64_t i = 0;
  for (int64_t begin = 0; begin < channels_; i += rows) {
    const Chunk chunk = ChunkAt(codes, begin);
    begin = chunk.end;
    const CodeParameters parameters = Pad(codes, chunk, q, rows);
    kernels.weights(padded_, rows, WholeHalves(chunk.end - chunk.begin), parameters, /*groups=*/1,
                    weights_.weights + i * kTokenTile, weights_.scales + i, weights_.biases + i,
                    /*units=*/nullptr);
  }
  const auto finite = [](float x) { return std::isfinite(x); };
  finite_ = std::all_of(weights_.scales, weights_.scales + i, finite) &&
            std::all_of(weights_.biases, weights_.biases + i, finite);
  largest_ = *std::max_element(weights_.scales, weights_.scales + i);
  return finite_;
}

void ChannelMajorScores::PrepareRest(const CodeKernels& kernels, const CodeLayout& codes,
                                     const float* q, int64_t rows) {
  int64_t at = 0;
  for (int64_t begin = 0; begin < channels_;) {
    const Chunk chunk = ChunkAt(codes, begin);
    begin = chunk.end;
    const CodeParameters parameters = Pad(codes, chunk, q, rows);
    for (int64_t r = 0; r < rows; ++r, ++at) {
      WeighLost(kernels, padded_ + r * kTokenTile, WholeHalves(chunk.end - chunk.begin), parameters,
                weights_.weights + at * kTokenTile, weights_.scales[at],
                rest_.weights + at * kTokenTile, rest_.scales + at, rest_.biases + at);
    }
  }
  rest_largest_ = *std::max_element(rest_.scales, rest_.scales + at);
  rest_is_prepared_ = true;
}

void ChannelMajorScores::Add(const CodeKernels& kernels, const Weights& weights,
                             const CodeLayout& codes, const CodeParameters& parameters,
                             CodeKernels::Values values, int64_t rows, float* scores) const {
  const uint8_t* const first = values.rows.blocks[0];
  int64_t i = 0;
  for (int64_t begin = 0; begin < channels_; i += rows) {
    const Chunk chunk = ChunkAt(codes, begin);
    begin = chunk.end;
    values.rows.tokens = chunk.end - chunk.begin;
    // The next tile's codes lie behind these, for each channel; the kernel itself prefetches
    // lines that are here already.
    const uint8_t* const data = first + chunk.begin * values.rows.stride;
    for (int b = 0; b < kTileBlocks; ++b) {
      values.rows.blocks[b] = values.rows.next[b] = data + b * kPageUnit * values.rows.stride;
    }
    for (int64_t c = 0; c < values.rows.tokens; ++c) {
      PrefetchBytes(data + c * values.rows.stride + values.rows.row_bytes, values.rows.row_bytes);
    }
    values.weights = weights.weights + i * kTokenTile;
    values.weight_scales = weights.scales + i;
    values.weight_biases = weights.biases + i;
    if (!codes.by_channel) {
      const int64_t tile = chunk.group * kTokenTile;
      values.channel_scales = parameters.scales + tile;
      values.channel_biases = parameters.biases == nullptr ? kZeros.at : parameters.biases + tile;
    }
    kernels.values(values, rows, kOnes.at, scores);
  }
}

bool ChannelMajorScores::MultiplyRun(const Reader& reader, const Part& run, const float* q,
                                     int64_t rows, float* scores) {
  const Segment& segment = run.segment;
  const Position& p = run.first;
  const int64_t n = run.tokens;
  const CodeLayout& codes = segment.codes;
  if (p.at[kRow] * codes.bits % 8 != 0 || !Prepare(reader, segment, p, q, rows)) return false;
  const CodeKernels& kernels = *reader.kernels->codes;
  TileParameters parameters;
  if (!codes.by_channel) {
    const WantedBiases wanted{ValueOffset(codes), /*in_codes=*/false, ValueRange(codes)};
    if (!ReadParameters(reader, heads_.At(reader, run), run, wanted, staging_, scales_, biases_,
                        &parameters)) {
      return false;
    }
    reach_ =
        std::sqrt(kernels.reach(parameters, wanted.range, WholeHalves(n), codes.group, channels_));
  }
  const CodeKernels::Values values = {
      .rows = {.blocks = {static_cast<const uint8_t*>(reader.Data(segment.data)) +
                          segment.data.IndexOf(p) * codes.bits / 8},
               .stride = segment.data.strides[kCol] * codes.bits / 8,
               .row_bytes = CeilDiv(n * codes.bits, 8)},
      .bits = codes.bits,
      .is_signed = codes.is_signed,
      .channels = n,
      .group = n,
      .groups = 1,
      .saved = unused_,
      .units = kZeros.at,
      .lanes = unused_,
  };
  std::fill_n(scores, rows * n, 0.f);
  Add(kernels, weights_, codes, parameters, values, rows, scores);
  // As CodeScores, without a look at the codes.
  const float norm = kOfRounding * std::max(reach_, kLeastNorm);
  if (!(largest_ * norm <= allowed_)) {
    if (!rest_is_prepared_) PrepareRest(kernels, codes, q, rows);
    if (!(rest_largest_ * norm <= allowed_)) return false;
    Add(kernels, rest_, codes, parameters, values, rows, scores);
  }
  const bool biased = segment.dequantization.zero_points.present() || ValueOffset(codes) != 0.f;
  return SurvivesCancelling(biased, channels_, kMostOfS16 * largest_, reach_, allowed_);
}

bool ChannelMajorScores::Multiply(const Reader& reader, const Part& part, const float* q,
                                  int64_t rows, float* scores) {
  return ForRuns(part, [&](const Part& run) {
    // Rows of what is returned are as long as there are tokens.
    if (run.tokens == kTokenTile) return MultiplyRun(reader, run, q, rows, scores);
    if (!MultiplyRun(reader, run, q, rows, scores_)) return false;
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(scores_ + r * run.tokens, run.tokens, scores + r * kTokenTile + run.column);
    }
    return true;
  });
}

}  // namespace kvant::cpu
