// Every graph in ../shared/graphs is one partition in both grammars.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "kvant/graph/json.h"
#include "kvant/tests/patterns/patterns_testing.h"
#include "kvant_test_config.h"

namespace kvant {
namespace {

TEST(SharedGraphs, AreOnePartitionEach) {
  const std::filesystem::path folder = std::filesystem::path(KVANT_SHARED_DIR) / "graphs";
  if (!std::filesystem::exists(folder)) {
    ASSERT_EQ(std::getenv("KVANT_REQUIRE_SHARED"), nullptr)
        << "KVANT_REQUIRE_SHARED is set, but there is no " << folder;
    GTEST_SKIP() << "no " << folder;
  }
  int graphs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".json") continue;
    SCOPED_TRACE(entry.path().filename());
    const absl::StatusOr<Graph> graph = GraphFromJsonFile(entry.path());
    ASSERT_TRUE(graph.ok()) << graph.status();
    const bool backward = entry.path().filename().string().find("backward") != std::string::npos;
    for (const auto grammar : {testing::Grammar::kNative, testing::Grammar::kOneDnn}) {
      const auto result = PartitionGraph(*graph, {grammar});
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_THAT(MissesOf(*result), ::testing::IsEmpty());
      ASSERT_EQ(result->size(), 1u) << testing::KindsOf(*result);
      const Partition& partition = result->front();
      EXPECT_THAT(partition.notes(), ::testing::IsEmpty());
      EXPECT_EQ(partition.kind(),
                backward ? Partition::Kind::kAttentionBackward : Partition::Kind::kAttention);
      EXPECT_EQ(partition.attention() == nullptr, backward);
      EXPECT_EQ(partition.ops().ops().size(), graph->ops().size());
    }
    ++graphs;
  }
  EXPECT_GE(graphs, 16);
}

}  // namespace
}  // namespace kvant
