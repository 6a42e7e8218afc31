// oneDNN's grammar: what of a match oneDNN Graph fuses as well. Its order of
// score steps is fixed, and what it leaves out becomes partitions of its own.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvant/patterns/op_groups.h"

namespace kvant {
namespace {

using Kind = ScoreStep::Kind;
using Segments = absl::InlinedVector<Chain, 1>;

// Letters of `sequence` in the order of `grammar`, each at most once.
bool InOrder(std::string_view sequence, std::string_view grammar) {
  size_t next = 0;
  for (char letter : sequence) {
    next = grammar.find(letter, next);
    if (next == std::string_view::npos) return false;
    ++next;
  }
  return true;
}

class OneDnnTrimmer {
 public:
  OneDnnTrimmer(const Graph& graph, AttentionMatch& match) : graph_(graph), match_(match) {}

  // Empty if oneDNN fuses (a part of) it.
  std::string Trim() {
    if (std::string why = CheckScores(); !why.empty()) return why;
    if (match_.probs_input == 1 && !ProbsHave(OpKind::kStaticTranspose)) {
      return absl::StrCat("its output is input 1 of ", op(match_.pv).ToString(),
                          ", where oneDNN does not look for it");
    }
    compressed_ =
        Has(match_.k, OpKind::kDynamicDequantize) || Has(match_.v, OpKind::kDynamicDequantize);
    TrimInputs();
    TrimOutput();
    CutShared();
    return "";
  }

 private:
  std::string CheckScores() const {
    if (op(match_.softmax).inputs.size() > 1) return "oneDNN has no lengths of a SoftMax";
    const auto refuse = [this](OpIndex index) {
      return absl::StrCat("oneDNN does not fuse ", op(index).ToString(), " on scores");
    };
    for (const OpIndex index : match_.helpers) {
      if (KindOf(index) == OpKind::kTypeCast || KindOf(index) == OpKind::kReorder) {
        return refuse(index);
      }
    }
    if (!match_.score_shape_ops.empty() && match_.probs_input == 0) {
      return refuse(match_.score_shape_ops[0]);
    }
    std::string sequence;
    for (const StepMatch& step : match_.steps) {
      sequence += StepLetter(step);
      if (sequence.back() == '?') return refuse(step.op);
    }
    const size_t cap = sequence.find("TD");
    const bool capped = cap != std::string::npos &&
                        InOrder(std::string_view(sequence).substr(0, cap), "D") &&
                        InOrder(std::string_view(sequence).substr(cap + 2), "S");
    if (capped || InOrder(sequence, "DCAS") || InOrder(sequence, "SDA")) return "";
    std::string ops;
    for (const StepMatch& step : match_.steps) {
      absl::StrAppend(&ops, ops.empty() ? "" : ", ", op(step.op).ToString());
    }
    return absl::StrCat("oneDNN does not fuse scores in this order: ", ops);
  }

  // Of the grammar; '?' for what is in none.
  char StepLetter(const StepMatch& step) const {
    const bool band =
        step.right && !step.inverted && step.shift_add.present == step.shift_sub.present;
    if (step.constant || step.op == match_.qk) return '?';
    if (step.kind == Kind::kMultiply || step.kind == Kind::kDivide) return 'D';
    if (step.kind == Kind::kAdd) return 'A';
    if (step.kind == Kind::kTanh) return 'T';
    if (step.kind == Kind::kSelect) return 'S';
    return step.kind == Kind::kBand && band ? 'C' : '?';
  }

  void TrimInputs() {
    const bool capped = std::ranges::count(match_.steps, Kind::kTanh, &StepMatch::kind) > 0;
    const bool plain_only = capped || ProbsHave(OpKind::kTypeCast) || ProbsHave(OpKind::kDropout);
    TrimOperand(op(match_.qk).inputs[match_.q_input], false, &match_.q);
    TrimOperand(op(match_.qk).inputs[1 - match_.q_input], !plain_only && match_.q_input == 0,
                &match_.k);
    TrimOperand(op(match_.pv).inputs[1 - match_.probs_input],
                !plain_only && match_.probs_input == 0, &match_.v);
    match_.auxiliary.clear();
    for (StepMatch& step : match_.steps) {
      const Op& at = op(step.op);
      if (step.operand.present) TrimMask(&step.operand, at.inputs[step.operand_input]);
      if (step.condition.present) TrimMask(&step.condition, at.inputs[0]);
    }
  }

