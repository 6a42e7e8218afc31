// The oracle on ranges of segments, against attention by its definition over the tokens that they
// name.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

constexpr int64_t kBatch = 2, kHeads = 2, kQueries = 2, kTokens = 10, kSize = 4, kValueSize = 3;

enum class Form {
  kTokenRows,      // K [.., S, D] and transpose_b
  kChannelRows,    // K [.., D, S]
  kProbsSecond,    // V^T P^T
  kSharedByBatch,  // one K and V for both
  kDirect,         // ScaledDotProductAttention, causal from the bottom right
};

struct Range {
  int64_t first, tokens;
};
struct Side {
  std::vector<int64_t> capacities;
  std::vector<Range> ranges[kBatch];
};

class OracleRangesTest : public ::testing::TestWithParam<Form> {
 protected:
  OracleRangesTest() {
    if (GetParam() == Form::kDirect) {
      k_ = {{10}, {{{7, 8}}, {{9, 1}}}};
      v_ = {{10}, {{{3, 8}}, {{0, 1}}}};
    } else {
      k_ = {{4, 6}, {{{1, 3}, {4, 5}}, {{0, 0}, {2, 1}}}};
      v_ = {{3, 7}, {{{2, 2}, {6, 6}}, {{1, 1}, {0, 0}}}};
    }
  }

  // The value of a channel of a token of the whole cache.
  double At(double phase, int64_t n, int64_t h, int64_t token, int64_t d) const {
    if (GetParam() == Form::kSharedByBatch) n = 0;
    const auto at = static_cast<double>(((n * kHeads + h) * kTokens + token) * 7 + d);
    return static_cast<float>(0.2 + std::sin(0.7 * at * at + phase));
  }

  // The tokens that the columns of a batch are.
  static std::vector<int64_t> Columns(const Side& side, int64_t n) {
    std::vector<int64_t> columns;
    int64_t begin = 0;
    for (size_t s = 0; s < side.capacities.size(); ++s) {
      for (int64_t i = 0; i < side.ranges[n][s].tokens; ++i) {
        columns.push_back(begin + (side.ranges[n][s].first + i) % side.capacities[s]);
      }
      begin += side.capacities[s];
    }
    return columns;
  }

  // A port for each segment, loaded one after another, and how many tokens there are.
  std::pair<Value, Value> Add(GraphBuilder& g, const std::string& name, const Side& side,
                              double phase, int64_t size, bool channel_rows) {
    const int64_t batches = GetParam() == Form::kSharedByBatch ? 1 : kBatch;
    std::vector<Value> parts;
    int64_t begin = 0;
    for (const int64_t capacity : side.capacities) {
      const std::string port = name + std::to_string(begin);
      Dims dims{batches, kHeads, capacity, size};
      if (channel_rows) std::swap(dims[2], dims[3]);
      parts.push_back(g.Input(port, kF32, dims));
      std::vector<float> data;
      for (int64_t i = 0; i < batches * kHeads * capacity * size; ++i) {
        const int64_t head = i / (capacity * size), at = i % (capacity * size);
        const int64_t token = channel_rows ? at % capacity : at / size;
        const int64_t d = channel_rows ? at / capacity : at % size;
        const int64_t n = head / kHeads;
        const auto has = [&](int64_t batch) {
          const std::vector<int64_t> columns = Columns(side, batch);
          return std::count(columns.begin(), columns.end(), begin + token) > 0;
        };
        const bool exists = batches == 1 ? has(0) || has(1) : has(n);
        data.push_back(exists ? static_cast<float>(At(phase, n, head % kHeads, begin + token, d))
                              : std::nanf(""));
      }
      data_.emplace_back(port, std::move(data));
      begin += capacity;
    }
    std::vector<int32_t> ranges;
    for (int64_t n = 0; n < kBatch; ++n) {
      for (const Range& range : side.ranges[n]) {
        ranges.push_back(static_cast<int32_t>(range.first));
        ranges.push_back(static_cast<int32_t>(range.tokens));
      }
    }
    ranges_.emplace_back(name + "_ranges", std::move(ranges));
    const auto segments = static_cast<int64_t>(parts.size());
    const Value of = g.Input(name + "_ranges", kS32, {kBatch, segments, 2});
    // Lengths that nothing takes would be an output.
    if (name == "v") return {g.LoadRanges(parts, of), of};
    return g.LoadRangesWithLengths(parts, of, channel_rows ? -1 : -2);
  }

