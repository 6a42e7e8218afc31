#include "kvant/backends/engine.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/graph/status.h"
#include "kvant/graph/verbose.h"

namespace kvant {

namespace {

using MadeBackend = absl::StatusOr<std::unique_ptr<Backend>>;

std::atomic<std::unique_ptr<Backend> (*)()> cuda_simt_backend = nullptr;

// The backends, in the order in which an engine asks them unless told otherwise.
struct BackendRow {
  std::string_view name;
  Device device;
  // Null where it is not in this build.
  MadeBackend (*make)(const EngineOptions&);
  bool by_default;
};
constexpr BackendRow kBackends[] = {
    {"cpu", Device::kCpu, [](const EngineOptions&) -> MadeBackend { return MakeCpuBackend(); },
     true},
    {"reference", Device::kCpu,
     [](const EngineOptions&) -> MadeBackend { return MakeReferenceBackend(); }, true},
    {"oracle", Device::kCpu,
     [](const EngineOptions&) -> MadeBackend { return MakeOracleBackend(); }, false},
    {"cuda", Device::kCuda,
     [](const EngineOptions& options) { return MakeCudaBackend(options.device_index); }, true},
    {"cuda_simt", Device::kCudaSimt,
     [](const EngineOptions&) -> MadeBackend {
       const auto make = cuda_simt_backend.load();
       if (make != nullptr) return make();
       return MakeError(ErrorKind::kUnimplemented,
                        "backend 'cuda_simt' is in the library kvant::simt, and EnableCudaSimt() "
                        "was not called");
     },
     true},
};

MadeBackend MakeNamedBackend(const std::string& name, const EngineOptions& options) {
  for (const BackendRow& row : kBackends) {
    if (row.name != name) continue;
    if (row.device != options.device) {
      return InvalidArguments("backend '", name, "' does not run on device ",
                              DeviceName(options.device));
    }
    KVANT_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, row.make(options));
    if (backend != nullptr) return backend;
    return MakeError(ErrorKind::kUnimplemented, "backend '", name, "' is not in this build");
  }
  const std::string known = absl::StrJoin(
      kBackends, ", ", [](std::string* out, const BackendRow& row) { out->append(row.name); });
  return InvalidArguments("no backend is named '", name, "'; there are ", known);
}

// Stands in for a kernel that would write nothing.
class NothingToDo : public Executable {
 public:
  std::string kernel() const override { return "nothing to do: outputs have no elements"; }
  absl::Status Run(const Execution&) const override { return absl::OkStatus(); }
};

std::string Describe(const Partition& partition) {
  return absl::StrCat("partition ", partition.id(), " (", partition.pattern(), ")");
}

// Where strides may put two elements of an output at one place: what would be left there depends on
// the order of writing. Empty unless so. Every dim must step beyond all that lies within it, as it
// does in each permuted, padded or split layout; the rare strides that interleave dims without a
// collision are refused with the others.
std::string DescribeOverlap(const LogicalTensor& port) {
  const Dims& dims = *port.dims;
  if (port.elements() == 0) return "";
  const Dims strides = port.StridesOrDense();
  std::vector<std::pair<int64_t, size_t>> order;  // strides, dims
  for (size_t d = 0; d < dims.size(); ++d) {
    if (dims[d] > 1) order.emplace_back(strides[d], d);
  }
  std::ranges::sort(order);
  int64_t reach = 0;  // from the first element to the last of the dims so far
  for (const auto& [stride, d] : order) {
    if (stride <= reach) {
      return absl::StrCat("may write two elements to one place: dim ", d, " of ", dims[d],
                          " elements has stride ", stride, ", and dims within it reach ", reach,
                          " elements far (dims ", DimsToString(dims), ", strides ",
                          DimsToString(strides), ")");
    }
    reach += (dims[d] - 1) * stride;
  }
  return "";
}

// What every backend may rely on, beside known shapes.
absl::Status CheckPort(const Partition& partition, TensorId id, bool output) {
  const LogicalTensor& port = partition.ops().tensor(id);
  const auto error = [&](ErrorKind kind, std::string_view message) {
    return MakeError(kind, Describe(partition), ": ", output ? "output " : "input ", message);
  };
  if (port.type == kUndef) {
    return error(ErrorKind::kInvalidDataType, port.Label() + " has no data type");
  }
  if (absl::Status valid = ValidateTensor(port); !valid.ok()) {
    return error(ErrorKind::kInvalidShape, std::string(valid.message()));
  }
  if (!output || !port.strides) return absl::OkStatus();
  if (const std::string overlap = DescribeOverlap(port); !overlap.empty()) {
    return error(ErrorKind::kInvalidArguments, absl::StrCat(port.Label(), " ", overlap));
  }
  return absl::OkStatus();
}

// An output of no elements leaves the others to be written, but for a store's: without codes it
// writes no scales either (docs/ops.md, DynamicQuantize).
bool WritesNothing(const Partition& partition) {
  const auto is_empty = [&](TensorId id) { return partition.ops().tensor(id).elements() == 0; };
  const auto& outputs = partition.outputs();
  return partition.kind() == Partition::Kind::kStore ? std::ranges::any_of(outputs, is_empty)
                                                     : std::ranges::all_of(outputs, is_empty);
}

absl::StatusOr<Partition> Specialize(const Partition& partition, const CompileOptions& options) {
  for (const LogicalTensor& port : options.ports) {
    if (partition.InputPort(port.id) != kNoPort) continue;
    if (partition.OutputPort(port.id) != kNoPort) continue;
    return InvalidArguments(Describe(partition), ": tensor ", port.id, " is not one of its ports");
  }
  KVANT_ASSIGN_OR_RETURN(Partition known, partition.WithPorts(options.ports));
  for (const TensorId id : known.inputs()) KVANT_RETURN_IF_ERROR(CheckPort(known, id, false));
  for (const TensorId id : known.outputs()) KVANT_RETURN_IF_ERROR(CheckPort(known, id, true));
  return known;
}

// "'k'"; its id where it has no name.
std::string PortName(const LogicalTensor& port) {
  return port.name.empty() ? absl::StrCat(port.id) : absl::StrCat("'", port.name, "'");
}

// Every input must have a size, and every tensor someone who computes it.
absl::Status CheckRunnable(const Graph& graph) {
  for (const TensorId id : graph.inputs()) {
    if (graph.tensor(id).has_shape()) continue;
    return MakeError(ErrorKind::kInvalidShape, "graph input ", PortName(graph.tensor(id)), " (",
                     graph.tensor(id).ToString(), ") has no known shape");
  }
  for (const Op& op : graph.ops()) {
    if (op.kind != OpKind::kWildcard || op.outputs.empty()) continue;
    return MakeError(ErrorKind::kInvalidGraph, "nothing computes ",
                     PortName(graph.tensor(op.outputs[0])), ": ", op.ToString(), " is never run");
  }
  return absl::OkStatus();
}

}  // namespace

