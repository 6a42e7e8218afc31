// Engines, and graphs compiled for them.
#include <thread>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kvant/integrations/c/call.h"
#include "kvant/integrations/c/handles.h"

namespace kvant::c {
namespace {

absl::StatusOr<Device> DeviceOf(const char* name) {
  const std::string_view wanted = name == nullptr ? "cpu" : name;
  for (const Device device : {Device::kCpu, Device::kCuda}) {
    if (DeviceName(device) == wanted) return device;
  }
  return InvalidArguments("there is no device '", wanted, "'; devices are 'cpu' and 'cuda'");
}

std::vector<Port> PortsOf(const Graph& graph, bool output, const DLDevice& device) {
  std::vector<Port> ports;
  for (const TensorId id : output ? graph.outputs() : graph.inputs()) {
    const LogicalTensor& tensor = graph.tensor(id);
    const std::string name = tensor.name.empty() ? absl::StrCat(id) : Printable(tensor.name);
    ports.emplace_back(absl::StrCat(output ? "output '" : "input '", name, "'"), tensor, device);
  }
  return ports;
}

absl::StatusOr<CompileGraphOptions> OptionsOf(const kvant_compile_options* options) {
  kvant_compile_options given;
  KVANT_RETURN_IF_ERROR(Read("kvant_compile_options", options, given));
  CompileGraphOptions result;
  result.require_fused = given.require_fused;
  if (given.tensors_count > 0) KVANT_RETURN_IF_ERROR(NotNull({{"tensors", given.tensors}}));
  for (size_t i = 0; i < given.tensors_count; ++i) {
    kvant_tensor tensor;
    KVANT_RETURN_IF_ERROR(Read("a tensor", At(given.tensors, i), tensor));
    KVANT_ASSIGN_OR_RETURN(result.tensors.emplace_back(), TensorOf(tensor));
  }
  return result;
}

template <typename T>
absl::Status TakeAll(const char* what, const std::vector<Port>& ports,
                     const DLTensor* const* tensors, size_t count,
                     absl::InlinedVector<T, 16>& out) {
  if (count != ports.size()) {
    return InvalidArguments("the graph has ", ports.size(), " ", what, ", not ", count);
  }
  if (count > 0) KVANT_RETURN_IF_ERROR(NotNull({{what, tensors}}));
  for (size_t i = 0; i < count; ++i) {
    absl::StatusOr<Tensor> memory = ports[i].Take(tensors[i]);
    if (!memory.ok()) return memory.status();
    out.push_back(*memory);
  }
  return absl::OkStatus();
}

}  // namespace

extern "C" {

kvant_status kvant_engine_create(const kvant_engine_options* options, kvant_engine** engine) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"engine", engine}}));
    kvant_engine_options given;
    KVANT_RETURN_IF_ERROR(Read("kvant_engine_options", options, given));
    EngineOptions wanted;
    KVANT_ASSIGN_OR_RETURN(wanted.device, DeviceOf(given.device));
    wanted.device_index = given.device_index;
    wanted.threads = given.threads;
    if (given.openmp) {
      const auto most = static_cast<int32_t>(std::thread::hardware_concurrency());
      wanted.executor = MakeOpenMpExecutor(given.threads > 0 ? given.threads : most);
    }
    if (given.backends != nullptr) {
      wanted.backends = absl::StrSplit(given.backends, ',', absl::SkipEmpty());
    }
    KVANT_ASSIGN_OR_RETURN(Engine made, Engine::Create(wanted));
    const DLDevice device{wanted.device == Device::kCuda ? kDLCUDA : kDLCPU, given.device_index};
    *engine = new kvant_engine{std::move(made), device};
    return absl::OkStatus();
  });
}

void kvant_engine_destroy(kvant_engine* engine) { delete engine; }

kvant_status kvant_compile(const kvant_engine* engine, const kvant_graph* graph,
                           const kvant_compile_options* options, kvant_compiled** compiled) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"engine", engine}, {"graph", graph}, {"compiled", compiled}}));
    KVANT_ASSIGN_OR_RETURN(const CompileGraphOptions given, OptionsOf(options));
    KVANT_ASSIGN_OR_RETURN(CompiledGraph made, engine->engine.Compile(graph->graph, given));
    std::vector<Port> inputs = PortsOf(made.graph(), /*output=*/false, engine->device);
    std::vector<Port> outputs = PortsOf(made.graph(), /*output=*/true, engine->device);
    *compiled =
        new kvant_compiled{std::move(made), engine->engine, std::move(inputs), std::move(outputs)};
    return absl::OkStatus();
  });
}

void kvant_compiled_destroy(kvant_compiled* compiled) { delete compiled; }

kvant_status kvant_compiled_graph(const kvant_compiled* compiled, kvant_graph** graph) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"compiled", compiled}, {"graph", graph}}));
    *graph = new kvant_graph{compiled->graph.graph()};
    return absl::OkStatus();
  });
}

kvant_status kvant_compiled_explain(const kvant_compiled* compiled, const char** text) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"compiled", compiled}, {"text", text}}));
    *text = Keep(compiled->graph.ToString());
    return absl::OkStatus();
  });
}

kvant_status kvant_compiled_describe(const kvant_compiled* compiled, kvant_compiled_info* info) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"compiled", compiled}}));
    kvant_compiled_info result = {};
    result.fused = compiled->graph.fused();
    result.rounding = compiled->graph.rounding();
    result.scratch_bytes = compiled->graph.scratch_bytes();
    return Write("info", result, info);
  });
}

kvant_status kvant_execute(const kvant_compiled* compiled, void* stream,
                           const DLTensor* const* inputs, size_t inputs_count,
                           const DLTensor* const* outputs, size_t outputs_count) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"compiled", compiled}}));
    absl::InlinedVector<ConstTensor, 16> sources;
    absl::InlinedVector<Tensor, 16> results;
    KVANT_RETURN_IF_ERROR(TakeAll("inputs", compiled->inputs, inputs, inputs_count, sources));
    KVANT_RETURN_IF_ERROR(TakeAll("outputs", compiled->outputs, outputs, outputs_count, results));
    return compiled->graph.Execute(Stream(compiled->engine, stream), sources, results);
  });
}

}  // extern "C"
}  // namespace kvant::c
