// kvant show: what is found in a graph, and what would run it.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"
#include "kvant/tools/command.h"
#include "kvant/tools/dot.h"
#include "kvant/tools/draw.h"

namespace kvant {
namespace {

using Json = nlohmann::ordered_json;

std::string_view KindName(Partition::Kind kind) {
  switch (kind) {
    case Partition::Kind::kAttention:
      return "attention";
    case Partition::Kind::kAttentionBackward:
      return "attention_backward";
    case Partition::Kind::kStore:
      return "store";
    case Partition::Kind::kMerge:
      return "merge";
    case Partition::Kind::kOps:
      return "ops";
  }
  return "";
}

// What the engine makes of a partition; why not, where it does not compile.
struct Choice {
  std::string backend;
  std::string kernel;
  std::vector<std::string> notes;
};

Choice Choose(const Engine& engine, const Partition& partition) {
  Choice choice{.backend = "", .kernel = "", .notes = partition.notes()};
  const absl::StatusOr<CompiledPartition> compiled = engine.Compile(partition);
  if (!compiled.ok()) {
    choice.notes.push_back(
        absl::StrCat("does not compile: ", std::string(compiled.status().message())));
    return choice;
  }
  choice.backend = std::string(compiled->backend());
  choice.kernel = compiled->kernel();
  const auto& passed_over = compiled->passed_over();
  choice.notes.insert(choice.notes.end(), passed_over.begin(), passed_over.end());
  return choice;
}

// Each once, in order of first use.
std::vector<const LogicalTensor*> ConstantsOf(const Graph& graph) {
  std::vector<const LogicalTensor*> constants;
  for (const Op& op : graph.ops()) {
    for (const TensorId id : op.inputs) {
      const LogicalTensor* tensor = &graph.tensor(id);
      if (!tensor->value || std::count(constants.begin(), constants.end(), tensor) > 0) continue;
      constants.push_back(tensor);
    }
  }
  return constants;
}

Json ToJson(const Partition& partition, const Choice& choice) {
  std::vector<OpId> ops;
  for (const Op& op : partition.ops().ops()) ops.push_back(op.id);
  Json json = {{"id", partition.id()},
               {"kind", std::string(KindName(partition.kind()))},
               {"pattern", partition.pattern()},
               {"ops", ops},
               {"inputs", partition.inputs()},
               {"outputs", partition.outputs()},
               {"constants", Json::array()},
               {"backend", nullptr},
               {"kernel", nullptr},
               {"notes", choice.notes},
               {"misses", partition.misses()}};
  for (const LogicalTensor* constant : ConstantsOf(partition.ops())) {
    json["constants"].push_back({{"id", constant->id},
                                 {"type", std::string(DataTypeName(constant->type))},
                                 {"value", constant->value->ToString()}});
  }
  if (!choice.backend.empty()) {
    json["backend"] = choice.backend;
    json["kernel"] = choice.kernel;
  }
  if (partition.attention() != nullptr) json["spec"] = partition.attention()->ToString();
  return json;
}

void Print(const Partition& partition, const Choice& choice) {
  std::printf("partition %d: %s\n", partition.id(), partition.pattern().c_str());
  for (const Op& op : partition.ops().ops()) std::printf("  op      %s\n", op.ToString().c_str());
  for (size_t i = 0; i < partition.inputs().size(); ++i) {
    const LogicalTensor& port = partition.input(static_cast<int>(i));
    std::printf("  input   %s: %s\n", absl::StrCat(port.id).c_str(), port.ToString().c_str());
  }
  for (const LogicalTensor* constant : ConstantsOf(partition.ops())) {
    std::printf("  constant %s: %s\n", absl::StrCat(constant->id).c_str(),
                constant->ToString().c_str());
  }
  for (size_t i = 0; i < partition.outputs().size(); ++i) {
    const LogicalTensor& port = partition.output(static_cast<int>(i));
    std::printf("  output  %s: %s\n", absl::StrCat(port.id).c_str(), port.ToString().c_str());
  }
  if (partition.attention() != nullptr) {
    std::printf("  means   %s\n", partition.attention()->ToString().c_str());
  }
  if (!choice.backend.empty()) {
    std::printf("  runs    on %s: %s\n", choice.backend.c_str(), choice.kernel.c_str());
  }
  for (const std::string& note : choice.notes) std::printf("  note    %s\n", note.c_str());
}

struct ShowArguments {
  GraphArguments graph_arguments;
  bool json = false;
  bool dot = false;
  std::string svg;

  void AddTo(CLI::App& command) {
    graph_arguments.AddTo(command);
    CLI::Option* const as_json = command.add_flag("--json", json, "Print JSON");
    command.add_flag("--dot", dot, "Print a drawing in Graphviz's language")->excludes(as_json);
    command.add_option("--svg", svg, "Write a drawing to this file (needs Graphviz)");
  }

  absl::StatusOr<int> Run() const {
    KVANT_ASSIGN_OR_RETURN(const Graph graph, graph_arguments.Load());
    KVANT_ASSIGN_OR_RETURN(const std::vector<Partition> partitions,
                           PartitionGraph(graph, graph_arguments.partition_options()));
    if (!svg.empty()) KVANT_RETURN_IF_ERROR(DrawSvg(graph, partitions, svg));
    if (dot) {
      std::fputs(DrawDot(graph, partitions).c_str(), stdout);
      return 0;
    }
    KVANT_ASSIGN_OR_RETURN(const Engine engine, graph_arguments.MakeEngine());
    Json out = {{"partitions", Json::array()}};
    for (const Partition& partition : partitions) {
      const Choice choice = Choose(engine, partition);
      if (json) {
        out["partitions"].push_back(ToJson(partition, choice));
      } else {
        Print(partition, choice);
      }
    }
    if (json) {
      // Names in a graph may be any bytes; what is not UTF-8 is replaced.
      std::puts(out.dump(2, ' ', false, Json::error_handler_t::replace).c_str());
      return 0;
    }
    for (const std::string& miss : MissesOf(partitions)) std::printf("%s\n", miss.c_str());
    return 0;
  }
};

}  // namespace

void AddShowCommand(CLI::App& app, Action& action) {
  AddCommand<ShowArguments>(app, action, "show",
                            "Show the partitions of a graph, what would run them and why, and why "
                            "the rest is not fused");
}

}  // namespace kvant
