// The kernel on packed codes, on the executor, against f64 on the dequantized values.
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/tests/backends/cuda/attention/expect_solved.h"

namespace kvant::cuda {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

CodesSide Side(ElementType type, int group, ElementType zero_points) {
  return {type, group, kFloat16, zero_points, zero_points == kFloat16};
}

class AttentionCodesTest : public testing::TestWithParam<ElementType> {};

TEST_P(AttentionCodesTest, GroupsAndZeroPoints) {
  for (int head_size : {64, 128, 256}) {
    for (int group : {0, 32, 64, 128}) {
      if (group >= head_size) continue;
      for (ElementType zero_points : {kNone, kUint8, kInt8, kFloat16}) {
        CodesProblem problem;
        problem.head_size = problem.v_head_size = head_size;
        problem.k = problem.v = Side(GetParam(), group, zero_points);
        problem.kv_heads = 1;
        problem.seed = static_cast<uint64_t>(head_size + group + zero_points);
        ExpectSolved(problem);
      }
    }
  }
}

TEST_P(AttentionCodesTest, TilesAndStages) {
  for (int tile : {16, 32, 64}) {
    for (int stages : {2, 3, 4}) {
      if (tile == 64 && stages == 4) continue;
      CodesProblem problem;
      problem.k = problem.v = Side(GetParam(), stages == 3 ? 0 : 32, kUint8);
      problem.head_size = problem.v_head_size = 64;
      problem.warp_tile = tile;
      problem.stages = stages;
      problem.lengths = {210};
      problem.capacity = 212;
      ExpectSolved(problem);
    }
  }
}

TEST_P(AttentionCodesTest, CodesMadeNormal) {
  for (int group : {0, 32}) {
    for (ElementType zero_points : {kNone, kUint8, kInt8, kFloat16}) {
      CodesProblem problem;
      problem.k = problem.v = Side(GetParam(), group, zero_points);
      problem.normal_codes = true;
      ExpectSolved(problem);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, AttentionCodesTest, testing::Values(kUint4, kInt4, kUint8, kInt8));

TEST(AttentionCodesTest, KAndVDiffer) {
  CodesProblem problem;
  problem.k = Side(kUint4, 0, kNone);
  problem.v = Side(kInt8, 32, kInt8);
  ExpectSolved(problem);
  problem.v = {kInt4, 64, kBFloat16, kNone};
  ExpectSolved(problem);
  problem.k = {kInt8, 32, kFloat32, kUint8};
  ExpectSolved(problem);
  problem.head_size = 256;
  problem.v_head_size = 64;
  problem.v.group = 0;
  ExpectSolved(problem);
  problem.head_size = 64;
  problem.v_head_size = 256;
  problem.k.group = 0;
  problem.v.group = 32;
  ExpectSolved(problem);
}

TEST(AttentionCodesTest, TypesOfParameters) {
  for (ElementType scales : {kNone, kFloat16, kBFloat16, kFloat32}) {
    for (ElementType zero_points : {kNone, kFloat16, kBFloat16, kFloat32}) {
      if (scales == kNone && zero_points != kNone) continue;
      CodesProblem problem;
      problem.k = {kUint4, 0, scales, zero_points, true};
      problem.v = {kInt8, 0, scales, zero_points, true};
      problem.q_spread = scales == kNone ? .1f : 1.f;
      ExpectSolved(problem);
    }
  }
}

TEST(AttentionCodesTest, TypesOfParametersInGroups) {
  for (ElementType type : {kUint4, kInt4, kUint8, kInt8}) {
    for (int group : {32, 64}) {
      for (ElementType scales : {kFloat16, kBFloat16, kFloat32}) {
        for (ElementType zero_points : {kUint8, kInt8, kFloat16, kBFloat16, kFloat32}) {
          CodesProblem problem;
          problem.q = kBFloat16;
          problem.k = problem.v = {type, group, scales, zero_points,
                                   zero_points != kUint8 && zero_points != kInt8};
          problem.kv_heads = 1;
          problem.seed = static_cast<uint64_t>(type + group + scales + zero_points);
          ExpectSolved(problem);
        }
      }
    }
  }
}

TEST(AttentionCodesTest, ZeroPointsOfFourBits) {
  for (ElementType type : {kUint4, kInt4}) {
    for (int head_size : {64, 128, 256}) {
      for (int group : {0, 32, 64}) {
        for (ElementType scales : {kFloat16, kBFloat16}) {
          for (bool normal : {false, true}) {
            if (group == head_size) continue;
            CodesProblem problem;
            problem.head_size = problem.v_head_size = head_size;
            problem.k = problem.v = {type, group, scales, type};
            problem.normal_codes = normal;
            problem.kv_heads = 1;
            problem.seed = static_cast<uint64_t>(type + head_size + group + scales);
            ExpectSolved(problem);
          }
        }
      }
    }
  }
}

TEST(AttentionCodesTest, ParametersInCommon) {
  for (ElementType type : {kUint4, kInt4, kInt8}) {
    for (ElementType zero_points : {kNone, kUint8, kInt8}) {
      for (bool scale : {false, true}) {
        for (bool zero_point : {false, true}) {
          CodesProblem problem;
          problem.k = problem.v = Side(type, 0, zero_points);
          problem.k.common_scale = problem.v.common_scale = scale;
          problem.k.common_zero_point = problem.v.common_zero_point = zero_point;
          ExpectSolved(problem);
        }
      }
    }
  }
}

TEST(AttentionCodesTest, Floats) {
  for (ElementType type : {kFloat16, kFloat8E4M3, kFloat8E5M2}) {
    for (int head_size : {64, 128, 256}) {
      for (ElementType scales : {kNone, kFloat16}) {
        for (int group : {0, 32}) {
          if (scales == kNone && group != 0) continue;
          CodesProblem problem;
          problem.head_size = problem.v_head_size = head_size;
          problem.k = problem.v = {type, group, scales, kNone};
          problem.q_spread = scales == kNone ? .2f : 1.f;
          ExpectSolved(problem);
        }
      }
    }
  }
}

TEST(AttentionCodesTest, TwoBits) {
  for (ElementType type : {kInt2, kUint2}) {
    for (int head_size : {128, 256}) {
      for (int group : {0, 64}) {
        for (ElementType zero_points : {kNone, kUint8, kInt8, kFloat16}) {
          CodesProblem problem;
          problem.head_size = problem.v_head_size = head_size;
          problem.k = problem.v = Side(type, group, zero_points);
          ExpectSolved(problem);
        }
      }
    }
  }
}

TEST(AttentionCodesTest, Queries) {
  for (ElementType q : {kFloat16, kBFloat16, kFloat32}) {
    for (float spread : {1.f, 1e-4f, 100.f}) {
      for (int group : {0, 32}) {
        CodesProblem problem;
        problem.q = q;
        problem.output = kFloat32;
        problem.q_spread = spread;
        problem.scale = .088f / spread;
        problem.k = Side(kUint4, group, kUint8);
        problem.v = Side(kInt8, group, q == kFloat32 && group ? kNone : kInt8);
        ExpectSolved(problem);
      }
    }
  }
}

TEST(AttentionCodesTest, Rows) {
  for (int heads : {1, 3, 8, 9, 16}) {
    for (int q_len : {1, 4}) {
      for (bool causal : {false, true}) {
        CodesProblem problem;
        problem.heads_per_kv = heads;
        problem.q_len = q_len;
        problem.row_blocks = heads == 16 ? 4 : 0;
        problem.causal = causal;
        problem.lengths = {heads * 11 % 70 + 5};
        ExpectSolved(problem);
      }
    }
  }
}

TEST(AttentionCodesTest, LengthsAndSplits) {
  for (int length : {0, 1, 5, 63, 64, 65, 77}) {
    for (int splits : {1, 3}) {
      CodesProblem problem;
      problem.lengths = {length};
      problem.splits = splits;
      problem.k.group = 32;
      problem.k.zero_points = problem.v.zero_points = kUint8;
      problem.seed = static_cast<uint64_t>(length);
      ExpectSolved(problem);
    }
  }
}

TEST(AttentionCodesTest, RaggedBatches) {
  for (int splits : {1, 2, 7}) {
    CodesProblem problem;
    problem.batch = 4;
    problem.capacity = 300;
    problem.lengths = {300, 0, 17, 222};
    problem.splits = splits;
    problem.seed = 3;
    ExpectSolved(problem);
    problem.heads_inside = true;
    ExpectSolved(problem);
    problem.sinks = true;
    ExpectSolved(problem);
  }
}

// Scales of a token may be less than what is copied at once, and begin within it.
TEST(AttentionCodesTest, Rings) {
  for (int group : {0, 32}) {
    for (ElementType zero_points : {kNone, kUint8, kFloat16}) {
      for (ElementType type : {kUint4, kInt8}) {
        for (int splits : {1, 3}) {
          CodesProblem problem;
          problem.k = Side(type, group, zero_points);
          problem.v = Side(kInt8, 0, kUint8);
          problem.batch = 5;
          problem.kv_heads = 1;
          problem.capacity = 212;
          problem.lengths = {212, 0, 17, 131, 200};
          problem.k_first = {0, 3, 200, 100, 211};
          problem.v_first = {77, 0, 195, 64, 0};
          problem.splits = splits;
          problem.causal = splits == 3;
          problem.q_len = 2;
          ExpectSolved(problem);
        }
      }
    }
  }
}

TEST(AttentionCodesTest, RingsOfZeroPointsOfFourBits) {
  for (int group : {0, 32, 64}) {
    CodesProblem problem;
    problem.k = problem.v = {kUint4, group, kFloat16, kUint4};
    problem.batch = 3;
    problem.capacity = 216;
    problem.lengths = {212, 131, 200};
    problem.k_first = {3, 200, 101};
    problem.v_first = {77, 195, 64};
    ExpectSolved(problem);
  }
}

// Tiles of several pages, pages of several tiles; tables that differ.
TEST(AttentionCodesTest, Pages) {
  for (const auto& [k_page, v_page] : {std::pair{16, 16}, {32, 64}, {128, 16}, {48, 80}}) {
    for (ElementType type : {kUint4, kInt8, kUint2}) {
      for (ElementType zero_points : {kNone, kUint8, kFloat16}) {
        for (int group : {0, 64}) {
          if (type == kUint2 && group != 0) continue;
          CodesProblem problem;
          problem.k = Side(type, group, zero_points);
          problem.v = Side(kUint4, group, kUint8);
          problem.batch = 3;
          problem.capacity = 300;
          problem.lengths = {300, 0, 131};
          problem.k_page = k_page;
          problem.v_page = v_page;
          problem.splits = group == 0 ? 3 : 1;
          problem.heads_inside = type == kInt8;
          problem.seed = static_cast<uint64_t>(k_page + v_page + type + zero_points + group);
          ExpectSolved(problem);
        }
      }
    }
  }
}

TEST(AttentionCodesTest, PagesForEveryTile) {
  for (int tile : {16, 32, 64}) {
    for (int stages : {2, 3, 4}) {
      if (tile == 64 && stages == 4) continue;
      CodesProblem problem;
      problem.k = problem.v = {kUint4, 32, kFloat16, kUint4};
      problem.head_size = problem.v_head_size = 64;
      problem.warp_tile = tile;
      problem.stages = stages;
      problem.capacity = 640;
      problem.lengths = {629};
      problem.k_page = tile == 16 ? 48 : 16;
      problem.v_page = 64;
      ExpectSolved(problem);
    }
  }
}

TEST(AttentionCodesTest, MoreEntriesThanLanes) {
  CodesProblem problem;
  problem.batch = 70;
  problem.kv_heads = 1;
  problem.splits = 3;
  problem.head_size = problem.v_head_size = 64;
  problem.lengths.clear();
  for (int b = 0; b < problem.batch; ++b) problem.lengths.push_back(b % 9 == 4 ? 80 : b % 7);
  ExpectSolved(problem);
}

TEST(AttentionCodesTest, ScoreSteps) {
  CodesProblem problem;
  problem.soft_cap = true;
  ExpectSolved(problem);
  problem.causal = true;
  problem.q_len = 3;
  ExpectSolved(problem);
}

TEST(AttentionCodesTest, ReferenceMoves) {
  for (float spread : {3.f, 10.f, 30.f}) {
    CodesProblem problem;
    problem.lengths = {520};
    problem.capacity = 520;
    problem.q_spread = spread;
    ExpectSolved(problem);
  }
}

// Beyond what f16 holds beside the usual top, all is multiplied once more.
TEST(AttentionCodesTest, RangeOfVScales) {
  for (float scale : {1e-4f, 1e-2f, 1.f, 100.f, 2000.f}) {
    for (int group : {0, 32}) {
      CodesProblem problem;
      problem.v = Side(kInt8, group, kInt8);
      problem.v_scale = scale;
      problem.output = kFloat32;
      const CodesResult result = Solve(problem);
      EXPECT_LE(result.error, 1e-3) << problem.Name() << ", V's scales " << scale;
      EXPECT_THAT(result.report.errors, IsEmpty());
    }
  }
}

TEST(AttentionCodesTest, RefusesWithASentence) {
  CodesProblem problem;
  problem.head_size = 72;
  EXPECT_THAT(Solve(problem).refused, HasSubstr("K has 72 channels"));
  problem.head_size = 128;
  problem.v = {kInt8, 8};
  EXPECT_THAT(Solve(problem).refused, HasSubstr("V has groups of 8 channels"));
  problem.v = {kUint4};
  problem.v.tokens = 16;
  EXPECT_THAT(Solve(problem).refused, HasSubstr("V has groups of a channel of 16 tokens"));
  problem.v.tokens = CodesSide::kAll;
  problem.v.zero_points = kUint8;
  EXPECT_THAT(Solve(problem).refused, HasSubstr("V has zero points of channels"));
  problem.v = {};
  problem.k.tokens = 40;
  EXPECT_THAT(Solve(problem).refused,
              HasSubstr("K has groups of a channel of 40 tokens, not a power of two"));
  problem.k = {};
  problem.v = {};
  problem.k_page = problem.v_page = 24;
  EXPECT_THAT(Solve(problem).refused, HasSubstr("K's pages of 24 tokens are not multiples of 16"));
  problem.v_page = 0;
  problem.k_page = 16;
  EXPECT_THAT(Solve(problem).refused, HasSubstr("V is not in pages, as the other is"));
  problem.v_page = 32;
  problem.v.common_scale = true;
  EXPECT_THAT(Solve(problem).refused, HasSubstr("V's scales or zero points are of a page"));
  problem.v = {};
  problem.k_page = problem.v_page = 0;
  problem.capacity = 77;
  EXPECT_THAT(Solve(problem).refused, HasSubstr("scales are not aligned to 4 bytes"));
}

}  // namespace
}  // namespace kvant::cuda
