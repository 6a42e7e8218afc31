#include "kvant/kernels/cpu/code_scores.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kvant/kernels/cpu/code_layout.h"
#include "kvant/kernels/cpu/code_parameters.h"

namespace kvant::cpu {
namespace {

CodeColumns ColumnsOf(const CodeLayout& codes, int64_t channels) {
  return {codes.bits,
          channels,
          codes.columns,
          static_cast<int64_t>(codes.part_groups.size()),
          codes.part_ends.data(),
          codes.part_groups.data()};
}

int64_t Groups(const Segment& segment) { return segment.codes.groups; }
int64_t FloatColumns(const Segment& segment) {
  return segment.codes.floats ? segment.codes.columns * 32 / segment.codes.bits : 0;
}

CodeQueries TakeQueries(int64_t rows, int64_t dwords, int64_t parts, Arena& arena) {
  CodeQueries queries;
  queries.pairs = arena.TakeAs<int32_t>(rows * dwords);
  queries.starts = arena.TakeAs<int32_t>(rows * parts);
  queries.sums = arena.Take(rows * parts);
  queries.scales = arena.Take(parts == 0 ? 0 : rows);
  return queries;
}

uint8_t SignBits(const CodeLayout& codes) {
  if (!codes.is_signed) return 0;
  return codes.bits == 8 ? 0x80 : codes.bits == 4 ? 0x88 : 0xaa;
}

}  // namespace

CodeScores::CodeScores(const AttentionProblem& problem, Arena& own, Arena& shared)
    : channels_(problem.head_size),
      parameters_(AnyByChannel(problem.k, problem.k_segments), channels_, own) {
  const auto most = [&](auto get) { return Most(problem.k, problem.k_segments, get); };
  const int64_t rows = problem.row_tile;
  const int64_t dwords = most([](const Segment& s) { return s.codes.columns * 16 / s.codes.bits; });
  const int64_t parts =
      most([](const Segment& s) { return static_cast<int64_t>(s.codes.part_groups.size()); });
  const int64_t groups = most(Groups);
  queries_ = TakeQueries(rows, dwords, parts, own);
  rest_ = TakeQueries(rows, dwords, parts, own);
  queries_.lost = own.Take(parts == 0 ? 0 : rows * channels_);
  queries_.most_lost = own.Take(parts == 0 ? 0 : rows);
  float_queries_ = own.Take(rows * most(FloatColumns));
  // By channel they are the queries', which stay prepared for several tiles.
  const int64_t parameters = std::max(groups * kTokenTile, parts == 0 ? 0 : channels_);
  Arena& of = AnyByChannel(problem.k, problem.k_segments) ? own : shared;
  scales_ = of.Take(parameters);
  biases_ = of.Take(parameters);
  staging_ = shared.Take(groups * kTokenTile);
  scores_ = shared.Take(parts == 0 ? 0 : rows * kTokenTile);
  rest_scores_ = shared.Take(parts == 0 ? 0 : rows * kTokenTile);
  norms_ = shared.Take(kTokenTile);
  transposed_ =
      shared.TakeAs<int32_t>(most([](const Segment& s) { return s.codes.columns; }) * kTokenTile);
}

bool CodeScores::Prepare(const Reader& reader, const Segment& segment, const Position& p,
                         const float* q, int64_t rows) {
  const CodeLayout& codes = segment.codes;
  if (!prepared_.Change(segment, p)) return finite_;
  const CodeColumns columns = ColumnsOf(codes, channels_);
  const CodeKernels& kernels = *reader.kernels->codes;
  rest_is_prepared_ = false;
  CodeFactors factors;
  if (codes.by_channel) {
    // The channels' scales move to the queries, and with them the zero points to one sum a row.
    const Dequantization& how = segment.dequantization;
    float* const points = how.zero_points.present() ? biases_ : nullptr;
    parameters_.Read(reader, segment, p, scales_, biases_);
    const CodeBiases make{how.real_zero_points, /*in_codes=*/true, 0.f};
    finite_ = kernels.biases(scales_, points, make, channels_, points).finite;
    factors = {scales_, points};
    CodeRange range = ScoreRange(codes);
    reach_ = std::sqrt(kernels.spread(nullptr, points, channels_, 1, range));
    range.half = 0.f;
    zeros_ = std::sqrt(kernels.spread(nullptr, points, channels_, 1, range));
    if (!finite_) return false;
  }
  finite_ = kernels.prepare(q, rows, factors, columns, OffsetOf(codes), queries_);
  if (!finite_) return false;
  largest_ = rounding_ = 0.f;
  for (int64_t r = 0; r < rows; ++r) {
    largest_ = std::max(largest_, kMostOfS16 * queries_.scales[r]);
    // Whole numbers, say, lose nothing.
    if (queries_.most_lost[r] > 0.f)
      rounding_ = std::max(rounding_, kOfRounding * queries_.scales[r]);
  }
  return true;
}

bool CodeScores::IsExact(bool biased) const {
  return rounding_ * std::max(reach_, kLeastNorm) <= allowed_ &&
         SurvivesCancelling(biased, channels_, largest_, reach_, allowed_);
}

float CodeScores::ErrorOf(const CodeKernels& kernels, const CodeLayout& codes,
                          const TileParameters& parameters, const TokenRows& rows,
                          bool transposed) {
  // A token's scores are off by the roundings of a query times its channels, so by their root mean
  // square times its L2 norm.
  const CodeRange range = ScoreRange(codes);
  if (!codes.by_channel) {
    reach_ = std::sqrt(static_cast<float>(channels_)) * parameters.most;
    if (!IsExact(parameters.biases != nullptr)) {
      reach_ = std::sqrt(
          kernels.reach(parameters, range, WholeHalves(rows.tokens), codes.group, channels_));
    }
  }
  const float most = rounding_ * std::max(reach_, kLeastNorm);
  if (most <= allowed_) return most;
  CodeParameters own = parameters;
  if (codes.by_channel) own = {kOnes.at, nullptr};
  const CodeColumns columns = ColumnsOf(codes, channels_);
  if (!transposed) kernels.transpose_codes(rows, SignBits(codes), columns, transposed_);
  kernels.norms(transposed_, columns, own, codes.by_channel ? 0.f : range.middle, rows.tokens,
                norms_);
  const float square = *std::max_element(norms_, norms_ + rows.tokens);
  const float norm = std::sqrt(square) + (codes.by_channel ? zeros_ : 0.f);
  return rounding_ * std::max(norm, kLeastNorm);
}

bool CodeScores::MultiplyRun(const Reader& reader, const Part& run, const float* q, int64_t rows,
                             float* scores) {
  const Segment& segment = run.segment;
  const Position& p = run.first;
  const int64_t n = run.tokens;
  const CodeLayout& codes = segment.codes;
  if (!codes.floats && !Prepare(reader, segment, p, q, rows)) return false;
  const StoredHead& head = heads_.At(reader, run);
  const TokenRows stored = CodeRowsAt(head, run, channels_);
  PrefetchFirst(stored, FirstLines(codes, rows));
  const CodeRange range = ScoreRange(codes);
  // Scales are 1 where there are none.
  TileParameters parameters{{kOnes.at, nullptr}, range.half + range.middle};
  if (codes.by_channel) {
    if (segment.dequantization.zero_points.present()) parameters.biases = kOnes.at;
  } else if (segment.dequantization.scales.present() &&
             !ReadParameters(reader, head, run, {0.f, /*in_codes=*/false, range}, staging_, scales_,
                             biases_, &parameters)) {
    return false;
  }
  if (codes.floats) {
    return MultiplyFloats(reader, segment, p, stored, q, rows, parameters.scales, scores);
  }
  const CodeKernels& kernels = *reader.kernels->codes;
  const CodeColumns columns = ColumnsOf(codes, channels_);
  const bool transposed = kernels.scores(stored, SignBits(codes), columns, queries_, rows,
                                         parameters, transposed_, scores);
  const float error = ErrorOf(kernels, codes, parameters, stored, transposed);
  if (!(error <= allowed_)) {
    if (!rest_is_prepared_) {
      const CodeFactors points{nullptr, codes.by_channel && parameters.biases ? biases_ : nullptr};
      kernels.prepare(queries_.lost, rows, points, columns, OffsetOf(codes), rest_);
      rest_rounding_ = 0.f;
      for (int64_t r = 0; r < rows; ++r) {
        if (queries_.most_lost[r] > 0.f)
          rest_rounding_ = std::max(rest_rounding_, kOfRounding * rest_.scales[r]);
      }
      rest_is_prepared_ = true;
    }
    // The same of what is left then.
    if (!(error / rounding_ * rest_rounding_ <= allowed_)) return false;
    kernels.scores(stored, SignBits(codes), columns, rest_, rows, parameters, transposed_,
                   rest_scores_);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t t = 0; t < n; ++t)
        scores[r * kTokenTile + t] += rest_scores_[r * kTokenTile + t];
    }
  }
  return SurvivesCancelling(parameters.biases != nullptr, channels_, largest_, reach_, allowed_);
}

