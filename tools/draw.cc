#include "kvant/tools/draw.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kvant/graph/status.h"
#include "kvant/tools/files.h"

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

bool IsInstalled(const std::string& program) {
  const char* const path = std::getenv("PATH");
  for (const std::string& folder :
       std::vector<std::string>(absl::StrSplit(std::string(path ? path : ""), ':'))) {
    if (access(absl::StrCat(folder, "/", program).c_str(), X_OK) == 0) return true;
  }
  return false;
}

std::string ShellQuote(const std::string& text) {
  std::string quoted = "'";
  for (char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
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

absl::Status DrawSvg(const Graph& graph, absl::Span<const Partition> partitions,
                     const std::string& path) {
  if (!IsInstalled("dot")) {
    return MakeError(ErrorKind::kUnimplemented,
                     "--svg needs Graphviz's 'dot', which is not installed (Debian package "
                     "graphviz); --dot prints the drawing as text");
  }
  const std::string dot = DrawDot(graph, partitions);
  return ReplaceFile(path, [&](const std::string& file) -> absl::Status {
    const std::string command = absl::StrCat("dot -Tsvg -o ", ShellQuote(file));
    std::FILE* const pipe = popen(command.c_str(), "w");
    if (pipe == nullptr) return absl::InternalError("cannot start 'dot'");
    const bool written = std::fwrite(dot.data(), 1, dot.size(), pipe) == dot.size();
    if (pclose(pipe) != 0 || !written) {
      return absl::InternalError(absl::StrCat("'dot' could not write ", path));
    }
    return absl::OkStatus();
  });
}

}  // namespace kvant
