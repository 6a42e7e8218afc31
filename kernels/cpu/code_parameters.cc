#include "kvant/kernels/cpu/code_parameters.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

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
  const auto transpose = [&] {
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
    transpose();
  } else {
    for (int64_t t = 0; t < runs; ++t) {
      reader.Line(array, p, kCol, groups, staging + t * groups);
      ++p.at[kRow];
    }
    transpose();
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

// The most that the scales, or zero points, of a token take.
constexpr int64_t kMostParameterBytes = kMostAddressedGroups * sizeof(float);

// Copies rows of kHalf to 2 * kHalf bytes to a place where they are side by side. No byte beyond a
// row is read.
template <int64_t kHalf>
void CopyRows(const uint8_t* from, int64_t stride, int64_t bytes, int64_t n, uint8_t* to) {
  for (int64_t t = 0; t < n; ++t, from += stride, to += bytes) {
    std::memcpy(to, from, kHalf);
    std::memcpy(to + bytes - kHalf, from + bytes - kHalf, kHalf);
  }
}
void CopyRows(const uint8_t* from, int64_t stride, int64_t bytes, int64_t n, uint8_t* to) {
  const auto copy = bytes == 1    ? CopyRows<1>
                    : bytes <= 4  ? CopyRows<2>
                    : bytes <= 8  ? CopyRows<4>
                    : bytes <= 16 ? CopyRows<8>
                    : bytes <= 32 ? CopyRows<16>
                                  : CopyRows<32>;
  copy(from, stride, bytes, n, to);
}

// 4 bits each to a byte each.
uint64_t SpreadNibbles(uint32_t nibbles) {
  uint64_t bytes = nibbles;
  bytes = (bytes | bytes << 16) & 0x0000ffff0000ffff;
  bytes = (bytes | bytes << 8) & 0x00ff00ff00ff00ff;
  return (bytes | bytes << 4) & 0x0f0f0f0f0f0f0f0f;
}

// A byte for each 4 bits of n rows of `groups`, which begin `shift` bits up in their first byte. Up
// to 7 bytes beyond the last are written.
void UnpackRows(const uint8_t* from, int64_t stride, int shift, bool is_signed, int64_t groups,
                int64_t n, uint8_t* to) {
  constexpr uint64_t kSigns = 0x8080808080808080, kEights = 0x0808080808080808;
  for (int64_t t = 0; t < n; ++t, from += stride, to += groups) {
    for (int64_t g = 0; g < groups; g += 8) {
      const uint8_t* const row = from + g / 2;
      const int64_t bytes = CeilDiv(shift + 4 * std::min<int64_t>(groups - g, 8), 8);
      uint64_t nibbles = 0;
      for (int64_t i = 0; i < bytes; ++i) nibbles |= uint64_t{row[i]} << 8 * i;
      uint64_t spread = SpreadNibbles(static_cast<uint32_t>(nibbles >> shift));
      // The sign bit flipped, less 8, without borrowing from the next byte.
      if (is_signed) spread = (((spread ^ kEights) | kSigns) - kEights) ^ kSigns;
      std::memcpy(to + g, &spread, sizeof(spread));
    }
  }
}

// Parameters of n tokens as they are stored, or as they lie in `dense`, with zeros beyond n;
// prefetches those of the next tile.
StoredParameters StoredAt(const TokenAddresses& array, DataType type, const PartBlocks& part,
                          int64_t n, int64_t groups, uint8_t* dense) {
  StoredParameters stored;
  if (!array.present()) return stored;
  stored.type = type;
  const uint8_t *next[kTileBlocks], *share[kTileBlocks];
  part.Find(array, stored.blocks, next);
  const int64_t bits = groups * BitsOf(type), stride = array.token_bytes();
  const int64_t bytes = CeilDiv(array.shift() + bits, 8);
  const int64_t blocks = WholeHalves(n) / kPageUnit;
  const auto tokens_of = [&](int64_t i) {
    return std::clamp<int64_t>(n - i * kPageUnit, 0, kPageUnit);
  };
  // Makes `copy`, of which `used` bytes are written, block i; the others become zeros.
  const auto place = [&](int64_t i, int64_t used, uint8_t* copy) {
    std::memset(copy + used, 0, kPageUnit * groups * BitsOf(stored.type) / 8 - used);
    stored.blocks[i] = copy;
  };
  if (array.dense(groups)) {
    const int64_t block = kPageUnit * bits / 8;
    for (int64_t i = 0; i < blocks;) {
      int64_t end = i + 1;
      while (end < blocks && next[end] == next[end - 1] + block) ++end;
      PrefetchBytes(next[i], (end - i) * block);
      i = end;
    }
    for (int64_t i = n / kPageUnit; i < blocks; ++i) {
      const int64_t used = CeilDiv(tokens_of(i) * bits, 8);
      uint8_t* const copy = dense + i * kPageUnit * bits / 8;
      std::memcpy(copy, stored.blocks[i], used);
      place(i, used, copy);
    }
    return stored;
  }
  const bool in_bytes = array.shift() == 0 && bits % 8 == 0;
  if (!in_bytes) stored.type = type == kS4 ? kS8 : kU8;
  const bool shares = in_bytes && FindShare(array, bytes, part.in_turn(), blocks, next, share);
  for (int64_t i = 0; i < blocks; ++i) {
    if (shares) {
      PrefetchBytes(share[i], kPageUnit * bytes);
    } else {
      PrefetchRows(next[i], stride, bytes, stride == 0 ? 1 : kPageUnit);
    }
    const int64_t row_bytes = groups * BitsOf(stored.type) / 8, tokens = tokens_of(i);
    uint8_t* const copy = dense + i * kPageUnit * row_bytes;
    if (in_bytes) {
      CopyRows(stored.blocks[i], stride, bytes, tokens, copy);
    } else {
      UnpackRows(stored.blocks[i], stride, array.shift(), type == kS4, groups, tokens, copy);
    }
    place(i, tokens * row_bytes, copy);
  }
  return stored;
}

// Those of n tokens as ReadTile gives them.
void ReadStored(const Reader& reader, const Dequantization& how, const Array& array,
                const StoredParameters& stored, const Position& p, int64_t n, int64_t groups,
                float* staging, float* out) {
  // The same for all tokens.
  if (!stored.present()) return ReadTile(reader, how, array, p, n, groups, staging, out);
  float* const to = groups == 1 ? out : staging;
  const int64_t columns = WholeHalves(n);
  for (int64_t i = 0; i < columns / kPageUnit; ++i) {
    reader.kernels->load(stored.type, stored.blocks[i], /*index=*/0, kPageUnit * groups,
                         to + i * kPageUnit * groups);
  }
  if (groups > 1) reader.kernels->transpose(staging, groups, columns, groups, out, kTokenTile);
  for (int64_t g = 0; g < groups; ++g) {
    std::fill(out + g * kTokenTile + columns, out + (g + 1) * kTokenTile, 0.f);
  }
}

}  // namespace

