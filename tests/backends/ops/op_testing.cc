#include "kvant/tests/backends/ops/op_testing.h"

#include <cmath>
#include <utility>

#include "gtest/gtest.h"
#include "kvant/graph/op_shapes.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/partitioner.h"

namespace kvant::testing {
namespace {

// Calls visit(memory index) for each element in row-major order.
template <typename Visit>
void ForEachElement(const LogicalTensor& desc, Visit visit) {
  const Dims strides = desc.StridesOrDense();
  const int64_t elements = desc.elements();
  for (int64_t i = 0; i < elements; ++i) {
    int64_t rest = i, index = 0;
    for (int d = desc.rank() - 1; d >= 0; --d) {
      index += rest % (*desc.dims)[d] * strides[d];
      rest /= (*desc.dims)[d];
    }
    visit(index);
  }
}

LogicalTensor DescOf(const PortValues& port, TensorId id) {
  LogicalTensor desc;
  desc.id = id;
  desc.type = port.type;
  desc.dims = port.dims;
  desc.strides = port.strides;
  return desc;
}

}  // namespace

Bytes Pack(const LogicalTensor& desc, const std::vector<double>& values) {
  Bytes memory(desc.memory_bytes(), std::byte{0xA5});
  size_t next = 0;
  ForEachElement(desc, [&](int64_t index) {
    if (next < values.size()) StoreElement(desc.type, memory.data(), index, values[next++]);
  });
  return memory;
}

std::vector<double> Unpack(const LogicalTensor& desc, const Bytes& memory) {
  std::vector<double> values;
  ForEachElement(
      desc, [&](int64_t index) { values.push_back(LoadElement(desc.type, memory.data(), index)); });
  return values;
}

absl::StatusOr<Values> RunGraph(const Graph& graph, Values values, const std::string& backend) {
  KVANT_ASSIGN_OR_RETURN(const std::vector<Partition> partitions, PartitionGraph(graph));
  const Device device = backend == "cuda_simt" ? Device::kCudaSimt : Device::kCpu;
  KVANT_ASSIGN_OR_RETURN(const Engine engine,
                         Engine::Create({.device = device, .backends = {backend}}));
  const Stream stream(engine);
  for (const Partition& partition : partitions) {
    KVANT_ASSIGN_OR_RETURN(const CompiledPartition compiled, engine.Compile(partition));
    const Partition& known = compiled.partition();
    std::vector<Bytes> memory;
    std::vector<ConstTensor> inputs;
    std::vector<Tensor> outputs;
    memory.reserve(known.inputs().size() + known.outputs().size());
    for (size_t i = 0; i < known.inputs().size(); ++i) {
      memory.push_back(Pack(known.input(static_cast<int>(i)), values[known.inputs()[i]]));
      inputs.push_back({memory.back().data(), memory.back().size()});
    }
    for (size_t i = 0; i < known.outputs().size(); ++i) {
      memory.push_back(Pack(known.output(static_cast<int>(i)), {}));
      outputs.push_back({memory.back().data(), memory.back().size()});
    }
    KVANT_RETURN_IF_ERROR(compiled.Execute(stream, inputs, outputs));
    for (size_t i = 0; i < known.outputs().size(); ++i) {
      values[known.outputs()[i]] =
          Unpack(known.output(static_cast<int>(i)), memory[known.inputs().size() + i]);
    }
  }
  return values;
}

absl::StatusOr<Graph> GraphOf(const OpCase& test, bool declare_outputs) {
  std::vector<LogicalTensor> inputs, outputs;
  TensorId id = 0;
  for (const PortValues& port : test.inputs) inputs.push_back(DescOf(port, id++));
  for (const PortValues& port : test.outputs) {
    LogicalTensor& desc = outputs.emplace_back(DescOf(port, id++));
    if (declare_outputs) continue;
    desc.dims.reset();
    desc.strides.reset();
  }
  Op op;
  op.kind = test.kind;
  op.name = test.name;
  op.attrs = test.attrs;
  Graph graph;
  KVANT_RETURN_IF_ERROR(graph.AddOp(std::move(op), inputs, outputs));
  KVANT_RETURN_IF_ERROR(graph.Finalize());
  return graph;
}

void ExpectOpCase(const OpCase& test, const std::string& backend) {
  for (const bool declare_outputs : {true, false}) {
    // The capacity of what Append writes to follows from nothing.
    if (!declare_outputs && Appends(test.kind)) continue;
    const absl::StatusOr<Graph> graph = GraphOf(test, declare_outputs);
    ASSERT_TRUE(graph.ok()) << graph.status();
    Values values;
    for (size_t i = 0; i < test.inputs.size(); ++i) values[i] = test.inputs[i].values;
    const absl::StatusOr<Values> result = RunGraph(*graph, values, backend);
    ASSERT_TRUE(result.ok()) << result.status();
    for (size_t port = 0; port < test.outputs.size(); ++port) {
      const std::vector<double>& expected = test.outputs[port].values;
      const std::vector<double>& actual = result->at(test.inputs.size() + port);
      ASSERT_EQ(actual.size(), expected.size()) << "output " << port;
      for (size_t i = 0; i < expected.size(); ++i) {
        if (std::isnan(expected[i])) {
          EXPECT_TRUE(std::isnan(actual[i])) << "output " << port << " element " << i;
        } else if (std::isinf(expected[i])) {
          EXPECT_EQ(actual[i], expected[i]) << "output " << port << " element " << i;
        } else {
          EXPECT_NEAR(actual[i], expected[i], test.tolerance * std::max(1.0, std::abs(expected[i])))
              << "output " << port << " element " << i;
        }
      }
    }
  }
}

}  // namespace kvant::testing
