// Codes of queries, keys, probabilities and values with one scale each are multiplied as whole
// numbers, exactly, and probabilities are rounded to the very code: judged by f64 loops that know
// where a probability is so close to the middle of two codes that f32 may choose either.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/tests/backends/attention/harness.h"
#include "kvant/tests/backends/attention/judge.h"

namespace kvant::cpu {
namespace {

struct Codes {
  DataType type;
  int64_t zero_point;
  float scale;
};

struct Quantized {
  Codes q{kU8, 120, 0.02f}, k{kS8, 0, 0.03f}, v{kU8, 131, 0.011f};
  FakeQuantize probs{kU8, 1.f / 255, 0};
  std::optional<FakeQuantize> output = std::nullopt;
  bool sinks = false;
  int64_t low_tokens = 0;  // the first, whose scores are far below those of the others
};

Quantization Static(const Codes& codes) {
  Quantization how;
  how.static_scales = {codes.scale};
  if (codes.zero_point != 0) how.static_zps = {codes.zero_point};
  return how;
}

// Rows, tokens and channels differ; a row's largest score is at another token than its neighbour's.
Case Make(const Shape& shape, const Quantized& how) {
  Case c(shape);
  const auto add = [&c](const Codes& codes, const Dims5& dims, double spread) {
    const double low = static_cast<double>(LowestOf(codes.type));
    const double high = static_cast<double>(HighestOf(codes.type));
    return c.AddDense(codes.type, dims, [&, low, high, spread](const Dims5& p) {
      const double at = static_cast<double>(codes.zero_point) +
                        spread * (high - low) * c.Random(-0.5, 0.55) +
                        static_cast<double>((p[1] + p[3]) % 3);
      return std::min(std::max(std::floor(at), low), high);
    });
  };
  c.spec.q = add(how.q, {shape.b0, shape.b1, shape.ratio, shape.q_len, shape.d}, 0.5);
  c.spec.q_quantization = Static(how.q);
  c.spec.k = {
      {add(how.k, {shape.b0, shape.b1, 1, shape.kv_len, shape.d}, 0.9), Static(how.k), {}, {}}};
  c.spec.v = {
      {add(how.v, {shape.b0, shape.b1, 1, shape.kv_len, shape.dv}, 1), Static(how.v), {}, {}}};
  c.AddScale();
  ScoreStep mask{.kind = ScoreStep::Kind::kAdd};
  mask.operand.view = c.AddDense(kF32, {shape.b0, 1, 1, 1, shape.kv_len}, [&](const Dims5& p) {
    const double random = c.Random(-1, 1);
    return p[4] < how.low_tokens ? random - 100 : (p[0] + p[4]) % 5 == 4 ? -1e4 : random;
  });
  c.spec.steps.push_back(mask);
  if (how.sinks) {
    c.spec.sinks = c.AddDense(kF32, {1, shape.b1, 1, 1, 1},
                              [](const Dims5& p) { return 0.5 + static_cast<double>(p[1]); });
  }
  c.spec.probs_quantization = how.probs;
  c.spec.output_quantization = how.output;
  if (how.output) {
    const Dims5 dims{shape.b0, shape.b1, shape.ratio, shape.q_len, shape.dv};
    c.outputs.clear();
    c.spec.output = c.AddOutput(how.output->type, dims, Dense(dims));
  }
  return c;
}

// Of an element: the value, and how far codes that f32 may choose otherwise take it from there.
struct Expected {
  double value, slack;
};

class Loops {
 public:
  Loops(const Case& c, const Quantized& how) : c_(c), how_(how) {}

