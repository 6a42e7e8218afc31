#include "kvant/tests/backends/ops/reference_testing.h"

#include <cmath>
#include <random>
#include <utility>

#include "gtest/gtest.h"

namespace kvant::testing {
namespace {

// Relative to max(1, |expected|, the tensor's typical size): half a step of the stored type, and
// the arithmetic of f32.
double ToleranceOf(DataType type) {
  switch (type) {
    case kF16:
      return 1e-3;
    case kBF16:
      return 8e-3;
    case kF32:
      return 5e-6;
    default:
      return 0;
  }
}

}  // namespace

std::vector<double> RandomValues(const LogicalTensor& tensor) {
  std::mt19937 random(17 + static_cast<unsigned>(tensor.id));
  std::vector<double> values(tensor.elements());
  for (double& value : values) {
    if (tensor.type == kBoolean) {
      value = random() % 3 != 0;
    } else if (tensor.type == kS32 || tensor.type == kS64) {
      value = static_cast<double>(random() % 7);
    } else if (IsInteger(tensor.type)) {
      std::uniform_int_distribution<int64_t> codes(LowestOf(tensor.type), HighestOf(tensor.type));
      value = static_cast<double>(codes(random));
    } else {
      value = RoundTo(tensor.type, std::uniform_real_distribution<double>(-2, 3)(random));
    }
  }
  return values;
}

Values RandomInputs(const Graph& graph) {
  Values values;
  for (TensorId id : graph.inputs()) values[id] = RandomValues(graph.tensor(id));
  return values;
}

void ExpectNear(const LogicalTensor& tensor, const std::vector<double>& expected,
                const std::vector<double>& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  double squares = 0;
  for (double value : expected) squares += std::isfinite(value) ? value * value : 0;
  const double size = std::max(1.0, std::sqrt(squares / static_cast<double>(expected.size())));
  int failures = 0;
  for (size_t i = 0; i < expected.size() && failures < 5; ++i) {
    const double e = expected[i], a = actual[i];
    const bool same =
        std::isnan(e)   ? std::isnan(a)
        : std::isinf(e) ? a == e
                        : std::abs(a - e) <= ToleranceOf(tensor.type) * std::max(size, std::abs(e));
    if (same) continue;
    ++failures;
    ADD_FAILURE() << "tensor " << tensor.id << " element " << i << ": " << a << ", not " << e;
  }
}

void ExpectAgrees(const Graph& graph, const Values& inputs) {
  const auto expected = RunGraph(graph, inputs, "oracle");
  ASSERT_TRUE(expected.ok()) << expected.status();
  const auto actual = RunGraph(graph, inputs, "reference");
  ASSERT_TRUE(actual.ok()) << actual.status();
  for (TensorId id : graph.outputs())
    ExpectNear(graph.tensor(id), expected->at(id), actual->at(id));
}

void ExpectAgrees(GraphBuilder builder, const std::function<void(Values&)>& edit) {
  const absl::StatusOr<Graph> graph = std::move(builder).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  Values inputs = RandomInputs(*graph);
  if (edit) edit(inputs);
  ExpectAgrees(*graph, inputs);
}

}  // namespace kvant::testing
