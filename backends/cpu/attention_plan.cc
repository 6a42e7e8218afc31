#include "kvant/backends/cpu/attention_plan.h"

#include <algorithm>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/backends/loops.h"
#include "kvant/kernels/cpu/attention.h"
#include "kvant/kernels/cpu/code_layout.h"
#include "kvant/kernels/cpu/code_parameters.h"
#include "kvant/kernels/cpu/kept_scores.h"
#include "kvant/kernels/cpu/scaled_rows.h"
#include "kvant/kernels/cpu/stored_heads.h"

namespace kvant::cpu {
namespace {

// Rows of a tile, of heads of 128 or less: enough to share the work of dequantizing a tile of
// tokens, few enough that queries and outputs stay in the second-level cache with them. Of longer
// heads, proportionally fewer. PairKernels have a number of their own.
constexpr int64_t kMaxRowTile = 256;
constexpr int64_t kMinRowTile = 4;
// Row tiles are made no smaller than this, and are multiples of it, so that scores are kept.
constexpr int64_t kLeastKeptRows = 32;
constexpr int64_t kUnbounded = int64_t{1} << 60;
// A Worker stands before its scratch, in lines of its own.
constexpr int64_t kFloatsOfLine = 16;
constexpr int64_t kStateFloats =
    RoundUp(CeilDiv(int64_t{sizeof(Worker)}, int64_t{sizeof(float)}), kFloatsOfLine);
// Fewer tokens that share scales by channel are a short run (KernelSet::stored_rows_of_runs).
constexpr int64_t kShortRun = 32;
// What rows cost that few queries cannot be multiplied by as they are stored, because they are
// dequantized or transposed first, or because no axis is dense; as measured, docs/cpu_codes.md.
constexpr char kPriceOfRows[] = "some 3 to 10 times as long as on rows as they are stored";
constexpr char kPriceOfElements[] = "some 15 to 30 times as long as on rows as they are stored";

Array MakeArray(const View& view) {
  Array array;
  array.buffer = view.port;
  array.type = view.type;
  array.offset = view.offset;
  for (int axis = 0; axis < kAxes; ++axis) {
    array.strides[axis] = view.dims[axis] == 1 ? 0 : view.strides[axis];
  }
  return array;
}

Array MakeConstant(DataType type, const void* data) {
  Array array;
  array.type = type;
  array.data = data;
  return array;
}

Array MakeArray(const Operand& operand) {
  return operand.constant ? MakeConstant(operand.constant->type(), operand.constant->data())
                          : MakeArray(operand.view);
}

Array MakeStatic(DataType type, const void* data, size_t count, int axis) {
  Array array = count == 0 ? Array{} : MakeConstant(type, data);
  if (axis >= 0 && count > 1) array.strides[axis] = 1;
  return array;
}

Dequantization MakeDequantization(const std::optional<Quantization>& from) {
  Dequantization how;
  if (!from) return how;
  const bool is_static = !from->scales.present();
  if (is_static) {
    how.scales =
        MakeStatic(kF32, from->static_scales.data(), from->static_scales.size(), from->static_axis);
  } else {
    how.scales = MakeArray(from->scales);
    std::ranges::copy(from->group, how.group);
  }
  if (from->zero_points.present()) {
    how.zero_points = MakeArray(from->zero_points);
    how.real_zero_points = IsFloat(from->zero_points.type);
  } else {
    how.zero_points =
        MakeStatic(kS64, from->static_zps.data(), from->static_zps.size(), from->static_axis);
  }
  return how;
}

Array MakeData(const View& view, const std::optional<Quantization>& quantization) {
  Array array = MakeArray(view);
  if (quantization && !quantization->codebook.empty()) {
    array.codebook = quantization->codebook.data();
  }
  return array;
}

Step MakeStep(const ScoreStep& from) {
  Step step;
  step.kind = static_cast<Step::Kind>(from.kind);                 // of the same table
  step.alignment = static_cast<Step::Alignment>(from.alignment);  // the same three
  step.operand = MakeArray(from.operand);
  step.condition = MakeArray(from.condition);
  step.inverted = from.inverted;
  step.lower = -std::clamp(from.left.value_or(kUnbounded), -kUnbounded, kUnbounded);
  step.upper = std::clamp(from.right.value_or(kUnbounded), -kUnbounded, kUnbounded);
  step.shift_add = MakeArray(from.shift_add);
  step.shift_sub = MakeArray(from.shift_sub);
  return step;
}

Rounding MakeRounding(const std::optional<FakeQuantize>& from) {
  return from ? Rounding{from->type, from->scale, from->zero_point, from->scale} : Rounding();
}

Segments MakeSegments(absl::Span<const KvSegment> from) {
  Segments segments;
  for (const KvSegment& one : from) {
    Segment& segment = segments.emplace_back();
    segment.data = MakeData(one.data, one.quantization);
    segment.dequantization = MakeDequantization(one.quantization);
    segment.tokens = one.data.dims[kRow];
    segment.range = MakeArray(one.range);
    segment.page_table = MakeArray(one.page_table);
  }
  return segments;
}

// Why rows of floats that are no codes are not multiplied as they are stored; empty: they are.
std::string WhyNotAsStored(const Segment& segment) {
  const Array& data = segment.data;
  if (data.strides[kCol] <= 1) return "";
  return data.strides[kRow] == 1 ? "its tokens, not channels, are side by side"
                                 : "the channels of a token are not side by side";
}

const char* PriceOf(const Segments& segments) {
  const bool apart = std::ranges::any_of(segments, [](const Segment& segment) {
    return segment.data.strides[kCol] > 1 && segment.data.strides[kRow] > 1;
  });
  return apart ? kPriceOfElements : kPriceOfRows;
}

bool VariesOverB2(const Segment& segment) {
  return segment.data.strides[2] != 0 || segment.dequantization.scales.strides[2] != 0 ||
         segment.dequantization.zero_points.strides[2] != 0;
}

// How long runs are, where queries or weights are made anew for several in half a tile.
std::string RunsInWords(int64_t run) {
  return run < kHalfTile ? absl::StrCat(" in runs of ", run, " tokens") : "";
}

// Whether it is multiplied by integer products.
bool IsOnCodes(const Segment& segment) { return segment.codes.usable && !segment.codes.floats; }

}  // namespace

Plan::Plan(const AttentionSpec& spec, const KernelSet& kernels, SoftmaxPass pass,
           std::optional<int64_t> most_rows)
    : spec_(spec), kernels_(kernels), most_rows_(most_rows) {
  problem_.pass = pass;
  Describe();
  ChooseTiles();
  ChooseProducts();
  MeasureScratch(problem_);
  worker_floats_ = kStateFloats + WorkerFloats(problem_);
  const bool may_have_few = spec_.query_offsets.port != kNoPort && !most_rows &&
                            problem_.products != Products::kBytes &&
                            problem_.products != Products::kStoredRows;
  for (const int64_t rows : {stored_rows_.of_codes, stored_rows_.others, stored_rows_.of_runs}) {
    if (!may_have_few || few_ != nullptr) break;
    auto few = std::make_unique<Plan>(spec, kernels, pass, rows);
    if (few->problem_.products == Products::kStoredRows) few_ = std::move(few);
  }
  if (few_ != nullptr) worker_floats_ = std::max(worker_floats_, few_->worker_floats_);
  partial_floats_ = RoundUp(Schedule::PartialFloats(problem_, few_problem()), kFloatsOfLine);
  const auto bytes = static_cast<int64_t>(Schedule::Bytes(problem_, few_problem()));
  schedule_floats_ = RoundUp(CeilDiv(bytes, int64_t{sizeof(float)}), kFloatsOfLine);
}

void Plan::Run(const Execution& run, float* statistics, float* scratch) const {
  float* const own = scratch + schedule_floats_;
  const int workers = run.executor.max_concurrency();
  float* const partials = own + workers * worker_floats_;
  const AttentionCall call{&problem_,          few_problem(), run.inputs.data(),
                           run.outputs.data(), partials,      statistics};
  const Schedule schedule(call, Reader{&kernels_, run.inputs.data()}, workers, scratch);
  const auto of_slot = [&](int slot) { return own + slot * worker_floats_; };
  for (int slot = 0; slot < workers; ++slot) {
    new (of_slot(slot)) Worker{.scratch = of_slot(slot) + kStateFloats};
  }
  ForEach(run.executor, schedule.turns(), [&](int64_t turn, int slot) {
    RunTurn(kernels_, call, schedule, turn,
            *std::launder(reinterpret_cast<Worker*>(of_slot(slot))));
  });
}

absl::Status Plan::Run(const Execution& run) const {
  if (problem_.v_head_size == 0) return absl::OkStatus();
  Run(run, nullptr, reinterpret_cast<float*>(run.scratch));
  return absl::OkStatus();
}

void Plan::Describe() {
  k_ = MakeSegments(spec_.k);
  v_ = MakeSegments(spec_.v);
  for (const ScoreStep& step : spec_.steps) steps_.push_back(MakeStep(step));
  AttentionProblem& p = problem_;
  std::ranges::copy(spec_.batch, p.batch);
  p.q_len = spec_.q_len;
  p.kv_len = spec_.kv_len;
  p.head_size = spec_.head_size;
  p.v_head_size = spec_.v_head_size;
  p.q = MakeData(spec_.q, spec_.q_quantization);
  p.q_dequantization = MakeDequantization(spec_.q_quantization);
  p.q_hadamard = std::max<int64_t>(spec_.q_hadamard, 1);
  p.output_hadamard = std::max<int64_t>(spec_.output_hadamard, 1);
  p.k = k_.data();
  p.v = v_.data();
  p.k_segments = static_cast<int>(k_.size());
  p.v_segments = static_cast<int>(v_.size());
  p.inf_as_zero = spec_.softmax_mode == SoftmaxMode::kInfAsZero;
  p.sinks = MakeArray(spec_.sinks);
  p.kv_lengths = MakeArray(spec_.kv_lengths);
  p.kv_first = MakeArray(spec_.kv_first);
  p.query_offsets = MakeArray(spec_.query_offsets);
  // One extent of its own, whatever that of b0.
  if (p.query_offsets.present()) p.query_offsets.strides[0] = spec_.query_offsets.strides[0];
  p.dropout = spec_.dropout.has_value();
  if (spec_.dropout) {
    p.seed = MakeArray(spec_.dropout->seed);
    p.dropout_offset = MakeArray(spec_.dropout->offset);
    p.probability = MakeArray(spec_.dropout->probability);
    p.dropout_mask = MakeArray(spec_.dropout->mask);
  }
  p.probs_rounding = MakeRounding(spec_.probs_quantization);
  p.output_rounding = MakeRounding(spec_.output_quantization);
  p.output = MakeArray(spec_.output);
  p.stats = MakeArray(spec_.stats);
  p.stats_of_empty = spec_.stats_of_empty;
  if (p.pass == SoftmaxPass::kOnline) TakeWholeNumbers();
  p.steps = steps_.data();
  p.step_count = static_cast<int>(steps_.size());
}

// Tiles of up to so many rows, of heads of 128.
void Plan::CutRows(int64_t rows) {
  AttentionProblem& p = problem_;
  constexpr int64_t kFloatsOfRow = 2 * 128;  // of a query and its output
  const int64_t cached_rows = rows * kFloatsOfRow /
                              std::max<int64_t>(1, p.head_size + p.v_head_size) / kMinRowTile *
                              kMinRowTile;
  p.row_tile = std::min(std::clamp(cached_rows, kMinRowTile, most_rows_.value_or(rows)),
                        std::max<int64_t>(1, RowsPerGroup(p, p.q_len)));
}

void Plan::ChooseTiles() {
  AttentionProblem& p = problem_;
  p.kv_varies_over_b2 = p.batch[2] > 1 && AnySegment(VariesOverB2);
  CutRows(kMaxRowTile);
  // Rounding probabilities needs the statistics over all tokens first.
  p.may_split = p.kv_len > kMinChunk && p.probs_rounding.type == kUndef;
}

void Plan::ChooseProducts() {
  AttentionProblem& p = problem_;
  const auto by_channel = [](const Segment& segment) {
    return segment.data.strides[kRow] == 1 && segment.data.strides[kCol] > 1 &&
           !segment.codes.usable && !ChannelsTakenAsStored(segment);
  };
  const auto integer = [](const Segment& segment) { return IsInteger(segment.data.type); };
  const bool bf16_will_do = (spec_.fpmath == FpMath::kBF16 || spec_.fpmath == FpMath::kAny) &&
                            (spec_.apply_to_int || !AnySegment(integer));
  const auto are_bf16 = [](const Segments& segments) {
    return std::ranges::all_of(segments,
                               [](const Segment& segment) { return segment.data.type == kBF16; });
  };
  const bool exact_keys = p.q.type == kBF16 && p.q_hadamard == 1 && are_bf16(k_);
  const bool split_probs =
      !bf16_will_do && exact_keys && are_bf16(v_) && p.pass == SoftmaxPass::kOnline;
  const bool by_pairs = kernels_.pairs != nullptr && (bf16_will_do || split_probs || is_whole_);
  const int64_t coded =
      by_pairs ? kernels_.pairs->stored_rows_of_codes : kernels_.stored_rows_of_codes;
  const int64_t others = std::min(coded, kernels_.stored_rows);
  stored_rows_ = {.of_codes = coded,
                  .others = others,
                  .of_runs = std::min(others, kernels_.stored_rows_of_runs)};
  if (has_bytes_ && kernels_.bytes != nullptr) {
    p.products = Products::kBytes;
  } else if (p.pass == SoftmaxPass::kOnline && DescribeStoredRows()) {
    p.products = Products::kStoredRows;
    p.k_by_channel = std::ranges::any_of(k_, by_channel);
    p.exact_keys = exact_keys && p.head_size % 2 == 0 && kernels_.pairs != nullptr &&
                   kernels_.pairs->qk_stored != nullptr && std::ranges::all_of(k_, TakenAsStored);
    // One tile holds all segments.
    for (Segment& segment : k_) segment.codes.usable &= !p.k_by_channel;
    for (auto* segments : {&k_, &v_}) {
      for (Segment& segment : *segments) {
        segment.joins_pages |= TakenAsStored(segment) && segment.tokens % kPageUnit == 0;
      }
    }
  } else if (by_pairs) {
    p.products = Products::kPairs;
    p.exact_keys = exact_keys;
    p.split_probs = split_probs;
    CutRows(kernels_.pairs->most_rows);
  }
  // Of fewer rows the scores are kept, but each tile of tokens is dequantized for fewer.
  const int64_t kept = KeptScores::MostRows(p) / kLeastKeptRows * kLeastKeptRows;
  if (p.products != Products::kStoredRows && kept >= kLeastKeptRows) {
    p.row_tile = std::min(p.row_tile, kept);
  }
}

// Whether stored rows are multiplied, instead of tiles: then codes are described, else not.
bool Plan::DescribeStoredRows() {
  const int64_t rows = problem_.row_tile;
  if (kernels_.qk_stored == nullptr || rows > stored_rows_.of_codes) return false;
  DescribeCodes();
  // Queries, or weights, are made anew for each run of tokens that share scales by channel.
  const auto is_coded = [](const Segment& segment) {
    return IsOnCodes(segment) && (!segment.codes.by_channel || segment.codes.run >= kTokenTile);
  };
  const auto are_coded = [&](const Segments& segments) {
    return std::ranges::any_of(segments, is_coded) &&
           std::ranges::all_of(segments, [&](const Segment& segment) {
             return is_coded(segment) || TakenAsStored(segment);
           });
  };
  const auto in_short_runs = [](const Segment& segment) {
    return segment.scaled_rows ||
           (IsOnCodes(segment) && segment.codes.by_channel && segment.codes.run < kShortRun);
  };
  if (rows <= (AnySegment(in_short_runs) ? stored_rows_.of_runs : stored_rows_.others) ||
      (are_coded(k_) && are_coded(v_))) {
    return true;
  }
  for (auto* segments : {&k_, &v_}) {
    for (Segment& segment : *segments) {
      segment.codes = {};
      segment.scaled_rows = segment.joins_pages = false;
    }
  }
  k_reason_.clear();
  v_reason_.clear();
  return false;
}

// Where stored rows are multiplied, codes are multiplied as integers if they can be.
void Plan::DescribeCodes() {
  if (kernels_.codes == nullptr) return;
  const bool takes_floats = kernels_.codes->floats != nullptr;
  const bool rounds_probs = problem_.probs_rounding.type != kUndef;
  const auto describe = [&](Segments& segments, bool keys, int64_t channels) {
    std::string first;
    for (Segment& segment : segments) {
      std::string why = cpu::DescribeCodes(channels, keys, segment);
      if (segment.codes.usable && segment.codes.floats && !takes_floats) {
        segment.codes.usable = false;
        why = absl::StrCat(segment.data.codebook == nullptr ? "f8 codes with scales"
                                                            : "codes are positions in a codebook",
                           ", on which ", kernels_.name, " has no products");
      }
      // Amplification asks for more than sums have left from which zero points are subtracted.
      const bool biased = segment.dequantization.zero_points.present() ||
                          (segment.codes.channel_major && ValueOffset(segment.codes) != 0.f);
      if (rounds_probs && biased && !problem_.whole_scores && IsOnCodes(segment)) {
        segment.codes.usable = false;
        why = "probabilities are rounded to other integers, for which zero points cost too much";
      }
      segment.scaled_rows = TakesScaledRows(segment);
      if (segment.scaled_rows && problem_.row_tile <= kMostScaledRows) why.clear();
      const bool is_coded = segment.dequantization.scales.present();
      if (!is_coded && !IsInteger(segment.data.type)) {
        why = keys && ChannelsTakenAsStored(segment) ? "" : WhyNotAsStored(segment);
      }
      if (first.empty()) first = std::move(why);
    }
    return first;
  };
  k_reason_ = describe(k_, /*keys=*/true, problem_.head_size);
  if (rounds_probs) {
    v_reason_ = "probabilities are rounded to other integers";
  } else {
    v_reason_ = describe(v_, /*keys=*/false, problem_.v_head_size);
  }
}

double Plan::rounding() const {
  const double of_few = few_ == nullptr ? 0 : few_->rounding();
  return std::max(of_few, OwnRounding());
}

double Plan::OwnRounding() const {
  // Queries, keys, values and probabilities to 8 bits each, or only probabilities, to 16.
  if (problem_.products == Products::kPairs && !is_whole_) {
    return problem_.split_probs ? kRoundingOfSplitProbs : 1e-2;
  }
  // Where probabilities are rounded, values are not on codes, and scores are as exact as f32's
  // (Amplification).
  if (problem_.probs_rounding.type != kUndef) return 0;
  return AnySegment(IsOnCodes) ? kRoundingOfCodes : 0;
}

std::string Plan::ProductsName() const {
  const auto stored = [](const Segments& segments, const std::string& reason) -> std::string {
    for (const Segment& segment : segments) {
      if (!segment.codes.usable) continue;
      if (segment.codes.floats) return "f32 products on codes";
      const std::string runs = segment.codes.by_channel ? RunsInWords(segment.codes.run) : "";
      return runs.empty() ? "integer products"
                          : absl::StrCat("integer products (scales by channel", runs, ")");
    }
    if (reason.empty()) {
      for (const Segment& segment : segments) {
        if (!segment.scaled_rows) continue;
        const std::string runs = RunsInWords(segment.dequantization.group[kRow]);
        return absl::StrCat("f32 products (scales by channel", runs, ")");
      }
      return "f32 products";
    }
    return absl::StrCat("f32 products (", reason, "), ", PriceOf(segments));
  };
  switch (problem_.products) {
    case Products::kTiles:
      return "f32 products of tiles";
    case Products::kBytes:
      return "integer products of tiles";
    case Products::kPairs:
      return is_whole_              ? "bf16 products of tiles, exact as codes are whole numbers"
             : problem_.split_probs ? "bf16 products of tiles, of probabilities as two numbers each"
                                    : "bf16 products of tiles";
    case Products::kStoredRows:
      return absl::StrCat(
          "K by ",
          problem_.k_by_channel
              ? absl::StrCat(
                    "f32 products of tiles (",
                    k_reason_.empty() ? "its tokens, not channels, are side by side" : k_reason_,
                    "), ", PriceOf(k_))
          : problem_.exact_keys ? "bf16 products"
                                : stored(k_, k_reason_),
          ", V by ", stored(v_, v_reason_));
  }
  return "";
}

std::string Plan::kernel() const {
  return absl::StrCat("cpu/", kernels_.name, " online softmax, ", ToString());
}

std::string Plan::ToString() const {
  std::string text = absl::StrCat(ProductsName(), ", ", problem_.row_tile, "-row x ",
                                  Schedule::TokenTile(problem_, problem_.kv_len), "-token tiles, ");
  if (few_ != nullptr) {
    absl::StrAppend(&text, "of sequences with at most ", few_->problem_.row_tile, " rows ",
                    few_->ProductsName(), ", ");
  }
  const auto is_small = [](const Segment& segment) {
    return segment.page_table.present() && segment.tokens % kPageUnit != 0;
  };
  if (problem_.products == Products::kStoredRows && AnySegment(is_small)) {
    absl::StrAppend(&text, "pages one by one, of no multiple of ", kPageUnit, " tokens, ");
  }
  const std::optional<int64_t> splits = Schedule::StaticSplits(problem_);
  absl::StrAppend(&text, splits ? absl::StrCat(*splits, *splits == 1 ? " split, " : " splits, ")
                                : std::string("splits by length, "));
  if (const int64_t kept = KeptScores::MostRows(problem_); RoundsProbabilities(problem_)) {
    absl::StrAppend(&text, problem_.row_tile <= kept ? "scores kept, " : "scores twice, ");
  }
  const int64_t bytes = (worker_floats_ + partial_floats_) * static_cast<int64_t>(sizeof(float));
  return absl::StrCat(text, CeilDiv(bytes, 1024), " KiB scratch");
}

}  // namespace kvant::cpu
