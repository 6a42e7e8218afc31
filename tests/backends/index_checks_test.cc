// Lengths, first tokens, ranges, page tables, offsets, positions and slots that do not fit are
// refused before anything is read or written, whoever would run.
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kBatch = 3, kTokens = 64, kPageSize = 16, kSize = 16, kPages = 14;

// q x K, softmax, x V over what the indices say, which are inputs of these names.
Graph LengthsGraph(bool direct) {
  GraphBuilder g;
  const Value lengths = g.Input("lengths", kS32, {kBatch}), first = g.Input("first", kS32, {1});
  const Value q = g.Input("q", kF32, {kBatch, 2, 2, kSize});
  const Value k = g.LoadTokens(g.Input("k", kF32, {kBatch, 2, kTokens, kSize}), lengths, first, {});
  const Value v = g.LoadTokens(g.Input("v", kF32, {kBatch, 2, kTokens, kSize}), lengths, first, {});
  if (direct) {
    g.Output(
        "o",
        g.ScaledDotProductAttention(q, k, v, {.kv_lengths = lengths, .kv_first = first}).first);
  } else {
    const Value scores = g.MatMul(q, k, {.transpose_b = true});
    g.Output("o", g.MatMul(g.SoftMax(scores, {.lengths = lengths, .first = first}), v));
  }
  return std::move(g).Build().value();
}

// Lengths: of each row, or one of all.
Graph PagesGraph(int64_t lengths_rows = kBatch) {
  GraphBuilder g;
  const Value lengths = g.Input("lengths", kS32, {lengths_rows});
  const Value table = g.Input("table", kS32, {kBatch, kTokens / kPageSize});
  const Value offsets = g.Input("offsets", kS32, {kBatch + 1});
  const auto cache = [&](const char* name) {
    return g.LoadPages(g.Input(name, kF32, {kPages, 2, kPageSize, kSize}), table, lengths);
  };
  g.Output("o",
           g.ScaledDotProductAttention(g.Input("q", kF32, {8, 4, kSize}), cache("k"), cache("v"),
                                       {.kv_lengths = lengths, .query_offsets = offsets})
               .first);
  return std::move(g).Build().value();
}

Graph RingsGraph(int64_t k_ranges_rows = kBatch, int64_t first_ring = 4) {
  GraphBuilder g;
  const auto cache = [&](const std::string& name) {
    return std::vector<Value>{g.Input(name + "0", kF32, {kBatch, 2, first_ring, kSize}),
                              g.Input(name + "1", kF32, {kBatch, 2, 60, kSize})};
  };
  const auto [k, lengths] =
      g.LoadRangesWithLengths(cache("k"), g.Input("k_ranges", kS32, {k_ranges_rows, 2, 2}));
  const Value v = g.LoadRanges(cache("v"), g.Input("v_ranges", kS32, {kBatch, 2, 2}));
  const Value q = g.Input("q", kF32, {kBatch, 2, 2, kSize});
  const Value scores = g.MatMul(q, k, {.transpose_b = true});
  const Value first = g.Input("first", kS32, {1});
  g.Output("o", g.MatMul(g.SoftMax(scores, {.lengths = lengths, .first = first}), v));
  return std::move(g).Build().value();
}

using Indices = std::map<std::string, std::vector<int32_t>>;