float LargestMagnitude(const float* x, int64_t n) {
  float most = 0;
  for (int64_t i = 0; i < n; ++i) most = std::max(most, std::fabs(x[i]));
  return most;
}

float LargestOf(const FloatCodes& codes) {
  constexpr float kMostOfE5M2 = 57344;
  return codes.codebook == nullptr ? kMostOfE5M2 : LargestMagnitude(codes.codebook, 16);
}

float LeastFactor(const float* probs, int64_t tokens, float most, const float* out,
                  int64_t channels, float shrink) {
  const double lost = 0x1p-150 * static_cast<double>(tokens) * most;
  const auto hides = [&](float x) { return kEpsilon * std::fabs(double{x} * shrink) >= lost; };
  if (std::any_of(out, out + channels, hides)) return 0.f;
  // Bits are in the order of the numbers; less one, those of 0 come last.
  uint32_t bits = std::numeric_limits<uint32_t>::max();
  for (int64_t t = 0; t < tokens; ++t) {
    bits = std::min(bits, std::bit_cast<uint32_t>(probs[t]) - 1);
  }
  const auto least = std::bit_cast<float>(bits + 1);
  return least > 0.f ? std::numeric_limits<float>::min() / least : 0.f;
}

void WeighLost(const CodeKernels& kernels, const float* row, int64_t columns,
               const CodeParameters& parameters, const int16_t* weights, float scale,
               int16_t* lost_weights, float* lost_scale, float* lost_bias) {
  alignas(64) float lost[kTokenTile];
  for (int64_t t = 0; t < columns; ++t) {
    const float exact = row[t] * parameters.scales[t];
    lost[t] = static_cast<float>(exact - double{scale} * weights[t]);
  }
  kernels.weights(lost, 1, columns, {kOnes.at, parameters.biases}, 1, lost_weights, lost_scale,
                  lost_bias, /*units=*/nullptr);
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
      PrefetchBytes(
          static_cast<const uint8_t*>(reader.Data(array)) + array.IndexOf(next) * bits / 8,
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
    *out = {{scales, biases}, MostOf(limits, make, wanted.range), limits.scale};
    return limits.finite;
  };
  const bool odd = p.at[kRow] % 2 != 0 && (head.scales.in_pairs() || head.zero_points.in_pairs());
  if (segment.codes.addressed && !odd) {
    const PartBlocks blocks(part);
    alignas(64) uint8_t dense[2][kTokenTile * kMostParameterBytes];
    const StoredParameters stored_scales =
        StoredAt(head.scales, how.scales.type, blocks, n, groups, dense[0]);
    const StoredParameters stored_points =
        StoredAt(head.zero_points, how.zero_points.type, blocks, n, groups, dense[1]);
    if (TransposesGroups(groups) && stored_scales.present() &&
        has_points == stored_points.present()) {
      return take(kernels.transpose_parameters(stored_scales, stored_points, make, WholeHalves(n),
                                               groups, scales, biases));
    }
    ReadStored(reader, how, how.scales, stored_scales, p, n, groups, staging, scales);
    if (has_points) {
      ReadStored(reader, how, how.zero_points, stored_points, p, n, groups, staging, biases);
    }
  } else {
    ReadTile(reader, how, how.scales, p, n, groups, staging, scales);
    if (has_points) ReadTile(reader, how, how.zero_points, p, n, groups, staging, biases);
  }
  return take(
      kernels.biases(scales, has_points ? biases : nullptr, make, groups * kTokenTile, biases));
}

}  // namespace kvant::cpu
