#include "kvant/kernels/cpu/channel_major_scores.h"

#include <algorithm>
#include <bit>
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

}  // namespace

ChannelMajorScores::ChannelMajorScores(const AttentionProblem& problem, Arena& arena)
    : channels_(problem.head_size),
      parameters_(problem.k, problem.k_segments, problem.head_size, arena) {
  const auto most = [&](auto get) { return Most(problem.k, problem.k_segments, get); };
  const int64_t chunks = most([&](const Segment& s) { return Chunks(s, channels_); });
  const int64_t groups =
      most([](const Segment& s) { return IsChannelMajor(s) ? s.codes.groups : 0; });
  const int64_t rows = chunks == 0 ? 0 : problem.row_tile;
  // Parameters are a tile of groups, or one per channel and zeros to the end of the last chunk.
  const int64_t parameters =
      chunks == 0 ? 0 : std::max(groups * kTokenTile, channels_ + kTokenTile);
  weights_ = arena.TakeAs<int16_t>(chunks * rows * kTokenTile);
  weight_scales_ = arena.Take(chunks * rows);
  weight_biases_ = arena.Take(chunks * rows);
  scales_ = arena.Take(parameters);
  biases_ = arena.Take(parameters);
  staging_ = arena.Take(groups * kTokenTile);
  padded_ = arena.Take(rows * kTokenTile);
  scores_ = arena.Take(rows * kTokenTile);
}

ChannelMajorScores::Chunk ChannelMajorScores::ChunkAt(const CodeLayout& codes,
                                                      int64_t begin) const {
  const int64_t group = begin / codes.group;
  const int64_t end = std::min({begin + kTokenTile, (group + 1) * codes.group, channels_});
  return {begin, end, group};
}

bool ChannelMajorScores::Prepare(const Reader& reader, const Segment& segment, const Position& p,
                                 const float* q, int64_t rows) {
  const CodeLayout& codes = segment.codes;
  if (!prepared_.Change(segment, p)) return finite_;
  finite_ = false;
  const CodeKernels& kernels = *reader.kernels->codes;
  if (codes.by_channel) {
    const Dequantization& how = segment.dequantization;
    const bool has_points = how.zero_points.present();
    parameters_.Read(reader, segment, p, scales_, biases_);
    const CodeBiases make{how.real_zero_points, /*in_codes=*/true, ValueOffset(codes)};
    if (!kernels.biases(scales_, has_points ? biases_ : nullptr, make, channels_, biases_)) {
      return false;
    }
    std::fill_n(scales_ + channels_, kTokenTile, 0.f);
    std::fill_n(biases_ + channels_, kTokenTile, 0.f);
  }
  int64_t i = 0;
  for (int64_t begin = 0; begin < channels_; i += rows) {
    const Chunk chunk = ChunkAt(codes, begin);
    begin = chunk.end;
    std::fill_n(padded_, rows * kTokenTile, 0.f);
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(q + r * channels_ + chunk.begin, chunk.end - chunk.begin,
                  padded_ + r * kTokenTile);
    }
    CodeParameters parameters{kOnes.at, kOnes.at};
    if (codes.by_channel) parameters = {scales_ + chunk.begin, biases_ + chunk.begin};
    kernels.weights(padded_, rows, parameters, /*groups=*/1, weights_ + i * kTokenTile,
                    weight_scales_ + i, weight_biases_ + i);
  }
  const auto finite = [](float x) { return std::isfinite(x); };
  return finite_ = std::all_of(weight_scales_, weight_scales_ + i, finite) &&
                   std::all_of(weight_biases_, weight_biases_ + i, finite);
}

bool ChannelMajorScores::MultiplyRun(const Reader& reader, const Segment& segment,
                                     const Position& p, int64_t n, const float* q, int64_t rows,
                                     float* scores) {
  const CodeLayout& codes = segment.codes;
  if (p.at[kRow] * codes.bits % 8 != 0 || !Prepare(reader, segment, p, q, rows)) return false;
  CodeParameters parameters;
  if (!codes.by_channel &&
      !ReadParameters(reader, segment, p, n, ValueOffset(codes), /*in_codes=*/false, staging_,
                      scales_, biases_, &parameters)) {
    return false;
  }
  const int64_t stride = segment.data.strides[kCol] * codes.bits / 8;
  const auto* data = static_cast<const uint8_t*>(reader.Data(segment.data)) +
                     segment.data.IndexOf(p) * codes.bits / 8;
  CodeKernels::Values args = {
      .rows = {.stride = stride, .row_bytes = CeilDiv(n * codes.bits, 8)},
      .bits = codes.bits,
      .is_signed = codes.is_signed,
      .channels = n,
      .group = n,
      .groups = 1,
  };
  std::fill_n(scores, rows * n, 0.f);
  int64_t i = 0;
  for (int64_t begin = 0; begin < channels_; i += rows) {
    const Chunk chunk = ChunkAt(codes, begin);
    begin = chunk.end;
    args.rows.tokens = chunk.end - chunk.begin;
    args.rows.data = data + chunk.begin * stride;
    // The next tile's codes lie behind these, a line for each channel; the kernel's own requests
    // are for lines that are here already.
    args.rows.next = args.rows.data;
    for (int64_t c = 0; c < args.rows.tokens; ++c) {
      __builtin_prefetch(args.rows.data + c * stride + 2 * args.rows.row_bytes, 0, 2);
    }
    args.weights = weights_ + i * kTokenTile;
    args.weight_scales = weight_scales_ + i;
    args.weight_biases = weight_biases_ + i;
    if (!codes.by_channel) {
      const int64_t tile = chunk.group * kTokenTile;
      args.channel_scales = parameters.scales + tile;
      args.channel_biases = parameters.biases == nullptr ? kZeros.at : parameters.biases + tile;
    }
    reader.kernels->codes->values(args, rows, kOnes.at, scores);
  }
  // Magnitudes are in the order of their bits, NaN last; compilers vectorize this, and no maximum
  // of floats.
  const auto magnitude = [](float x) { return std::bit_cast<int32_t>(x) & 0x7fffffff; };
  int32_t most = 0;
  for (int64_t s = 0; s < rows * n; ++s) most = std::max(most, magnitude(scores[s]));
  return most <= magnitude(kMaxScore);
}

bool ChannelMajorScores::Multiply(const Reader& reader, const Segment& segment, Position p,
                                  int64_t token, int64_t n, const float* q, int64_t rows,
                                  float* scores, int64_t at) {
  p.at[kCol] = 0;
  const int64_t run = segment.codes.by_channel ? segment.codes.run : token + n;
  return ForRuns(token, n, run, [&](int64_t first, int64_t tokens) {
    p.at[kRow] = token + first;
    // Rows of what is returned are as long as there are tokens.
    if (tokens == kTokenTile) return MultiplyRun(reader, segment, p, tokens, q, rows, scores);
    if (!MultiplyRun(reader, segment, p, tokens, q, rows, scores_)) return false;
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(scores_ + r * tokens, tokens, scores + r * kTokenTile + at + first);
    }
    return true;
  });
}

}  // namespace kvant::cpu
