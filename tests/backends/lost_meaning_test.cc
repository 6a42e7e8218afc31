// Graphs that look like attention and mean something that a fused kernel would not compute: they
// run op by op. Whatever runs them, results are the oracle's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kvant/backends/compiled_graph.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"

namespace kvant {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kRows = 2, kHeads = 2, kTokens = 4, kHead = 8;
const std::vector<int64_t> kSwapped = {1, 0, 2, 3};

using Integers = std::map<std::string, std::vector<int32_t>>;

// All graph inputs in f32 and s8 are filled by their place.
struct Memory {
  std::vector<std::vector<float>> floats;
  std::vector<std::vector<int8_t>> codes;
  std::vector<ConstTensor> inputs;

  Memory(const Graph& graph, const Integers& integers) {
    for (const TensorId id : graph.inputs()) {
      const LogicalTensor& tensor = graph.tensor(id);
      const auto n = static_cast<size_t>(tensor.elements());
      const auto number = [id](size_t i) { return static_cast<int>((i * 7 + id * 13) % 29) - 14; };
      if (tensor.type == kF32) {
        std::vector<float>& x = floats.emplace_back();
        for (size_t i = 0; i < n; ++i) x.push_back(static_cast<float>(number(i)) / 8);
        inputs.emplace_back(x.data(), n * 4);
      } else if (tensor.type == kS8) {
        std::vector<int8_t>& x = codes.emplace_back();
        for (size_t i = 0; i < n; ++i) x.push_back(static_cast<int8_t>(number(i)));
        inputs.emplace_back(x.data(), n);
      } else {
        const std::vector<int32_t>& x = integers.at(tensor.name);
        EXPECT_EQ(x.size(), n) << tensor.name;
        inputs.emplace_back(x.data(), n * 4);
      }
    }
  }
};

// `why`: of what is not fused; empty: it is.
void Check(const std::function<void(GraphBuilder&)>& build, const Integers& integers,
           const std::string& why) {
  GraphBuilder g;
  build(g);
  const absl::StatusOr<Graph> built = std::move(g).Build();
  ASSERT_TRUE(built.ok()) << built.status();
  const Memory memory(*built, integers);
  std::vector<std::vector<std::vector<float>>> results;
  for (const std::vector<std::string>& backends :
       {std::vector<std::string>{"cpu", "oracle"}, {"oracle"}}) {
    const Engine engine = Engine::Create({.backends = backends}).value();
    const CompiledGraph compiled = engine.Compile(*built).value();
    if (backends.size() > 1) {
      EXPECT_EQ(compiled.fused(), why.empty()) << compiled.ToString();
      EXPECT_THAT(compiled.ToString(), HasSubstr(why));
    }
    std::vector<std::vector<float>>& outputs = results.emplace_back();
    for (const TensorId id : built->outputs()) {
      outputs.emplace_back(static_cast<size_t>(built->tensor(id).elements()), 77.f);
    }
    std::vector<Tensor> out;
    for (std::vector<float>& x : outputs) out.emplace_back(x.data(), x.size() * 4);
    const absl::Status status = compiled.Execute(Stream(engine), memory.inputs, out);
    ASSERT_TRUE(status.ok()) << status;
  }
  for (size_t o = 0; o < results[0].size(); ++o) {
    for (size_t i = 0; i < results[0][o].size(); ++i) {
      const float got = results[0][o][i], want = results[1][o][i];
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(got)) << o << ", " << i;
      } else {
        ASSERT_NEAR(got, want, 1e-4) << o << ", " << i;
      }
    }
  }
}

