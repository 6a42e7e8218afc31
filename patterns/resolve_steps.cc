// Views of what the scores meet on the way to the SoftMax.
#include "absl/strings/str_cat.h"
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
  step.operand.constant = match.constant;
  if (match.operand.present && !PlaceOperand(match.operand, match, &step.operand.view)) {
    return false;
  }
  if (match.condition.present && !PlaceOperand(match.condition, match, &step.condition)) {
    return false;
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
    const int axis = NormalizeAxis(op(index).attrs.GetOr<int64_t>(Attr::kAxis, 0), rank);
    const int expected = (index == match.row_index ? row_ : col_) - rank_ + rank;
    if (!match_.score_shape_ops.empty() || axis < 0 || axis != expected ||
        (*source.dims)[axis] != frame_[axis - rank + rank_]) {
      return Fail(
          absl::StrCat(op(index).ToString(), ": does not count the rows or columns of the scores"));
    }
  }
  const bool shifted = match.shift_add.present || match.shift_sub.present;
  step->alignment = shifted ? ScoreStep::Alignment::kRuntime : ScoreStep::Alignment::kTopLeft;
  for (const auto& [chain, operand] : {std::pair(&match.shift_add, &step->shift_add),
                                       std::pair(&match.shift_sub, &step->shift_sub)}) {
    if (!chain->present) {
      if (shifted) operand->constant = 0.f;
    } else if (!PlaceOperand(*chain, match, &operand->view)) {
      return false;
    } else if (operand->view.dims[3] != 1 || operand->view.dims[4] != 1) {
      return Fail(absl::StrCat("tensor ", chain->source, " [",
                               DimsToString(*tensor(chain->source).dims),
                               "] shifts a diagonal by row or column"));
    }
  }
  return true;
}

// An operand of the scores, broadcast to them where it enters, then taken back
// through the moves before that to the axes of the first MatMul's result.
bool Resolver::PlaceOperand(const Chain& chain, const StepMatch& step, View* view) {
  if (tensor(chain.source).elements() == 1) return ScalarOperand(chain, view);
  Folded folded;
  if (!FoldChain(chain, &folded)) return false;
  const LogicalTensor& result = tensor(op(step.op).outputs[0]);
  bool ok = folded.data.BroadcastTo(step.shape_ops_before == 0 ? frame_ : *result.dims);
  for (int i = step.shape_ops_before; ok && i-- > 0;) {
    const Op& mover = op(match_.score_shape_ops[i]);
    if (mover.kind == OpKind::kStaticReshape) {
      ok = folded.data.Reshape(*tensor(mover.inputs[0]).dims);
    } else {
      const auto* order = mover.attrs.Get<std::vector<int64_t>>(Attr::kOrder);
      ok = order != nullptr && folded.data.InverseTranspose(*order);
    }
  }
  *view = folded.view;
  if (!ok || !Place(folded.data, true, row_, col_, true, view)) {
    return Fail(absl::StrCat(op(step.op).ToString(), ": tensor ", chain.source,
                             " is not evenly strided along the scores' axes"));
  }
  return true;
}

bool Resolver::ScalarOperand(const Chain& chain, View* view) {
  const LogicalTensor& scalar = tensor(chain.source);
  if (scalar.elements() != 1) {
    return Fail(absl::StrCat("tensor ", chain.source, ": a scalar is expected, not [",
                             DimsToString(*scalar.dims), "]"));
  }
  *view = Input(chain.source);
  view->dims.fill(1);
  return true;
}

}  // namespace kvant
