// How an execution is cut into units: every token of every row once, in bounded scratch.
#include "kvant/kernels/cpu/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "kvant/kernels/cpu/columns.h"

namespace kvant::cpu {
namespace {

// One sequence, or several with these lengths, of queries of one token.
struct Sizes {
  int64_t kv_heads = 8, ratio = 4, kv_len = 32768;
  std::vector<int32_t> lengths;
  int64_t q_len = 1;
  bool pages = false;
  DataType type = kU4;     // of keys and values, in pages
  bool by_tokens = false;  // a token's heads lie side by side there
  // Queries of each of the sequences, packed; those of up to 16 rows are another problem's.
  std::vector<int32_t> queries;
  int64_t most_rows = 256;  // of a tile
};

// A schedule and what it is for. No keys: where tokens lie does not matter here.
class Scheduled {
 public:
  explicit Scheduled(const Sizes& of, int workers = 1) : lengths_(of.lengths), offsets_{0} {
    problem_.batch[0] = lengths_.empty() ? 1 : static_cast<int64_t>(lengths_.size());
    problem_.batch[1] = of.kv_heads;
    problem_.batch[2] = of.ratio;
    problem_.q_len = of.q_len;
    problem_.kv_len = of.kv_len;
    problem_.head_size = problem_.v_head_size = 128;
    problem_.row_tile = std::min(of.ratio * of.q_len, of.most_rows);
    problem_.may_split = of.kv_len > kMinChunk;
    if (!lengths_.empty()) {
      problem_.kv_lengths.buffer = 0;
      problem_.kv_lengths.type = kS32;
      problem_.kv_lengths.strides[0] = 1;
    }
    if (of.pages) {
      keys_.page_table.buffer = 1;
      keys_.data.type = of.type;
      keys_.data.strides[kRow] = 128;
      keys_.data.strides[1] = 128 * 64;
      if (of.by_tokens) {
        keys_.data.strides[1] = 128;
        keys_.data.strides[kRow] = 128 * of.kv_heads;
      }
      problem_.k = problem_.v = &keys_;
      problem_.k_segments = problem_.v_segments = 1;
      problem_.products = Products::kStoredRows;
    }
    for (int32_t queries : of.queries) offsets_.push_back(offsets_.back() + queries);
    if (!of.queries.empty()) {
      problem_.q_len = offsets_.back();
      problem_.row_tile = std::min(of.ratio * problem_.q_len, of.most_rows);
      problem_.query_offsets.buffer = 2;
      problem_.query_offsets.type = kS32;
      problem_.query_offsets.strides[0] = 1;
      few_ = problem_;
      few_->row_tile = 16;
      problem_.products = Products::kTiles;
    }
    room_.resize(Schedule::Bytes(problem_, few()));
    inputs_ = {lengths_.data(), nullptr, offsets_.data()};
    call_ = {.problem = &problem_, .few = few(), .inputs = inputs_.data()};
    schedule_.emplace(call_, reader(), workers, room_.data());
  }

  const AttentionProblem& problem() const { return problem_; }
  const AttentionProblem* few() const { return few_ ? &*few_ : nullptr; }
  const Schedule& schedule() const { return *schedule_; }
  Reader reader() const { return {KernelsAt(0), inputs_.data()}; }
  int64_t length(int64_t b0) const {
    return lengths_.empty() ? problem_.kv_len : lengths_[static_cast<size_t>(b0)];
  }
  ColumnRange ChunkOf(const Schedule::Place& place) const {
    Arena arena(nullptr);
    Columns columns(problem_, arena);
    columns.Read(problem_, reader(), place.b0, place.row->extent, place.row->splits);
    if (place.split >= columns.chunks()) return {0, 0};
    return columns.Chunk(place.split);
  }

