// Attention over tiles: K and V are dequantized to shared memory, a tile of tokens at a time for
// all rows of the block, and multiplied on tensor cores. Takes every format and layout.
//
//   block = (b0, b1[, b2]) x tile of rows x block of output channels x split of the tokens
//     Q tile                                   once
//     for every tile of tokens of the split
//       K tile, V tile                         dequantized by all threads; the next on its way
//       scores = Q x K^T, steps, online softmax, O += P x V      each warp its rows and tokens
//     join warps, then splits (the last block to come), normalise, store
//
// Nothing of size Sq x S exists. Tiles that a band hides from every row of the block are skipped.
#ifndef KVANT_KERNELS_CUDA_ATTENTION_TILES_H_
#define KVANT_KERNELS_CUDA_ATTENTION_TILES_H_

#include "kvant/kernels/cuda/columns.h"
#include "kvant/kernels/cuda/dropout.h"
#include "kvant/kernels/cuda/finish.h"
#include "kvant/kernels/cuda/online_softmax.h"
#include "kvant/kernels/cuda/score_steps.h"
#include "kvant/kernels/cuda/tile_feed.h"
#include "kvant/kernels/cuda/tile_products.h"

namespace kvant::cuda {

// Shared memory of a block: tiles, and once they are done with, states of warps; then what is
// small.
struct AttentionShared {
  i32 q, k, v;               // where the tiles lie
  i32 factors;               // column ranges, and, when tiles are done with, floats of joining
  i32 tables;                // SegmentTables
  i32 k_entries, v_entries;  // CodebookTables
  i32 bytes;

  // Whether V's CodebookTable is K's.
  KVANT_DEVICE static constexpr bool SharesEntries(const AttentionTraits& t) {
    return t.one_codebook && t.k[0].codebook_table && t.v[0].codebook_table;
  }

  KVANT_DEVICE static constexpr AttentionShared Of(const AttentionTraits& t, i32 splits) {
    const i32 rows = t.row_warps * 16;
    AttentionShared s{};
    s.k = s.q + rows * TileLayout::Of(t.arithmetic, t.head_size).pitch;
    s.v = s.k + FeedShared::Of(t, t.k[0], t.head_size).bytes;
    const i32 tiles = s.v + (t.v_in_k ? 0 : FeedShared::Of(t, t.v[0], t.v_block).bytes);
    const i32 states = t.token_warps * rows * (t.v_block + 2) * 4;
    s.factors = s.k > states ? s.k : states;
    const i32 joined = MaxOf(MaxOf(splits, t.token_warps), t.part == kWhole ? 1 : kParts);
    const i32 end = s.factors + rows * joined * 8;
    s.tables = tiles > end ? tiles : end;
    s.k_entries = s.tables + SegmentTables::Of(t).bytes;
    const i32 after_k = s.k_entries + (t.k[0].codebook_table ? CodebookTable::kBytes : 0);
    s.v_entries = SharesEntries(t) ? s.k_entries : after_k;
    s.bytes = after_k + (t.v[0].codebook_table && !SharesEntries(t) ? CodebookTable::kBytes : 0);
    return s;
  }
};

template <class T>
class AttentionTiles {
 public:
  KVANT_DEVICE static void Run(const AttentionParams& p) { AttentionTiles(p).Run(); }
  // Whether this is the block that has left rows of a part, and which.
  KVANT_DEVICE static bool RunPart(const AttentionParams& p, BlockRows& rows) {
    AttentionTiles part(p);
    rows = part.block_;
    return part.Run();
  }

 private:
  using Products = TileProducts<T>;
  using Keys = TileFeed<T, true>;
  using Values = TileFeed<T, false>;
  using Steps = RowSteps<T>;
  using Ending = Finish<T>;

