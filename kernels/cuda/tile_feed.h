// K or V on its way to shared memory, tile by tile.
//
//             kLoaded                 kCopied                        kInPlace
//   Advance                           codes of the next tile  -> raw next tile -> its stage
//                                     parameters from registers
//   Prepare   memory -> tile          raw + parameters -> tile
//                                     parameters of the next tile
//                                     -> registers
//
// A tile and its codes have two stages, of which one is in use and one on its way.
#ifndef KVANT_KERNELS_CUDA_TILE_FEED_H_
#define KVANT_KERNELS_CUDA_TILE_FEED_H_

#include "kvant/kernels/cuda/dequantize_codes.h"

namespace kvant::cuda {

// More by a thread are copied in a loop: their addresses do not change from tile to tile, so the
// compiler would keep all of them in registers.
inline constexpr i32 kCopiesAtOnce = 8;

// Shared memory of a feed.
struct FeedShared {
  i32 tile;        // bytes of a tile, of which kInPlace has two
  i32 row;         // bytes of a token's codes
  i32 raw;         // where codes begin: two stages of tile x row bytes
  i32 parameters;  // where pairs of two words begin: {scale, zero point}, or as CodesToValues
  i32 bytes;

  KVANT_DEVICE static constexpr FeedShared Of(const AttentionTraits& t,
                                              const SegmentTraits& segment, i32 channels) {
    FeedShared s{};
    s.tile = t.tile * TileLayout::Of(t.arithmetic, channels).pitch;
    s.row = channels * BitsOf(segment.data.type) / 8;
    s.raw = segment.staging == kInPlace ? 2 * s.tile : s.tile;
    s.parameters = s.raw + (segment.staging == kCopied ? 2 * t.tile * s.row : 0);
    s.bytes = s.parameters + segment.parameters_ahead * Threads(t) * 8;
    return s;
  }
};

// The grid of groups in a tile.
struct GroupGrid {
  i32 rows, columns;     // groups along tokens, and along channels
  i32 tokens, channels;  // of a group, within a tile

  KVANT_DEVICE static constexpr GroupGrid Of(const SegmentTraits& traits, i32 tile, i32 channels) {
    const i32 tokens = traits.group[kRow] < tile ? traits.group[kRow] : tile;
    const i32 along = traits.group[kCol] < channels ? traits.group[kCol] : channels;
    return {CeilDiv(tile, tokens), CeilDiv(channels, along), tokens, along};
  }
};

// Whether tiles are made of codes 8 at a time: those side by side are of one group, whose
// parameters are in shared memory. channels: that a tile has room for, of which `used` are the
// head's.
KVANT_DEVICE constexpr bool ConvertsCodes(const AttentionTraits& t, const SegmentTraits& segment,
                                          i32 channels, i32 used) {
  return segment.staging == kCopied && segment.parameters_ahead > 0 &&
         GroupGrid::Of(segment, t.tile, channels).channels % 8 == 0 &&
         TileLayout::Of(t.arithmetic, channels).channels == used &&
         CodesToValues(t.arithmetic, segment).Takes();
}

template <class T, bool kKeys>
class TileFeed {
 public:
  // tables: SegmentTables.
  KVANT_DEVICE TileFeed(const AttentionParams& p, SharedAddress shared, SharedAddress tables,
                        const Position& batch, i32 kv_len, i32 channel)
      : p_(p),
        shared_(shared),
        table_(tables, kKeys),
        batch_(batch),
        kv_len_(kv_len),
        channel_(channel) {}

  // Whether Prepare writes the tile.
  KVANT_DEVICE static constexpr bool Prepares() { return Traits().staging != kInPlace; }

  // Where a tile lies, once it is prepared.
  KVANT_DEVICE SharedAddress tile(i32 tile) const {
    return shared_ + (Traits().staging == kInPlace ? tile % 2 * At().tile : 0);
  }

  // Begins to copy the first tile.
  KVANT_DEVICE void Start(i32 tile) {
    if (Traits().staging == kInPlace) ClearPadding();
    Copy(tile);
    LoadParametersAhead(tile);
  }

  // When all are done with the last tile: begins to copy the one after `tile`.
  KVANT_DEVICE void Advance(i32 tile, bool more) {
    StoreParametersAhead();
    if (more) Copy(tile + 1);
  }

  // Once what was copied for it has arrived for all threads.
  KVANT_DEVICE void Prepare(i32 tile, bool more) {
    if (Traits().staging == kLoaded) {
      FillTile<T>(AllTraits(), AllParams(), Count(), table_, Layout(), shared_, batch_,
                  tile * T::k.tile, kv_len_, channel_, ChannelEnd());
    } else if (ConvertsCodes()) {
      ConvertCopied(tile);
    } else if (Traits().staging == kCopied) {
      DequantizeCopied(tile);
    }
    if (more) LoadParametersAhead(tile + 1);
  }

