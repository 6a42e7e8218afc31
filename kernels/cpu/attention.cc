#include "kvant/kernels/cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <optional>
#include <type_traits>
#include <utility>

#include "kvant/kernels/cpu/arena.h"
#include "kvant/kernels/cpu/dequantize.h"
#include "kvant/kernels/cpu/finish.h"
#include "kvant/kernels/cpu/kept_scores.h"
#include "kvant/kernels/cpu/score_steps.h"
#include "kvant/kernels/cpu/tile_products.h"

namespace kvant::cpu {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr int64_t kNoTile = -1;  // in Worker::tiles

// The scratch of a row tile, and what those that take turns share: it holds nothing from one tile
// of tokens to the next.
struct Buffers : TileBuffers {
  float *shrink, *factors;  // by row
  float* operands;
  KeptScores kept;
  State state;
  Columns columns;

  Buffers(const AttentionProblem& problem, Arena& own, Arena& shared)
      : TileBuffers(problem, own, shared), kept(problem, own), columns(problem, own) {
    const int64_t rows = problem.row_tile;
    shrink = shared.Take(WholeHalves(rows));
    operands = shared.Take(2 * kTokenTile);
    factors = own.Take(rows);
    state = State::In(own, rows, problem.v_head_size);
  }
};

// The state of a chunk that is joined with those of other chunks. Each is at cache lines of its
// own.
State PartialOf(const AttentionCall& call, const Schedule::Place& place, int64_t split) {
  const AttentionProblem& problem = *place.row->problem;
  Arena arena(call.partials + place.PartialFloats(split));
  return State::In(arena, problem.row_tile, problem.v_head_size);
}

bool HasNan(const float* values, int64_t n) {
  return std::any_of(values, values + n, [](float value) { return std::isnan(value); });
}

// The first rows of a tile that may not see the same columns: without a band, one.
int64_t UnlikeRows(const AttentionProblem& problem, const RowTile& tile) {
  const bool bands = std::any_of(problem.steps, problem.steps + problem.step_count,
                                 [](const Step& step) { return step.kind == Step::Kind::kBand; });
  return bands ? tile.rows : std::min<int64_t>(tile.rows, 1);
}

// Once all columns are in `state`.
void FinishRows(const KernelSet& kernels, const AttentionCall& call,
                const AttentionProblem& problem, const RowTile& tile, State& state) {
  if (problem.pass == SoftmaxPass::kStatistics) {
    return StoreStatistics(problem, tile, state, call.statistics);
  }
  AddSinks(problem, Reader{&kernels, call.inputs}, tile, state);
  Finish(kernels, problem, tile, state, problem.pass == SoftmaxPass::kOnline, call.outputs);
}

// A tile of rows, and what is ready for all of its units: queries as the products take them.
class TileRunner {
 public:
  TileRunner(const KernelSet& kernels, const AttentionCall& call, const Schedule& schedule,
             const Schedule::Place& place, int64_t prefetched, Arena own, Arena shared)
      : kernels_(kernels),
        schedule_(schedule),
        problem_(*place.row->problem),
        reader_{&kernels, call.inputs},
        call_(call),
        place_(place),
        tile_(MakeRowTile(place)),
        buffers_(problem_, own, shared),
        products_(problem_, reader_, tile_.batch, buffers_.columns, buffers_),
        prefetched_(prefetched) {
    buffers_.columns.Read(problem_, reader_, place.b0, tile_.extent, place.row->splits);
    if (problem_.dropout) dropout_ = ReadDropout(problem_, reader_);
    LoadQueries();
  }
  TileRunner(const TileRunner&) = delete;
  TileRunner& operator=(const TileRunner&) = delete;

  // The unit whose first tile of tokens this one's has prefetched already; -1: none.
  int64_t prefetched() const { return prefetched_; }