 private:
  AttentionProblem problem_;
  std::optional<AttentionProblem> few_;
  Segment keys_;
  std::vector<int32_t> lengths_, offsets_;
  std::vector<std::byte> room_;
  std::vector<const void*> inputs_;
  AttentionCall call_;
  std::optional<Schedule> schedule_;
};

std::vector<Sizes> ManySizes() {
  std::vector<Sizes> all;
  for (int64_t heads : {1, 3, 8, 32}) {
    for (int64_t ratio : {1, 4, 8}) {
      for (int64_t tokens : {1, 64, 257, 1000, 4096, 32768, 131072, 1000000}) {
        all.push_back({.kv_heads = heads, .ratio = ratio, .kv_len = tokens});
      }
    }
    std::vector<int32_t> mixed(32, 100);
    mixed[5] = 32768;
    all.push_back({.kv_heads = heads, .lengths = mixed});
    all.push_back({.kv_heads = heads, .lengths = {0, 1, 255, 5000, 0, 20000, 7}});
    all.push_back({.kv_heads = heads, .lengths = {0, 0}});
    all.push_back({.kv_heads = heads, .kv_len = 9000, .q_len = 500});
    all.push_back({.kv_heads = heads, .kv_len = 9000, .q_len = 500, .most_rows = 512});
    all.push_back({.kv_heads = heads, .lengths = {9000, 3}, .q_len = 500, .most_rows = 512});
  }
  return all;
}

// Decoding beside prompts: 128 sequences of one token, one of them long, and two prompts.
Sizes Ragged() {
  Sizes of{.lengths = std::vector<int32_t>(130, 100), .pages = true};
  of.queries.assign(130, 1);
  of.lengths[7] = 32768;
  of.queries[20] = 700;
  of.lengths[20] = 5000;
  of.queries[129] = 30;
  return of;
}

TEST(CpuSchedule, UnitsCoverEveryTokenOfEveryTileOnce) {
  for (const Sizes& of : ManySizes()) {
    SCOPED_TRACE(testing::Message() << of.kv_heads << " x " << of.ratio << " x " << of.kv_len);
    const Scheduled made(of);
    int64_t at = 0, b0 = 0, tile = -1;  // units go from tile to tile, and through each in order
    for (int64_t unit = 0; unit < made.schedule().units(); ++unit) {
      const Schedule::Place place = made.schedule().UnitAt(unit);
      if (place.split == 0) {
        if (tile >= 0) {
          ASSERT_EQ(at, made.length(b0));
        }
        ASSERT_GE(place.b0, b0);
        tile = place.b0 == b0 ? tile + 1 : 0;
        b0 = place.b0;
        ASSERT_EQ(place.tile, tile);
        at = 0;
      }
      const ColumnRange chunk = made.ChunkOf(place);
      if (chunk.begin == chunk.end) continue;
      ASSERT_EQ(chunk.begin, at);
      at = chunk.end;
    }
    EXPECT_EQ(at, made.length(b0));
    EXPECT_EQ(b0, made.problem().batch[0] - 1);
  }
}

// The same units, of which those of a chunk follow one another.
TEST(CpuSchedule, UnitsInPagesGoByChunks) {
  using Unit = std::array<int64_t, 4>;  // batch row, chunk, tile, partial result
  const auto units_of = [](const Sizes& of) {
    const Scheduled made(of);
    std::vector<Unit> units;
    std::set<std::pair<int64_t, int64_t>> tiles;
    std::set<int64_t> ids;
    for (int64_t unit = 0; unit < made.schedule().units(); ++unit) {
      const Schedule::Place place = made.schedule().UnitAt(unit);
      units.push_back({place.b0, place.split, place.tile, place.partial});
      tiles.emplace(place.b0, place.tile);
      ids.insert(place.tile_id());
    }
    EXPECT_EQ(ids.size(), tiles.size());
    return units;
  };
  for (Sizes of : ManySizes()) {
    SCOPED_TRACE(testing::Message() << of.kv_heads << " x " << of.ratio << " x " << of.kv_len);
    std::vector<Unit> by_tiles = units_of(of);
    of.pages = true;
    const std::vector<Unit> by_chunks = units_of(of);
    EXPECT_TRUE(std::is_sorted(by_chunks.begin(), by_chunks.end()));
    std::sort(by_tiles.begin(), by_tiles.end());
    EXPECT_EQ(by_chunks, by_tiles);
  }
}

// A turn's units follow one another and are of one chunk of one batch row. Every worker has several
// turns, where there are as many units.
TEST(CpuSchedule, TurnsTakeEveryUnitOnce) {
  int64_t most = 0;
  for (Sizes of : ManySizes()) {
    of.pages = true;
    for (int workers : {1, 2, 16, 256}) {
      SCOPED_TRACE(testing::Message() << of.kv_heads << " x " << of.ratio << " x " << of.kv_len
                                      << ", " << workers << " workers");
      const Scheduled made(of, workers);
      const Schedule& schedule = made.schedule();
      int64_t unit = 0;
      for (int64_t i = 0; i < schedule.turns(); ++i) {
        const Schedule::Turn turn = schedule.TurnAt(i);
        ASSERT_EQ(turn.unit, unit);
        ASSERT_GE(turn.count, 1);
        ASSERT_LE(turn.count, Schedule::MostInTurn(made.problem()));
        most = std::max(most, turn.count);
        const Schedule::Place first = schedule.UnitAt(unit);
        for (const int64_t end = unit + turn.count; unit < end; ++unit) {
          const Schedule::Place place = schedule.UnitAt(unit);
          ASSERT_EQ(place.row, turn.row);
          ASSERT_EQ(place.split, first.split);
        }
      }
      EXPECT_EQ(unit, schedule.units());
      EXPECT_EQ(schedule.TurnAt(schedule.turns()).count, 0);
      EXPECT_GE(schedule.turns(), std::min<int64_t>(schedule.units(), 2 * workers));
    }
  }
  EXPECT_EQ(most, kMostInTurn);
}

// Tiles of all heads in turn, of 128 channels here, must fit into a cache. Where heads of a token
// lie side by side, turns are of 16 where they can be: fewer than all do not ask for one another's.
TEST(CpuSchedule, HeadsInTurn) {
  const auto in_turn = [](int64_t heads, DataType type, bool by_tokens, int workers = 1) {
    const Scheduled made({.kv_heads = heads, .pages = true, .type = type, .by_tokens = by_tokens},
                         workers);
    return made.schedule().TurnAt(0).count;
  };
  for (bool by_tokens : {false, true}) {
    EXPECT_EQ(in_turn(16, kU4, by_tokens), 16);
    EXPECT_EQ(in_turn(16, kF16, by_tokens), 16);
    EXPECT_EQ(in_turn(16, kF32, by_tokens), by_tokens ? 16 : 8);
    EXPECT_EQ(in_turn(20, kU4, by_tokens), by_tokens ? 16 : 10);
    // Many workers have several turns each; unless that costs more than it brings.
    EXPECT_EQ(in_turn(8, kU4, by_tokens, 16), by_tokens ? 8 : 4);
    EXPECT_EQ(in_turn(8, kU4, by_tokens, 48), by_tokens ? 8 : 1);
    EXPECT_EQ(in_turn(8, kU4, by_tokens, 64), 1);
    EXPECT_EQ(in_turn(8, kU4, by_tokens, 256), 1);
    EXPECT_EQ(in_turn(20, kU4, by_tokens, 16), by_tokens ? 16 : 4);
  }
}

TEST(CpuSchedule, TilesAreHalvesOfFewTokensAndOfLargeOnesInTurn) {
  const auto tile = [](DataType type, bool pages, int64_t tokens) {
    const Scheduled made({.kv_heads = 16, .pages = pages, .type = type});
    return Schedule::TokenTile(made.problem(), tokens);
  };
  for (const bool pages : {false, true}) {
    // Where few rows are multiplied as they are stored, as here in pages.
    EXPECT_EQ(tile(kU4, pages, 2 * kTokenTile - 1), pages ? kHalfTile : kTokenTile);
    EXPECT_EQ(tile(kU4, pages, 2 * kTokenTile), kTokenTile);
    EXPECT_EQ(tile(kF16, pages, 8192), pages ? kHalfTile : kTokenTile);
  }
}

// Of few tokens every worker has a turn: one of all heads would leave the others nothing to do.
TEST(CpuSchedule, FewTokensAreForAllThreads) {
  for (const auto& [tokens, workers] : {std::pair(256, 2), std::pair(512, 4), std::pair(1024, 8)}) {
    const Scheduled made({.kv_len = tokens, .pages = true, .by_tokens = true}, workers);
    EXPECT_GE(made.schedule().turns(), workers) << tokens;
  }
}

TEST(CpuSchedule, SharingHeadsHaveTurnsForManyThreads) {
  const auto turns = [](int64_t heads, int64_t kv_len, std::vector<int32_t> lengths = {}) {
    const Scheduled made({.kv_heads = heads,
                          .kv_len = kv_len,
                          .lengths = std::move(lengths),
                          .pages = true,
                          .by_tokens = true},
                         /*workers=*/8);
    EXPECT_EQ(made.schedule().TurnAt(0).count, std::min<int64_t>(heads, 16));
    return made.schedule().turns();
  };
  EXPECT_EQ(turns(8, 32768), 32);
  EXPECT_EQ(turns(16, 32768), 32);
  EXPECT_EQ(turns(8, 8192), 8);
  EXPECT_EQ(turns(16, 8192), 8);
  EXPECT_EQ(turns(8, 131072), 128);
  EXPECT_EQ(turns(8, 32768, std::vector<int32_t>(32, 32768)), 128);
}

// Rows of few queries have small partial results, whatever the others' are: as many units as
// sequences that are not ragged.
TEST(CpuSchedule, RaggedSequencesHaveUnitsForManyThreads) {
  const auto units_of = [](const Scheduled& made, int64_t b0) {
    int64_t count = 0;
    for (int64_t unit = 0; unit < made.schedule().units(); ++unit) {
      count += made.schedule().UnitAt(unit).b0 == b0;
    }
    return count;
  };
  Sizes of = Ragged();
  const Scheduled ragged(of);
  of.queries.clear();
  const Scheduled dense(of);
  EXPECT_GE(units_of(ragged, 7), units_of(dense, 7) / 2);
  EXPECT_GE(units_of(ragged, 7), 64);
}

TEST(CpuSchedule, PartialsAreDistinctAndBounded) {
  constexpr int64_t kMostFloats = int64_t{2} << 20;
  std::vector<Sizes> all = ManySizes();
  all.push_back(Ragged());
  all.push_back(Ragged());
  all.back().by_tokens = true;
  for (const Sizes& of : all) {
    SCOPED_TRACE(testing::Message() << of.kv_heads << " x " << of.ratio << " x " << of.kv_len);
    const Scheduled made(of);
    const int64_t room = Schedule::PartialFloats(made.problem(), made.few());
    EXPECT_LE(room, (made.few() == nullptr ? 1 : 2) * kMostFloats);
    std::vector<std::pair<int64_t, int64_t>> used;  // from float to float
    std::set<int64_t> indices;
    for (int64_t unit = 0; unit < made.schedule().units(); ++unit) {
      const Schedule::Place place = made.schedule().UnitAt(unit);
      if (place.row->splits == 1) continue;
      ASSERT_TRUE(indices.insert(place.partial + place.split).second);
      const int64_t at = place.PartialFloats(place.split);
      used.emplace_back(at, at + Schedule::FloatsOfPartial(*place.row->problem));
    }
    std::sort(used.begin(), used.end());
    for (size_t i = 1; i < used.size(); ++i) ASSERT_LE(used[i - 1].second, used[i].first);
    if (used.empty()) continue;
    EXPECT_LE(used.back().second, room);
    const int64_t most = Schedule::MostPartials(made.problem()) +
                         (made.few() == nullptr ? 0 : Schedule::MostPartials(*made.few()));
    EXPECT_LT(*indices.rbegin(), most);
  }
}

TEST(CpuSchedule, LongSequencesHaveUnitsForManyThreads) {
  const auto units = [](const Sizes& of) { return Scheduled(of).schedule().units(); };
  EXPECT_EQ(units({.kv_len = 32768}), 256);
  EXPECT_EQ(units({.kv_heads = 32, .ratio = 1, .kv_len = 8192}), 256);
  EXPECT_EQ(units({.kv_len = 1000000}), 256);
  // Short ones are cut no finer than it pays.
  EXPECT_EQ(units({.kv_len = 4096}), 64);
  EXPECT_EQ(units({.kv_heads = 1, .ratio = 8, .kv_len = 32768}), 64);
  EXPECT_EQ(units({.kv_len = 1024}), 32);
  // A long one has what its share of the tokens is, whatever else there is.
  std::vector<int32_t> mixed(32, 100);
  mixed[0] = 32768;
  const int64_t of_long = units({.lengths = mixed}) - 31 * 8;
  EXPECT_GE(of_long, 192);
  EXPECT_LE(of_long, 264);
}

}  // namespace
}  // namespace kvant::cpu
