// MergeAttention on every engine, against the oracle.
#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tests/conformance/expect.h"

namespace kvant::conformance {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct MergeCase {
  std::string name;
  Dims dims;  // of outputs
  int64_t parts = 2;
  DataType type = kF32, result = kF32;
  bool stats = true;
  enum class Layout : uint8_t {
    kDense,
    kTransposed,    // rows of axis 1 before those of axis 0
    kPadded,        // gaps behind every row
    kChannelsApart  // two elements from channel to channel
  };
  // Of even parts; of odd ones, and of the result, the next in this list.
  Layout layout = Layout::kDense;
  enum class Stats : uint8_t {
    kNear,
    kFar,        // one part outweighs the others, by up to e^1e4
    kSomeEmpty,  // -inf of some rows of parts, of all parts of some rows
    kNotFinite,  // NaN and infinity of some
  };
  Stats of_parts = Stats::kNear;
};

std::ostream& operator<<(std::ostream& out, const MergeCase& c) { return out << c.name; }

Dims StridesOf(Dims dims, MergeCase::Layout layout) {
  using Layout = MergeCase::Layout;
  for (int64_t& dim : dims) dim = std::max<int64_t>(dim, 1);
  Dims strides = DenseStrides(dims);
  const size_t last = dims.size() - 1;
  if (layout == Layout::kTransposed && dims.size() > 2) {
    // [1, 0, ..]
    strides[1] = strides[0] = 1;
    for (size_t d = 2; d < dims.size(); ++d) strides[1] = strides[0] *= dims[d];
    strides[1] *= dims[0];
  } else if (layout == Layout::kPadded) {
    for (size_t d = 0; d < last; ++d) strides[d] = strides[d] / dims[last] * (dims[last] + 8);
  } else if (layout == Layout::kChannelsApart) {
    for (int64_t& stride : strides) stride *= 2;
  }
  return strides;
}

MergeCase::Layout Next(MergeCase::Layout layout) {
  return static_cast<MergeCase::Layout>((static_cast<int>(layout) + 1) % 4);
}

bool IsEmpty(const MergeCase& c, int64_t part, absl::Span<const int64_t> row) {
  if (c.of_parts != MergeCase::Stats::kSomeEmpty) return false;
  return Noise(1, row) > 0.7 || Noise(100 + static_cast<uint64_t>(part), row) > 0.2;
}

double StatOf(const MergeCase& c, int64_t part, absl::Span<const int64_t> row) {
  const double noise = Noise(200 + static_cast<uint64_t>(part), row);
  switch (c.of_parts) {
    case MergeCase::Stats::kNear:
      return 3 * noise + 11;
    case MergeCase::Stats::kFar:
      return 1e4 * noise;
    case MergeCase::Stats::kSomeEmpty:
      return IsEmpty(c, part, row) ? -kInf : 3 * noise;
    case MergeCase::Stats::kNotFinite:
      return noise > 0.8 ? std::nan("") : noise < -0.9 ? kInf : noise;
  }
  return 0;
}

absl::StatusOr<Prepared> PrepareMerge(const MergeCase& c) {
  Prepared prepared;
  GraphBuilder g;
  std::vector<GraphBuilder::AttentionPart> parts;
  Dims stats_dims = c.dims;
  stats_dims.back() = 1;
  for (int64_t part = 0; part < c.parts; ++part) {
    const MergeCase::Layout layout = part % 2 == 0 ? c.layout : Next(c.layout);
    const Value output =
        g.Input(absl::StrCat("output", part), c.type, c.dims, StridesOf(c.dims, layout));
    const Value stats =
        g.Input(absl::StrCat("stats", part), kF32, stats_dims, StridesOf(stats_dims, layout));
    parts.push_back({output, stats});
    prepared.graph.inputs.push_back({output.id, "", [c, part](absl::Span<const int64_t> at) {
                                       // What does not count may be anything.
                                       if (IsEmpty(c, part, at.first(at.size() - 1)))
                                         return std::nan("");
                                       return Signal(static_cast<uint64_t>(part), at);
                                     }});
    prepared.graph.inputs.push_back({stats.id, "", [c, part](absl::Span<const int64_t> at) {
                                       return StatOf(c, part, at.first(at.size() - 1));
                                     }});
  }
  const auto [output, stats] = g.MergeAttention(parts, {.type = c.result, .stats = c.stats});
  g.Output("output", output, StridesOf(c.dims, Next(c.layout)));
  if (stats) g.Output("stats", *stats, StridesOf(stats_dims, c.layout));
  KVANT_ASSIGN_OR_RETURN(prepared.graph.graph, std::move(g).Build());
  KVANT_ASSIGN_OR_RETURN(std::vector<Partition> found, PartitionGraph(prepared.graph.graph));
  if (found.size() != 1 || found[0].kind() != Partition::Kind::kMerge) {
    return absl::InternalError("not one partition that merges");
  }
  prepared.partition = std::move(found[0]);
  for (const CaseInput& input : prepared.graph.inputs) {
    const LogicalTensor& tensor = prepared.graph.graph.tensor(input.id);
    prepared.inputs.emplace(input.id, FilledBuffer(tensor, input.fill));
  }
  return prepared;
}

std::vector<MergeCase> MergeCases() {
  using Layout = MergeCase::Layout;
  using Stats = MergeCase::Stats;
  std::vector<MergeCase> cases;
  const auto add = [&cases](std::string name, MergeCase c) {
    c.name = std::move(name);
    cases.push_back(std::move(c));
  };
  // Around the parts of a launch on CUDA and of a tile on the CPU.
  for (const int64_t parts : {1, 2, 3, 8, 24, 25, 47, 48, 63, 64, 65, 130}) {
    add(absl::StrCat("Parts_", parts), {.dims = {2, 3, 4, 40}, .parts = parts});
  }
  for (const int64_t channels : {1, 7, 8, 9, 64, 100, 255, 256, 257, 513}) {
    add(absl::StrCat("Channels_", channels), {.dims = {3, 5, channels}, .parts = 3});
  }
  const Dims shapes[] = {{16},      {7, 16},  {2, 2, 3, 2, 3, 16}, {300, 8}, {1, 1, 1, 32},
                         {3, 0, 8}, {3, 4, 0}};
  for (size_t i = 0; i < std::size(shapes); ++i) {
    add(absl::StrCat("Shape_", i), {.dims = shapes[i], .parts = 3});
  }
  for (const DataType type : {kF32, kF16, kBF16}) {
    for (const DataType result : {kF32, kF16, kBF16}) {
      add(absl::StrCat("Types_", std::string(DataTypeName(type)), "_to_",
                       std::string(DataTypeName(result))),
          {.dims = {2, 3, 5, 24}, .parts = 3, .type = type, .result = result});
    }
  }
  const char* const layouts[] = {"dense", "transposed", "padded", "channels_apart"};
  for (int i = 0; i < 4; ++i) {
    for (const DataType type : {kF32, kF16}) {
      const bool wide = type == kF32;
      add(absl::StrCat("Layout_", layouts[i], wide ? "_f32" : "_f16"),
          {.dims = {3, 4, 5, wide ? 24 : 21},
           .parts = 4,
           .type = type,
           .layout = static_cast<Layout>(i)});
    }
  }
  const char* const stats[] = {"near", "far", "some_empty", "not_finite"};
  for (int i = 0; i < 4; ++i) {
    for (const int64_t parts : {2, 5, 70}) {
      add(absl::StrCat("Stats_", stats[i], "_", parts),
          {.dims = {4, 9, 20}, .parts = parts, .of_parts = static_cast<Stats>(i)});
    }
  }
  add("WithoutStats", {.dims = {2, 6, 64}, .parts = 3, .stats = false});
  add("WithoutStatsManyParts", {.dims = {2, 6, 64}, .parts = 30, .type = kBF16, .stats = false});
  return cases;
}

std::string NameOf(const testing::TestParamInfo<MergeCase>& info) { return info.param.name; }

class MergeConformanceTest : public testing::TestWithParam<MergeCase> {};

TEST_P(MergeConformanceTest, MatchesTheOracle) {
  const absl::StatusOr<Prepared> prepared = PrepareMerge(GetParam());
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  ExpectTheOracle(*prepared);
}

TEST_P(MergeConformanceTest, DoesNotDependOnThreads) {
  const absl::StatusOr<Prepared> prepared = PrepareMerge(GetParam());
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  ExpectTheSameOnAnyThreads(*prepared);
}

INSTANTIATE_TEST_SUITE_P(Cases, MergeConformanceTest, testing::ValuesIn(MergeCases()), NameOf);

}  // namespace
}  // namespace kvant::conformance
