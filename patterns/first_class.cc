// ScaledDotProductAttention as an AttentionSpec: no matching, same result.
//
// The order of its steps: scale, soft cap, ALiBi, bias, band, select.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "kvant/patterns/resolver.h"

namespace kvant {
namespace {

using Step = ScoreStep::Kind;

// Position among the op's inputs; 0 if absent.
size_t FindOptionalInput(const Op& op, std::string_view name) {
  const auto* names = op.attrs.Get<std::string>(Attr::kOptionalInputs);
  if (names == nullptr) return 0;
  std::string_view rest = *names;
  for (size_t input = 3; !rest.empty() && input < op.inputs.size(); ++input) {
    const size_t comma = rest.find(',');
    if (rest.substr(0, comma) == name) return input;
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
  }
  return 0;
}

ScoreStep ConstantStep(Step kind, float constant) {
  ScoreStep step;
  step.kind = kind;
  if (kind != Step::kTanh) step.operand.constant = Constant(constant);
  return step;
}

}  // namespace

bool HasOptionalInput(const Op& op, std::string_view name) {
  return FindOptionalInput(op, name) != 0;
}

// Maps rank-4 tensors with Hq heads to [N, Hkv, R, rows, cols].
class FirstClassResolver {
 public:
  FirstClassResolver(const Graph& graph, const Op& op, absl::Span<const TensorId> inputs,
                     absl::Span<const TensorId> outputs, AttentionSpec* spec)
      : graph_(graph), op_(op), inputs_(inputs), outputs_(outputs), spec_(spec) {}

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
  bool PlaceTensor(TensorId id, bool output, int64_t rows, int64_t cols, bool matrix, View* view);
  bool PlacePerHead(std::string_view name, View* view);
  bool PlaceSegment(int input, Attr group_shape, std::string_view scales, std::string_view zps,
                    KvSegment* segment);
  bool PlaceScales(TensorId id, const Op& op, Attr group_shape, const LogicalTensor& data,
                   View* view, std::array<int64_t, kViewRank>* group);
  bool Masks();
  View Port(TensorId id, bool output) const;

