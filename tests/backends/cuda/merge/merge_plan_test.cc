// How MergeAttention becomes launches, and what these read and write.
#include "kvant/backends/cuda/merge/merge_plan.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/cuda/simt/bodies.h"
#include "kvant/backends/cuda/simt/launcher.h"
#include "kvant/graph/builder.h"
#include "kvant/kernels/device/simt.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tests/conformance/data.h"

namespace kvant::cuda {
namespace {

Partition MergeOf(int64_t parts, const Dims& dims, DataType type = kvant::kF32,
                  std::optional<Dims> strides = std::nullopt) {
  GraphBuilder g;
  Dims stats_dims = dims;
  stats_dims.back() = 1;
  std::vector<GraphBuilder::AttentionPart> given;
  for (int64_t i = 0; i < parts; ++i) {
    given.push_back({g.Input(absl::StrCat("o", i), type, dims, strides),
                     g.Input(absl::StrCat("s", i), kvant::kF32, stats_dims)});
  }
  g.Output("o", g.MergeAttention(given, {}).first);
  absl::StatusOr<Graph> graph = std::move(g).Build();
  EXPECT_TRUE(graph.ok()) << graph.status();
  return PartitionGraph(*graph)->front();
}

absl::StatusOr<MergePlan> PlanOf(const Partition& partition) {
  return PlanMerge(*partition.merge());
}

TEST(MergePlan, MergesAxesOfDenseRows) {
  const auto plan = PlanOf(MergeOf(3, {2, 4, 5, 64}));
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->launches.size(), 1u);
  EXPECT_EQ(plan->launches[0].traits.axes, 1);
  EXPECT_EQ(plan->launches[0].params.extents[0], 40);
  EXPECT_EQ(plan->launches[0].traits.vectors, 1);
  EXPECT_EQ(plan->scratch_bytes, 0u);
  EXPECT_EQ(plan->launches[0].blocks, (40 * 16 + 127) / 128);
  EXPECT_EQ(plan->ToString(), "merge of 3 parts");
}

TEST(MergePlan, TakesManyPartsInSeveralLaunches) {
  struct Row {
    int64_t parts;
    std::vector<int> counts;  // of launches, with what the one before left
  };
  for (const Row& row :
       {Row{24, {24}}, Row{25, {24, 2}}, Row{47, {24, 24}}, Row{48, {24, 24, 2}}}) {
    const auto plan = PlanOf(MergeOf(row.parts, {6, 40}, kvant::kF16));
    ASSERT_TRUE(plan.ok()) << plan.status();
    std::vector<int> counts;
    for (const MergeLaunch& launch : plan->launches) counts.push_back(launch.params.part_count);
    EXPECT_EQ(counts, row.counts) << row.parts;
  }
}

TEST(MergePlan, DoesNothingWithoutElements) {
  const auto plan = PlanOf(MergeOf(2, {3, 0, 8}));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_TRUE(plan->launches.empty());
}

TEST(MergePlan, RefusesInWords) {
  // No two axes of eight continue each other.
  Dims dims(9, 2), strides(9);
  int64_t stride = 1;
  for (size_t d = 9; d-- > 0;) strides[d] = std::exchange(stride, stride * 3);
  EXPECT_EQ(PlanOf(MergeOf(2, dims, kvant::kF32, strides)).status().message(),
            "does not take outputs of 9 axes, more than 7, with neighbours merged");
  EXPECT_THAT(
      std::string(PlanOf(MergeOf(2, {int64_t{1} << 20, int64_t{1} << 15})).status().message()),
      ::testing::HasSubstr("more than 2147483647 threads"));
}

TEST(MergeKernel, ReadsAndWritesEachSectorOnce) {
  for (const DataType type : {kvant::kF32, kvant::kF16}) {
    const Partition partition = MergeOf(3, {16, 128}, type);
    const auto plan = PlanOf(partition);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const MergeLaunch& launch = plan->launches[0];
    simt::Options options;
    std::vector<std::unique_ptr<conformance::TestBuffer>> memory;
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    const auto allocate = [&memory](const LogicalTensor& tensor) -> void* {
      const auto bytes = static_cast<size_t>(tensor.memory_bytes());
      memory.push_back(std::make_unique<conformance::TestBuffer>(bytes));
      return memory.back()->data();
    };
    for (size_t i = 0; i < partition.inputs().size(); ++i) {
      const LogicalTensor& tensor = partition.input(static_cast<int>(i));
      inputs.push_back(allocate(tensor));
      if (i % 2 == 0) {
        options.watches.push_back({inputs.back(), static_cast<size_t>(tensor.memory_bytes())});
      }
    }
    outputs.push_back(allocate(partition.output(0)));
    MergeParams params = launch.params;
    FillParams(launch.binding, inputs, outputs, nullptr, nullptr, &params);
    const KernelSpec spec = MakeMergeKernel(launch);
    const SimtBody body = BodyOf(spec);
    ASSERT_NE(body, nullptr);
    const simt::Report report =
        simt::Launch({launch.blocks, spec.threads, 0}, options, [&] { body(&params); });
    EXPECT_THAT(report.errors, ::testing::IsEmpty());
    for (const auto& reads : report.reads) EXPECT_THAT(reads, ::testing::Each(1u));
    const simt::Counters& c = report.counters;
    EXPECT_EQ(c.global_store_sectors, c.global_store_sectors_ideal) << c;
  }
}

}  // namespace
}  // namespace kvant::cuda
