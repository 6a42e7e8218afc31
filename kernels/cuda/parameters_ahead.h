// Scales and zero points of the next tile of K or V, in registers.
#ifndef KVANT_KERNELS_CUDA_PARAMETERS_AHEAD_H_
#define KVANT_KERNELS_CUDA_PARAMETERS_AHEAD_H_

#include "kvant/kernels/cuda/dequantize_tile.h"

namespace kvant::cuda {

// The grid of groups in a tile.
struct GroupGrid {
  i32 rows, columns;     // groups along tokens, and along channels
  i32 tokens, channels;  // of a group, within a tile

  KVANT_DEVICE static constexpr GroupGrid Of(const SegmentTraits& traits, i32 tile, i32 channels) {
    const i32 tokens = traits.group[kRow] < tile ? traits.group[kRow] : tile;
    const i32 along = MaxOf(1, traits.group[kCol] < channels ? traits.group[kCol] : channels);
    return {CeilDiv(tile, tokens), CeilDiv(channels, along), tokens, along};
  }
  KVANT_DEVICE constexpr bool ByChannel() const { return channels == 1; }
};

// K or V of the traits T.
template <class T, bool kKeys>
struct Side {
  KVANT_DEVICE static constexpr const SegmentTraits* AllTraits() { return kKeys ? T::k.k : T::k.v; }
  KVANT_DEVICE static constexpr const SegmentTraits& Traits() {
    return kKeys ? T::k.k[0] : T::k.v[0];
  }
  KVANT_DEVICE static const SegmentParams* ParamsOf(const AttentionParams& p) {
    return kKeys ? p.k : p.v;
  }
  KVANT_DEVICE static constexpr i32 Count() { return kKeys ? T::k.k_segments : T::k.v_segments; }
  KVANT_DEVICE static constexpr i32 Channels() { return kKeys ? T::k.head_size : T::k.v_block; }
  KVANT_DEVICE static constexpr i32 ChannelEnd() {
    return kKeys ? T::k.head_size : T::k.v_head_size;
  }
  KVANT_DEVICE static constexpr GroupGrid Grid() {
    return GroupGrid::Of(Traits(), T::k.tile, Channels());
  }

  // Moves to where a column of the one segment lies.
  KVANT_DEVICE static void MoveToColumn(const SegmentParams& segment, const SegmentTable<T>& table,
                                        i32 column, Position& at) {
    const i32 token = HasRanges(T::k) ? table.Columns(&segment, 0).TokenOf(column) : column;
    MoveTo(Traits(), segment, token, at);
  }
};

// Thread t has groups t, t + threads, ... of a tile's.
template <class T, bool kKeys>
class ParametersAhead {
  using Of = Side<T, kKeys>;
  static constexpr i32 kMost =
      kKeys ? T::kMax.k[0].parameters_ahead : T::kMax.v[0].parameters_ahead;
  static constexpr i32 kRoom = kMost > 0 ? kMost : 1;

 public:
  KVANT_DEVICE ParametersAhead(const AttentionParams& p, const SegmentTable<T>& table,
                               const Position& batch, i32 kv_len)
      : segment_(*Of::ParamsOf(p)), table_(table), batch_(batch), kv_len_(kv_len) {}

  KVANT_DEVICE void Start(i32 tile) {
    if (Strides()) Find(tile);
    Load(tile);
  }

  // Of a tile, the one after the last.
  KVANT_DEVICE void Load(i32 tile) {
    const GroupGrid grid = Grid();
    const i32 all = grid.rows * grid.columns;
    KVANT_UNROLL
    for (i32 j = 0; j < Traits().parameters_ahead; ++j) {
      const i32 i = ThreadIndex() + j * Threads(T::k);
      const i32 column = tile * T::k.tile + i / grid.columns * grid.tokens;
      groups[j] = {0.f, 0.f};
      if ((all % Threads(T::k) != 0 && i >= all) || column >= kv_len_) continue;
      if (Strides()) {
        groups[j] = LoadFound(j);
        continue;
      }
      Position at = batch_;
      Of::MoveToColumn(segment_, table_, column, at);
      const i32 channel = i % grid.columns * grid.channels;
      // There are more columns than groups where there is more room than channels.
      const bool beyond = Of::Channels() > Of::ChannelEnd() && channel >= Of::ChannelEnd();
      groups[j] = LoadParameters(Traits(), segment_, at, beyond ? Of::ChannelEnd() - 1 : channel);
    }
    if (Strides()) MoveFound(tile);
  }

