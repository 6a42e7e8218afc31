// K or V on its way to shared memory, tile by tile.
//
//             kLoaded                 kCopied                        kInPlace
//   Advance                           codes of the next tile  -> raw next tile -> its stage
//                                     parameters from registers
//   Prepare   memory -> tile          raw + parameters -> tile
//                                     parameters of the next tile
//                                     -> registers
//
// A tile and its codes have two stages, of which one is in use and one on its way. Where codes
// become values in runs of 16 bytes or less (ConvertCopied), lanes read rows one below the other:
// chunks of 16 bytes are swizzled, so that these lie in different banks.
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
  KVANT_DEVICE constexpr bool ByChannel() const { return channels == 1; }
};

// How many codes at a time tiles are made of: side by side and of a group, or of groups of a
// channel, whose parameters are in shared memory. 0: element by element. channels: that a tile has
// room for, of which `used` are the head's.
KVANT_DEVICE constexpr i32 CodesAtOnce(const AttentionTraits& t, const SegmentTraits& segment,
                                       i32 channels, i32 used) {
  const CodesToValues codes(t.arithmetic, segment);
  if (segment.staging != kCopied || segment.parameters_ahead == 0 || channels % 16 != 0 ||
      channels != used || !codes.Takes()) {
    return 0;
  }
  const GroupGrid grid = GroupGrid::Of(segment, t.tile, channels);
  // Those of which a thread has fewest, where not all have as many. Loads of single words are slow:
  // words of rows below each other share banks.
  i32 best = 0, fewest = 0;
  for (i32 n = 32; n >= 8; n /= 2) {
    if ((grid.ByChannel() ? channels : grid.channels) % n != 0) continue;
    if (n % codes.Order().span != 0) continue;
    const i32 of_thread = n * CeilDiv(t.tile * channels, n * Threads(t));
    if (best != 0 && (fewest <= of_thread || n * BitsOf(segment.data.type) < 64)) continue;
    best = n;
    fewest = of_thread;
  }
  return best;
}

KVANT_DEVICE constexpr ChannelOrder OrderOf(const AttentionTraits& t, const SegmentTraits& segment,
                                            i32 channels, i32 used) {
  if (CodesAtOnce(t, segment, channels, used) == 0) return ChannelOrder::AsTheyAre();
  return CodesToValues(t.arithmetic, segment).Order();
}

template <class T, bool kKeys>
class TileFeed {
 public:
  // tables: SegmentTables; entries: where a CodebookTable lies.
  KVANT_DEVICE TileFeed(const AttentionParams& p, SharedAddress shared, SharedAddress tables,
                        SharedAddress entries, const Position& batch, i32 kv_len, i32 channel)
      : p_(p),
        shared_(shared),
        table_(tables, kKeys),
        entries_(entries),
        of_entries_(Traits().codebook_table && T::k.arithmetic == kByF16
                        ? CodebookTable::FactorsOf(*AllParams()).scales
                        : 1.f),
        batch_(batch),
        kv_len_(kv_len),
        channel_(channel) {}