Value Floats(GraphBuilder& g, const char* name, Dims dims) { return g.Input(name, kF32, dims); }
Value Query(GraphBuilder& g) { return Floats(g, "q", {kRows, kHeads, 1, kHead}); }
Value Cache(GraphBuilder& g, const char* name) {
  return Floats(g, name, {kRows, kHeads, kTokens, kHead});
}
Value Lengths(GraphBuilder& g) { return g.Input("lengths", kS32, {kRows}); }
Value Scores(GraphBuilder& g, Value q, Value k) { return g.MatMul(q, k, {.transpose_b = true}); }
void Attend(GraphBuilder& g, Value q, Value k, Value v, GraphBuilder::SoftMaxOptions options) {
  g.Output("o", g.MatMul(g.SoftMax(Scores(g, q, k), options), v));
}
Attributes PerChannel(std::vector<float> scales) {
  return {{Attr::kQType, std::string("per_channel")},
          {Attr::kAxis, int64_t{0}},
          {Attr::kScales, std::move(scales)}};
}

// A SoftMax counts along axis 0 of its own input.
TEST(LostMeaningTest, LengthsOfAnotherAxis) {
  const Integers integers = {{"lengths", {4, 1}}};
  const std::string why = "are not those of the batch's rows";
  for (const bool first : {false, true}) {
    SCOPED_TRACE(first);
    const auto options = [&](GraphBuilder& g) {
      GraphBuilder::SoftMaxOptions counted{.lengths = Lengths(g)};
      if (first) {
        counted.first = counted.lengths;
        counted.lengths = g.Input("all", kS32, {1});
      }
      return counted;
    };
    const Integers all = {{"lengths", {4, 1}}, {"all", {4}}};
    Check(
        [&](GraphBuilder& g) {
          const Value q = Query(g), k = Cache(g, "k"), v = Cache(g, "v");
          const Value heads = g.SoftMax(g.Transpose(Scores(g, q, k), kSwapped), options(g));
          g.Output("o", g.MatMul(g.Transpose(heads, kSwapped), v));
        },
        all, why);
    Check(
        [&](GraphBuilder& g) {
          const Value q = Floats(g, "q", {kHeads, 1, kHead});
          const Value k = Floats(g, "k", {kHeads, kTokens, kHead}), v = Cache(g, "v");
          Attend(g, q, k, v, options(g));
        },
        all, why);
  }
  Check(
      [&](GraphBuilder& g) {
        const Value q = Query(g), k = Cache(g, "k"), v = Cache(g, "v");
        Attend(g, q, k, v, {.lengths = Lengths(g)});
      },
      integers, "");
}

TEST(LostMeaningTest, RowsOfLoads) {
  const Integers integers = {{"lengths", {4, 1}}};
  Check(
      [](GraphBuilder& g) {
        const Value q = Query(g), lengths = Lengths(g);
        const Value k = g.Transpose(g.LoadTokens(Cache(g, "k"), lengths), kSwapped);
        Attend(g, q, g.Transpose(g.Slice(k, 1, 1, 1), kSwapped), Cache(g, "v"),
               {.lengths = lengths});
      },
      integers, "takes a part of what is loaded");
  for (const bool codes : {false, true}) {
    Check(
        [codes](GraphBuilder& g) {
          const Value q = Query(g), lengths = Lengths(g);
          const auto load = [&](const char* name, DataType type, int64_t columns, bool swapped) {
            const Value x = g.Input(name, type, {kRows, kHeads, kTokens, columns});
            const Value loaded = g.LoadTokens(x, lengths);
            return swapped ? g.Transpose(loaded, kSwapped) : loaded;
          };
          const Value k =
              g.DynamicDequantize(load("k", kS8, kHead, codes), load("scales", kF32, 1, !codes),
                                  {.group_shape = {1, 1, 1, kHead}});
          Attend(g, q, k, Cache(g, "v"), {.lengths = lengths});
        },
        integers, "are not loaded alike");
  }
}

