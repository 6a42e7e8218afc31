// Packed codes whose magnitudes differ from tile to tile, or from what is usual: results stay
// within what the kernel says it rounds to.
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kvant/cache/number_format.h"
#include "kvant/tests/backends/ops/op_testing.h"
#include "kvant/tests/backends/ops/reference_testing.h"
#include "kvant/tests/common/simt_turn.h"
#include "kvant/tools/attention_graph.h"

namespace kvant {
namespace {

using ByName = std::map<std::string, std::vector<double>*>;

AttentionGraphOptions Options(DataType q, const std::string& k, const std::string& v,
                              int64_t tokens) {
  AttentionGraphOptions options;
  options.heads = 1;
  options.single_op = true;
  options.dtype = q;
  options.kv_len = tokens;
  options.k = ParseNumberFormat(k).value();
  options.v = ParseNumberFormat(v).value();
  return options;
}

// Of the output, relative L2; `set` gives inputs other values than random ones.
void ExpectKept(const AttentionGraphOptions& options, const std::function<void(ByName&)>& set) {
  if (!HasSimtTurn()) return;
  const Graph graph = MakeAttentionGraph(options).value();
  testing::Values inputs = testing::RandomInputs(graph);
  ByName named;
  for (auto& [id, values] : inputs) named[graph.tensor(id).name] = &values;
  set(named);
  const auto want = testing::RunGraph(graph, inputs, "oracle");
  const auto got = testing::RunGraph(graph, inputs, "cuda_simt");
  ASSERT_TRUE(want.ok()) << want.status();
  ASSERT_TRUE(got.ok()) << got.status();
  const TensorId o = graph.outputs().front();
  double squares = 0, errors = 0;
  for (size_t i = 0; i < want->at(o).size(); ++i) {
    const double x = want->at(o)[i], error = got->at(o)[i] - x;
    squares += x * x;
    errors += error * error;
  }
  // Outputs in f16 and bf16 are rounded too.
  const double limit = options.dtype == kF32 ? 2e-5 : options.dtype == kF16 ? 1e-3 : 4e-3;
  EXPECT_LE(std::sqrt(errors), limit * std::sqrt(squares));
}

void Fill(std::vector<double>& values, double x) { values.assign(values.size(), x); }

// What a lane has seen of zero points decided whether it took part in a shuffle.
TEST(CodesByChannelMagnitudes, ZeroPointsBeyondF16) {
  AttentionGraphOptions options = Options(kF16, "u8:channel:g32:rzp:sf32", "f16", 32);
  options.head_size = 32;
  ExpectKept(options, [](ByName& x) {
    Fill(*x["q"], 0);
    Fill(*x["k"], 0);
    Fill(*x["k_scales"], 1);
    Fill(*x["k_zps"], 0);
    x["k_zps"]->front() = 1e6;
    Fill(*x["v"], 1);
  });
}

// The first tokens give the power of two by which scales are normalised, hidden or not.
TEST(CodesByChannelMagnitudes, HiddenTokensOfOtherScales) {
  for (const DataType q : {kF16, kBF16, kF32}) {
    for (const char* const scales : {"sf16", "sf32", "sbf16"}) {
      for (const double hidden : {0., 1e-5, 1e-3}) {
        for (const double visible : {3e-4, 0.02}) {
          const std::string k = std::string("s8:channel:g32:") + scales;
          SCOPED_TRACE(std::string(DataTypeName(q)) + " over " + k + ", scales of " +
                       std::to_string(hidden) + " and " + std::to_string(visible));
          AttentionGraphOptions options = Options(q, k, "f16", 256);
          options.select = "1x1x1x256";
          ExpectKept(options, [&](ByName& x) {
            std::vector<double>&scale = *x["k_scales"], &see = *x["select"];
            for (size_t i = 0; i < scale.size(); ++i) {
              scale[i] = i < scale.size() / 2 ? hidden : visible * (1 + 0.1 * std::sin(i));
            }
            for (size_t i = 0; i < see.size(); ++i) see[i] = i < see.size() / 2 ? 0 : 1;
          });
        }
      }
    }
  }
}

// Tokens that were never written have scales of 0, under whatever mask.
TEST(CodesMagnitudes, HiddenValuesOfScaleZero) {
  for (const char* const v : {"s8:g32:sf16", "s8:g32:sf32", "u4:token:zp:sbf16"}) {
    SCOPED_TRACE(v);
    AttentionGraphOptions options = Options(kF16, "f16", v, 256);
    options.select = "1x1x1x256";
    ExpectKept(options, [&](ByName& x) {
      std::vector<double>&scale = *x["v_scales"], &see = *x["select"];
      for (size_t i = 0; i < scale.size(); ++i) {
        scale[i] = i < scale.size() / 2 ? 0 : 0.02 * (1 + 0.1 * std::sin(i));
      }
      for (size_t i = 0; i < see.size(); ++i) see[i] = i < see.size() / 2 ? 0 : 1;
    });
  }
}

// The first token has nearly all of the weight, and V is 0 there. Of the others, f16 loses weights
// that large values make count.
TEST(CodesMagnitudes, SinksBesideFloatsOfAnySize) {
  const struct {
    const char* v;
    double code, scale;
  } formats[] = {{"f8_e4m3:tensor", 448, 22},    {"f8_e5m2:tensor", 57344, 0.17},
                 {"f8_e4m3:head:sf16", 448, 22}, {"f8_e4m3", 448, 1},
                 {"f8_e5m2", 57344, 1},          {"f16", 1e4, 1}};
  for (const auto& [v, code, scale] : formats) {
    for (const DataType q : {kF16, kBF16, kF32}) {
      const std::vector<double> gaps =
          q == kF32 ? std::vector<double>{15.3, 16.1, 17.1} : std::vector<double>{18, 19.1, 21.1};
      for (const double gap : gaps) {
        SCOPED_TRACE(std::string(DataTypeName(q)) + " over " + v + ", " + std::to_string(gap));
        ExpectKept(Options(q, "f16", v, 32), [&](ByName& x) {
          std::vector<double>&queries = *x["q"], &keys = *x["k"], &values = *x["v"];
          Fill(queries, 0);
          Fill(keys, 0);
          Fill(values, code);
          queries.front() = 8;
          std::fill_n(values.begin(), 64, 0);
          for (size_t t = 1; t < 32; ++t) keys[t * 64] = -gap;
          if (x.count("v_scales") > 0) Fill(*x["v_scales"], scale);
        });
      }
    }
  }
}

// Queries are normalised by an outlier channel, in which K is small; of the others f16 loses what
// counts beside large keys.
TEST(CodesMagnitudes, LargeKeysWithoutScales) {
  const struct {
    double outlier, of_outlier, query, key;
  } cases[] = {{1e4, 1e-3, 2.4e-5, 1e4}, {1e4, 1e-3, 8e-6, 3e4}, {6e4, 1e-4, 4e-6, 6e4}};
  for (const auto& [outlier, of_outlier, query, key] : cases) {
    SCOPED_TRACE(key);
    AttentionGraphOptions options = Options(kF32, "f16", "f16", 64);
    options.head_size = 128;
    std::mt19937 random(1);
    std::normal_distribution<double> normal;
    ExpectKept(options, [&](ByName& x) {
      for (double& q : *x["q"]) q = query * normal(random);
      x["q"]->front() = outlier;
      std::vector<double>& keys = *x["k"];
      for (size_t i = 0; i < keys.size(); ++i) {
        keys[i] = std::clamp((i % 128 == 0 ? of_outlier : key) * normal(random), -6e4, 6e4);
      }
    });
  }
}

}  // namespace
}  // namespace kvant
