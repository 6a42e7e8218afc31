#include "kvant/backends/cuda/simt/bodies.h"
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
    most.head_size = 576;
    most.v_head_size = 576;
    most.warp_tile = 64;
    most.row_blocks = 2;
    most.channel_warps = 1;
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

}  // namespace

SimtBody AttentionBody(const KernelSpec& spec) {
#define KVANT_ATTENTION_KERNEL(Entry, Class) \
  if (spec.source.entry == #Entry)           \
    return InstanceOf<RuntimeTraits>(spec, &Class<RuntimeTraits>::Run);
#include "kvant/backends/cuda/kernels.inc"
  return nullptr;
}

}  // namespace kvant::cuda