TEST(LostMeaningTest, ScalesOfRowsAndOfPages) {
  const auto dequantize = [](GraphBuilder& g, Value x, std::vector<float> scales) {
    return g.AddOp(OpKind::kDequantize, "dequantize", {x}, {kF32}, PerChannel(scales))[0];
  };
  Check(
      [&](GraphBuilder& g) {
        const Value pool = g.Input("k", kS8, {3, kHeads, 2, kHead}), lengths = Lengths(g);
        const Value k = g.LoadPages(pool, g.Input("table", kS32, {kRows, 2}), lengths);
        Attend(g, Query(g), dequantize(g, k, {.01f, .05f}), Cache(g, "v"), {.lengths = lengths});
      },
      {{"lengths", {4, 3}}, {"table", {2, 0, 1, 2}}}, "a scale for each row");
  Check(
      [&](GraphBuilder& g) {
        const Value pool = g.Input("k", kS8, {3, kHeads, kTokens, kHead});
        const Value lengths = g.Input("lengths", kS32, {1});
        const Value k = g.LoadPages(dequantize(g, pool, {.01f, .05f, .02f}),
                                    g.Input("table", kS32, {1, 1}), lengths);
        const Value q = Floats(g, "q", {1, kHeads, 1, kHead});
        Attend(g, q, k, Floats(g, "v", {1, kHeads, kTokens, kHead}), {.lengths = lengths});
      },
      {{"lengths", {4}}, {"table", {2}}}, "pages that have a scale each");
}

// A ring may be one for all rows, of which each has a range of its own.
TEST(LostMeaningTest, RingsOfAllRows) {
  const Integers integers = {{"ranges", {0, 4, 2, 3}}, {"first", {2, 1}}};
  const auto attend = [](GraphBuilder& g, DataType type, bool first, auto change) {
    const Value ranges = g.Input("ranges", kS32, {kRows, 1, 2});
    const Value ring = g.Input("k", type, {1, kHeads, kTokens, kHead});
    const auto [k, lengths] = g.LoadRangesWithLengths({&ring, 1}, ranges);
    const Value all = Cache(g, "v"), v = g.LoadRanges({&all, 1}, ranges);
    GraphBuilder::SoftMaxOptions options{.lengths = lengths};
    if (first) options.first = g.Input("first", kS32, {kRows});
    Attend(g, Query(g), change(k), v, options);
  };
  const auto same = [](Value k) { return k; };
  Check([&](GraphBuilder& g) { attend(g, kF32, false, same); }, integers, "");
  Check([&](GraphBuilder& g) { attend(g, kF32, true, same); }, integers, "");
  Check(
      [&](GraphBuilder& g) {
        attend(g, kS8, false, [&](Value k) {
          return g.AddOp(OpKind::kDequantize, "scaled", {k}, {kF32}, PerChannel({.01f, .05f}))[0];
        });
      },
      integers, "");
  Check(
      [&](GraphBuilder& g) {
        attend(g, kF32, false, [&](Value k) { return g.Transpose(k, kSwapped); });
      },
      integers, "its rows are not those of the batch");
  // Heads that queries share, in an axis of their own.
  Check(
      [&](GraphBuilder& g) {
        const Value ranges = g.Input("ranges", kS32, {kRows, 1, 2});
        const auto grouped = [&](Value x) {
          return g.Reshape(x, {kRows, kHeads, 1, kTokens, kHead});
        };
        const Value q = Floats(g, "q", {kRows, kHeads, 3, 1, kHead}), all = Cache(g, "v");
        const Value ring = Floats(g, "k", {1, kHeads, kTokens, kHead});
        const auto [k, lengths] = g.LoadRangesWithLengths({&ring, 1}, ranges);
        const Value v = g.LoadRanges({&all, 1}, ranges);
        Attend(g, q, grouped(k), grouped(v), {.lengths = lengths});
      },
      {{"ranges", {0, 4, 2, 3}}}, "");
}

