// Views of what the scores meet on the way to the SoftMax.
#include "kvant/patterns/resolver.h"

namespace kvant {

bool Resolver::ResolveSteps() {
  for (const StepMatch& step : match_.steps) {
    if (!ResolveStep(step)) return false;
  }
  return true;
}

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
  for (OpIndex index : {match.row_index, match.col_index}) {
    const LogicalTensor& source = tensor(op(index).inputs[0]);
    const int rank = source.rank();
    const int axis = Axis<Attr::kAxis>(op(index), rank);
    const int expected = (index == match.row_index ? row_ : col_) - rank_ + rank;
    if (!match_.score_shape_ops.empty() || axis != expected ||
        (*source.dims)[axis] != frame_[axis - rank + rank_]) {
      return Fail(op(index), "does not count the rows or columns of the scores");
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
      return Fail("tensor ", chain->source, " [", DimsToString(*tensor(chain->source).dims),
                  "] shifts a diagonal by row or column");
    }
  }
  return true;
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
  const LogicalTensor& result = tensor(op(step.op).outputs[0]);
  bool ok = folded.data.BroadcastTo(step.shape_ops_before == 0 ? frame_ : *result.dims);
  for (int i = step.shape_ops_before; ok && i-- > 0;) {
    ok = MoveBack(op(match_.score_shape_ops[i]), folded.data);
  }
  operand->view = folded.view;
  if (!ok || !Place(folded.data, true, row_, col_, true, &operand->view)) {
    return Fail(op(step.op), "tensor ", chain.source,
                " is not evenly strided along the scores' axes");
  }
  return true;
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
