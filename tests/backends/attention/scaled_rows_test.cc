// Attention over f8 with scales by channel, in runs of tokens: few rows, of which the queries take
// the scales of keys and what a run sums to those of values.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/tests/backends/attention/harness.h"

namespace kvant::cpu {
namespace {

using Order = Format::Order;

// Runs of so many tokens; 0: of all.
Format ByChannel(DataType type, int64_t run, DataType scales = kF32) {
  return {.type = type, .group = {1, 1, 1, run, 1}, .scales = scales};
}

std::string KernelOf(const Case& c) {
  return (*CompileAttention(c.spec, HighestKernels()))->kernel();
}

// The highest set's kernel does it so, so that what passes here did.
void CheckScaled(Case& c) {
  if (HighestKernels().codes != nullptr) {
    const std::string kernel = KernelOf(c);
    for (const char* side : {"K", "V"}) {
      const std::string said = std::string(side) + " by f32 products (scales by channel";
      EXPECT_NE(kernel.find(said), std::string::npos) << kernel;
    }
  }
  c.Check();
}

TEST(CpuScaledRows, LengthsOfShortRunsAreSaid) {
  const auto kernel_of = [](DataType type, int64_t run) {
    const Format by_channel{.type = type, .group = {1, 1, 1, run, 1}, .scales = kF32};
    return KernelOf(Plain({.q_len = 1, .kv_len = 128}, by_channel, by_channel));
  };
  for (const DataType type : {kF8E4M3, kS8}) {
    const bool said =
        kernel_of(type, 16).find("(scales by channel in runs of 16 tokens)") != std::string::npos;
    EXPECT_EQ(said, HighestKernels().codes != nullptr);
    EXPECT_EQ(kernel_of(type, 64).find("in runs of"), std::string::npos);
  }
}

TEST(CpuScaledRows, EveryRunHeadSizeAndNumberOfRows) {
  for (DataType type : {kF8E4M3, kF8E5M2}) {
    for (int64_t run : {16, 32, 48, 50, 64, 100, 0}) {
      for (int64_t d : {1, 15, 40, 64, 128}) {
        for (int64_t ratio : {1, 3, 4, 8}) {
          SCOPED_TRACE(testing::Message()
                       << DataTypeName(type) << " " << run << " " << d << " " << ratio);
          Case c = Plain({.b0 = 1,
                          .b1 = 3,
                          .ratio = ratio,
                          .q_len = 1,
                          .kv_len = run == 0 ? 131 : 3 * run,
                          .d = d,
                          .dv = d + 1},
                         ByChannel(type, run), ByChannel(type, run, kF16));
          d == 1 ? c.Check() : CheckScaled(c);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(CpuScaledRows, EveryLayout) {
  for (Order order : {Order::kTokenMajor, Order::kPadded, Order::kByToken}) {
    for (bool parameters_by_channel : {false, true}) {
      for (int64_t run : {16, 32, 0}) {
        Format format = ByChannel(kF8E4M3, run);
        format.order = order;
        format.parameters_by_channel = parameters_by_channel;
        SCOPED_TRACE(testing::Message() << static_cast<int>(order) << parameters_by_channel << run);
        Case c = Plain({.b1 = 5, .ratio = 2, .q_len = 2, .kv_len = 640, .d = 64, .dv = 32}, format,
                       format);
        CheckScaled(c);
        if (HasFailure()) return;
      }
    }
  }
}

// Beside other formats, cut at any token.
TEST(CpuScaledRows, BesideOtherSegments) {
  for (int64_t cut : {32, 64, 160}) {
    Case c = Plain({.b0 = 1, .kv_len = 200, .d = 64, .dv = 64}, {}, {});
    c.SetK(ByChannel(kF8E4M3, 16), {cut, 200 - cut});
    c.spec.k[1] = c.MakeSegment({.type = kF16}, 200 - cut, 64);
    c.SetV({.type = kU4, .group = {1, 1, 1, 1, 32}, .scales = kF16}, {200 - cut, cut});
    c.spec.v[1] = c.MakeSegment(ByChannel(kF8E5M2, 32), cut, 64);
    SCOPED_TRACE(cut);
    c.Check();
    if (HasFailure()) return;
  }
}

// Where a query times a scale would exceed f32, although the product with the code does not, tiles
// are dequantized; likewise where a scale or a query is not finite, so that it shows where it
// would.
TEST(CpuScaledRows, WhatMayNotBeFinite) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float bad : {std::nanf(""), infinity, 3e38f}) {
    for (int where : {0, 1, 2, 3}) {
      Case c = Plain({.b0 = 2, .b1 = 2, .ratio = 2, .q_len = 1, .kv_len = 96, .d = 32, .dv = 32},
                     ByChannel(kF8E4M3, 32), ByChannel(kF8E4M3, 32));
      const auto& k = c.spec.k[0];
      const auto& v = c.spec.v[0];
      if (where < 3) {
        const int port = where == 0   ? c.spec.q.port
                         : where == 1 ? k.quantization->scales.port
                                      : v.quantization->scales.port;
        // Sums of values are divided only in the end.
        static_cast<float*>(c.inputs[port].data())[40] =
            where == 2 && std::isfinite(bad) ? bad / 100 : bad;
      } else {
        static_cast<uint8_t*>(c.inputs[v.data.port].data())[1000] = 0x7f;
      }
      SCOPED_TRACE(testing::Message() << bad << " " << where);
      CheckScaled(c);
      if (HasFailure()) return;
    }
  }
}

// As above, where numbers are so small that scores are finite all the same.
TEST(CpuScaledRows, QueriesTimesScalesBeyondF32) {
  Case c = Plain({.b0 = 1, .b1 = 1, .ratio = 2, .q_len = 1, .kv_len = 40, .d = 32, .dv = 32},
                 ByChannel(kF8E4M3, 0), {});
  auto* const q = static_cast<float*>(c.inputs[c.spec.q.port].data());
  std::fill_n(q, 2 * 32, 20.f);
  const KvSegment& k = c.spec.k[0];
  static_cast<float*>(c.inputs[k.quantization->scales.port].data())[5] = 3e38f;
  auto* const codes = static_cast<uint8_t*>(c.inputs[k.data.port].data());
  for (int t = 0; t < 40; ++t) codes[t * 32 + 5] = t == 3 ? 1 : 0;
  c.Check();
}

// Products of small probabilities with the numbers have few bits left; with the scales they have
// all.
TEST(CpuScaledRows, ProductsNearTheEndOfF32) {
  Case c = Plain({.b0 = 1, .b1 = 1, .ratio = 2, .q_len = 1, .kv_len = 40, .d = 32, .dv = 32}, {},
                 ByChannel(kF8E5M2, 0));
  auto* const q = static_cast<float*>(c.inputs[c.spec.q.port].data());
  std::fill_n(q, 2 * 32, 0.f);
  const KvSegment& v = c.spec.v[0];
  // 2^-16, but for the first token, which takes the probability and has no values.
  auto* const codes = static_cast<uint8_t*>(c.inputs[v.data.port].data());
  for (int i = 0; i < 40 * 32; ++i) codes[i] = i < 32 ? 0 : 1;
  std::fill_n(static_cast<float*>(c.inputs[v.quantization->scales.port].data()), 32, 1e10f);
  ScoreStep bias;
  bias.kind = ScoreStep::Kind::kAdd;
  bias.operand.view = c.AddDense(kF32, {1, 1, 1, 1, c.shape.kv_len}, [](const Dims5& p) {
    // One has no probability at all.
    return p[4] == 0 ? 85 : p[4] == 7 ? -INFINITY : 0;
  });
  c.spec.steps.push_back(bias);
  const std::vector<double> expected = c.Expected();
  for (int i = 0; const KernelSet* set = KernelsAt(i); ++i) {
    ASSERT_TRUE(c.Run(*set, 1).ok());
    EXPECT_LE(c.RelativeError(expected), 1e-6) << set->name;
  }
}

TEST(CpuScaledRows, ManyRowsAndZeroPointsAreDequantized) {
  // Where there are no products on codes, nothing is said of them.
  const bool has_codes = HighestKernels().codes != nullptr;
  const auto says = [](int64_t ratio, int64_t run, const char* reason) {
    const std::string kernel =
        KernelOf(Plain({.ratio = ratio, .q_len = 1, .kv_len = 64, .d = 64, .dv = 64},
                       ByChannel(kF8E4M3, run), {}));
    return kernel.find(reason) != std::string::npos;
  };
  EXPECT_EQ(says(9, 32, "scales by channel of codes that stand for floats"),
            has_codes && HighestKernels().stored_rows_of_runs >= 9);
  EXPECT_EQ(says(4, 8, "groups of 1 channel and 8 tokens"), has_codes);
}

}  // namespace
}  // namespace kvant::cpu
