// A tile of Q, K or V from how it is stored to shared memory, in what products are computed in.
#ifndef KVANT_KERNELS_CUDA_DEQUANTIZE_TILE_H_
#define KVANT_KERNELS_CUDA_DEQUANTIZE_TILE_H_

#include "kvant/kernels/cuda/columns.h"

namespace kvant::cuda {

// Rows of a tile in shared memory: [rows][channels], channels padded to a multiple of 16 with
// zeros. A row is an odd number of 16 bytes longer than a multiple of 128, so that the 8 rows of an
// ldmatrix, and the fragments of f32 rows, lie in different banks.
struct TileLayout {
  i32 bytes;  // of an element
  i32 channels;
  i32 pitch;  // bytes from row to row

  KVANT_DEVICE static constexpr TileLayout Of(i32 arithmetic, i32 head_size) {
    const i32 bytes = TakesF32(arithmetic) ? 4 : 2;
    const i32 channels = CeilDiv(head_size, 16) * 16;
    return {bytes, channels, CeilDiv(channels * bytes, 128) * 128 + 16};
  }
  KVANT_DEVICE SharedAddress At(SharedAddress tile, i32 row, i32 channel) const {
    return tile + row * pitch + channel * bytes;
  }
};

// In which order channels lie in a tile, of every `span` of them: those of the lower half at even
// places, of the upper half at odd ones. What is contracted may come in any order that both
// operands have, and the output has that of V.
struct ChannelOrder {
  i32 span;