  const Graph& graph_;
  const Op& op_;
  absl::Span<const TensorId> inputs_, outputs_;
  AttentionSpec* spec_;
  std::string why_;
  int64_t heads_ = 1, kv_heads_ = 1;
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

bool FirstClassResolver::PlaceTensor(TensorId id, bool output, int64_t rows, int64_t cols,
                                     bool matrix, View* view) {
  *view = Port(id, output);
  if (Place(FoldedView::Of(tensor(id)), spec_->batch[0], heads_, rows, cols, matrix, view,
            nullptr)) {
    return true;
  }
  return Fail(absl::StrCat("tensor ", id, " of [", DimsToString(*tensor(id).dims),
                           "] does not fit its heads"));
}

bool FirstClassResolver::PlacePerHead(std::string_view name, View* view) {
  const TensorId id = op_.inputs[FindOptionalInput(op_, name)];
  FoldedView folded = FoldedView::Of(tensor(id));
  const int64_t dims[] = {1, tensor(id).elements(), 1, 1};
  *view = Port(id, false);
  if (folded.Reshape(dims) && Place(folded, 1, heads_, 1, 1, true, view, nullptr)) return true;
  return Fail(absl::StrCat(std::string(name), " of ", tensor(id).elements(), " elements for ",
                           heads_, " heads"));
}

bool FirstClassResolver::PlaceScales(TensorId id, const Op& op, Attr group_shape,
                                     const LogicalTensor& data, View* view,
                                     std::array<int64_t, kViewRank>* group) {
  *view = Port(id, false);
  const LogicalTensor& scales = tensor(id);
  FoldedView folded;
  const Dims& dims = *data.dims;
  const auto* groups = op.attrs.Get<std::vector<int64_t>>(group_shape);
  if (scales.elements() == 1) {
    const Dims none(dims.size(), 0);
    folded = FoldedView(dims, none);
  } else if (scales.rank() == 4) {
    Dims counts(4);
    for (int i = 0; i < 4; ++i) {
      const int64_t extent = (*scales.dims)[i];
      counts[i] = groups != nullptr && groups->size() == 4 ? (*groups)[i]
                                                           : (extent == 0 ? 1 : dims[i] / extent);
      if (extent * counts[i] != dims[i]) return false;
    }
    folded = FoldedView::Of(scales).Repeat(counts);
  } else {
    return false;
  }
  return Place(folded, dims[0], dims[1], dims[2], dims[3], true, view, group);
}

bool FirstClassResolver::PlaceSegment(int input, Attr group_shape, std::string_view scales,
                                      std::string_view zps, KvSegment* segment) {
  const TensorId id = op_.inputs[input];
  const LogicalTensor& data = tensor(id);
  const Dims& dims = *data.dims;
  segment->data = Port(id, false);
  if (!Place(FoldedView::Of(data), spec_->batch[0], kv_heads_, dims[2], dims[3], false,
             &segment->data, nullptr)) {
    return Fail(absl::StrCat("tensor ", id, " is not evenly strided"));
  }
  const size_t scales_input = FindOptionalInput(op_, scales);
  if (scales_input == 0) return true;
  segment->quantization.emplace();
  Quantization& quantization = *segment->quantization;
  std::array<int64_t, kViewRank> groups;
  bool ok = PlaceScales(op_.inputs[scales_input], op_, group_shape, data, &quantization.scales,
                        &quantization.group);
  if (const size_t zp = FindOptionalInput(op_, zps); ok && zp != 0) {
    ok = PlaceScales(op_.inputs[zp], op_, group_shape, data, &quantization.zero_points, &groups);
    for (int i = 0; ok && i < kViewRank; ++i) {
      const int64_t finer = std::min(groups[i], quantization.group[i]);
      ok = groups[i] == quantization.group[i] || quantization.scales.dims[i] == 1 ||
           quantization.zero_points.dims[i] == 1;
      quantization.group[i] = finer;
    }
  }
  if (!ok)
    return Fail(
        absl::StrCat(std::string(scales), " or ", std::string(zps), " do not fit tensor ", id));
  return true;
}

bool FirstClassResolver::Masks() {
  const float inf = std::numeric_limits<float>::infinity();
  const auto* alignment = op_.attrs.Get<std::string>(Attr::kMaskAlignment);
  const auto aligned = alignment != nullptr && *alignment == "bottom_right"
                           ? ScoreStep::Alignment::kBottomRight
                           : ScoreStep::Alignment::kTopLeft;
  if (HasOptionalInput(op_, "alibi_slopes")) {
    ScoreStep step;
    step.kind = Step::kAlibi;
    step.alignment = aligned;
    if (!PlacePerHead("alibi_slopes", &step.operand.view)) return false;
    spec_->steps.push_back(step);
  }
  if (const size_t bias = FindOptionalInput(op_, "bias"); bias != 0) {
    ScoreStep step;
    step.kind = Step::kAdd;
    if (!PlaceTensor(op_.inputs[bias], false, spec_->q_len, spec_->kv_len, true,
                     &step.operand.view)) {
      return false;
    }
    spec_->steps.push_back(step);
  }
  const int64_t left = op_.attrs.GetOr<int64_t>(Attr::kLeftWindow, -1);
  const int64_t right = op_.attrs.GetOr<int64_t>(Attr::kRightWindow, -1);
  if (left >= 0 || right >= 0) {
    ScoreStep step = ConstantStep(Step::kBand, -inf);
    step.alignment = aligned;
    if (left >= 0) step.left = left;
    if (right >= 0) step.right = right;
    spec_->steps.push_back(step);
  }
  if (const size_t select = FindOptionalInput(op_, "select"); select != 0) {
    ScoreStep step = ConstantStep(Step::kSelect, -inf);
    if (!PlaceTensor(op_.inputs[select], false, spec_->q_len, spec_->kv_len, true,
                     &step.condition)) {
      return false;
    }
    spec_->steps.push_back(step);
  }
  return true;
}

bool FirstClassResolver::Resolve() {
  for (const TensorId id : op_.inputs) {
    if (tensor(id).value) return Fail(absl::StrCat("tensor ", id, " is a constant"));
  }
  for (int i = 0; i < 3; ++i) {
    if (tensor(op_.inputs[i]).rank() != 4) {
      return Fail(absl::StrCat("tensor ", op_.inputs[i], " is not of rank 4"));
    }
  }
  const Dims& q = *tensor(op_.inputs[0]).dims;
  const Dims& k = *tensor(op_.inputs[1]).dims;
  const Dims& v = *tensor(op_.inputs[2]).dims;
  heads_ = q[1];
  kv_heads_ = k[1];
  if (kv_heads_ == 0 || heads_ % kv_heads_ != 0) {
    return Fail(absl::StrCat(heads_, " query heads over ", kv_heads_, " key heads"));
  }
  spec_->batch = {q[0], kv_heads_, heads_ / kv_heads_};
  spec_->q_len = q[2];
  spec_->head_size = q[3];
  spec_->kv_len = k[2];
  spec_->v_head_size = v[3];
  const auto* mode = op_.attrs.Get<std::string>(Attr::kMode);
  if (mode != nullptr && *mode == "none") spec_->softmax_mode = SoftmaxMode::kNone;

  const float scale =
      op_.attrs.GetOr<float>(Attr::kScale, 1.f / std::sqrt(static_cast<float>(q[3])));
  spec_->steps.push_back(ConstantStep(Step::kMultiply, scale));
  if (const float* cap = op_.attrs.Get<float>(Attr::kSoftCap)) {
    spec_->steps.push_back(ConstantStep(Step::kDivide, *cap));
    spec_->steps.push_back(ConstantStep(Step::kTanh, 0.f));
    spec_->steps.push_back(ConstantStep(Step::kMultiply, *cap));
  }
  spec_->k.emplace_back();
  spec_->v.emplace_back();
  if (!PlaceTensor(op_.inputs[0], false, q[2], q[3], false, &spec_->q) ||
      !PlaceSegment(1, Attr::kKGroupShape, "k_scales", "k_zps", &spec_->k[0]) ||
      !PlaceSegment(2, Attr::kVGroupShape, "v_scales", "v_zps", &spec_->v[0]) || !Masks() ||
      !PlaceTensor(op_.outputs[0], true, q[2], v[3], false, &spec_->output)) {
    return false;
  }
  if (op_.outputs.size() > 1 && !PlaceTensor(op_.outputs[1], true, q[2], 1, false, &spec_->stats)) {
    return false;
  }
  if (HasOptionalInput(op_, "sinks") && !PlacePerHead("sinks", &spec_->sinks)) return false;
  if (const size_t lengths = FindOptionalInput(op_, "kv_lengths"); lengths != 0) {
    const LogicalTensor& tensor = this->tensor(op_.inputs[lengths]);
    spec_->kv_lengths = Port(tensor.id, false);
    spec_->kv_lengths.dims.fill(1);
    if (tensor.elements() > 1) {
      if (tensor.rank() != 1 || tensor.elements() != q[0]) {
        return Fail(absl::StrCat(tensor.elements(), " KV lengths for a batch of ", q[0]));
      }
      spec_->kv_lengths.dims[0] = q[0];
      spec_->kv_lengths.strides[0] = tensor.StridesOrDense()[0];
    }
  }
  return true;
}

bool Resolver::ResolveFirstClass() {
  FirstClassResolver resolver(graph_, op(match_.first_class), inputs_, outputs_, spec_);
  if (resolver.Resolve()) {
    rank_ = 4;
    batch_.end[0] = 1;
    return true;
  }
  return Fail(resolver.why());
}

}  // namespace kvant
