// ScaledDotProductAttention as an AttentionSpec: no matching, same result.
//
// The order of its steps: scale, soft cap, ALiBi, bias, band, select.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/patterns/resolver.h"

namespace kvant {
namespace {

using Step = ScoreStep::Kind;

ScoreStep ConstantStep(Step kind, float constant) {
  ScoreStep step;
  step.kind = kind;
  if (kind != Step::kTanh) step.operand.constant = Constant(constant);
  return step;
}

}  // namespace

// Maps rank-4 tensors with Hq heads to [N, Hkv, R, rows, cols].
class FirstClassResolver {
 public:
  // q, output: the ports, which may be of another type than the op's.
  FirstClassResolver(const Graph& graph, const Op& op, TensorId q, TensorId output,
                     absl::Span<const TensorId> inputs, absl::Span<const TensorId> outputs,
                     AttentionSpec* spec)
      : graph_(graph),
        op_(op),
        q_(q),
        output_(output),
        inputs_(inputs),
        outputs_(outputs),
        spec_(spec) {}

  bool Resolve();
  const std::string& why() const { return why_; }

 private:
  bool Fail(const std::string& reason) {
    why_ = absl::StrCat(op_.ToString(), ": ", reason);
    return false;
  }
  const LogicalTensor& tensor(TensorId id) const { return graph_.tensor(id); }
  // Views `folded`, [n, h, rows, cols] broadcast to these dims.
  bool Place(FoldedView folded, int64_t n, int64_t heads, int64_t rows, int64_t cols, bool matrix,
             View* view, std::array<int64_t, kViewRank>* group);
  bool PlaceTensor(FoldedView folded, TensorId id, bool output, int64_t rows, int64_t cols,
                   bool matrix, View* view);
  // Queries, the output or statistics.
  bool PlaceRows(TensorId id, bool output, int64_t cols, View* view);
  bool PlaceMask(TensorId id, View* view) {
    return PlaceTensor(FoldedView::Of(tensor(id)), id, false, spec_->q_len, spec_->kv_len, true,
                       view);
  }
  bool PlacePerHead(std::string_view name, View* view);
  bool Masks();
  View Port(TensorId id, bool output) const;