  // Begins a chunk of the tile's columns, which is the schedule's unit `unit`; others may have been
  // before. `next`: the unit that comes after it here; -1: none that is known.
  void Begin(int64_t unit, int64_t split, int64_t next, const InTurn& in_turn) {
    split_ = split;
    if (problem_.dropout && problem_.dropout_mask.present()) WriteMaskOf(split);
    // The other splits are for more columns than there are.
    exists_ = split < buffers_.columns.chunks();
    if (!exists_) return;
    chunk_ = buffers_.columns.Chunk(split);
    FindRanges();
    if (live_.begin < live_.end && unit != prefetched_) PrefetchFirst(tile_.batch, live_);
    FindNext(next);
    state_ = joins() ? PartialOf(call_, place_, split) : buffers_.state;
    const bool by_statistics = problem_.pass == SoftmaxPass::kProbabilities;
    // What is left to subtract and divide by is 0 and 1 for every row, so that merging adds.
    std::fill_n(state_.max, tile_.rows, by_statistics ? 0.f : kNegInf);
    std::fill_n(state_.sum, tile_.rows, by_statistics ? 1.f : 0.f);
    std::fill_n(state_.out, tile_.rows * problem_.v_head_size, 0.f);
    token_ = live_.begin;
    buffers_.columns.TakeTurns(rounds() ? InTurn{} : in_turn);
    if (!rounds()) return;
    // Probabilities must be final before they are rounded: first the statistics alone, then the
    // scores once more, unless they are kept.
    buffers_.kept.Rewind();
    keeps_ = buffers_.kept.any();
    is_scored_ = false;
    while (Sweep([this](const Part& part) {
      UpdateStatistics(part);
      if (keeps_) buffers_.kept.KeepMax(part.from, part.tile.rows, part.state);
    })) {
    }
    // A NaN has the code 0. That counts in every column, also behind a band, where the zero point
    // is another.
    if (problem_.probs_rounding.zero_point != 0 && HasNan(state_.sum, tile_.rows)) {
      live_ = shared_ = chunk_;
      keeps_ = false;
    }
    AddSinks(problem_, reader_, tile_, state_);
    token_ = live_.begin;
    buffers_.kept.Rewind();
    is_scored_ = keeps_;
    buffers_.columns.TakeTurns(in_turn);
  }

  // The next tile of tokens; false: there was none left.
  bool Step() {
    return Sweep([this](const Part& part) {
      if (problem_.pass == SoftmaxPass::kProbabilities) {
        SubtractStatistics(problem_, part.tile, part.token, part.tokens, call_.statistics,
                           part.scores);
        MultiplyFinalProbabilities(part);
      } else if (rounds()) {
        MultiplyFinalProbabilities(part);
      } else {
        MultiplyOnline(part);
      }
    });
  }

  void End() {
    if (!exists_) return;
    if (rounds()) {
      Finish(kernels_, problem_, tile_, state_, /*normalize=*/false, call_.outputs);
    } else if (!joins() || JoinOthers(split_)) {
      FinishRows(kernels_, call_, problem_, tile_, state_);
    }
  }

 private:
  bool joins() const { return place_.row->splits > 1; }
  bool rounds() const { return RoundsProbabilities(problem_); }

  void PrefetchFirst(const Position& batch, const ColumnRange& columns) const {
    const int64_t end = std::min(buffers_.columns.TileEnd(columns.begin), columns.end);
    products_.PrefetchFirst(batch, columns.begin, end - columns.begin);
  }

  // What the last tile of tokens prefetches: the one after it, if the next unit, `unit`, is for the
  // same rows; else that unit's first.
  void FindNext(int64_t unit) {
    prefetched_ = -1;
    next_.reset();
    buffers_.columns.PrefetchUntil(chunk_.end);
    if (live_.begin >= live_.end || unit < 0) return;
    const Schedule::Place next = schedule_.UnitAt(unit);
    if (next.split >= buffers_.columns.chunks()) return;
    prefetched_ = unit;
    const ColumnRange chunk = buffers_.columns.Chunk(next.split);
    if (next.tile == place_.tile) return buffers_.columns.PrefetchUntil(chunk.end);
    const RowTile tile = MakeRowTile(next);
    const ColumnRange live = LiveIn(tile, chunk);
    if (live.begin < live.end) next_.emplace(tile.batch, live);
  }

  // A tile of tokens, and the rows that may see any of them: scores and state are theirs.
  struct Part {
    int64_t token = 0, tokens = 0;
    int64_t from = 0;  // among the unit's rows
    RowTile tile;
    float* scores = nullptr;
    const float* factors = nullptr;  // not null: that softmax multiplies scores by
    State state;
  };

