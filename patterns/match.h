// AttentionMatch: which op plays which part. Internal to patterns.
//
// Matching is in two phases. The structural one (AttentionMatcher) looks only at
// kinds, attributes and who consumes what; its result is kept with the
// partition. The second (Resolve) turns it and concrete shapes into an
// AttentionSpec, and is repeated for every new length.
#ifndef KVANT_PATTERNS_MATCH_H_
#define KVANT_PATTERNS_MATCH_H_

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "kvant/graph/graph.h"
#include "kvant/patterns/attention_spec.h"

namespace kvant {

using OpIndex = Graph::OpIndex;

// An op that a value passes through, and by which input it enters.
using ChainOp = Graph::Use;

// How a value gets from a port to where it is used: ops in that order, each of
// which only moves, converts, dequantizes, rotates or concatenates.
struct Chain {
  bool present = false;
  TensorId source = 0;
  absl::InlinedVector<ChainOp, 3> ops;
};

// The scales or zero points of a DynamicDequantize that are reshaped on the way.
struct AuxiliaryChain {
  OpIndex op = Graph::kNoOp;
  int32_t port = 0;
  Chain chain;
};

struct StepMatch {
  ScoreStep::Kind kind{};
  OpIndex op = Graph::kNoOp;
  int shape_ops_before = 0;       // how many of score_shape_ops the scores have passed
  std::optional<float> constant;  // instead of operand
  Chain operand;
  int operand_input = 0;  // of op
  Chain condition;
  bool inverted = false;
  std::optional<int64_t> left, right;
  OpIndex row_index = Graph::kNoOp;  // kBand: the GenIndex ops
  OpIndex col_index = Graph::kNoOp;
  Chain shift_add, shift_sub;
};

struct AttentionMatch {
  // A ScaledDotProductAttention op; of what is below, only q, k, v, output_ops and output are set.
  OpIndex first_class = Graph::kNoOp;

  OpIndex qk = Graph::kNoOp;  // MatMul
  OpIndex softmax = Graph::kNoOp;
  OpIndex pv = Graph::kNoOp;  // MatMul
  int q_input = 0;            // of qk; K is the other
  int probs_input = 0;        // of pv; V is the other
  // Segments in order of tokens; of q there is one.
  absl::InlinedVector<Chain, 1> q, k, v;
  absl::InlinedVector<AuxiliaryChain, 1> auxiliary;
  absl::InlinedVector<StepMatch, 3> steps;          // in order of application
  absl::InlinedVector<OpIndex, 2> score_shape_ops;  // StaticReshape, StaticTranspose on scores
  absl::InlinedVector<OpIndex, 4> probs_ops;        // from softmax to pv, in order
  absl::InlinedVector<OpIndex, 4> output_ops;       // from pv on, in order
  absl::InlinedVector<OpIndex, 4> helpers;          // conversions on scores, ops of band masks
  TensorId output = 0;

  // The op that hides columns and gives the match its name.
  OpIndex normaliser() const { return first_class != Graph::kNoOp ? first_class : softmax; }
  // How an input of a DynamicDequantize gets there; null: at once.
  const Chain* FindAuxiliary(OpIndex op, size_t port) const {
    for (const AuxiliaryChain& aux : auxiliary) {
      if (aux.op == op && aux.port == static_cast<int32_t>(port)) return &aux.chain;
    }
    return nullptr;
  }
};

// Why an op, of which attention might have been made, is not fused, or not wholly.
struct Miss {
  // Whoever compiles one of these, or what is beside one, is told.
  absl::InlinedVector<OpIndex, 4> ops;
  std::string why;  // a sentence that names ops
};

// Of the last two axes, the one that is not `axis`. Axes that count from the end have rank 0.
constexpr int OtherAxis(int axis, int rank = 0) { return 2 * rank - 3 - axis; }

// Calls visit(Chain&) for every chain of the match, those that are not present as well.
template <typename Match, typename Visitor>
void VisitChains(Match& match, Visitor visit) {
  for (auto& aux : match.auxiliary) visit(aux.chain);
  for (auto* segments : {&match.q, &match.k, &match.v}) {
    for (auto& segment : *segments) visit(segment);
  }
  for (auto& step : match.steps) {
    for (auto* c : {&step.operand, &step.condition, &step.shift_add, &step.shift_sub}) visit(*c);
  }
}

// Calls visit(OpIndex&) for every op of the match, some more than once.
template <typename Match, typename Visitor>
void VisitOps(Match& match, Visitor visit) {
  VisitChains(match, [&](auto& chain) {
    for (auto& step : chain.ops) visit(step.op);
  });
  for (auto* op : {&match.first_class, &match.qk, &match.softmax, &match.pv}) {
    if (*op != Graph::kNoOp) visit(*op);
  }
  for (auto& aux : match.auxiliary) visit(aux.op);
  for (auto& step : match.steps) {
    for (auto* op : {&step.op, &step.row_index, &step.col_index}) {
      if (*op != Graph::kNoOp) visit(*op);
    }
  }
  for (auto* list : {&match.probs_ops, &match.output_ops, &match.helpers}) {
    for (auto& op : *list) visit(op);
  }
  for (auto& op : match.score_shape_ops) visit(op);
}

// Whether one of the ops is of that kind.
inline bool HaveOp(const Graph& graph, absl::Span<const OpIndex> ops, OpKind kind) {
  return std::ranges::any_of(ops, [&](OpIndex index) { return graph.ops()[index].kind == kind; });
}

// Whether any of the chains goes through one.
inline bool HaveOp(const Graph& graph, absl::Span<const Chain> chains, OpKind kind) {
  return std::ranges::any_of(chains, [&](const Chain& chain) {
    return std::ranges::any_of(
        chain.ops, [&](const ChainOp& step) { return graph.ops()[step.op].kind == kind; });
  });
}

// The ops of the match, each once.
inline std::vector<OpIndex> SortedOps(const AttentionMatch& match) {
  std::vector<OpIndex> ops;
  ops.reserve(8);
  VisitOps(match, [&ops](OpIndex op) { ops.push_back(op); });
  std::ranges::sort(ops);
  ops.erase(std::unique(ops.begin(), ops.end()), ops.end());
  return ops;
}

}  // namespace kvant

#endif  // KVANT_PATTERNS_MATCH_H_
