// Builders, graphs and partitions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <utility>

#include "call.h"
#include "describe.h"
#include "module.h"

namespace kvant_python {
namespace {

struct Builder {
  BuilderHandle handle;
};

struct Partitions {
  PartitionsHandle handle;
};

// Attributes, and what they point to.
class Attributes {
 public:
  // (name, type, value), type being "s64", "f32", "bool", "string", "s64s" or "f32s".
  explicit Attributes(nb::list attributes) {
    for (nb::handle each : attributes) {
      const auto attribute = nb::cast<nb::tuple>(each);
      Add(Text(attribute[0]), Text(attribute[1]), attribute[2]);
    }
  }
  const std::vector<kvant_attr>& list() const { return list_; }

 private:
  const char* Text(nb::handle text) {
    return texts_.emplace_back(nb::cast<std::string>(text)).c_str();
  }

  void Add(const char* name, const std::string& type, nb::handle value) {
    kvant_attr attr = {};
    attr.name = name;
    if (type == "s64") {
      attr.type = KVANT_ATTR_S64;
      attr.value.s64 = nb::cast<int64_t>(value);
    } else if (type == "f32") {
      attr.type = KVANT_ATTR_F32;
      attr.value.f32 = static_cast<float>(nb::cast<double>(value));
    } else if (type == "bool") {
      attr.type = KVANT_ATTR_BOOL;
      attr.value.boolean = nb::cast<bool>(value);
    } else if (type == "string") {
      attr.type = KVANT_ATTR_STRING;
      attr.value.string = Text(value);
    } else if (type == "s64s") {
      const auto& numbers = integers_.emplace_back(nb::cast<std::vector<int64_t>>(value));
      attr.type = KVANT_ATTR_S64S;
      attr.value.s64s = numbers.data();
      attr.count = numbers.size();
    } else {
      const auto& numbers = floats_.emplace_back(nb::cast<std::vector<float>>(value));
      attr.type = KVANT_ATTR_F32S;
      attr.value.f32s = numbers.data();
      attr.count = numbers.size();
    }
    list_.push_back(attr);
  }

