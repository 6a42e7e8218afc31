#include "kvant/kernels/cpu/schedule.h"

#include <algorithm>

#include "kvant/kernels/cpu/columns.h"
#include "kvant/kernels/cpu/finish.h"

namespace kvant::cpu {
namespace {

// Tokens are cut into chunks of kFullChunk, shorter ones where those are fewer than kEnoughUnits,
// longer ones where they are more than kMostUnits: a unit costs as much as some 20 tokens beside
// its own, and 50 more for a worker that takes it elsewhere than where it ended
// (docs/cpu_kernels.md). Where heads share, these are numbers of turns of all of them.
constexpr int64_t kFullChunk = 1024;
constexpr int64_t kEnoughUnits = 64, kMostUnits = 256;
constexpr int64_t kEnoughShared = 8, kMostShared = 128;
// In the end workers wait for the last turn, so that it must be a small part of what each does.
constexpr int64_t kTurnsOfWorker = 4;
// Heads that could share and do not take so many times as long (docs/cpu_memory.md), which may cost
// more than workers that wait.
constexpr int64_t kTimesApart = 2;
// Tiles of all heads in turn are prefetched ahead, so they must fit into the second-level cache.
// Where heads prefetch one another's rows, for which all of a token must take turns, more pays.
constexpr int64_t kTurnBytes = 512 * 1024, kSharingTurnBytes = 1024 * 1024;
// So few are cut into half tiles, where few rows are multiplied as they are stored: memory would
// wait for a whole one, and then computing for memory.
constexpr int64_t kFewTokens = 2 * kTokenTile;
// Partial results of all chunks of a problem take no more floats than this.
constexpr int64_t kMaxPartialFloats = int64_t{2} << 20;

// Whether the heads of a token lie side by side.
bool LiesByTokens(const AttentionProblem& problem) {
  if (problem.k_segments == 0) return false;
  const Array& keys = problem.k[0].data;
  const int64_t head = keys.strides[problem.kv_varies_over_b2 ? 2 : 1];
  return head > 0 && head < keys.strides[kRow];
}

// Whether units go chunk by chunk: the heads of a token or of a page lie side by side.
bool GoesByChunks(const AttentionProblem& problem) {
  return LiesByTokens(problem) || (problem.k_segments > 0 && problem.k[0].page_table.present());
}

// How many tiles would take turns. Where they are of many rows, products take so long that memory
// keeps up.
int64_t WantedInTurn(const AttentionProblem& problem) {
  if (!GoesByChunks(problem) || problem.products != Products::kStoredRows) return 1;
  const int64_t rows = RowsPerGroup(problem, problem.q_len);
  return std::clamp<int64_t>(Groups(problem) * CeilDiv(rows, problem.row_tile), 1, kMostInTurn);
}

int64_t TilesThatFit(const AttentionProblem& problem, int64_t tokens) {
  const int64_t token_bits = problem.head_size * BitsOf(problem.k[0].data.type) +
                             problem.v_head_size * BitsOf(problem.v[0].data.type);
  const int64_t most_bytes = LiesByTokens(problem) ? kSharingTurnBytes : kTurnBytes;
  return std::max<int64_t>(1, most_bytes / std::max<int64_t>(tokens / 8 * token_bits, 1));
}

// How many heads of a token prefetch one another's rows when they take turns (stored_heads.h): all,
// or kMostInTurn whatever lies beside them; else 1.
int64_t Sharing(const AttentionProblem& problem) {
  const int64_t groups = Groups(problem);
  const int64_t most = std::min(Schedule::MostInTurn(problem), groups);
  if (!LiesByTokens(problem) || problem.kv_varies_over_b2) return 1;
  const Array& keys = problem.k[0].data;
  const bool dense = keys.strides[1] == problem.head_size &&
                     (keys.strides[kRow] == groups * problem.head_size || most == kMostInTurn);
  return dense && (most == groups || most == kMostInTurn) ? most : 1;
}

// Units that the tokens of all tiles are cut into.
int64_t WantedUnits(const AttentionProblem& problem, int64_t tokens) {
  const int64_t sharing = Sharing(problem);
  return std::clamp(tokens / kFullChunk, std::max(kEnoughUnits, kEnoughShared * sharing),
                    std::max(kMostUnits, kMostShared * sharing));
}

// The same of lengths that are not known, where a tile may have twice its share.
int64_t AffordableUnits(const AttentionProblem& problem, int64_t tokens) {
  const int64_t affordable = kMaxPartialFloats / (2 * Schedule::FloatsOfPartial(problem));
  return std::clamp<int64_t>(affordable, 1, WantedUnits(problem, tokens));
}

int64_t TilesOf(const AttentionProblem& problem) {
  return problem.batch[0] * Groups(problem) *
         CeilDiv(RowsPerGroup(problem, problem.q_len), problem.row_tile);
}

}  // namespace

int64_t Schedule::FloatsOfPartial(const AttentionProblem& problem) {
  Arena sizes(nullptr);
  State::In(sizes, problem.row_tile, problem.v_head_size);
  return sizes.used();
}

size_t Schedule::Bytes(const AttentionProblem& problem, const AttentionProblem* few) {
  const int64_t partials = MostPartials(problem) + (few == nullptr ? 0 : MostPartials(*few));
  return static_cast<size_t>(problem.batch[0]) * sizeof(Row) +
         static_cast<size_t>(partials) * sizeof(std::atomic<bool>);
}

int64_t Schedule::PartialFloats(const AttentionProblem& problem, const AttentionProblem* few) {
  return MostPartials(problem) * FloatsOfPartial(problem) +
         (few == nullptr ? 0 : PartialFloats(*few, nullptr));
}

std::optional<int64_t> Schedule::StaticSplits(const AttentionProblem& problem) {
  const bool ranges = problem.k_segments > 0 && problem.k[0].range.present();
  if (ranges || problem.kv_lengths.present() || problem.query_offsets.present()) {
    return std::nullopt;
  }
  const int64_t tiles = TilesOf(problem);
  if (!problem.may_split || tiles == 0) return 1;
  const int64_t affordable =
      std::max<int64_t>(1, kMaxPartialFloats / (tiles * FloatsOfPartial(problem)));
  return std::min({CeilDiv(WantedUnits(problem, tiles * problem.kv_len), tiles),
                   CeilDiv(problem.kv_len, kMinChunk), affordable});
}

// Of lengths that are not known, a tile with several splits has more than one share of the wanted
// units, and so less than twice as many splits as shares.
int64_t Schedule::MostPartials(const AttentionProblem& problem) {
  if (!problem.may_split) return 0;
  const std::optional<int64_t> splits = StaticSplits(problem);
  if (!splits) {
    // Of packed queries, how many tiles there are is not known either.
    const bool packed = problem.query_offsets.present();
    const int64_t units = AffordableUnits(problem, packed ? kMostShared * kMostInTurn * kFullChunk
                                                          : TilesOf(problem) * problem.kv_len);
    // Each sequence's last tile may have fewer rows.
    const int64_t tiles = TilesOf(problem) + (packed ? problem.batch[0] * Groups(problem) : 0);
    return std::min(2 * units, tiles * CeilDiv(problem.kv_len, kMinChunk));
  }
  return *splits == 1 ? 0 : TilesOf(problem) * *splits;
}

int64_t Schedule::TokenTile(const AttentionProblem& problem, int64_t tokens) {
  if (tokens < kFewTokens && problem.products == Products::kStoredRows) return kHalfTile;
  const int64_t wanted = WantedInTurn(problem);
  return wanted > 1 && wanted > TilesThatFit(problem, kTokenTile) ? kHalfTile : kTokenTile;
}

int64_t Schedule::MostInTurn(const AttentionProblem& problem) {
  const int64_t wanted = WantedInTurn(problem);
  return wanted == 1 ? 1
                     : std::min(wanted, TilesThatFit(problem, TokenTile(problem, problem.kv_len)));
}

Schedule::Schedule(const AttentionCall& call, const Reader& reader, int workers, void* room)
    : problem_(*call.problem),
      rows_(static_cast<Row*>(room)),
      came_(reinterpret_cast<std::atomic<bool>*>(rows_ + problem_.batch[0])),
      by_chunks_(GoesByChunks(problem_)) {
  const int64_t batch = problem_.batch[0];
  int64_t tokens = 0;  // of all tiles
  for (int64_t b0 = 0; b0 < batch; ++b0) {
    Row& row = *std::construct_at(rows_ + b0);
    row.extent = ExtentOf(problem_, reader, b0);
    const bool few =
        call.few != nullptr && RowsPerGroup(*call.few, row.extent.q_len) <= call.few->row_tile;
    row.problem = few ? call.few : call.problem;
    row.tiles_of_group = CeilDiv(RowsPerGroup(problem_, row.extent.q_len), row.problem->row_tile);
    tokens += Groups(problem_) * row.tiles_of_group * (row.extent.kv_len - row.extent.kv_first);
  }
  int64_t partials = 0, partial_floats = 0;
  const std::optional<int64_t> splits = StaticSplits(problem_);
  for (Row* row = rows_; row != rows_ + batch; ++row) {
    const int64_t columns = row->extent.kv_len - row->extent.kv_first;
    const int64_t tiles = Groups(problem_) * row->tiles_of_group;
    if (splits) {
      row->splits = *splits;
    } else if (problem_.may_split && columns > 0 && tiles > 0) {
      row->splits =
          std::clamp<int64_t>(CeilDiv(columns * AffordableUnits(*row->problem, tokens), tokens), 1,
                              CeilDiv(columns, kMinChunk));
    }
    row->unit = units_;
    row->partial = partials;
    row->partial_floats = partial_floats;
    units_ += tiles * row->splits;
    if (row->splits == 1) continue;
    partials += tiles * row->splits;
    partial_floats += tiles * row->splits * FloatsOfPartial(*row->problem);
  }
  for (int64_t i = 0; i < partials; ++i) std::construct_at(came_ + i, false);
  for (Row* row = rows_; row != rows_ + batch; ++row) {
    const int64_t tiles = Groups(problem_) * row->tiles_of_group;
    row->turn = turns_;
    if (tiles == 0) continue;
    const int64_t most = std::clamp<int64_t>(units_ / (kTurnsOfWorker * workers), 1,
                                             std::min(MostInTurn(*row->problem), tiles));
    const int64_t sharing = row->tiles_of_group == 1 ? Sharing(*row->problem) : 1;
    const int64_t rounds = CeilDiv(CeilDiv(units_, sharing), workers);
    const bool share = sharing > 1 && rounds * sharing * workers < kTimesApart * units_;
    // Else about the same in all of a chunk's turns.
    row->in_turn = share ? sharing : CeilDiv(tiles, CeilDiv(tiles, most));
    turns_ += CeilDiv(tiles, row->in_turn) * row->splits;
  }
}

Schedule::Turn Schedule::TurnAt(int64_t turn) const {
  if (turn >= turns_) return {};
  const Row* row = std::upper_bound(rows_, rows_ + problem_.batch[0], turn,
                                    [](int64_t i, const Row& r) { return i < r.turn; }) -
                   1;
  if (row->in_turn == 1) return {row, row->unit + turn - row->turn, 1};
  const int64_t tiles = Groups(problem_) * row->tiles_of_group;
  const int64_t of_chunk = CeilDiv(tiles, row->in_turn);
  const int64_t chunk = (turn - row->turn) / of_chunk;
  const int64_t first = (turn - row->turn) % of_chunk * row->in_turn;
  return {row, row->unit + chunk * tiles + first, std::min(row->in_turn, tiles - first)};
}

Schedule::Place Schedule::UnitAt(int64_t unit) const {
  // The last whose first unit is not behind it; rows without any are passed over.
  const Row* row = std::upper_bound(rows_, rows_ + problem_.batch[0], unit,
                                    [](int64_t i, const Row& r) { return i < r.unit; }) -
                   1;
  const int64_t index = unit - row->unit, tiles = Groups(problem_) * row->tiles_of_group;
  const int64_t tile = by_chunks_ ? index % tiles : index / row->splits;
  const int64_t split = by_chunks_ ? index / tiles : index % row->splits;
  return {row, row - rows_, tile, split, row->partial + tile * row->splits};
}

RowTile MakeRowTile(const Schedule::Place& place) {
  const AttentionProblem& problem = *place.row->problem;
  const int64_t group_rows = RowsPerGroup(problem, place.row->extent.q_len);
  const int64_t tiles = place.row->tiles_of_group;
  RowTile tile;
  tile.extent = place.row->extent;
  tile.first = place.tile % tiles * problem.row_tile;
  tile.rows = std::min(problem.row_tile, group_rows - tile.first);
  int64_t group = place.tile / tiles;
  if (problem.kv_varies_over_b2) {
    tile.batch.at[2] = group % problem.batch[2];
    group /= problem.batch[2];
  }
  tile.batch.at[1] = group;
  tile.batch.at[0] = place.b0;
  return tile;
}

}  // namespace kvant::cpu
