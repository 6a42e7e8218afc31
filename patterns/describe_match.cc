// A match in a few words: what Partition::pattern() says.
#include "absl/strings/str_cat.h"
#include "kvant/patterns/op_groups.h"

namespace kvant {

std::string DescribeMatch(const Graph& graph, const AttentionMatch& match) {
  const bool direct = match.first_class != Graph::kNoOp;
  const auto k_or_v = [&](OpKind kind) {
    return HaveOp(graph, match.k, kind) || HaveOp(graph, match.v, kind);
  };
  std::string text;
  const auto add = [&text](std::string_view part) {
    absl::StrAppend(&text, text.empty() ? "attention: " : ", ", std::string(part));
  };
  if (direct) add("ScaledDotProductAttention");
  const bool k = HaveOp(graph, match.k, OpKind::kDynamicDequantize);
  const bool v = HaveOp(graph, match.v, OpKind::kDynamicDequantize);
  if (k || v) add(k && v ? "compressed K and V" : (k ? "compressed K" : "compressed V"));
  if (k_or_v(OpKind::kDequantize)) add("static quantization");
  if (match.k.size() > 1 || match.v.size() > 1) add("segments");
  if (k_or_v(OpKind::kLoadPages)) add("pages");
  if (k_or_v(OpKind::kLoadRanges)) add("rings");
  if (k_or_v(OpKind::kHadamard) || HaveOp(graph, match.q, OpKind::kHadamard) ||
      HaveOp(graph, match.output_ops, OpKind::kHadamard)) {
    add("rotated");
  }
  if (direct) return text;
  bool capped = false;
  for (size_t i = 0; i < match.steps.size(); ++i) {
    const StepMatch& step = match.steps[i];
    // What the scores are divided by before they are capped is the cap's own.
    if (i + 1 < match.steps.size() && match.steps[i + 1].kind == ScoreStep::Kind::kTanh) continue;
    switch (step.kind) {
      case ScoreStep::Kind::kMultiply:
      case ScoreStep::Kind::kDivide:
        if (!capped) add("scale");
        break;
      case ScoreStep::Kind::kTanh:
        capped = true;
        add("soft cap");
        break;
      case ScoreStep::Kind::kSelect:
        add("select mask");
        break;
      case ScoreStep::Kind::kBand:
        add("band mask");
        break;
      case ScoreStep::Kind::kAdd:
        add("additive mask");
        break;
      default:
        add(OpKindName(graph.ops()[step.op].kind));
    }
  }
  for (OpIndex index : match.probs_ops) {
    if (graph.ops()[index].kind == OpKind::kDropout) add("dropout");
    if (graph.ops()[index].kind == OpKind::kQuantize) add("quantized probabilities");
  }
  if (graph.ops()[match.softmax].inputs.size() > 1) add("KV lengths");
  if (graph.ops()[match.softmax].outputs.size() > 1) add("statistics");
  if (!match.output_ops.empty()) add("output chain");
  if (text.empty()) return "attention: plain";
  return text;
}

}  // namespace kvant
