#include "kvant/kernels/cpu/code_parameters.h"

#include <cstring>

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
    int64_t end = n;
    for (int64_t r = runs - 1; r >= 0; --r) {
      const int64_t begin = std::max<int64_t>(0, r * run - token % run);
      const float value = row[r];
      std::fill(row + begin, row + end, value);
      end = begin;
    }
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

// The most that the scales, or zero points, of a token take; see Turns.
constexpr int64_t kMostParameterBytes = 8 * sizeof(float);

// Copies rows to a place where they are side by side. No byte beyond a row is read.
template <int64_t kBytes>
void CopyRows(const uint8_t* from, int64_t stride, int64_t n, uint8_t* to) {
  for (int64_t t = 0; t < n; ++t) std::memcpy(to + t * kBytes, from + t * stride, kBytes);
}
// Of parameters, see Turns.
void CopyRows(const uint8_t* from, int64_t stride, int64_t bytes, int64_t n, uint8_t* to) {
  switch (bytes) {
    case 1:
      return CopyRows<1>(from, stride, n, to);
    case 2:
      return CopyRows<2>(from, stride, n, to);
    case 4:
      return CopyRows<4>(from, stride, n, to);
    case 8:
      return CopyRows<8>(from, stride, n, to);
    case 16:
      return CopyRows<16>(from, stride, n, to);
    default:
      return CopyRows<kMostParameterBytes>(from, stride, n, to);
  }
}

// Parameters of a tile as they are stored, or as they lie in `dense`; asks for those of the next.
StoredParameters StoredAt(const TokenAddresses& array, DataType type, const PartBlocks& part,
                          int64_t groups, uint8_t* dense) {
  StoredParameters stored;
  if (!array.present()) return stored;
  stored.type = type;
  const uint8_t *next[kTileBlocks], *share[kTileBlocks];
  part.Find(array, stored.blocks, next);
  const int64_t bytes = groups * BitsOf(type) / 8, stride = array.token_bytes();
  if (stride == bytes) {
    for (const uint8_t* block : next) RequestBytes(block, kPageUnit * bytes);
    return stored;
  }
  const bool shares = FindShare(array, bytes, part.in_turn(), next, share);
  for (int64_t i = 0; i < kTileBlocks; ++i) {
    if (shares) {
      RequestBytes(share[i], kPageUnit * bytes);
    } else {
      RequestRows(next[i], stride, bytes, kPageUnit);
    }
    uint8_t* const copy = dense + i * kPageUnit * bytes;
    CopyRows(stored.blocks[i], stride, bytes, kPageUnit, copy);
    stored.blocks[i] = copy;
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

ChannelParameters::ChannelParameters(bool wanted, int64_t channels, Arena& arena)
    : channels_(channels) {
  const int64_t floats = wanted ? kRuns * channels : 0;
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
  if (array.strides[kRow] != 1) {
    if (array.strides[kCol] == 1) {
      Position next = p;
      next.at[kRow] += CeilDiv(kTokenTile, how.group[kRow]);
      const int64_t bits = BitsOf(array.type);
      RequestBytes(static_cast<const uint8_t*>(reader.Data(array)) + array.IndexOf(next) * bits / 8,
                   CeilDiv(channels_ * bits, 8));
    }
    return reader.Line(array, p, kCol, channels_, out);
  }
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

bool ReadParameters(const Reader& reader, const StoredHead& head, const Part& part,
                    const WantedBiases& wanted, float* staging, float* scales, float* biases,
                    TileParameters* out) {
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
  if (n == kTokenTile && head.turns) {
    const PartBlocks blocks(part);
    alignas(64) uint8_t dense[2][kTokenTile * kMostParameterBytes];
    return take(
        kernels.turn(StoredAt(head.scales, how.scales.type, blocks, groups, dense[0]),
                     StoredAt(head.zero_points, how.zero_points.type, blocks, groups, dense[1]),
                     make, groups, scales, biases));
  }
  ReadTile(reader, how, how.scales, p, n, groups, staging, scales);
  if (has_points) ReadTile(reader, how, how.zero_points, p, n, groups, staging, biases);
  return take(
      kernels.biases(scales, has_points ? biases : nullptr, make, groups * kTokenTile, biases));
}

}  // namespace kvant::cpu
