#include "kvant/backends/cuda/attention_kernel.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/substitute.h"
#include "kvant/backends/cuda/traits_text.h"
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
    most.k[0].parameters_ahead = most.v[0].parameters_ahead = kMaxParametersAhead;
    return most;
  }();
};
thread_local AttentionTraits RuntimeTraits::k{};

constexpr char kText[] = R"(#include "kvant/kernels/cuda/attention_tiles.h"

namespace kvant::cuda {
struct Traits {
  static constexpr AttentionTraits k = {$0};
  static constexpr AttentionTraits kMax = k;
};
}  // namespace kvant::cuda

extern "C" __global__ void __launch_bounds__($1, 1)
attention_tiles(const __grid_constant__ kvant::cuda::AttentionParams params) {
  kvant::cuda::AttentionTiles<kvant::cuda::Traits>::Run(params);
}
)";

}  // namespace

KernelSpec MakeAttentionKernel(const AttentionPlan& plan) {
  KernelSpec spec;
  spec.source.name = absl::StrCat("attention_tiles_d", plan.traits.head_size);
  spec.source.text = absl::Substitute(kText, TraitsText(plan.traits), plan.threads);
  spec.source.entry = "attention_tiles";
  spec.threads = plan.threads;
  spec.shared_bytes = plan.shared_bytes;
  spec.simt_body = [traits = plan.traits](const void* params) {
    // By every thread: whichever is first must find it, and all write the same.
    RuntimeTraits::k = traits;
    AttentionTiles<RuntimeTraits>::Run(*static_cast<const AttentionParams*>(params));
  };
  return spec;
}

}  // namespace kvant::cuda