class IndexChecksTest : public ::testing::TestWithParam<const char*> {
 protected:
  // Runs the graph with zeros but for the indices. Nothing is written if that fails.
  absl::Status Run(const Graph& graph, const Indices& indices) {
    EngineOptions options{.device = *DeviceOfBackend(GetParam()), .backends = {GetParam()}};
    const Engine engine = Engine::Create(options).value();
    const absl::StatusOr<CompiledGraph> compiled = engine.Compile(graph);
    EXPECT_TRUE(compiled.ok()) << compiled.status();
    if (!compiled.ok()) return absl::OkStatus();
    std::vector<std::vector<uint64_t>> memory;
    std::vector<ConstTensor> inputs;
    for (const TensorId id : graph.inputs()) {
      const LogicalTensor& tensor = graph.tensor(id);
      memory.emplace_back(static_cast<size_t>(tensor.memory_bytes()) / 8 + 1);
      const auto found = indices.find(tensor.name);
      if (found != indices.end()) {
        inputs.emplace_back(found->second.data(), found->second.size() * 4);
      } else {
        inputs.emplace_back(memory.back().data(), memory.back().size() * 8);
      }
    }
    std::vector<std::vector<uint8_t>> out;
    for (const TensorId id : graph.outputs()) {
      out.emplace_back(static_cast<size_t>(graph.tensor(id).memory_bytes()), 0xa5);
    }
    const std::vector<std::vector<uint8_t>> before = out;
    std::vector<Tensor> outputs;
    for (std::vector<uint8_t>& one : out) outputs.emplace_back(one.data(), one.size());
    absl::Status done = compiled->Execute(Stream(engine), inputs, outputs);
    if (!done.ok()) {
      EXPECT_EQ(out, before);
    }
    if (compiled->partitions().size() != 1) return done;
    // Alone, the partition says the same.
    const CompiledPartition& alone = compiled->partitions()[0];
    std::vector<ConstTensor> its;
    for (const TensorId id : alone.partition().inputs()) {
      const auto at = std::find(graph.inputs().begin(), graph.inputs().end(), id);
      its.push_back(inputs[static_cast<size_t>(at - graph.inputs().begin())]);
    }
    EXPECT_EQ(alone.Execute(Stream(engine), its, outputs).message(), done.message());
    if (!done.ok()) {
      EXPECT_EQ(out, before);
    }
    return done;
  }

  void ExpectRefused(const Graph& graph, Indices indices, const std::string& name,
                     std::vector<int32_t> bad, const std::string& why) {
    SCOPED_TRACE(why);
    indices[name] = std::move(bad);
    const absl::Status status = Run(graph, indices);
    EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  }
};

TEST_P(IndexChecksTest, Lengths) {
  for (const bool direct : {false, true}) {
    const Graph graph = LengthsGraph(direct);
    const Indices fine{{"lengths", {64, 0, 7}}, {"first", {3}}};
    EXPECT_TRUE(Run(graph, fine).ok());
    ExpectRefused(graph, fine, "lengths", {64, 0, 65}, "the length of row 2 is 65; it must be");
    ExpectRefused(graph, fine, "lengths", {64, -1, 5}, "the length of row 1 is -1; it must be");
    ExpectRefused(graph, fine, "first", {-2}, "the first token of row 0 is -2");
    ExpectRefused(graph, fine, "first", {65}, "between 0 and the capacity of 64");
  }
}

TEST_P(IndexChecksTest, PagesAndOffsets) {
  const Graph graph = PagesGraph();
  const int32_t none = -7;  // of no page, where no token is
  const Indices fine{{"lengths", {33, 0, 64}},
                     {"table", {13, 0, 5, none, none, none, none, none, 1, 2, 3, 4}},
                     {"offsets", {0, 3, 3, 8}}};
  EXPECT_TRUE(Run(graph, fine).ok());
  ExpectRefused(graph, fine, "table", {13, 0, 14, 0, 0, 0, 0, 0, 1, 2, 3, 4},
                "page 2 of row 0, which has 33 tokens, is 14; the pool has 14 pages");
  ExpectRefused(graph, fine, "table", {13, 0, 5, 0, 0, 0, 0, 0, 1, 2, 3, -1},
                "page 3 of row 2, which has 64 tokens, is -1");
  ExpectRefused(graph, fine, "lengths", {33, 0, 65},
                "the length of row 2 is 65; its 4 pages of 16 tokens have room for 64");
  ExpectRefused(graph, fine, "lengths", {33, -4, 64}, "the length of row 1 is -4");
  ExpectRefused(graph, fine, "offsets", {1, 3, 3, 8}, "query_offsets begin with 1, not 0");
  ExpectRefused(graph, fine, "offsets", {0, 3, 2, 8}, "fall: 3 and then 2 for row 1");
  ExpectRefused(graph, fine, "offsets", {0, 3, 3, 9}, "of row 2 end at 9; there are 8 queries");
}