  KVANT_DEVICE static constexpr ChannelOrder AsTheyAre() { return {2}; }
  KVANT_DEVICE constexpr i32 PlaceOf(i32 channel) const {
    const i32 i = channel % span;
    return channel - i + i % (span / 2) * 2 + i / (span / 2);
  }
  // At an even place; that of the next place is span / 2 beyond.
  KVANT_DEVICE constexpr i32 ChannelAt(i32 place) const { return place - place % span / 2; }
};

KVANT_DEVICE u32 Pack(i32 arithmetic, float lo, float hi) {
  return arithmetic == kByF16 ? PackF16(lo, hi) : PackBF16(lo, hi);
}

struct GroupParameters {
  float scale, zero_point;
};

KVANT_DEVICE GroupParameters LoadParameters(const SegmentTraits& traits, const StoredParams& p,
                                            const Position& at, i32 channel) {
  GroupParameters found{1.f, 0.f};
  if (traits.scales.type != kNone) {
    found.scale = LoadElement(traits.scales.type, p.scales.data,
                              GroupIndex(traits, traits.scales, p.scales, at, channel));
  }
  if (traits.zero_points.type != kNone) {
    found.zero_point =
        LoadElement(traits.zero_points.type, p.zero_points.data,
                    GroupIndex(traits, traits.zero_points, p.zero_points, at, channel));
  }
  return found;
}

KVANT_DEVICE float Dequantize(const SegmentTraits& traits, const GroupParameters& group,
                              float code) {
  if (traits.scales.type == kNone) return code;
  if (traits.real_zero_points) return Fma(code, group.scale, -group.zero_point);
  return (code - group.zero_point) * group.scale;
}

// Codes of 2, 4 or 8 bits as they are stored, or entries of the codebook in shared memory.
KVANT_DEVICE void UnpackValues(const SegmentTraits& traits, const Eight& eight,
                               SharedAddress codebook, float (&values)[8]) {
  if (traits.codebook == 0) return Unpack(traits.data.type, eight, values);
  const i32 bits = BitsOf(traits.data.type);
  const u32 mask = static_cast<u32>(traits.codebook - 1);
  KVANT_UNROLL
  for (i32 i = 0; i < 8; ++i) {
    const u32 code = eight.v[i * bits / 32] >> i * bits % 32 & mask;
    values[i] = AsFloat(LoadShared32(codebook + code * 4));
  }
}
KVANT_DEVICE float LoadCode(const SegmentTraits& traits, const void* data, i64 index,
                            SharedAddress codebook) {
  const float value = LoadElement(traits.data.type, data, index);
  if (traits.codebook == 0) return value;
  return AsFloat(LoadShared32(codebook + static_cast<u32>(value) * 4));
}

// The value of (at, channel).
KVANT_DEVICE float LoadValue(const SegmentTraits& traits, const StoredParams& p,
                             SharedAddress codebook, const Position& at, i32 channel) {
  const float code =
      LoadCode(traits, p.data.data, IndexOf(traits.data, p.data, at, channel), codebook);
  return Dequantize(traits, LoadParameters(traits, p, at, channel), code);
}

// 8 values of a segment side by side along `axis` (kRow or kCol) from (at, channel) on; those from
// `limit` on are 0. codebook: where the segment's is in shared memory.
KVANT_DEVICE void LoadValues(const SegmentTraits& traits, const StoredParams& p,
                             SharedAddress codebook, Position at, i32 channel, i32 axis, i32 limit,
                             float (&values)[8]) {
  const i32 first = axis == kRow ? at.row : channel;
  const i32 n = limit - first;
  if (traits.vectors && traits.contiguous == axis && n >= 8) {
    UnpackValues(
        traits, LoadEight(traits.data.type, p.data.data, IndexOf(traits.data, p.data, at, channel)),
        codebook, values);
  } else {
    KVANT_UNROLL
    for (i32 i = 0; i < 8; ++i) {
      const i64 index = IndexOf(traits.data, p.data, at, channel) + i * p.data.strides[axis];
      values[i] = i < n ? LoadCode(traits, p.data.data, index, codebook) : 0.f;
    }
  }
  if (traits.scales.type == kNone) return;
  GroupParameters group{};
  const i32 length = traits.group[axis];
  KVANT_UNROLL
  for (i32 i = 0; i < 8; ++i) {
    Position one = at;
    if (axis == kRow) one.row += i;
    const i32 d = axis == kCol ? channel + i : channel;
    const bool same = length % 8 == 0 && first % 8 == 0;
    if (i < n && (i == 0 || !same)) group = LoadParameters(traits, p, one, d);
    values[i] = i < n ? Dequantize(traits, group, values[i]) : 0.f;
  }
}

KVANT_DEVICE void StoreValue(i32 arithmetic, const TileLayout& layout, SharedAddress tile, i32 row,
                             i32 channel, float x) {
  const SharedAddress to = layout.At(tile, row, channel);
  if (TakesF32(arithmetic)) {
    StoreShared32(to, AsBits(x));
  } else {
    StoreShared16(to, Pack(arithmetic, x, 0.f));
  }
}

// Stores 8 values along a row, or down a column, of a tile.
KVANT_DEVICE void StoreValues(i32 arithmetic, const TileLayout& layout, SharedAddress tile, i32 row,
                              i32 channel, i32 axis, const float (&x)[8]) {
  if (axis == kRow) {
    KVANT_UNROLL
    for (i32 i = 0; i < 8; ++i) StoreValue(arithmetic, layout, tile, row + i, channel, x[i]);
  } else if (TakesF32(arithmetic)) {
    const SharedAddress to = layout.At(tile, row, channel);
    StoreShared128(to, {{AsBits(x[0]), AsBits(x[1]), AsBits(x[2]), AsBits(x[3])}});
    StoreShared128(to + 16, {{AsBits(x[4]), AsBits(x[5]), AsBits(x[6]), AsBits(x[7])}});
  } else {
    StoreShared128(layout.At(tile, row, channel),
                   {{Pack(arithmetic, x[0], x[1]), Pack(arithmetic, x[2], x[3]),
                     Pack(arithmetic, x[4], x[5]), Pack(arithmetic, x[6], x[7])}});
  }
}

// Where 8 values of a tile of [rows][channels] that a thread takes begin, the i-th such run.
struct Run {
  i32 row, channel;
};
KVANT_DEVICE Run RunAt(i32 axis, i32 rows, i32 channels, i32 i) {
  if (axis == kCol) return {i / (channels / 8), i % (channels / 8) * 8};
  return {i % (rows / 8) * 8, i / (rows / 8)};
}

// Tokens [first, first + tile) of K or V, channels [channel, channel + layout.channels), by all
// threads. Tokens outside of `exist` and channels from `channel_end` on are 0.
template <class T>
KVANT_DEVICE void FillTile(const SegmentTraits* traits, const SegmentParams* segments, i32 count,
                           const SegmentTable<T>& table, const TileLayout& layout,
                           SharedAddress tile, const Position& batch, i32 first,
                           const ColumnRange& exist, i32 channel, i32 channel_end) {
  // Runs along the axis that most segments, all but always one, have side by side.
  const i32 axis = traits[0].contiguous == kRow ? kRow : kCol;
  const i32 runs = T::k.tile * layout.channels / 8;
  KVANT_NO_UNROLL
  for (i32 i = ThreadIndex(); i < runs; i += Threads(T::k)) {
    const Run run = RunAt(axis, T::k.tile, layout.channels, i);
    const i32 token = first + run.row;
    float values[8] = {};
    if (channel + run.channel < channel_end) {
      KVANT_UNROLL
      for (i32 s = 0; s < count; ++s) {
        const SegmentColumns columns = table.Columns(segments, s);
        const SharedAddress codebook = table.Codebook(traits, s);
        const i32 begin = MaxOf(exist.begin, columns.begin), stop = MinOf(exist.end, columns.end);
        Position at = batch;
        if (axis == kCol) {
          if (begin <= token && token < stop) {
            MoveTo(traits[s], segments[s], columns.TokenOf(token), at);
            LoadValues(traits[s], segments[s], codebook, at, channel + run.channel, kCol,
                       channel_end, values);
          }
        } else if (count == 1 && traits[s].load == kAllTokens) {
          at.row = token;
          if (begin < token + 8 && token < stop) {
            LoadValues(traits[s], segments[s], codebook, at, channel + run.channel, kRow, stop,
                       values);
            KVANT_UNROLL
            for (i32 t = 0; t < 8; ++t) values[t] = token + t < begin ? 0.f : values[t];
          }
        } else {
          // A run may cross into another segment or page, or from a ring's end to its beginning.
          KVANT_NO_UNROLL
          for (i32 t = MaxOf(0, begin - token); t < MinOf(8, stop - token); ++t) {
            float one[8];
            Position token_at = batch;
            MoveTo(traits[s], segments[s], columns.TokenOf(token + t), token_at);
            LoadValues(traits[s], segments[s], codebook, token_at, channel + run.channel, kRow,
                       token_at.row + 1, one);
            KVANT_UNROLL
            for (i32 u = 0; u < 8; ++u) values[u] = u == t ? one[0] : values[u];
          }
        }
      }
    }
    StoreValues(T::k.arithmetic, layout, tile, run.row, run.channel, axis, values);
  }
}

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_DEQUANTIZE_TILE_H_
