#include "kvant/kernels/cpu/code_parameters.h"

#include "kvant/kernels/cpu/code_layout.h"
#include "kvant/kernels/cpu/pieces.h"

namespace kvant::cpu {
namespace {

// Elements of a parameter array for tokens [p, p + n) and `groups` groups of channels, as
// out[group][kTokenTile], zeros from n on. `staging`: groups * kTokenTile floats.
void ReadTile(const Reader& reader, const Dequantization& how, const Array& array, Position p,
              int64_t n, int64_t groups, float* staging, float* out) {
  const int64_t run = how.group[kRow];
  const int64_t token = p.at[kRow];
  for (int axis = 0; axis < kAxes; ++axis) p.at[axis] /= how.group[axis];
  const int64_t runs = (token + n - 1) / run - p.at[kRow] + 1;
  const auto read = [&](int64_t count, float* to) {
    const auto* data = static_cast<const char*>(reader.Data(array));
    reader.kernels->load(array.type, data, array.IndexOf(p), count, to);
    // The next tile's lie behind these.
    const int64_t bytes = count * BitsOf(array.type) / 8;
    const char* next = data + array.IndexOf(p) * BitsOf(array.type) / 8 + bytes;
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(next + at);
  };
  const int64_t row_stride = array.strides[kRow], group_stride = array.strides[kCol];
  const auto turn = [&] {
    reader.kernels->transpose(staging, groups, runs, groups, out, kTokenTile);
    for (int64_t g = 0; g < groups; ++g) {
      std::fill(out + g * kTokenTile + runs, out + (g + 1) * kTokenTile, 0.f);
    }
  };
  if (row_stride == 0 || runs == 1) {
    reader.Line(array, p, kCol, groups, staging);
    for (int64_t g = 0; g < groups; ++g) {
      float* row = out + g * kTokenTile;
      std::fill_n(row, n, staging[g]);
      std::fill(row + n, row + kTokenTile, 0.f);
    }
    return;
  }
  if (row_stride == 1 || groups == 1) {
    for (int64_t g = 0; g < groups; ++g) {
      float* row = out + g * kTokenTile;
      if (row_stride == 1) {
        read(runs, row);
      } else {
        reader.Line(array, p, kRow, runs, row);
      }
      std::fill(row + runs, row + kTokenTile, 0.f);
      ++p.at[kCol];
    }
  } else if (group_stride == 1 && row_stride == groups) {
    read(runs * groups, staging);
    turn();
  } else {
    for (int64_t t = 0; t < runs; ++t) {
      reader.Line(array, p, kCol, groups, staging + t * groups);
      ++p.at[kRow];
    }
    turn();
  }
  if (run == 1) return;
  // From one element per run to one per token, backwards to stay in place.
  for (int64_t g = 0; g < groups; ++g) {
    float* row = out + g * kTokenTile;
    for (int64_t t = n - 1; t >= 0; --t) row[t] = row[(token + t) / run - token / run];
    std::fill(row + n, row + kTokenTile, 0.f);
  }
}

// See TileParameters.
float MostOf(const CodeLimits& limits, const CodeBiases& how, const CodeRange& range) {
  const auto from = [&](float middle) {
    return std::max(std::fabs(limits.low - middle), std::fabs(limits.high - middle));
  };
  if (how.in_codes) return range.half + from(range.middle);
  const float middle = range.middle - how.offset;
  if (how.real) return limits.scale * (range.half + std::fabs(middle)) + from(0.f);
  return limits.scale * (range.half + from(middle));
}

// Where the blocks of a tile and of the next begin.
struct TileBlocks {
  struct Block {
    int64_t page = 0;  // or the batch row
    int64_t token = 0;
  };
  Block at[2 * kTileBlocks];