void SetCudaSimtBackend(std::unique_ptr<Backend> (*make)()) { cuda_simt_backend = make; }

absl::Status CheckAttention(const Partition& partition) {
  if (partition.attention() != nullptr) return absl::OkStatus();
  std::string why = absl::StrCat("neither attention, a merge nor a store: ", partition.pattern());
  if (partition.kind() == Partition::Kind::kAttentionBackward) {
    why = "attention backward is not fused";
  } else if (partition.kind() == Partition::Kind::kAttention) {
    why = absl::StrJoin(partition.notes(), "; ");
  }
  return MakeError(ErrorKind::kUnimplemented, why);
}

absl::Status NotTaken(absl::string_view what) {
  return MakeError(ErrorKind::kUnimplemented, "does not take ", what);
}

std::string_view DeviceName(Device device) {
  // That of its first backend.
  for (const BackendRow& row : kBackends) {
    if (row.device == device) return row.name;
  }
  return "";
}

std::optional<Device> DeviceOfBackend(std::string_view name) {
  for (const BackendRow& row : kBackends) {
    if (row.name == name) return row.device;
  }
  return std::nullopt;
}

Engine::Engine() {
  static const auto* const executor = new std::shared_ptr<Executor>(MakeSerialExecutor());
  static const auto* const memory = new std::shared_ptr<DeviceMemory>(MakeHostMemory());
  static const auto* const identity = new auto(std::make_shared<const Identity>());
  identity_ = *identity;
  executor_ = *executor;
  memory_ = *memory;
}