  KVANT_DEVICE explicit AttentionTiles(const AttentionParams& p)
      : p_(p), shared_(SharedBase()), at_(AttentionShared::Of(T::k, p.split.splits)) {
    i64 rest = BlockIndex();
    rest /= p.split.splits;
    channel_ = static_cast<i32>(rest % ChannelBlocks(T::k)) * T::k.v_block;
    rest /= ChannelBlocks(T::k);
    const i32 row_tiles = RowTiles(T::k, p.rows);
    block_.row = static_cast<i32>(rest % row_tiles) * Ending::Rows();
    rest /= row_tiles;
    block_.split_b2 = T::k.kv_varies_over_b2 != 0;
    block_.b2 = block_.split_b2 ? static_cast<i32>(rest % p.batch[2]) : 0;
    if (block_.split_b2) rest /= p.batch[2];
    block_.b1 = static_cast<i32>(rest % p.batch[1]);
    block_.b0 = static_cast<i32>(rest / p.batch[1]);
    extent_ = T::k.part == kOthersPart ? Extent::Whole(p, 0)  // how many columns, tables will say
                                       : Extent::Of<T>(p, Position{block_.b0, block_.b1, 0, 0});
    const i32 rows = T::k.ragged ? extent_.q_len * (block_.split_b2 ? 1 : p.batch[2]) : p.rows;
    block_.rows = MinOf(Ending::Rows(), rows - block_.row);
    block_.q_first = extent_.q_first;
    block_.q_len = T::k.ragged ? MaxOf(extent_.q_len, 1) : p.q_len;
    const i32 warp = WarpIndex(), lane = LaneIndex();
    row_ = warp / T::k.token_warps * 16;
    token_ = warp % T::k.token_warps * (T::k.tile / T::k.token_warps);
    for (i32 h = 0; h < 2; ++h) position_[h] = block_.At(row_ + lane / 4 + 8 * h);
  }

  // Whether its rows end in this block.
  KVANT_DEVICE bool Run() {
    if (T::k.ragged && block_.rows <= 0) return false;  // of a sequence that has no such rows
    const Dropout dropout = Dropout::template Of<T>(p_);
    if (T::k.dropout && T::k.dropout_mask.type != kNone && Split() == 0 && channel_ == 0) {
      WriteDropoutMask(dropout);
    }
    SegmentTable<T>::Write(p_, block_.b0, shared_ + at_.tables);
    FillEntries(T::k.k[0], p_.k[0], at_.k_entries);
    if (!AttentionShared::SharesEntries(T::k)) FillEntries(T::k.v[0], p_.v[0], at_.v_entries);
    if (T::k.q.codebook != 0 || T::k.part == kOthersPart) BlockSync();
    if (T::k.part == kOthersPart) {
      extent_.kv_len = SegmentTable<T>::Length(p_, shared_ + at_.tables);
    }
    if (T::k.q_hadamard == 0) {
      LoadQueries();
    } else {
      LoadRotatedQueries();
    }
    const ColumnRange tiles = TilesOfSplit();
    RowState state = RowState::Empty();
    typename Products::Output output;
    KVANT_UNROLL
    for (i32 n = 0; n < T::k.v_block / 8; ++n) {
      KVANT_UNROLL
      for (i32 e = 0; e < 4; ++e) output[n][e] = 0.f;
    }
    if (T::k.probs_type == kNone) {
      Sweep(tiles, true, [&](typename Products::Scores& s, i32 token, SharedAddress v) {
        float factor[2];
        state.Add(s, Products::TokenTiles(), Headroom(), factor);
        // Maxima of later tiles are seldom new.
        if (Any(factor[0] != 1.f || factor[1] != 1.f)) {
          KVANT_UNROLL
          for (i32 n = 0; n < T::k.v_block / 8; ++n) {
            KVANT_UNROLL
            for (i32 e = 0; e < 4; ++e) output[n][e] *= factor[e / 2];
          }
        }
        Probabilities(s, state);
        ApplyDropout(dropout, token, s);
        Products::Values(s, v, token_, output);
      });
      state.SumLanes();
    } else {
      RunInTwoPasses(tiles, dropout, state, output);
    }
    return End(state, output);
  }

