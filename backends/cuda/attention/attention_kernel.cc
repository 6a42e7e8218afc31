#include "kvant/backends/cuda/attention/attention_kernel.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/substitute.h"
#include "kvant/backends/cuda/traits_text.h"
#include "kvant/kernels/cuda/attention_codes.h"
#include "kvant/kernels/cuda/attention_tiles.h"

namespace kvant::cuda {
namespace {

// Traits for the executor: variables, and the largest that register arrays are sized by.
struct RuntimeTraits {
  static thread_local AttentionTraits k;
  static constexpr AttentionTraits kMax = [] {
    AttentionTraits most{};
    most.tile = 64;
    most.token_warps = 1;
    most.v_block = 256;
    most.step_count = kMaxSteps;
    most.arithmetic = kByF32;
    most.head_size = most.v_head_size = 256;
    most.warp_tile = 64;
    most.row_blocks = 2;
    most.side_copy = 4;
    for (SegmentTraits* side : {&most.k[0], &most.v[0]}) {
      side->parameters_ahead = kMaxParametersAhead;
      side->scales.type = side->zero_points.type = kFloat32;
      side->group[kCol] = 32;
    }
    return most;
  }();
};
thread_local AttentionTraits RuntimeTraits::k{};

constexpr char kText[] = R"(#include "kvant/kernels/cuda/$3.h"

namespace kvant::cuda {
struct Traits {
  static constexpr AttentionTraits k = {$0};
  static constexpr AttentionTraits kMax = k;
};
}  // namespace kvant::cuda

extern "C" __global__ void __launch_bounds__($1, $2)
$3(const __grid_constant__ kvant::cuda::AttentionParams params) {
  kvant::cuda::$4<kvant::cuda::Traits>::Run(params);
}
)";

// By KernelKind: the header, which is also the entry's name, the class, and the same for the
// executor.
struct KernelRow {
  const char* header;
  const char* name;
  void (*run)(const AttentionParams& params);
};
constexpr KernelRow kKernels[] = {
    {"attention_tiles", "AttentionTiles", &AttentionTiles<RuntimeTraits>::Run},
    {"attention_codes", "AttentionCodes", &AttentionCodes<RuntimeTraits>::Run},
};

// Of the warps' tiles: nothing is done in a loop but what the ends of rings cut
// (CodesRing::LoadSide), which a steady round does not meet.
KernelRound RoundOfCodes(const AttentionTraits& t) {
  KernelRound round;
  round.elements = int64_t{t.token_warps} * t.warp_tile * (t.head_size + t.v_head_size);
  if (!HasRanges(t)) return round;
  const CodesLayout layout = CodesLayout::Of(t);
  for (const SideTraits& side : layout.sides) {
    if (side.token_bytes != 0) round.loops.push_back(0);
  }
  return round;
}

// Of a tile: loops of copies, what is dequantized in a loop, of f32 products the loop over channels
// of K, and the random number of each score of a lane.
KernelRound RoundOf(const AttentionTraits& t) {
  if (t.kernel == kCodesKernel) return RoundOfCodes(t);
  KernelRound round;
  round.elements = int64_t{t.tile} * (t.head_size + t.v_block);
  const auto add_fill = [&](const SegmentTraits& traits, i32 channels) {
    const i32 padded = TileLayout::Of(t.arithmetic, channels).channels;
    if (traits.staging != kInPlace) round.loops.push_back(CeilDiv(t.tile * padded / 8, Threads(t)));
  };
  const auto add_copies = [&](const SegmentTraits& traits, i32 channels) {
    if (traits.staging == kLoaded) return;
    const i32 copies = t.tile * channels * BitsOf(traits.data.type) / 8 / traits.copy_width;
    round.loops.push_back(CeilDiv(CeilDiv(copies, Threads(t)), kCopiesAtOnce));
  };
  add_copies(t.k[0], t.head_size);
  add_copies(t.v[0], t.v_head_size);
  add_fill(t.k[0], t.head_size);
  add_fill(t.v[0], t.v_block);
  if (TakesF32(t.arithmetic)) round.loops.push_back(CeilDiv(t.head_size, 16));
  if (t.dropout) round.loops.insert(round.loops.end(), t.tile / t.token_warps / 2, kPhiloxRounds);
  return round;
}

}  // namespace

KernelSpec MakeAttentionKernel(const AttentionPlan& plan) {
  const KernelRow& kernel = kKernels[plan.traits.kernel];
  KernelSpec spec;
  spec.source.name = absl::StrCat(kernel.header, "_d", plan.traits.head_size);
  spec.source.text = absl::Substitute(kText, TraitsText(plan.traits), plan.threads,
                                      plan.blocks_per_multiprocessor, kernel.header, kernel.name);
  spec.source.entry = kernel.header;
  spec.threads = plan.threads;
  spec.shared_bytes = plan.shared_bytes;
  spec.blocks_per_multiprocessor = plan.blocks_per_multiprocessor;
  spec.round = RoundOf(plan.traits);
  spec.simt_body = [traits = plan.traits, run = kernel.run](const void* params) {
    // By every thread: whichever is first must find it, and all write the same.
    RuntimeTraits::k = traits;
    run(*static_cast<const AttentionParams*>(params));
  };
  return spec;
}

}  // namespace kvant::cuda
