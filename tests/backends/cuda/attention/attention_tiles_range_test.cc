// Tiles: products that a mode permits to be f16 have f16's bits, and not its range; and nothing
// beyond the arrays is read.
#include <cstddef>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/graph/data_type.h"
#include "kvant/tests/backends/attention/harness.h"

namespace kvant::cpu {
namespace {

void Scale(const GuardedBuffer& buffer, float by) {
  auto* values = reinterpret_cast<float*>(buffer.data());
  for (size_t i = 0; i < buffer.bytes() / sizeof(float); ++i) values[i] *= by;
}

// The output of queries, K and V times powers of two.
std::vector<float> Output(float q, float k, float v) {
  Case c = Plain({.q_len = 20, .kv_len = 70, .d = 64, .dv = 64}, {.type = kF32}, {.type = kF32});
  c.spec.fpmath = FpMath::kF16;
  // In the order in which Plain adds them.
  Scale(c.inputs[0], q);
  Scale(c.inputs[1], k);
  Scale(c.inputs[2], v);
  const auto executable = c.CompileForCudaSimt();
  EXPECT_TRUE(executable.ok()) << executable.status();
  EXPECT_TRUE(c.RunOnCudaSimt(**executable).ok());
  const auto* values = reinterpret_cast<const float*>(c.outputs[0].data());
  return {values, values + c.outputs[0].bytes() / sizeof(float)};
}

TEST(AttentionTilesRangeTest, OfPermittedF16) {
  const std::vector<float> plain = Output(1, 1, 1);
  for (float q : {0x1p-27f, 1.f, 0x1p20f}) {
    for (float v : {0x1p-27f, 0x1p20f}) {
      const std::vector<float> scaled = Output(q, 1 / q, v);
      ASSERT_EQ(scaled.size(), plain.size());
      for (size_t i = 0; i < plain.size(); ++i) {
        ASSERT_EQ(scaled[i], plain[i] * v) << "queries times " << q << ", V times " << v;
      }
    }
  }
}

// All weight but this little is on a token whose V is 0.
TEST(AttentionTilesRangeTest, ProbabilitiesBelowF16) {
  const Format f16{.type = kF16};
  for (const double score : {-8., -14., -20.}) {
    Case c = Plain({.q_len = 80, .kv_len = 16, .d = 64, .dv = 64}, f16, f16);
    c.SetQ(kF16);
    const auto fill = [&c](int port, double first, double second, double others, bool all) {
      const GuardedBuffer& buffer = c.inputs[port];
      for (int64_t i = 0; i < static_cast<int64_t>(buffer.bytes()) / 2; ++i) {
        const int64_t token = i / 64 % 16;
        const double value = token == 0 ? first : token == 1 ? second : others;
        StoreElement(kF16, buffer.data(), i, all || i % 64 == 0 ? value : 0);
      }
    };
    fill(c.spec.q.port, 8, 8, 8, /*all=*/false);  // scores are divided by that
    fill(c.spec.k[0].data.port, 0, score, -100, /*all=*/false);
    fill(c.spec.v[0].data.port, 0, 6e4, 0, /*all=*/true);
    const auto executable = c.CompileForCudaSimt();
    ASSERT_TRUE(executable.ok()) << executable.status();
    EXPECT_THAT((*executable)->kernel(), testing::HasSubstr("f16 products of tiles"));
    ASSERT_TRUE(c.RunOnCudaSimt(**executable).ok());
    EXPECT_LT(c.RelativeError(c.Expected()), 1e-3) << score;
  }
}

// Tiles have as many channels as products take, and so more than these heads. What belongs to the
// rest lies beyond the arrays, which end at unreadable pages.
TEST(AttentionTilesRangeTest, ParametersOfChannelsThatAreNot) {
  for (const int64_t d : {8, 24, 40, 72}) {
    for (const Dims5& group :
         {Dims5{1, 1, 1, 64, 1}, Dims5{1, 1, 1, 1, 4}, Dims5{1, 1, 1, 64, 8}}) {
      for (const DataType zero_points : {kUndef, kU8, kF32}) {
        const Format codes{.type = kU8, .group = group, .scales = kF32, .zero_points = zero_points};
        Case c = Plain({.b0 = 1, .b1 = 1, .ratio = 1, .q_len = 4, .kv_len = 64, .d = d, .dv = d},
                       {.type = kF32}, codes);
        SCOPED_TRACE(testing::Message()
                     << "heads of " << d << ", groups of " << group[kRow] << " by " << group[kCol]);
        c.CheckOnCudaSimt();
        Plain({.b0 = 1, .b1 = 1, .ratio = 1, .q_len = 4, .kv_len = 64, .d = d, .dv = d}, codes,
              codes)
            .CheckOnCudaSimt();
      }
    }
  }
}

}  // namespace
}  // namespace kvant::cpu
