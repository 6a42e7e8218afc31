// The structural matcher: finds the attention around a SoftMax, or says why there is none. Internal
// to patterns.
#ifndef KVANT_PATTERNS_MATCHER_H_
#define KVANT_PATTERNS_MATCHER_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/container/btree_set.h"
#include "kvant/graph/graph.h"
#include "kvant/patterns/match.h"

namespace kvant {

// What is matched before and behind the first-class op.
inline bool ConvertsOrRotates(OpKind kind) {
  return kind == OpKind::kTypeCast || kind == OpKind::kHadamard;
}
// What moves or rotates the elements of Q, K and V on their way to a MatMul.
inline bool MovesOrRotates(OpKind kind) {
  return ClassOf(kind) == OpClass::kMove || kind == OpKind::kHadamard || kind == OpKind::kSlice;
}

// One attempt per SoftMax, ScaledDotProductAttention or Exp of a finalized graph. An attempt is one
// walk: each op that it meets either continues the match or ends it with a miss. An op elsewhere in
// a model, which was never going to be attention, is neither.
class AttentionMatcher {
 public:
  // taken[i]: op i is in a partition already. All must outlive the matcher.
  AttentionMatcher(const Graph& graph, const std::vector<char>& taken, std::vector<Miss>* misses)
      : graph_(graph), taken_(taken), misses_(misses) {}

  // Matches as much as means attention. Adds a miss if that is nothing, or not all.
  bool Match(OpIndex softmax, AttentionMatch* match);
  // The same of a ScaledDotProductAttention with what its keys and values come from.
  bool MatchFirstClass(OpIndex attention, AttentionMatch* match);
  // Matches the backward pass of attention around the Exp that recomputes the
  // probabilities from the statistics; `ops` are sorted.
  bool MatchBackward(OpIndex exp, std::vector<OpIndex>* ops);
  // Adds a miss for a SoftMaxBackward that is in no partition after every op before it was tried,
  // unless that of another op says it.
  void ExplainSoftMaxBackward(OpIndex index);
  // How many ops were looked at in all attempts: of each, only what is near its SoftMax.
  int64_t visited() const { return visited_; }

 private:
  using Segments = absl::InlinedVector<Chain, 1>;
  using Test = bool (*)(const Op& op);
  // Where a walk over the scores ended: an input of `user` that is no result of a step.
  struct DeadEnd {
    OpIndex user = Graph::kNoOp;
    TensorId tensor = 0;
  };

  // attention_matcher.cc
  void Begin(OpIndex first_class, OpIndex softmax, AttentionMatch* match);
  bool MatchColumns();
  bool MatchProbs();
  bool MatchProbsOp(OpIndex op, TensorId* tensor);
  bool CheckContraction();
  void MatchOutput();
  bool MatchOperands();
  bool IsSeenInside(const Op& member, TensorId tensor, std::string_view what);
  bool CheckSharing();
  bool CheckSources();
  bool CheckSource(TensorId source);
  void MarkOps();

  // misses.cc
  bool Fail(const std::string& reason, OpIndex culprit = Graph::kNoOp);
  bool FailIfNear(const std::string& reason, OpIndex culprit);
  bool FailProbs(TensorId tensor);
  bool FailScores();
  void ExplainLeftOut(const Segments& segments);
  bool ExplainLeftOut(TensorId source, Test found);
  bool FailGradient(TensorId tensor, OpIndex consumer);
  bool IsNearBackward(bool subtracts) const;
  void AddMiss(std::string_view verb, const std::string& reason, OpIndex a, OpIndex b);
  // budget: ops that may still be looked at.
  OpIndex Ahead(TensorId tensor, Test found, Test passes, int* budget = nullptr) const;
  OpIndex Behind(TensorId tensor, Test found, int* budget = nullptr) const;
  std::string SourceOf(TensorId tensor) const;
  std::string OutputOf(TensorId tensor) const;

  // score_matcher.cc
  bool MatchScores();
  bool WalkScores(OpIndex user, TensorId tensor);
  int WalkEither(OpIndex index, int first);
  StepMatch& AddStep(ScoreStep::Kind kind, OpIndex index);
  bool MatchBinary(OpIndex index, ScoreStep::Kind kind);
  bool MatchSelect(OpIndex index);
  bool MatchBand(TensorId condition, StepMatch* step);

  // backward_matcher.cc
  bool FollowGradient(TensorId tensor, bool of_scores, int depth);
  void FollowProduct(OpIndex product);
  void CollectCorrection(TensorId tensor, int depth);

  // operand_matcher.cc
  void MatchInputs();
  Segments MatchSegments(TensorId tensor) const;
  bool CollectSegments(TensorId tensor, Chain suffix, bool cached, Segments* segments) const;
  Chain MatchOperand(TensorId tensor, bool cached = false) const;
  void LeaveOutShared();
  bool CutShared(Segments* segments);
  void MatchAuxiliary();
  OpIndex UserOutside(TensorId tensor) const;

  const Op& op(OpIndex index) const {
    ++visited_;
    return graph_.ops()[index];
  }
  // kEnd for kNoOp.
  OpKind KindOf(OpIndex index) const {
    return index == Graph::kNoOp ? OpKind::kEnd : op(index).kind;
  }
  // kNoOp for graph inputs and ops that are taken.
  OpIndex Producer(TensorId tensor) const;
  // Consumed once, by an op of the graph.
  bool SingleUse(TensorId tensor) const;
  // The op and input that alone consume it; kNoOp if there are more, or none, or the op is taken.
  Graph::Use OnlyUse(TensorId tensor) const;

  const Graph& graph_;
  const std::vector<char>& taken_;
  std::vector<Miss>* const misses_;
  AttentionMatch* match_ = nullptr;
  int col_ = -1;  // of the scores at the SoftMax: -1 last axis, -2 the one before
  absl::btree_set<OpIndex> in_match_;
  mutable int64_t visited_ = 0;
  int budget_ = 0;                              // ops of scores that may still be looked at
  absl::InlinedVector<DeadEnd, 2> dead_ends_;   // of them; empty once a miss says it
  absl::InlinedVector<TensorId, 3> gradients_;  // outputs of a backward pass ...
  int products_ = 0;                            // ... and how many of them are MatMuls'
  // The first op outside the match that consumes the scores' gradient, and that goes into it.
  OpIndex outside_ = Graph::kNoOp;
  OpIndex left_out_ = Graph::kNoOp;
};

constexpr int kMostSearched = 64;  // ops that a search, or a walk over scores, looks at

constexpr size_t kMostSegments = 8;

// Whether it may be on the way from the SoftMax to the MatMul with V.
bool IsProbsOp(const Op& op);

// Whether a MatMul's flag transposes this input.
bool Transposes(const Op& matmul, int input);

}  // namespace kvant

#endif  // KVANT_PATTERNS_MATCHER_H_