  KVANT_DEVICE static constexpr ChannelOrder Order() {
    return OrderOf(T::k, Traits(), Channels(), ChannelEnd());
  }

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
    if (Strides()) FindParameters(tile);
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
    } else if (AtOnce() > 0) {
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

  KVANT_DEVICE static constexpr GroupGrid Grid() {
    return GroupGrid::Of(Traits(), T::k.tile, Channels());
  }
  KVANT_DEVICE static constexpr CodesToValues Codes() {
    return CodesToValues(T::k.arithmetic, Traits());
  }
  KVANT_DEVICE static constexpr i32 AtOnce() {
    return CodesAtOnce(T::k, Traits(), Channels(), ChannelEnd());
  }

  // Where codes of a row of a tile lie, from `byte` on.
  KVANT_DEVICE SharedAddress RawAt(i32 tile, i32 row, i32 byte) const {
    const i32 chunks = At().row / 16;
    const bool swizzled =
        AtOnce() > 0 && At().row % 16 == 0 && chunks > 1 && (chunks & (chunks - 1)) == 0;
    const i32 rows_of_banks = MaxOf(1, 8 / MaxOf(1, chunks));
    const i32 flip = swizzled ? row / rows_of_banks % MinOf(chunks, 8) * 16 : 0;
    return shared_ + At().raw + (tile % 2 * T::k.tile + row) * At().row + (byte ^ flip);
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
        const SharedAddress to =
            in_place ? this->tile(tile) + row * Layout().pitch + at : RawAt(tile, row, at);
        CopyAsync(width, to, from, token < kv_len_ ? width : 0);
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
    const GroupGrid grid = Grid();
    const i32 bits = BitsOf(Traits().data.type);
    const i32 runs = T::k.tile * (layout.channels / AtOnce());
    KVANT_UNROLL
    for (i32 first = 0; first < runs; first += Threads(T::k)) {
      const i32 i = first + ThreadIndex();
      if (runs % Threads(T::k) != 0 && i >= runs) break;
      const i32 row = i % T::k.tile, channel = i / T::k.tile * AtOnce();
      const i32 group_row = row / grid.tokens;
      PairParameters parameters[4];
      if (!grid.ByChannel()) {
        const i32 group = group_row * grid.columns + channel / grid.channels;
        const Words2 words = LoadShared64(shared_ + At().parameters + group * 8);
        KVANT_UNROLL
        for (i32 w = 0; w < 4; ++w) parameters[w] = PairParameters::Same(words);
      }
      u32 words[8];
      KVANT_UNROLL
      for (i32 w = 0; w < AtOnce() * bits / 32; w += 4) {
        u32 chunk[4] = {};
        LoadSharedWords(RawAt(tile, row, channel * bits / 8 + w * 4),
                        MinOf(4, AtOnce() * bits / 32), chunk);
        KVANT_UNROLL
        for (i32 e = 0; e < 4; ++e) words[w + e] = chunk[e];
      }
      // Of each 8 values.
      KVANT_UNROLL
      for (i32 e = 0; e < AtOnce() / 8; ++e) {
        Words4 values;
        if (grid.ByChannel()) LoadOfPairs(group_row, channel + e * 8, parameters);
        KVANT_UNROLL
        for (i32 w = 0; w < 4; ++w) {
          const i32 pair = e * 4 + w, pairs = Codes().Pairs();
          values.v[w] = Codes().Pair(words[pair / pairs], pair % pairs, parameters[w], entries_);
        }
        StoreShared128(layout.At(shared_, row, channel + e * 8), values);
      }
    }
  }

  // Where the scale of a channel's group lies, whose place in Order() this is, and how far behind
  // it its offset: of each 8 places there are the scales, and then the offsets.
  struct OfChannel {
    SharedAddress scale;
    i32 offset;
  };
  KVANT_DEVICE OfChannel ParametersAt(i32 group_row, i32 place) const {
    const i32 bytes = Codes().HasHalves() ? 2 : 4;
    const i32 at = group_row * Channels() * 2 + place / 8 * 16 + place % 8;
    return {shared_ + At().parameters + at * bytes, 8 * bytes};
  }

  // Of the pairs that lie in the 8 places from `place` on.
  KVANT_DEVICE void LoadOfPairs(i32 group_row, i32 place, PairParameters (&pairs)[4]) const {
    const OfChannel at = ParametersAt(group_row, place);
    const Words4 scales = LoadShared128(at.scale), offsets = LoadShared128(at.scale + at.offset);
    if (Codes().HasHalves()) {
      KVANT_UNROLL
      for (i32 w = 0; w < 4; ++w) {
        pairs[w] = PairParameters::Same({{scales.v[w], offsets.v[w]}});
      }
      return;
    }
    const Words4 more[] = {LoadShared128(at.scale + 16), LoadShared128(at.scale + at.offset + 16)};
    KVANT_UNROLL
    for (i32 w = 0; w < 4; ++w) {
      KVANT_UNROLL
      for (i32 h = 0; h < 2; ++h) {
        const i32 i = w % 2 * 2 + h;
        pairs[w].scales[h] = w < 2 ? scales.v[i] : more[0].v[i];
        pairs[w].offsets[h] = w < 2 ? offsets.v[i] : more[1].v[i];
      }
    }
  }

  KVANT_DEVICE void DequantizeCopied(i32 tile) const {
    const TileLayout layout = Layout();
    const GroupGrid grid = Grid();
    KVANT_NO_UNROLL
    for (i32 i = ThreadIndex(); i < T::k.tile * layout.channels / 8; i += Threads(T::k)) {
      const Run run = RunAt(kCol, T::k.tile, layout.channels, i);
      Position at = batch_;
      const i32 column = tile * T::k.tile + run.row;
      float values[8] = {};
      if (run.channel < ChannelEnd() && column < kv_len_) {
        const Eight eight = LoadEight(
            Traits().data.type, RawAt(tile, run.row, run.channel * BitsOf(Traits().data.type) / 8));
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

  // Whether parameters of one tile lie a fixed number of rows of groups behind those of another.
  KVANT_DEVICE static constexpr bool Strides() {
    const SegmentTraits& t = Traits();
    return t.parameters_ahead > 0 && t.load != kByPages && !HasRanges(T::k) &&
           Channels() == ChannelEnd();
  }
  // Whether what a thread loads of a tile are whole rows behind one another.
  KVANT_DEVICE static constexpr bool InColumn() { return Threads(T::k) % Grid().columns == 0; }
  KVANT_DEVICE static constexpr i32 Cursors() {
    return !Strides() ? 0 : InColumn() ? 1 : Traits().parameters_ahead;
  }

  // Scales or zero points of the groups that a thread loads, from tile to tile. Addresses would
  // take several instructions for each tile; in bytes they are there, of 4 bits an index is.
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
  KVANT_DEVICE void FindParameters(i32 tile) {
    const GroupGrid grid = Grid();
    KVANT_UNROLL
    for (i32 j = 0; j < Cursors(); ++j) {
      const i32 i = ThreadIndex() + j * Threads(T::k);
      Position at = batch_;
      at.row = tile * T::k.tile + i / grid.columns * grid.tokens;
      const i32 channel = i % grid.columns * grid.channels;
      scales_[j] = Cursor::To(Traits().scales, AllParams()->scales, at, channel);
      if (Traits().zero_points.type == kNone) continue;
      zero_points_[j] = Cursor::To(Traits().zero_points, AllParams()->zero_points, at, channel);
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

  KVANT_DEVICE void LoadParametersAhead(i32 tile) {
    const GroupGrid grid = Grid();
    const i32 groups = grid.rows * grid.columns;
    KVANT_UNROLL
    for (i32 j = 0; j < Traits().parameters_ahead; ++j) {
      const i32 i = ThreadIndex() + j * Threads(T::k);
      const i32 column = tile * T::k.tile + i / grid.columns * grid.tokens;
      ahead_[j] = {0.f, 0.f};
      if ((groups % Threads(T::k) != 0 && i >= groups) || column >= kv_len_) continue;
      if (Strides()) {
        ahead_[j] = LoadFound(j);
        continue;
      }
      Position at = batch_;
      MoveToColumn(column, at);
      const i32 channel = i % grid.columns * grid.channels;
      // There are more columns than groups where there is more room than channels.
      const bool beyond = Channels() > ChannelEnd() && channel >= ChannelEnd();
      ahead_[j] = LoadParameters(Traits(), *AllParams(), at, beyond ? ChannelEnd() - 1 : channel);
    }
    if (Strides()) MoveFound(tile);
  }

  KVANT_DEVICE void StoreParametersAhead() const {
    const GroupGrid grid = Grid();
    KVANT_UNROLL
    for (i32 j = 0; j < Traits().parameters_ahead; ++j) {
      const i32 i = ThreadIndex() + j * Threads(T::k);
      const Words2 words = AtOnce() > 0
                               ? Codes().Parameters(ahead_[j], of_entries_)
                               : Words2{{AsBits(ahead_[j].scale), AsBits(ahead_[j].zero_point)}};
      if (AtOnce() == 0 || !grid.ByChannel()) {
        StoreShared64(shared_ + At().parameters + i * 8, words);
        continue;
      }
      if (i >= grid.rows * grid.columns) continue;
      const OfChannel at = ParametersAt(i / grid.columns, Order().PlaceOf(i % grid.columns));
      if (Codes().HasHalves()) {
        StoreShared16(at.scale, words.v[0]);
        StoreShared16(at.scale + at.offset, words.v[1]);
      } else {
        StoreShared32(at.scale, words.v[0]);
        StoreShared32(at.scale + at.offset, words.v[1]);
      }
    }
  }

  static constexpr i32 kMostAhead =
      kKeys ? T::kMax.k[0].parameters_ahead : T::kMax.v[0].parameters_ahead;

  const AttentionParams& p_;
  const SharedAddress shared_;
  const SegmentTable<T> table_;
  const SharedAddress entries_;
  const float of_entries_;  // what a CodebookTable leaves to scales
  const Position batch_;
  const i32 kv_len_, channel_;
  GroupParameters ahead_[kMostAhead > 0 ? kMostAhead : 1];
  Cursor scales_[kMostAhead > 0 ? kMostAhead : 1], zero_points_[kMostAhead > 0 ? kMostAhead : 1];
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_TILE_FEED_H_