TEST_P(IndexChecksTest, Ranges) {
  const Graph graph = RingsGraph();
  const Indices fine{{"k_ranges", {0, 4, 0, 60, 3, 2, 59, 3, 0, 0, 0, 0}},
                     {"v_ranges", {1, 4, 9, 60, 0, 0, 5, 5, 0, 0, 0, 0}},
                     {"first", {3}}};
  EXPECT_TRUE(Run(graph, fine).ok());
  ExpectRefused(graph, fine, "k_ranges", {0, 5, 0, 59, 3, 2, 59, 3, 0, 0, 0, 0},
                "the range of src 0 in row 0 is 5 tokens from token 0 on; there is room for 4");
  ExpectRefused(graph, fine, "k_ranges", {0, 4, -1, 60, 3, 2, 59, 3, 0, 0, 0, 0},
                "the range of src 1 in row 0 is 60 tokens from token -1 on");
  ExpectRefused(graph, fine, "v_ranges", {1, 4, 9, 60, 0, 0, 60, 5, 0, 0, 0, 0},
                "the range of src 1 in row 1 is 5 tokens from token 60 on");
  ExpectRefused(graph, fine, "v_ranges", {1, 4, 9, 60, 0, -1, 5, 5, 0, 0, 0, 0},
                "the range of src 0 in row 1 is -1 tokens");
  ExpectRefused(graph, fine, "first", {-2}, "the first token of row 0 is -2");
  const std::vector<int32_t> fewer{1, 4, 9, 60, 0, 0, 5, 4, 0, 0, 0, 0};
  if (std::string(GetParam()) == "oracle" || std::string(GetParam()) == "reference") {
    // The last of K's columns meets zeros.
    Indices other = fine;
    other["v_ranges"] = fewer;
    EXPECT_TRUE(Run(graph, other).ok());
  } else {
    ExpectRefused(graph, fine, "v_ranges", fewer,
                  "the ranges of row 1 add up to 5 tokens of K and 4 of V");
  }
}

// One row of indices serves all rows, and nothing beyond it is read.
TEST_P(IndexChecksTest, OfAllRows) {
  const Graph pages = PagesGraph(/*lengths_rows=*/1);
  const Indices fine{{"lengths", {17, 999, -999}},
                     {"table", {13, 0, -7, -7, 5, 6, -7, -7, 1, 2, -7, -7}},
                     {"offsets", {0, 3, 3, 8}}};
  EXPECT_TRUE(Run(pages, fine).ok());
  ExpectRefused(pages, fine, "lengths", {65, 17, 17}, "the length of row 0 is 65");
  ExpectRefused(pages, fine, "lengths", {33, 17, 17}, "page 2 of row 0, which has 33 tokens, is");
  ExpectRefused(pages, fine, "table", {13, 0, -7, -7, 5, 6, -7, -7, 1, 14, -7, -7},
                "page 1 of row 2, which has 17 tokens, is 14; the pool has 14 pages");

  const Graph rings = RingsGraph(/*k_ranges_rows=*/1);
  const Indices ranges{{"k_ranges", {0, 4, 50, 20, 0, 9, 99, 99}},
                       {"v_ranges", {1, 4, 9, 20, 3, 1, 59, 23, 0, 0, 0, 24}},
                       {"first", {3}}};
  EXPECT_TRUE(Run(rings, ranges).ok());
  if (std::string(GetParam()) == "oracle" || std::string(GetParam()) == "reference") return;
  ExpectRefused(rings, ranges, "v_ranges", {1, 4, 9, 20, 3, 1, 59, 23, 0, 0, 0, 23},
                "the ranges of row 2 add up to 24 tokens of K and 23 of V");
}

// A ring without any room has no tokens, and no place but 0.
TEST_P(IndexChecksTest, RangesOfNoRoom) {
  const Graph graph = RingsGraph(kBatch, /*first_ring=*/0);
  const Indices fine{{"k_ranges", {0, 0, 0, 60, 0, 0, 59, 3, 0, 0, 0, 0}},
                     {"v_ranges", {0, 0, 9, 60, 0, 0, 5, 3, 0, 0, 0, 0}},
                     {"first", {3}}};
  EXPECT_TRUE(Run(graph, fine).ok());
  ExpectRefused(graph, fine, "v_ranges", {0, 0, 9, 60, 1, 0, 5, 3, 0, 0, 0, 0},
                "the range of src 0 in row 1 is 0 tokens from token 1 on; there is room for 0");
}

