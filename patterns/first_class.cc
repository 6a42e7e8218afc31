// ScaledDotProductAttention as an AttentionSpec: no matching, same result.
//
// The order of its steps: scale, soft cap, ALiBi, bias, band, select.
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>

#include "kvant/patterns/resolver.h"

namespace kvant {
namespace {

using Step = ScoreStep::Kind;

ScoreStep ConstantStep(Step kind, float constant) {
  return {.kind = kind, .operand = {.constant = Constant(constant)}};
}

}  // namespace

// Maps `folded`, broadcast to [n, Hq, rows, cols], to [n, Hkv, R, rows, cols].
bool Resolver::PlaceHeads(FoldedView folded, int64_t n, int64_t rows, int64_t cols, bool matrix,
                          View* view) const {
  const int64_t kv_heads = spec_->batch[1], shared = spec_->batch[2];
  const int64_t dims[] = {n, kv_heads * shared, rows, cols};
  const int64_t split[] = {n, kv_heads, shared, rows, cols};
  const BatchAxes batch = {.begin = {0, 1, 2}, .end = {1, 2, 3}};
  return folded.BroadcastTo(dims) && folded.Reshape(split) &&
         ToView(folded, batch, 3, 4, matrix, view);
}

// What has a row for each query: Q, the output or statistics, else a mask.
bool Resolver::PlaceQueries(TensorId id, int64_t cols, bool mask, View* view) {
  const Op& attention = op(match_.first_class);
  const bool ragged = FindInput(attention, "query_offsets").has_value();
  // Input would note that an output is none.
  *view = Output(id).present() ? Output(id) : Input(id);
  FoldedView folded = FoldedView::Of(tensor(id));
  constexpr int64_t kHeadsFirst[] = {1, 0, 2};
  if ((!ragged || mask || folded.Transpose(kHeadsFirst)) &&
      PlaceHeads(std::move(folded), ragged ? 1 : spec_->batch[0], spec_->q_len, cols, mask, view)) {
    return true;
  }
  return Fail(attention, tensor(id).Label(), " of [", DimsToString(*tensor(id).dims),
              "] does not fit its heads");
}

bool Resolver::PlacePerHead(std::string_view name, View* view) {
  const Op& attention = op(match_.first_class);
  const TensorId id = attention.inputs[*FindInput(attention, name)];
  FoldedView folded = FoldedView::Of(tensor(id));
  const int64_t dims[] = {1, tensor(id).elements(), 1, 1};
  *view = Input(id);
  if (folded.Reshape(dims) && PlaceHeads(folded, 1, 1, 1, true, view)) return true;
  return Fail(attention, name, " of ", tensor(id).elements(), " elements for ",
              spec_->batch[1] * spec_->batch[2], " heads");
}

bool Resolver::ResolveMasks() {
  const Op& attention = op(match_.first_class);
  const float inf = std::numeric_limits<float>::infinity();
  const auto aligned = attention.Get<Attr::kMaskAlignment>() == "bottom_right"
                           ? ScoreStep::Alignment::kBottomRight
                           : ScoreStep::Alignment::kTopLeft;
  const auto place = [&](size_t input, View* view) {
    return PlaceQueries(attention.inputs[input], spec_->kv_len, true, view);
  };
  if (FindInput(attention, "alibi_slopes")) {
    ScoreStep& step = spec_->steps.emplace_back(ScoreStep{.kind = Step::kAlibi});
    step.alignment = aligned;
    if (!PlacePerHead("alibi_slopes", &step.operand.view)) return false;
  }
  if (const auto bias = FindInput(attention, "bias")) {
    ScoreStep& step = spec_->steps.emplace_back(ScoreStep{.kind = Step::kAdd});
    if (!place(*bias, &step.operand.view)) return false;
  }
  if (const auto select = FindInput(attention, "select")) {
    const float* const fill = attention.Find<Attr::kSelectFill>();
    ScoreStep& step = spec_->steps.emplace_back(ConstantStep(Step::kSelect, fill ? *fill : -inf));
    if (!place(*select, &step.condition)) return false;
  }
  const int64_t left = attention.Get<Attr::kLeftWindow>();
  const int64_t right = attention.Get<Attr::kRightWindow>();
  if (left >= 0 || right >= 0) {
    ScoreStep& step = spec_->steps.emplace_back(ConstantStep(Step::kBand, -inf));
    step.alignment = aligned;
    if (left >= 0) step.left = left;
    if (right >= 0) step.right = right;
  }
  return true;
}

// All but K, V and rotations.
bool Resolver::ResolveHeads() {
  const Op& attention = op(match_.first_class);
  const Dims& q = *tensor(attention.inputs[0]).dims;
  const Dims& k = *tensor(attention.inputs[1]).dims;
  const Dims& v = *tensor(attention.inputs[2]).dims;
  const int64_t heads = q[1], kv_heads = k[1];
  if (kv_heads == 0) {
    return Fail(attention, heads, " query heads over ", kv_heads, " key heads");
  }
  spec_->batch = {k[0], kv_heads, heads / kv_heads};
  spec_->q_len = FindInput(attention, "query_offsets") ? q[0] : q[2];
  spec_->head_size = k[3];
  spec_->kv_len = k[2];
  spec_->v_head_size = v[3];
  if (attention.Get<Attr::kMode>() == "none") spec_->softmax_mode = SoftmaxMode::kNone;
  spec_->stats_of_empty = -std::numeric_limits<float>::infinity();

  const float* scale = attention.Find<Attr::kScale>();
  spec_->steps.push_back(ConstantStep(
      Step::kMultiply, scale != nullptr ? *scale : 1.f / std::sqrt(static_cast<float>(k[3]))));
  if (const float* cap = attention.Find<Attr::kSoftCap>()) {
    spec_->steps.push_back(ConstantStep(Step::kDivide, *cap));
    spec_->steps.push_back({.kind = Step::kTanh});
    spec_->steps.push_back(ConstantStep(Step::kMultiply, *cap));
  }
  if (!PlaceQueries(match_.q[0].source, k[3], false, &spec_->q) || !ResolveMasks() ||
      !PlaceQueries(match_.output, v[3], false, &spec_->output)) {
    return false;
  }
  if (attention.outputs.size() > 1 &&
      !PlaceQueries(attention.outputs[1], 1, false, &spec_->stats)) {
    return false;
  }
  return !FindInput(attention, "sinks") || PlacePerHead("sinks", &spec_->sinks);
}

bool Resolver::ResolveFirstClass() {
  if (!ResolveHeads()) return false;
  const Op& attention = op(match_.first_class);
  // K and V lie over the heads of theirs.
  rank_ = 4;
  batch_ = {.begin = {0, 1}, .end = {1, 2}};
  frame_ = {spec_->batch[0], spec_->batch[1], spec_->kv_len, spec_->head_size};
  int64_t scores_rotated = 0;
  // Of an operand of the op, or of its output.
  const auto add = [&](absl::Span<const OpIndex> ops, TensorId id, int64_t* rotated) {
    Rotations rotations;
    const Dims& dims = *tensor(id).dims;
    const int channels = tensor(id).rank() - 1;
    for (const OpIndex index : ops) {
      if (op(index).kind == OpKind::kHadamard) {
        rotations.push_back({index, FoldedView::Counting(dims, channels)});
      }
    }
    return AddRotations(rotations, dims, channels, rotated);
  };
  std::vector<OpIndex> before;
  for (const ChainOp& step : match_.q[0].ops) before.push_back(step.op);
  return ResolveSegments(match_.k, 2, 3, attention, &spec_->k, &scores_rotated) &&
         add(before, attention.inputs[0], &scores_rotated) &&
         ResolveRotation(attention, "Q and K", scores_rotated, &spec_->q_hadamard) &&
         ResolveSegments(match_.v, 2, 3, attention, &spec_->v, &output_rotated_) &&
         add(match_.output_ops, attention.outputs[0], &output_rotated_) &&
         ResolveRotation(attention, "V and the output", output_rotated_, &spec_->output_hadamard);
}

}  // namespace kvant