  KVANT_DEVICE void FillEntries(const SegmentTraits& traits, const SegmentParams& segment,
                                i32 at) const {
    if (!traits.codebook_table) return;
    if (T::k.arithmetic != kByF16) return CodebookTable::FillInTwo(segment, shared_ + at);
    CodebookTable::Fill(segment, CodebookTable::FactorsOf(segment).entries, shared_ + at);
  }

  // Probabilities must be final before they are rounded: first the sums alone, then the scores once
  // more.
  KVANT_DEVICE void RunInTwoPasses(const ColumnRange& tiles, const Dropout& dropout,
                                   RowState& state, typename Products::Output& output) {
    Sweep(tiles, false, [&](typename Products::Scores& s, i32, SharedAddress) {
      float factor[2];
      state.Add(s, Products::TokenTiles(), /*headroom=*/0.f, factor);
      Probabilities(s, state);
    });
    state.SumLanes();
    float divisor[2];
    for (i32 h = 0; h < 2; ++h) {
      Ending::AddSink(p_, position_[h], state.max[h], state.sum[h]);
      // Of an empty row, the end decides what the output is.
      divisor[h] = state.sum[h] == 0.f ? 1.f : state.sum[h];
    }
    Sweep(tiles, true, [&](typename Products::Scores& s, i32 token, SharedAddress v) {
      ForEach(s, [&](float& x, i32 h, i32) { x = Divide(ExpAbove(x, state.max[h]), divisor[h]); });
      ApplyDropout(dropout, token, s);
      ForEach(s, [&](float& x, i32, i32) { x = RoundProbability(x); });
      Products::Values(s, v, token_, output);
    });
  }

  KVANT_DEVICE float RoundProbability(float x) const {
    const RoundingParams& rounding = p_.probs_rounding;
    if (x != x) {
      return IsF8(T::k.probs_type) ? x : (0.f - rounding.zero_point) * rounding.scale;
    }
    const float code = RoundedCode(T::k.probs_type, rounding, x);
    const float rounded = BitsOf(T::k.probs_type) == 32
                              ? code
                              : CodeToFloat(T::k.probs_type, FloatToCode(T::k.probs_type, code));
    return (rounded - rounding.zero_point) * rounding.scale;
  }

  // use(x, h, column of the warp's tokens) for every score of a lane; h: which of its two rows.
  template <class Use>
  KVANT_DEVICE static void ForEach(typename Products::Scores& s, Use use) {
    const i32 c = LaneIndex() % 4;
    KVANT_UNROLL
    for (i32 j = 0; j < Products::TokenTiles(); ++j) {
      KVANT_UNROLL
      for (i32 e = 0; e < 4; ++e) use(s[j][e], e / 2, j * 8 + 2 * c + e % 2);
    }
  }

  // Dropout's factor would take probabilities beyond f16.
  KVANT_DEVICE static constexpr float Headroom() {
    return T::k.arithmetic == kByF16 && !T::k.dropout ? kHeadroomOfF16 : 0.f;
  }

  KVANT_DEVICE static void Probabilities(typename Products::Scores& s, RowState& state) {
    // Of scores of a million a rough offset would be off by whole powers of two.
    const auto far = [](float max) { return Abs(max) > 1e6f && Abs(max) < Infinity(); };
    if (T::k.arithmetic == kByF32 || Any(far(state.max[0]) || far(state.max[1]))) {
      ForEach(s, [&](float& x, i32 h, i32) {
        x = ExpAbove(x, state.max[h]);
        state.sum[h] += x;
      });
    } else {
      ForEach(s, [&](float& x, i32 h, i32) {
        x = RoughExpAbove(x, state.max[h]);
        state.sum[h] += x;
      });
    }
  }

