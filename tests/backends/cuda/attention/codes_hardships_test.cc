// The kernel on packed codes, on the executor, where magnitudes are hard on it: its error is what
// AttentionPlan::rounding says, and what f32 has by itself.
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/tests/backends/cuda/attention/codes_problem.h"
#include "kvant/tests/common/simt_turn.h"

namespace kvant::cuda {
namespace {

using testing::IsEmpty;

std::string Text(float x) {
  std::ostringstream out;
  out << x;
  return out.str();
}

std::vector<CodesHardships> AllHardships() {
  std::vector<CodesHardships> all;
  const auto add = [&all](const std::string& name, auto set) {
    CodesHardships hard;
    hard.name = name;
    set(hard);
    all.push_back(hard);
  };
  for (float size : {1e-8f, 1e-6f, 1e-5f, 1e-3f, 1.f, 100.f, 1e4f}) {
    const std::string by = " times " + Text(size);
    add("V's scales" + by, [&](auto& x) { x.v_size = size; });
    add("V's scales, some zero groups" + by, [&](auto& x) {
      x.v_size = size;
      x.v_zeros = true;
    });
    add("K's scales" + by, [&](auto& x) { x.k_size = size; });
    add("K's scales, some zero groups" + by, [&](auto& x) {
      x.k_size = size;
      x.k_zeros = true;
    });
    add("queries" + by, [&](auto& x) { x.q_size = size; });
  }
  for (float outlier : {300.f, 1e4f}) {
    const std::string of = ", outliers of " + Text(outlier);
    add("queries" + of, [&](auto& x) { x.q_outlier = outlier; });
    add("queries of 1e-3" + of, [&](auto& x) {
      x.q_outlier = outlier;
      x.q_size = 1e-3f;
    });
    add("V's scales" + of, [&](auto& x) { x.v_outlier = outlier; });
    add("V's scales of 1e-4" + of, [&](auto& x) {
      x.v_outlier = outlier;
      x.v_size = 1e-4f;
    });
    add("K's scales of 1e-4" + of, [&](auto& x) {
      x.k_outlier = outlier;
      x.k_size = 1e-4f;
    });
    add("queries and K's scales of 1e-3" + of, [&](auto& x) {
      x.q_outlier = outlier;
      x.k_outlier = outlier;
      x.k_size = 1e-3f;
    });
  }
  add("a sink", [](auto& x) { x.sink = true; });
  add("a sink, V's scales of 1e-5", [](auto& x) {
    x.sink = true;
    x.v_size = 1e-5f;
  });
  return all;
}

// f16 has no scales beyond 65504, and few below 6e-8.
bool Holds(const CodesSide& side, float size, float outlier) {
  return side.scales != kFloat16 || (size * outlier < 1e5f && size > 1e-5f);
}

// By a failure's name, all that it takes to find it.
void ExpectKept(CodesProblem problem) {
  for (const CodesHardships& hard : AllHardships()) {
    if (!Holds(problem.k, hard.k_size, hard.k_outlier)) continue;
    if (!Holds(problem.v, hard.v_size, hard.v_outlier)) continue;
    if (problem.q == kFloat16 && (hard.q_size < 1e-5f || hard.q_size > 1e4f)) continue;
    // Of real zero points, no code is 0.
    if (problem.k.real_zero_points && (hard.q_outlier != 0 || hard.sink)) continue;
    if (!HasSimtTurn()) continue;
    problem.hard = hard;
    const CodesResult result = Solve(problem);
    ASSERT_EQ(result.refused, "") << problem.Name();
    EXPECT_LE(result.error, (problem.q == kFloat32 ? 2e-5 : 1e-3) + result.own_error)
        << problem.Name() << "; f32's own: " << result.own_error;
    EXPECT_EQ(result.wrong_nan, 0) << problem.Name();
    EXPECT_THAT(result.report.errors, IsEmpty()) << problem.Name();
  }
}

// A NaN is stored as any code is, and goes where its products do.
TEST(CodesNanTest, OfFloatCodes) {
  for (ElementType type : {kFloat8E4M3, kFloat8E5M2}) {
    for (int group : {0, 32}) {
      for (bool in_k : {false, true}) {
        for (bool converts : {false, true}) {
          CodesProblem problem;
          problem.converts_e4m3 = converts;
          problem.k = problem.v = {type, group, kFloat16, kNone};
          problem.hard.k_nan = in_k;
          problem.hard.v_nan = !in_k;
          const CodesResult result = Solve(problem);
          ASSERT_EQ(result.refused, "");
          EXPECT_EQ(result.wrong_nan, 0) << problem.Name();
          EXPECT_LE(result.error, 1e-3) << problem.Name();
        }
      }
    }
  }
}

struct HardFormat {
  const char* name;
  CodesSide k, v;
};

class CodesHardshipsTest : public testing::TestWithParam<HardFormat> {
 protected:
  CodesProblem Problem(ElementType q, ElementType scales) const {
    CodesProblem problem;
    problem.k = GetParam().k;
    problem.v = GetParam().v;
    problem.k.scales = problem.v.scales = scales;
    problem.q = q;
    problem.output = kFloat32;
    problem.kv_heads = 1;
    problem.heads_per_kv = 3;
    return problem;
  }
};

TEST_P(CodesHardshipsTest, HalfQueries) { ExpectKept(Problem(kFloat16, kFloat16)); }
TEST_P(CodesHardshipsTest, BFloatQueries) {
  CodesProblem problem = Problem(kBFloat16, kBFloat16);
  for (CodesSide* side : {&problem.k, &problem.v}) {
    if (side->real_zero_points) side->zero_points = kBFloat16;
  }
  ExpectKept(problem);
}
TEST_P(CodesHardshipsTest, SingleQueries) {
  CodesProblem problem = Problem(kFloat32, kFloat32);
  if (!Solve(problem).refused.empty()) GTEST_SKIP() << Solve(problem).refused;
  ExpectKept(problem);
}

constexpr CodesSide By(ElementType type, int group = 0, ElementType zero_points = kNone) {
  return {type, group, kFloat16, zero_points, zero_points == kFloat16};
}
constexpr CodesSide ByChannel(ElementType type, int tokens, ElementType zero_points = kNone) {
  CodesSide side = By(type, 0, zero_points);
  side.tokens = tokens;
  return side;
}
constexpr HardFormat kFormats[] = {
    {"u4_channel_zp", ByChannel(kUint4, 16, kUint8), By(kUint4, 0, kUint8)},
    {"s8_channel", ByChannel(kInt8, 16), By(kInt8)},
    {"s8_static_channels", ByChannel(kInt8, CodesSide::kAll), ByChannel(kInt8, CodesSide::kAll)},
    {"u2_channel_shift", ByChannel(kUint2, 16, kFloat16), By(kUint2, 32, kFloat16)},
    {"e5m2_channel", ByChannel(kFloat8E5M2, 16), By(kFloat8E5M2)},
    {"u2_g32_zp", By(kUint2, 32, kUint8), By(kUint2, 32, kUint8)},
    {"s4_g16", By(kInt4, 16), By(kInt4, 16)},
    {"s8", By(kInt8), By(kInt8)},
    {"u8_zp", By(kUint8, 0, kUint8), By(kUint8, 0, kUint8)},
    {"s4", By(kInt4), By(kInt4)},
    {"u4_shift", By(kUint4, 0, kFloat16), By(kUint4, 0, kFloat16)},
    {"s8_g32", By(kInt8, 32), By(kInt8, 32)},
    {"u4_g32_zp", By(kUint4, 32, kUint8), By(kUint4, 32, kUint8)},
    {"u4_g32_pzp", By(kUint4, 32, kUint4), By(kUint4, 32, kUint4)},
    {"s4_g64_zp", By(kInt4, 64, kInt8), By(kInt4, 64, kInt8)},
    {"u4_g32_shift", By(kUint4, 32, kFloat16), By(kUint4, 32, kFloat16)},
    {"u2", By(kUint2, 0, kUint8), By(kUint2, 0, kUint8)},
    {"s2", By(kInt2), By(kInt2)},
    {"e4m3", By(kFloat8E4M3), By(kFloat8E4M3)},
    {"e5m2_g32", By(kFloat8E5M2, 32), By(kFloat8E5M2, 32)},
    {"s8_u4_g32_zp", By(kInt8), By(kUint4, 32, kUint8)},
};
INSTANTIATE_TEST_SUITE_P(Formats, CodesHardshipsTest, testing::ValuesIn(kFormats),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace kvant::cuda
