// What the matcher says where it does not match.
//
// The walk itself ends at the first op that is not in its grammar. The searches here start there
// and pass ops of any kind. They tell an attention that something is wrong with from an op
// elsewhere in a model, of which nothing is said.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvant/patterns/matcher.h"

namespace kvant {
namespace {

bool IsMatMul(const Op& op) { return op.kind == OpKind::kMatMul; }
bool IsMove(const Op& op) { return ClassOf(op.kind) == OpClass::kMove; }
bool IsSoftMaxBackward(const Op& op) { return op.kind == OpKind::kSoftMaxBackward; }

bool IsQuantize(const Op& op) {
  return op.kind == OpKind::kQuantize || op.kind == OpKind::kDynamicQuantize;
}
bool IsLoad(const Op& op) {
  return ClassOf(op.kind) == OpClass::kLoad || op.kind == OpKind::kLoadRanges;
}
bool IsLoadOrDequantize(const Op& op) {
  return IsLoad(op) || ClassOf(op.kind) == OpClass::kDequantize;
}

// What Q, K and V may pass on the way to their MatMul.
bool IsOperandOp(const Op& op) {
  return MovesOrRotates(op.kind) || ClassOf(op.kind) == OpClass::kJoin || IsLoadOrDequantize(op);
}

// Whether it computes on elements or moves them.
bool IsPassable(const Op& op) {
  const OpClass of_class = ClassOf(op.kind);
  return IsProbsOp(op) || MovesOrRotates(op.kind) || of_class == OpClass::kElementwise ||
         of_class == OpClass::kBinary || of_class == OpClass::kJoin ||
         of_class == OpClass::kStore || op.kind == OpKind::kDynamicDequantize ||
         op.kind == OpKind::kSelect || op.kind == OpKind::kSoftMaxBackward;
}

}  // namespace

bool IsProbsOp(const Op& op) {
  return IsMove(op) || op.kind == OpKind::kDropout || op.kind == OpKind::kQuantize ||
         op.kind == OpKind::kDequantize;
}

void AttentionMatcher::AddMiss(std::string_view verb, const std::string& reason, OpIndex a,
                               OpIndex b) {
  const OpIndex start = match_->normaliser();
  Miss& miss = misses_->emplace_back();
  for (const OpIndex index : {start, a, b}) {
    if (index != Graph::kNoOp) miss.ops.push_back(index);
  }
  miss.why = absl::StrCat(op(start).ToString(), std::string(verb), reason);
}

bool AttentionMatcher::Fail(const std::string& reason, OpIndex culprit) {
  dead_ends_.clear();
  AddMiss(" is not fused: ", reason, match_->qk, match_->pv);
  if (culprit != Graph::kNoOp) misses_->back().ops.push_back(culprit);
  return false;
}

// Fails with this sentence if there are MatMuls on both sides of the SoftMax.
bool AttentionMatcher::FailIfNear(const std::string& reason, OpIndex culprit) {
  match_->pv = Ahead(op(match_->softmax).outputs[0], IsMatMul, IsPassable);
  match_->qk = Behind(op(match_->softmax).inputs[0], IsMatMul);
  return match_->pv != Graph::kNoOp && match_->qk != Graph::kNoOp && Fail(reason, culprit);
}

// The probabilities in `tensor` are consumed several times, or by what they cannot pass.
bool AttentionMatcher::FailProbs(TensorId tensor) {
  const auto& consumers = graph_.FindTensor(tensor)->consumers;
  if (consumers.empty()) return false;
  if (consumers.size() == 1) {
    const OpIndex next = consumers[0].op;
    return FailIfNear(absl::StrCat(op(next).ToString(),
                                   taken_[next] ? " is part of another partition"
                                                : " is not an op that probabilities can pass"),
                      next);
  }
  // One of them is on the way to the MatMul with V, and another is too many.
  const auto* on_the_way = std::ranges::find_if(
      consumers, [&](auto& use) { return IsMatMul(op(use.op)) && use.port < 2; });
  if (on_the_way == consumers.end()) {
    on_the_way = std::ranges::find_if(consumers, [&](auto& use) {
      const Op& consumer = op(use.op);
      return IsPassable(consumer) &&
             Ahead(consumer.outputs[0], IsMatMul, IsPassable) != Graph::kNoOp;
    });
  }
  const OpIndex extra = consumers[on_the_way == consumers.begin() ? 1 : 0].op;
  return FailIfNear(absl::StrCat(OutputOf(tensor), " is also consumed by ", op(extra).ToString()),
                    extra);
}

// Of all that the scores might come from: what stands between a MatMul and the SoftMax, else an op,
// else an input.
bool AttentionMatcher::FailScores() {
  if (dead_ends_.empty()) return false;
  const DeadEnd* worst = nullptr;
  int most = -1;
  for (const DeadEnd& end : dead_ends_) {
    const OpIndex matmul = Behind(end.tensor, IsMatMul);
    const bool made = graph_.FindTensor(end.tensor)->producer.op != Graph::kNoOp;
    const int rank = matmul != Graph::kNoOp ? 2 : (made ? 1 : 0);
    if (rank <= most) continue;
    most = rank;
    worst = &end;
    match_->qk = matmul;
  }
  const auto [user, tensor] = *worst;
  const OpIndex culprit = graph_.FindTensor(tensor)->producer.op;
  if (culprit == Graph::kNoOp) {
    return Fail(absl::StrCat(
                    "its scores come from ", SourceOf(tensor),
                    user == match_->softmax ? "" : absl::StrCat(" by way of ", op(user).ToString()),
                    ", not from a MatMul"),
                user);
  }
  return Fail(
      absl::StrCat(op(culprit).ToString(), taken_[culprit] ? " is part of another partition"
                                                           : " is not a step that scores can take"),
      culprit);
}

// K or V of a match comes from a cache that is compressed or loaded by ops that are not part of it.
void AttentionMatcher::ExplainLeftOut(const Segments& segments) {
  for (const Chain& chain : segments) {
    if (ExplainLeftOut(chain.source, IsLoadOrDequantize)) return;
    for (const ChainOp& step : chain.ops) {
      if (op(step.op).kind != OpKind::kDynamicDequantize) continue;
      for (size_t port = 1; port < op(step.op).inputs.size(); ++port) {
        const Chain* moved = match_->FindAuxiliary(step.op, port);
        const TensorId scales = moved != nullptr ? moved->source : op(step.op).inputs[port];
        if (ExplainLeftOut(scales, IsLoad)) return;
      }
    }
  }
}

bool AttentionMatcher::ExplainLeftOut(TensorId source, Test found) {
  const OpIndex last = graph_.FindTensor(source)->producer.op;
  const OpIndex left = Behind(source, found);
  if (left == Graph::kNoOp) return false;
  const OpIndex codes = graph_.FindTensor(op(left).inputs[0])->producer.op;
  if (codes != Graph::kNoOp && IsQuantize(op(codes))) return false;  // no cache: values are rounded
  const OpIndex outside = UserOutside(source);
  std::string why = absl::StrCat(op(last).ToString(), " comes between");
  if (outside != Graph::kNoOp && IsOperandOp(op(last))) {
    why = absl::StrCat(OutputOf(source), " is also consumed by ", op(outside).ToString());
  } else if (ClassOf(op(last).kind) == OpClass::kJoin && op(last).inputs.size() > kMostSegments) {
    why = absl::StrCat(op(last).ToString(), " joins more than ", kMostSegments, " segments");
  } else if (last == left) {
    why = "another op dequantizes what it gives";
  }
  AddMiss(" is fused without ", absl::StrCat(op(left).ToString(), ": ", why), left, last);
  return true;
}

// The probabilities, or what is made of them, are consumed by what makes no gradient.
bool AttentionMatcher::FailGradient(TensorId tensor, OpIndex consumer) {
  const bool alone = graph_.FindTensor(tensor)->consumers.size() == 1;
  const bool in_parts =
      op(consumer).kind == OpKind::kReduceSum && Ahead(tensor, IsMatMul, IsProbsOp) == Graph::kNoOp;
  return Fail(absl::StrCat(OutputOf(tensor), alone ? " is consumed by " : " is also consumed by ",
                           op(consumer).ToString(),
                           in_parts ? ", as in a softmax in parts: only a SoftMax is fused"
                                    : ", which is no step towards a gradient"),
              consumer);
}

// Why the gradient of the scores that this SoftMaxBackward makes is in no backward pass.
void AttentionMatcher::ExplainSoftMaxBackward(OpIndex index) {
  TensorId probs = op(index).inputs[1];
  OpIndex producer = Producer(probs);
  for (int i = 0; producer != Graph::kNoOp && IsMove(op(producer)) && i < kMostSearched; ++i) {
    probs = op(producer).inputs[0];
    producer = Producer(probs);
  }
  const OpKind kind = KindOf(producer);
  if (kind == OpKind::kExp || kind == OpKind::kSoftMax) return;
  AttentionMatch match;
  Begin(Graph::kNoOp, index, &match);
  Fail(absl::StrCat("its probabilities come from ", SourceOf(probs),
                    ", not from the Exp of scores less their statistics"),
       producer);
}

// Whether an Exp is one of a backward pass, or of a softmax in parts: it enters a SoftMaxBackward,
// or is between MatMuls, the second of which takes it or follows anyhow if the Exp `subtracts`.
bool AttentionMatcher::IsNearBackward(bool subtracts) const {
  const Op& exp = op(match_->softmax);
  return Ahead(exp.outputs[0], IsSoftMaxBackward, IsMove) != Graph::kNoOp ||
         (Behind(exp.inputs[0], IsMatMul) != Graph::kNoOp &&
          Ahead(exp.outputs[0], IsMatMul, subtracts ? IsPassable : IsProbsOp) != Graph::kNoOp);
}

std::string AttentionMatcher::OutputOf(TensorId tensor) const {
  const OpIndex producer = graph_.FindTensor(tensor)->producer.op;
  return producer == match_->softmax ? "its output"
                                     : absl::StrCat("the output of ", op(producer).ToString());
}

// What makes a tensor, or which one it is.
std::string AttentionMatcher::SourceOf(TensorId tensor) const {
  const Graph::TensorInfo& info = *graph_.FindTensor(tensor);
  if (info.producer.op != Graph::kNoOp) return op(info.producer.op).ToString();
  return info.desc.Label();
}

// The first op of that kind that the tensor reaches, through ops that pass it on and do not
// broadcast it: what comes behind a broadcast is no row of scores. kNoOp if there is none nearby.
OpIndex AttentionMatcher::Ahead(TensorId tensor, Test found, Test passes, int* budget) const {
  int most = kMostSearched;
  if (budget == nullptr) budget = &most;
  const int64_t elements = graph_.tensor(tensor).elements();
  for (const Graph::Use& use : graph_.FindTensor(tensor)->consumers) {
    if (--*budget < 0) break;
    const Op& consumer = op(use.op);
    if (found(consumer) && use.port < 2) return use.op;
    if (!passes(consumer)) continue;
    const TensorId result = consumer.outputs[0];
    const bool joins = ClassOf(consumer.kind) == OpClass::kJoin;
    if (elements > 0 && graph_.tensor(result).elements() > elements && !joins) continue;
    const OpIndex further = Ahead(result, found, passes, budget);
    if (further != Graph::kNoOp) return further;
  }
  return Graph::kNoOp;
}

// The first op of that kind among those that the tensor comes from, with no product or softmax
// between. kNoOp if there is none nearby.
OpIndex AttentionMatcher::Behind(TensorId tensor, Test found, int* budget) const {
  int most = kMostSearched;
  if (budget == nullptr) budget = &most;
  const OpIndex producer = graph_.FindTensor(tensor)->producer.op;
  if (producer == Graph::kNoOp || --*budget < 0) return Graph::kNoOp;
  const Op& from = op(producer);
  if (found(from)) return producer;
  if (from.kind == OpKind::kMatMul || from.kind == OpKind::kSoftMax ||
      from.kind == OpKind::kScaledDotProductAttention) {
    return Graph::kNoOp;
  }
  for (const TensorId input : from.inputs) {
    const OpIndex further = Behind(input, found, budget);
    if (further != Graph::kNoOp) return further;
  }
  return Graph::kNoOp;
}

}  // namespace kvant