  KVANT_DEVICE void ApplyDropout(const Dropout& dropout, i32 token, typename Products::Scores& s) {
    if (!T::k.dropout) return;
    const u64 first[2] = {Dropout::RowIndex(p_, position_[0]), Dropout::RowIndex(p_, position_[1])};
    ForEach(s, [&](float& x, i32 h, i32 col) {
      x = dropout.Keeps(first[h] + static_cast<u64>(token + col)) ? x * dropout.factor : 0.f;
    });
  }

  KVANT_DEVICE void WriteDropoutMask(const Dropout& dropout) const {
    for (i32 r = 0; r < block_.rows; ++r) {
      const Position at = block_.At(r);
      const u64 first = Dropout::RowIndex(p_, at);
      for (i32 col = ThreadIndex(); col < p_.kv_len; col += Threads(T::k)) {
        StoreElement(T::k.dropout_mask.type, p_.dropout_mask.data,
                     IndexOf(T::k.dropout_mask, p_.dropout_mask, at, col),
                     dropout.Keeps(first + static_cast<u64>(col)) ? 1.f : 0.f);
      }
    }
  }

  KVANT_DEVICE void LoadQueries() const {
    const TileLayout layout = TileLayout::Of(T::k.arithmetic, T::k.head_size);
    const i32 per_row = layout.channels / 8;
    for (i32 i = ThreadIndex(); i < Ending::Rows() * per_row; i += Threads(T::k)) {
      const i32 r = i / per_row, d = i % per_row * 8;
      float values[8] = {};
      if (r < block_.rows && d < T::k.head_size) {
        LoadValues(T::k.q, p_.q, SegmentTable<T>::CodebookOfQueries(shared_ + at_.tables),
                   block_.At(r), d, kCol, T::k.head_size, values);
      }
      if (Keys::Order().span == ChannelOrder::AsTheyAre().span) {
        StoreValues(T::k.arithmetic, layout, shared_ + at_.q, r, d, kCol, values);
        continue;
      }
      KVANT_UNROLL
      for (i32 e = 0; e < 8; ++e) {
        const i32 place = Keys::Order().PlaceOf(d + e);
        StoreValue(T::k.arithmetic, layout, shared_ + at_.q, r, place, values[e]);
      }
    }
  }

  // Sums over a run less its length, rather than its root: f16 has room for those of all queries.
  // Scores make up for it.
  KVANT_DEVICE void LoadRotatedQueries() const {
    constexpr i32 kSlots = CeilDiv(T::kMax.head_size, 32);
    const TileLayout layout = TileLayout::Of(T::k.arithmetic, T::k.head_size);
    const SharedAddress codebook = SegmentTable<T>::CodebookOfQueries(shared_ + at_.tables);
    KVANT_NO_UNROLL
    for (i32 r = WarpIndex(); r < Ending::Rows(); r += Threads(T::k) / 32) {
      const Position at = block_.At(r);
      float x[kSlots];
      KVANT_UNROLL
      for (i32 s = 0; s < kSlots; ++s) {
        const i32 d = s * 32 + LaneIndex();
        const bool exists = r < block_.rows && d < T::k.head_size;
        x[s] = exists ? LoadValue(T::k.q, p_.q, codebook, at, d) : 0.f;
      }
      Rotate(T::k.q_hadamard, 1.f / static_cast<float>(T::k.q_hadamard), x);
      KVANT_UNROLL
      for (i32 s = 0; s < kSlots; ++s) {
        const i32 d = s * 32 + LaneIndex();
        if (d >= layout.channels) continue;
        StoreValue(T::k.arithmetic, layout, shared_ + at_.q, r, Keys::Order().PlaceOf(d), x[s]);
      }
    }
  }

  KVANT_DEVICE i32 Split() const { return static_cast<i32>(BlockIndex() % p_.split.splits); }

