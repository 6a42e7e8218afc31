// What the CUDA attention kernels do not take.
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cuda/attention/describe_attention.h"
#include "kvant/kernels/cuda/attention_params.h"

namespace kvant::cuda {
namespace {

// Dims, and what is made of them, are 32-bit numbers in a kernel.
constexpr int64_t kMaxDim = int64_t{1} << 29;
constexpr int64_t kMaxHeadSize = 576;  // of latents: 512 channels and 64 that positions rotate
constexpr int64_t kMaxRotatedOutput = 256;

std::string WhyNotView(const View& view, std::string_view what) {
  if (!view.present() || BitsOf(view.type) < 8) return "";
  return IsComputeFloat(view.type) || BitsOf(view.type) == 8
             ? ""
             : absl::StrCat(std::string(what), " of type ", std::string(DataTypeName(view.type)));
}

std::string WhyNotSegments(const absl::InlinedVector<KvSegment, 1>& segments, int64_t kv_len,
                           const std::string& what) {
  if (segments.size() > kMaxSegments) {
    return absl::StrCat(what, " in ", segments.size(), " segments, more than ", kMaxSegments);
  }
  int64_t tokens = 0;
  for (const KvSegment& segment : segments) {
    tokens += segment.tokens();
    if (std::string why = WhyNotView(segment.data, what); !why.empty()) return why;
    if (segment.data.type == kvant::kBoolean) return absl::StrCat(what, " of type boolean");
    if (!segment.quantization) continue;
    for (const int64_t group : segment.quantization->group) {
      if (group < 1) return absl::StrCat(what, " in groups of ", group);
    }
  }
  if (tokens == kv_len) return "";
  return absl::StrCat(what, " of ", tokens, " tokens in all where ", kv_len, " are needed");
}

// Their strides are 32-bit numbers in a kernel.
std::string WhyNotIndices(const AttentionSpec& spec) {
  constexpr int64_t kMost = std::numeric_limits<i32>::max();
  std::vector<const View*> views{&spec.kv_first, &spec.query_offsets};
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

std::string WhyNotSteps(const AttentionSpec& spec) {
  if (spec.steps.size() > kMaxSteps) {
    return absl::StrCat(spec.steps.size(), " steps on the scores, more than ", kMaxSteps);
  }
  for (const ScoreStep& step : spec.steps) {
    for (const Operand* shift : {&step.shift_add, &step.shift_sub}) {
      if (!shift->constant && shift->view.present() &&
          (shift->view.strides[kRow] != 0 || shift->view.strides[kCol] != 0)) {
        return "a diagonal whose shift varies over rows or columns";
      }
    }
  }
  return "";
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

std::string WhyNotOutputs(const AttentionSpec& spec) {
  if (BitsOf(spec.output.type) < 8) {
    return absl::StrCat("an output of type ", std::string(DataTypeName(spec.output.type)));
  }
  if (std::string why = WhyNotView(spec.output, "an output"); !why.empty()) return why;
  if (spec.dropout && BitsOf(spec.dropout->mask.type) > 0) {
    const View& mask = spec.dropout->mask;
    if (BitsOf(mask.type) < 8) {
      return absl::StrCat("a dropout mask of type ", std::string(DataTypeName(mask.type)));
    }
    if (std::string why = WhyNotView(mask, "a dropout mask"); !why.empty()) return why;
  }
  if (!spec.probs_quantization) return "";
  const FakeQuantize& rounding = *spec.probs_quantization;
  if (BitsOf(rounding.type) > 16 && rounding.type != kvant::kF32) {
    return absl::StrCat("probabilities rounded to ", std::string(DataTypeName(rounding.type)));
  }
  if (IsInteger(rounding.type) && (rounding.zero_point < LowestOf(rounding.type) ||
                                   rounding.zero_point > HighestOf(rounding.type))) {
    return absl::StrCat("probabilities rounded to ", std::string(DataTypeName(rounding.type)),
                        " with a zero point of ", rounding.zero_point, ", outside the type");
  }
  return "";
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
       {WhyNotView(spec.q, "queries"), WhyNotSizes(spec),
        WhyNotSegments(spec.k, spec.kv_len, "keys"), WhyNotSegments(spec.v, spec.kv_len, "values"),
        WhyNotSteps(spec), WhyNotIndices(spec), WhyNotHostScalars(spec), WhyNotOutputs(spec),
        WhyNotRotations(spec)}) {
    if (!why.empty()) return why;
  }
  return "";
}

}  // namespace kvant::cuda
