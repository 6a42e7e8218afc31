// What the CPU kernels do not take.
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cpu/attention_plan.h"

namespace kvant::cpu {

std::string WhyUnsupported(const AttentionSpec& spec) {
  constexpr FeatureSet kTaken = {
      Feature::kQuantizedK,  Feature::kQuantizedV,    Feature::kStaticQuantization,
      Feature::kSegments,    Feature::kRuntimeShift,  Feature::kSinks,
      Feature::kKvLengths,   Feature::kKvFirst,       Feature::kRanges,
      Feature::kPages,       Feature::kRaggedQueries, Feature::kStats,
      Feature::kDropout,     Feature::kOverQueries,   Feature::kHadamard,
      Feature::kCodebook,    Feature::kMultiplyStep,  Feature::kDivideStep,
      Feature::kAddStep,     Feature::kSubtractStep,  Feature::kMaximumStep,
      Feature::kMinimumStep, Feature::kTanhStep,      Feature::kSelectStep,
      Feature::kBandStep,    Feature::kAlibiStep,
  };
  if (std::string why = WhyNotTaken(spec, kTaken); !why.empty()) return why;
  // Of broadcast views, say: tiles of so many channels would overflow the sizes of scratch.
  constexpr int64_t kMaxHeadSize = int64_t{1} << 24;
  for (const int64_t size : {spec.head_size, spec.v_head_size}) {
    if (size > kMaxHeadSize) return absl::StrCat("a head size of ", size);
  }
  for (const auto& [block, size] : {std::pair(spec.q_hadamard, spec.head_size),
                                    std::pair(spec.output_hadamard, spec.v_head_size)}) {
    if (block != 0 && (block < 1 || (block & (block - 1)) != 0 || size % block != 0)) {
      return absl::StrCat("a head of ", size, " channels rotated in blocks of ", block);
    }
  }
  // A unit holds half a tile of K and V, and rows of Q and O, in f32.
  constexpr int64_t kMaxUnitBytes = int64_t{16} << 20;
  if ((spec.head_size + spec.v_head_size) * 2 * kHalfTile * int64_t{sizeof(float)} >
      kMaxUnitBytes) {
    return absl::StrCat("head sizes of ", spec.head_size, " and ", spec.v_head_size,
                        ", whose tiles exceed ", kMaxUnitBytes >> 20, " MiB");
  }
  return spec.over_queries ? WhyNotTwoPasses(spec) : "";
}

}  // namespace kvant::cpu