  explicit TileBlocks(const Part& part) {
    if (part.joined == nullptr) {
      for (int i = 0; i < kTileBlocks; ++i) {
        at[i] = {part.first.at[0], part.first.at[kRow] + i * kPageUnit};
        at[kTileBlocks + i] = {part.next.at[0], part.next.at[kRow] + i * kPageUnit};
      }
      return;
    }
    const Piece& piece = *part.joined;
    const int64_t page_tokens = piece.segment->tokens;
    int64_t page = part.token / page_tokens, token = part.token % page_tokens;
    for (int i = 0; i < 2 * kTileBlocks; ++i) {
      // There may be no page for tokens after the last.
      const bool exists = part.token + i * kPageUnit < piece.end();
      at[i] = exists ? Block{piece.pages[page * piece.page_stride], token} : at[i - kTileBlocks];
      token += kPageUnit;
      if (token < page_tokens) continue;
      token = 0;
      ++page;
    }
  }
};

// Elements of a head, by the blocks that they lie in. `group`: of the array's axes.
class BlockReader {
 public:
  BlockReader(const Reader& reader, const Array& array, int bits, const int64_t* group, Position p)
      : data_(static_cast<const uint8_t*>(reader.Data(array))),
        bits_(bits),
        pages_in_group_(group[0]),
        page_stride_(array.strides[0]),
        token_stride_(array.strides[kRow]) {
    p.at[0] = p.at[kRow] = 0;
    for (int axis = 0; axis < kAxes; ++axis) p.at[axis] /= group[axis];
    first_ = array.IndexOf(p);
  }
  const uint8_t* At(const TileBlocks::Block& block) const {
    const int64_t page = pages_in_group_ == 1 ? block.page : block.page / pages_in_group_;
    return data_ + (first_ + page * page_stride_ + block.token * token_stride_) * bits_ / 8;
  }