  // Chunks are joined by twos, then twos by fours, and so on, always the same ones, by whoever has
  // made the second of two. Returns whether that was the last: `state_` is then the tile's.
  //
  //   chunk   0   1   2   3   4
  //           0---|   2---|   4
  //           0-------|       4
  //           0---------------|
  bool JoinOthers(int64_t chunk) {
    const int64_t chunks = buffers_.columns.chunks();
    for (int64_t step = 1; step < chunks; step *= 2) {
      const int64_t first = chunk & ~step, second = chunk | step;
      chunk = first;
      if (second >= chunks) continue;
      if (!schedule_.ComesSecond(place_.partial + second)) return false;
      state_ = PartialOf(call_, place_, first);
      JoinStates(kernels_, tile_.rows, problem_.v_head_size, state_,
                 PartialOf(call_, place_, second));
    }
    return true;
  }

  // The mask has all columns that there is room for.
  void WriteMaskOf(int64_t split) {
    const int64_t share = CeilDiv(problem_.kv_len, place_.row->splits);
    const ColumnRange columns{split * share, std::min((split + 1) * share, problem_.kv_len)};
    WriteDropoutMask(kernels_, problem_, dropout_, tile_, columns, call_.outputs);
  }

  void UpdateStatistics(const Part& part) {
    kernels_.softmax(part.scores, part.tile.rows, WholeHalves(part.tokens), part.factors,
                     part.state.max, part.state.sum, buffers_.shrink);
  }

  void MultiplyOnline(const Part& part) {
    UpdateStatistics(part);
    if (problem_.pass == SoftmaxPass::kStatistics) return;
    if (problem_.dropout) {
      ApplyDropout(kernels_, problem_, dropout_, part.tile, part.token, part.tokens, part.scores);
    }
    MultiplyByValues(part);
  }

  void MultiplyFinalProbabilities(const Part& part) {
    const int64_t rows = part.tile.rows;
    if (is_scored_) {
      buffers_.kept.Divisors(kernels_, part.from, rows, part.state, buffers_.shrink);
    } else {
      ExponentialsOf(kernels_, rows, WholeHalves(part.tokens), part.state, part.scores,
                     buffers_.shrink);
    }
    if (problem_.dropout) {
      ApplyDropout(kernels_, problem_, dropout_, part.tile, part.token, part.tokens, part.scores);
    }
    RoundQuotients(kernels_, problem_.probs_rounding, rows, part.tokens, buffers_.shrink,
                   part.scores);
    std::fill_n(buffers_.shrink, rows, 1.f);
    MultiplyByValues(part);
  }

  // Columns of the chunk that any row of the tile may see, those that all may, and those
  // that no band hides from any.
  void FindRanges() {
    live_ = LiveIn(tile_, chunk_);
    unbanded_ = shared_ = chunk_;
    const int64_t rows = UnlikeRows(problem_, tile_);
    for (int64_t r = 0; r < rows; ++r) {
      const Position p = tile_.At(r);
      const ColumnRange clear = UnbandedColumns(problem_, reader_, p, tile_.extent);
      unbanded_.begin = std::max(unbanded_.begin, clear.begin);
      unbanded_.end = std::min(unbanded_.end, clear.end);
      const ColumnRange row = LiveColumns(problem_, reader_, p, tile_.extent);
      shared_.begin = std::max(shared_.begin, row.begin);
      shared_.end = std::min(shared_.end, row.end);
    }
  }

  // Columns of a chunk that any row of a tile may see, from the tile of tokens on that they begin
  // in.
  ColumnRange LiveIn(const RowTile& tile, const ColumnRange& chunk) const {
    ColumnRange live{chunk.end, chunk.begin};
    const int64_t rows = UnlikeRows(problem_, tile);
    for (int64_t r = 0; r < rows; ++r) {
      const ColumnRange row = LiveColumns(problem_, reader_, tile.At(r), tile.extent);
      if (row.begin >= row.end) continue;
      live.begin = std::min(live.begin, row.begin);
      live.end = std::max(live.end, row.end);
    }
    live.begin = std::max(buffers_.columns.TileBegin(live.begin), chunk.begin);
    live.end = std::min(live.end, chunk.end);
    return live;
  }

  void LoadQueries() {
    for (int64_t r = 0; r < tile_.rows; ++r) {
      float* q = buffers_.q + r * problem_.head_size;
      DequantizeLine(reader_, problem_.q, problem_.q_dequantization, tile_.At(r), kCol,
                     problem_.head_size, q, buffers_.line);
      if (problem_.q_hadamard > 1) kernels_.hadamard(q, problem_.head_size, problem_.q_hadamard);
    }
    FoldFactors();
    float amplification = 0.f;
    const bool may_round = problem_.products == Products::kStoredRows && !problem_.whole_scores;
    for (int64_t r = 0; may_round && r < tile_.rows; ++r) {
      amplification =
          std::max(amplification, Amplification(problem_, reader_, tile_.At(r), first_step_));
    }
    products_.PrepareQueries(tile_.rows, amplification);
  }

