#include "kvant/tools/dot.h"

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

// A quoted string of DOT; '\n' stays a line break.
std::string Quote(std::string_view text) {
  std::string quoted = "\"";
  for (char c : text) {
    if (c == '\n') {
      quoted += "\\n";
    } else {
      if (c == '"' || c == '\\') quoted += '\\';
      quoted += c;
    }
  }
  return quoted + "\"";
}

std::string OpNode(const Op& op) { return absl::StrCat("op", op.id); }
std::string TensorNode(TensorId id) { return absl::StrCat("t", id); }

void DrawOp(const Op& op, std::string_view indent, std::string& out) {
  absl::StrAppend(&out, std::string(indent), OpNode(op), " [label=",
                  Quote(absl::StrCat(std::string(OpKindName(op.kind)), "\n", Printable(op.name))),
                  "];\n");
}

std::string_view BoxColor(Partition::Kind kind) {
  switch (kind) {
    case Partition::Kind::kAttention:
      return "#d5e8d4";
    case Partition::Kind::kAttentionBackward:
      return "#dae8fc";
    case Partition::Kind::kStore:
      return "#fff2cc";
    case Partition::Kind::kMerge:
      return "#e1d5e7";
    case Partition::Kind::kOps:
      return "#f5f5f5";
  }
  return "white";
}

void DrawTensor(const Graph& graph, TensorId id, std::string& out) {
  const Graph::TensorInfo& info = *graph.FindTensor(id);
  const std::string label = Quote(absl::StrCat(id, ": ", info.desc.ToString()));
  std::string from;
  if (info.producer.op == Graph::kNoOp) {
    from = TensorNode(id);
    absl::StrAppend(&out, "  ", from, " [shape=ellipse, label=", label, "];\n");
  } else {
    from = OpNode(graph.ops()[info.producer.op]);
  }
  for (const Graph::Use& use : info.consumers) {
    absl::StrAppend(&out, "  ", from, " -> ", OpNode(graph.ops()[use.op]));
    if (info.producer.op != Graph::kNoOp) absl::StrAppend(&out, " [label=", label, "]");
    absl::StrAppend(&out, ";\n");
  }
  if (info.consumers.empty()) {
    absl::StrAppend(&out, "  ", TensorNode(id), " [shape=ellipse, label=", label, "];\n  ", from,
                    " -> ", TensorNode(id), ";\n");
  }
}

}  // namespace

std::string DrawDot(const Graph& graph, absl::Span<const Partition> partitions) {
  std::string out =
      "digraph kvant {\n"
      "  node [shape=box, style=filled, fillcolor=white, fontname=\"Helvetica\"];\n"
      "  edge [fontname=\"Helvetica\", fontsize=10];\n";
  absl::flat_hash_set<OpId> drawn;
  for (const Partition& partition : partitions) {
    absl::StrAppend(
        &out, "  subgraph cluster_", partition.id(),
        " {\n    label=", Quote(absl::StrCat(partition.id(), ": ", partition.pattern())),
        ";\n    style=filled;\n    fillcolor=\"", std::string(BoxColor(partition.kind())), "\";\n");
    for (const Op& op : partition.ops().ops()) {
      if (drawn.insert(op.id).second) DrawOp(op, "    ", out);
    }
    absl::StrAppend(&out, "  }\n");
  }
  absl::flat_hash_set<TensorId> tensors;
  for (const Op& op : graph.ops()) {
    if (drawn.insert(op.id).second) DrawOp(op, "  ", out);
    for (TensorId id : op.inputs) {
      if (tensors.insert(id).second) DrawTensor(graph, id, out);
    }
    for (TensorId id : op.outputs) {
      if (tensors.insert(id).second) DrawTensor(graph, id, out);
    }
  }
  return out + "}\n";
}

}  // namespace kvant