  // The tiles of tokens that any row may see, and of these the split's share.
  KVANT_DEVICE ColumnRange TilesOfSplit() const {
    ColumnRange live{extent_.kv_first, extent_.kv_len};
    if (Steps::Hides()) {
      const SharedAddress ranges = shared_ + at_.factors;
      if (ThreadIndex() < Ending::Rows()) {
        const ColumnRange row = Steps(p_, block_.At(ThreadIndex()), extent_).Live();
        const bool any = row.begin < row.end;
        StoreShared64(ranges + ThreadIndex() * 8,
                      {{static_cast<u32>(any ? row.begin : extent_.kv_len),
                        static_cast<u32>(any ? row.end : 0)}});
      }
      BlockSync();
      live = {extent_.kv_len, 0};
      for (i32 r = 0; r < block_.rows; ++r) {
        const Words2 row = LoadShared64(ranges + r * 8);
        live.begin = MinOf(live.begin, static_cast<i32>(row.v[0]));
        live.end = MaxOf(live.end, static_cast<i32>(row.v[1]));
      }
    }
    const i32 first = live.begin / T::k.tile;
    const i32 count = MaxOf(0, CeilDiv(live.end, T::k.tile) - first);
    const i32 share = CeilDiv(count, p_.split.splits);
    const i32 split = Split();
    return {first + MinOf(count, split * share), first + MinOf(count, (split + 1) * share)};
  }

  // The columns that no band changes for any row of the warp.
  KVANT_DEVICE static ColumnRange InBandsOfWarp(const Steps (&steps)[2]) {
    const ColumnRange a = steps[0].InBands(), b = steps[1].InBands();
    ColumnRange inside{MaxOf(a.begin, b.begin), MinOf(a.end, b.end)};
    KVANT_UNROLL
    for (i32 mask = 4; mask < 32; mask *= 2) {
      inside.begin =
          MaxOf(inside.begin, static_cast<i32>(ShuffleXor(static_cast<u32>(inside.begin), mask)));
      inside.end =
          MinOf(inside.end, static_cast<i32>(ShuffleXor(static_cast<u32>(inside.end), mask)));
    }
    return inside;
  }

  // For each tile, computes this warp's scores and calls use(scores, its first token, where the V
  // tile lies).
  template <class Use>
  KVANT_DEVICE void Sweep(const ColumnRange& tiles, bool values, Use use) {
    const Position batch{block_.b0, block_.b1, block_.b2, 0};
    const ColumnRange exist{extent_.kv_first, extent_.kv_len};
    Keys keys(p_, shared_ + at_.k, shared_ + at_.tables, shared_ + at_.k_entries, batch, exist, 0);
    Values outputs(p_, shared_ + at_.v, shared_ + at_.tables, shared_ + at_.v_entries, batch, exist,
                   channel_);
    const bool loads_values = values && !T::k.v_in_k;
    if (tiles.begin < tiles.end) {
      BlockSync();  // the last sweep is done with the tiles, and tables are written
      keys.Start(tiles.begin);
      if (loads_values) outputs.Start(tiles.begin);
      CopyAsyncCommit();
    }
    const Steps steps[2] = {Steps(p_, position_[0], extent_), Steps(p_, position_[1], extent_)};
    const ColumnRange inside = InBandsOfWarp(steps);
    KVANT_NO_UNROLL
    for (i32 tile = tiles.begin; tile < tiles.end; ++tile) {
      const bool more = tile + 1 < tiles.end;
      BlockSync();  // all warps are done with the tiles, and with what was copied for the last
      keys.Advance(tile, more);
      if (loads_values) outputs.Advance(tile, more);
      CopyAsyncCommit();
      CopyAsyncWait<1>();
      BlockSync();
      keys.Prepare(tile, more);
      if (loads_values) outputs.Prepare(tile, more);
      // Scores of what does not exist are set below, but V is multiplied by their weights of 0.
      const bool leaves = T::k.v_in_k ? Keys::LeavesMissing() : Values::LeavesMissing();
      if (leaves && values && Any(!keys.IsWhole(tile))) {
        if (T::k.v_in_k) {
          keys.ClearMissing(tile);
        } else {
          outputs.ClearMissing(tile);
        }
      }
      if (Keys::Prepares() || (!T::k.v_in_k && Values::Prepares())) BlockSync();
      typename Products::Scores scores;
      Products::Keys(shared_ + at_.q, row_, keys.tile(tile), token_, scores);
      if (T::k.q_hadamard != 0) {
        ForEach(scores, [&](float& x, i32, i32) { x *= RootOf(T::k.q_hadamard); });
      }
      const i32 first = tile * T::k.tile + token_;
      if (inside.begin <= first && first + T::k.tile / T::k.token_warps <= inside.end) {
        ForEach(scores, [&](float& x, i32 h, i32 col) {
          x = steps[h].template Apply<true>(p_, first + col, x);
          if (T::k.arithmetic != kByF32) x = Steps::Bounded(x);
        });
      } else {
        ForEach(scores, [&](float& x, i32 h, i32 col) {
          const i32 token = first + col;
          const bool exists =
              token < extent_.kv_len && (!T::k.has_first || extent_.kv_first <= token);
          x = exists ? steps[h].template Apply<false>(p_, token, x) : -Infinity();
          if (T::k.arithmetic != kByF32) x = Steps::Bounded(x);
        });
      }
      use(scores, first,
          T::k.v_in_k ? Products::ValueLayout().At(keys.tile(tile), 0, channel_)
                      : outputs.tile(tile));
    }
    CopyAsyncWait<0>();
  }

