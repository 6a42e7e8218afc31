#include "kvant/backends/cuda/simt/bodies.h"
#include "kvant/kernels/cuda/attention_parts.h"

namespace kvant::cuda {
namespace {

// Traits for the executor: variables, and the largest that register arrays are sized by. part: for
// a kernel that has traits of several.
template <int part>
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
template <int part>
thread_local AttentionTraits RuntimeTraits<part>::k{};

template <class Codes, class Others>
SimtBody PartsBody(const KernelSpec& spec, void (*run)(const AttentionParams&)) {
  const auto second = spec.traits.begin() + sizeof(AttentionTraits) / sizeof(int32_t);
  const auto codes = TraitsOf<AttentionTraits>({spec.traits.begin(), second});
  const auto others = TraitsOf<AttentionTraits>({second, spec.traits.end()});
  return [codes, others, run](const void* params) {
    Codes::k = codes;
    Others::k = others;
    run(*static_cast<const AttentionParams*>(params));
  };
}

}  // namespace

SimtBody AttentionBody(const KernelSpec& spec) {
#define KVANT_ATTENTION_KERNEL(Entry, Class) \
  if (spec.source.entry == #Entry)           \
    return InstanceOf<RuntimeTraits<0>>(spec, &Class<RuntimeTraits<0>>::Run);
#define KVANT_PARTS_KERNEL(Entry, Class)                  \
  if (spec.source.entry == #Entry)                        \
    return PartsBody<RuntimeTraits<0>, RuntimeTraits<1>>( \
        spec, &Class<RuntimeTraits<0>, RuntimeTraits<1>>::Run);
#include "kvant/backends/cuda/kernels.inc"
  return nullptr;
}

}  // namespace kvant::cuda