  // Keeps only the last ops before the MatMul that oneDNN's patterns have there.
  void TrimOperand(TensorId at_matmul, bool may_be_compressed, Segments* segments) {
    Chain chain = (*segments)[0];
    const size_t length = chain.ops.size();
    const auto kind = [&](size_t from_end) {
      return from_end > length ? OpKind::kEnd : KindOf(chain.ops[length - from_end].op);
    };
    size_t keep = 0;
    if (segments->size() == 1 && !Has(*segments, OpKind::kConcat)) {
      if (kind(1) == OpKind::kDequantize ||
          (kind(1) == OpKind::kDynamicDequantize && may_be_compressed) ||
          (kind(1) == OpKind::kStaticReshape && !compressed_)) {
        keep = 1;
      } else if (kind(1) == OpKind::kTypeCast && kind(2) == OpKind::kDequantize) {
        keep = 2;
      }
    }
    chain.source = keep == 0 ? at_matmul : op(chain.ops[length - keep].op).inputs[0];
    chain.ops.erase(chain.ops.begin(), chain.ops.end() - keep);
    segments->clear();
    segments->push_back(std::move(chain));
  }

  // A mask may be reshaped along with grouped heads.
  void TrimMask(Chain* chain, TensorId at_op) const {
    if (chain->ops.empty()) return;
    const ChainOp last = chain->ops.back();
    chain->ops.clear();
    chain->source = at_op;
    if (KindOf(last.op) == OpKind::kStaticReshape && !compressed_) {
      chain->ops.push_back(last);
      chain->source = op(last.op).inputs[0];
    }
  }

  // StaticTranspose then Reorder or StaticReshape; StaticReshape of grouped heads;
  // and a Quantize, with or without a TypeCast, behind either.
  void TrimOutput() {
    const auto& ops = match_.output_ops;
    const auto is = [&](size_t i, OpKind kind) { return i < ops.size() && KindOf(ops[i]) == kind; };
    size_t keep = 0;
    if (is(0, OpKind::kStaticTranspose) &&
        (is(1, OpKind::kReorder) || is(1, OpKind::kStaticReshape))) {
      keep = 2;
    } else if (is(0, OpKind::kStaticReshape) && Has(match_.q, OpKind::kStaticReshape)) {
      keep = 1;
    }
    if (is(keep, OpKind::kQuantize)) {
      keep += 1;
    } else if (is(keep, OpKind::kTypeCast) && is(keep + 1, OpKind::kQuantize)) {
      keep += 2;
    }
    if (compressed_ &&
        (Has(match_.k, OpKind::kDynamicDequantize) || Has(match_.v, OpKind::kDynamicDequantize) ||
         is(0, OpKind::kStaticReshape))) {
      keep = 0;
    }
    match_.output_ops.resize(keep);
    match_.output = op(keep == 0 ? match_.pv : ops[keep - 1]).outputs[0];
  }

  // What K and V shared may now be used outside: then both are plain.
  void CutShared() {
    for (bool again = true; again;) {
      again = false;
      const std::vector<OpIndex> inside = SortedOps(match_);
      const std::pair<Chain*, TensorId> operands[] = {
          {&match_.q[0], op(match_.qk).inputs[match_.q_input]},
          {&match_.k[0], op(match_.qk).inputs[1 - match_.q_input]},
          {&match_.v[0], op(match_.pv).inputs[1 - match_.probs_input]}};
      for (const auto& [chain, at_matmul] : operands) {
        const bool shared = std::ranges::any_of(chain->ops, [&](const ChainOp& step) {
          const auto& consumers = graph_.FindTensor(op(step.op).outputs[0])->consumers;
          return std::ranges::any_of(consumers, [&](const Graph::Use& use) {
            return !std::ranges::binary_search(inside, use.op);
          });
        });
        if (!shared) continue;
        chain->ops.clear();
        chain->source = at_matmul;
        again = true;
      }
    }
  }

  const Op& op(OpIndex index) const { return graph_.ops()[index]; }
  OpKind KindOf(OpIndex index) const { return op(index).kind; }
  bool Has(absl::Span<const Chain> chains, OpKind kind) const {
    return HaveOp(graph_, chains, kind);
  }
  bool ProbsHave(OpKind kind) const { return HaveOp(graph_, match_.probs_ops, kind); }

  const Graph& graph_;
  AttentionMatch& match_;
  bool compressed_ = false;  // a DynamicDequantize anywhere on K or V
};

}  // namespace

bool TrimToOneDnn(const Graph& graph, AttentionMatch* match, std::string* why) {
  const std::string softmax = graph.ops()[match->softmax].ToString();
  const std::vector<OpIndex> before = SortedOps(*match);
  const std::string refusal = OneDnnTrimmer(graph, *match).Trim();
  if (!refusal.empty()) {
    *why = absl::StrCat(softmax, " is not fused: ", refusal);
    return false;
  }
  const std::vector<OpIndex> after = SortedOps(*match);
  std::string left_out;
  for (const OpIndex op : before) {
    if (std::ranges::binary_search(after, op)) continue;
    absl::StrAppend(&left_out, left_out.empty() ? "" : ", ", graph.ops()[op].ToString());
  }
  why->clear();
  if (!left_out.empty()) {
    *why = absl::StrCat(softmax, " is fused without ", left_out,
                        ", which oneDNN does not fuse with it");
  }
  return true;
}

}  // namespace kvant