// What is no port of the attention, but part of it elsewhere.
TEST(LostMeaningTest, ConstantsAndIndicesThatAreUsedTwice) {
  const std::string why = "is used where constants are not fused";
  const auto under_diagonal = [](GraphBuilder& g, Value x, Value row, Value column) {
    return g.Select(g.GreaterEqual(row, column), x, g.Scalar(-HUGE_VALF));
  };
  Check(
      [&](GraphBuilder& g) {
        const Value three = g.Scalar(3);
        const Value x = Scores(g, Query(g), Cache(g, "k"));
        const Value row = g.Add(g.GenIndex(x, 2), three);
        const Value probs =
            g.SoftMax(under_diagonal(g, x, row, g.GenIndex(x, 3)), {.lengths = three});
        g.Output("o", g.MatMul(probs, Cache(g, "v")));
      },
      {}, why);
  Check(
      [&](GraphBuilder& g) {
        const Value quarter = g.Scalar(.25);
        const Value codes = g.Input("k", kS8, {kRows, kHeads, kTokens, kHead});
        const Value k = g.DynamicDequantize(codes, quarter, g.Input("zero", kS8, {1}), {});
        const Value x = g.Multiply(Scores(g, Query(g), k), quarter);
        g.Output("o", g.MatMul(g.SoftMax(x), Cache(g, "v")));
      },
      {}, why);
  Check(
      [&](GraphBuilder& g) {
        const Value eighth = g.Scalar(.125);
        const Value codes = g.Input("k", kS8, {kRows, kHeads, kTokens, kHead});
        const Value k = g.DynamicDequantize(codes, eighth, {});
        g.Output("o",
                 g.ScaledDotProductAttention(Query(g), k, Cache(g, "v"), {.bias = eighth}).first);
      },
      {}, why);
  Check(
      [&](GraphBuilder& g) {
        const Value column = g.GenIndex(Floats(g, "columns", {kTokens}), 0);
        const Value x = Scores(g, Floats(g, "q", {kTokens, kHeads, 3, kHead}),
                               Floats(g, "k", {kTokens, kHeads, kTokens, kHead}));
        const Value row = g.Add(g.GenIndex(x, 2), g.Scalar(2));
        const Value probs = g.SoftMax(under_diagonal(g, x, row, column), {.lengths = column});
        g.Output("o", g.MatMul(probs, Floats(g, "v", {kTokens, kHeads, kTokens, kHead})));
      },
      {}, "is computed within what would be fused");
}

// Probabilities of a batch that values alone have are one for all of it.
TEST(LostMeaningTest, DropoutAndStatisticsBeforeTheBatchOfValues) {
  const auto scores = [](GraphBuilder& g) {
    return Scores(g, Floats(g, "q", {1, kHeads, 1, kHead}),
                  Floats(g, "k", {1, kHeads, kTokens, kHead}));
  };
  Check(
      [&](GraphBuilder& g) {
        const Value probs = g.AddOp(
            OpKind::kDropout, "dropout",
            {g.SoftMax(scores(g)), g.Scalar(kS64, 5), g.Scalar(kS64, 0), g.Scalar(.4f)}, {kF32})[0];
        g.Output("o", g.MatMul(probs, Cache(g, "v")));
      },
      {}, "a batch that only values have");
  Check(
      [&](GraphBuilder& g) {
        const auto [probs, stats] = g.SoftMaxWithStats(scores(g), {});
        g.Output("stats", stats);
        g.Output("o", g.MatMul(probs, Cache(g, "v")));
      },
      {}, "a batch that only values have");
}

// As an integer, NaN is code 0.
TEST(LostMeaningTest, ProbabilitiesOfNothingAsCodes) {
  for (const int64_t zero_point : {0, 3}) {
    SCOPED_TRACE(zero_point);
    Check(
        [&](GraphBuilder& g) {
          const Attributes codes = {{Attr::kScales, std::vector<float>{1.f / 255}},
                                    {Attr::kZps, std::vector<int64_t>{zero_point}}};
          const Value x = Scores(g, Floats(g, "q", {kRows, kHeads, 3, kHead}), Cache(g, "k"));
          // Row 0 sees nothing.
          const Value row = g.Subtract(g.GenIndex(x, 2), g.Scalar(1));
          const Value seen = g.GreaterEqual(row, g.GenIndex(x, 3));
          const Value masked = g.Select(seen, x, g.Scalar(-HUGE_VALF));
          const Value probs = g.SoftMax(masked, {.mode = "none"});
          const Value rounded = g.AddOp(OpKind::kQuantize, "quantize", {probs}, {kU8}, codes)[0];
          const Value back = g.AddOp(OpKind::kDequantize, "back", {rounded}, {kF32}, codes)[0];
          g.Output("o", g.MatMul(back, Cache(g, "v")));
        },
        {}, zero_point == 0 ? "" : "has a zero point");
  }
}

