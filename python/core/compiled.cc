// Engines and compiled graphs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <utility>

#include "call.h"
#include "describe.h"
#include "module.h"
#include "tensor_view.h"

namespace kvant_python {
namespace {

struct Compiled {
  CompiledHandle handle;
  // What errors call them, and which may be numbers.
  std::vector<Use> inputs, outputs;
};

Graph GraphOf(const kvant_compiled* compiled) {
  kvant_graph* graph;
  Check(kvant_compiled_graph(compiled, &graph));
  return {GraphHandle(graph)};
}

std::vector<Use> Uses(const kvant_graph* graph, bool outputs) {
  const size_t count = outputs ? kvant_graph_outputs(graph) : kvant_graph_inputs(graph);
  std::vector<Use> uses;
  for (size_t i = 0; i < count; ++i) {
    auto tensor = Sized<kvant_tensor>();
    Check((outputs ? kvant_graph_output : kvant_graph_input)(graph, i, &tensor));
    const std::string name =
        *tensor.name ? std::string("'") + tensor.name + "'" : "tensor " + std::to_string(tensor.id);
    uses.push_back({(outputs ? "output " : "input ") + name, outputs,
                    tensor.property == KVANT_HOST_SCALAR ? tensor.type : KVANT_UNDEF});
  }
  return uses;
}

Engine MakeEngine(const char* device, int32_t index, const std::optional<std::string>& backends,
                  int32_t threads, bool openmp) {
  CheckNotForked();
  auto options = Sized<kvant_engine_options>();
  options.device = device;
  options.device_index = index;
  if (backends) options.backends = backends->c_str();
  options.threads = threads;
  options.openmp = openmp;
  kvant_engine* engine;
  Check(kvant_engine_create(&options, &engine));
  EngineMade();
  return {EngineHandle(engine)};
}

// `tensors`: (id, dims or None, strides or None).
Compiled Compile(const Engine& engine, const Graph& graph, bool require_fused, nb::list tensors) {
  CheckNotForked();
  std::vector<TensorText> texts(tensors.size());
  std::vector<kvant_tensor> known;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const nb::tuple tensor(tensors[i]);
    if (!tensor[1].is_none()) texts[i].dims = DimsOf(tensor[1]);
    if (!tensor[2].is_none()) texts[i].strides = DimsOf(tensor[2]);
    known.push_back(texts[i].Tensor(KVANT_UNDEF));
    known.back().id = nb::cast<uint64_t>(tensor[0]);
  }
  auto options = Sized<kvant_compile_options>();
  options.require_fused = require_fused;
  options.tensors = known.data();
  options.tensors_count = known.size();
  kvant_compiled* compiled;
  Run([&] { return kvant_compile(engine.handle.get(), graph.handle.get(), &options, &compiled); });
  Compiled result{CompiledHandle(compiled)};
  const Graph shaped = GraphOf(compiled);
  result.inputs = Uses(shaped.handle.get(), /*outputs=*/false);
  result.outputs = Uses(shaped.handle.get(), /*outputs=*/true);
  return result;
}

// A list or tuple of as many tensors as there are uses.
nb::tuple TensorsOf(nb::handle tensors, const std::vector<Use>& uses, const char* what) {
  if (!PyList_Check(tensors.ptr()) && !PyTuple_Check(tensors.ptr())) {
    Invalid(std::string("execute takes a list of ") + what + ", not a " +
            nb::str(tensors.type().attr("__name__")).c_str());
  }
  // A copy of a list: what reads a tensor may run Python code that changes it.
  nb::tuple result = nb::steal<nb::tuple>(PySequence_Tuple(tensors.ptr()));
  if (result.size() != uses.size()) {
    std::string names;
    for (const Use& use : uses) names += (names.empty() ? "" : ", ") + use.name;
    Invalid("execute takes " + std::to_string(uses.size()) + " " + what + " (" + names + "), not " +
            std::to_string(result.size()));
  }
  return result;
}

void Execute(const Compiled& self, nb::handle inputs, nb::handle outputs) {
  CheckNotForked();
  const size_t inputs_count = self.inputs.size(), count = inputs_count + self.outputs.size();
  const nb::tuple given = TensorsOf(inputs, self.inputs, "inputs");
  const nb::tuple written = TensorsOf(outputs, self.outputs, "outputs");
  std::vector<TensorView> views(count);
  std::vector<const DLTensor*> tensors(count);
  void* stream = nullptr;  // of the first tensor that is on a device
  for (size_t i = 0; i < count; ++i) {
    if (i < inputs_count) {
      views[i].Read(given[i], self.inputs[i]);
    } else {
      views[i].Read(written[i - inputs_count], self.outputs[i - inputs_count]);
    }
    tensors[i] = &views[i].tensor();
    if (stream == nullptr) stream = views[i].stream();
  }
  Run([&] {
    return kvant_execute(self.handle.get(), stream, tensors.data(), inputs_count,
                         tensors.data() + inputs_count, count - inputs_count);
  });
}

kvant_compiled_info InfoOf(const Compiled& self) {
  auto info = Sized<kvant_compiled_info>();
  Check(kvant_compiled_describe(self.handle.get(), &info));
  return info;
}

}  // namespace

void BindCompiled(nb::module_& m) {
  nb::class_<Engine>(m, "Engine")
      .def(
          "__init__",
          [](Engine* self, const char* device, int32_t index,
             const std::optional<std::string>& backends, int32_t threads, bool openmp) {
            new (self) Engine(MakeEngine(device, index, backends, threads, openmp));
          },
          nb::arg("device"), nb::arg("index"), nb::arg("backends").none(), nb::arg("threads"),
          nb::arg("openmp"));

  nb::class_<Compiled>(m, "Compiled")
      .def("execute", &Execute, nb::arg("inputs").none(), nb::arg("outputs").none())
      .def("graph", [](const Compiled& self) { return GraphOf(self.handle.get()); })
      .def("explain",
           [](const Compiled& self) {
             const char* text;
             Check(kvant_compiled_explain(self.handle.get(), &text));
             return text;
           })
      .def("fused", [](const Compiled& self) { return InfoOf(self).fused; })
      .def("rounding", [](const Compiled& self) { return InfoOf(self).rounding; })
      .def("scratch_bytes", [](const Compiled& self) { return InfoOf(self).scratch_bytes; });

  m.def("compile", &Compile, nb::arg("engine"), nb::arg("graph"), nb::arg("require_fused"),
        nb::arg("tensors"));
}

}  // namespace kvant_python
