// The scores: from the SoftMax back to the MatMul of Q and K, one step at a time.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/matcher.h"

namespace kvant {
namespace {

constexpr int kSearchBudget = 64;

// A step that is one op.
struct SimpleStep {
  ScoreStep::Kind kind{};
  bool has_operand = false;
};

// Nothing for other ops.
std::optional<SimpleStep> StepOf(OpKind kind) {
  switch (kind) {
#define KVANT_STEP_None(name) \
  case OpKind::k##name:       \
    return SimpleStep{ScoreStep::Kind::k##name, false};
#define KVANT_STEP_One(name) \
  case OpKind::k##name:      \
    return SimpleStep{ScoreStep::Kind::k##name, true};
#define KVANT_STEP_Other(name)
#define KVANT_SCORE_STEP(name, operands, words) KVANT_STEP_##operands(name)
#include "kvant/graph/score_steps.inc"
#undef KVANT_SCORE_STEP
#undef KVANT_STEP_None
#undef KVANT_STEP_One
#undef KVANT_STEP_Other
    default:
      return std::nullopt;
  }
}

// One side of a band's comparison: a coordinate plus and minus scalars.
struct BandSide {
  OpIndex index = Graph::kNoOp;  // GenIndex
  absl::InlinedVector<TensorId, 2> plus, minus;
  absl::InlinedVector<OpIndex, 2> ops;
};

bool HasIndex(const Graph& graph, TensorId tensor, int depth) {
  const OpIndex producer = graph.FindTensor(tensor)->producer.op;
  if (producer == Graph::kNoOp || depth == 0) return false;
  const Op& op = graph.ops()[producer];
  if (op.kind == OpKind::kGenIndex) return true;
  if (op.kind == OpKind::kSubtract) return HasIndex(graph, op.inputs[0], depth - 1);
  return op.kind == OpKind::kAdd &&
         (HasIndex(graph, op.inputs[0], depth - 1) || HasIndex(graph, op.inputs[1], depth - 1));
}

// GenIndex, through Add and Subtract of other values, all of them integers.
bool ParseBandSide(const Graph& graph, TensorId tensor, BandSide* side) {
  constexpr int kDepth = 4;
  while (HasIndex(graph, tensor, kDepth)) {
    const OpIndex producer = graph.FindTensor(tensor)->producer.op;
    const Op& op = graph.ops()[producer];
    if (op.kind == OpKind::kGenIndex) {
      side->index = producer;
      return true;
    }
    const int on = HasIndex(graph, op.inputs[0], kDepth) ? 0 : 1;
    if (graph.tensor(op.outputs[0]).type != kS32 || graph.tensor(op.inputs[1 - on]).type != kS32) {
      return false;
    }
    (op.kind == OpKind::kAdd ? side->plus : side->minus).push_back(op.inputs[1 - on]);
    side->ops.push_back(producer);
    tensor = op.inputs[on];
  }
  return false;
}

// The axis of a GenIndex counted from the end: -1 is the last. 0: unknown.
int AxisFromEnd(const Graph& graph, const Op& index) {
  const int64_t axis = index.Get<Attr::kAxis>();
  const int rank = graph.tensor(index.inputs[0]).rank();
  if (axis < 0) return static_cast<int>(std::max<int64_t>(axis, -kMaxRank));
  return rank < 0 ? 0 : static_cast<int>(axis - rank);
}

}  // namespace

bool AttentionMatcher::FromMatMul(TensorId tensor, int* budget) const {
  for (;;) {
    const OpIndex producer = Producer(tensor);
    if (producer == Graph::kNoOp || --*budget < 0) return false;
    const Op& from = op(producer);
    if (from.kind == OpKind::kMatMul) return true;
    const std::optional<SimpleStep> step = StepOf(from.kind);
    if (ClassOf(from.kind) == OpClass::kMove || (step && !step->has_operand)) {
      tensor = from.inputs[0];
    } else if (step) {
      if (FromMatMul(from.inputs[0], budget)) return true;
      tensor = from.inputs[1];
    } else if (from.kind == OpKind::kSelect) {
      if (FromMatMul(from.inputs[1], budget)) return true;
      tensor = from.inputs[2];
    } else {
      return false;
    }
  }
}

bool AttentionMatcher::MatchScores() {
  TensorId tensor = op(match_->softmax).inputs[0];
  // Bounded, since any number of SoftMax may share what their scores come from.
  for (int steps = 0;; ++steps) {
    const OpIndex producer = graph_.FindTensor(tensor)->producer.op;
    if (steps == kSearchBudget) {
      return Fail(absl::StrCat("no MatMul is among the ", kSearchBudget, " ops before it"));
    }
    if (producer == Graph::kNoOp) {
      const std::string& name = graph_.tensor(tensor).name;
      return Fail(absl::StrCat(
          "its scores come from input ",
          name.empty() ? absl::StrCat(tensor) : absl::StrCat("'", Printable(name), "'"),
          " (tensor ", tensor, "), not from a MatMul"));
    }
    if (taken_[producer]) {
      return Fail(absl::StrCat(op(producer).ToString(), " is part of another partition"));
    }
    if (op(producer).kind == OpKind::kMatMul) {
      match_->qk = producer;
      break;
    }
    if (!MatchScoreOp(producer, &tensor)) return false;
  }
  const Op& qk = op(match_->qk);
  if (qk.inputs.size() > 2) {
    StepMatch bias;
    bias.kind = ScoreStep::Kind::kAdd;
    bias.op = match_->qk;
    bias.operand = MatchOperand(qk.inputs[2]);
    bias.operand_input = 2;
    bias.shape_ops_before = static_cast<int>(match_->score_shape_ops.size());
    match_->steps.push_back(std::move(bias));
  }
  match_->q_input = col_ == -1 ? 0 : 1;
  std::reverse(match_->steps.begin(), match_->steps.end());
  std::reverse(match_->score_shape_ops.begin(), match_->score_shape_ops.end());
  const int shape_ops = static_cast<int>(match_->score_shape_ops.size());
  for (StepMatch& step : match_->steps) step.shape_ops_before = shape_ops - step.shape_ops_before;
  return true;
}

// One op further back: *tensor becomes the scores that go into it.
bool AttentionMatcher::MatchScoreOp(OpIndex index, TensorId* tensor) {
  const Op& step_op = op(index);
  switch (step_op.kind) {
    case OpKind::kTypeCast:
    case OpKind::kReorder:
      match_->helpers.push_back(index);
      break;
    case OpKind::kStaticReshape:
    case OpKind::kStaticTranspose:
      match_->score_shape_ops.push_back(index);
      break;
    case OpKind::kSelect:
      return MatchSelect(index, tensor);
    default: {
      const std::optional<SimpleStep> simple = StepOf(step_op.kind);
      if (simple && simple->has_operand) return MatchBinary(index, simple->kind, tensor);
      if (!simple) {
        return Fail(absl::StrCat(step_op.ToString(),
                                 " is not a step that scores can take before the SoftMax"));
      }
      StepMatch step;
      step.kind = simple->kind;
      step.op = index;
      step.shape_ops_before = static_cast<int>(match_->score_shape_ops.size());
      match_->steps.push_back(std::move(step));
    }
  }
  *tensor = step_op.inputs[0];
  return true;
}

bool AttentionMatcher::MatchBinary(OpIndex index, ScoreStep::Kind kind, TensorId* tensor) {
  const Op& binary = op(index);
  int budget = kSearchBudget;
  int scores = FromMatMul(binary.inputs[0], &budget) ? 0 : 1;
  budget = kSearchBudget;
  if (scores == 1 && !FromMatMul(binary.inputs[1], &budget)) {
    return Fail(absl::StrCat("no input of ", binary.ToString(), " comes from a MatMul"));
  }
  if (!IsFloat(graph_.tensor(binary.outputs[0]).type)) {
    return Fail(absl::StrCat(binary.ToString(), " rounds the scores to integers"));
  }
  StepMatch step;
  step.kind = kind;
  step.op = index;
  step.operand = MatchOperand(binary.inputs[1 - scores]);
  step.operand_input = 1 - scores;
  step.shape_ops_before = static_cast<int>(match_->score_shape_ops.size());
  if (scores == 1 && binary.kind == OpKind::kDivide) {
    return Fail(absl::StrCat(binary.ToString(), " divides by the scores"));
  }
  if (scores == 1 && binary.kind == OpKind::kSubtract) {  // operand - s = s * -1 + operand
    step.kind = ScoreStep::Kind::kAdd;
    StepMatch negate;
    negate.kind = ScoreStep::Kind::kMultiply;
    negate.op = index;
    negate.constant = -1.f;
    negate.shape_ops_before = step.shape_ops_before;
    match_->steps.push_back(std::move(step));
    match_->steps.push_back(std::move(negate));
  } else {
    match_->steps.push_back(std::move(step));
  }
  *tensor = binary.inputs[scores];
  return true;
}

bool AttentionMatcher::MatchSelect(OpIndex index, TensorId* tensor) {
  const Op& select = op(index);
  int budget = kSearchBudget;
  const int scores = FromMatMul(select.inputs[1], &budget) ? 1 : 2;
  budget = kSearchBudget;
  if (scores == 2 && !FromMatMul(select.inputs[2], &budget)) {
    return Fail(absl::StrCat("neither branch of ", select.ToString(), " comes from a MatMul"));
  }
  StepMatch step;
  step.op = index;
  step.inverted = scores == 2;
  step.operand = MatchOperand(select.inputs[3 - scores]);
  step.operand_input = 3 - scores;
  step.shape_ops_before = static_cast<int>(match_->score_shape_ops.size());
  if (!MatchBand(select.inputs[0], &step)) {
    step.kind = ScoreStep::Kind::kSelect;
    step.condition = MatchOperand(select.inputs[0]);
  }
  match_->steps.push_back(std::move(step));
  *tensor = select.inputs[scores];
  return true;
}

// GreaterEqual of a row and a column coordinate, each plus or minus scalars.
bool AttentionMatcher::MatchBand(TensorId condition, StepMatch* step) {
  const OpIndex producer = Producer(condition);
  if (producer == Graph::kNoOp || op(producer).kind != OpKind::kGreaterEqual ||
      !SingleUse(condition)) {
    return false;
  }
  BandSide sides[2];
  for (int i = 0; i < 2; ++i) {
    if (!ParseBandSide(graph_, op(producer).inputs[i], &sides[i])) return false;
    for (OpIndex member : sides[i].ops) {
      if (taken_[member]) return false;
    }
    if (taken_[sides[i].index]) return false;
  }
  int axes[2] = {AxisFromEnd(graph_, op(sides[0].index)), AxisFromEnd(graph_, op(sides[1].index))};
  if (axes[0] == 0 && axes[1] == 0) {  // unknown rank: neighbours are the last two
    const int64_t difference =
        op(sides[0].index).Get<Attr::kAxis>() - op(sides[1].index).Get<Attr::kAxis>();
    axes[0] = difference == -1 ? -2 : -1;
    axes[1] = difference == -1 ? -1 : (difference == 1 ? -2 : -1);
  }
  const int row = -3 - col_;
  const bool row_first = axes[0] == row && axes[1] == col_;
  if (!row_first && !(axes[0] == col_ && axes[1] == row)) return false;

  // row + shift >= col: nothing to the right of the diagonal.
  // col >= row + shift: nothing to the left of it.
  const BandSide& rows = sides[row_first ? 0 : 1];
  const BandSide& cols = sides[row_first ? 1 : 0];
  absl::InlinedVector<TensorId, 4> add(rows.plus.begin(), rows.plus.end());
  add.insert(add.end(), cols.minus.begin(), cols.minus.end());
  absl::InlinedVector<TensorId, 4> sub(rows.minus.begin(), rows.minus.end());
  sub.insert(sub.end(), cols.plus.begin(), cols.plus.end());
  if (add.size() > 1 || sub.size() > 1) return false;
  step->kind = ScoreStep::Kind::kBand;
  (row_first ? step->right : step->left) = 0;
  step->row_index = rows.index;
  step->col_index = cols.index;
  if (!add.empty()) step->shift_add = MatchOperand(add[0]);
  if (!sub.empty()) step->shift_sub = MatchOperand(sub[0]);
  match_->helpers.push_back(producer);
  for (const BandSide& side : sides) {
    match_->helpers.insert(match_->helpers.end(), side.ops.begin(), side.ops.end());
  }
  return true;
}

}  // namespace kvant
