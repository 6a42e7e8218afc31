// The backward pass of attention:
//
//   P  = Exp(Subtract(scores, statistics))           scores as in the forward pass
//   dV = MatMul(P', dO)                              P' after dropout and casts
//   dS = Multiply(P, Subtract(MatMul(dO, V'), ReduceSum(Multiply(O, dO))))
//     or SoftMaxBackward(MatMul(dO, V'), P)
//   dQ = MatMul(dS', K), dK = MatMul(dS', Q)         dS' after scale and casts
//   dMask = dS, or ReduceSum(dS) over what the mask is broadcast over, if anything wants it
//
// Gradients of shared K and V may be summed over the heads that share them.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvant/patterns/matcher.h"

namespace kvant {
namespace {

constexpr int kMaxDepth = 16;
constexpr int kSearchBudget = 64;

bool IsGradientStep(OpKind kind) {
  return ClassOf(kind) == OpClass::kMove || kind == OpKind::kDropout || kind == OpKind::kMultiply ||
         kind == OpKind::kDivide || kind == OpKind::kSelect || kind == OpKind::kSoftMaxBackward;
}

}  // namespace

bool AttentionMatcher::MatchBackward(OpIndex exp, std::vector<OpIndex>* ops, std::string* why) {
  AttentionMatch match;
  match_ = &match;
  match.softmax = exp;
  why_ = why;
  why->clear();
  col_ = -1;
  gradients_.clear();
  products_ = 0;
  outside_ = Graph::kNoOp;
  const OpIndex subtract = Producer(op(exp).inputs[0]);
  int budget = kSearchBudget;
  const bool is_probs = EntersSoftMaxBackward(op(exp).outputs[0], &budget);
  if (subtract == Graph::kNoOp || op(subtract).kind != OpKind::kSubtract) {
    if (!is_probs) return false;  // an Exp elsewhere in a model
    return Fail("its input is not the result of a Subtract of statistics from scores");
  }
  budget = kSearchBudget;
  const bool from_matmul = FromMatMul(op(subtract).inputs[0], &budget);
  budget = kSearchBudget;
  const bool to_matmul = LeadsToMatMul(op(exp).outputs[0], &budget);
  if (!from_matmul && !to_matmul && !is_probs) return false;
  if (!from_matmul) {
    return Fail(
        absl::StrCat("input 0 of ", op(subtract).ToString(), " does not come from a MatMul"));
  }
  if (!to_matmul) {
    return Fail("no MatMul follows it, as in a backward pass; a forward pass has a SoftMax");
  }
  if (!MatchScores()) return false;
  MarkOps();
  if (!FollowGradient(op(exp).outputs[0], /*of_scores=*/false, 0)) return false;
  if (products_ < 3) {
    return Fail(absl::StrCat("it leads to ", products_, " gradients, not to those of Q, K and V",
                             outside_ == Graph::kNoOp ? ""
                                                      : absl::StrCat("; ", op(outside_).ToString(),
                                                                     " is no step towards one")));
  }
  *ops = in_match_.Sorted();
  for (const OpIndex index : *ops) {
    const TensorId tensor = op(index).outputs[0];
    if (std::find(gradients_.begin(), gradients_.end(), tensor) == gradients_.end()) {
      for (const Graph::Use& use : graph_.FindTensor(tensor)->consumers) {
        if (in_match_[use.op]) continue;
        return Fail(absl::StrCat("the output of ", op(index).ToString(), " is also consumed by ",
                                 op(use.op).ToString()));
      }
    }
  }
  return true;
}

// Why the gradient of the scores that this SoftMaxBackward makes is in no backward pass; empty if
// another sentence says so.
std::string AttentionMatcher::WhyNoBackward(OpIndex softmax_backward) const {
  TensorId probs = op(softmax_backward).inputs[1];
  OpIndex producer = Producer(probs);
  int budget = kSearchBudget;
  while (producer != Graph::kNoOp && ClassOf(op(producer).kind) == OpClass::kMove && --budget > 0) {
    probs = op(producer).inputs[0];
    producer = Producer(probs);
  }
  const OpKind kind = producer == Graph::kNoOp ? OpKind::kEnd : op(producer).kind;
  if (kind == OpKind::kExp || kind == OpKind::kSoftMax) return "";
  const std::string& name = graph_.tensor(probs).name;
  return absl::StrCat(op(softmax_backward).ToString(),
                      " is not fused: its probabilities come from ",
                      producer != Graph::kNoOp ? op(producer).ToString()
                      : name.empty()           ? absl::StrCat("tensor ", probs)
                                               : absl::StrCat("tensor ", probs, " ('", name, "')"),
                      ", not from the Exp of scores less their statistics");
}

bool AttentionMatcher::EntersSoftMaxBackward(TensorId tensor, int* budget) const {
  for (const Graph::Use& use : graph_.FindTensor(tensor)->consumers) {
    if (--*budget < 0) return false;
    const OpKind kind = op(use.op).kind;
    if (kind == OpKind::kSoftMaxBackward && use.port == 1) return true;
    if (ClassOf(kind) == OpClass::kMove && EntersSoftMaxBackward(op(use.op).outputs[0], budget))
      return true;
  }
  return false;
}

// Adds an op; true if it is new.
bool AttentionMatcher::Mark(OpIndex index) { return in_match_.Insert(index); }

// From P or, `of_scores`, dS to the ops that make gradients of them.
bool AttentionMatcher::FollowGradient(TensorId tensor, bool of_scores, int depth) {
  if (depth > kMaxDepth) return Fail("its chain of ops is too long");
  for (const Graph::Use& use : graph_.FindTensor(tensor)->consumers) {
    const Op& consumer = op(use.op);
    if (in_match_[use.op]) continue;
    const bool sums_mask = of_scores && consumer.kind == OpKind::kReduceSum;
    const bool ends = consumer.kind == OpKind::kMatMul || sums_mask;
    if (taken_[use.op] || (!ends && !IsGradientStep(consumer.kind))) {
      if (of_scores) {  // which is the mask's gradient: whatever wants that stays outside
        gradients_.push_back(tensor);
        if (consumer.kind != OpKind::kEnd && outside_ == Graph::kNoOp) outside_ = use.op;
        continue;
      }
      return Fail(
          absl::StrCat(graph_.FindTensor(tensor)->producer.op == match_->softmax
                           ? "its output"
                           : absl::StrCat("the output of ",
                                          op(graph_.FindTensor(tensor)->producer.op).ToString()),
                       " is also consumed by ", consumer.ToString()));
    }
    Mark(use.op);
    if (ends) {
      if (!sums_mask) ++products_;
      FollowProduct(use.op);
      continue;
    }
    bool makes_scores = false;
    if (consumer.kind == OpKind::kMultiply || consumer.kind == OpKind::kDivide ||
        consumer.kind == OpKind::kSoftMaxBackward) {
      const TensorId other = consumer.inputs[1 - use.port];
      if (!CollectCorrection(other, 0)) return false;
      const OpIndex producer = Producer(other);
      makes_scores = producer != Graph::kNoOp && in_match_[producer];
    }
    if (!FollowGradient(consumer.outputs[0], of_scores || makes_scores, depth + 1)) return false;
  }
  return true;
}

// An op that makes a gradient, and what only moves, converts or sums it.
void AttentionMatcher::FollowProduct(OpIndex product) {
  TensorId tensor = op(product).outputs[0];
  for (;;) {
    const auto& consumers = graph_.FindTensor(tensor)->consumers;
    if (consumers.size() != 1 || taken_[consumers[0].op]) break;
    const OpKind kind = op(consumers[0].op).kind;
    if (ClassOf(kind) != OpClass::kMove && kind != OpKind::kReduceSum) break;
    if (!Mark(consumers[0].op)) break;
    tensor = op(consumers[0].op).outputs[0];
  }
  gradients_.push_back(tensor);
}

// What P is multiplied by: dP less its row sum. Scales end at once, at a port.
bool AttentionMatcher::CollectCorrection(TensorId tensor, int depth) {
  const OpIndex producer = Producer(tensor);
  if (producer == Graph::kNoOp || depth > kMaxDepth || in_match_[producer]) return true;
  const Op& from = op(producer);
  switch (from.kind) {
    case OpKind::kSubtract:
      Mark(producer);
      return CollectCorrection(from.inputs[0], depth + 1) &&
             CollectCorrection(from.inputs[1], depth + 1);
    case OpKind::kMatMul:
      Mark(producer);
      return true;
    case OpKind::kReduceSum: {
      Mark(producer);
      const OpIndex multiply = Producer(from.inputs[0]);
      if (multiply != Graph::kNoOp && op(multiply).kind == OpKind::kMultiply &&
          SingleUse(from.inputs[0])) {
        Mark(multiply);
      }
      return true;
    }
    case OpKind::kDropout:
    case OpKind::kTypeCast:
    case OpKind::kReorder:
      Mark(producer);
      return CollectCorrection(from.inputs[0], depth + 1);
    default:
      return true;
  }
}

}  // namespace kvant
