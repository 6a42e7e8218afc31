#include "kvant/patterns/resolver.h"

#include <algorithm>

#include "kvant/patterns/matcher.h"

namespace kvant {
namespace {

// Of one that quantizes per tensor.
FakeQuantize FakeQuantizeOf(const Op& quantize, DataType type) {
  const auto& zps = quantize.Get<Attr::kZps>();
  return {type, quantize.Get<Attr::kScales>()[0], zps.empty() ? 0 : zps[0]};
}

// Dim of that axis counted from the end; 1 beyond the rank.
int64_t DimFromEnd(const LogicalTensor& tensor, int from_end) {
  return from_end > tensor.rank() ? 1 : (*tensor.dims)[tensor.rank() - from_end];
}

// Whether an axis is the whole of `whole` or its innermost part.
bool IsTail(absl::Span<const FoldedView::Atom> axis, absl::Span<const FoldedView::Atom> whole) {
  if (axis.empty()) return true;
  return axis.size() == 1 && whole.size() == 1 && axis[0].stride == whole[0].stride &&
         axis[0].extent > 0 && whole[0].extent % axis[0].extent == 0;
}

}  // namespace

View Resolver::Port(absl::Span<const TensorId> ports, TensorId id) const {
  View view;
  view.port = PortOf(ports, id);
  view.type = tensor(id).type;
  view.on_host = tensor(id).property == Property::kHostScalar;
  return view;
}

bool Resolver::Resolve(AttentionSpec* spec) {
  *spec = AttentionSpec();
  spec_ = spec;
  why_.clear();
  spec->fpmath = graph_.options().fpmath;
  spec->apply_to_int = graph_.options().apply_to_int;
  const auto resolve_step = [this](const StepMatch& step) { return ResolveStep(step); };
  const bool resolved = match_.first_class != Graph::kNoOp
                            ? ResolveFirstClass()
                            : ResolveFrame() && ResolveInputs() &&
                                  std::ranges::all_of(match_.steps, resolve_step) &&
                                  ResolveProbs() && ResolveOutput() && ResolveStats();
  return resolved && ResolveLengths() && CheckConstants() && CheckPorts();
}

// Where something is read that has no port, the spec lacks it: a constant that the spec holds for
// another use, or what an op of the match computes, but for the counts of a LoadRanges, which the
// kernels know.
bool Resolver::CheckPorts() {
  for (const TensorId id : no_ports_) {
    if (tensor(id).value) {
      return Fail(tensor(id).Label(), ", the constant ", tensor(id).value->ToString(),
                  ", is used where constants are not fused");
    }
    if (!IsCountOfRanges(id)) {
      return Fail(tensor(id).Label(), " is computed within what would be fused");
    }
  }
  return true;
}

// A constant is no port: where it has not become part of the spec, the spec lacks it.
bool Resolver::CheckConstants() {
  for (const Op& op : graph_.ops()) {
    for (const TensorId id : op.inputs) {
      if (!tensor(id).value || std::ranges::count(folded_, id) > 0) continue;
      return Fail(op, tensor(id).Label(), ", the constant ", tensor(id).value->ToString(),
                  ", is fused only into steps on scores, "
                  "dropout and scales that come with constant zero points");
    }
  }
  return true;
}

// Ranks, batch axes and lengths.
bool Resolver::ResolveFrame() {
  const Op& qk = op(match_.qk);
  const Op& pv = op(match_.pv);
  const Op& softmax = op(match_.softmax);
  const LogicalTensor& scores = tensor(qk.outputs[0]);
  const LogicalTensor& output = tensor(pv.outputs[0]);
  const LogicalTensor& exponents = tensor(softmax.inputs[0]);
  rank_ = output.rank();
  for (const TensorId id : {qk.inputs[0], qk.inputs[1], pv.inputs[0], pv.inputs[1]}) {
    if (tensor(id).rank() < 2) return Fail(softmax, "attention over vectors is not fused");
  }
  if (!CheckMoves()) return false;
  row_ = match_.q_input == 0 ? rank_ - 2 : rank_ - 1;
  col_ = match_.q_input == 0 ? rank_ - 1 : rank_ - 2;
  const int64_t rows = DimFromEnd(scores, rank_ - row_);
  if (!spec_->over_queries) spec_->q_len = rows;
  spec_->kv_len = DimFromEnd(scores, rank_ - col_);
  const int out_row = match_.probs_input == 0 ? rank_ - 2 : rank_ - 1;
  spec_->v_head_size = (*output.dims)[OtherAxis(out_row, rank_)];
  if ((*output.dims)[out_row] != rows ||
      (match_.score_shape_ops.empty() && DimFromEnd(exponents, rank_ - col_) != spec_->kv_len)) {
    return Fail(softmax, "scores of ", rows, " x ", spec_->kv_len,
                " are broadcast to more rows or columns");
  }
  frame_ = *output.dims;
  frame_[row_] = rows;
  frame_[col_] = spec_->kv_len;

  // The last batch axis is the query heads that share K and V if neither has it.
  const bool shared = !spec_->over_queries && DimFromEnd(output, 3) > 1 &&
                      DimFromEnd(tensor(qk.inputs[1 - match_.q_input]), 3) == 1 &&
                      DimFromEnd(tensor(pv.inputs[1 - match_.probs_input]), 3) == 1 &&
                      (rank_ == 4 || softmax.inputs.size() == 1);
  // Leading axes that make up b0; heads that are in the rows need b2 for themselves.
  const int merged = std::max(rank_ - (spec_->over_queries ? 3 : 4), 1);
  for (int axis = 0; axis < rank_ - 2; ++axis) {
    const int view_axis = shared && axis == rank_ - 3 ? 2 : std::max(axis - merged + 1, 0);
    if (batch_.begin[view_axis] == batch_.end[view_axis]) batch_.begin[view_axis] = axis;
    batch_.end[view_axis] = axis + 1;
    spec_->batch[view_axis] *= frame_[axis];
  }
  if (spec_->over_queries) spec_->batch[2] = rows / spec_->q_len;
  return true;
}

// ToView in the frame. With a SoftMax over queries the rows of the scores are heads x queries, as
// in JAX's [B, S, H * Sq], and heads become b2 of whatever has those rows: Q, masks, the output.
bool Resolver::Place(FoldedView folded, bool of_scores, int row, int col, bool broadcast_matrix,
                     View* view, std::array<int64_t, kViewRank>* group) const {
  if (!of_scores || !spec_->over_queries) {
    return ToView(folded, batch_, row, col, broadcast_matrix, view, group);
  }
  Dims dims;
  for (int axis = 0; axis < folded.rank(); ++axis) {
    if (axis == row) dims.push_back(spec_->batch[2]);
    dims.push_back(axis == row ? spec_->q_len : folded.dim(axis));
  }
  if (!folded.Reshape(dims)) return false;
  BatchAxes batch = batch_;
  batch.begin[2] = row;
  batch.end[2] = row + 1;
  return ToView(folded, batch, row + 1, col > row ? col + 1 : col, broadcast_matrix, view, group);
}

// The matcher takes what the SoftMax normalises over for the keys. If the second MatMul sums over
// the other axis, it is the queries.
bool Resolver::SwapOperands() {
  if (match_.k.size() != 1) {
    return Fail(op(match_.qk), "the queries are concatenated");
  }
  swapped_ = true;
  std::swap(match_.q, match_.k);
  match_.q_input = 1 - match_.q_input;
  return true;
}

// Follows each axis of the scores through reshapes and transposes: the second MatMul has to sum
// over the keys, and the SoftMax to normalise over them or over the queries of a head.
bool Resolver::CheckMoves() {
  const Op& softmax = op(match_.softmax);
  const Op& pv = op(match_.pv);
  const LogicalTensor& scores = tensor(op(match_.qk).outputs[0]);
  const int64_t axis_attr = softmax.Get<Attr::kAxis>();
  const LogicalTensor& exponents = tensor(softmax.inputs[0]);
  const int softmax_axis = Axis<Attr::kAxis>(softmax, exponents.rank());
  if (match_.score_shape_ops.empty() && !HaveOp(graph_, match_.probs_ops, OpKind::kStaticReshape) &&
      !HaveOp(graph_, match_.probs_ops, OpKind::kStaticTranspose)) {
    const int from_end = softmax_axis - exponents.rank();
    if (from_end == (match_.q_input == 0 ? -1 : -2)) return true;
    return Fail(softmax, "axis ", axis_attr, " is not that of the keys");
  }
  const int rank = scores.rank();
  const FoldedView start(*scores.dims, DenseStrides(*scores.dims));
  FoldedView view = start;
  const auto move = [&](OpIndex index) {
    const Op& mover = op(index);
    if (mover.kind == OpKind::kStaticReshape) {
      return view.Reshape(*tensor(mover.outputs[0]).dims);
    }
    return mover.kind != OpKind::kStaticTranspose || view.Transpose(mover.Get<Attr::kOrder>());
  };
  bool ok = true;
  for (OpIndex index : match_.score_shape_ops) ok = ok && move(index);
  // An operand may have broadcast the scores meanwhile.
  ok = ok && view.rank() == exponents.rank() &&
       view.dim(softmax_axis) == (*exponents.dims)[softmax_axis];
  const FoldedView normalised = view;
  for (OpIndex index : match_.probs_ops) ok = ok && move(index);
  int contracted = match_.probs_input == 0 ? rank - 1 : rank - 2;
  if (Transposes(pv, match_.probs_input)) contracted = OtherAxis(contracted, rank);
  ok = ok && view.rank() == rank && rank == rank_;
  for (int axis = 0; ok && axis < rank - 2; ++axis) ok = view.axis(axis) == start.axis(axis);
  const auto sums_over = [&](int col) {
    return view.axis(contracted) == start.axis(col) &&
           view.axis(OtherAxis(contracted, rank)) == start.axis(OtherAxis(col, rank));
  };
  int col = match_.q_input == 0 ? rank - 1 : rank - 2;
  if (ok && !sums_over(col)) {
    col = OtherAxis(col, rank);
    ok = sums_over(col);
    if (ok && !SwapOperands()) return false;
  }
  if (!ok) {
    return Fail(pv, "the axes of the probabilities are not those of the scores");
  }
  if (normalised.axis(softmax_axis) == start.axis(col)) return true;
  if (!IsTail(normalised.axis(softmax_axis), start.axis(OtherAxis(col, rank)))) {
    return Fail(softmax, "axis ", axis_attr,
                " is not that of the keys, nor of the queries of a head");
  }
  spec_->over_queries = true;
  spec_->q_len = normalised.dim(softmax_axis);
  return true;
}

bool Resolver::ResolveProbs() {
  spec_->softmax_mode = op(match_.softmax).Get<Attr::kMode>() == "inf_as_zero"
                            ? SoftmaxMode::kInfAsZero
                            : SoftmaxMode::kNone;
  // The product over no tokens is zeros, whatever a softmax of nothing is.
  if (spec_->kv_len == 0) spec_->softmax_mode = SoftmaxMode::kInfAsZero;
  bool moved = !match_.score_shape_ops.empty() || match_.q_input != 0;
  for (OpIndex index : match_.probs_ops) {
    const Op& probs_op = op(index);
    if (probs_op.kind == OpKind::kQuantize) {
      spec_->probs_quantization = FakeQuantizeOf(probs_op, tensor(probs_op.outputs[0]).type);
      // What is NaN becomes code 0, which with a zero point is not 0.
      const bool hides = !std::ranges::all_of(spec_->steps, [](const auto& s) {
        return s.kind == ScoreStep::Kind::kMultiply || s.kind == ScoreStep::Kind::kDivide ||
               s.kind == ScoreStep::Kind::kTanh;
      });
      const bool may_be_nan = spec_->softmax_mode == SoftmaxMode::kNone &&
                              (hides || op(match_.softmax).inputs.size() > 1);
      if (may_be_nan && spec_->probs_quantization->zero_point != 0) {
        return Fail(probs_op,
                    "has a zero point, and a SoftMax of mode none that sees nothing is NaN");
      }
    } else if (probs_op.kind == OpKind::kStaticReshape ||
               probs_op.kind == OpKind::kStaticTranspose) {
      moved = true;
    } else if (probs_op.kind == OpKind::kDropout) {
      if (moved) {
        return Fail(probs_op, "its random bits follow another order than the scores");
      }
      if (tensor(probs_op.outputs[0]).elements() != ElementsOf(frame_)) {
        return Fail(probs_op, "what it drops is the same for a batch that only values have");
      }
      Dropout& dropout = spec_->dropout.emplace();
      dropout.seed = ScalarOperand(probs_op.inputs[1]);
      dropout.offset = ScalarOperand(probs_op.inputs[2]);
      dropout.probability = ScalarOperand(probs_op.inputs[3]);
      if (probs_op.outputs.size() > 1) {
        dropout.mask = Output(probs_op.outputs[1]);
        FoldedView mask = FoldedView::Of(tensor(probs_op.outputs[1]));
        if (!mask.BroadcastTo(frame_) || !ToView(mask, batch_, row_, col_, false, &dropout.mask)) {
          return Fail(probs_op, "its mask is not evenly strided");
        }
      }
    }
  }
  return true;
}

// What a view of the op's result was before it.
bool Resolver::MoveBack(const Op& mover, FoldedView& view) const {
  if (mover.kind == OpKind::kStaticReshape) return view.Reshape(*tensor(mover.inputs[0]).dims);
  return mover.kind != OpKind::kStaticTranspose || view.InverseTranspose(mover.Get<Attr::kOrder>());
}

// From the output port back to the result of the MatMul.
bool Resolver::ResolveOutput() {
  const LogicalTensor& port = tensor(match_.output);
  Folded folded;
  folded.data = FoldedView::Of(port);
  for (size_t i = match_.output_ops.size(); i-- > 0;) {
    const Op& mover = op(match_.output_ops[i]);
    if (mover.kind == OpKind::kHadamard) {
      const LogicalTensor& rotated = tensor(mover.inputs[0]);
      folded.rotations.push_back(
          {match_.output_ops[i], FoldedView::Counting(*rotated.dims, rotated.rank() - 1)});
    } else if (mover.kind == OpKind::kQuantize) {
      spec_->output_quantization = FakeQuantizeOf(mover, port.type);
    } else if (!folded.MoveAll([&](FoldedView& view) { return MoveBack(mover, view); })) {
      return Fail(mover, "cannot be folded into strides");
    }
  }
  spec_->output = Output(match_.output);
  const int row = match_.probs_input == 0 ? rank_ - 2 : rank_ - 1;
  if (!Place(folded.data, true, row, OtherAxis(row, rank_), false, &spec_->output)) {
    return Fail(tensor(match_.output).Label(), ": the output's axes are not evenly strided in it");
  }
  const Op& pv = op(match_.pv);
  return AddRotations(folded.rotations, *tensor(pv.outputs[0]).dims, OtherAxis(row, rank_),
                      &output_rotated_) &&
         ResolveRotation(pv, "V and the output", output_rotated_, &spec_->output_hadamard);
}

bool Resolver::ResolveStats() {
  const Op& softmax = op(match_.softmax);
  if (softmax.outputs.size() < 2) return true;
  if (!match_.score_shape_ops.empty() || spec_->over_queries) {
    return Fail(softmax, "statistics of ",
                spec_->over_queries ? "a softmax over queries" : "reshaped scores");
  }
  if (spec_->kv_len == 0 && softmax.Get<Attr::kMode>() == "none") {
    return Fail(softmax, "statistics of no tokens with mode none");
  }
  Dims dims = frame_;
  dims[col_] = 1;
  if (tensor(softmax.outputs[1]).elements() != ElementsOf(dims)) {
    return Fail(softmax, "its statistics are the same for a batch that only values have");
  }
  FoldedView view = FoldedView::Of(tensor(softmax.outputs[1]));
  spec_->stats = Output(softmax.outputs[1]);
  if (!view.BroadcastTo(dims) || !ToView(view, batch_, row_, col_, false, &spec_->stats)) {
    return Fail(softmax, "its statistics are not evenly strided");
  }
  return true;
}

}  // namespace kvant