 private:
  const uint8_t* data_;
  int bits_;
  int64_t pages_in_group_, page_stride_, token_stride_, first_;
};

// A tile of parameters as it is stored, and asks for the next.
StoredParameters StoredAt(const Reader& reader, const Dequantization& how, const Array& array,
                          const Part& part, const TileBlocks& tile, int64_t groups) {
  if (!array.present()) return {};
  const BlockReader blocks(reader, array, BitsOf(array.type), how.group, part.first);
  const int64_t bytes = kPageUnit * groups * BitsOf(array.type) / 8;
  StoredParameters stored{array.type};
  for (int i = 0; i < kTileBlocks; ++i) {
    stored.blocks[i] = blocks.At(tile.at[i]);
    const uint8_t* const next = blocks.At(tile.at[kTileBlocks + i]);
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(next + at);
  }
  return stored;
}

}  // namespace

void WeighLost(const CodeKernels& kernels, const float* row, const CodeParameters& parameters,
               const int16_t* weights, float scale, int16_t* lost_weights, float* lost_scale,
               float* lost_bias) {
  alignas(64) float lost[kTokenTile];
  for (int64_t t = 0; t < kTokenTile; ++t) {
    const float exact = row[t] * parameters.scales[t];
    lost[t] = static_cast<float>(exact - double{scale} * weights[t]);
  }
  kernels.weights(lost, 1, {kOnes.at, parameters.biases}, 1, lost_weights, lost_scale, lost_bias,
                  /*units=*/nullptr);
}

CodeRows RowsAt(const Reader& reader, const Part& part, int64_t channels) {
  constexpr int64_t kNoGroups[kAxes] = {1, 1, 1, 1, 1};
  const Array& data = part.segment.data;
  const int bits = part.segment.codes.bits;
  CodeRows rows;
  rows.stride = data.strides[kRow] * bits / 8;
  rows.row_bytes = CeilDiv(channels * bits, 8);
  rows.tokens = part.tokens;
  const TileBlocks tile(part);
  const BlockReader blocks(reader, data, bits, kNoGroups, part.first);
  for (int i = 0; i < kTileBlocks; ++i) {
    rows.blocks[i] = blocks.At(tile.at[i]);
    rows.next[i] = blocks.At(tile.at[kTileBlocks + i]);
  }
  return rows;
}

void RequestFirst(const CodeRows& rows) {
  constexpr int64_t kMostLines = 24;
  const int64_t of_block = CeilDiv(kPageUnit * rows.row_bytes, 64);
  int64_t left = kMostLines;
  for (int64_t token = 0; token < rows.tokens && left > 0; token += kPageUnit) {
    const uint8_t* const block = rows.next[token / kPageUnit];
    const int64_t lines = std::min(left, of_block);
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(block + i * 64, 0, 2);
    left -= lines;
  }
}

ChannelParameters::ChannelParameters(const Segment* segments, int count, int64_t channels,
                                     Arena& arena)
    : channels_(channels) {
  const int64_t floats = Most(segments, count, [&](const Segment& segment) {
    return segment.codes.by_channel ? kRuns * channels : 0;
  });
  scales_.values = arena.Take(floats);
  points_.values = arena.Take(floats);
  lines_ = arena.Take(floats);
}

void ChannelParameters::Read(const Reader& reader, const Segment& segment, const Position& p,
                             float* scales, float* points) {
  const Dequantization& how = segment.dequantization;
  ReadOne(reader, segment, how.scales, p, scales_, scales);
  if (how.zero_points.present()) ReadOne(reader, segment, how.zero_points, p, points_, points);
}

void ChannelParameters::ReadOne(const Reader& reader, const Segment& segment, const Array& array,
                                Position p, Block& block, float* out) {
  const Dequantization& how = segment.dequantization;
  for (int axis = 0; axis < kAxes; ++axis) p.at[axis] /= how.group[axis];
  if (array.strides[kRow] != 1) return reader.Line(array, p, kCol, channels_, out);
  const int64_t first = p.at[kRow] / kRuns * kRuns;
  const int64_t in_block = p.at[kRow] - first;
  if (block.array != &array || block.first != first || block.page != p.at[0]) {
    block.array = &array;
    block.first = first;
    block.page = p.at[0];
    const int64_t runs = std::min(kRuns, CeilDiv(segment.tokens, how.group[kRow]) - first);
    p.at[kRow] = first;
    for (int64_t c = 0; c < channels_; ++c) {
      p.at[kCol] = c;
      reader.Line(array, p, kRow, runs, lines_ + c * kRuns);
    }
    reader.kernels->transpose(lines_, kRuns, channels_, runs, block.values, channels_);
  }
  std::copy_n(block.values + in_block * channels_, channels_, out);
}

bool ReadParameters(const Reader& reader, const Part& part, const WantedBiases& wanted,
                    float* staging, float* scales, float* biases, TileParameters* out) {
  const Segment& segment = part.segment;
  const Position& p = part.first;
  const int64_t n = part.tokens;
  const Dequantization& how = segment.dequantization;
  const CodeKernels& kernels = *reader.kernels->codes;
  const int64_t groups = segment.codes.groups;
  const bool has_points = how.zero_points.present();
  if (!has_points && wanted.offset == 0.f) biases = nullptr;
  const CodeBiases make{how.real_zero_points, wanted.in_codes, wanted.offset};
  const auto take = [&](const CodeLimits& limits) {
    *out = {{scales, biases}, MostOf(limits, make, wanted.range)};
    return limits.finite;
  };
  if (n == kTokenTile && TurnsParameters(segment)) {
    const TileBlocks tile(part);
    return take(kernels.turn(StoredAt(reader, how, how.scales, part, tile, groups),
                             StoredAt(reader, how, how.zero_points, part, tile, groups), make,
                             groups, scales, biases));
  }
  ReadTile(reader, how, how.scales, p, n, groups, staging, scales);
  if (has_points) ReadTile(reader, how, how.zero_points, p, n, groups, staging, biases);
  return take(
      kernels.biases(scales, has_points ? biases : nullptr, make, groups * kTokenTile, biases));
}

}  // namespace kvant::cpu
