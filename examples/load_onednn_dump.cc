// load_onednn_dump [FILE]: runs a graph in the format of oneDNN's dumps (ONEDNN_GRAPH_DUMP=graph);
// without FILE, one of the source tree, from its root. Whatever its inputs are, each port of the
// compiled partition says what memory it needs.
#include <cmath>
#include <iostream>
#include <vector>

#include "kvant/kvant.h"

namespace {

constexpr char kFile[] = "examples/data/sdpa_int4_cache.json";

// Memory for a port, filled with small numbers that its type can hold.
std::vector<std::byte> Fill(const kvant::LogicalTensor& port) {
  std::vector<std::byte> data(port.memory_bytes());
  for (int64_t i = 0; i < port.span_elements(); ++i) {
    const double value = kvant::IsInteger(port.type) ? i % 7 : 1 + 0.5 * std::sin(0.3 * i);
    kvant::StoreElement(port.type, data.data(), i, value);
  }
  return data;
}

absl::Status Run(const char* file) {
  KVANT_ASSIGN_OR_RETURN(kvant::Graph graph, kvant::GraphFromJsonFile(file));
  KVANT_RETURN_IF_ERROR(kvant::InferShapes(graph));
  KVANT_ASSIGN_OR_RETURN(const auto partitions, kvant::PartitionGraph(graph));
  std::cout << file << ": " << graph.ops().size() << " ops, " << partitions.size()
            << " partition(s)\n";
  if (partitions.size() != 1) return absl::InternalError("expected one partition");

  KVANT_ASSIGN_OR_RETURN(const auto engine, kvant::Engine::Create());
  KVANT_ASSIGN_OR_RETURN(const auto compiled, engine.Compile(partitions.front()));
  std::cout << compiled << "\n";

  const kvant::Partition& partition = compiled.partition();
  std::vector<std::vector<std::byte>> memory;
  std::vector<kvant::ConstTensor> inputs;
  for (size_t port = 0; port < partition.inputs().size(); ++port) {
    const kvant::LogicalTensor& tensor = partition.input(port);
    std::cout << "input " << tensor.id << ": " << tensor.ToString() << "\n";
    memory.push_back(Fill(tensor));
    inputs.emplace_back(memory.back().data(), memory.back().size());
  }
  const kvant::LogicalTensor& output = partition.output(0);
  std::vector<std::byte> result(output.memory_bytes());
  KVANT_RETURN_IF_ERROR(
      compiled.Execute(kvant::Stream(engine), inputs, {{result.data(), result.size()}}));
  std::cout << "output " << output.id << ": " << output.ToString() << ", first element "
            << kvant::LoadElement(output.type, result.data(), 0) << "\n";
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  const absl::Status status = Run(argc > 1 ? argv[1] : kFile);
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
