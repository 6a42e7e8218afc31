#include "kvant/patterns/attention_spec.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace kvant {
namespace {

using Kind = ScoreStep::Kind;

std::string TypeName(DataType type) { return std::string(DataTypeName(type)); }

std::string GroupsInWords(const KvSegment& segment) {
  static constexpr const char* kAxes[] = {"batch", "key heads", "query heads", "tokens",
                                          "the head"};
  const Quantization& quantization = *segment.quantization;
  if (!quantization.static_scales.empty()) {
    return quantization.static_axis < 0
               ? "static per tensor"
               : absl::StrCat("static along ", kAxes[quantization.static_axis]);
  }
  std::vector<std::string> parts;
  for (int axis = kViewRank - 1; axis >= 3; --axis) {
    if (quantization.group[axis] > 1 && quantization.group[axis] < segment.data.dims[axis]) {
      parts.push_back(absl::StrCat("groups of ", quantization.group[axis], " along ", kAxes[axis]));
    }
  }
  if (!parts.empty()) return absl::StrJoin(parts, " and ");
  if (quantization.scales.scalar()) return "per tensor";
  const bool by_token = quantization.scales.dims[3] > 1;
  const bool by_channel = quantization.scales.dims[4] > 1;
  if (by_token) return by_channel ? "per element" : "per token";
  return by_channel ? "per channel" : "per head";
}

std::string SegmentsInWords(absl::Span<const KvSegment> segments) {
  std::vector<std::string> parts;
  for (const KvSegment& segment : segments) {
    std::string text = TypeName(segment.data.type);
    if (segments.size() > 1) absl::StrAppend(&text, " x ", segment.tokens());
    if (segment.quantization) {
      absl::StrAppend(&text, " ", GroupsInWords(segment));
      if (const size_t entries = segment.quantization->codebook.size(); entries > 0) {
        absl::StrAppend(&text, " with a codebook of ", entries);
      }
      if (segment.quantization->zero_points.present()) {
        absl::StrAppend(&text, " with ",
                        IsFloat(segment.quantization->zero_points.type) ? "real " : "",
                        "zero points");
      }
    }
    if (segment.page_table.present()) {
      absl::StrAppend(&text, " in pages of ", segment.data.dims[3]);
    }
    if (segment.range.present()) absl::StrAppend(&text, " in a ring");
    parts.push_back(std::move(text));
  }
  return absl::StrJoin(parts, " | ");
}

std::string ViewInWords(const View& view) {
  return absl::StrCat(TypeName(view.type), " [", absl::StrJoin(view.dims, ","), "]");
}

std::string OperandInWords(const Operand& operand) {
  if (operand.constant) return absl::StrCat(static_cast<float>(operand.constant->value()));
  if (operand.view.scalar()) {
    return absl::StrCat("a ", TypeName(operand.view.type),
                        operand.view.on_host ? " host scalar" : " scalar");
  }
  return ViewInWords(operand.view);
}

const char* AlignmentInWords(const ScoreStep& step) {
  static constexpr const char* kAlignments[] = {"top-left", "bottom-right", "aligned at execution"};
  return kAlignments[static_cast<size_t>(step.alignment)];
}

std::string BandInWords(const ScoreStep& step) {
  const auto bound = [](std::optional<int64_t> side) { return side ? absl::StrCat(*side) : "-"; };
  const bool causal = step.right == 0 && !step.left;
  return absl::StrCat(
      causal ? "causal" : absl::StrCat("band {", bound(step.left), ", ", bound(step.right), "}"),
      " ", AlignmentInWords(step), step.inverted ? ", inverted" : "", ", else ",
      OperandInWords(step.operand));
}

enum class StepOperands : uint8_t { kNone, kOne, kOther };
struct StepRow {
  StepOperands operands;
  const char* words;
};
constexpr StepRow kSteps[] = {
#define KVANT_SCORE_STEP(name, operands, words) {StepOperands::k##operands, words},
#include "kvant/graph/score_steps.inc"
};

std::string StepInWords(const ScoreStep& step) {
  const StepRow& row = kSteps[static_cast<size_t>(step.kind)];
  if (row.operands == StepOperands::kOne) {
    return absl::StrCat(row.words, " ", OperandInWords(step.operand));
  }
  if (step.kind == Kind::kSelect) {
    return absl::StrCat(step.inverted ? "unless " : "where ", ViewInWords(step.condition),
                        ", else ", OperandInWords(step.operand));
  }
  if (step.kind == Kind::kBand) return BandInWords(step);
  if (step.kind == Kind::kAlibi) return absl::StrCat(row.words, " ", AlignmentInWords(step));
  return row.words;
}

constexpr const char* kFeatureWords[] = {
#define KVANT_FEATURE(name, words) words,
#include "kvant/patterns/features.inc"
};

// Whether kernels load it: numbers, or codes.
bool IsLoaded(DataType type) {
  return IsComputeFloat(type) || ((IsFloat(type) || IsInteger(type)) && BitsOf(type) <= 8);
}

std::string OfType(const char* what, DataType type) {
  return absl::StrCat(what, " of type ", TypeName(type));
}

std::string WhyNotSegments(absl::Span<const KvSegment> segments, const char* what) {
  for (const KvSegment& segment : segments) {
    if (!IsLoaded(segment.data.type)) return OfType(what, segment.data.type);
    if (!segment.quantization) continue;
    for (const int64_t group : segment.quantization->group) {
      if (group < 1) return absl::StrCat(what, " in groups of ", group);
    }
  }
  return "";
}

}  // namespace