  KVANT_DEVICE bool End(const RowState& state, const typename Products::Output& output) {
    const i32 rows = Ending::Rows();
    const SharedAddress states = shared_, factors = shared_ + at_.factors;
    BlockSync();  // tiles are done with
    const i32 g = LaneIndex() / 4, c = LaneIndex() % 4;
    const ChannelOrder order = T::k.v_in_k ? Keys::Order() : Values::Order();
    const SharedAddress mine = states + WarpIndex() % T::k.token_warps * Ending::StateFloats() * 4;
    KVANT_UNROLL
    for (i32 h = 0; h < 2; ++h) {
      const i32 r = row_ + g + 8 * h;
      if (c == 0) {
        StoreSharedFloat(mine + r * 4, state.max[h]);
        StoreSharedFloat(mine + (rows + r) * 4, state.sum[h]);
      }
      KVANT_UNROLL
      for (i32 n = 0; n < T::k.v_block / 8; ++n) {
        const i32 channel = order.ChannelAt(n * 8 + 2 * c);
        const SharedAddress at = mine + (2 * rows + r * T::k.v_block + channel) * 4;
        StoreSharedFloat(at, output[n][2 * h]);
        StoreSharedFloat(at + order.span / 2 * 4, output[n][2 * h + 1]);
      }
    }
    BlockSync();
    if (T::k.token_warps > 1) {
      Ending::JoinWarps(T::k.token_warps, states, factors);
    }
    const i32 splits = p_.split.splits;
    const i64 tile = BlockIndex() / splits;
    if (splits > 1 &&
        !Ending::JoinSplits(p_, tile * splits, Split(), splits, tile, states, factors)) {
      return false;
    }
    if (T::k.part == kWhole) {
      Ending::StoreRows(p_, block_, channel_, states, T::k.probs_type != kNone);
    } else {
      Ending::LeaveRows(p_, block_, channel_, states);
    }
    return true;
  }

  const AttentionParams& p_;
  const SharedAddress shared_;
  const AttentionShared at_;
  BlockRows block_;
  Extent extent_;
  i32 channel_;
  i32 row_, token_;       // the warp's first, in the block's rows and in a tile
  Position position_[2];  // of the lane's rows
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_ATTENTION_TILES_H_
