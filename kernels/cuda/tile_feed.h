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
#include "kvant/kernels/cuda/parameters_ahead.h"

namespace kvant::cuda {

// More by a thread are copied in a loop: their addresses do not change from tile to tile, so the
// compiler would keep all of them in registers.
inline constexpr i32 kCopiesAtOnce = 8;

// Shared memory of a feed.
struct FeedShared {
  i32 tile;        // bytes of a tile, of which kInPlace has two
  i32 row;         // bytes of a token's codes
  i32 raw;         // where codes begin: two stages of tile x row bytes
  i32 parameters;  // where scales and zero points begin, as StoreParametersAhead has them
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
  // Where threads would have unlike many, what leaves the most busy one the fewest codes. Not by
  // single words where it can be helped: those of rows below each other share banks.
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
class TileFeed : Side<T, kKeys> {
  using Of = Side<T, kKeys>;
  using Of::AllTraits, Of::Traits, Of::Count, Of::Channels, Of::ChannelEnd, Of::Grid;

 public:
  // tables: SegmentTables; entries: where a CodebookTable lies.
  KVANT_DEVICE TileFeed(const AttentionParams& p, SharedAddress shared, SharedAddress tables,
                        SharedAddress entries, const Position& batch, const ColumnRange& exist,
                        i32 channel)
      : p_(p),
        shared_(shared),
        table_(tables, kKeys),
        entries_(entries),
        of_entries_(Traits().codebook_table && T::k.arithmetic == kByF16
                        ? CodebookTable::FactorsOf(*AllParams()).scales
                        : 1.f),
        batch_(batch),
        exist_(exist),
        channel_(channel),
        ahead_(p, table_, batch, exist.end) {}

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
    ahead_.Start(tile);
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
                  tile * T::k.tile, exist_, channel_, ChannelEnd());
    } else if (AtOnce() > 0) {
      ConvertCopied(tile);
    } else if (Traits().staging == kCopied) {
      DequantizeCopied(tile);
    }
    if (more) ahead_.Load(tile + 1);
  }

  // Whether ConvertCopied makes of tokens that do not exist what is no zero: codes of 0 are none
  // where the group has a zero point, or an infinite scale. Of groups without a token both are 0.
  KVANT_DEVICE static constexpr bool LeavesMissing() {
    return AtOnce() > 0 && (Grid().tokens > 1 || T::k.has_first);
  }
  KVANT_DEVICE bool IsWhole(i32 tile) const {
    return Exists(tile * T::k.tile) && Exists(tile * T::k.tile + T::k.tile - 1);
  }
  // By the threads that have prepared it.
  KVANT_DEVICE void ClearMissing(i32 tile) const {
    if (!LeavesMissing()) return;
    const TileLayout layout = Layout();
    const i32 runs = T::k.tile * (layout.channels / AtOnce());
    KVANT_UNROLL
    for (i32 first = 0; first < runs; first += Threads(T::k)) {
      const i32 i = first + ThreadIndex();
      if (runs % Threads(T::k) != 0 && i >= runs) break;
      const i32 row = i % T::k.tile, channel = i / T::k.tile * AtOnce();
      if (Exists(tile * T::k.tile + row)) continue;
      KVANT_UNROLL
      for (i32 e = 0; e < AtOnce() / 8; ++e) {
        StoreShared128(layout.At(shared_, row, channel + e * 8), Words4{});
      }
    }
  }

 private:
  KVANT_DEVICE const SegmentParams* AllParams() const { return Of::ParamsOf(p_); }
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

  KVANT_DEVICE bool Exists(i32 token) const {
    return token < exist_.end && (!T::k.has_first || exist_.begin <= token);
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
        Of::MoveToColumn(*AllParams(), table_, MinOf(token, exist_.end - 1), position);
        const i64 index = IndexOf(Traits().data, segment.data, position, 0);
        const u8* from = static_cast<const u8*>(segment.data.data) +
                         BytesTo(BitsOf(Traits().data.type), index) + at;
        const SharedAddress to =
            in_place ? this->tile(tile) + row * Layout().pitch + at : RawAt(tile, row, at);
        CopyAsync(width, to, from, Exists(token) ? width : 0);
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

  // Of tokens that do not exist, codes are 0.
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

  // Where the scale of a channel's group lies, and how far behind it its offset: of each 8 places
  // there are the scales, and then the offsets. place: the channel's, by Order().
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
      if (run.channel < ChannelEnd() && Exists(column)) {
        const Eight eight = LoadEight(
            Traits().data.type, RawAt(tile, run.row, run.channel * BitsOf(Traits().data.type) / 8));
        UnpackValues(Traits(), eight, table_.Codebook(AllTraits(), 0), values);
        if (Traits().parameters_ahead == 0) Of::MoveToColumn(*AllParams(), table_, column, at);
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

  KVANT_DEVICE void StoreParametersAhead() const {
    const GroupGrid grid = Grid();
    KVANT_UNROLL
    for (i32 j = 0; j < Traits().parameters_ahead; ++j) {
      const i32 i = ThreadIndex() + j * Threads(T::k);
      const GroupParameters& group = ahead_.groups[j];
      const Words2 words = AtOnce() > 0 ? Codes().Parameters(group, of_entries_)
                                        : Words2{{AsBits(group.scale), AsBits(group.zero_point)}};
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

  const AttentionParams& p_;
  const SharedAddress shared_;
  const SegmentTable<T> table_;
  const SharedAddress entries_;
  const float of_entries_;  // what a CodebookTable leaves to scales
  const Position batch_;
  const ColumnRange exist_;  // tokens
  const i32 channel_;
  ParametersAhead<T, kKeys> ahead_;
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_TILE_FEED_H_