  std::vector<Expected> Row(const Dims5& p) const {
    const Shape& s = c_.shape;
    std::vector<double> scores;
    double most = -std::numeric_limits<double>::infinity();
    for (int64_t t = 0; t < s.kv_len; ++t) {
      double sum = 0;
      for (int64_t d = 0; d < s.d; ++d) {
        sum += Value(c_.spec.q, {p[0], p[1], p[2], p[3], d}, how_.q) *
               Value(c_.spec.k[0].data, {p[0], p[1], 0, t, d}, how_.k);
      }
      sum /= std::sqrt(static_cast<double>(s.d));
      scores.push_back(sum + Read(c_.spec.steps[1].operand.view, {p[0], 0, 0, 0, t}));
      most = std::max(most, scores.back());
    }
    double total = 0;
    if (how_.sinks) total = std::exp(Read(c_.spec.sinks, {0, p[1], 0, 0, 0}) - most);
    for (double& score : scores) total += score = std::exp(score - most);
    const double low = static_cast<double>(LowestOf(how_.probs.type));
    const double high = static_cast<double>(HighestOf(how_.probs.type));
    std::vector<Expected> row(static_cast<size_t>(s.dv));
    for (int64_t t = 0; t < s.kv_len; ++t) {
      const double quotient = scores[t] / total / double{how_.probs.scale};
      const double code = std::nearbyint(quotient);
      const double kept =
          std::min(std::max(code + static_cast<double>(how_.probs.zero_point), low), high);
      const double probability =
          (kept - static_cast<double>(how_.probs.zero_point)) * double{how_.probs.scale};
      const bool either = std::abs(std::abs(quotient - code) - 0.5) < 3e-5 * (1 + quotient);
      for (int64_t d = 0; d < s.dv; ++d) {
        const double v = Value(c_.spec.v[0].data, {p[0], p[1], 0, t, d}, how_.v);
        row[d].value += probability * v;
        if (either) row[d].slack += std::abs(v) * double{how_.probs.scale};
      }
    }
    return row;
  }

 private:
  double Read(const View& view, const Dims5& p) const {
    return LoadElement(view.type, c_.inputs[view.port].data(), IndexOf(view, p));
  }
  double Value(const View& view, const Dims5& p, const Codes& codes) const {
    return (Read(view, p) - static_cast<double>(codes.zero_point)) * double{codes.scale};
  }