// However a diagonal is written; what is none must not become one.
TEST(LostMeaningTest, DiagonalsInEveryForm) {
  struct Form {
    const char* name;
    std::function<Value(GraphBuilder&, Value i, Value j)> condition;
    bool fused = true;
  };
  const auto n = [](GraphBuilder& g, int x) { return g.Scalar(int32_t{x}); };
  const std::vector<Form> forms = {
      {"i - j >= 0",
       [&](auto& g, Value i, Value j) { return g.GreaterEqual(g.Subtract(i, j), n(g, 0)); }},
      {"0 >= j - i",
       [&](auto& g, Value i, Value j) { return g.GreaterEqual(n(g, 0), g.Subtract(j, i)); }},
      {"i - j >= -1",
       [&](auto& g, Value i, Value j) { return g.GreaterEqual(g.Subtract(i, j), n(g, -1)); }},
      {"1 >= j - i",
       [&](auto& g, Value i, Value j) { return g.GreaterEqual(n(g, 1), g.Subtract(j, i)); }},
      {"i - (j - 1) >= 0",
       [&](auto& g, Value i, Value j) {
         return g.GreaterEqual(g.Subtract(i, g.Subtract(j, n(g, 1))), n(g, 0));
       }},
      {"2 - j >= 1 - i",
       [&](auto& g, Value i, Value j) {
         return g.GreaterEqual(g.Subtract(n(g, 2), j), g.Subtract(n(g, 1), i));
       }},
      {"j - i >= 0",
       [&](auto& g, Value i, Value j) { return g.GreaterEqual(g.Subtract(j, i), n(g, 0)); }},
      {"1 + (j - i) >= 2",
       [&](auto& g, Value i, Value j) {
         return g.GreaterEqual(g.Add(n(g, 1), g.Subtract(j, i)), n(g, 2));
       }},
      {"i + j >= 2",
       [&](auto& g, Value i, Value j) { return g.GreaterEqual(g.Add(i, j), n(g, 2)); }, false},
      {"2 - j >= i",
       [&](auto& g, Value i, Value j) { return g.GreaterEqual(g.Subtract(n(g, 2), j), i); }, false},
      {"i - i >= 0",
       [&](auto& g, Value i, Value) { return g.GreaterEqual(g.Subtract(i, i), n(g, 0)); }, false},
      {"i + i >= j", [&](auto& g, Value i, Value j) { return g.GreaterEqual(g.Add(i, i), j); },
       false},
      {"i >= 1", [&](auto& g, Value i, Value) { return g.GreaterEqual(i, n(g, 1)); }, false},
  };
  for (const Form& form : forms) {
    SCOPED_TRACE(form.name);
    Check(
        [&](GraphBuilder& g) {
          const Value x = Scores(g, Floats(g, "q", {kRows, kHeads, 3, kHead}), Cache(g, "k"));
          const Value seen = form.condition(g, g.GenIndex(x, 2), g.GenIndex(x, 3));
          const Value masked = g.Select(seen, x, g.Scalar(-HUGE_VALF));
          g.Output("o", g.MatMul(g.SoftMax(masked, {.mode = "inf_as_zero"}), Cache(g, "v")));
        },
        {}, form.fused ? "" : "which makes no mask of this SoftMax alone");
  }
}

}  // namespace
}  // namespace kvant
