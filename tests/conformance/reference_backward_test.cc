// Training backward on the reference engine, against the oracle.
#include <utility>

#include "gtest/gtest.h"
#include "kvant/tests/common/backward_graph.h"
#include "kvant/tools/acceptance.h"
#include "kvant/tools/graph_runner.h"
#include "kvant/tools/random_data.h"

namespace kvant::testing {
namespace {

class BackwardConformance : public ::testing::TestWithParam<BackwardCase> {};

// The outputs of the graph on a backend.
void RunOn(const Graph& graph, const std::string& backend, BufferMap& buffers) {
  absl::StatusOr<Engine> engine = Engine::Create(EngineOptionsFor(backend, 2));
  ASSERT_TRUE(engine.ok()) << engine.status();
  const auto runner = GraphRunner::Create(graph, *std::move(engine));
  ASSERT_TRUE(runner.ok()) << runner.status();
  EXPECT_EQ(runner->partitions().size(), 1u);
  const absl::Status status = runner->Run(buffers);
  ASSERT_TRUE(status.ok()) << status;
}

TEST_P(BackwardConformance, ReferenceMatchesTheOracle) {
  const absl::StatusOr<Graph> graph = BackwardGraph(GetParam()).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  for (const DataKind kind : {DataKind::kInteger, DataKind::kReal}) {
    const auto executor = MakeSerialExecutor();
    absl::StatusOr<BufferMap> got = MakeRandomInputs(*graph, {.kind = kind, .seed = 3}, *executor);
    ASSERT_TRUE(got.ok()) << got.status();
    BufferMap expected;
    for (const auto& [id, buffer] : *got) expected.emplace(id, buffer.Copy());
    ASSERT_NO_FATAL_FAILURE(RunOn(*graph, "reference", *got));
    ASSERT_NO_FATAL_FAILURE(RunOn(*graph, "oracle", expected));
    for (const TensorId id : graph->outputs()) {
      const Comparison result =
          Compare(graph->tensor(id), expected.at(id).data(), got->at(id).data());
      EXPECT_TRUE(result.passed) << graph->tensor(id).name << ": " << result.failing << " of "
                                 << result.total << ", max abs " << result.max_abs;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, BackwardConformance, ::testing::ValuesIn(BackwardCases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kvant::testing