absl::StatusOr<Engine> Engine::Create(const EngineOptions& options) {
  return WithoutExceptions([&]() -> absl::StatusOr<Engine> {
    Engine engine;
    engine.identity_ = std::make_shared<const Identity>();
    engine.device_ = options.device;
    for (const std::string& name : options.backends) {
      KVANT_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, MakeNamedBackend(name, options));
      engine.backends_.push_back(std::move(backend));
    }
    if (options.backends.empty()) {
      for (const BackendRow& row : kBackends) {
        if (!row.by_default || row.device != options.device) continue;
        KVANT_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, row.make(options));
        if (backend != nullptr) engine.backends_.push_back(std::move(backend));
      }
    }
    if (engine.backends_.empty()) {
      return InvalidArguments("no device is numbered ", static_cast<int>(options.device));
    }
    engine.memory_ = engine.backends_.front()->memory();
    if (options.executor == nullptr) {
      engine.executor_ = MakeTbbExecutor(options.threads);
    } else {
      KVANT_ASSIGN_OR_RETURN(engine.executor_, MakeCheckedExecutor(options.executor));
    }
    return engine;
  });
}

absl::StatusOr<std::unique_ptr<CacheKernels>> Engine::MakeCacheKernels() const {
  if (backends_.empty()) return MakeHostCacheKernels();
  return WithoutExceptions([&] { return backends_.front()->MakeCacheKernels(); });
}

absl::StatusOr<CompiledGraph> Engine::Compile(const Graph& graph,
                                              const CompileGraphOptions& options) const {
  return WithoutExceptions([&]() -> absl::StatusOr<CompiledGraph> {
    if (!graph.finalized() || graph.ops().empty()) {
      return MakeError(ErrorKind::kInvalidGraph,
                       graph.finalized() ? "the graph has no ops" : "the graph is not finalized");
    }
    Graph known = graph;
    KVANT_RETURN_IF_ERROR(InferShapes(known, options.tensors));
    KVANT_ASSIGN_OR_RETURN(const std::vector<Partition> partitions,
                           PartitionGraph(known, options.partitioning));
    KVANT_RETURN_IF_ERROR(CheckRunnable(known));
    std::vector<CompiledPartition> compiled;
    for (const Partition& partition : partitions) {
      KVANT_ASSIGN_OR_RETURN(CompiledPartition one,
                             Compile(partition, {.require_fused = options.require_fused}));
      compiled.push_back(std::move(one));
    }
    return CompiledGraph::Make(*this, std::move(known), std::move(compiled), MissesOf(partitions));
  });
}

absl::StatusOr<CompiledPartition> Engine::Compile(const Partition& partition,
                                                  const CompileOptions& options) const {
  return WithoutExceptions([&] {
    const VerboseEvent event("compile");
    absl::StatusOr<CompiledPartition> compiled = CompileChecked(partition, options);
    event.Done([&] {
      return compiled.ok() ? compiled->ToString() : std::string(compiled.status().message());
    });
    return compiled;
  });
}

absl::StatusOr<CompiledPartition> Engine::CompileChecked(const Partition& partition,
                                                         const CompileOptions& options) const {
  if (backends_.empty()) {
    return InvalidArguments("the engine has no backends: Engine::Create makes one that has");
  }
  CompiledPartition compiled;
  KVANT_ASSIGN_OR_RETURN(Partition known, Specialize(partition, options));
  compiled.partition_ = std::make_shared<const Partition>(std::move(known));
  if (WritesNothing(*compiled.partition_)) {
    compiled.backend_ = backends_.front();
    compiled.executable_ = std::make_shared<NothingToDo>();
    compiled.Prepare(*this);
    return compiled;
  }
  for (const std::shared_ptr<const Backend>& backend : backends_) {
    const std::string name(backend->name());
    if (options.require_fused && !backend->fused()) {
      compiled.passed_over_.push_back(name + ": does not fuse, and fused is required");
      continue;
    }
    absl::StatusOr<std::unique_ptr<Executable>> made = backend->Compile(*compiled.partition_);
    if (made.ok()) {
      compiled.backend_ = backend;
      compiled.executable_ = *std::move(made);
      compiled.Prepare(*this);
      return compiled;
    }
    if (ErrorKindOf(made.status()) != ErrorKind::kUnimplemented) return made.status();
    compiled.passed_over_.push_back(absl::StrCat(name, ": ", made.status().message()));
  }
  const bool all_fused = std::ranges::all_of(backends_, &Backend::fused);
  const bool hint = all_fused && !options.require_fused && device_ == Device::kCpu;
  return MakeError(ErrorKind::kUnimplemented, Describe(*compiled.partition_),
                   ": no backend runs it. ", absl::StrJoin(compiled.passed_over_, "; "),
                   compiled.partition_->misses().empty() ? "" : ". ",
                   absl::StrJoin(compiled.partition_->misses(), ". "),
                   hint ? ". The backend 'oracle', which the engine has not, runs ops in f64" : "");
}

}  // namespace kvant
