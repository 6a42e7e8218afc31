#include "kvant/tools/graph_runner.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_join.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

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
  KVANT_ASSIGN_OR_RETURN(runner.compiled_,
                         runner.engine_.Compile(graph, {.partitioning = options}));
  return runner;
}

std::string GraphRunner::backends() const {
  return JoinDistinct(partitions(), ", ", [](const CompiledPartition& p) { return p.backend(); });
}

std::string GraphRunner::kernels() const {
  return JoinDistinct(partitions(), "; ", [](const CompiledPartition& p) { return p.kernel(); });
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
  const Graph& graph = compiled_.graph();
  // Before any is bound: adding to the map moves those that are there.
  for (const TensorId id : graph.outputs()) {
    if (buffers.contains(id)) continue;
    KVANT_ASSIGN_OR_RETURN(Buffer buffer, Buffer::For(graph.tensor(id)));
    buffers.emplace(id, std::move(buffer));
  }
  Binding binding(engine_.shared_memory());
  for (const TensorId id : graph.inputs()) {
    const auto found = buffers.find(id);
    if (found == buffers.end()) {
      return InvalidArguments("no data for graph input ", id);
    }
    void* data = found->second.data();
    if (graph.tensor(id).property != Property::kHostScalar) {
      KVANT_ASSIGN_OR_RETURN(data, binding.Place(found->second, /*written=*/false));
    }
    binding.inputs.emplace_back(data, found->second.bytes());
  }
  for (const TensorId id : graph.outputs()) {
    Buffer& buffer = buffers.at(id);
    KVANT_ASSIGN_OR_RETURN(void* data, binding.Place(buffer, /*written=*/true));
    binding.outputs.push_back({data, buffer.bytes()});
  }
  return binding;
}

absl::Status GraphRunner::Run(const Binding& binding, const Stream& stream) const {
  return compiled_.Execute(stream, binding.inputs, binding.outputs);
}

absl::Status GraphRunner::Run(BufferMap& buffers) const {
  KVANT_ASSIGN_OR_RETURN(const Binding binding, Bind(buffers));
  KVANT_RETURN_IF_ERROR(Run(binding));
  KVANT_RETURN_IF_ERROR(Synchronize());
  return binding.Fetch();
}

}  // namespace kvant
