// The scores: from the SoftMax back to the MatMul of Q and K, one step at a time.
//
// A step has one or two inputs that may be the scores. The walk tries the first, then the second.
// It adds steps on its way back, when it has found the MatMul: so they come in order of
// application, and a branch that ends elsewhere leaves nothing behind.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvant/patterns/matcher.h"

namespace kvant {
namespace {

// The step that has the name of the op; nothing if none has.
std::optional<ScoreStep::Kind> StepOf(OpKind kind) {
  static constexpr std::string_view kNames[] = {
#define KVANT_SCORE_STEP(name, ...) #name,
#include "kvant/graph/score_steps.inc"
  };
  return FindByName<ScoreStep::Kind>(kNames, OpKindName(kind));
}

// What a band compares, the second side subtracted from the first: coordinates and scalars.
struct BandSum {
  struct Coordinate {
    OpIndex index = Graph::kNoOp;  // GenIndex
    bool minus = false;
  };
  absl::InlinedVector<Coordinate, 2> coordinates;
  absl::InlinedVector<TensorId, 2> plus, minus;
  absl::InlinedVector<OpIndex, 4> ops;

  void AddScalar(TensorId scalar, bool is_minus) { (is_minus ? minus : plus).push_back(scalar); }
};

// GenIndex, through Add and Subtract of coordinates and other values, all of them integers. False,
// and nothing is added: there is none.
bool AddToBand(const Graph& graph, TensorId tensor, bool minus, BandSum* sum, int depth = 4) {
  const OpIndex producer = graph.FindTensor(tensor)->producer.op;
  if (producer == Graph::kNoOp || depth == 0 || graph.tensor(tensor).type != kS32) return false;
  const Op& op = graph.ops()[producer];
  if (op.kind == OpKind::kGenIndex) {
    sum->coordinates.push_back({producer, minus});
    return true;
  }
  if (op.kind != OpKind::kAdd && op.kind != OpKind::kSubtract) return false;
  for (const TensorId input : op.inputs) {
    if (graph.tensor(input).type != kS32) return false;  // a sum that is rounded
  }
  const bool second = minus != (op.kind == OpKind::kSubtract);
  const bool has_first = AddToBand(graph, op.inputs[0], minus, sum, depth - 1);
  const bool has_second = AddToBand(graph, op.inputs[1], second, sum, depth - 1);
  if (!has_first && !has_second) return false;
  if (!has_first) sum->AddScalar(op.inputs[0], minus);
  if (!has_second) sum->AddScalar(op.inputs[1], second);
  sum->ops.push_back(producer);
  return true;
}

// The axis of a GenIndex counted from the end: -1 is the last. 0: unknown.
int AxisFromEnd(const Graph& graph, const Op& index) {
  const int64_t axis = index.Get<Attr::kAxis>();
  const int rank = graph.tensor(index.inputs[0]).rank();
  if (axis < 0) return static_cast<int>(std::max<int64_t>(axis, -kMaxRank));
  return rank < 0 ? 0 : static_cast<int>(axis - rank);
}

}  // namespace

bool AttentionMatcher::MatchScores() {
  budget_ = kMostSearched;
  dead_ends_.clear();
  match_->q_input = col_ == -1 ? 0 : 1;
  return WalkScores(match_->softmax, op(match_->softmax).inputs[0]) || FailScores();
}

// From the scores that `user` takes. False with dead ends if no MatMul makes them; false without,
// and with a miss, if one does that is not to be fused with it.
bool AttentionMatcher::WalkScores(OpIndex user, TensorId tensor) {
  const OpIndex index = Producer(tensor);
  if (index != Graph::kNoOp && --budget_ < 0) {
    // Any number of SoftMax may share what their scores come from.
    return Fail(absl::StrCat("no MatMul is among the ", kMostSearched, " ops before it"));
  }
  const OpKind kind = KindOf(index);
  if (kind == OpKind::kMatMul) {
    match_->qk = index;
    if (op(index).inputs.size() > 2) {
      StepMatch& bias = AddStep(ScoreStep::Kind::kAdd, index);
      bias.operand = MatchOperand(op(index).inputs[2]);
      bias.operand_input = 2;
    }
    return true;
  }
  if (kind == OpKind::kSelect) return MatchSelect(index);
  const std::optional<ScoreStep::Kind> step = StepOf(kind);
  if (step && ClassOf(kind) == OpClass::kBinary) return MatchBinary(index, *step);
  if (!step && ClassOf(kind) != OpClass::kMove) {
    dead_ends_.push_back({user, tensor});
    return false;
  }
  if (!WalkScores(index, op(index).inputs[0])) return false;
  if (step) {
    AddStep(*step, index);
  } else if (kind == OpKind::kStaticReshape || kind == OpKind::kStaticTranspose) {
    match_->score_shape_ops.push_back(index);
  } else {
    match_->helpers.push_back(index);
  }
  return true;
}

// Walks from input `first` or the one after it; which of them led to the MatMul, or -1.
int AttentionMatcher::WalkEither(OpIndex index, int first) {
  for (const int input : {first, first + 1}) {
    if (WalkScores(index, op(index).inputs[input])) return input;
    if (dead_ends_.empty()) break;
  }
  return -1;
}

StepMatch& AttentionMatcher::AddStep(ScoreStep::Kind kind, OpIndex index) {
  StepMatch& step = match_->steps.emplace_back();
  step.kind = kind;
  step.op = index;
  step.shape_ops_before = static_cast<int>(match_->score_shape_ops.size());
  return step;
}

bool AttentionMatcher::MatchBinary(OpIndex index, ScoreStep::Kind kind) {
  const int scores = WalkEither(index, 0);
  if (scores < 0) return false;
  const Op& binary = op(index);
  if (!IsFloat(graph_.tensor(binary.outputs[0]).type)) {
    return Fail(absl::StrCat(binary.ToString(), " rounds the scores to integers"), index);
  }
  if (scores == 1 && binary.kind == OpKind::kDivide) {
    return Fail(absl::StrCat(binary.ToString(), " divides by the scores"), index);
  }
  if (scores == 1 && binary.kind == OpKind::kSubtract) {  // operand - s = s * -1 + operand
    AddStep(ScoreStep::Kind::kMultiply, index).constant = -1.f;
    kind = ScoreStep::Kind::kAdd;
  }
  StepMatch& step = AddStep(kind, index);
  step.operand = MatchOperand(binary.inputs[1 - scores]);
  step.operand_input = 1 - scores;
  return true;
}

bool AttentionMatcher::MatchSelect(OpIndex index) {
  const int scores = WalkEither(index, 1);
  if (scores < 0) return false;
  const Op& select = op(index);
  StepMatch& step = AddStep(ScoreStep::Kind::kSelect, index);
  step.inverted = scores == 2;
  step.operand_input = 3 - scores;
  step.operand = MatchOperand(select.inputs[step.operand_input]);
  if (!MatchBand(select.inputs[0], &step)) step.condition = MatchOperand(select.inputs[0]);
  return true;
}

// GreaterEqual of a row and a column coordinate, or of their difference, plus at most one scalar
// and minus one.
bool AttentionMatcher::MatchBand(TensorId condition, StepMatch* step) {
  const OpIndex producer = Producer(condition);
  if (KindOf(producer) != OpKind::kGreaterEqual || !SingleUse(condition)) return false;
  BandSum sum;
  for (const bool second : {false, true}) {
    const TensorId side = op(producer).inputs[second ? 1 : 0];
    if (AddToBand(graph_, side, second, &sum)) continue;
    if (graph_.tensor(side).type != kS32) return false;
    sum.AddScalar(side, second);
  }
  if (sum.coordinates.size() != 2 || sum.coordinates[0].minus == sum.coordinates[1].minus) {
    return false;
  }
  const bool swapped = sum.coordinates[0].minus;
  const OpIndex larger = sum.coordinates[swapped ? 1 : 0].index;
  const OpIndex smaller = sum.coordinates[swapped ? 0 : 1].index;
  const auto is_taken = [this](OpIndex member) { return taken_[member] != 0; };
  if (is_taken(larger) || is_taken(smaller) || std::ranges::any_of(sum.ops, is_taken)) return false;
  int axes[2] = {AxisFromEnd(graph_, op(larger)), AxisFromEnd(graph_, op(smaller))};
  if (axes[0] == 0 && axes[1] == 0) {  // unknown rank: neighbours are the last two
    const int64_t difference = op(larger).Get<Attr::kAxis>() - op(smaller).Get<Attr::kAxis>();
    axes[0] = difference == -1 ? -2 : -1;
    axes[1] = difference == -1 ? -1 : (difference == 1 ? -2 : -1);
  }
  const int row = OtherAxis(col_);
  const bool row_first = axes[0] == row && axes[1] == col_;
  if (!row_first && !(axes[0] == col_ && axes[1] == row)) return false;

  // row + shift >= col: nothing to the right of the diagonal.
  // col >= row + shift: nothing to the left of it.
  const auto& add = row_first ? sum.plus : sum.minus;
  const auto& sub = row_first ? sum.minus : sum.plus;
  if (add.size() > 1 || sub.size() > 1) return false;
  step->kind = ScoreStep::Kind::kBand;
  (row_first ? step->right : step->left) = 0;
  step->row_index = row_first ? larger : smaller;
  step->col_index = row_first ? smaller : larger;
  if (!add.empty()) step->shift_add = MatchOperand(add[0]);
  if (!sub.empty()) step->shift_sub = MatchOperand(sub[0]);
  match_->helpers.push_back(producer);
  match_->helpers.insert(match_->helpers.end(), sum.ops.begin(), sum.ops.end());
  return true;
}

}  // namespace kvant
