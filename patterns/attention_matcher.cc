// The spine of the matcher: from a SoftMax forwards to the MatMul with V and its
// output chain, and the checks on the whole.
#include "absl/strings/str_cat.h"
#include "kvant/patterns/matcher.h"

namespace kvant {
namespace {

bool IsPerTensor(const Op& op) { return op.Get<Attr::kQType>() == "per_tensor"; }

bool SameQuantization(const Op& quantize, const Op& dequantize) {
  const auto zero_point = [](const Op& op) {
    const auto& zps = op.Get<Attr::kZps>();
    return zps.empty() ? 0 : zps[0];
  };
  return IsPerTensor(quantize) &&  // which has one scale: so has the other
         quantize.Get<Attr::kScales>() == dequantize.Get<Attr::kScales>() &&
         zero_point(quantize) == zero_point(dequantize);
}

}  // namespace

bool Transposes(const Op& matmul, int input) {
  return input == 0 ? matmul.Get<Attr::kTransposeA>() : matmul.Get<Attr::kTransposeB>();
}

OpIndex AttentionMatcher::Producer(TensorId tensor) const {
  const OpIndex producer = graph_.FindTensor(tensor)->producer.op;
  return producer == Graph::kNoOp || taken_[producer] ? Graph::kNoOp : producer;
}

bool AttentionMatcher::SingleUse(TensorId tensor) const {
  return graph_.FindTensor(tensor)->consumers.size() == 1;
}

Graph::Use AttentionMatcher::OnlyUse(TensorId tensor) const {
  const auto& consumers = graph_.FindTensor(tensor)->consumers;
  return consumers.size() == 1 && !taken_[consumers[0].op] ? consumers[0] : Graph::Use();
}

void AttentionMatcher::Begin(OpIndex first_class, OpIndex softmax, AttentionMatch* match) {
  *match = AttentionMatch();
  match->first_class = first_class;
  match->softmax = softmax;
  match_ = match;
}

bool AttentionMatcher::Match(OpIndex softmax, AttentionMatch* match) {
  Begin(Graph::kNoOp, softmax, match);
  if (!MatchProbs() || !MatchColumns() || !MatchScores() || !CheckContraction()) return false;
  MatchOutput();
  return MatchOperands();
}

bool AttentionMatcher::MatchFirstClass(OpIndex attention, AttentionMatch* match) {
  Begin(attention, Graph::kNoOp, match);
  MatchOutput();
  return MatchOperands();
}

// Which axis of the scores the SoftMax normalises over. With an unknown rank, a
// non-negative axis is taken for the last; Resolve looks again.
bool AttentionMatcher::MatchColumns() {
  const Op& softmax = op(match_->softmax);
  const int64_t axis = softmax.Get<Attr::kAxis>();
  const int rank = graph_.tensor(softmax.inputs[0]).rank();
  col_ = -1;
  if (axis >= 0 && rank < 0) return true;
  const int64_t from_end = axis < 0 ? axis : axis - rank;
  if (from_end != -1 && from_end != -2) {
    return Fail(absl::StrCat("its axis ", axis, " is not one of the last two of rank ", rank));
  }
  col_ = static_cast<int>(from_end);
  return true;
}

// From the SoftMax to the MatMul with V.
bool AttentionMatcher::MatchProbs() {
  TensorId tensor = op(match_->softmax).outputs[0];
  for (;;) {
    const Graph::Use use = OnlyUse(tensor);
    if (use.op == Graph::kNoOp) return FailProbs(tensor);
    const Op& next = op(use.op);
    if (next.kind == OpKind::kMatMul && use.port < 2) {
      match_->pv = use.op;
      match_->probs_input = use.port;
      return next.inputs.size() == 2 || Fail(absl::StrCat(next.ToString(), " adds a bias"));
    }
    if (!IsProbsOp(next) || use.port != 0) return FailProbs(tensor);
    if (match_->probs_ops.size() >= kMostSearched) {
      return Fail(absl::StrCat("no MatMul is among the ", kMostSearched, " ops after it"));
    }
    if (!MatchProbsOp(use.op, &tensor)) return false;
  }
}

bool AttentionMatcher::MatchProbsOp(OpIndex index, TensorId* tensor) {
  const Op& probs_op = op(index);
  *tensor = probs_op.outputs[0];
  const bool dropped = HaveOp(graph_, match_->probs_ops, OpKind::kDropout);
  const bool quantized = HaveOp(graph_, match_->probs_ops, OpKind::kQuantize);
  match_->probs_ops.push_back(index);
  const auto fail = [&](const std::string& what) {
    return FailIfNear(absl::StrCat(probs_op.ToString(), what), index);
  };
  if (probs_op.kind == OpKind::kDequantize) return fail(" has no Quantize before it");
  if (probs_op.kind == OpKind::kDropout) {
    if (dropped) return fail(" is a second dropout");
    return !quantized || fail(" follows a Quantize");
  }
  if (probs_op.kind != OpKind::kQuantize) return true;
  if (quantized) return fail(" is a second quantization");
  const OpIndex next = OnlyUse(*tensor).op;
  if (KindOf(next) != OpKind::kDequantize) return fail(" is not consumed by a Dequantize alone");
  const Op& dequantize = op(next);
  if (!SameQuantization(probs_op, dequantize)) {
    return fail(absl::StrCat(" and ", dequantize.ToString(),
                             " do not have the same scale and zero point per tensor"));
  }
  match_->probs_ops.push_back(next);
  *tensor = dequantize.outputs[0];
  return true;
}

// The MatMul with V has to sum over the columns. Only transposes are followed;
// Resolve checks the rest when reshapes are on the way.
bool AttentionMatcher::CheckContraction() {
  if (!match_->score_shape_ops.empty()) return true;
  int col = col_;
  for (OpIndex index : match_->probs_ops) {
    if (op(index).kind == OpKind::kStaticReshape) return true;
    if (op(index).kind != OpKind::kStaticTranspose) continue;
    const auto order = op(index).Get<Attr::kOrder>();
    const int rank = static_cast<int>(order.size());
    for (int i = 0; i < rank; ++i) {
      if ((order[i] < 0 ? order[i] : order[i] - rank) == col) {
        col = i - rank;
        break;
      }
    }
  }
  const Op& pv = op(match_->pv);
  int contracted = match_->probs_input == 0 ? -1 : -2;
  if (Transposes(pv, match_->probs_input)) contracted = OtherAxis(contracted);
  if (col != contracted) {
    return Fail(absl::StrCat("it normalises over another axis than ", pv.ToString(), " sums over"));
  }
  return true;
}

// What follows the MatMul and only moves, converts, rotates or quantizes the output; what follows
// the first-class op and converts or rotates it.
void AttentionMatcher::MatchOutput() {
  const bool direct = match_->first_class != Graph::kNoOp;
  match_->output = op(direct ? match_->first_class : match_->pv).outputs[0];
  for (;;) {
    const OpIndex index = OnlyUse(match_->output).op;
    if (index == Graph::kNoOp) return;
    const Op& next = op(index);
    if (direct && !ConvertsOrRotates(next.kind)) return;
    const bool quantize = next.kind == OpKind::kQuantize && IsPerTensor(next);
    if (!quantize && ClassOf(next.kind) != OpClass::kMove && next.kind != OpKind::kHadamard) return;
    match_->output_ops.push_back(index);
    match_->output = next.outputs[0];
    if (quantize) return;
  }
}

void AttentionMatcher::MarkOps() {
  in_match_.clear();
  VisitOps(*match_, [this](OpIndex index) { in_match_.insert(index); });
}

// Q, K and V, and whether the match as a whole can be one partition.
bool AttentionMatcher::MatchOperands() {
  MatchInputs();
  LeaveOutShared();
  if (!CheckSharing() || !CheckSources()) return false;
  ExplainLeftOut(match_->k);
  ExplainLeftOut(match_->v);
  return true;
}

bool AttentionMatcher::IsSeenInside(const Op& member, TensorId tensor, std::string_view what) {
  const OpIndex outside = UserOutside(tensor);
  if (outside == Graph::kNoOp) return true;
  const bool index = op(outside).kind == OpKind::kGenIndex;
  return Fail(
      absl::StrCat(std::string(what), member.ToString(), " is also consumed by ",
                   op(outside).ToString(),
                   index ? ", which makes no mask of this SoftMax alone that a GreaterEqual "
                           "of a row and a column is, plus at most one scalar and minus one"
                         : ""),
      outside);
}

// Nothing else inside may be seen from outside.
bool AttentionMatcher::CheckSharing() {
  for (const OpIndex index : in_match_) {
    const Op& member = op(index);
    const TensorId tensor = member.outputs[0];  // further outputs are ports: statistics, masks
    if (tensor == match_->output) continue;
    if (!IsSeenInside(member, tensor, "the output of ")) return false;
    if (member.kind != OpKind::kLoadRanges || member.outputs.size() < 2) continue;
    const TensorId lengths = member.outputs[1];
    if (!IsSeenInside(member, lengths, "the lengths of ")) return false;
    if (graph_.FindTensor(lengths)->consumers.empty()) {
      return Fail(absl::StrCat("the lengths of ", member.ToString(), " are an output"));
    }
  }
  return true;
}

// Operands have to come from outside.
bool AttentionMatcher::CheckSources() {
  bool outside = true;
  VisitChains(*match_, [&](const Chain& chain) {
    outside = outside && (!chain.present || CheckSource(chain.source));
  });
  if (!outside) return false;
  for (const OpIndex index : in_match_) {
    const OpKind kind = op(index).kind;
    if (kind != OpKind::kDropout && kind != OpKind::kDynamicDequantize) continue;
    for (size_t port = 1; port < op(index).inputs.size(); ++port) {
      if (match_->FindAuxiliary(index, port) != nullptr) continue;
      if (!CheckSource(op(index).inputs[port])) return false;
    }
  }
  return true;
}

bool AttentionMatcher::CheckSource(TensorId source) {
  const OpIndex producer = graph_.FindTensor(source)->producer.op;
  if (!in_match_.contains(producer)) return true;
  return Fail(absl::StrCat("the output of ", op(producer).ToString(), " is used twice in it"));
}

}  // namespace kvant