// Scales in groups of tokens have fewer places than there are tokens, which lengths count.
TEST_P(IndexChecksTest, GroupsOfTokens) {
  constexpr int64_t kGroup = 8;
  for (const bool paged : {false, true}) {
    GraphBuilder g;
    const Value lengths = g.Input("lengths", kS32, {kBatch});
    const Value table = g.Input("table", kS32, {kBatch, kTokens / kPageSize});
    const auto load = [&](const std::string& name, DataType type, int64_t group) {
      const Value x = g.Input(name, type,
                              paged ? Dims{kPages, 2, kPageSize / group, kSize}
                                    : Dims{kBatch, 2, kTokens / group, kSize});
      return paged ? g.LoadPages(x, table, lengths, {.token_group = group})
                   : g.LoadTokens(x, lengths, {}, {.token_group = group});
    };
    const auto cache = [&](const std::string& name) {
      return g.DynamicDequantize(load(name, kS8, 1), load(name + "_scales", kF32, kGroup),
                                 {.group_shape = {1, 1, kGroup, 1}});
    };
    const Value q = g.Input("q", kF32, {kBatch, 2, 2, kSize}), k = cache("k"), v = cache("v");
    g.Output("o", g.ScaledDotProductAttention(q, k, v, {.kv_lengths = lengths}).first);
    const Graph graph = std::move(g).Build().value();
    Indices fine{{"lengths", {64, 0, 33}}};
    if (paged) fine["table"] = {13, 0, 5, 1, -7, -7, -7, -7, 1, 2, 3, -7};
    EXPECT_TRUE(Run(graph, fine).ok()) << paged;
    ExpectRefused(graph, fine, "lengths", {64, 0, 65}, "the length of row 2 is 65");
  }
}

// Where an Append writes.
TEST_P(IndexChecksTest, Positions) {
  GraphBuilder g;
  const Value positions = g.Input("positions", kS32, {kBatch});
  const Value x = g.Input("x", kF32, {kBatch, 2, 4, kSize});
  g.Output("plain", g.Append(x, positions, 16, {.type = kF16}).codes);
  const Graph plain = std::move(g).Build().value();
  const Indices fine{{"positions", {0, -1, 12}}};
  EXPECT_TRUE(Run(plain, fine).ok());
  ExpectRefused(plain, fine, "positions", {0, 13, 0},
                "position 13 of row 1 and 4 tokens are beyond the capacity of 16");
  ExpectRefused(plain, fine, "positions", {2147483647, 0, 0}, "position 2147483647 of row 0");

  GraphBuilder of_groups;
  const Value scales = of_groups.Input("scales", kF32, {1, 1, 4, 1});
  const Value codes =
      of_groups.Append(of_groups.Input("x", kF32, {kBatch, 2, 4, kSize}),
                       of_groups.Input("positions", kS32, {kBatch}), 16, scales, std::nullopt,
                       {.group_shape = {kBatch, 2, 4, kSize}, .type = kS8});
  of_groups.Output("groups", codes);
  const Graph groups = std::move(of_groups).Build().value();
  EXPECT_TRUE(Run(groups, fine).ok());
  ExpectRefused(groups, fine, "positions", {0, 4, 2},
                "position 2 of row 2 is within a group of 4 tokens");
}

// Those of what runs last are checked before what runs first.
TEST_P(IndexChecksTest, OfAllPartitionsFirst) {
  GraphBuilder g;
  for (const std::string at : {"first", "last"}) {
    const Value x = g.Input("x of " + at, kF32, {kBatch, 2, 4, kSize});
    g.Output("out of " + at, g.Append(x, g.Input(at, kS32, {kBatch}), 16, {.type = kF16}).codes);
  }
  const Graph graph = std::move(g).Build().value();
  const Indices fine{{"first", {0, 1, 2}}, {"last", {12, 0, 7}}};
  EXPECT_TRUE(Run(graph, fine).ok());
  ExpectRefused(graph, fine, "last", {12, 0, 13}, "position 13 of row 2 and 4 tokens are beyond");
}

