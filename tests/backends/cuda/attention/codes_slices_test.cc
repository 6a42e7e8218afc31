// The kernel on packed codes, on the executor: heads of more than 256 channels, of which each warp
// has a slice.
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/tests/backends/cuda/attention/expect_solved.h"

namespace kvant::cuda {
namespace {

CodesSide Side(ElementType type, ElementType zero_points, ElementType scales = kFloat16) {
  return {type, 0, scales, zero_points, zero_points == kFloat16 || zero_points == kBFloat16};
}

struct Head {
  int k, v;
  bool latent;
};

class CodesInSlicesTest : public testing::TestWithParam<Head> {
 protected:
  static CodesProblem Of(const CodesSide& k, const CodesSide& v) {
    CodesProblem problem;
    problem.head_size = GetParam().k;
    problem.v_head_size = GetParam().v;
    problem.latent = GetParam().latent;
    problem.k = k;
    problem.v = v;
    problem.kv_heads = 1;
    return problem;
  }
};

TEST_P(CodesInSlicesTest, TypesAndZeroPoints) {
  for (ElementType type : {kInt8, kUint8, kUint4, kInt4, kFloat8E4M3, kFloat8E5M2, kFloat16}) {
    const bool is_float = type == kFloat16 || type == kFloat8E4M3 || type == kFloat8E5M2;
    for (ElementType zero_points : {kNone, kUint8, kUint4, kFloat16}) {
      if (is_float && zero_points != kNone) continue;
      CodesProblem problem = Of(Side(type, zero_points), Side(type, zero_points));
      problem.seed = static_cast<uint64_t>(type * 16 + zero_points);
      ExpectSolved(problem);
    }
  }
}

TEST_P(CodesInSlicesTest, ShapesOfTiles) {
  for (ElementType q : {kFloat16, kBFloat16, kFloat32}) {
    for (const auto& [tile, stages] : {std::pair{16, 4}, {32, 3}, {64, 2}}) {
      for (int rows : {1, 8, 11, 37}) {
        CodesProblem problem = Of(Side(kInt8, kNone, q), Side(kUint8, kUint8, q));
        problem.q = q;
        problem.output = kFloat32;
        problem.warp_tile = tile;
        problem.stages = stages;
        problem.heads_per_kv = rows;
        problem.splits = rows == 8 ? 2 : 0;
        problem.lengths = {rows == 11 ? 5 : 77};
        ExpectSolved(problem);
      }
    }
  }
}

TEST_P(CodesInSlicesTest, StepsOverScores) {
  for (bool soft_cap : {false, true}) {
    for (bool causal : {false, true}) {
      CodesProblem problem = Of(Side(kInt8, kNone), Side(kInt8, kNone));
      problem.soft_cap = soft_cap;
      problem.causal = causal;
      problem.sinks = soft_cap != causal;
      problem.q_len = 5;
      ExpectSolved(problem);
    }
  }
}

TEST_P(CodesInSlicesTest, LengthsPagesAndRings) {
  CodesProblem problem = Of(Side(kUint8, kUint8), Side(kInt8, kNone));
  problem.batch = 3;
  problem.capacity = 240;
  problem.lengths = {240, 17, 131};
  problem.splits = 3;
  ExpectSolved(problem);
  for (int page : {16, 48}) {
    problem.k_page = problem.v_page = page;
    ExpectSolved(problem);
  }
  if (problem.latent) return;  // of rings they are two copies
  problem.k_page = problem.v_page = 0;
  problem.k_first = {3, 200, 101};
  problem.v_first = {77, 195, 64};
  ExpectSolved(problem);
}

// Of one warp's channels alone too much is lost: all of them do the tokens once more, by f32.
TEST_P(CodesInSlicesTest, OneWarpLosesForAll) {
  for (ElementType q : {kBFloat16, kFloat32}) {
    for (float outlier : {300.f, 1e4f}) {
      CodesProblem problem = Of(Side(kInt8, kNone, kFloat32), Side(kInt8, kUint8, kFloat32));
      problem.q = q;
      problem.output = kFloat32;
      problem.hard.q_outlier = outlier;
      problem.hard.q_size = 1e-3f;
      problem.hard.k_outlier = outlier;
      problem.hard.name = "outliers";
      problem.heads_per_kv = 11;
      problem.splits = 2;
      const CodesResult result = Solve(problem);
      ASSERT_EQ(result.refused, "") << problem.Name();
      EXPECT_LE(result.error, (q == kFloat32 ? 2e-5 : 1e-3) + result.own_error) << problem.Name();
      EXPECT_THAT(result.report.errors, testing::IsEmpty()) << problem.Name();
    }
  }
}

TEST_P(CodesInSlicesTest, NanOfOneWarp) {
  CodesProblem problem = Of(Side(kFloat8E4M3, kNone), Side(kFloat8E4M3, kNone));
  problem.hard.k_nan = true;
  for (bool converts : {false, true}) {
    problem.converts_e4m3 = converts;
    const CodesResult result = Solve(problem);
    ASSERT_EQ(result.refused, "");
    EXPECT_EQ(result.wrong_nan, 0);
    EXPECT_LE(result.error, 1e-3);
  }
}

INSTANTIATE_TEST_SUITE_P(Heads, CodesInSlicesTest,
                         testing::Values(Head{576, 512, true}, Head{320, 256, true},
                                         Head{512, 448, true}, Head{512, 320, true},
                                         Head{512, 512, false}, Head{320, 448, false},
                                         Head{320, 512, false}, Head{512, 576, false}),
                         [](const auto& info) {
                           const Head& head = info.param;
                           return std::to_string(head.k) + "_" + std::to_string(head.v) +
                                  (head.latent ? "_latent" : "");
                         });

TEST(CodesInSlices, WhatIsNotTaken) {
  CodesProblem problem;
  problem.head_size = problem.v_head_size = 512;
  problem.k = problem.v = Side(kInt8, kNone);
  problem.k.group = 128;
  EXPECT_EQ(Solve(problem).refused, "K has several groups of 512 channels");
  problem.k = problem.v = Side(kInt8, kNone);
  problem.v.tokens = CodesSide::kAll;
  EXPECT_EQ(Solve(problem).refused, "V is by channel, of 512 channels");
  problem.v.tokens = 0;
  problem.head_size = 528;
  EXPECT_EQ(Solve(problem).refused, "K has 528 channels, not a multiple of 64");
  problem.head_size = 128;
  problem.v_head_size = 640;
  EXPECT_EQ(Solve(problem).refused, "V has 640 channels, more than 576");
  problem.k = Side(kUint4, kNone);
  problem.v_head_size = 512;
  EXPECT_EQ(Solve(problem).refused, "K's rows, a slice for a warp, are less than 32 bytes");
}

}  // namespace
}  // namespace kvant::cuda