 private:
  KVANT_DEVICE static constexpr const SegmentTraits* AllTraits() { return kKeys ? T::k.k : T::k.v; }
  KVANT_DEVICE static constexpr const SegmentTraits& Traits() {
    return kKeys ? T::k.k[0] : T::k.v[0];
  }
  KVANT_DEVICE const SegmentParams* AllParams() const { return kKeys ? p_.k : p_.v; }
  KVANT_DEVICE static constexpr i32 Count() { return kKeys ? T::k.k_segments : T::k.v_segments; }
  KVANT_DEVICE static constexpr i32 Channels() { return kKeys ? T::k.head_size : T::k.v_block; }
  KVANT_DEVICE static constexpr i32 ChannelEnd() {
    return kKeys ? T::k.head_size : T::k.v_head_size;
  }
  KVANT_DEVICE static constexpr TileLayout Layout() {
    return TileLayout::Of(T::k.arithmetic, Channels());
  }
  KVANT_DEVICE static constexpr FeedShared At() {
    return FeedShared::Of(T::k, Traits(), Channels());
  }
  // Bytes of a token that exist, of those that there is room for.
  KVANT_DEVICE static constexpr i32 RowBytes() {
    return ChannelEnd() * BitsOf(Traits().data.type) / 8;
  }

  KVANT_DEVICE static constexpr CodesToValues Codes() {
    return CodesToValues(T::k.arithmetic, Traits());
  }
  KVANT_DEVICE static constexpr bool ConvertsCodes() {
    return kvant::cuda::ConvertsCodes(T::k, Traits(), Channels(), ChannelEnd());
  }

  // Moves to where a column of the one segment lies.
  KVANT_DEVICE void MoveToColumn(i32 column, Position& at) const {
    const i32 token = HasRanges(T::k) ? table_.Columns(AllParams(), 0).TokenOf(column) : column;
    MoveTo(Traits(), *AllParams(), token, at);
  }

  KVANT_DEVICE void Copy(i32 tile) const {
    if (Traits().staging == kLoaded) return;
    const i32 width = Traits().copy_width, per_row = RowBytes() / width;
    const bool in_place = Traits().staging == kInPlace;
    const SharedAddress to =
        in_place ? this->tile(tile) : shared_ + At().raw + tile % 2 * T::k.tile * At().row;
    const i32 pitch = in_place ? Layout().pitch : At().row;
    const SegmentParams& segment = *AllParams();
    const i32 copies = T::k.tile * per_row, each = CeilDiv(copies, Threads(T::k));
    const i32 at_once = MinOf(each, kCopiesAtOnce);
    KVANT_NO_UNROLL
    for (i32 first = 0; first < each; first += at_once) {
      KVANT_UNROLL
      for (i32 j = 0; j < at_once; ++j) {
        const i32 i = ThreadIndex() + (first + j) * Threads(T::k);
        if (copies % (at_once * Threads(T::k)) != 0 && i >= copies) break;
        const i32 row = i / per_row, at = i % per_row * width, token = tile * T::k.tile + row;
        Position position = batch_;
        MoveToColumn(MinOf(token, kv_len_ - 1), position);
        const i64 index = IndexOf(Traits().data, segment.data, position, 0);
        const u8* from = static_cast<const u8*>(segment.data.data) +
                         BytesTo(BitsOf(Traits().data.type), index) + at;
        CopyAsync(width, to + row * pitch + at, from, token < kv_len_ ? width : 0);
      }
    }
  }

  // Channels beyond the head's, which no copy writes.
  KVANT_DEVICE void ClearPadding() const {
    const TileLayout layout = Layout();
    const i32 padding = layout.channels * layout.bytes - RowBytes();
    if (padding == 0) return;
    for (i32 i = ThreadIndex(); i < 2 * T::k.tile * (padding / 4); i += Threads(T::k)) {
      const i32 row = i / (padding / 4), at = RowBytes() + i % (padding / 4) * 4;
      StoreShared32(shared_ + row * layout.pitch + at, 0);
    }
  }

  // Of tokens that do not exist, codes and parameters are 0.
  KVANT_DEVICE void ConvertCopied(i32 tile) const {
    const TileLayout layout = Layout();
    const GroupGrid grid = GroupGrid::Of(Traits(), T::k.tile, Channels());
    const SharedAddress raw = shared_ + At().raw + tile % 2 * T::k.tile * At().row;
    const i32 bits = BitsOf(Traits().data.type);
    const i32 per_row = layout.channels / 8, runs = T::k.tile * per_row;
    // Where threads are whole rows, places differ by a constant.
    const bool whole = Threads(T::k) % per_row == 0;
    KVANT_UNROLL
    for (i32 first = 0; first < runs; first += Threads(T::k)) {
      const i32 i = first + ThreadIndex();
      if (runs % Threads(T::k) != 0 && i >= runs) break;
      const i32 row = whole ? first / per_row + ThreadIndex() / per_row : i / per_row;
      const i32 channel = (whole ? ThreadIndex() : i) % per_row * 8;
      const i32 group = row / grid.tokens * grid.columns + channel / grid.channels;
      const Words2 parameters = LoadShared64(shared_ + At().parameters + group * 8);
      const Eight codes = LoadEight(Traits().data.type, raw + row * At().row + channel * bits / 8);
      StoreShared128(layout.At(shared_, row, channel), Codes().Values(codes, parameters));
    }
  }

