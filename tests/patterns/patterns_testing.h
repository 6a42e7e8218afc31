// Graphs in a line for tests of the partitioner.
#ifndef KVANT_TESTS_PATTERNS_PATTERNS_TESTING_H_
#define KVANT_TESTS_PATTERNS_PATTERNS_TESTING_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/graph/builder.h"
#include "kvant/patterns/partitioner.h"

namespace kvant::testing {

using Grammar = PartitionOptions::Grammar;

inline std::vector<Partition> Partitions(GraphBuilder g, Grammar grammar = Grammar::kNative) {
  absl::StatusOr<Graph> graph = std::move(g).Build();
  EXPECT_TRUE(graph.ok()) << graph.status();
  if (!graph.ok()) return {};
  absl::StatusOr<std::vector<Partition>> result = PartitionGraph(*graph, {grammar});
  EXPECT_TRUE(result.ok()) << result.status();
  return *std::move(result);
}

// The kinds of each partition's ops: "MatMul Add | SoftMax | MatMul".
inline std::string KindsOf(const std::vector<Partition>& result) {
  std::vector<std::string> partitions;
  for (const Partition& partition : result) {
    std::vector<std::string> ops;
    for (const Op& op : partition.ops().ops()) ops.emplace_back(OpKindName(op.kind));
    partitions.push_back(absl::StrJoin(ops, " "));
  }
  return absl::StrJoin(partitions, " | ");
}

// The spec of the only partition; fails the test when there is none.
inline std::vector<ScoreStep::Kind> KindsOf(const AttentionSpec& spec) {
  std::vector<ScoreStep::Kind> kinds;
  for (const ScoreStep& step : spec.steps) kinds.push_back(step.kind);
  return kinds;
}

inline AttentionSpec OnlySpec(const std::vector<Partition>& result) {
  EXPECT_EQ(result.size(), 1u) << KindsOf(result);
  for (const std::string& why : MissesOf(result)) ADD_FAILURE() << why;
  if (result.empty()) return {};
  const Partition& partition = result[0];
  for (const std::string& note : partition.notes()) ADD_FAILURE() << note;
  EXPECT_NE(partition.attention(), nullptr);
  return partition.attention() ? *partition.attention() : AttentionSpec();
}

inline std::string Text(const View& view) {
  if (!view.present()) return "-";
  return absl::StrCat(view.port, ":", std::string(DataTypeName(view.type)), "[",
                      absl::StrJoin(view.dims, ","), "]s[", absl::StrJoin(view.strides, ","), "]",
                      view.offset ? absl::StrCat("+", view.offset) : "");
}

inline std::string Text(const KvSegment& segment) {
  std::string text = Text(segment.data);
  if (!segment.quantization) return text;
  const Quantization& q = *segment.quantization;
  absl::StrAppend(&text, " /[", absl::StrJoin(q.group, ","), "] * ", Text(q.scales));
  if (q.zero_points.present()) absl::StrAppend(&text, " - ", Text(q.zero_points));
  if (!q.static_scales.empty()) {
    absl::StrAppend(&text, " static axis ", q.static_axis, " x",
                    absl::StrJoin(q.static_scales, ","));
  }
  return text;
}

// The usual five-op attention, varied by tests.
struct Plain {
  GraphBuilder g;
  Value q = g.Input("q", kF32, {2, 4, 3, 8});
  Value k = g.Input("k", kF32, {2, 4, 5, 8});
  Value v = g.Input("v", kF32, {2, 4, 5, 6});
  Value scale = g.Input("scale", kF32, {1});
  Value mask = g.Input("mask", kF32, {2, 1, 3, 5});

  Value Scores() { return g.MatMul(q, k, {.transpose_b = true}); }
};

}  // namespace kvant::testing

#endif  // KVANT_TESTS_PATTERNS_PATTERNS_TESTING_H_