// Where an AppendPages writes: nothing at all, if one token has no place.
TEST_P(IndexChecksTest, Slots) {
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {4, 2, kSize}), slots = g.Input("slots", kS32, {4});
  g.Output("pool", g.AppendPages(x, slots, {.pages = 6, .page_size = 8}, {.type = kF16}).codes);
  const Graph graph = std::move(g).Build().value();
  const Indices fine{{"slots", {47, -2147483647 - 1, 0, 13}}};
  EXPECT_TRUE(Run(graph, fine).ok());
  ExpectRefused(graph, fine, "slots", {0, 1, 48, 2},
                "slot 48 of token 2 is beyond the 48 of the pool, in pages of 8");
  ExpectRefused(graph, fine, "slots", {2147483647, 1, 2, 3}, "slot 2147483647 of token 0");

  GraphBuilder of_none;
  const Value none = of_none.Input("x", kF32, {1, 2, kSize});
  const Value at = of_none.Input("slots", kS32, {1});
  of_none.Output("pool", of_none.AppendPages(none, at, {}, {.type = kF16}).codes);
  const Graph empty = std::move(of_none).Build().value();
  EXPECT_TRUE(Run(empty, {{"slots", {-1}}}).ok());
  ExpectRefused(empty, {}, "slots", {0}, "slot 0 of token 0 is beyond the 0 of the pool");
}

// Indices that are part of the graph are checked as well.
TEST_P(IndexChecksTest, Constants) {
  for (const int32_t position : {12, 13}) {
    GraphBuilder g;
    const Value x = g.Input("x", kF32, {kBatch, 2, 4, kSize});
    g.Output("o", g.Append(x, g.Scalar(position), 16, {.type = kF16}).codes);
    EXPECT_EQ(Run(std::move(g).Build().value(), {}).ok(), position == 12);
  }
}

// Lengths that the partition computes itself: those of V's rings, 64 at most, where K's pages have
// room for 32.
TEST_P(IndexChecksTest, LengthsThatAreComputed) {
  // The others do not take what is not fused.
  if (std::string(GetParam()) != "oracle" && std::string(GetParam()) != "reference") return;
  GraphBuilder g;
  const Value ranges = g.Input("ranges", kS32, {kBatch, 1, 2});
  const auto [v, lengths] =
      g.LoadRangesWithLengths({g.Input("v", kF32, {kBatch, 2, kTokens, kSize})}, ranges);
  const Value table = g.Input("table", kS32, {kBatch, 2});
  const Value k = g.LoadPages(g.Input("k", kF32, {kPages, 2, kPageSize, kSize}), table, lengths);
  const Value q = g.Input("q", kF32, {kBatch, 2, 2, kSize});
  const Value probs =
      g.SoftMax(g.MatMul(q, k, {.transpose_b = true}), {.axis = -1, .lengths = lengths});
  // Probabilities of 32 columns with 64 tokens of V.
  g.Output("o", g.MatMul(g.Concat({probs, probs}, -1), v));
  const Graph graph = std::move(g).Build().value();
  const Indices fine{{"ranges", {0, 64, 5, 3, 0, 0}}, {"table", {0, 1, 2, 3, 4, 5}}};
  EXPECT_FALSE(Run(graph, fine).ok());  // 64 tokens in two pages
  Indices fewer = fine;
  fewer["ranges"] = {0, 32, 5, 3, 0, 0};
  EXPECT_TRUE(Run(graph, fewer).ok());
  ExpectRefused(graph, fewer, "table", {0, 1, 99, 3, 4, 5}, "is 99; the pool has 14 pages");
}

// Where no softmax checks the lengths too.
TEST_P(IndexChecksTest, PagesAlone) {
  if (std::string(GetParam()) != "oracle" && std::string(GetParam()) != "reference") return;
  GraphBuilder g;
  const Value pool = g.Input("pool", kF32, {kPages, 2, kPageSize, kSize});
  const Value table = g.Input("table", kS32, {kBatch, 2});
  g.Output("o", g.LoadPages(pool, table, g.Input("lengths", kS32, {kBatch})));
  const Graph graph = std::move(g).Build().value();
  const Indices fine{{"table", {0, 1, 2, 3, 4, 5}}, {"lengths", {32, 0, 17}}};
  EXPECT_TRUE(Run(graph, fine).ok());
  ExpectRefused(graph, fine, "lengths", {32, -1, 17}, "the length of row 1 is -1; its 2 pages");
}

INSTANTIATE_TEST_SUITE_P(Backends, IndexChecksTest,
                         ::testing::Values("cpu", "cuda_simt", "oracle"
#ifdef KVANT_WITH_ONEDNN
                                           ,
                                           "reference"
#endif
                                           ),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace kvant