  KVANT_DEVICE void DequantizeCopied(i32 tile) const {
    const TileLayout layout = Layout();
    const GroupGrid grid = GroupGrid::Of(Traits(), T::k.tile, Channels());
    const SharedAddress raw = shared_ + At().raw + tile % 2 * T::k.tile * At().row;
    KVANT_NO_UNROLL
    for (i32 i = ThreadIndex(); i < T::k.tile * layout.channels / 8; i += Threads(T::k)) {
      const Run run = RunAt(kCol, T::k.tile, layout.channels, i);
      Position at = batch_;
      const i32 column = tile * T::k.tile + run.row;
      float values[8] = {};
      if (run.channel < ChannelEnd() && column < kv_len_) {
        const Eight eight =
            LoadEight(Traits().data.type,
                      raw + run.row * At().row + run.channel * BitsOf(Traits().data.type) / 8);
        UnpackValues(Traits(), eight, table_.Codebook(AllTraits(), 0), values);
        if (Traits().parameters_ahead == 0) MoveToColumn(column, at);
        DequantizeEight(grid, run, at, values);
      }
      StoreValues(T::k.arithmetic, layout, shared_, run.row, run.channel, kCol, values);
    }
  }

  KVANT_DEVICE void DequantizeEight(const GroupGrid& grid, const Run& run, const Position& at,
                                    float (&values)[8]) const {
    if (Traits().scales.type == kNone) return;
    GroupParameters group{};
    KVANT_UNROLL
    for (i32 i = 0; i < 8; ++i) {
      const i32 channel = run.channel + i;
      if (i == 0 || grid.channels % 8 != 0) {
        if (Traits().parameters_ahead > 0) {
          const i32 index = run.row / grid.tokens * grid.columns +
                            MinOf(channel, ChannelEnd() - 1) / grid.channels;
          const Words2 pair = LoadShared64(shared_ + At().parameters + index * 8);
          group = {AsFloat(pair.v[0]), AsFloat(pair.v[1])};
        } else {
          group = LoadParameters(Traits(), *AllParams(), at, MinOf(channel, ChannelEnd() - 1));
        }
      }
      values[i] = Dequantize(Traits(), group, values[i]);
    }
  }

  KVANT_DEVICE void LoadParametersAhead(i32 tile) {
    const GroupGrid grid = GroupGrid::Of(Traits(), T::k.tile, Channels());
    KVANT_UNROLL
    for (i32 j = 0; j < Traits().parameters_ahead; ++j) {
      const i32 i = ThreadIndex() + j * Threads(T::k);
      Position at = batch_;
      const i32 column = tile * T::k.tile + i / grid.columns * grid.tokens;
      ahead_[j] = {0.f, 0.f};
      if (i < grid.rows * grid.columns && column < kv_len_) {
        MoveToColumn(column, at);
        const i32 channel = i % grid.columns * grid.channels;
        // There are more columns than groups where there is more room than channels.
        const bool beyond = Channels() > ChannelEnd() && channel >= ChannelEnd();
        ahead_[j] = LoadParameters(Traits(), *AllParams(), at, beyond ? ChannelEnd() - 1 : channel);
      }
    }
  }

  KVANT_DEVICE void StoreParametersAhead() const {
    KVANT_UNROLL
    for (i32 j = 0; j < Traits().parameters_ahead; ++j) {
      const i32 i = ThreadIndex() + j * Threads(T::k);
      const Words2 words = ConvertsCodes()
                               ? Codes().Parameters(ahead_[j])
                               : Words2{{AsBits(ahead_[j].scale), AsBits(ahead_[j].zero_point)}};
      StoreShared64(shared_ + At().parameters + i * 8, words);
    }
  }

  static constexpr i32 kMostAhead =
      kKeys ? T::kMax.k[0].parameters_ahead : T::kMax.v[0].parameters_ahead;

  const AttentionParams& p_;
  const SharedAddress shared_;
  const SegmentTable<T> table_;
  const Position batch_;
  const i32 kv_len_, channel_;
  GroupParameters ahead_[kMostAhead > 0 ? kMostAhead : 1];
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_TILE_FEED_H_