  const Case& c_;
  const Quantized& how_;
};

void Check(const Shape& shape, const Quantized& how) {
  Case c = Make(shape, how);
  SCOPED_TRACE(testing::Message() << shape.q_len << " queries, " << shape.kv_len << " tokens, "
                                  << shape.d << " channels");
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    SCOPED_TRACE(kernels->name);
    const absl::StatusOr<std::unique_ptr<Executable>> compiled = CompileAttention(c.spec, *kernels);
    ASSERT_TRUE(compiled.ok()) << compiled.status();
    const std::string kernel = (*compiled)->kernel();
    EXPECT_EQ((*compiled)->rounding(), 0) << kernel;
    const auto has_bytes = [](const Codes& codes) {
      return BitsOf(codes.type) == 8 && codes.zero_point <= LowestOf(codes.type) + 256 &&
             codes.zero_point >= HighestOf(codes.type) - 256;
    };
    if (kernels->bytes != nullptr && has_bytes(how.k) && has_bytes(how.v) &&
        how.probs.scale == 1.f / 255) {
      EXPECT_THAT(kernel, testing::HasSubstr("integer products of tiles"));
    }
    EXPECT_THAT(kernel, testing::HasSubstr(shape.kv_len > 10000 ? "scores twice" : "scores kept"));
    ASSERT_TRUE(c.Run(*kernels, 2).ok());
    int64_t seen = 0;
    ForEachPosition({shape.b0, shape.b1, shape.ratio, shape.q_len, 1}, [&](Dims5 p) {
      if (testing::Test::HasFailure() || seen++ % (shape.q_len > 40 ? 7 : 1) != 0) return;
      const std::vector<Expected> row = Loops(c, how).Row(p);
      for (p[4] = 0; p[4] < shape.dv; ++p[4]) {
        const View& o = c.spec.output;
        const double got = LoadElement(o.type, c.outputs[o.port].data(), IndexOf(o, p));
        const auto [value, slack] = row[p[4]];
        if (how.output) {
          // Exactly 0, which f64 is not of sums of fractions.
          if (std::abs(value) < 1e-9) continue;
          const double quotient = value / double{how.output->scale};
          const double least = static_cast<double>(LowestOf(o.type));
          const double most = static_cast<double>(HighestOf(o.type));
          const double code =
              std::nearbyint(quotient) + static_cast<double>(how.output->zero_point);
          const double room = slack / double{how.output->scale} + 1e-3;
          const bool either = std::abs(std::abs(quotient - std::nearbyint(quotient)) - 0.5) < room;
          ASSERT_NEAR(got, std::min(std::max(code, least), most), either ? std::ceil(room) : 0)
              << testing::PrintToString(p);
        } else {
          ASSERT_NEAR(got, value, slack + 2e-6 * (1 + std::abs(value)))
              << testing::PrintToString(p);
        }
      }
    });
    if (testing::Test::HasFailure()) return;
  }
}

TEST(WholeNumbers, ShapesOfEveryKindOfProduct) {
  for (const auto& [q_len, kv_len] : {std::pair<int64_t, int64_t>{1, 1},
                                      {1, 333},
                                      {2, 130},
                                      {19, 65},
                                      {40, 197},
                                      {100, 64},
                                      {130, 300},
                                      {300, 257}}) {
    Check({.q_len = q_len, .kv_len = kv_len, .d = 40, .dv = 24}, {});
    Check({.b0 = 1, .ratio = 1, .q_len = q_len, .kv_len = kv_len, .d = 33, .dv = 17}, {});
  }
}

TEST(WholeNumbers, TypesAndZeroPoints) {
  for (const Codes& q :
       {Codes{kU8, 0, 0.02f}, {kU8, 255, 0.02f}, {kS8, -128, 0.5f}, {kS8, 3, 1e-3f}}) {
    for (const Codes& k : {Codes{kU8, 7, 0.02f},
                           {kS8, 0, 2e-3f},
                           {kS8, 127, 0.01f},
                           {kU4, 15, 0.3f},
                           {kS4, -3, 0.2f},
                           {kU2, 1, 0.9f}}) {
      Check({.b0 = 1, .q_len = 3, .kv_len = 140, .d = 32, .dv = 32}, {.q = q, .k = k});
      Check({.b0 = 1, .q_len = 70, .kv_len = 140, .d = 32, .dv = 32}, {.q = q, .k = k, .v = k});
    }
  }
}

// Powers of two, which queries of bf16 would take.
TEST(WholeNumbers, ScalesThatArePowersOfTwo) {
  for (const float scale : {0x1p-5f, 0x1p-3f, 1.f}) {
    for (const int64_t q_len : {2, 70}) {
      Check({.b0 = 1, .q_len = q_len, .kv_len = 140, .d = 64, .dv = 32},
            {.q = {kU8, 120, scale}, .k = {kS8, 0, 0x1p-8f}});
    }
  }
}

// Beyond 9 bits they are no whole numbers of bf16.
TEST(WholeNumbers, ZeroPointsBeyondTheCodes) {
  for (const int64_t far : {-100, -1, 256, 257, 400, 70000}) {
    Quantized how;
    how.k.zero_point = far;
    how.k.scale = 1e-3f;
    how.v.zero_point = far;
    Check({.b0 = 1, .q_len = 3, .kv_len = 140, .d = 32, .dv = 32}, how);
    Check({.b0 = 1, .q_len = 70, .kv_len = 140, .d = 32, .dv = 32}, how);
  }
}

TEST(WholeNumbers, Probabilities) {
  for (const FakeQuantize& probs : {FakeQuantize{kS8, 1.f / 255, -128},
                                    {kS8, 1.f / 127, 0},
                                    {kU8, 1.f / 512, 3},
                                    {kU8, 0.02f, 250},
                                    {kU8, 1.f / 255, 255},
                                    {kU8, 1e-33f, 0},
                                    {kU8, 1e33f, 0}}) {
    for (const bool sinks : {false, true}) {
      Check({.q_len = 5, .kv_len = 140}, {.probs = probs, .sinks = sinks});
      Check({.q_len = 90, .kv_len = 200}, {.probs = probs, .sinks = sinks});
    }
  }
}

TEST(WholeNumbers, Outputs) {
  for (const FakeQuantize& output : {FakeQuantize{kU8, 0.01f, 100},
                                     {kS8, 0.003f, -7},
                                     {kU8, 0.02f, 40000},
                                     {kS8, 1e-36f, 0},
                                     {kU8, 0.01f, -300}}) {
    for (const int64_t dv : {1, 15, 40, 128}) {
      Check({.q_len = 2, .kv_len = 70, .dv = dv}, {.output = output});
      Check({.b0 = 1, .q_len = 100, .kv_len = 70, .dv = dv}, {.output = output});
    }
  }
}

// Channels that all are the same byte.
TEST(WholeNumbers, ChannelsThatAreBroadcast) {
  for (const bool keys : {true, false}) {
    Case c = Make({.b0 = 1, .q_len = 5, .kv_len = 30, .d = 16, .dv = 16}, {});
    View& view = (keys ? c.spec.k : c.spec.v)[0].data;
    view = c.AddInput(view.type, {1, 2, 1, 30, 16}, {30, 30, 30, 1, 0},
                      [](const Dims5& p) { return static_cast<double>(100 + p[3]); });
    c.Check(1e-2);
  }
}

// Tiles of tokens before the highest score.
TEST(WholeNumbers, LowScoresFirst) {
  for (const int64_t low : {3, 128, 200, 299, 300}) {
    Check({.q_len = 2, .kv_len = 300}, {.low_tokens = low});
    Check({.b0 = 1, .q_len = 80, .kv_len = 300}, {.low_tokens = low});
  }
}

// Wherever tokens lie. A wrong token would be off by far more than a code of one probability.
TEST(WholeNumbers, LayoutsSegmentsAndLengths) {
  using Order = Format::Order;
  for (const Order order : {Order::kTokenMajor, Order::kByToken, Order::kPadded,
                            Order::kChannelMajor, Order::kInterleaved}) {
    for (const std::vector<int64_t>& tokens : {std::vector<int64_t>{37}, {5, 32}, {20, 1, 16}}) {
      for (const int64_t q_len : {1, 9, 150}) {
        for (const bool alike : {true, false}) {
          Case c({.q_len = q_len, .kv_len = 37, .d = 20, .dv = 12});
          const Codes codes{kU8, 120, 0.02f};
          c.spec.q = c.AddDense(kU8, {2, 2, 3, q_len, 20},
                                [&](const Dims5&) { return std::floor(c.Random(60, 200)); });
          c.spec.q_quantization = Static(codes);
          c.SetK({.type = kS8, .order = order}, tokens);
          c.SetV({.type = kU8, .order = order}, tokens);
          for (KvSegment& segment : c.spec.k) segment.quantization = Static({kS8, -5, 0.01f});
          for (KvSegment& segment : c.spec.v) segment.quantization = Static({kU8, 100, 0.01f});
          if (!alike) c.spec.v.back().quantization = Static({kU8, 30, 0.02f});
          c.AddScale();
          c.spec.probs_quantization = FakeQuantize{kU8, 1.f / 255, 0};
          if (tokens.size() == 1) {
            const double lengths[] = {23, 37};
            c.spec.kv_lengths =
                c.AddDense(kS32, {2, 1, 1, 1, 1}, [&](const Dims5& p) { return lengths[p[0]]; });
          }
          c.Check(alike ? 8e-3 : 2e-2);  // one probability may have the next code
          if (HasFailure()) return;
        }
      }
    }
  }
}

// More tokens than a row tile keeps the scores of: these are computed twice.
TEST(WholeNumbers, ScoresThatAreNotKept) {
  const Shape shape{.b0 = 1, .b1 = 1, .ratio = 1, .q_len = 70, .kv_len = 20000, .d = 8, .dv = 8};
  Quantized how;
  how.probs.scale = 1e-5f;
  Check(shape, how);
}

}  // namespace
}  // namespace kvant::cpu