bool CodeScores::MultiplyFloats(const Reader& reader, const Segment& segment, const Position& p,
                                const TokenRows& stored, const float* q, int64_t rows,
                                const float* scales, float* scores) {
  const FloatCodeKernels& kernels = *reader.kernels->codes->floats;
  const FloatCodes codes{segment.data.type, segment.data.codebook};
  if (prepared_.Change(segment, p)) {
    finite_ = LargestMagnitude(q, rows * channels_) <=
              std::numeric_limits<float>::max() / (kMaxFloatPart * LargestOf(codes));
    kernels.queries(codes, q, rows, channels_, float_queries_, FloatColumns(segment));
  }
  if (!finite_) return false;
  kernels.scores(stored, codes, ColumnsOf(segment.codes, channels_), float_queries_, rows, scales,
                 scores);
  return true;
}

bool CodeScores::Multiply(const Reader& reader, const Part& part, const float* q, int64_t rows,
                          float* scores) {
  return ForRuns(part, [&](const Part& run) {
    const int64_t at = run.column;
    // The kernel writes whole vectors, which must not end beyond the row.
    if (CeilDiv(run.tokens, kColumnChunk) * kColumnChunk + at <= kTokenTile) {
      return MultiplyRun(reader, run, q, rows, scores + at);
    }
    if (!MultiplyRun(reader, run, q, rows, scores_)) return false;
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(scores_ + r * kTokenTile, run.tokens, scores + r * kTokenTile + at);
    }
    return true;
  });
}

}  // namespace kvant::cpu
