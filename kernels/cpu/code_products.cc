#include "kvant/kernels/cpu/code_products.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kvant/kernels/cpu/code_parameters.h"

namespace kvant::cpu {
namespace {

// Runs of tokens with parameters of their own are at least so long ...
constexpr int64_t kMinRun = 16;
// ... so that a tile meets at most so many.
constexpr int64_t kMaxRuns = kTokenTile / kMinRun + 1;
// A part of 8-bit codes times s16 queries stays below 2^31 to here.
constexpr int64_t kMaxPartColumns = 64;
// Sums of f32 are taken in blocks: their error grows with their length.
constexpr int64_t kMaxFloatPart = 64;

int BitsOfCodes(DataType type) {
  switch (type) {
    case kF8E4M3:
    case kF8E5M2:
    case kS8:
    case kU8:
      return 8;
    case kS4:
    case kU4:
      return 4;
    case kS2:
    case kU2:
      return 2;
    default:
      return 0;
  }
}

bool IsSignedCode(DataType type) { return type == kS8 || type == kS4 || type == kS2; }

CodeRows RowsAt(const Reader& reader, const Segment& segment, const Position& p, int64_t n,
                int64_t channels) {
  const int bits = segment.codes.bits;
  CodeRows rows;
  rows.data =
      static_cast<const uint8_t*>(reader.Data(segment.data)) + segment.data.IndexOf(p) * bits / 8;
  rows.stride = segment.data.strides[kRow] * bits / 8;
  rows.row_bytes = CeilDiv(channels * bits, 8);
  rows.tokens = n;
  rows.next = rows.data + n * rows.stride;
  return rows;
}

// Asks for the first lines of the next tile, as many as memory delivers while the current one's
// parameters are read or its weights made: in those phases no kernel asks for any.
void RequestFirst(const CodeRows& rows) {
  constexpr int64_t kMostLines = 24;
  const int64_t lines = std::min(kMostLines, CeilDiv(rows.tokens * rows.row_bytes, 64));
  for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(rows.next + i * 64, 0, 2);
}

CodeColumns ColumnsOf(const CodeLayout& codes, int64_t channels) {
  return {codes.bits,
          channels,
          codes.columns,
          static_cast<int64_t>(codes.part_groups.size()),
          codes.part_ends.data(),
          codes.part_groups.data()};
}

// NaN does not count: it shows in its own row whatever multiplies it.
float LargestMagnitude(const float* x, int64_t n) {
  float most = 0;
  for (int64_t i = 0; i < n; ++i) most = std::max(most, std::fabs(x[i]));
  return most;
}

// Of what codes stand for; of f8 of either type.
float LargestOf(const FloatCodes& codes) {
  constexpr float kMostOfE5M2 = 57344;
  return codes.codebook == nullptr ? kMostOfE5M2 : LargestMagnitude(codes.codebook, 16);
}

int64_t Groups(const Segment& segment) { return segment.codes.groups; }
int64_t FloatGroups(const Segment& segment) {
  return segment.codes.floats ? segment.codes.groups : 0;
}
int64_t FloatColumns(const Segment& segment) {
  return segment.codes.floats ? segment.codes.columns * 32 / segment.codes.bits : 0;
}

// Why a segment of codes that stand for floats is not multiplied as such; empty: it is.
std::string WhyNotAsFloats(const Segment& segment, int64_t channels) {
  const CodeLayout& codes = segment.codes;
  const float* const book = segment.data.codebook;
  if (book != nullptr && codes.bits != 4) {
    return "codes are positions in a codebook of " + std::to_string(1 << codes.bits);
  }
  if (codes.channel_major) return "its tokens, not channels, are side by side";
  if (codes.by_channel) return "scales by channel of codes that stand for floats";
  if (segment.dequantization.zero_points.present()) {
    return "zero points of codes that stand for floats";
  }
  const int64_t unit = kFloatPartUnit * 32 / codes.bits;
  if (codes.group < channels && codes.group % unit != 0) {
    return "groups of " + std::to_string(codes.group) + " channels";
  }
  // What pads a row is multiplied by zero.
  const bool finite =
      book == nullptr || std::all_of(book, book + 16, [](float x) { return std::isfinite(x); });
  return finite ? "" : "the codebook holds numbers that are not finite";
}

}  // namespace

std::string DescribeCodes(int64_t channels, bool keys, Segment& segment) {
  CodeLayout& codes = segment.codes;
  const Array& data = segment.data;
  const Dequantization& how = segment.dequantization;
  codes = {};
  codes.bits = BitsOfCodes(data.type);
  if (codes.bits == 0) return std::string(DataTypeName(data.type)) + " is no integer type";
  codes.floats = data.codebook != nullptr || !IsInteger(data.type);
  if (!how.scales.present() && !codes.floats) return "codes without scales";
  codes.is_signed = IsSignedCode(data.type);
  if (data.strides[kCol] != 1 && channels != 1) {
    codes.channel_major = keys && data.strides[kRow] == 1;
    if (!codes.channel_major) return "the channels of a token are not side by side";
  }
  const int dense = codes.channel_major ? kRow : kCol;
  for (int axis = 0; axis < kAxes; ++axis) {
    if (axis == dense || data.strides[axis] * codes.bits % 8 == 0) continue;
    return codes.channel_major ? "channels do not begin at whole bytes"
                               : "tokens do not begin at whole bytes";
  }
  if (data.offset * codes.bits % 8 != 0) return "tokens do not begin at whole bytes";
  const bool varies = how.scales.strides[kCol] != 0 ||
                      (how.zero_points.present() && how.zero_points.strides[kCol] != 0);
  codes.group = varies ? std::min(how.group[kCol], channels) : channels;
  codes.run = how.group[kRow];
  codes.by_channel = varies && codes.group == 1;
  if (codes.by_channel) {
    const bool one_run = how.scales.strides[kRow] == 0 &&
                         (!how.zero_points.present() || how.zero_points.strides[kRow] == 0);
    if (one_run) codes.run = std::max<int64_t>(segment.tokens, kMinRun);
    if (codes.run < kMinRun) {
      return "groups of 1 channel and " + std::to_string(codes.run) + " tokens";
    }
    codes.group = channels;
  } else if (codes.group < channels && codes.group % 16 != 0) {
    return "groups of " + std::to_string(codes.group) + " channels";
  }
  if (codes.floats) {
    if (std::string why = WhyNotAsFloats(segment, channels); !why.empty()) return why;
  }
  codes.groups = std::max<int64_t>(1, CeilDiv(channels, std::max<int64_t>(1, codes.group)));
  codes.usable = channels > 0;
  if (codes.channel_major || !codes.usable) return codes.usable ? "" : "no channels";
  // Parts: to the end of a group, of the channels, or of what a sum may hold.
  const int64_t per_column = 32 / codes.bits;
  const int64_t unit = codes.floats ? kFloatPartUnit : PartUnit(codes.bits);
  const int64_t used = CeilDiv(channels, per_column * unit) * unit;
  const int64_t most = codes.floats ? kMaxFloatPart / per_column : kMaxPartColumns;
  codes.columns = CeilDiv(used, kColumnChunk) * kColumnChunk;
  for (int64_t c = 0, begin = 0; c < used; ++c) {
    const int64_t next = (c + 1) * per_column;
    const bool ends_group = codes.groups > 1 && next % codes.group == 0;
    if (!ends_group && c + 1 != used && c + 1 - begin < most) continue;
    codes.part_ends.push_back(static_cast<int32_t>(c + 1));
    codes.part_groups.push_back(static_cast<int32_t>(begin * per_column / codes.group));
    begin = c + 1;
  }
  return "";
}

CodeScores::CodeScores(const AttentionProblem& problem, Arena& arena)
    : channels_(problem.head_size),
      parameters_(problem.k, problem.k_segments, problem.head_size, arena) {
  const auto most = [&](auto get) { return Most(problem.k, problem.k_segments, get); };
  const int64_t rows = problem.row_tile;
  const int64_t dwords = most([](const Segment& s) { return s.codes.columns * 16 / s.codes.bits; });
  const int64_t parts =
      most([](const Segment& s) { return static_cast<int64_t>(s.codes.part_groups.size()); });
  const int64_t groups = most(Groups);
  queries_.pairs = arena.TakeAs<int32_t>(rows * dwords);
  queries_.starts = arena.TakeAs<int32_t>(rows * parts);
  queries_.sums = arena.Take(rows * parts);
  queries_.scales = arena.Take(parts == 0 ? 0 : rows);
  float_queries_ = arena.Take(rows * most(FloatColumns));
  scales_ = arena.Take(std::max(groups * kTokenTile, parts == 0 ? 0 : channels_));
  biases_ = arena.Take(std::max(groups * kTokenTile, parts == 0 ? 0 : channels_));
  staging_ = arena.Take(groups * kTokenTile);
  scores_ = arena.Take(parts == 0 ? 0 : rows * kTokenTile);
  turned_ =
      arena.TakeAs<int32_t>(most([](const Segment& s) { return s.codes.columns; }) * kTokenTile);
}

bool CodeScores::Prepare(const Reader& reader, const Segment& segment, const Position& p,
                         const float* q, int64_t rows) {
  const CodeLayout& codes = segment.codes;
  if (!prepared_.Change(segment, p)) return finite_;
  const CodeColumns columns = ColumnsOf(codes, channels_);
  const CodeKernels& kernels = *reader.kernels->codes;
  if (!codes.by_channel) {
    return finite_ = kernels.prepare(q, rows, {}, columns, OffsetOf(codes), queries_);
  }
  // The channels' scales move to the queries, and with them the zero points to one sum a row.
  const Dequantization& how = segment.dequantization;
  const bool has_points = how.zero_points.present();
  parameters_.Read(reader, segment, p, scales_, biases_);
  const CodeBiases make{how.real_zero_points, /*in_codes=*/true, 0.f};
  finite_ = kernels.biases(scales_, has_points ? biases_ : nullptr, make, channels_,
                           has_points ? biases_ : nullptr) &&
            kernels.prepare(q, rows, {scales_, has_points ? biases_ : nullptr}, columns,
                            OffsetOf(codes), queries_);
  return finite_;
}

bool CodeScores::MultiplyRun(const Reader& reader, const Segment& segment, const Position& p,
                             int64_t n, const float* q, int64_t rows, float* scores) {
  const CodeLayout& codes = segment.codes;
  if (!codes.floats && !Prepare(reader, segment, p, q, rows)) return false;
  const CodeRows stored = RowsAt(reader, segment, p, n, channels_);
  RequestFirst(stored);
  CodeParameters parameters{kOnes.at, nullptr};
  if (!segment.dequantization.scales.present()) {
    // They are 1.
  } else if (codes.by_channel) {
    const bool biased = segment.dequantization.zero_points.present();
    parameters = {kOnes.at, biased ? kOnes.at : nullptr};
  } else if (!ReadParameters(reader, segment, p, n, /*offset=*/0.f, /*in_codes=*/false, staging_,
                             scales_, biases_, &parameters)) {
    return false;
  }
  if (codes.floats) {
    return MultiplyFloats(reader, segment, p, stored, q, rows, parameters.scales, scores);
  }
  const uint8_t flip = !codes.is_signed  ? 0
                       : codes.bits == 8 ? 0x80
                       : codes.bits == 4 ? 0x88
                                         : 0xaa;
  const float most = reader.kernels->codes->scores(stored, flip, ColumnsOf(codes, channels_),
                                                   queries_, rows, parameters, turned_, scores);
  return most <= kMaxScore;
}

bool CodeScores::MultiplyFloats(const Reader& reader, const Segment& segment, const Position& p,
                                const CodeRows& stored, const float* q, int64_t rows,
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

bool CodeScores::Multiply(const Reader& reader, const Segment& segment, Position p, int64_t token,
                          int64_t n, const float* q, int64_t rows, float* scores, int64_t at) {
  p.at[kCol] = 0;
  const int64_t run = segment.codes.by_channel ? segment.codes.run : token + n;
  return ForRuns(token, n, run, [&](int64_t first, int64_t tokens) {
    p.at[kRow] = token + first;
    // The kernel writes whole vectors, which must not end beyond the row.
    if (CeilDiv(tokens, kColumnChunk) * kColumnChunk + at + first <= kTokenTile) {
      return MultiplyRun(reader, segment, p, tokens, q, rows, scores + at + first);
    }
    if (!MultiplyRun(reader, segment, p, tokens, q, rows, scores_)) return false;
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(scores_ + r * kTokenTile, tokens, scores + r * kTokenTile + at + first);
    }
    return true;
  });
}

CodeValues::CodeValues(const AttentionProblem& problem, Arena& arena)
    : channels_(problem.v_head_size),
      parameters_(problem.v, problem.v_segments, problem.v_head_size, arena) {
  const int64_t groups = Most(problem.v, problem.v_segments, Groups);
  const int64_t rows = groups == 0 ? 0 : problem.row_tile;
  const int64_t runs = groups == 0 ? 0 : kMaxRuns * channels_;
  scales_ = arena.Take(std::max(groups * kTokenTile, runs));
  biases_ = arena.Take(std::max(groups * kTokenTile, runs));
  staging_ = arena.Take(groups * kTokenTile);
  probs_ = arena.Take(rows * kTokenTile);
  weight_scales_ = arena.Take(rows * groups);
  weight_biases_ = arena.Take(rows * groups);
  weights_ = arena.TakeAs<int16_t>(rows * groups * kTokenTile);
  float_weights_ = arena.Take(rows * Most(problem.v, problem.v_segments, FloatGroups) * kTokenTile);
}

bool CodeValues::Multiply(const Reader& reader, const Segment& segment, Position p, int64_t token,
                          int64_t n, const float* probs, int64_t at, int64_t rows,
                          const float* shrink, float* out) {
  p.at[kRow] = token;
  p.at[kCol] = 0;
  const CodeLayout& codes = segment.codes;
  if (codes.by_channel) {
    return MultiplyByRuns(reader, segment, p, n, probs, at, rows, shrink, out);
  }
  CodeParameters parameters{kOnes.at, nullptr};
  const float offset = ValueOffset(codes);
  if (codes.floats && !segment.dequantization.scales.present()) {
    // They are 1.
  } else if (!ReadParameters(reader, segment, p, n, offset, /*in_codes=*/true, staging_, scales_,
                             biases_, &parameters)) {
    return false;
  }
  const CodeKernels& kernels = *reader.kernels->codes;
  const CodeRows stored = RowsAt(reader, segment, p, n, channels_);
  RequestFirst(stored);
  if (codes.floats) {
    kernels.floats->weights(Columns(probs, at, n, rows), rows, parameters.scales, codes.groups,
                            float_weights_);
    kernels.floats->values({.rows = stored,
                            .codes = {segment.data.type, segment.data.codebook},
                            .channels = channels_,
                            .group = codes.group,
                            .groups = codes.groups,
                            .weights = float_weights_},
                           rows, shrink, out);
    return true;
  }
  kernels.weights(Columns(probs, at, n, rows), rows, parameters, codes.groups, weights_,
                  weight_scales_, weight_biases_);
  const CodeKernels::Values values = {
      .rows = stored,
      .bits = codes.bits,
      .is_signed = codes.is_signed,
      .channels = channels_,
      .group = codes.group,
      .groups = codes.groups,
      .weights = weights_,
      .weight_scales = weight_scales_,
      .weight_biases = weight_biases_,
  };
  kernels.values(values, rows, shrink, out);
  return true;
}

const float* CodeValues::Columns(const float* probs, int64_t at, int64_t n, int64_t rows) {
  if (at == 0 && n == kTokenTile) return probs;
  std::fill_n(probs_, rows * kTokenTile, 0.f);
  for (int64_t r = 0; r < rows; ++r) {
    std::copy_n(probs + r * kTokenTile + at, n, probs_ + r * kTokenTile);
  }
  return probs_;
}

bool CodeValues::MultiplyByRuns(const Reader& reader, const Segment& segment, Position p, int64_t n,
                                const float* probs, int64_t column, int64_t rows,
                                const float* shrink, float* out) {
  const CodeLayout& codes = segment.codes;
  const Dequantization& how = segment.dequantization;
  const CodeKernels& kernels = *reader.kernels->codes;
  const float offset = ValueOffset(codes);
  const int64_t token = p.at[kRow];
  // First all parameters, so that nothing is added unless they are finite.
  int64_t at = 0;
  const bool finite = ForRuns(token, n, codes.run, [&](int64_t first, int64_t) {
    p.at[kRow] = token + first;
    float* scales = scales_ + at;
    float* biases = biases_ + at;
    at += channels_;
    parameters_.Read(reader, segment, p, scales, biases);
    const bool has_points = how.zero_points.present();
    return kernels.biases(scales, has_points ? biases : nullptr,
                          {how.real_zero_points, /*in_codes=*/false, offset}, channels_, biases);
  });
  if (!finite) return false;
  at = 0;
  return ForRuns(token, n, codes.run, [&](int64_t first, int64_t tokens) {
    p.at[kRow] = token + first;
    const float* part = Columns(probs, column + first, tokens, rows);
    kernels.weights(part, rows, {kOnes.at, kOnes.at}, 1, weights_, weight_scales_, weight_biases_);
    const CodeKernels::Values values = {
        .rows = RowsAt(reader, segment, p, tokens, channels_),
        .bits = codes.bits,
        .is_signed = codes.is_signed,
        .channels = channels_,
        .group = channels_,
        .groups = 1,
        .weights = weights_,
        .weight_scales = weight_scales_,
        .weight_biases = weight_biases_,
        .channel_scales = scales_ + at,
        .channel_biases = biases_ + at,
    };
    // What was there shrinks once.
    kernels.values(values, rows, first == 0 ? shrink : kOnes.at, out);
    at += channels_;
    return true;
  });
}

}  // namespace kvant::cpu