  const Graph& graph_;
  const Op& op_;
  const TensorId q_, output_;
  absl::Span<const TensorId> inputs_, outputs_;
  AttentionSpec* spec_;
  std::string why_;
  int64_t heads_ = 1, kv_heads_ = 1;
  bool ragged_ = false;
};

View FirstClassResolver::Port(TensorId id, bool output) const {
  View view;
  view.type = tensor(id).type;
  const absl::Span<const TensorId> ports = output ? outputs_ : inputs_;
  for (size_t i = 0; i < ports.size(); ++i) {
    if (ports[i] == id) view.port = static_cast<int>(i);
  }
  view.on_host = tensor(id).property == Property::kHostScalar;
  return view;
}

bool FirstClassResolver::Place(FoldedView folded, int64_t n, int64_t heads, int64_t rows,
                               int64_t cols, bool matrix, View* view,
                               std::array<int64_t, kViewRank>* group) {
  const int64_t dims[] = {n, heads, rows, cols};
  const int64_t split[] = {n, kv_heads_, heads / kv_heads_, rows, cols};
  BatchAxes batch;
  for (int i = 0; i < 3; ++i) {
    batch.begin[i] = i;
    batch.end[i] = i + 1;
  }
  return folded.BroadcastTo(dims) && folded.Reshape(split) &&
         ToView(folded, batch, 3, 4, matrix, view, group);
}

bool FirstClassResolver::PlaceTensor(FoldedView folded, TensorId id, bool output, int64_t rows,
                                     int64_t cols, bool matrix, View* view) {
  *view = Port(id, output);
  if (Place(std::move(folded), ragged_ ? 1 : spec_->batch[0], heads_, rows, cols, matrix, view,
            nullptr)) {
    return true;
  }
  return Fail(absl::StrCat("tensor ", id, " of [", DimsToString(*tensor(id).dims),
                           "] does not fit its heads"));
}

bool FirstClassResolver::PlaceRows(TensorId id, bool output, int64_t cols, View* view) {
  FoldedView folded = FoldedView::Of(tensor(id));
  constexpr int64_t kHeadsFirst[] = {1, 0, 2};
  return (!ragged_ || folded.Transpose(kHeadsFirst)) &&
         PlaceTensor(std::move(folded), id, output, spec_->q_len, cols, false, view);
}

bool FirstClassResolver::PlacePerHead(std::string_view name, View* view) {
  const TensorId id = op_.inputs[*FindInput(op_, name)];
  FoldedView folded = FoldedView::Of(tensor(id));
  const int64_t dims[] = {1, tensor(id).elements(), 1, 1};
  *view = Port(id, false);
  if (folded.Reshape(dims) && Place(folded, 1, heads_, 1, 1, true, view, nullptr)) return true;
  return Fail(absl::StrCat(std::string(name), " of ", tensor(id).elements(), " elements for ",
                           heads_, " heads"));
}

bool FirstClassResolver::Masks() {
  const float inf = std::numeric_limits<float>::infinity();
  const auto* alignment = op_.Find<Attr::kMaskAlignment>();
  const auto aligned = alignment != nullptr && *alignment == "bottom_right"
                           ? ScoreStep::Alignment::kBottomRight
                           : ScoreStep::Alignment::kTopLeft;
  if (FindInput(op_, "alibi_slopes")) {
    ScoreStep step;
    step.kind = Step::kAlibi;
    step.alignment = aligned;
    if (!PlacePerHead("alibi_slopes", &step.operand.view)) return false;
    spec_->steps.push_back(step);
  }
  if (const auto bias = FindInput(op_, "bias")) {
    ScoreStep step;
    step.kind = Step::kAdd;
    if (!PlaceMask(op_.inputs[*bias], &step.operand.view)) {
      return false;
    }
    spec_->steps.push_back(step);
  }
  const int64_t left = op_.Get<Attr::kLeftWindow>();
  const int64_t right = op_.Get<Attr::kRightWindow>();
  if (left >= 0 || right >= 0) {
    ScoreStep step = ConstantStep(Step::kBand, -inf);
    step.alignment = aligned;
    if (left >= 0) step.left = left;
    if (right >= 0) step.right = right;
    spec_->steps.push_back(step);
  }
  if (const auto select = FindInput(op_, "select")) {
    ScoreStep step = ConstantStep(Step::kSelect, -inf);
    if (!PlaceMask(op_.inputs[*select], &step.condition)) {
      return false;
    }
    spec_->steps.push_back(step);
  }
  return true;
}

bool FirstClassResolver::Resolve() {
  const Dims& q = *tensor(op_.inputs[0]).dims;
  const Dims& k = *tensor(op_.inputs[1]).dims;
  const Dims& v = *tensor(op_.inputs[2]).dims;
  ragged_ = FindInput(op_, "query_offsets").has_value();
  heads_ = q[1];
  kv_heads_ = k[1];
  if (kv_heads_ == 0 || heads_ % kv_heads_ != 0) {
    return Fail(absl::StrCat(heads_, " query heads over ", kv_heads_, " key heads"));
  }
  spec_->batch = {k[0], kv_heads_, heads_ / kv_heads_};
  spec_->q_len = ragged_ ? q[0] : q[2];
  spec_->head_size = k[3];
  spec_->kv_len = k[2];
  spec_->v_head_size = v[3];
  const auto* mode = op_.Find<Attr::kMode>();
  if (mode != nullptr && *mode == "none") spec_->softmax_mode = SoftmaxMode::kNone;
  spec_->stats_of_empty = -std::numeric_limits<float>::infinity();

  const float* scale = op_.Find<Attr::kScale>();
  spec_->steps.push_back(ConstantStep(
      Step::kMultiply, scale != nullptr ? *scale : 1.f / std::sqrt(static_cast<float>(k[3]))));
  if (const float* cap = op_.Find<Attr::kSoftCap>()) {
    spec_->steps.push_back(ConstantStep(Step::kDivide, *cap));
    spec_->steps.push_back(ConstantStep(Step::kTanh, 0.f));
    spec_->steps.push_back(ConstantStep(Step::kMultiply, *cap));
  }
  if (!PlaceRows(q_, false, k[3], &spec_->q) || !Masks() ||
      !PlaceRows(output_, true, v[3], &spec_->output) ||
      (op_.outputs.size() > 1 && !PlaceRows(op_.outputs[1], true, 1, &spec_->stats))) {
    return false;
  }
  return !FindInput(op_, "sinks") || PlacePerHead("sinks", &spec_->sinks);
}

bool Resolver::ResolveFirstClass() {
  const Op& attention = op(match_.first_class);
  FirstClassResolver resolver(graph_, attention, match_.q.source, match_.output, inputs_, outputs_,
                              spec_);
  if (!resolver.Resolve()) return Fail(resolver.why());
  // K and V lie over the heads of theirs.
  rank_ = 4;
  for (int axis = 0; axis < 2; ++axis) {
    batch_.begin[axis] = axis;
    batch_.end[axis] = axis + 1;
  }
  frame_ = {spec_->batch[0], spec_->batch[1], spec_->kv_len, spec_->head_size};
  int64_t scores_rotated = 0;
  // Of an operand of the op, or of its output.
  const auto add = [&](absl::Span<const OpIndex> ops, TensorId id, int64_t* rotated) {
    Rotations rotations;
    const Dims& dims = *tensor(id).dims;
    for (const OpIndex index : ops) {
      if (op(index).kind == OpKind::kHadamard) {
        rotations.push_back({index, PlacesAlongLastAxis(dims)});
      }
    }
    return AddRotations(rotations, dims, static_cast<int>(dims.size()) - 1, rotated);
  };
  std::vector<OpIndex> before;
  for (const ChainOp& step : match_.q.ops) before.push_back(step.op);
  return ResolveSegments(match_.k, 2, 3, attention, &spec_->k, &scores_rotated) &&
         add(before, attention.inputs[0], &scores_rotated) &&
         ResolveRotation(attention, "Q and K", scores_rotated, &spec_->q_hadamard) &&
         ResolveSegments(match_.v, 2, 3, attention, &spec_->v, &output_rotated_) &&
         add(match_.output_ops, attention.outputs[0], &output_rotated_) &&
         ResolveRotation(attention, "V and the output", output_rotated_, &spec_->output_hadamard);
}

}  // namespace kvant
