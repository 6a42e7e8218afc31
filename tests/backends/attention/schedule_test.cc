// How an execution is cut into units: every token of every row once, in bounded scratch.
#include "kvant/kernels/cpu/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvant/backends/cpu/attention_plan.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"
#include "kvant/kernels/cpu/attention.h"
#include "kvant/kernels/cpu/columns.h"
#include "kvant/tests/backends/attention/harness.h"

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
    problem_.row_tile = std::min<int64_t>(of.ratio * of.q_len, 256);
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
      problem_.row_tile = std::min<int64_t>(of.ratio * problem_.q_len, 256);
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
    EXPECT_EQ(in_turn(8, kU4, by_tokens, 64), by_tokens ? 8 : 1);
    EXPECT_EQ(in_turn(8, kU4, by_tokens, 256), 1);
    EXPECT_EQ(in_turn(20, kU4, by_tokens, 16), by_tokens ? 16 : 4);
  }
}

TEST(CpuSchedule, SharingHeadsHaveTurnsForManyThreads) {
  const auto turns = [](int64_t heads, int64_t kv_len, std::vector<int32_t> lengths = {}) {
    const Scheduled made({.kv_heads = heads,
                          .kv_len = kv_len,
                          .lengths = std::move(lengths),
                          .pages = true,
                          .by_tokens = true},
                         /*workers=*/32);
    EXPECT_EQ(made.schedule().TurnAt(0).count, std::min<int64_t>(heads, 16));
    return made.schedule().turns();
  };
  EXPECT_EQ(turns(8, 32768), 32);
  EXPECT_EQ(turns(16, 32768), 32);
  EXPECT_EQ(turns(8, 8192), 32);
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

TEST(CpuSchedule, ResultsAreTheSameForAnyNumberOfThreads) {
  const Format codes{.type = kU4, .group = {1, 1, 1, 1, 8}, .scales = kF32, .zero_points = kU4};
  for (int64_t q_len : {1, 20}) {
    Case c =
        Plain({.b0 = 1, .b1 = 3, .ratio = 2, .q_len = q_len, .kv_len = 40000, .d = 16, .dv = 16},
              codes, codes);
    std::vector<char> first;
    for (int threads : {1, 2, 3, 16, 64, 256}) {
      ASSERT_TRUE(c.Run(HighestKernels(), threads).ok());
      const char* data = static_cast<const char*>(c.outputs[0].data());
      if (first.empty()) first.assign(data, data + c.outputs[0].bytes());
      EXPECT_EQ(std::memcmp(data, first.data(), first.size()), 0) << threads << " threads";
    }
    c.CompareWithOracle(1e-3);
  }
}

// One thread that stands for several, in an order of its own.
class ShuffledExecutor : public Executor {
 public:
  explicit ShuffledExecutor(uint32_t seed, int slots = 2) : slots_(slots), random_(seed) {}
  int max_concurrency() const override { return slots_; }
  void ParallelFor(int64_t n, absl::FunctionRef<void(int64_t, int)> body) override {
    std::vector<int64_t> order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    for (int64_t i : order) body(i, static_cast<int>(random_() % static_cast<uint32_t>(slots_)));
  }

 private:
  const int slots_;
  std::mt19937 random_;
};

// Chunks are joined by whoever comes second, of tiles of 2 to 32 chunks and 2 to 40 rows.
void CheckAnyOrder(const Format& format, int64_t heads) {
  for (int64_t kv_len : {257, 700, 1100, 1500, 2817, 5000, 10000}) {
    for (int64_t q_len : {1, 20}) {
      SCOPED_TRACE(testing::Message() << kv_len << " tokens, " << q_len << " queries");
      Case c = Plain(
          {.b0 = 1, .b1 = heads, .ratio = 2, .q_len = q_len, .kv_len = kv_len, .d = 16, .dv = 24},
          format, format);
      c.AddStats();
      std::vector<std::vector<char>> first;
      for (uint32_t seed = 0; seed < 8; ++seed) {
        ShuffledExecutor executor(seed);
        ASSERT_TRUE(c.Run(HighestKernels(), executor).ok());
        for (size_t o = 0; o < c.outputs.size(); ++o) {
          const char* data = static_cast<const char*>(c.outputs[o].data());
          if (seed == 0) first.emplace_back(data, data + c.outputs[o].bytes());
          EXPECT_EQ(std::memcmp(data, first[o].data(), first[o].size()), 0) << "seed " << seed;
        }
      }
      c.CompareWithOracle(IsInteger(format.type) ? 1e-3 : 2e-5);
    }
  }
}

TEST(CpuSchedule, ResultsAreTheSameInAnyOrderOfUnits) {
  CheckAnyOrder({}, 2);
  for (int64_t heads : {3, 16}) {
    CheckAnyOrder({.type = kF16, .order = Format::Order::kByToken}, heads);
    CheckAnyOrder(
        {.type = kU8, .group = {1, 1, 1, 1, 0}, .scales = kF32, .order = Format::Order::kByToken},
        heads);
  }
}

// Of pages as well, whose table has nothing behind the last that a row needs. Units ask for the
// first tile of the unit after them, which is another head's; heads of a token side by side ask for
// one another's rows.
enum class KeyFormat { kU4, kF8, kU8ByChannel, kF8ByChannel, kF16 };  // the last two: values, too
void CheckPagesInAnyOrder(int64_t heads, bool token_major, int64_t page_tokens,
                          KeyFormat format = KeyFormat::kU4, int32_t prompt = 0) {
  SCOPED_TRACE(testing::Message() << heads << " heads, pages of " << page_tokens
                                  << (token_major ? ", token-major" : "") << ", format "
                                  << static_cast<int>(format));
  constexpr int64_t kRows = 4, kSize = 32, kMost = 3000;
  const std::vector<int32_t> lengths = {3000, 1, 0, 1999};
  const int64_t pages_of_row = CeilDiv(kMost, page_tokens), all_pages = 6400 / page_tokens;
  GraphBuilder g;
  const Value length = g.Input("lengths", kS32, {kRows});
  const Value table = g.Input("table", kS32, {kRows, pages_of_row});
  const auto pool = [&](const std::string& array, DataType type, int64_t row) {
    return g.Input(array, type, {all_pages, heads, page_tokens, row},
                   token_major ? Dims{heads * page_tokens * row, row, heads * row, 1}
                               : Dims{heads * page_tokens * row, page_tokens * row, row, 1});
  };
  const auto load = [&](const std::string& name, DataType type) {
    if (type == kF16) return g.LoadPages(g.TypeCast(pool(name, type, kSize), kF32), table, length);
    const Value codes = pool(name, type, kSize), scales = pool(name + "_scales", kF32, 2);
    return g.LoadPages(
        g.DynamicDequantize(codes, scales, {.group_shape = {1, 1, 1, 16}, .type = kF32}), table,
        length);
  };
  const auto load_by_channel = [&](const std::string& name, DataType type) {
    const Dims of_page = {all_pages, heads, 1, kSize};
    const Value codes = pool(name, type, kSize);
    const Value scales = g.Input(name + "_scales", kF32, of_page);
    const GraphBuilder::DequantizeOptions how{.group_shape = {1, 1, page_tokens, 1}, .type = kF32};
    return g.LoadPages(
        type == kU8 ? g.DynamicDequantize(codes, scales, g.Input("zero_points", kU8, of_page), how)
                    : g.DynamicDequantize(codes, scales, how),
        table, length);
  };
  // With a prompt, of the last row, queries are packed.
  const std::vector<int32_t> offsets = {0, 1, 2, 3, 3 + prompt};
  const int64_t queries = prompt > 0 ? offsets[kRows] : kRows;
  const Value q =
      g.Input("q", kF32, prompt > 0 ? Dims{queries, heads, kSize} : Dims{kRows, heads, 1, kSize});
  const auto load_format = [&](const std::string& name) {
    switch (format) {
      case KeyFormat::kU8ByChannel:
        return load_by_channel(name, kU8);
      case KeyFormat::kF8ByChannel:
        return load_by_channel(name, kF8E4M3);
      case KeyFormat::kF8:
        return load(name, kF8E4M3);
      case KeyFormat::kF16:
        return load(name, kF16);
      case KeyFormat::kU4:
        break;
    }
    return load(name, kU4);
  };
  const bool both = format == KeyFormat::kF8ByChannel || format == KeyFormat::kF16;
  const Value k = load_format("k"), v = both ? load_format("v") : load("v", kU4);
  GraphBuilder::AttentionOptions options{.kv_lengths = length};
  if (prompt > 0) options.query_offsets = g.Input("offsets", kS32, {kRows + 1});
  g.Output("o", g.ScaledDotProductAttention(q, k, v, options).first);
  const Graph graph = *std::move(g).Build();

  std::mt19937 random(1);
  std::vector<std::vector<char>> memory;
  for (const TensorId id : graph.inputs()) {
    const LogicalTensor& tensor = graph.tensor(id);
    std::vector<char>& bytes = memory.emplace_back(static_cast<size_t>(tensor.memory_bytes()));
    if (tensor.type == kS32) continue;
    std::uniform_real_distribution<float> numbers(0.1f, 1.f);
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      double value = static_cast<double>(random() % 16);
      if (tensor.type == kF32 || tensor.type == kF16) value = numbers(random);
      // The products take what rounding queries lost as well from a page's second tile on.
      const int64_t token = i / kSize / (token_major ? heads : 1) % page_tokens;
      if (tensor.name == "zero_points" || (tensor.type == kU8 && token < 64)) {
        value = static_cast<double>(100 + random() % 50);
      } else if (tensor.type == kU8) {
        value = static_cast<double>(random() % 256);
      }
      StoreElement(tensor.type, bytes.data(), i, value);
    }
  }
  const auto of = [&](const std::string& name) -> std::vector<char>& {
    for (size_t i = 0; i < memory.size(); ++i) {
      if (graph.tensor(graph.inputs()[i]).name == name) return memory[i];
    }
    ADD_FAILURE() << name;
    return memory[0];
  };
  std::memcpy(of("lengths").data(), lengths.data(), lengths.size() * 4);
  if (prompt > 0) std::memcpy(of("offsets").data(), offsets.data(), offsets.size() * 4);
  std::vector<int32_t> order(all_pages), pages(kRows * pages_of_row, -1);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (int64_t row = 0, next = 0; row < kRows; ++row) {
    const int64_t own = CeilDiv(lengths[static_cast<size_t>(row)], page_tokens);
    for (int64_t i = 0; i < own; ++i) pages[row * pages_of_row + i] = order[next++];
  }
  std::memcpy(of("table").data(), pages.data(), pages.size() * 4);

  const auto run = [&](const std::string& backend, std::shared_ptr<Executor> executor) {
    const Engine engine = *Engine::Create({.backends = {backend}, .executor = std::move(executor)});
    const CompiledGraph compiled = *engine.Compile(graph);
    std::vector<ConstTensor> inputs;
    for (const std::vector<char>& bytes : memory) inputs.emplace_back(bytes.data(), bytes.size());
    std::vector<float> out(static_cast<size_t>(queries * heads * kSize), -1.f);
    const Tensor outputs[] = {{out.data(), out.size() * sizeof(float)}};
    EXPECT_TRUE(compiled.Execute(Stream(engine), inputs, outputs).ok());
    return out;
  };
  const std::vector<float> oracle = run("oracle", nullptr);
  std::vector<float> first;
  for (uint32_t seed = 0; seed < 12; ++seed) {
    const int slots = std::array{2, 3, 9, 100}[seed % 4];
    const std::vector<float> out = run("cpu", std::make_shared<ShuffledExecutor>(seed, slots));
    if (first.empty()) first = out;
    EXPECT_EQ(out, first) << "seed " << seed;
  }
  for (size_t i = 0; i < oracle.size(); ++i) ASSERT_NEAR(first[i], oracle[i], 2e-3) << i;
}

TEST(CpuSchedule, ResultsInPagesAreTheSameInAnyOrderOfUnits) {
  for (int64_t heads : {1, 3, 8, 16, 20}) {
    for (int64_t page_tokens : {16, 48, 64}) {
      for (bool token_major : {false, true}) CheckPagesInAnyOrder(heads, token_major, page_tokens);
    }
  }
  for (bool token_major : {false, true}) {
    CheckPagesInAnyOrder(8, token_major, 16, KeyFormat::kF8);
    CheckPagesInAnyOrder(8, token_major, 16, KeyFormat::kU4, /*prompt=*/200);
    CheckPagesInAnyOrder(8, token_major, 128, KeyFormat::kU8ByChannel);
    CheckPagesInAnyOrder(8, token_major, 16, KeyFormat::kF16, /*prompt=*/200);
    CheckPagesInAnyOrder(8, token_major, 48, KeyFormat::kF8ByChannel, /*prompt=*/200);
    CheckPagesInAnyOrder(16, token_major, 48, KeyFormat::kF16);
  }
}

}  // namespace
}  // namespace kvant::cpu