  absl::Status Run() {
    GraphBuilder g;
    const Value q = g.Input("q", kF32, {kBatch, kHeads, kQueries, kSize});
    std::vector<float> q_data;
    for (int64_t i = 0; i < kBatch * kHeads * kQueries * kSize; ++i) {
      q_data.push_back(static_cast<float>(std::cos(0.9 * static_cast<double>(i))));
    }
    data_.assign(1, {"q", q_data});
    ranges_.clear();
    const bool channel_rows = GetParam() == Form::kChannelRows;
    const auto [k, lengths] = Add(g, "k", k_, 0, kSize, channel_rows);
    const Value v = Add(g, "v", v_, 1, kValueSize, false).first;
    if (GetParam() == Form::kDirect) {
      g.Output("o",
               g.ScaledDotProductAttention(
                    q, k, v,
                    {.scale = 1.f, .bottom_right = true, .right_window = 0, .kv_lengths = lengths})
                   .first);
    } else {
      const Value scores = g.MatMul(q, k, {.transpose_b = !channel_rows});
      const Value probs = g.SoftMax(scores, {.lengths = lengths});
      g.Output("o", GetParam() == Form::kProbsSecond
                        ? g.MatMul(v, probs, {.transpose_a = true, .transpose_b = true})
                        : g.MatMul(probs, v));
    }
    KVANT_ASSIGN_OR_RETURN(const Graph graph, std::move(g).Build());
    KVANT_ASSIGN_OR_RETURN(const Engine engine, Engine::Create({.backends = {"oracle"}}));
    KVANT_ASSIGN_OR_RETURN(const CompiledGraph compiled, engine.Compile(graph));
    std::vector<ConstTensor> inputs;
    for (const TensorId id : graph.inputs()) {
      const std::string& name = graph.tensor(id).name;
      for (const auto& [of, ranges] : ranges_) {
        if (of == name) inputs.emplace_back(ranges.data(), ranges.size() * 4);
      }
      for (const auto& [of, data] : data_) {
        if (of == name) inputs.emplace_back(data.data(), data.size() * 4);
      }
    }
    return compiled.Execute(Stream(engine), inputs, {Tensor{output_.data(), output_.size() * 4}});
  }

  double Expected(int64_t n, int64_t h, int64_t i, int64_t d) const {
    const std::vector<int64_t> k = Columns(k_, n), v = Columns(v_, n);
    const auto columns = static_cast<int64_t>(k.size());
    double sum = 0, weighted = 0;
    for (int64_t c = 0; c < columns; ++c) {
      if (GetParam() == Form::kDirect && c > i + columns - kQueries) continue;
      double score = 0;
      for (int64_t e = 0; e < kSize; ++e) {
        const int64_t at = ((n * kHeads + h) * kQueries + i) * kSize + e;
        score += data_[0].second[at] * At(0, n, h, k[c], e);
      }
      sum += std::exp(score);
      weighted += std::exp(score) * At(1, n, h, v[c], d);
    }
    return sum == 0 ? 0 : weighted / sum;
  }

  Side k_, v_;
  std::vector<std::pair<std::string, std::vector<int32_t>>> ranges_;
  std::vector<std::pair<std::string, std::vector<float>>> data_;
  std::vector<float> output_ = std::vector<float>(kBatch * kHeads * kQueries * kValueSize, 42.f);
};

TEST_P(OracleRangesTest, IsAttentionOverTheTokensThatExist) {
  const absl::Status done = Run();
  ASSERT_TRUE(done.ok()) << done;
  for (int64_t x = 0; x < kBatch * kHeads * kQueries * kValueSize; ++x) {
    const bool second = GetParam() == Form::kProbsSecond;  // O^T
    const int64_t inner = x % (kQueries * kValueSize), head = x / (kQueries * kValueSize);
    const int64_t i = second ? inner % kQueries : inner / kValueSize;
    const int64_t d = second ? inner / kQueries : inner % kValueSize;
    EXPECT_NEAR(output_[x], Expected(head / kHeads, head % kHeads, i, d), 1e-6) << x;
  }
}

TEST_P(OracleRangesTest, RefusesRangesThatDoNotFit) {
  Range& last = v_.ranges[1].back();
  const Range fine = last;
  for (const auto& [bad, why] : std::vector<std::pair<Range, std::string>>{
           {{v_.capacities.back(), fine.tokens}, "in row 1 is"},
           {{0, v_.capacities.back() + 1}, "there is room for"},
           {{0, -1}, "is -1 tokens from token 0 on"}}) {
    last = bad;
    const absl::Status status = Run();
    EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(why));
    EXPECT_EQ(output_, std::vector<float>(output_.size(), 42.f));
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, OracleRangesTest,
                         ::testing::Values(Form::kTokenRows, Form::kChannelRows, Form::kProbsSecond,
                                           Form::kSharedByBatch, Form::kDirect));

}  // namespace
}  // namespace kvant