  // Multiplies queries by the steps that scale whole rows; unless a factor is such that the order
  // of multiplications would show in more than rounding, or takes a query beyond f32, or the
  // transposed problem, whose keys these are, must have the same scores. Where products of queries
  // and keys are exact, the scores take the factors.
  void FoldFactors() {
    if (problem_.pass != SoftmaxPass::kOnline) return;
    const int leading = LeadingFactors(problem_);
    if (leading == 0) return;
    float* const factors = buffers_.factors;
    bool are_powers = true;  // of two, which leave bf16 exact
    for (int64_t r = 0; r < tile_.rows; ++r) {
      factors[r] = Factor(problem_, reader_, tile_.At(r), leading);
      const float magnitude = std::abs(factors[r]);
      if (!(magnitude > 1e-15f && magnitude < 1e15f)) return;
      // Another sign would take a query out of its bytes.
      if (problem_.products == Products::kBytes && factors[r] < 0) return;
      const float* const q = buffers_.q + r * problem_.head_size;
      if (magnitude > 1 && std::isinf(LargestMagnitude(q, problem_.head_size) * magnitude)) return;
      int exponent = 0;
      are_powers &= std::frexp(magnitude, &exponent) == 0.5f;
    }
    first_step_ = leading;
    scales_scores_ = problem_.whole_scores || (problem_.exact_keys && !are_powers);
    for (int64_t r = 0; r < tile_.rows; ++r) {
      const float factor = scales_scores_ ? std::copysign(1.f, factors[r]) : factors[r];
      factors[r] = std::abs(factors[r]);
      float* q = buffers_.q + r * problem_.head_size;
      for (int64_t d = 0; d < problem_.head_size; ++d) q[d] *= factor;
    }
  }

  // Of the next tile of tokens, computes the scores of the rows that may see any, with -inf
  // beyond the tile's tokens, and calls use(part). False: there was none left.
  template <typename Use>
  bool Sweep(Use use) {
    if (token_ >= live_.end) return false;
    const int64_t end = std::min(buffers_.columns.TileEnd(token_), live_.end);
    if (keeps_) buffers_.scores = buffers_.kept.scores();
    Part part = MakePart(token_, end - token_);
    token_ = end;
    buffers_.kept.Next();
    if (part.tile.rows == 0) return true;
    if (next_ && end == live_.end) PrefetchFirst(next_->first, next_->second);
    if (!is_scored_) {
      products_.MultiplyByKeys(part.token, part.tokens, part.from, part.tile.rows);
      ApplyStepsTo(part);
    }
    use(part);
    return true;
  }

  Part MakePart(int64_t token, int64_t n) const {
    const auto live = [&](int64_t r) {
      const ColumnRange row = LiveColumns(problem_, reader_, tile_.At(r), tile_.extent);
      return row.begin < token + n && token < row.end;
    };
    int64_t from = 0, to = tile_.rows;
    // Stored rows are multiplied by all queries or none.
    if (token < shared_.begin || shared_.end < token + n) {
      while (from < to && !live(from)) ++from;
      while (from < to && !live(to - 1)) --to;
      if (problem_.products == Products::kStoredRows && from < to) {
        from = 0;
        to = tile_.rows;
      }
    }
    Part part{token,
              n,
              from,
              tile_,
              buffers_.scores + from * kTokenTile,
              nullptr,
              state_.From(from, problem_.v_head_size)};
    part.tile.first += from;
    part.tile.rows = to - from;
    return part;
  }

