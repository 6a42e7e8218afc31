// Graphs and their partitions.
#include <string_view>
#include <utility>

#include "absl/strings/str_join.h"
#include "kvant/graph/json.h"
#include "kvant/integrations/c/call.h"
#include "kvant/integrations/c/handles.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tools/dot.h"

namespace kvant::c {
namespace {

absl::Status DescribePort(const kvant_graph* graph, bool output, size_t at, kvant_tensor* tensor) {
  KVANT_RETURN_IF_ERROR(NotNull({{"graph", graph}}));
  const std::vector<TensorId>& ports = output ? graph->graph.outputs() : graph->graph.inputs();
  if (at >= ports.size()) {
    return InvalidArguments("there is no ", output ? "output " : "input ", at, ": the graph has ",
                            ports.size());
  }
  return Write("tensor", Describe(graph->graph.tensor(ports[at])), tensor);
}

absl::Status CheckAt(const kvant_partitions* partitions, size_t at) {
  KVANT_RETURN_IF_ERROR(NotNull({{"partitions", partitions}}));
  if (at < partitions->partitions.size()) return absl::OkStatus();
  return InvalidArguments("there is no partition ", at, ": the graph has ",
                          partitions->partitions.size());
}

// By which kinds are converted.
static_assert(static_cast<int>(Partition::Kind::kAttention) == KVANT_ATTENTION);
static_assert(static_cast<int>(Partition::Kind::kAttentionBackward) == KVANT_ATTENTION_BACKWARD);
static_assert(static_cast<int>(Partition::Kind::kStore) == KVANT_STORE);
static_assert(static_cast<int>(Partition::Kind::kOps) == KVANT_OPS);
static_assert(static_cast<int>(Partition::Kind::kMerge) == KVANT_MERGE);

}  // namespace

extern "C" {

kvant_status kvant_graph_from_json(const char* text, size_t bytes, kvant_graph** graph) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"text", text}, {"graph", graph}}));
    KVANT_ASSIGN_OR_RETURN(Graph read, GraphFromJson(std::string_view(text, bytes)));
    *graph = new kvant_graph{std::move(read)};
    return absl::OkStatus();
  });
}

kvant_status kvant_graph_to_json(const kvant_graph* graph, const char** text) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"graph", graph}, {"text", text}}));
    *text = Keep(GraphToJson(graph->graph));
    return absl::OkStatus();
  });
}

kvant_status kvant_graph_to_dot(const kvant_graph* graph, const char** text) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"graph", graph}, {"text", text}}));
    KVANT_ASSIGN_OR_RETURN(const std::vector<Partition> partitions, PartitionGraph(graph->graph));
    *text = Keep(DrawDot(graph->graph, partitions));
    return absl::OkStatus();
  });
}

void kvant_graph_destroy(kvant_graph* graph) { delete graph; }

size_t kvant_graph_inputs(const kvant_graph* graph) {
  return graph == nullptr ? 0 : graph->graph.inputs().size();
}

size_t kvant_graph_outputs(const kvant_graph* graph) {
  return graph == nullptr ? 0 : graph->graph.outputs().size();
}

kvant_status kvant_graph_input(const kvant_graph* graph, size_t at, kvant_tensor* tensor) {
  return Call([&] { return DescribePort(graph, /*output=*/false, at, tensor); });
}

kvant_status kvant_graph_output(const kvant_graph* graph, size_t at, kvant_tensor* tensor) {
  return Call([&] { return DescribePort(graph, /*output=*/true, at, tensor); });
}

kvant_status kvant_graph_partitions(const kvant_graph* graph, kvant_partitions** partitions) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"graph", graph}, {"partitions", partitions}}));
    auto made = std::make_unique<kvant_partitions>();
    KVANT_ASSIGN_OR_RETURN(made->partitions, PartitionGraph(graph->graph));
    for (const Partition& partition : made->partitions) {
      kvant_partitions::Texts& texts = made->texts.emplace_back();
      std::vector<std::string> notes = partition.notes();
      notes.insert(notes.end(), partition.misses().begin(), partition.misses().end());
      texts.notes = absl::StrJoin(notes, "\n");
      for (const Op& op : partition.ops().ops()) texts.ops.push_back(op.id);
    }
    *partitions = made.release();
    return absl::OkStatus();
  });
}

void kvant_partitions_destroy(kvant_partitions* partitions) { delete partitions; }

size_t kvant_partitions_count(const kvant_partitions* partitions) {
  return partitions == nullptr ? 0 : partitions->partitions.size();
}

kvant_status kvant_partitions_at(const kvant_partitions* partitions, size_t at,
                                 kvant_partition* partition) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(CheckAt(partitions, at));
    const kvant_partitions::Texts& texts = partitions->texts[at];
    kvant_partition result = {};
    result.kind = static_cast<kvant_partition_kind>(partitions->partitions[at].kind());
    result.pattern = partitions->partitions[at].pattern().c_str();
    result.notes = texts.notes.c_str();
    result.ops = texts.ops.data();
    result.ops_count = texts.ops.size();
    return Write("partition", result, partition);
  });
}

kvant_status kvant_partitions_graph(const kvant_partitions* partitions, size_t at,
                                    kvant_graph** graph) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(CheckAt(partitions, at));
    KVANT_RETURN_IF_ERROR(NotNull({{"graph", graph}}));
    *graph = new kvant_graph{partitions->partitions[at].ops()};
    return absl::OkStatus();
  });
}

}  // extern "C"
}  // namespace kvant::c
