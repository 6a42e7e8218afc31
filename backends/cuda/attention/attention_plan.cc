#include "kvant/backends/cuda/attention/attention_plan.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/backends/backend.h"
#include "kvant/backends/cuda/attention/codes_plan.h"
#include "kvant/kernels/cuda/attention_tiles.h"
#include "kvant/kernels/cuda/codes_slices.h"

namespace kvant::cuda {
namespace {

constexpr int32_t kTokenTile = 64;
constexpr int32_t kShortTokenTile = 32;
// Tokens are split into runs that are not shorter than this, and not into more than there is room
// to join.
constexpr int64_t kMinSplitTokens = 2 * kTokenTile;
constexpr int64_t kMaxSplits = 64;
constexpr int64_t kMaxPartialBytes = int64_t{256} << 20;
// With more rows, dequantizing a tile once for all of them is cheaper than reading K and V again
// for every 16.
constexpr int32_t kMostRowsOfCodes = 32;

// Warps of a block: 16 rows each, or 16 rows and a share of the tokens.
struct Warps {
  int32_t rows, tokens;
};

bool Holds(const absl::InlinedVector<KvSegment, 1>& segments, bool (*is)(DataType)) {
  return std::any_of(segments.begin(), segments.end(),
                     [is](const KvSegment& segment) { return is(segment.data.type); });
}

bool IsHalf(DataType type) { return type == kvant::kF16; }
bool IsBFloat(DataType type) { return type == kvant::kBF16; }
bool IsSingle(DataType type) { return type == kvant::kF32; }

// 16-bit products where queries, and keys and values that are stored as floats, lose nothing by
// them, or the mode permits.
Arithmetic ChooseArithmetic(const AttentionSpec& spec) {
  const auto holds = [&spec](bool (*is)(DataType)) {
    return Holds(spec.k, is) || Holds(spec.v, is);
  };
  if (IsHalf(spec.q.type) && !holds(IsBFloat) && !holds(IsSingle)) return kByF16;
  if (IsBFloat(spec.q.type) && !holds(IsSingle)) {
    // Codes, and rotated queries, mean more than the 8 bits of bf16, and maybe more than the range
    // of f16.
    const bool more =
        spec.q_hadamard > 1 || holds([](DataType type) { return type != kvant::kBF16; });
    const bool permitted =
        spec.apply_to_int && (spec.fpmath == FpMath::kBF16 || spec.fpmath == FpMath::kAny);
    return more && !permitted ? kByTF32 : kByBF16;
  }
  const bool floats_only = !IsInteger(spec.q.type) && !holds(IsInteger);
  if (!spec.apply_to_int && !floats_only) return kByF32;
  switch (spec.fpmath) {
    case FpMath::kF16:
      return kByF16;
    case FpMath::kBF16:
    case FpMath::kAny:
      return kByBF16;
    default:
      return kByF32;
  }
}

// Whether all that tiles hold is f16, or codes times f16, which f16 holds.
bool FitsF16(const AttentionTraits& t) {
  const auto fits = [](const SegmentTraits& s) {
    const bool is_f16 = s.data.type == kFloat16 && s.scales.type == kNone;
    const bool by_f16 =
        s.scales.type == kFloat16 && (!s.real_zero_points || s.zero_points.type == kFloat16);
    return is_f16 || (BitsOf(s.data.type) <= 8 && (s.scales.type == kNone || by_f16));
  };
  return fits(t.q) && std::all_of(t.k, t.k + t.k_segments, fits) &&
         std::all_of(t.v, t.v + t.v_segments, fits);
}

int64_t TilesOf(const AttentionPlan& plan) {
  const AttentionParams& p = plan.params;
  const int64_t groups =
      int64_t{p.batch[0]} * p.batch[1] * (plan.traits.kv_varies_over_b2 ? p.batch[2] : 1);
  return groups * RowTiles(plan.traits, p.rows) * ChannelBlocks(plan.traits);
}

int64_t StateBytes(const AttentionTraits& traits) {
  return int64_t{RowsOf(traits)} * (traits.v_block + 2) * static_cast<int64_t>(sizeof(float));
}

// As many as make a block for each of the slots, in one wave.
i32 SplitsFor(int64_t slots, const AttentionPlan& plan) {
  const int64_t tiles = TilesOf(plan);
  // Rounding probabilities needs the sums over all tokens first.
  if (tiles == 0 || plan.traits.probs_type != kNone) return 1;
  const int64_t sensible = plan.params.kv_len / kMinSplitTokens;
  const int64_t affordable = kMaxPartialBytes / (tiles * StateBytes(plan.traits));
  return static_cast<i32>(
      std::max<int64_t>(1, std::min({slots / tiles, sensible, affordable, kMaxSplits})));
}

// The most bytes, 16, 8 or 4, that cp.async can copy at a time from each token's row of `bytes`.
// 0: none.
int32_t CopyWidth(const SegmentTraits& traits, const SegmentParams& params, int64_t bytes) {
  const int32_t bits = BitsOf(traits.data.type);
  for (const int32_t width : {16, 8, 4}) {
    bool fits = bytes % width == 0 && params.data.offset * bits % (width * 8) == 0;
    for (int axis = 0; axis < kCol; ++axis) {
      fits &= params.data.strides[axis] * bits % (width * 8) == 0;
    }
    if (fits) return width;
  }
  return 0;
}

// How K or V comes to shared memory. channels: that a tile has room for.
void ChooseStaging(const AttentionTraits& t, int32_t segments, int32_t head_size, int32_t channels,
                   const SegmentParams& params, SegmentTraits& traits) {
  traits.staging = kLoaded;
  traits.copy_width = traits.parameters_ahead = traits.codebook_table = 0;
  const bool whole_rows = traits.contiguous == kCol && traits.vectors && head_size % 8 == 0;
  if (segments != 1 || !whole_rows || channels < head_size) return;
  const int32_t bits = BitsOf(traits.data.type);
  const int32_t width = CopyWidth(traits, params, head_size * bits / 8);
  if (width == 0 || channels * bits / 8 % width != 0) return;
  traits.copy_width = width;
  static constexpr ElementType kOperands[] = {kFloat16, kBFloat16, kFloat32, kFloat32};
  const bool as_computed = traits.data.type == kOperands[t.arithmetic];
  traits.staging = as_computed && traits.scales.type == kNone ? kInPlace : kCopied;
  if (traits.scales.type == kNone) return;
  // Parameters are read where they are used if groups are too small to read ahead, or if a tile may
  // begin or end within one, as with ranges. Nothing cuts a group of all tokens; a page has its
  // own.
  const bool of_all_tokens = traits.load != kByPages &&
                             ((traits.scales.varies | traits.zero_points.varies) >> kRow & 1) == 0;
  const bool aligned = of_all_tokens || traits.group[kRow] == 1 ||
                       (traits.load != kByRange &&
                        (t.tile % traits.group[kRow] == 0 || traits.group[kRow] % t.tile == 0));
  const GroupGrid grid = GroupGrid::Of(traits, t.tile, channels);
  const int32_t each = CeilDiv(grid.rows * grid.columns, Threads(t));
  if (aligned && each <= kMaxParametersAhead) traits.parameters_ahead = each;
}

// What a thread of the tiles kernel needs so that nothing is spilled: the output, scores, and what
// the specialisations of bench/static/kernels.py take beside them.
int RegistersNeeded(const AttentionTraits& t) {
  const int output = t.v_block / 2;
  // By f32, in two parts each.
  const int scores = t.tile / t.token_warps / (t.arithmetic == kByF32 ? 1 : 2);
  // Groups of tokens that a ring cuts are looked up for every run of channels.
  const bool looks_up =
      t.k[0].load == kByRange && t.k[0].group[kRow] > 1 && t.k[0].parameters_ahead == 0;
  const bool codebook = t.k[0].codebook != 0 || t.v[0].codebook != 0;
  return std::min(255, output + scores + 80 + (looks_up ? 24 : 0) + (codebook ? 16 : 0));
}

// Splits, and what blocks take.
void ChooseSplits(const DeviceProperties& device, AttentionPlan& plan) {
  const AttentionTraits& t = plan.traits;
  const auto resident = [&](i32 splits) {
    plan.params.split.splits = splits;
    plan.shared_bytes = static_cast<size_t>(AttentionShared::Of(t, splits).bytes);
    return BlocksPerMultiprocessor(device, plan.threads, RegistersNeeded(t), plan.shared_bytes);
  };
  plan.threads = Threads(t);
  // The source has this number, and is to be the same for all lengths. So joining splits may not
  // take the room of a block.
  const int blocks = plan.blocks_per_multiprocessor = resident(1);
  const double slots = plan.slot_share * blocks * device.multiprocessors;
  i32 splits = SplitsFor(static_cast<int64_t>(slots), plan);
  while (resident(splits) < blocks) --splits;
}

// Tables of codebooks where as many blocks have room for them.
void ChooseCodebookTables(const DeviceProperties& device, AttentionPlan& plan) {
  AttentionTraits& t = plan.traits;
  const auto takes = [&t](SegmentTraits& traits, int32_t channels, int32_t used) {
    traits.codebook_table = traits.codebook == CodebookTable::kEntries;
    traits.codebook_table = CodesAtOnce(t, traits, channels, used) > 0;
    return traits.codebook_table != 0;
  };
  const bool k = t.k[0].codebook != 0 && takes(t.k[0], t.head_size, t.head_size);
  const bool v = t.v[0].codebook != 0 && takes(t.v[0], t.v_block, t.v_head_size);
  if (!k && !v) return;
  const AttentionPlan without = plan;
  ChooseSplits(device, plan);
  if (plan.shared_bytes <= device.shared_bytes_per_block &&
      plan.blocks_per_multiprocessor == without.blocks_per_multiprocessor) {
    return;
  }
  plan = without;
  t.k[0].codebook_table = t.v[0].codebook_table = 0;
}

// What tiles may do: be copied ahead, which takes more shared memory, and serve as K and V both.
// And how many blocks a multiprocessor has to have room for.
struct TileUse {
  bool copies, v_in_k;
  int blocks;
};

// Fits the tiles into shared memory. Whether they do.
bool ChooseTiles(const DeviceProperties& device, Warps warps, int32_t tile, int32_t v_block,
                 TileUse use, AttentionPlan& plan) {
  AttentionTraits& t = plan.traits;
  AttentionParams& p = plan.params;
  t.tile = tile;
  t.row_warps = warps.rows;
  t.token_warps = warps.tokens;
  t.v_block = v_block;
  t.v_in_k = use.v_in_k &&
             ChannelBlocks(t) * v_block <= TileLayout::Of(t.arithmetic, t.head_size).channels;
  ChooseStaging(t, t.k_segments, t.head_size, t.head_size, p.k[0], t.k[0]);
  ChooseStaging(t, t.v_segments, t.v_head_size, v_block, p.v[0], t.v[0]);
  if (!use.copies) {
    for (SegmentTraits* side : {&t.k[0], &t.v[0]}) {
      side->staging = kLoaded;
      side->copy_width = side->parameters_ahead = 0;
    }
  }
  ChooseSplits(device, plan);
  if (plan.shared_bytes > device.shared_bytes_per_block) return false;
  if (plan.blocks_per_multiprocessor < use.blocks) return false;
  ChooseCodebookTables(device, plan);
  return true;
}

bool ChooseTiles(const DeviceProperties& device, TileUse use, AttentionPlan& plan) {
  AttentionTraits& t = plan.traits;
  const int32_t rows = std::max(plan.params.rows, 1);
  // Registers hold 16 rows of the output; f32 products need more beside them.
  const int32_t most = TakesF32(t.arithmetic) && t.output_hadamard <= 128 ? 128 : 256;
  const int32_t v_block = std::min(most, std::max(CeilDiv(t.v_head_size, 16), 1) * 16);
  for (const Warps warps : {Warps{8, 1}, Warps{4, 1}, Warps{2, 2}, Warps{1, 4}}) {
    if (warps.rows > 1 && rows <= warps.rows * 8) continue;
    // Twice the threads have half the registers each, too few for long heads.
    if (warps.rows == 8 && (v_block > 128 || TakesF32(t.arithmetic))) continue;
    // Rounding probabilities, every warp must have seen all tokens.
    const int32_t tokens = t.probs_type != kNone ? 1 : warps.tokens;
    for (int32_t channels = v_block; channels >= 16; channels = channels / 32 * 16) {
      // A block has whole runs of what is rotated.
      if (t.output_hadamard != 0 && channels % t.output_hadamard != 0) continue;
      if (ChooseTiles(device, {warps.rows, tokens}, kTokenTile, channels, use, plan)) return true;
    }
    // 16-bit products take tokens of a warp by 16.
    if (tokens > 2 && !TakesF32(t.arithmetic)) continue;
    if (ChooseTiles(device, {warps.rows, tokens}, kShortTokenTile, v_block, use, plan)) return true;
  }
  return false;
}

AttentionPlan Described(const AttentionSpec& spec, AttentionPart part) {
  AttentionPlan plan;
  DescribeAttention(spec, plan);
  plan.traits.part = part;
  plan.traits.arithmetic = ChooseArithmetic(spec);
  return plan;
}

absl::StatusOr<AttentionPlan> Checked(AttentionPlan plan) {
  if (plan.blocks <= kMaxBlocks) return plan;
  return NotTaken(absl::StrCat("so many tiles of the output: ", plan.blocks, " blocks, more than ",
                               kMaxBlocks));
}

absl::StatusOr<AttentionPlan> PlanForTiles(const DeviceProperties& device, int blocks,
                                           AttentionPlan plan) {
  plan.traits.kernel = kTilesKernel;
  // The bits of f16, and the range of f32: 1e4 times a code, or 1e-6, is nothing that f16 holds.
  if (plan.traits.arithmetic == kByF16 && !FitsF16(plan.traits)) plan.traits.arithmetic = kByTF32;
  const bool v_in_k = plan.traits.v_in_k != 0;
  if (!ChooseTiles(device, {true, v_in_k, blocks}, plan) &&
      !ChooseTiles(device, {false, v_in_k, blocks}, plan)) {
    return NotTaken(absl::StrCat("head sizes of ", plan.traits.head_size, " and ",
                                 plan.traits.v_head_size, ": tiles of ", plan.shared_bytes,
                                 " bytes exceed the ", device.shared_bytes_per_block,
                                 " bytes of shared memory of a block"));
  }
  const int64_t tiles = TilesOf(plan);
  plan.blocks = tiles * plan.params.split.splits;
  if (plan.params.split.splits > 1) {
    plan.partial_bytes = static_cast<size_t>(plan.blocks * StateBytes(plan.traits));
    plan.scratch_bytes = plan.partial_bytes + static_cast<size_t>(tiles) * sizeof(u32);
  }
  return Checked(std::move(plan));
}

// Whether packed codes are taken; if not, the plan says why.
bool PlanForCodes(const DeviceProperties& device, int most_blocks, AttentionPlan& plan) {
  plan.why_not_codes = plan.params.rows > kMostRowsOfCodes
                           ? absl::StrCat(plan.params.rows, " rows share K and V")
                           : WhyNotCodes(plan.traits, plan.params);
  if (!plan.why_not_codes.empty()) return false;
  const AttentionPlan described = plan;
  PlanCodes(device, most_blocks, plan);
  if (plan.shared_bytes <= device.shared_bytes_per_block) return true;
  const size_t shared_bytes = plan.shared_bytes;
  plan = described;
  plan.why_not_codes =
      absl::StrCat("tiles of ", shared_bytes, " bytes exceed the ", device.shared_bytes_per_block,
                   " bytes of shared memory of a block");
  return false;
}

}  // namespace

// Whatever magnitudes are: the kernel on packed codes does once more by f32 what would lose more.
double AttentionPlan::rounding(i32 output) const {
  const SegmentTraits &k = traits.k[0], &v = traits.v[0];
  const auto is_scaled = [](const SegmentTraits& s) { return s.scales.type != kNone; };
  switch (traits.arithmetic) {
    case kByF16:
      // Dequantized keys, entries of codebooks, rotated queries, or f32 ones where the mode permits
      // it, are rounded to f16. That is an error of 2^-12 of a score, and so of e^score: these hold
      // for scores up to some ten.
      if (traits.q_hadamard != 0) return 5e-3;
      if (traits.kernel == kCodesKernel) return k.codebook + v.codebook != 0 ? 5e-3 : 1e-3;
      return std::any_of(traits.k, traits.k + traits.k_segments, is_scaled) ||
                     std::any_of(traits.v, traits.v + traits.v_segments, is_scaled)
                 ? 5e-3
                 : 1e-3;
    case kByTF32:
      // Of outputs of bf16, 1e-3 moves those that are near the middle of two by a unit, 2^-7 at
      // most: all of them, where V has few values and so they are alike.
      return output == kBFloat16 ? 9e-3 : 5e-3;
    case kByBF16:
      return 1e-2;
    default:
      // Two f16, or two tf32, have 22 bits.
      return 2e-5;
  }
}

std::string AttentionPlan::ToString() const {
  static constexpr const char* kNames[] = {"f16", "bf16", "tf32", "f32 (3 x tf32)"};
  static constexpr const char* kCodesNames[] = {"f16", "f16", "f16", "f32 (2 x f16)"};
  static constexpr const char* kStagings[] = {"loaded", "copied", "copied in place"};
  const std::string how =
      traits.kernel == kCodesKernel
          ? absl::StrCat(
                kCodesNames[traits.arithmetic], " products of packed codes, ",
                traits.row_blocks * 8, " rows, ",
                traits.channel_warps == 1
                    ? absl::StrCat(traits.token_warps, " warps x ", traits.warp_tile,
                                   "-token tiles")
                    : absl::StrCat(traits.warp_tile, "-token tiles of slices of ", KeySlice(traits),
                                   " channels for ", traits.channel_warps, " warps",
                                   traits.v_in_k ? ", V in K" : ""))
          : absl::StrCat(kNames[traits.arithmetic], " products of tiles",
                         why_not_codes.empty()
                             ? ""
                             : absl::StrCat(" (not of packed codes: ", why_not_codes, ")"),
                         ", K ", kStagings[traits.k[0].staging], ", V ",
                         traits.v_in_k ? "in K" : kStagings[traits.v[0].staging], ", ",
                         traits.row_warps * 16, "-row x ", traits.tile, "-token tiles, ",
                         traits.row_warps, " x ", traits.token_warps, " warps");
  const i32 splits = params.split.splits;
  return absl::StrCat(how, ", ", splits, splits == 1 ? " split, " : " splits, ",
                      traits.probs_type != kNone ? "two passes, " : "",
                      (shared_bytes + 1023) / 1024, " KiB of shared memory, ",
                      blocks_per_multiprocessor, " blocks per multiprocessor, ",
                      (scratch_bytes + 1023) / 1024, " KiB scratch");
}

absl::StatusOr<AttentionPlan> PlanAttention(const AttentionSpec& spec,
                                            const DeviceProperties& device) {
  if (const std::string why = WhyUnsupported(spec); !why.empty()) {
    return NotTaken(why);
  }
  AttentionPlan plan = Described(spec, kWhole);
  if (PlanForCodes(device, kAnyBlocks, plan)) return Checked(std::move(plan));
  return PlanForTiles(device, /*blocks=*/1, std::move(plan));
}

absl::StatusOr<AttentionPlan> PlanCodesPart(const AttentionSpec& spec, double slot_share,
                                            int most_blocks, const DeviceProperties& device) {
  AttentionPlan plan = Described(spec, kCodesPart);
  plan.slot_share = slot_share;
  PlanForCodes(device, most_blocks, plan);
  return Checked(std::move(plan));
}

absl::StatusOr<AttentionPlan> PlanOthersPart(const AttentionSpec& spec, double slot_share,
                                             int blocks, const DeviceProperties& device) {
  AttentionPlan plan = Described(spec, kOthersPart);
  plan.slot_share = slot_share;
  return PlanForTiles(device, blocks, std::move(plan));
}

}  // namespace kvant::cuda
