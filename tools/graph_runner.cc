#include "kvant/tools/graph_runner.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

// There must be something to run, every tensor must have a size, and every output someone who
// computes it.
absl::Status CheckRunnable(const Graph& graph, const std::vector<Partition>& partitions) {
  if (graph.ops().empty()) return MakeError(ErrorKind::kInvalidGraph, "the graph has no ops");
  absl::flat_hash_set<TensorId> computed;
  for (const Partition& partition : partitions) {
    computed.insert(partition.outputs().begin(), partition.outputs().end());
  }
  for (TensorId id : graph.inputs()) {
    if (graph.tensor(id).has_shape()) continue;
    return MakeError(ErrorKind::kInvalidShape,
                     absl::StrCat("graph input ", id, " (", graph.tensor(id).ToString(),
                                  ") has no known shape; give one with --in-shapes"));
  }
  for (TensorId id : graph.outputs()) {
    const Graph::TensorInfo* info = graph.FindTensor(id);
    if (info->producer.op == Graph::kNoOp || computed.contains(id)) continue;
    return MakeError(ErrorKind::kUnimplemented,
                     absl::StrCat("nothing computes output ", id, ": ",
                                  graph.ops()[info->producer.op].ToString(), " is never run"));
  }
  return absl::OkStatus();
}

template <typename Text>
std::string JoinDistinct(const std::vector<CompiledPartition>& partitions, std::string_view comma,
                         Text text) {
  std::vector<std::string> parts;
  absl::flat_hash_set<std::string> known;
  for (const CompiledPartition& partition : partitions) {
    std::string part(text(partition));
    if (known.insert(part).second) parts.push_back(std::move(part));
  }
  return absl::StrJoin(parts, std::string(comma));
}

}  // namespace

EngineOptions EngineOptionsFor(const std::string& backend, int threads) {
  EngineOptions options;
  if (backend != "auto") {
    options.backends = {backend};
    options.device = DeviceOfBackend(backend).value_or(Device::kCpu);
  }
  options.threads = threads;
  return options;
}

absl::StatusOr<GraphRunner> GraphRunner::Create(const Graph& graph, Engine engine,
                                                const PartitionOptions& options) {
  GraphRunner runner(std::move(engine));
  KVANT_ASSIGN_OR_RETURN(const std::vector<Partition> partitions, PartitionGraph(graph, options));
  KVANT_RETURN_IF_ERROR(CheckRunnable(graph, partitions));
  for (const Partition& partition : partitions) {
    KVANT_ASSIGN_OR_RETURN(CompiledPartition compiled, runner.engine_.Compile(partition));
    runner.partitions_.push_back(std::move(compiled));
  }
  return runner;
}

std::string GraphRunner::backends() const {
  return JoinDistinct(partitions_, ", ", [](const CompiledPartition& p) { return p.backend(); });
}

std::string GraphRunner::kernels() const {
  return JoinDistinct(partitions_, "; ", [](const CompiledPartition& p) { return p.kernel(); });
}

double GraphRunner::rounding() const {
  double most = 0;
  for (const CompiledPartition& compiled : partitions_) most = std::max(most, compiled.rounding());
  return most;
}

GraphRunner::Binding::~Binding() {
  for (const auto& [host, copy] : copies_) memory_->Free(copy.device);
}

absl::StatusOr<void*> GraphRunner::Binding::Place(Buffer& buffer, bool written) {
  if (!memory_->asynchronous()) return static_cast<void*>(buffer.data());
  if (const auto found = copies_.find(&buffer); found != copies_.end()) {
    found->second.written = found->second.written || written;
    return found->second.device;
  }
  KVANT_ASSIGN_OR_RETURN(void* device, memory_->Allocate(buffer.bytes()));
  copies_.emplace(&buffer, Copy{device, written});
  KVANT_RETURN_IF_ERROR(memory_->CopyFromHost(device, buffer.data(), buffer.bytes()));
  return device;
}

absl::Status GraphRunner::Binding::Fetch() const {
  for (const auto& [host, copy] : copies_) {
    if (!copy.written) continue;
    KVANT_RETURN_IF_ERROR(memory_->CopyToHost(host->data(), copy.device, host->bytes()));
  }
  return absl::OkStatus();
}

absl::StatusOr<GraphRunner::Binding> GraphRunner::Bind(BufferMap& buffers) const {
  // Before any is bound: adding to the map moves those that are there.
  for (const CompiledPartition& compiled : partitions_) {
    const Partition& partition = compiled.partition();
    for (size_t port = 0; port < partition.outputs().size(); ++port) {
      const LogicalTensor& desc = partition.output(static_cast<int>(port));
      if (buffers.contains(desc.id)) continue;
      Buffer buffer(static_cast<size_t>(desc.memory_bytes()));
      buffers.emplace(desc.id, std::move(buffer));
    }
  }
  Binding binding(engine_.shared_memory());
  for (const CompiledPartition& compiled : partitions_) {
    const Partition& partition = compiled.partition();
    Binding::Step& step = binding.steps.emplace_back();
    for (TensorId id : partition.inputs()) {
      const auto it = buffers.find(id);
      if (it == buffers.end()) {
        return MakeError(ErrorKind::kInvalidArguments,
                         absl::StrCat("no data for graph input ", id, " of partition ",
                                      partition.id(), " (", partition.pattern(), ")"));
      }
      const bool on_host = partition.ops().tensor(id).property == Property::kHostScalar;
      void* data = it->second.data();
      if (!on_host) {
        KVANT_ASSIGN_OR_RETURN(data, binding.Place(it->second, /*written=*/false));
      }
      step.inputs.emplace_back(data, it->second.bytes());
    }
    for (size_t port = 0; port < partition.outputs().size(); ++port) {
      const LogicalTensor& desc = partition.output(static_cast<int>(port));
      Buffer& buffer = buffers.at(desc.id);
      KVANT_ASSIGN_OR_RETURN(void* data, binding.Place(buffer, /*written=*/true));
      step.outputs.push_back({data, buffer.bytes()});
    }
  }
  return binding;
}

absl::Status GraphRunner::Run(const Binding& binding, const Stream& stream) const {
  for (size_t i = 0; i < partitions_.size(); ++i) {
    KVANT_RETURN_IF_ERROR(
        partitions_[i].Execute(stream, binding.steps[i].inputs, binding.steps[i].outputs));
  }
  return absl::OkStatus();
}

absl::Status GraphRunner::Run(BufferMap& buffers) const {
  KVANT_ASSIGN_OR_RETURN(const Binding binding, Bind(buffers));
  KVANT_RETURN_IF_ERROR(Run(binding));
  KVANT_RETURN_IF_ERROR(Synchronize());
  return binding.Fetch();
}

}  // namespace kvant
