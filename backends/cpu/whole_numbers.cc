// Plan: codes with one scale for all of them, as whole numbers.
#include <algorithm>

#include "kvant/backends/cpu/attention_plan.h"

namespace kvant::cpu {
namespace {

constexpr float kUnit = 1.f;

// Whether what a code of that type stands for is a whole number of 9 bits, which bf16 has, times a
// scale.
bool IsWhole(DataType type, int64_t zero_point) {
  constexpr int64_t kMost = 256;
  return IsInteger(type) && BitsOf(type) <= 8 && zero_point <= LowestOf(type) + kMost &&
         zero_point >= HighestOf(type) - kMost;
}

// Codes of one type with one scale and zero point.
struct Whole {
  float scale = 0;  // 0: values are no whole numbers
  DataType type = kUndef;
  int64_t zero_point = 0;
  bool operator==(const Whole&) const = default;

  // Codes as signed bytes: what is to be added.
  int32_t offset() const { return static_cast<int32_t>((type == kU8 ? 128 : 0) - zero_point); }
  // Codes of 8 bits as unsigned ones.
  int32_t unsigned_offset() const {
    return static_cast<int32_t>((type == kS8 ? -128 : 0) - zero_point);
  }
};

Whole WholeOf(const View& view, const std::optional<Quantization>& how) {
  if (!how || how->scales.present() || how->zero_points.present() || !how->codebook.empty() ||
      how->static_scales.size() != 1 || how->static_zps.size() > 1) {
    return {};
  }
  const int64_t zero_point = how->static_zps.empty() ? 0 : how->static_zps[0];
  return IsWhole(view.type, zero_point) ? Whole{how->static_scales[0], view.type, zero_point}
                                        : Whole();
}

// That of all segments, if they are alike.
Whole WholeOf(absl::Span<const KvSegment> segments) {
  if (segments.empty()) return {};
  const auto of = [](const KvSegment& segment) {
    return WholeOf(segment.data, segment.quantization);
  };
  const Whole first = of(segments[0]);
  const bool alike =
      std::ranges::all_of(segments, [&](const KvSegment& segment) { return of(segment) == first; });
  return alike ? first : Whole();
}

// Whether tokens are bytes side by side, few enough for sums of s32.
bool AreBytes(const Segments& segments, int64_t channels) {
  constexpr int64_t kMostChannels = 16384;
  return channels > 0 && channels <= kMostChannels &&
         std::ranges::all_of(segments, [channels](const Segment& segment) {
           return BitsOf(segment.data.type) == 8 &&
                  (segment.data.strides[kCol] == 1 || channels == 1);
         });
}

// So that products with it are no subnormal numbers.
bool IsOrdinary(float factor) { return factor >= 0x1p-60f && factor <= 0x1p60f; }

}  // namespace

// Codes with one scale for all of them become whole numbers. The scores are multiplied by the
// scales of queries and keys, the output by those of probabilities and values.
void Plan::TakeWholeNumbers() {
  AttentionProblem& p = problem_;
  const auto take = [](Segments& segments) {
    for (Segment& segment : segments) segment.dequantization.scales.data = &kUnit;
  };
  const Whole q = WholeOf(spec_.q, spec_.q_quantization), k = WholeOf(spec_.k);
  scores_factor_ = q.scale * k.scale;
  p.whole_scores = IsOrdinary(scores_factor_) && p.q_hadamard == 1;
  if (p.whole_scores) {
    p.q_dequantization.scales.data = &kUnit;
    take(k_);
    Step& step = *steps_.insert(steps_.begin(), Step());
    step.kind = Step::Kind::kMultiply;
    step.operand.type = kF32;
    step.operand.data = &scores_factor_;
  }
  const Whole probs{p.probs_rounding.scale, p.probs_rounding.type, p.probs_rounding.zero_point};
  const Whole v = WholeOf(spec_.v);
  const float output_factor = probs.scale * v.scale;
  if (IsWhole(probs.type, probs.zero_point) && IsOrdinary(output_factor)) {
    is_whole_ = p.whole_scores;
    p.probs_rounding.unit = 1.f;
    take(v_);
    p.output_factor = output_factor;
  }
  has_bytes_ = is_whole_ && AreBytes(k_, p.head_size) && AreBytes(v_, p.v_head_size);
  if (has_bytes_) {
    p.byte_offsets = {q.offset(), k.unsigned_offset(), probs.offset(), v.unsigned_offset()};
  }
}

}  // namespace kvant::cpu