  // Of tokens from kv_len on, 0.
  GroupParameters groups[kRoom];

 private:
  KVANT_DEVICE static constexpr const SegmentTraits& Traits() { return Of::Traits(); }
  KVANT_DEVICE static constexpr GroupGrid Grid() { return Of::Grid(); }

  // Whether shapes alone say how many rows of groups a tile's parameters lie behind those of the
  // tile before.
  KVANT_DEVICE static constexpr bool Strides() {
    const SegmentTraits& t = Traits();
    return t.parameters_ahead > 0 && t.load != kByPages && !HasRanges(T::k) &&
           Of::Channels() == Of::ChannelEnd();
  }
  // Whether all groups that a thread loads of a tile lie below each other, whole rows apart.
  KVANT_DEVICE static constexpr bool InColumn() { return Threads(T::k) % Grid().columns == 0; }
  KVANT_DEVICE static constexpr i32 Cursors() {
    return !Strides() ? 0 : InColumn() ? 1 : Traits().parameters_ahead;
  }

  // Where scales or zero points lie that a thread loads, from tile to tile: to find it anew takes
  // several instructions. Types of whole bytes go by their address, smaller ones by their index.
  struct Cursor {
    const u8* data;
    i64 index;
    i64 row;  // from a row of groups to the next

    KVANT_DEVICE static Cursor To(const ArrayTraits& traits, const Array& array, const Position& at,
                                  i32 channel) {
      const i64 index = GroupIndex(Traits(), traits, array, at, channel);
      const i64 row = traits.varies & 8 ? array.strides[kRow] : 0, bytes = BitsOf(traits.type) / 8;
      const auto* const data = static_cast<const u8*>(array.data);
      if (bytes == 0) return {data, index, row};
      return {data + index * bytes, 0, row * bytes};
    }
    KVANT_DEVICE float Load(i32 type, i32 rows) const {
      if (BitsOf(type) < 8) return LoadElement(type, data, index + rows * row);
      return LoadElement(type, data + rows * row, 0);
    }
    KVANT_DEVICE void Move(i32 type, i32 rows) {
      if (BitsOf(type) < 8) {
        index += rows * row;
      } else {
        data += rows * row;
      }
    }
  };

  // Those of the groups of a tile.
  KVANT_DEVICE void Find(i32 tile) {
    const GroupGrid grid = Grid();
    KVANT_UNROLL
    for (i32 j = 0; j < Cursors(); ++j) {
      const i32 i = ThreadIndex() + j * Threads(T::k);
      Position at = batch_;
      at.row = tile * T::k.tile + i / grid.columns * grid.tokens;
      const i32 channel = i % grid.columns * grid.channels;
      scales_[j] = Cursor::To(Traits().scales, segment_.scales, at, channel);
      if (Traits().zero_points.type == kNone) continue;
      zero_points_[j] = Cursor::To(Traits().zero_points, segment_.zero_points, at, channel);
    }
  }

  KVANT_DEVICE GroupParameters LoadFound(i32 j) const {
    const i32 rows = InColumn() ? j * (Threads(T::k) / Grid().columns) : 0;
    const i32 cursor = InColumn() ? 0 : j;
    GroupParameters found{scales_[cursor].Load(Traits().scales.type, rows), 0.f};
    if (Traits().zero_points.type != kNone) {
      found.zero_point = zero_points_[cursor].Load(Traits().zero_points.type, rows);
    }
    return found;
  }

  // To those of the tile behind `tile`, which may be of the same groups.
  KVANT_DEVICE void MoveFound(i32 tile) {
    const i32 group = Traits().group[kRow];
    const bool within = group > T::k.tile && (tile + 1) * T::k.tile % group != 0;
    const i32 rows = within ? 0 : Grid().rows;
    KVANT_UNROLL
    for (i32 j = 0; j < Cursors(); ++j) {
      scales_[j].Move(Traits().scales.type, rows);
      if (Traits().zero_points.type != kNone) zero_points_[j].Move(Traits().zero_points.type, rows);
    }
  }

  const SegmentParams& segment_;
  const SegmentTable<T> table_;
  const Position batch_;
  const i32 kv_len_;
  Cursor scales_[kRoom], zero_points_[kRoom];
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_PARAMETERS_AHEAD_H_
