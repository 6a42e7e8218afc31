// The kernel on packed codes, on the executor: heads of any multiple of 16 channels, groups of half
// a chunk, and keys by channel.
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kvant/tests/backends/cuda/attention/expect_solved.h"

namespace kvant::cuda {
namespace {

CodesSide Side(ElementType type, int group, ElementType zero_points,
               ElementType scales = kFloat16) {
  return {type, group, scales, zero_points, zero_points == kFloat16 || zero_points == kBFloat16};
}

class CodesOfHeadTest : public testing::TestWithParam<int> {};

TEST_P(CodesOfHeadTest, GroupsAndZeroPoints) {
  const int head_size = GetParam();
  for (ElementType type : {kUint4, kInt4, kUint8, kInt8}) {
    for (int group : {0, 16, 32, 48}) {
      if (group != 0 && (head_size % group != 0 || head_size / group > 8)) continue;
      if (BitsOf(type) == 4 && group == 48) continue;
      for (ElementType zero_points : {kNone, kUint8, kUint4, kFloat16}) {
        CodesProblem problem;
        problem.head_size = problem.v_head_size = head_size;
        problem.k = problem.v = Side(type, group, zero_points);
        problem.kv_heads = 1;
        problem.seed = static_cast<uint64_t>(head_size + group + zero_points + type);
        ExpectSolved(problem);
      }
    }
  }
}

TEST_P(CodesOfHeadTest, OfOtherTypes) {
  for (ElementType type : {kFloat16, kFloat8E4M3, kFloat8E5M2, kInt2, kUint2}) {
    if (GetParam() * BitsOf(type) < 256 || GetParam() * BitsOf(type) % 64 != 0) continue;
    CodesProblem problem;
    problem.head_size = problem.v_head_size = GetParam();
    problem.k = problem.v = Side(type, 0, kNone);
    problem.q_spread = .5f;
    ExpectSolved(problem);
  }
}

TEST_P(CodesOfHeadTest, Queries) {
  for (ElementType q : {kBFloat16, kFloat32}) {
    for (int tile : {16, 32, 64}) {
      CodesProblem problem;
      problem.head_size = problem.v_head_size = GetParam();
      problem.k = Side(kUint4, 0, kUint8, q);
      problem.v = Side(kInt8, 0, kNone, q);
      problem.q = q;
      problem.output = kFloat32;
      problem.warp_tile = tile;
      problem.heads_per_kv = 11;
      ExpectSolved(problem);
    }
  }
}

TEST_P(CodesOfHeadTest, RingsAndPages) {
  CodesProblem problem;
  problem.head_size = problem.v_head_size = GetParam();
  const int group = GetParam() / 16 <= 8 ? 16 : GetParam() % 32 == 0 ? 32 : 0;
  problem.k = Side(kUint4, group, kUint4);
  problem.v = Side(kInt8, 0, kUint8);
  problem.batch = 3;
  problem.capacity = 240;
  problem.lengths = {240, 17, 131};
  for (int page : {16, 48}) {
    problem.k_page = problem.v_page = page;
    ExpectSolved(problem);
  }
  problem.k_page = problem.v_page = 0;
  problem.k_first = {3, 200, 101};
  problem.v_first = {77, 195, 64};
  ExpectSolved(problem);
}

// Such rows make K's tile an odd number of chunks, and V's is swizzled by its address.
TEST(CodesInThreeChunksTest, BesideSwizzledValues) {
  struct {
    ElementType k, v;
    int head_size, v_head_size;
  } const cases[] = {{kInt8, kInt8, 48, 64},    {kUint4, kUint4, 96, 128},
                     {kUint4, kInt4, 80, 128},  {kUint2, kUint2, 192, 128},
                     {kInt4, kInt4, 96, 256},   {kFloat8E4M3, kUint8, 48, 128},
                     {kUint4, kInt8, 320, 512}, {kInt8, kInt8, 192, 512}};
  for (const auto& c : cases) {
    for (int tile : {16, 32, 64}) {
      CodesProblem problem;
      problem.head_size = c.head_size;
      problem.v_head_size = c.v_head_size;
      problem.k = Side(c.k, 0, kNone);
      problem.v = Side(c.v, 0, kNone);
      problem.warp_tile = tile;
      ExpectSolved(problem);
    }
  }
}

// Between tokens lie those of other heads: rows are not aligned to more than 8 bytes.
TEST_P(CodesOfHeadTest, HeadsInside) {
  CodesProblem problem;
  problem.head_size = problem.v_head_size = GetParam();
  problem.k = problem.v = Side(kUint4, 0, kUint8);
  problem.heads_inside = true;
  problem.kv_heads = 3;
  ExpectSolved(problem);
}

INSTANTIATE_TEST_SUITE_P(Heads, CodesOfHeadTest, testing::Values(80, 96, 112, 160, 192, 240));

// A word's channels are of one group, a chunk's of two.
TEST(CodesInHalvesTest, GroupsOfHalfAChunk) {
  for (const auto& [type, group] :
       {std::pair{kUint2, 32}, {kInt2, 32}, {kUint4, 16}, {kInt4, 16}}) {
    for (int head_size : {64, 128, 256}) {
      if (head_size / group > 8 || head_size * BitsOf(type) < 256) continue;
      for (ElementType zero_points : {kNone, kUint8, kInt8, kUint4, kFloat16}) {
        for (bool normal : {false, true}) {
          CodesProblem problem;
          problem.head_size = problem.v_head_size = head_size;
          problem.k = problem.v = Side(type, group, zero_points);
          problem.normal_codes = normal;
          problem.kv_heads = 1;
          problem.seed = static_cast<uint64_t>(type + group + head_size + zero_points);
          ExpectSolved(problem);
        }
      }
    }
  }
}

TEST(CodesInHalvesTest, Queries) {
  for (ElementType q : {kBFloat16, kFloat32}) {
    for (int tile : {16, 32, 64}) {
      CodesProblem problem;
      problem.k = Side(kUint2, 32, kUint8, q);
      problem.v = Side(kInt4, 16, kInt8, q);
      problem.q = q;
      problem.output = kFloat32;
      problem.warp_tile = tile;
      problem.heads_per_kv = 11;
      ExpectSolved(problem);
    }
  }
}

// By f32, zero points in real units are multiplied and added one by one.
TEST(CodesOfSinglesTest, RealZeroPointsInGroups) {
  for (ElementType zero_points : {kFloat16, kBFloat16, kFloat32}) {
    for (int head_size : {64, 96, 128}) {
      for (ElementType type : {kUint4, kInt8, kUint2}) {
        if (head_size * BitsOf(type) < 256) continue;
        CodesProblem problem;
        problem.head_size = problem.v_head_size = head_size;
        problem.k = problem.v = {type, 32, kFloat32, zero_points, true};
        problem.q = problem.output = kFloat32;
        problem.heads_per_kv = 9;
        problem.splits = 2;
        problem.seed = static_cast<uint64_t>(zero_points + head_size + type);
        ExpectSolved(problem);
      }
    }
  }
}

struct ByChannel {
  ElementType type;
  int tokens;
};
class CodesByChannelTest : public testing::TestWithParam<ByChannel> {
 protected:
  // Floats have no zero points.
  static bool Takes(ElementType zero_points) {
    const bool is_float = GetParam().type == kFloat8E4M3 || GetParam().type == kFloat8E5M2;
    return !is_float || zero_points == kNone;
  }
  static CodesProblem Problem(ElementType zero_points, ElementType scales = kFloat16) {
    CodesProblem problem;
    problem.k = Side(GetParam().type, 0, zero_points, scales);
    problem.k.tokens = GetParam().tokens;
    problem.v = Side(kUint4, 0, kUint8, scales);
    problem.capacity = 256;
    problem.lengths = {235};
    problem.seed = static_cast<uint64_t>(GetParam().type + GetParam().tokens + zero_points);
    return problem;
  }
};

TEST_P(CodesByChannelTest, ZeroPoints) {
  for (ElementType zero_points : {kNone, kUint8, kInt8, kUint4, kInt4, kFloat16}) {
    for (int head_size : {80, 128, 192}) {
      if (!Takes(zero_points) || head_size * BitsOf(GetParam().type) < 256) continue;
      CodesProblem problem = Problem(zero_points);
      problem.head_size = problem.v_head_size = head_size;
      ExpectSolved(problem);
    }
  }
}

TEST_P(CodesByChannelTest, Queries) {
  for (ElementType q : {kFloat16, kBFloat16, kFloat32}) {
    for (ElementType scales : {kFloat16, kBFloat16, kFloat32}) {
      for (ElementType zero_points : {kNone, kInt8, scales}) {
        if (!Takes(zero_points)) continue;
        CodesProblem problem = Problem(zero_points, scales);
        problem.k.real_zero_points = zero_points == scales;
        problem.q = q;
        problem.output = kFloat32;
        problem.heads_per_kv = 9;
        ExpectSolved(problem);
      }
    }
  }
}

// Values of every kind beside tiles of two groups of keys, whose tokens are dealt otherwise.
TEST_P(CodesByChannelTest, Values) {
  for (int group : {0, 32, 64}) {
    for (ElementType zero_points : {kNone, kUint8, kUint4, kFloat16}) {
      for (ElementType type : {kUint4, kInt8, kUint2}) {
        CodesProblem problem = Problem(kNone);
        problem.v = Side(type, group, zero_points);
        problem.kv_heads = 1;
        problem.warp_tile = GetParam().tokens == 32 ? 64 : 0;
        problem.causal = true;
        problem.q_len = 2;
        ExpectSolved(problem);
      }
    }
  }
}

TEST_P(CodesByChannelTest, CodesMadeNormal) {
  for (ElementType zero_points : {kNone, kUint8, kInt8, kFloat16}) {
    if (!Takes(zero_points)) continue;
    CodesProblem problem = Problem(zero_points);
    problem.normal_codes = true;
    ExpectSolved(problem);
  }
}

TEST_P(CodesByChannelTest, TilesRowsAndSplits) {
  for (int tile : {16, 32, 64}) {
    // Whole groups of 32 tokens or more, or within one.
    if (GetParam().tokens > 0 && GetParam().tokens < 32 && tile > GetParam().tokens) continue;
    for (int row_blocks : {1, 2}) {
      CodesProblem problem = Problem(Takes(kUint8) ? kUint8 : kNone);
      problem.batch = 2;
      problem.lengths = {256, 61};
      problem.warp_tile = tile;
      problem.row_blocks = row_blocks;
      problem.heads_per_kv = 12;
      problem.splits = 3;
      problem.causal = tile == 32;
      problem.q_len = 2;
      ExpectSolved(problem);
    }
  }
}

// A ring's first token is anywhere in its group.
TEST_P(CodesByChannelTest, Rings) {
  for (ElementType zero_points : {kNone, kUint4, kFloat16}) {
    for (int splits : {1, 3}) {
      if (!Takes(zero_points)) continue;
      CodesProblem problem = Problem(zero_points);
      // Tiles of two groups, one of which is the ring's last.
      if (splits == 3) problem.warp_tile = 64;
      problem.batch = 7;
      problem.kv_heads = 1;
      problem.lengths = {256, 0, 17, 131, 200, 1, 64};
      problem.k_first = {0, 3, 200, 100, 255, 31, 128};
      problem.v_first = {77, 0, 195, 64, 0, 255, 5};
      problem.splits = splits;
      problem.causal = splits == 3;
      problem.soft_cap = zero_points == kUint4;
      problem.q_len = 2;
      ExpectSolved(problem);
    }
  }
}

TEST_P(CodesByChannelTest, Pages) {
  if (GetParam().tokens == CodesSide::kAll) GTEST_SKIP() << "pages have groups of their own";
  CodesProblem problem = Problem(Takes(kUint8) ? kUint8 : kNone);
  problem.batch = 3;
  problem.lengths = {250, 0, 131};
  for (int v_page : {16, 128}) {
    problem.k_page = v_page == 16 ? GetParam().tokens : 128;
    problem.v_page = v_page;
    problem.warp_tile = v_page == 16 ? 64 : 0;
    ExpectSolved(problem);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, CodesByChannelTest,
                         testing::Values(ByChannel{kUint4, 32}, ByChannel{kInt4, 64},
                                         ByChannel{kInt8, 128}, ByChannel{kUint8, 32},
                                         ByChannel{kUint2, 64}, ByChannel{kInt2, 32},
                                         ByChannel{kInt8, CodesSide::kAll},
                                         ByChannel{kUint4, CodesSide::kAll},
                                         ByChannel{kFloat8E4M3, 32}),
                         [](const auto& info) {
                           const int tokens = info.param.tokens;
                           return "type" + std::to_string(info.param.type) + "_" +
                                  (tokens == CodesSide::kAll ? "all" : std::to_string(tokens));
                         });

}  // namespace
}  // namespace kvant::cuda
