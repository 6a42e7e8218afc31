// Views of what the scores meet on the way to the SoftMax.
#include <algorithm>

#include "kvant/patterns/resolver.h"

namespace kvant {

bool Resolver::ResolveStep(const StepMatch& match) {
  ScoreStep step;
  step.kind = match.kind;
  step.inverted = match.inverted;
  if (match.constant) step.operand.constant = Constant(*match.constant);
  if (match.operand.present && !PlaceOperand(match.operand, match, &step.operand)) return false;
  if (match.condition.present) {
    Operand condition;
    if (!PlaceOperand(match.condition, match, &condition)) return false;
    if (condition.constant) {
      // One that keeps all scores is no step.
      if ((condition.constant->value() != 0) != match.inverted) return true;
      return Fail(op(match.op), "its condition is the constant ", condition.constant->ToString(),
                  ", which keeps no score");
    }
    step.condition = condition.view;
  }
  if (match.kind == ScoreStep::Kind::kBand && !ResolveBand(match, &step)) return false;
  spec_->steps.push_back(step);
  return true;
}

bool Resolver::ResolveBand(const StepMatch& match, ScoreStep* step) {
  step->left = match.left;
  step->right = match.right;
  for (const OpIndex index : {match.row_index, match.col_index}) {
    const bool rows = index == match.row_index;
    // With a softmax over queries, rows that were moved may be those of several heads.
    const bool may_mix = spec_->over_queries && !match_.score_shape_ops.empty();
    if (may_mix || !Counts(op(index), match, rows ? row_ : col_)) {
      return Fail(op(index), "does not count the ", rows ? "rows" : "columns", " of the scores");
    }
  }
  const bool shifted = match.shift_add.present || match.shift_sub.present;
  step->alignment = shifted ? ScoreStep::Alignment::kRuntime : ScoreStep::Alignment::kTopLeft;
  for (const auto& [chain, operand] : {std::pair(&match.shift_add, &step->shift_add),
                                       std::pair(&match.shift_sub, &step->shift_sub)}) {
    if (!chain->present) {
      if (shifted) operand->constant = Constant(int32_t{0});
    } else if (!PlaceOperand(*chain, match, operand)) {
      return false;
    } else if (!operand->constant && (operand->view.dims[3] != 1 || operand->view.dims[4] != 1)) {
      return Fail(tensor(chain->source).Label(), " [", DimsToString(*tensor(chain->source).dims),
                  "] shifts a diagonal by row or column");
    }
  }
  return true;
}

// Whether an index among the scores is that of `axis`, taken back to the axes of the first MatMul's
// result.
bool Resolver::Counts(const Op& index, const StepMatch& step, int axis) {
  if (std::ranges::count(frame_, 0) > 0) return true;  // no scores at all
  const LogicalTensor& source = tensor(index.inputs[0]);
  FoldedView counted = FoldedView::Counting(*source.dims, Axis<Attr::kAxis>(index, source.rank()));
  if (!TakeBack(step, counted)) return false;
  for (int i = 0; i < counted.rank(); ++i) {
    for (const FoldedView::Atom& atom : counted.axis(i)) {
      if (i == axis ? atom != FoldedView::Atom{frame_[i], 1} : atom.stride != 0) return false;
    }
  }
  return true;
}

// From what a step gives to the first MatMul's result: broadcast, then through the moves before it.
bool Resolver::TakeBack(const StepMatch& step, FoldedView& view) const {
  const LogicalTensor& result = tensor(op(step.op).outputs[0]);
  bool ok = view.BroadcastTo(step.shape_ops_before == 0 ? frame_ : *result.dims);
  for (int i = step.shape_ops_before; ok && i-- > 0;) {
    ok = MoveBack(op(match_.score_shape_ops[i]), view);
  }
  return ok && view.rank() == rank_;
}

// An operand of the scores, broadcast to them where it enters, then taken back
// through the moves before that to the axes of the first MatMul's result.
bool Resolver::PlaceOperand(const Chain& chain, const StepMatch& step, Operand* operand) {
  if (tensor(chain.source).elements() == 1) {
    *operand = ScalarOperand(chain.source);
    return true;
  }
  Folded folded;
  if (!FoldChain(chain, &folded)) return false;
  operand->view = folded.view;
  if (TakeBack(step, folded.data) && Place(folded.data, true, row_, col_, true, &operand->view)) {
    return true;
  }
  return Fail(op(step.op), tensor(chain.source).Label(),
              " is not evenly strided along the scores' axes");
}

Operand Resolver::ScalarOperand(TensorId id) {
  Operand operand;
  operand.constant = tensor(id).value;
  if (operand.constant) {
    folded_.push_back(id);
  } else {
    operand.view = Input(id);
    operand.view.dims.fill(1);
  }
  return operand;
}

}  // namespace kvant
