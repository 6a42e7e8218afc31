// What the CUDA attention kernels do not take.
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cuda/attention/attention_plan.h"
#include "kvant/kernels/cuda/attention_params.h"

namespace kvant::cuda {
namespace {

// Dims, and what is made of them, are 32-bit numbers in a kernel.
constexpr int64_t kMaxDim = int64_t{1} << 29;
constexpr int64_t kMaxHeadSize = 576;  // of latents: 512 channels and 64 that positions rotate
constexpr int64_t kMaxRotatedOutput = 256;

// Their strides are 32-bit numbers in a kernel.
std::string WhyNotIndices(const AttentionSpec& spec) {
  constexpr int64_t kMost = std::numeric_limits<i32>::max();
  std::vector<const View*> views{&spec.kv_lengths, &spec.kv_first, &spec.query_offsets};
  for (const auto* side : {&spec.k, &spec.v}) {
    for (const KvSegment& segment : *side) {
      views.push_back(&segment.range);
      views.push_back(&segment.page_table);
    }
  }
  for (const View* view : views) {
    for (const int64_t stride : view->strides) {
      if (stride > kMost) return absl::StrCat("indices that are ", stride, " elements apart");
    }
  }
  return "";
}

std::string WhyNotSizes(const AttentionSpec& spec) {
  if (spec.head_size > kMaxHeadSize) {
    return absl::StrCat("a head size of ", spec.head_size, ", more than ", kMaxHeadSize);
  }
  for (const int64_t size : {spec.batch[0], spec.batch[1], spec.batch[2] * spec.q_len,
                             spec.batch[2], spec.q_len, spec.kv_len, spec.v_head_size}) {
    if (size > kMaxDim) return absl::StrCat("a size of ", size, ", more than ", kMaxDim);
  }
  return "";
}

std::string WhyNotRotations(const AttentionSpec& spec) {
  for (const auto& [run, size] : {std::pair(spec.q_hadamard, spec.head_size),
                                  std::pair(spec.output_hadamard, spec.v_head_size)}) {
    if (run <= 1 || (size % run == 0 && (run & (run - 1)) == 0)) continue;
    return absl::StrCat("rotations in runs of ", run, " of ", size, " channels");
  }
  if (spec.output_hadamard <= kMaxRotatedOutput) return "";
  return absl::StrCat("a rotation of ", spec.output_hadamard, " channels of the output, more than ",
                      kMaxRotatedOutput);
}

std::string WhyNotCounts(const AttentionSpec& spec) {
  for (const auto& [segments, what] :
       {std::pair(spec.k.size(), "keys"), std::pair(spec.v.size(), "values")}) {
    if (segments <= kMaxSegments) continue;
    return absl::StrCat(what, " in ", segments, " segments, more than ", kMaxSegments);
  }
  if (spec.steps.size() <= kMaxSteps) return "";
  return absl::StrCat(spec.steps.size(), " steps on the scores, more than ", kMaxSteps);
}

// Kernels read arrays where they lie, on the device.
std::string WhyNotHostScalars(const AttentionSpec& spec) {
  bool any = spec.kv_lengths.on_host || spec.kv_first.on_host || spec.sinks.on_host;
  const auto add = [&any](const std::optional<Quantization>& q) {
    any |= q && (q->scales.on_host || q->zero_points.on_host);
  };
  add(spec.q_quantization);
  for (const KvSegment& segment : spec.k) add(segment.quantization);
  for (const KvSegment& segment : spec.v) add(segment.quantization);
  for (const ScoreStep& step : spec.steps) any |= step.condition.on_host;
  return any ? "host scalars but as operands of scores, shifts of diagonals and in dropout" : "";
}

std::string WhyNotRounding(const AttentionSpec& spec) {
  if (!spec.probs_quantization) return "";
  const DataType type = spec.probs_quantization->type;
  if (BitsOf(type) <= 16 || type == kvant::kF32) return "";
  return absl::StrCat("probabilities rounded to ", std::string(DataTypeName(type)));
}

}  // namespace

std::string WhyUnsupported(const AttentionSpec& spec) {
  constexpr FeatureSet kTaken = {
      Feature::kQuantizedK,   Feature::kQuantizedV,    Feature::kStaticQuantization,
      Feature::kSegments,     Feature::kRuntimeShift,  Feature::kSinks,
      Feature::kKvLengths,    Feature::kKvFirst,       Feature::kRanges,
      Feature::kPages,        Feature::kRaggedQueries, Feature::kStats,
      Feature::kDropout,      Feature::kHadamard,      Feature::kCodebook,
      Feature::kMultiplyStep, Feature::kDivideStep,    Feature::kAddStep,
      Feature::kSubtractStep, Feature::kMaximumStep,   Feature::kMinimumStep,
      Feature::kTanhStep,     Feature::kSelectStep,    Feature::kBandStep,
      Feature::kAlibiStep,
  };
  if (std::string why = WhyNotTaken(spec, kTaken); !why.empty()) return why;
  for (const std::string& why :
       {WhyNotSizes(spec), WhyNotCounts(spec), WhyNotIndices(spec), WhyNotHostScalars(spec),
        WhyNotRounding(spec), WhyNotRotations(spec)}) {
    if (!why.empty()) return why;
  }
  return "";
}

}  // namespace kvant::cuda
