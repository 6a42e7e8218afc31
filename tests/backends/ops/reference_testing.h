// Comparing the reference backend with the oracle on random values.
#ifndef KVANT_TESTS_BACKENDS_OPS_REFERENCE_TESTING_H_
#define KVANT_TESTS_BACKENDS_OPS_REFERENCE_TESTING_H_

#include <functional>
#include <vector>

#include "kvant/graph/builder.h"
#include "kvant/graph/graph.h"
#include "kvant/tests/backends/ops/op_testing.h"

namespace kvant::testing {

// Values that differ by position and have a mean other than zero; codes of the full range.
std::vector<double> RandomValues(const LogicalTensor& tensor);
// Of all inputs of the graph.
Values RandomInputs(const Graph& graph);

void ExpectNear(const LogicalTensor& tensor, const std::vector<double>& expected,
                const std::vector<double>& actual);
// The graph gives the same outputs on both backends.
void ExpectAgrees(const Graph& graph, const Values& inputs);
// On random values, which `edit` may change.
void ExpectAgrees(GraphBuilder builder, const std::function<void(Values&)>& edit = {});

}  // namespace kvant::testing

#endif  // KVANT_TESTS_BACKENDS_OPS_REFERENCE_TESTING_H_