  // Factors that the scores take are left to softmax where no other step is left for the tile, and
  // the scores are computed once.
  void ApplyStepsTo(Part& part) {
    const bool inside = unbanded_.begin <= part.token && part.token + part.tokens <= unbanded_.end;
    const StepRange steps = StepsLeft(problem_, first_step_, inside);
    const int64_t columns = WholeHalves(part.tokens);
    const bool is_done = steps.first == problem_.step_count;
    if (scales_scores_) {
      const float* const factors = buffers_.factors + part.from;
      if (is_done && (keeps_ || !rounds())) {
        part.factors = factors;
      } else {
        kernels_.scale({.scales = factors, .group = kTokenTile}, part.tile.rows * kTokenTile,
                       part.scores);
      }
    }
    if (is_done && part.tokens == columns) return;
    StepOperand operand{buffers_.operands};
    for (int64_t r = 0; r < part.tile.rows; ++r) {
      float* row = part.scores + r * kTokenTile;
      Position p = part.tile.At(r);
      p.at[kCol] = part.token;
      ApplySteps(problem_, reader_, steps, p, part.tokens, tile_.extent, row, operand);
      std::fill(row + part.tokens, row + columns, kNegInf);
    }
  }

  void MultiplyByValues(const Part& part) {
    products_.MultiplyByValues(part.token, part.tokens, part.from, part.tile.rows, buffers_.shrink,
                               part.state.out);
  }

  const KernelSet& kernels_;
  const Schedule& schedule_;
  const AttentionProblem& problem_;
  const Reader reader_;
  const AttentionCall& call_;
  const Schedule::Place place_;
  const RowTile tile_;
  Buffers buffers_;
  const TileProducts products_;
  DropoutState dropout_;
  // Of the chunk: which, whether there is such a one, what has been computed, and up to where.
  int64_t split_ = 0;
  bool exists_ = false;
  State state_;
  int64_t token_ = 0;
  bool keeps_ = false, is_scored_ = false;  // scores are kept; those of all columns
  ColumnRange chunk_, live_, shared_, unbanded_;
  int first_step_ = 0;
  bool scales_scores_ = false;
  int64_t prefetched_ = -1;
  // What the last tile of tokens prefetches, where that is another row tile's: its keys and values,
  // and the columns.
  std::optional<std::pair<Position, ColumnRange>> next_;
};

// A worker's scratch begins with the runners of row tiles, for which nothing has to be done in the
// end; then comes what they share, then what each has.
constexpr int64_t kRunnerFloats = CeilDiv(sizeof(TileRunner), 64) * 16;
static_assert(std::is_trivially_destructible_v<TileRunner>);

}  // namespace

void MeasureScratch(AttentionProblem& problem) {
  Arena own(nullptr), shared(nullptr);
  Buffers(problem, own, shared);
  problem.own_floats = own.used();
  problem.shared_floats = shared.used();
}

int64_t WorkerFloats(const AttentionProblem& problem) {
  return kMostInTurn * kRunnerFloats + problem.shared_floats +
         Schedule::MostInTurn(problem) * problem.own_floats;
}

void RunTurn(const KernelSet& kernels, const AttentionCall& call, const Schedule& schedule,
             int64_t index, Worker& worker) {
  const Schedule::Turn turn = schedule.TurnAt(index), next = schedule.TurnAt(index + 1);
  const AttentionProblem& problem = *turn.row->problem;
  if (worker.problem != &problem) {
    worker.problem = &problem;
    worker.tiles.fill(kNoTile);
  }
  // With several row tiles a head, neighbours in a turn may be of the same head.
  const bool heads = turn.row->tiles_of_group == 1 && !problem.kv_varies_over_b2;
  float* const shared = worker.scratch + kMostInTurn * kRunnerFloats;
  TileRunner* runners[kMostInTurn];
  for (int64_t i = 0; i < turn.count; ++i) {
    float* const at = worker.scratch + i * kRunnerFloats;
    runners[i] = std::launder(reinterpret_cast<TileRunner*>(at));
    const Schedule::Place place = schedule.UnitAt(turn.unit + i);
    if (int64_t& tile = worker.tiles[i]; tile != place.tile_id()) {
      const int64_t prefetched = tile == kNoTile ? -1 : runners[i]->prefetched();
      runners[i] = new (at)
          TileRunner(kernels, call, schedule, place, prefetched,
                     Arena(shared + problem.shared_floats + i * problem.own_floats), Arena(shared));
      tile = place.tile_id();
    }
    const bool goes_on = next.row == turn.row && i < next.count;
    runners[i]->Begin(turn.unit + i, place.split, goes_on ? next.unit + i : -1,
                      heads ? InTurn{i, turn.count} : InTurn{});
  }
  for (bool any = true; any;) {
    any = false;
    for (int64_t i = 0; i < turn.count; ++i) any |= runners[i]->Step();
  }
  for (int64_t i = 0; i < turn.count; ++i) runners[i]->End();
}

}  // namespace kvant::cpu