int PortOf(absl::Span<const TensorId> ports, TensorId id) {
  const auto* at = std::ranges::find(ports, id);
  return at == ports.end() ? kNoPort : static_cast<int>(at - ports.begin());
}

PortArray FindPortArray(const Graph& graph, absl::Span<const TensorId> inputs,
                        absl::Span<const TensorId> outputs, TensorId id) {
  const LogicalTensor& tensor = graph.tensor(id);
  PortArray array;
  array.type = tensor.type;
  array.strides = tensor.StridesOrDense();
  array.constant = tensor.value;
  array.on_host = tensor.property == Property::kHostScalar;
  array.port = PortOf(outputs, id);
  array.output = array.port != kNoPort;
  if (!array.output) array.port = PortOf(inputs, id);
  return array;
}

bool View::scalar() const {
  return present() && std::ranges::all_of(dims, [](int64_t dim) { return dim == 1; });
}

FeatureSet AttentionSpec::Features() const {
  FeatureSet features;
  const auto set = [&features](Feature feature, bool on) {
    if (on) features.Add(feature);
  };
  const auto segments = [&](absl::Span<const KvSegment> list, Feature quantized) {
    set(Feature::kSegments, list.size() > 1);
    for (const KvSegment& segment : list) {
      set(quantized, segment.quantization.has_value());
      set(Feature::kStaticQuantization,
          segment.quantization && !segment.quantization->static_scales.empty());
      set(Feature::kCodebook, segment.quantization && !segment.quantization->codebook.empty());
      set(Feature::kRanges, segment.range.present());
      set(Feature::kPages, segment.page_table.present());
    }
  };
  segments(k, Feature::kQuantizedK);
  segments(v, Feature::kQuantizedV);
  set(Feature::kStaticQuantization,
      q_quantization.has_value() || probs_quantization || output_quantization);
  set(Feature::kCodebook, q_quantization && !q_quantization->codebook.empty());
  for (const ScoreStep& step : steps) {
    features.Add(static_cast<Feature>(static_cast<int>(Feature::kMultiplyStep) +
                                      static_cast<int>(step.kind)));
    set(Feature::kRuntimeShift, step.alignment == ScoreStep::Alignment::kRuntime);
  }
  set(Feature::kSinks, sinks.present());
  set(Feature::kKvLengths, kv_lengths.present());
  set(Feature::kStats, stats.present());
  set(Feature::kDropout, dropout.has_value());
  set(Feature::kOverQueries, over_queries);
  set(Feature::kHadamard, q_hadamard != 0 || output_hadamard != 0);
  set(Feature::kKvFirst, kv_first.present());
  set(Feature::kRaggedQueries, query_offsets.present());
  return features;
}

