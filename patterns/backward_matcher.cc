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

bool IsGradientStep(OpKind kind) {
  return ClassOf(kind) == OpClass::kMove || kind == OpKind::kDropout || kind == OpKind::kMultiply ||
         kind == OpKind::kDivide || kind == OpKind::kSelect || kind == OpKind::kSoftMaxBackward;
}

}  // namespace

bool AttentionMatcher::MatchBackward(OpIndex exp, std::vector<OpIndex>* ops) {
  AttentionMatch match;
  Begin(Graph::kNoOp, exp, &match);
  col_ = -1;
  gradients_.clear();
  products_ = 0;
  outside_ = left_out_ = Graph::kNoOp;
  const TensorId exponents = op(exp).inputs[0];
  const OpIndex subtract = Producer(exponents);
  const bool subtracts = KindOf(subtract) == OpKind::kSubtract;
  if (!IsNearBackward(subtracts)) return false;
  if (!subtracts) {
    return Fail(absl::StrCat("its input comes from ", SourceOf(exponents),
                             ", not from the Subtract of statistics from scores"),
                subtract);
  }
  if (!MatchScores()) return false;
  if (match.steps.back().kind != ScoreStep::Kind::kSubtract) {
    return Fail(absl::StrCat(op(subtract).ToString(), " subtracts the scores"), subtract);
  }
  MarkOps();
  if (!FollowGradient(op(exp).outputs[0], /*of_scores=*/false, 0)) return false;
  if (products_ < 3) {
    const OpIndex stray = outside_ != Graph::kNoOp ? outside_ : left_out_;
    return Fail(absl::StrCat("it leads to ", products_, " gradients, not to those of Q, K and V",
                             stray == Graph::kNoOp ? ""
                                                   : absl::StrCat("; ", op(stray).ToString(),
                                                                  " is no step towards one")),
                stray);
  }
  ops->assign(in_match_.begin(), in_match_.end());
  for (const OpIndex index : *ops) {
    const TensorId tensor = op(index).outputs[0];
    if (std::ranges::count(gradients_, tensor) > 0) continue;
    if (!IsSeenInside(op(index), tensor, "the output of ")) return false;
  }
  if (left_out_ != Graph::kNoOp && !in_match_.contains(left_out_)) {
    const OpIndex outside = UserOutside(op(left_out_).outputs[0]);
    AddMiss(" is fused without ",
            absl::StrCat(op(left_out_).ToString(),
                         outside == Graph::kNoOp ? ", on which the gradient of its scores depends"
                                                 : ", which is also consumed by ",
                         outside == Graph::kNoOp ? "" : op(outside).ToString()),
            left_out_, outside);
  }
  return true;
}

// From P or, `of_scores`, dS to the ops that make gradients of them.
bool AttentionMatcher::FollowGradient(TensorId tensor, bool of_scores, int depth) {
  if (depth > kMaxDepth) {
    return Fail(absl::StrCat(OutputOf(tensor), " is more than ", kMaxDepth, " ops behind it"));
  }
  for (const Graph::Use& use : graph_.FindTensor(tensor)->consumers) {
    const Op& consumer = op(use.op);
    if (in_match_.contains(use.op)) continue;
    const bool sums_mask = of_scores && consumer.kind == OpKind::kReduceSum;
    const bool ends = consumer.kind == OpKind::kMatMul || sums_mask;
    if (taken_[use.op] || (!ends && !IsGradientStep(consumer.kind))) {
      if (of_scores) {  // which is the mask's gradient: whatever wants that stays outside
        gradients_.push_back(tensor);
        if (consumer.kind != OpKind::kEnd && outside_ == Graph::kNoOp) outside_ = use.op;
        continue;
      }
      return FailGradient(tensor, use.op);
    }
    in_match_.insert(use.op);
    if (ends) {
      if (!sums_mask) ++products_;
      FollowProduct(use.op);
      continue;
    }
    bool makes_scores = false;
    const bool of_softmax = consumer.kind == OpKind::kSoftMaxBackward;
    if (of_softmax || (!of_scores && ClassOf(consumer.kind) == OpClass::kBinary)) {
      const TensorId other = consumer.inputs[1 - use.port];
      CollectCorrection(other, 0);
      makes_scores = in_match_.contains(Producer(other));
    }
    if (!FollowGradient(consumer.outputs[0], of_scores || makes_scores, depth + 1)) return false;
  }
  return true;
}

// An op that makes a gradient, and what only moves, converts or sums it.
void AttentionMatcher::FollowProduct(OpIndex product) {
  TensorId tensor = op(product).outputs[0];
  for (;;) {
    const OpIndex next = OnlyUse(tensor).op;
    const OpKind kind = KindOf(next);
    if (ClassOf(kind) != OpClass::kMove && kind != OpKind::kReduceSum) break;
    if (!in_match_.insert(next).second) break;
    tensor = op(next).outputs[0];
  }
  gradients_.push_back(tensor);
}

// What P is multiplied by: dP less its row sum. Scales end at once, at a port.
void AttentionMatcher::CollectCorrection(TensorId tensor, int depth) {
  const OpIndex producer = Producer(tensor);
  if (producer == Graph::kNoOp || depth > kMaxDepth || in_match_.contains(producer)) return;
  const Op& from = op(producer);
  const bool sums = from.kind == OpKind::kReduceSum;
  const bool passes = from.kind == OpKind::kDropout || ClassOf(from.kind) == OpClass::kMove;
  if (!sums && !passes && from.kind != OpKind::kSubtract && from.kind != OpKind::kMatMul) {
    if (left_out_ == Graph::kNoOp) left_out_ = producer;
    return;
  }
  in_match_.insert(producer);
  if (from.kind == OpKind::kSubtract || passes) CollectCorrection(from.inputs[0], depth + 1);
  if (from.kind == OpKind::kSubtract) CollectCorrection(from.inputs[1], depth + 1);
  const OpIndex product = sums ? Producer(from.inputs[0]) : Graph::kNoOp;
  if (product == Graph::kNoOp) return;
  if (op(product).kind == OpKind::kMultiply && SingleUse(from.inputs[0])) {
    in_match_.insert(product);
  } else if (left_out_ == Graph::kNoOp) {
    left_out_ = product;
  }
}

}  // namespace kvant
