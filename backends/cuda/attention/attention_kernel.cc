// The attention kernels, specialised.
#include <algorithm>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cuda/attention/attention_parts.h"
#include "kvant/backends/cuda/attention/attention_plan.h"
#include "kvant/backends/cuda/kernel_traits.h"
#include "kvant/kernels/cuda/attention_codes.h"
#include "kvant/kernels/cuda/tile_feed.h"

namespace kvant::cuda {
namespace {

constexpr KernelRow kKernels[] = {
#define KVANT_ATTENTION_KERNEL(entry, Class) \
  {#entry, #entry, #Class, "AttentionTraits", "AttentionParams"},
#include "kvant/backends/cuda/kernels.inc"
};
constexpr KernelRow kOfParts[] = {
#define KVANT_PARTS_KERNEL(entry, Class) \
  {#entry, #entry, #Class, "AttentionTraits", "AttentionParams"},
#include "kvant/backends/cuda/kernels.inc"
};

// Of the warps' tiles: nothing is done in a loop but what the ends of rings cut
// (CodesRing::LoadSide), which a steady round does not meet.
KernelRound RoundOfCodes(const AttentionTraits& t) {
  KernelRound round;
  round.elements = int64_t{t.token_warps} * t.warp_tile * (t.head_size + t.v_head_size);
  if (!HasRanges(t)) return round;
  const CodesLayout layout = CodesLayout::Of(t);
  for (const SideTraits& side : layout.sides) {
    if (side.bits != 0) round.loops.push_back(0);
  }
  return round;
}

// Of a tile: loops of copies, what is dequantized in a loop, of f32 products the loop over channels
// of K, and the random number of each score of a lane.
KernelRound RoundOf(const AttentionTraits& t) {
  if (t.kernel == kCodesKernel) return RoundOfCodes(t);
  KernelRound round;
  // Scores are computed anew for each block of V's channels.
  const int64_t blocks = std::max(1, CeilDiv(t.v_head_size, t.v_block));
  round.elements = int64_t{t.tile} * (t.head_size + t.v_head_size) / blocks;
  const auto add_fill = [&](const SegmentTraits& traits, i32 channels, i32 used) {
    if (CodesAtOnce(t, traits, channels, used) > 0) return;
    const i32 padded = TileLayout::Of(t.arithmetic, channels).channels;
    if (traits.staging != kInPlace) round.loops.push_back(CeilDiv(t.tile * padded / 8, Threads(t)));
  };
  const auto add_copies = [&](const SegmentTraits& traits, i32 channels) {
    if (traits.staging == kLoaded) return;
    const i32 copies = t.tile * channels * BitsOf(traits.data.type) / 8 / traits.copy_width;
    round.loops.push_back(CeilDiv(CeilDiv(copies, Threads(t)), kCopiesAtOnce));
  };
  add_copies(t.k[0], t.head_size);
  if (!t.v_in_k) add_copies(t.v[0], t.v_head_size);
  add_fill(t.k[0], t.head_size, t.head_size);
  if (!t.v_in_k) add_fill(t.v[0], t.v_block, t.v_head_size);
  if (TakesF32(t.arithmetic)) round.loops.push_back(CeilDiv(t.head_size, 16));
  if (t.dropout) round.loops.insert(round.loops.end(), t.tile / t.token_warps / 2, kPhiloxRounds);
  return round;
}

void Describe(const AttentionTraits& traits, KernelSpec& spec) {
  absl::StrAppend(&spec.source.name, "_d", traits.head_size);
  spec.round = RoundOf(traits);
}

}  // namespace

KernelSpec MakeAttentionKernel(const AttentionPlan& plan) {
  KernelSpec spec = MakeKernel(kKernels[plan.traits.kernel], {{"Traits", WordsOf(plan.traits)}},
                               plan.threads, plan.blocks_per_multiprocessor);
  spec.shared_bytes = plan.shared_bytes;
  Describe(plan.traits, spec);
  return spec;
}

KernelSpec MakePartsKernel(const PartsPlan& plan) {
  KernelSpec spec = MakeKernel(
      kOfParts[0], {{"Codes", WordsOf(plan.codes.traits)}, {"Others", WordsOf(plan.others.traits)}},
      plan.codes.threads, plan.codes.blocks_per_multiprocessor);
  spec.shared_bytes = std::max(plan.codes.shared_bytes, plan.others.shared_bytes);
  Describe(plan.codes.traits, spec);
  return spec;
}

}  // namespace kvant::cuda