  std::vector<kvant_attr> list_;
  // Deques, as elements stay where they are.
  std::deque<std::string> texts_;
  std::deque<std::vector<int64_t>> integers_;
  std::deque<std::vector<float>> floats_;
};

std::vector<kvant_value> AddOp(Builder& self, const char* kind, const char* name,
                               const std::vector<kvant_value>& inputs, nb::list attributes,
                               nb::list results) {
  const Attributes attrs(attributes);
  std::vector<TensorText> texts(results.size());
  std::vector<kvant_tensor> tensors;
  for (size_t i = 0; i < results.size(); ++i) {
    const nb::tuple result(results[i]);
    if (!result[1].is_none()) texts[i].dims = DimsOf(result[1]);
    tensors.push_back(texts[i].Tensor(
        result[0].is_none() ? KVANT_UNDEF : TypeOf(nb::cast<const char*>(result[0]))));
  }
  std::vector<kvant_value> values(tensors.size());
  Check(kvant_builder_op(self.handle.get(), kind, name, inputs.data(), inputs.size(),
                         attrs.list().data(), attrs.list().size(), tensors.data(), tensors.size(),
                         values.data()));
  return values;
}

kvant_value AddInput(Builder& self, const std::string& name, const char* type, const char* property,
                     nb::object dims, nb::object strides) {
  TensorText text{name};
  if (!dims.is_none()) text.dims = DimsOf(dims);
  if (!strides.is_none()) text.strides = DimsOf(strides);
  if (text.strides && (!text.dims || text.strides->size() != text.dims->size())) {
    Fail(KVANT_INVALID_SHAPE, "input '" + name + "' has " + std::to_string(text.strides->size()) +
                                  " strides for " +
                                  std::to_string(text.dims ? text.dims->size() : 0) + " dims");
  }
  kvant_tensor tensor = text.Tensor(TypeOf(type));
  const std::string kind = property;
  tensor.property = kind == "constant"      ? KVANT_CONSTANT
                    : kind == "host_scalar" ? KVANT_HOST_SCALAR
                                            : KVANT_VARIABLE;
  kvant_value value;
  Check(kvant_builder_input(self.handle.get(), &tensor, &value));
  return value;
}

kvant_value AddConstant(Builder& self, const char* type, double number) {
  kvant_value value;
  Check(kvant_builder_constant(self.handle.get(), TypeOf(type), number, &value));
  return value;
}

void AddOutput(Builder& self, const char* name, kvant_value value, nb::object strides) {
  std::optional<std::vector<int64_t>> numbers;
  if (!strides.is_none()) {
    numbers = DimsOf(strides);
    auto tensor = Sized<kvant_tensor>();
    Check(kvant_builder_describe(self.handle.get(), value, &tensor));
    if (tensor.rank != static_cast<int32_t>(numbers->size())) {
      Fail(KVANT_INVALID_SHAPE, std::string("output '") + name + "' has " +
                                    std::to_string(numbers->size()) + " strides for " +
                                    std::to_string(tensor.rank) + " dims");
    }
  }
  Check(kvant_builder_output(self.handle.get(), name, value, numbers ? numbers->data() : nullptr));
}

nb::tuple DescribeValue(const Builder& self, kvant_value value) {
  auto tensor = Sized<kvant_tensor>();
  Check(kvant_builder_describe(self.handle.get(), value, &tensor));
  return Describe(tensor);
}

Graph FromJson(const std::string& text) {
  kvant_graph* graph;
  Run([&] { return kvant_graph_from_json(text.data(), text.size(), &graph); });
  return {GraphHandle(graph)};
}

template <auto count, auto get>
nb::list Ports(const Graph& graph) {
  nb::list result;
  for (size_t i = 0; i < count(graph.handle.get()); ++i) {
    auto tensor = Sized<kvant_tensor>();
    Check(get(graph.handle.get(), i, &tensor));
    result.append(Describe(tensor));
  }
  return result;
}

template <auto write>
const char* Text(const Graph& graph) {
  const char* text;
  Check(write(graph.handle.get(), &text));
  return text;
}

const char* NameOf(kvant_partition_kind kind) {
  switch (kind) {
    case KVANT_ATTENTION:
      return "attention";
    case KVANT_ATTENTION_BACKWARD:
      return "attention_backward";
    case KVANT_STORE:
      return "store";
    case KVANT_MERGE:
      return "merge";
    default:
      return "ops";
  }
}

nb::tuple DescribePartition(const Partitions& self, size_t at) {
  auto partition = Sized<kvant_partition>();
  Check(kvant_partitions_at(self.handle.get(), at, &partition));
  return nb::make_tuple(NameOf(partition.kind), partition.pattern, partition.notes,
                        std::vector<uint64_t>(partition.ops, partition.ops + partition.ops_count));
}

}  // namespace

void BindGraphs(nb::module_& m) {
  nb::class_<Graph>(m, "Graph")
      .def_static("from_json", &FromJson, nb::arg("text"))
      .def("to_json", &Text<kvant_graph_to_json>)
      .def("to_dot", &Text<kvant_graph_to_dot>)
      .def("inputs", &Ports<kvant_graph_inputs, kvant_graph_input>)
      .def("outputs", &Ports<kvant_graph_outputs, kvant_graph_output>)
      .def("partitions", [](const Graph& self) {
        kvant_partitions* partitions;
        Run([&] { return kvant_graph_partitions(self.handle.get(), &partitions); });
        return Partitions{PartitionsHandle(partitions)};
      });

  nb::class_<Partitions>(m, "Partitions")
      .def("__len__",
           [](const Partitions& self) { return kvant_partitions_count(self.handle.get()); })
      .def("at", &DescribePartition, nb::arg("at"))
      .def(
          "graph",
          [](const Partitions& self, size_t at) {
            kvant_graph* graph;
            Check(kvant_partitions_graph(self.handle.get(), at, &graph));
            return Graph{GraphHandle(graph)};
          },
          nb::arg("at"));

  nb::class_<Builder>(m, "Builder")
      .def(
          "__init__",
          [](Builder* self, const char* fpmath, bool apply_to_int) {
            auto options = Sized<kvant_builder_options>();
            options.fpmath = fpmath;
            options.apply_to_int = apply_to_int;
            kvant_builder* builder;
            Check(kvant_builder_create(&options, &builder));
            new (self) Builder{BuilderHandle(builder)};
          },
          nb::arg("fpmath"), nb::arg("apply_to_int"))
      .def("input", &AddInput, nb::arg("name"), nb::arg("type"), nb::arg("property"),
           nb::arg("dims").none(), nb::arg("strides").none())
      .def("constant", &AddConstant, nb::arg("type"), nb::arg("number"))
      .def("op", &AddOp, nb::arg("kind"), nb::arg("name"), nb::arg("inputs"), nb::arg("attributes"),
           nb::arg("results"))
      .def("output", &AddOutput, nb::arg("name"), nb::arg("value"), nb::arg("strides").none())
      .def("describe", &DescribeValue, nb::arg("value"))
      .def("build", [](Builder& self) {
        kvant_graph* graph;
        Check(kvant_builder_build(self.handle.get(), &graph));
        return Graph{GraphHandle(graph)};
      });
}

}  // namespace kvant_python
