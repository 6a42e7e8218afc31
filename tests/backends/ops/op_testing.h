// Running graphs on given values, for tests of backends.
#ifndef KVANT_TESTS_BACKENDS_OPS_OP_TESTING_H_
#define KVANT_TESTS_BACKENDS_OPS_OP_TESTING_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/graph.h"

namespace kvant::testing {

using Bytes = std::vector<std::byte>;
// Values of tensors by id, in dense row-major order.
using Values = std::map<TensorId, std::vector<double>>;

// Memory of a tensor with these values; what lies between its strides is 0xA5.
Bytes Pack(const LogicalTensor& desc, const std::vector<double>& values);
std::vector<double> Unpack(const LogicalTensor& desc, const Bytes& memory);

// Partitions a graph and runs all partitions in order with this backend alone. Returns the values
// of every port.
absl::StatusOr<Values> RunGraph(const Graph& graph, Values values, const std::string& backend);

struct PortValues {
  DataType type = kUndef;
  Dims dims;
  std::vector<double> values;
  std::optional<Dims> strides;
};

// One op on given values.
struct OpCase {
  std::string name;
  OpKind kind{};
  Attributes attrs;
  std::vector<PortValues> inputs;
  std::vector<PortValues> outputs;  // what is expected
  double tolerance = 0;             // relative to max(1, |expected|)
};

// The graph of that op alone: inputs have ids from 0, outputs follow. If `declare_outputs`, their
// dims are part of it, otherwise they are left to inference.
absl::StatusOr<Graph> GraphOf(const OpCase& test, bool declare_outputs = true);

// Runs the case and compares; failures are reported to GoogleTest.
void ExpectOpCase(const OpCase& test, const std::string& backend);

}  // namespace kvant::testing

#endif  // KVANT_TESTS_BACKENDS_OPS_OP_TESTING_H_
