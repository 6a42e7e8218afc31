#include "kvant/bench/run_graph.h"

#include <random>
#include <string>
#include <vector>

#include "kvant/backends/engine.h"
#include "kvant/patterns/partitioner.h"

namespace kvant {
namespace {

std::vector<uint64_t> MakeMemory(const LogicalTensor& tensor, double lowest) {
  std::vector<uint64_t> memory(static_cast<size_t>(tensor.memory_bytes()) / 8 + 1);
  std::mt19937_64 random;
  if (IsInteger(tensor.type)) {
    for (uint64_t& word : memory) word = random();
    return memory;
  }
  std::uniform_real_distribution<double> value(lowest, 1);
  for (int64_t i = 0; i < tensor.memory_bytes() * 8 / BitsOf(tensor.type); ++i) {
    StoreElement(tensor.type, memory.data(), i, value(random));
  }
  return memory;
}

}  // namespace

void RunGraph(benchmark::State& state, const absl::StatusOr<Graph>& graph, double lowest) {
  if (!graph.ok()) return state.SkipWithError(std::string(graph.status().message()).c_str());
  const absl::StatusOr<Engine> engine = Engine::Create({.backends = {"cpu"}, .threads = 1});
  const auto compiled = engine->Compile(PartitionGraph(*graph)->at(0));
  if (!compiled.ok()) return state.SkipWithError(std::string(compiled.status().message()).c_str());
  const Partition& partition = compiled->partition();
  std::vector<std::vector<uint64_t>> memory;
  std::vector<ConstTensor> inputs;
  for (size_t i = 0; i < partition.inputs().size(); ++i) {
    memory.push_back(MakeMemory(partition.input(static_cast<int>(i)), lowest));
    inputs.emplace_back(memory.back().data(), memory.back().size() * 8);
  }
  std::vector<uint64_t> out(static_cast<size_t>(partition.output(0).memory_bytes()) / 8 + 1);
  const Tensor outputs[] = {{out.data(), out.size() * 8}};
  const Stream stream(*engine);
  for (auto _ : state) {
    const absl::Status status = compiled->Execute(stream, inputs, outputs);
    if (!status.ok()) state.SkipWithError(std::string(status.message()).c_str());
  }
  state.SetLabel(compiled->kernel());
}

}  // namespace kvant
