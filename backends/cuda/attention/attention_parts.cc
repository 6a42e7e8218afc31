#include "kvant/backends/cuda/attention/attention_parts.h"

#include <algorithm>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kvant/backends/cuda/attention/codes_plan.h"

namespace kvant::cuda {
namespace {

// Fewer codes go by tiles with the other tokens.
constexpr int64_t kFewestTokens = 512;
// Tokens that tiles have, for which their splits are planned, or more where there is room for more.
constexpr int64_t kOtherTokens = 256;
// A token by tiles takes as long as so many of packed codes (bench/results/static: u4 in groups).
constexpr double kCostOfTiles = 8;

using Segments = absl::InlinedVector<KvSegment, 1>;

int LongestOf(const Segments& segments) {
  const auto longest = std::max_element(
      segments.begin(), segments.end(),
      [](const KvSegment& a, const KvSegment& b) { return a.tokens() < b.tokens(); });
  return static_cast<int>(longest - segments.begin());
}

// Whether it is the same for every column: parts count them from 0 each.
bool IgnoresColumns(const ScoreStep& step) {
  using Kind = ScoreStep::Kind;
  if (step.kind == Kind::kSelect || step.kind == Kind::kBand || step.kind == Kind::kAlibi) {
    return false;
  }
  const View& view = step.operand.view;
  return !view.present() || view.on_host || view.dims[kCol] == 1;
}

// Of a spec of several segments: why it does not go in parts, or empty.
std::string WhyNotParts(const AttentionSpec& spec) {
  for (const Segments* side : {&spec.k, &spec.v}) {
    if (side->size() >= kMaxSegments) return absl::StrCat("there are ", side->size(), " segments");
    const bool has_ranges = std::all_of(side->begin(), side->end(), [](const KvSegment& segment) {
      return segment.range.present();
    });
    if (!has_ranges) return "segments have no ranges";
  }
  if (spec.kv_lengths.present() || spec.kv_first.present()) return "there are lengths";
  if (spec.query_offsets.present()) return "queries are ragged";
  if (spec.dropout) return "there is dropout";
  if (spec.probs_quantization) return "probabilities are rounded";
  if (!std::all_of(spec.steps.begin(), spec.steps.end(), IgnoresColumns)) {
    return "scores depend on their columns";
  }
  const int64_t tokens =
      std::min(spec.k[LongestOf(spec.k)].tokens(), spec.v[LongestOf(spec.v)].tokens());
  if (tokens >= kFewestTokens) return "";
  return absl::StrCat("the longest segments have ", tokens, " tokens, less than ", kFewestTokens);
}

AttentionSpec CodesOf(const AttentionSpec& spec) {
  AttentionSpec part = spec;
  part.k = {spec.k[LongestOf(spec.k)]};
  part.v = {spec.v[LongestOf(spec.v)]};
  part.kv_len = part.k[0].tokens();
  return part;
}

AttentionSpec OthersOf(const AttentionSpec& spec) {
  AttentionSpec part = spec;
  const auto twice = [](const Segments& segments) {
    Segments all = segments;
    const int codes = LongestOf(segments);
    all.insert(all.begin() + codes, segments[codes]);
    return all;
  };
  part.k = twice(spec.k);
  part.v = twice(spec.v);
  const auto others = [](const Segments& segments) {
    int64_t tokens = 0;
    for (const KvSegment& segment : segments) tokens += segment.tokens();
    return tokens - segments[LongestOf(segments)].tokens();
  };
  // Of the codes' segment there are few.
  part.kv_len = std::max(kOtherTokens, std::min(others(spec.k), others(spec.v)));
  return part;
}

i32 CountersOf(const AttentionPlan& plan) {
  return static_cast<i32>((plan.scratch_bytes - plan.partial_bytes) / sizeof(u32));
}

// Makes one launch of both plans.
void JoinPlans(PartsPlan& plan) {
  const AttentionPlan &codes = plan.codes, &others = plan.others;
  AttentionParams& p = plan.params = others.params;
  plan.binding = others.binding;
  const int64_t groups =
      int64_t{p.batch[0]} * p.batch[1] * (others.traits.kv_varies_over_b2 ? p.batch[2] : 1);
  const int64_t rows = int64_t{p.batch[0]} * p.batch[1] * p.batch[2] * p.q_len;
  constexpr int64_t kAligned = 64;  // floats
  const int64_t left = kParts * rows * (others.traits.v_head_size + 2);
  p.split.partials = (left + kAligned - 1) / kAligned * kAligned;
  p.split.done = static_cast<i32>(groups);
  p.codes_split = {p.split.partials + static_cast<int64_t>(others.partial_bytes / sizeof(float)),
                   p.split.done + CountersOf(others), codes.params.split.splits};
  p.codes_block = static_cast<i32>(others.blocks);
  plan.blocks = others.blocks + codes.blocks;
  plan.partial_bytes =
      static_cast<size_t>(p.codes_split.partials) * sizeof(float) + codes.partial_bytes;
  plan.scratch_bytes = plan.partial_bytes +
                       static_cast<size_t>(p.codes_split.done + CountersOf(codes)) * sizeof(u32);
}

}  // namespace

double PartsPlan::rounding() const {
  const i32 output = others.traits.output.type;
  return std::max(codes.rounding(output), others.rounding(output));
}

std::string PartsPlan::ToString() const {
  return absl::StrCat(codes.ToString(), ", joined with those of other segments by ",
                      others.ToString());
}

std::optional<PartsPlan> PlanParts(const AttentionSpec& spec, const DeviceProperties& device,
                                   std::string& why_not) {
  if (!WhyUnsupported(spec).empty() || (spec.k.size() <= 1 && spec.v.size() <= 1)) {
    return std::nullopt;
  }
  why_not = WhyNotParts(spec);
  if (!why_not.empty()) return std::nullopt;
  PartsPlan plan;
  const auto set = [&why_not](absl::StatusOr<AttentionPlan> planned, AttentionPlan& part) {
    why_not = planned.ok() ? planned->why_not_codes : std::string(planned.status().message());
    if (planned.ok()) part = *std::move(planned);
    return why_not.empty();
  };
  const AttentionSpec codes = CodesOf(spec), others = OthersOf(spec);
  const double of_tiles = kCostOfTiles * static_cast<double>(others.kv_len);
  const double share = of_tiles / (of_tiles + static_cast<double>(codes.kv_len));
  if (!set(PlanCodesPart(codes, 1 - share, kAnyBlocks, device), plan.codes)) return std::nullopt;
  // As many blocks of a multiprocessor as codes are to have, or the most that tiles leave room for.
  int blocks = plan.codes.blocks_per_multiprocessor;
  while (!set(PlanOthersPart(others, share, blocks, device), plan.others) && --blocks > 0) {
  }
  if (!why_not.empty()) return std::nullopt;
  if (blocks < plan.codes.blocks_per_multiprocessor) {
    set(PlanCodesPart(codes, 1 - share, blocks, device), plan.codes);
  }
  if (plan.others.blocks + plan.codes.blocks > kMaxBlocks) {
    why_not = absl::StrCat("blocks are ", plan.others.blocks, " and ", plan.codes.blocks,
                           ", more than ", kMaxBlocks);
  } else if (plan.others.threads != plan.codes.threads) {
    why_not = absl::StrCat("blocks of tiles have ", plan.others.threads, " threads, of codes ",
                           plan.codes.threads);
  } else if (plan.others.traits.kv_varies_over_b2 != plan.codes.traits.kv_varies_over_b2) {
    why_not = "some segments, and not that of codes, differ between heads that share K and V";
  }
  if (!why_not.empty()) return std::nullopt;
  for (AttentionTraits* part : {&plan.codes.traits, &plan.others.traits}) {
    part->k_codes = LongestOf(spec.k);
    part->v_codes = LongestOf(spec.v);
  }
  JoinPlans(plan);
  return plan;
}

}  // namespace kvant::cuda
