// Q, K and V: from the MatMuls back to the ports.
#include <algorithm>
#include <optional>

#include "kvant/patterns/matcher.h"

namespace kvant {
namespace {

constexpr size_t kMaxChain = 16;

// The first of the operands that an op puts one after another; nothing if it does not.
std::optional<size_t> FirstSegment(OpKind kind) {
  if (kind == OpKind::kConcat) return 0;
  if (kind == OpKind::kLoadRanges) return 1;
  return std::nullopt;
}

}  // namespace

void AttentionMatcher::MatchInputs() {
  if (match_->first_class != Graph::kNoOp) {
    Chain& q = match_->q.emplace_back();
    q.present = true;
    q.source = op(match_->first_class).inputs[0];
    for (OpIndex producer = Producer(q.source); ConvertsOrRotates(KindOf(producer));
         producer = Producer(q.source)) {
      q.ops.push_back({producer, 0});
      q.source = op(producer).inputs[0];
    }
    std::ranges::reverse(q.ops);
    match_->k = MatchSegments(op(match_->first_class).inputs[1]);
    match_->v = MatchSegments(op(match_->first_class).inputs[2]);
    return;
  }
  const Op& qk = op(match_->qk);
  CollectSegments(qk.inputs[match_->q_input], Chain(), false, &match_->q);
  match_->k = MatchSegments(qk.inputs[1 - match_->q_input]);
  match_->v = MatchSegments(op(match_->pv).inputs[1 - match_->probs_input]);
}

AttentionMatcher::Segments AttentionMatcher::MatchSegments(TensorId tensor) const {
  Segments segments;
  if (!CollectSegments(tensor, Chain(), true, &segments)) {
    segments.clear();
    CollectSegments(tensor, Chain(), false, &segments);
  }
  return segments;
}

// Appends the chains that end in `tensor` and go on through `suffix` (which is in
// reverse: from the MatMul outwards). False if there are too many segments. cached: of K or V,
// which may be of several segments, or loaded.
bool AttentionMatcher::CollectSegments(TensorId tensor, Chain suffix, bool cached,
                                       Segments* segments) const {
  for (;;) {
    const OpIndex producer = Producer(tensor);
    const OpKind kind = KindOf(producer);
    const bool dequantize = ClassOf(kind) == OpClass::kDequantize;
    const bool loads = cached && ClassOf(kind) == OpClass::kLoad;
    if (suffix.ops.size() < kMaxChain && (MovesOrRotates(kind) || dequantize || loads)) {
      suffix.ops.push_back({producer, 0});
      tensor = op(producer).inputs[0];
      continue;
    }
    const std::optional<size_t> first = FirstSegment(kind);
    if (suffix.ops.size() < kMaxChain && first && cached) {
      for (size_t i = *first; i < op(producer).inputs.size(); ++i) {
        Chain next = suffix;
        next.ops.push_back({producer, static_cast<int32_t>(i)});
        if (!CollectSegments(op(producer).inputs[i], std::move(next), true, segments)) return false;
      }
      return true;
    }
    break;
  }
  if (segments->size() == kMostSegments) return false;
  suffix.present = true;
  suffix.source = tensor;
  std::ranges::reverse(suffix.ops);
  segments->push_back(std::move(suffix));
  return true;
}

// What consumes the tensor and is not in the match.
OpIndex AttentionMatcher::UserOutside(TensorId tensor) const {
  for (const Graph::Use& use : graph_.FindTensor(tensor)->consumers) {
    if (!in_match_.contains(use.op)) return use.op;
  }
  return Graph::kNoOp;
}

// Ops that prepare Q, K or V and are seen from outside.
void AttentionMatcher::LeaveOutShared() {
  do {
    MarkOps();
  } while (CutShared(&match_->q) || CutShared(&match_->k) || CutShared(&match_->v));
  MatchAuxiliary();
  MarkOps();
}

// Leaves out everything up to an op whose result is consumed outside the match.
// True if there was one; the marks are stale then.
bool AttentionMatcher::CutShared(Segments* segments) {
  for (Chain& chain : *segments) {
    for (size_t i = chain.ops.size(); i-- > 0;) {
      if (UserOutside(op(chain.ops[i].op).outputs[0]) == Graph::kNoOp) continue;
      const OpIndex cut = chain.ops[i].op;
      const bool concat = std::any_of(
          chain.ops.begin(), chain.ops.begin() + i + 1,
          [this](const ChainOp& step) { return FirstSegment(op(step.op).kind).has_value(); });
      chain.source = op(cut).outputs[0];
      chain.ops.erase(chain.ops.begin(), chain.ops.begin() + i + 1);
      if (concat) {  // every segment that went through it is inside this one now
        const auto inside = [cut](const Chain& other) {
          return std::ranges::count(other.ops, cut, &ChainOp::op) > 0;
        };
        segments->erase(std::remove_if(segments->begin(), segments->end(), inside),
                        segments->end());
      }
      return true;
    }
  }
  return false;
}

// A mask, scale or scalar, through ops that move or convert it and are used for
// nothing else; cached: of scales, also ops that load it.
Chain AttentionMatcher::MatchOperand(TensorId tensor, bool cached) const {
  constexpr size_t kMaxOperandChain = 8;
  Chain chain;
  chain.present = true;
  chain.source = tensor;
  while (SingleUse(chain.source) && chain.ops.size() < kMaxOperandChain) {
    const OpIndex producer = Producer(chain.source);
    const OpKind kind = KindOf(producer);
    const bool moves = MovesOrRotates(kind) && kind != OpKind::kHadamard;
    if (!moves && !(cached && ClassOf(kind) == OpClass::kLoad)) break;
    chain.ops.push_back({producer, 0});
    chain.source = op(producer).inputs[0];
  }
  std::ranges::reverse(chain.ops);
  return chain;
}

// Scales and zero points that are reshaped or loaded on the way, by ops used for nothing else.
void AttentionMatcher::MatchAuxiliary() {
  for (const OpIndex index : in_match_) {
    const Op& dequantize = op(index);
    if (dequantize.kind != OpKind::kDynamicDequantize) continue;
    for (size_t port = 1; port < dequantize.inputs.size(); ++port) {
      Chain scales = MatchOperand(dequantize.inputs[port], /*cached=*/true);
      if (scales.ops.empty()) continue;
      match_->auxiliary.push_back({index, static_cast<int32_t>(port), std::move(scales)});
    }
  }
}

}  // namespace kvant