std::string WhyNotTaken(const AttentionSpec& spec, FeatureSet takes) {
  const FeatureSet uses = spec.Features();
  for (size_t i = 0; i < std::size(kFeatureWords); ++i) {
    const auto feature = static_cast<Feature>(i);
    if (uses.Has(feature) && !takes.Has(feature)) return kFeatureWords[i];
  }
  if (spec.v_head_size == 0) return "values of no channels";
  if (!IsLoaded(spec.q.type)) return OfType("queries", spec.q.type);
  for (std::string why : {WhyNotSegments(spec.k, "keys"), WhyNotSegments(spec.v, "values")}) {
    if (!why.empty()) return why;
  }
  if (!IsLoaded(spec.output.type) || BitsOf(spec.output.type) < 8) {
    return OfType("an output", spec.output.type);
  }
  if (spec.dropout && spec.dropout->mask.present() && BitsOf(spec.dropout->mask.type) < 8) {
    return OfType("a dropout mask", spec.dropout->mask.type);
  }
  if (!spec.probs_quantization) return "";
  const auto& [type, scale, zero_point] = *spec.probs_quantization;
  if (!IsInteger(type) || (LowestOf(type) <= zero_point && zero_point <= HighestOf(type))) {
    return "";
  }
  return absl::StrCat("probabilities rounded to ", TypeName(type), " with a zero point of ",
                      zero_point, ", outside the type");
}

std::string AttentionSpec::ToString() const {
  const int64_t shared = batch[2];
  std::string text = batch[0] > 1 ? absl::StrCat("batch ", batch[0], ", ") : "";
  absl::StrAppend(&text, batch[1] * shared, " query heads over ", batch[1], " KV heads, ",
                  query_offsets.present() ? "ragged " : "", q_len, " x ", kv_len, ", head size ",
                  head_size);
  if (v_head_size != head_size) absl::StrAppend(&text, " and ", v_head_size, " for V");
  absl::StrAppend(&text, "; Q ", TypeName(q.type));
  if (q_quantization) absl::StrAppend(&text, " quantized");
  if (q_hadamard != 0) absl::StrAppend(&text, " rotated in blocks of ", q_hadamard);
  absl::StrAppend(&text, "; K ", SegmentsInWords(k), "; V ", SegmentsInWords(v));
  for (size_t i = 0; i < steps.size(); ++i) {
    absl::StrAppend(&text, i == 0 ? "; scores " : ", ", StepInWords(steps[i]));
  }
  if (over_queries) {
    absl::StrAppend(&text, "; softmax over queries",
                    softmax_mode == SoftmaxMode::kNone ? " with NaN columns" : "");
  } else if (softmax_mode == SoftmaxMode::kNone) {
    absl::StrAppend(&text, "; softmax with NaN rows");
  }
  if (sinks.present()) absl::StrAppend(&text, "; sinks");
  if (kv_lengths.present()) {
    absl::StrAppend(&text, "; KV lengths", kv_first.present() ? " and first tokens" : "",
                    " at execution");
  }
  if (dropout) absl::StrAppend(&text, "; dropout");
  if (probs_quantization) {
    absl::StrAppend(&text, "; probabilities through ", TypeName(probs_quantization->type));
  }
  if (stats.present()) absl::StrAppend(&text, "; statistics");
  absl::StrAppend(&text, "; output ", TypeName(output.type));
  if (output_hadamard != 0) absl::StrAppend(&text, " rotated in blocks of ", output_hadamard);
  return text;
}

}  // namespace kvant
