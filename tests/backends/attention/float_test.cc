// Attention over float caches, and in bf16 where the graph allows it, against f64 loops.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "kvant/backends/cpu/attention_plan.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"
#include "kvant/tests/backends/attention/harness.h"

namespace kvant::cpu {
namespace {

constexpr DataType kFloatTypes[] = {kF32, kF16, kBF16, kF8E4M3, kF8E5M2};
constexpr float kNegInf = -std::numeric_limits<float>::infinity();
// Probabilities and V rounded to bf16, for values of about 1.
constexpr double kBF16Tolerance = 1.5e-2;

void AddCausal(Case& c) {
  ScoreStep band{
      .kind = ScoreStep::Kind::kBand, .right = 0, .alignment = ScoreStep::Alignment::kBottomRight};
  band.operand.constant = kNegInf;
  c.spec.steps.push_back(band);
}

TEST(CpuFloatAttention, FewRowsOfEveryTypeAndHeadSize) {
  for (DataType type : kFloatTypes) {
    for (int64_t d : {1, 15, 16, 24, 80, 128}) {
      for (int64_t ratio : {1, 2, 3, 4, 5, 8, 16, 17}) {
        SCOPED_TRACE(testing::Message() << DataTypeName(type) << " " << d << " " << ratio);
        Plain({.b0 = 1, .ratio = ratio, .q_len = 1, .kv_len = 83, .d = d, .dv = d + 1},
              {.type = type}, {.type = type})
            .Check();
        if (HasFailure()) return;
      }
    }
  }
}

TEST(CpuFloatAttention, FewRowsOfEveryLayout) {
  using Order = Format::Order;
  const std::vector<Order> orders = {Order::kTokenMajor, Order::kChannelMajor, Order::kPadded,
                                     Order::kInterleaved, Order::kByToken};
  for (Order k : orders) {
    for (Order v : orders) {
      for (DataType type : {kF32, kF16, kF8E4M3}) {
        SCOPED_TRACE(testing::Message() << static_cast<int>(k) << " " << static_cast<int>(v));
        Plain({.ratio = 2, .q_len = 2, .kv_len = 131}, {.type = type, .order = k},
              {.type = type, .order = v})
            .Check();
        if (HasFailure()) return;
      }
    }
  }
}

// Some tiles hold rows as stored beside dequantized ones, cut at any token.
TEST(CpuFloatAttention, FewRowsOverSegments) {
  for (int64_t cut : {1, 7, 63, 64, 65, 129}) {
    for (DataType recent : kFloatTypes) {
      Case c = Plain({.b0 = 1, .kv_len = 200}, {}, {});
      c.SetK({.type = kU4, .group = {1, 1, 1, 1, 8}, .scales = kF16}, {cut, 200 - cut});
      c.spec.k[1] = c.MakeSegment({.type = recent}, 200 - cut, 40);
      c.SetV({.type = recent}, {200 - cut, cut});
      c.spec.v[1] =
          c.MakeSegment({.type = kS8, .group = {1, 1, 1, 1, 20}, .scales = kF32}, cut, 40);
      AddCausal(c);
      SCOPED_TRACE(testing::Message() << cut << " " << DataTypeName(recent));
      c.Check();
      if (HasFailure()) return;
    }
  }
}

TEST(CpuFloatAttention, ManyRowsInBF16) {
  const Format formats[] = {{.type = kF32},
                            {.type = kF16, .order = Format::Order::kChannelMajor},
                            {.type = kBF16, .order = Format::Order::kPadded},
                            {.type = kU4, .group = {1, 1, 1, 1, 1}, .scales = kF16},
                            {.type = kS8, .group = {1, 1, 1, 0, 1}, .scales = kF32}};
  for (const Format& format : formats) {
    for (FpMath fpmath : {FpMath::kBF16, FpMath::kAny}) {
      for (int64_t d : {1, 64, 65}) {
        Case c =
            Plain({.b0 = 1, .b1 = 1, .ratio = 2, .q_len = 23, .kv_len = 133, .d = d, .dv = d + 2},
                  format, format);
        c.spec.fpmath = fpmath;
        c.spec.apply_to_int = true;
        AddCausal(c);
        SCOPED_TRACE(testing::Message() << DataTypeName(format.type) << " " << d);
        c.Check(kBF16Tolerance);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(CpuFloatAttention, OnlyThePermissionMakesItBF16) {
  const bool has_pairs = HighestKernels().pairs != nullptr;
  const auto products = [](const Case& c) {
    return Plan(c.spec, HighestKernels()).problem().products;
  };
  for (DataType type : {kF16, kBF16, kU4}) {
    Case c = Plain({.q_len = 64, .d = 64, .dv = 64}, {.type = type}, {.type = type});
    for (FpMath fpmath : {FpMath::kStrict, FpMath::kF16, FpMath::kTF32}) {
      c.spec.fpmath = fpmath;
      c.spec.apply_to_int = true;
      EXPECT_EQ(products(c), Products::kTiles) << DataTypeName(type);
    }
    c.spec.fpmath = FpMath::kBF16;
    EXPECT_EQ(products(c), has_pairs ? Products::kPairs : Products::kTiles);
    c.spec.apply_to_int = false;
    EXPECT_EQ(products(c), has_pairs && type != kU4 ? Products::kPairs : Products::kTiles);
  }
}

// Tensors that are bf16 need no permission: only probabilities are rounded, to twice the bits.
TEST(CpuFloatAttention, TensorsInBF16AreMultipliedAsTheyAre) {
  const bool splits = HighestKernels().pairs != nullptr;
  const auto products = [](const Case& c) {
    return Plan(c.spec, HighestKernels()).problem().products;
  };
  const Format bf16{.type = kBF16}, by_token{.type = kBF16, .order = Format::Order::kByToken};
  const Format channels{.type = kBF16, .order = Format::Order::kChannelMajor};
  for (int64_t q_len : {17, 40, 300}) {
    for (int64_t d : {5, 64, 128}) {
      for (double largest : {1.0, 30.0}) {
        for (const auto& [k, v] : {std::pair(bf16, bf16), {channels, by_token}}) {
          Case c = Plain(
              {.b0 = 1, .b1 = 2, .ratio = 2, .q_len = q_len, .kv_len = 333, .d = d, .dv = d + 3}, k,
              v);
          c.SetQ(kBF16);
          for (int64_t i = 0; i < 4 * q_len * d; i += 7) {
            void* const q = c.inputs[c.spec.q.port].data();
            StoreElement(kBF16, q, i, largest * LoadElement(kBF16, q, i));
          }
          if (q_len > 17) AddCausal(c);
          SCOPED_TRACE(testing::Message() << q_len << " " << d << " " << largest);
          EXPECT_EQ(products(c), splits ? Products::kPairs : Products::kTiles);
          const double rounding = (*CompileAttention(c.spec, HighestKernels()))->rounding();
          EXPECT_EQ(rounding, splits ? kRoundingOfSplitProbs : 0);
          c.Check();
          if (HasFailure()) return;
        }
      }
    }
  }
  for (int64_t q_len : {3, 40}) {
    Case features = Plain({.b0 = 2, .ratio = 3, .q_len = q_len, .kv_len = 200}, bf16, bf16);
    features.SetQ(kBF16);
    features.AddStats();
    features.spec.sinks = features.AddDense(kF32, {1, 2, 3, 1, 1},
                                            [](const Dims5& p) { return 1.5 * (p[1] - p[2]); });
    features.spec.kv_lengths =
        features.AddDense(kS32, {2, 1, 1, 1, 1}, [](const Dims5& p) { return 200 - 67 * p[0]; });
    AddCausal(features);
    EXPECT_EQ(products(features), q_len == 3 ? Products::kStoredRows
                                  : splits   ? Products::kPairs
                                             : Products::kTiles);
    features.Check();
  }
  // Keys that few queries multiply as they are stored, too; in dwords.
  const bool stores = splits && HighestKernels().pairs->qk_stored;
  for (int64_t q_len : {1, 3, 8}) {
    for (int64_t d : {5, 6, 64, 128}) {
      for (const Format& v : {bf16, Format{.type = kF16}}) {
        Case c =
            Plain({.b0 = 2, .b1 = 2, .ratio = 2, .q_len = q_len, .kv_len = 333, .d = d}, bf16, v);
        c.SetQ(kBF16);
        AddCausal(c);
        SCOPED_TRACE(testing::Message() << q_len << " " << d);
        const Plan plan(c.spec, HighestKernels());
        EXPECT_EQ(absl::StrContains(plan.ToString(), "K by bf16 products,"), stores && d % 2 == 0);
        EXPECT_EQ(plan.rounding(), 0);
        c.Check();
        if (HasFailure()) return;
      }
    }
  }
  // One that is not is enough.
  const Format f16{.type = kF16};
  Case keys = Plain({.q_len = 40}, f16, bf16), values = Plain({.q_len = 40}, bf16, f16);
  Case queries = Plain({.q_len = 40}, bf16, bf16), rotated = Plain({.q_len = 40}, bf16, bf16);
  for (Case* c : {&keys, &values, &rotated}) c->SetQ(kBF16);
  rotated.spec.q_hadamard = 64;
  for (const Case* c : {&keys, &values, &queries, &rotated}) {
    EXPECT_EQ(products(*c), Products::kTiles);
  }
}

// Probabilities that are rounded to other integers need their scores twice, scaled alike.
TEST(CpuFloatAttention, RoundedProbabilitiesOfQueriesInBF16) {
  for (FpMath fpmath : {FpMath::kStrict, FpMath::kBF16}) {
    for (int64_t q_len : {4, 40}) {
      for (int64_t d : {64, 128}) {
        Case c = Plain({.b0 = 1, .q_len = q_len, .kv_len = 300, .d = d, .dv = 32}, {.type = kBF16},
                       {.type = kBF16});
        c.SetQ(kBF16);
        c.spec.fpmath = fpmath;
        c.spec.probs_quantization = FakeQuantize{kU8, 1.f / 2000, 0};
        if (d == 64) AddCausal(c);
        SCOPED_TRACE(testing::Message() << d << " " << q_len);
        c.Check(1e-2);  // codes may be off by one
        if (HasFailure()) return;
      }
    }
  }
}

// Products of bf16 are exact in f32, so the scale must not be rounded into the queries. Of one key,
// statistics are scores: as softmax scales them, of either sign, and before a step that comes
// after.
// Factors that differ by row, of which the last is a power of two; and 0, beside columns that do
// not exist.
TEST(CpuFloatAttention, FactorsOfRowsInBF16) {
  for (const int64_t q_len : {2, 100}) {
    for (const bool zero : {false, true}) {
      for (const DataType v : {kBF16, kF32}) {
        Case c({.b0 = 1, .b1 = 2, .ratio = 2, .q_len = q_len, .kv_len = 300, .d = 64, .dv = 64});
        c.SetQ(kBF16);
        c.SetK({.type = kBF16});
        c.SetV({.type = v});
        ScoreStep factor;
        factor.kind = ScoreStep::Kind::kMultiply;
        factor.operand.view = c.AddDense(kF32, {1, 1, 1, q_len, 1}, [&](const Dims5& p) {
          return zero ? 0 : p[3] + 1 == q_len ? 2 : 1.1 + 0.03 * static_cast<double>(p[3]);
        });
        ScoreStep band;
        band.kind = ScoreStep::Kind::kBand;
        band.right = 100;
        band.operand.constant = -std::numeric_limits<float>::infinity();
        if (!zero) c.spec.steps = {factor, band};
        if (zero) c.spec.steps = {factor};
        c.AddStats();
        SCOPED_TRACE(testing::Message() << q_len << zero << DataTypeName(v));
        c.Check(3e-4);
        if (HasFailure()) return;
      }
    }
  }
}

// Rotated ones are no longer numbers of bf16.
TEST(CpuFloatAttention, RotatedQueriesInBF16) {
  for (const int64_t q_len : {2, 100}) {
    Case c({.b0 = 1, .b1 = 2, .ratio = 2, .q_len = q_len, .kv_len = 100, .d = 64, .dv = 64});
    c.SetQ(kBF16);
    c.SetK({.type = kBF16});
    c.SetV({.type = kBF16});
    c.spec.q_hadamard = 64;
    c.AddStats();
    c.Check(2e-4);
  }
}

TEST(CpuFloatAttention, QueriesInBF16AreMultipliedAsTheyAre) {
  const Engine engine = Engine::Create({.backends = {"cpu"}}).value();
  for (const int64_t d : {64, 80, 128}) {
    for (const float scale : {1 / std::sqrt(static_cast<float>(d)), 0.1f, -0.1f}) {
      for (const bool has_bias : {false, true}) {
        // With a permission and without, by tiles and, of few rows, as stored.
        const int64_t rows = d == 80 ? 8 : 100;
        GraphBuilder g({.fpmath = scale == 0.1f ? FpMath::kStrict : FpMath::kBF16});
        const Value q = g.Input("q", kBF16, {1, 1, rows, d});
        const Value k = g.Input("k", kBF16, {1, 1, 1, d}), v = g.Input("v", kBF16, {1, 1, 1, d});
        GraphBuilder::AttentionOptions options{.scale = scale, .stats = true};
        if (has_bias) options.bias = g.Input("bias", kF32, {1, 1, rows, 1});
        const auto [o, stats] = g.ScaledDotProductAttention(q, k, v, options);
        g.Output("o", o);
        g.Output("stats", *stats);
        const CompiledGraph compiled = engine.Compile(std::move(g).Build().value()).value();
        std::vector<uint16_t> queries(rows * d), key(d), out(rows * d);
        for (int64_t i = 0; i < rows * d; ++i) {
          queries[i] = F32ToBF16(30 * std::sin(0.7f * static_cast<float>(i)));
        }
        for (int64_t i = 0; i < d; ++i) key[i] = F32ToBF16(std::cos(1.3f * static_cast<float>(i)));
        std::vector<float> scores(rows), bias(rows);
        for (int64_t row = 0; row < rows; ++row) bias[row] = 0.25f * static_cast<float>(row % 7);
        std::vector<std::pair<std::string_view, ConstTensor>> inputs = {
            {"q", {queries.data(), queries.size() * 2}},
            {"k", {key.data(), key.size() * 2}},
            {"v", {key.data(), key.size() * 2}}};
        if (has_bias) inputs.push_back({"bias", {bias.data(), bias.size() * 4}});
        ASSERT_TRUE(compiled
                        .Execute(Stream(engine), inputs,
                                 {{"o", {out.data(), out.size() * 2}},
                                  {"stats", {scores.data(), scores.size() * 4}}})
                        .ok());
        for (int64_t row = 0; row < rows; ++row) {
          double score = 0;
          for (int64_t i = 0; i < d; ++i) {
            score += static_cast<double>(BF16ToF32(queries[row * d + i])) * BF16ToF32(key[i]);
          }
          score = score * scale + (has_bias ? bias[row] : 0.f);
          ASSERT_NEAR(scores[row], score, 1e-3) << d << " " << scale << " " << row;
        }
      }
    }
  }
}

TEST(CpuFloatAttention, PlanNamesTheProducts) {
  const auto kernel = [](const Case& c) {
    return (*CompileAttention(c.spec, HighestKernels()))->kernel();
  };
  Case decode = Plain({.q_len = 1}, {.type = kF16}, {.type = kF16});
  EXPECT_NE(kernel(decode).find(HighestKernels().qk_stored ? "K by f32 products"
                                                           : "f32 products of tiles"),
            std::string::npos);
  Case prefill = Plain({.q_len = 64}, {.type = kF16}, {.type = kF16});
  prefill.spec.fpmath = FpMath::kBF16;
  EXPECT_NE(kernel(prefill).find(HighestKernels().pairs ? "bf16 products" : "f32 products"),
            std::string::npos);
}

// A NaN or an infinity in K, V or Q of one head must not be seen in another's output.
TEST(CpuFloatAttention, NotANumberStaysInItsHead) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    for (FpMath fpmath : {FpMath::kStrict, FpMath::kBF16}) {
      for (int64_t q_len : {1, 40}) {
        for (DataType type : {kF32, kF16, kBF16, kF8E5M2}) {
          for (double bad : {std::nan(""), HUGE_VAL}) {
            Case c = Plain({.b0 = 1, .b1 = 3, .ratio = 1, .q_len = q_len, .kv_len = 150},
                           {.type = type}, {.type = type});
            if (type == kBF16) c.SetQ(kBF16);
            c.spec.fpmath = fpmath;
            const auto spoil = [&](const View& view, int64_t head) {
              const int64_t at = IndexOf(view, {0, head, 0, view.dims[3] - 1, 39});
              StoreElement(view.type, c.inputs[view.port].data(), at, bad);
            };
            spoil(c.spec.k[0].data, 0);
            spoil(c.spec.v[0].data, 2);
            ASSERT_TRUE(c.Run(*kernels, 2).ok());
            const float* out = static_cast<const float*>(c.outputs[0].data());
            const auto finite = [&](int64_t head, int64_t channel) {
              return std::isfinite(out[head * q_len * 40 + channel]);
            };
            SCOPED_TRACE(testing::Message() << kernels->name << " " << DataTypeName(type));
            EXPECT_FALSE(finite(0, 0) && std::isnan(bad));
            for (int64_t e = 0; e < q_len * 40; ++e) EXPECT_TRUE(finite(1, e)) << e;
            EXPECT_TRUE(finite(2, 0));
            EXPECT_FALSE(finite(2, 39));
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

// A channel of the queries that the factor would take beyond f32, where keys are 0.
TEST(CpuFloatAttention, FactorsOfLargeQueries) {
  constexpr int64_t kSize = 32, kLarge = 3;
  for (const DataType type : {kF32, kS8}) {
    for (const int64_t rows : {1, 40}) {
      SCOPED_TRACE(testing::Message() << DataTypeName(type) << " " << rows);
      Format k{.type = type};
      if (type == kS8) k.scales = kF32;
      Case c = Plain({.ratio = 1, .q_len = rows, .kv_len = 70, .d = kSize, .dv = kSize}, k,
                     {.type = kF32});
      // All are dense.
      const auto change = [&](const View& view, const std::function<double(int64_t, double)>& to) {
        int64_t n = 1;
        for (const int64_t dim : view.dims) n *= dim;
        void* const data = c.inputs[view.port].data();
        for (int64_t i = 0; i < n; ++i) {
          StoreElement(view.type, data, i, to(i % kSize, LoadElement(view.type, data, i)));
        }
      };
      const KvSegment& keys = c.spec.k[0];
      change(c.spec.q, [](int64_t d, double x) { return d == kLarge ? 1e32 : x; });
      change(keys.data, [](int64_t d, double x) { return d == kLarge ? 0 : x; });
      change(type == kS8 ? keys.quantization->scales : keys.data,
             [](int64_t, double x) { return x * 1e-9; });
      ScoreStep step{.kind = ScoreStep::Kind::kMultiply};
      step.operand.constant = 1e9f;
      c.spec.steps.push_back(step);
      c.Check();
    }
  }
}

// Factors before anything else move into the queries; where that could show, they do not.
TEST(CpuFloatAttention, FactorsOfEveryKind) {
  using Kind = ScoreStep::Kind;
  for (double factor : {0.3, -2.0, 0.0, 1e-20, 1e20}) {
    for (const Dims5& dims : {Dims5{1, 1, 1, 1, 1}, Dims5{1, 2, 3, 1, 1}, Dims5{1, 1, 1, 5, 1},
                              Dims5{1, 1, 1, 1, 67}}) {
      Case c = Plain({.b0 = 1, .q_len = 5, .kv_len = 67}, {}, {});
      ScoreStep step{.kind = factor > 1 ? Kind::kDivide : Kind::kMultiply};
      step.operand.view = c.AddDense(kF32, dims, [&](const Dims5& p) {
        return factor * (1 + static_cast<double>(p[1] + p[2] + p[3] + p[4]) / 128);
      });
      c.spec.steps.push_back(step);
      c.AddScale();
      SCOPED_TRACE(testing::Message() << factor << testing::PrintToString(dims));
      c.AddStats();
      c.Check();
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace kvant::cpu
