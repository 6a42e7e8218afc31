// The structural matcher: finds the attention around a SoftMax. Internal to
// patterns.
#ifndef KVANT_PATTERNS_MATCHER_H_
#define KVANT_PATTERNS_MATCHER_H_

#include <string>
#include <vector>

#include "kvant/graph/graph.h"
#include "kvant/patterns/match.h"
#include "kvant/patterns/op_set.h"

namespace kvant {

// One attempt per SoftMax of a finalized graph.
class AttentionMatcher {
 public:
  // taken[i]: op i is in a partition already. Both must outlive the matcher.
  AttentionMatcher(const Graph& graph, const std::vector<char>& taken)
      : graph_(graph), taken_(taken), in_match_(graph) {}

  // Matches as much as means attention. On a miss, `why` is a sentence that
  // names the ops, or empty if this was never going to be attention.
  bool Match(OpIndex softmax, AttentionMatch* match, std::string* why);
  // The same of a ScaledDotProductAttention with what its keys and values come from.
  bool MatchFirstClass(OpIndex attention, AttentionMatch* match, std::string* why);
  // Matches the backward pass of attention around the Exp that recomputes the
  // probabilities from the statistics; `ops` are sorted.
  bool MatchBackward(OpIndex exp, std::vector<OpIndex>* ops, std::string* why);
  // How many ops were looked at in all attempts: of each, only what is near its SoftMax.
  int64_t visited() const { return visited_; }
  // Why a SoftMaxBackward that is in no partition is in no backward pass, after every op before it
  // was tried; empty if another sentence names it.
  std::string WhyNoBackward(OpIndex softmax_backward) const;

 private:
  using Segments = absl::InlinedVector<Chain, 1>;

  // attention_matcher.cc
  bool MatchColumns();
  bool MatchProbs();
  bool MatchProbsOp(OpIndex op, TensorId* tensor);
  bool CheckContraction();
  void MatchOutput();
  void LeaveOutShared();
  bool CheckSharing();
  bool IsSeenInside(const Op& member, TensorId tensor, std::string_view what);
  bool CheckSources();
  bool CheckSource(const Chain& chain);
  void MarkOps();
  bool LeadsToMatMul(TensorId tensor, int* budget) const;
  bool Fail(const std::string& reason);

  // score_matcher.cc
  bool MatchScores();
  bool MatchScoreOp(OpIndex op, TensorId* tensor);
  bool MatchBinary(OpIndex index, ScoreStep::Kind kind, TensorId* tensor);
  bool MatchSelect(OpIndex op, TensorId* tensor);
  bool MatchBand(TensorId condition, StepMatch* step);
  bool FromMatMul(TensorId tensor, int* budget) const;

  // backward_matcher.cc
  bool EntersSoftMaxBackward(TensorId tensor, int* budget) const;
  bool FollowGradient(TensorId tensor, bool of_scores, int depth);
  void FollowProduct(OpIndex product);
  bool CollectCorrection(TensorId tensor, int depth);
  bool Mark(OpIndex index);

  // operand_matcher.cc
  void MatchInputs();
  Segments MatchSegments(TensorId tensor) const;
  bool CollectSegments(TensorId tensor, Chain suffix, bool cached, Segments* segments) const;
  Chain MatchOperand(TensorId tensor, bool cached = false) const;
  bool CutShared(Segments* segments);
  void MatchAuxiliary();

  const Op& op(OpIndex index) const {
    ++visited_;
    return graph_.ops()[index];
  }
  // kNoOp for graph inputs and ops that are taken.
  OpIndex Producer(TensorId tensor) const;
  // Consumed once, by an op of the graph.
  bool SingleUse(TensorId tensor) const;

  const Graph& graph_;
  const std::vector<char>& taken_;
  AttentionMatch* match_ = nullptr;
  std::string* why_ = nullptr;
  int col_ = -1;  // of the scores at the SoftMax: -1 last axis, -2 the one before
  OpSet in_match_;
  mutable int64_t visited_ = 0;
  absl::InlinedVector<TensorId, 3> gradients_;  // outputs of a backward pass ...
  int products_ = 0;                            // ... and how many of them are MatMuls'
  OpIndex outside_ = Graph::kNoOp;              // what first takes the scores' and is no part
};

// Whether a MatMul's flag transposes this input.
bool Transposes(const Op& matmul, int input);

}  // namespace kvant

#endif  // KVANT_PATTERNS_MATCHER_H_
