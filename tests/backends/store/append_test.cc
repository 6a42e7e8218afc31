// Append into caches that hold something already, on every backend that has it.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/graph/builder.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tests/backends/store/append_harness.h"

namespace kvant::testing {
namespace {

using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Codes, scales and zero points of a few types that together use all loops.
constexpr QuantizeTypes kFewTypes[] = {
    {kF32, kS8, kF32, kUndef}, {kF16, kU4, kF16, kU4},        {kBF16, kS4, kBF16, kS4},
    {kF32, kU2, kF16, kF16},   {kF32, kU8, kF32, kU8},        {kF16, kS2, kF32, kF32},
    {kF32, kU2, kF32, kU2},    {kF32, kF8E4M3, kF16, kUndef}, {kBF16, kF8E5M2, kF32, kUndef}};

std::vector<AppendCase> Layouts() {
  return {
      {"token_head", {2, 3, 1, 64}, 8, {5, 0}, {1, 1, 1, 64}},
      {"one_group_of_32", {1, 4, 1, 64}, 70, {69}, {1, 1, 1, 32}},
      {"several_tokens", {2, 3, 7, 32}, 40, {33, 2}, {1, 1, 1, 16}},
      {"a_row_left_out", {3, 2, 7, 32}, 16, {9, -1, 0}, {1, 1, 1, 32}},
      {"no_row_at_all", {2, 2, 4, 32}, 16, {-1, -2147483647}, {1, 1, 1, 32}},
      {"one_position", {3, 2, 4, 32}, 16, {8}, {1, 1, 1, 32}},
      {"columns", {2, 2, 32, 48}, 96, {64, 32}, {1, 1, 32, 1}},
      {"columns_of_4", {2, 3, 12, 36}, 24, {8, 12}, {1, 1, 4, 1}},
      {"columns_64_tokens", {1, 2, 64, 40}, 128, {64}, {1, 1, 32, 1}},
      {"blocks", {2, 2, 8, 32}, 24, {16, 4}, {1, 1, 4, 16}},
      {"tokens_of_all_heads", {2, 3, 2, 16}, 9, {7, 1}, {1, 3, 1, 16}},
      {"all_of_the_capacity", {1, 2, 16, 8}, 16, {0}, {1, 1, 16, 1}},
      {"one_element_each", {2, 2, 3, 5}, 6, {3, 0}, {1, 1, 1, 1}},
      {"rows_within_a_byte", {2, 2, 3, 9}, 11, {2, 7}, {1, 1, 1, 3}},
      {"columns_within_a_byte", {2, 2, 4, 7}, 12, {4, 8}, {1, 1, 2, 1}},
      {"rows_of_two_and_a_half_bytes", {1, 3, 5, 10}, 13, {7}, {1, 1, 1, 5}},
      {"size_80", {1, 2, 3, 80}, 9, {6}, {1, 1, 1, 16}},
      {"one_token_of_many_heads", {1, 33, 1, 128}, 9, {8}, {1, 1, 1, 32}},
      {"heads_of_3_groups", {2, 43, 1, 96}, 5, {4, 0}, {1, 1, 1, 32}},
      {"heads_of_5_groups", {1, 17, 1, 80}, 6, {3}, {1, 1, 1, 16}},
      {"tokens_of_5_groups", {1, 2, 33, 80}, 40, {5}, {1, 1, 1, 16}},
      {"tokens_of_80", {1, 2, 33, 80}, 40, {5}, {1, 1, 1, 80}},
      {"odd_size", {2, 5, 1, 33}, 8, {1, 3}, {1, 1, 1, 33}},
      {"odd_size_and_capacity", {2, 3, 5, 33}, 9, {3, 0}, {1, 1, 1, 11}},
      {"odd_columns", {2, 2, 8, 75}, 12, {4, 0}, {1, 1, 4, 1}},
      {"columns_beyond_a_block", {1, 2, 8, 160}, 16, {8}, {1, 1, 8, 1}},
      {"heads_inside", {2, 5, 3, 32}, 16, {11, 4}, {1, 1, 1, 32}, {}, false, 1},
      {.name = "padded_cache",
       .dims = {2, 3, 4, 32},
       .capacity = 12,
       .positions = {4, 8},
       .group = {1, 1, 1, 16},
       .dst_strides = Dims{4096, 1000, 40, 1},
       .parameter_strides = Dims{512, 100, 4, 1}},
      {.name = "padded_odd_heads",
       .dims = {2, 3, 4, 9},
       .capacity = 12,
       .positions = {5, 0},
       .group = {1, 1, 1, 9},
       .dst_strides = Dims{600, 200, 12, 1}},
      {.name = "transposed_source",
       .dims = {2, 3, 4, 32},
       .capacity = 12,
       .positions = {4, 8},
       .group = {1, 1, 1, 32},
       .src_strides = Dims{384, 32, 96, 1}},
      {.name = "few_groups_of_a_transposed_source",
       .dims = {1, 3, 21, 96},
       .capacity = 30,
       .positions = {9},
       .group = {1, 1, 1, 32},
       .src_strides = Dims{6048, 96, 288, 1}},
      {.name = "channels_apart_in_source",
       .dims = {1, 2, 4, 16},
       .capacity = 8,
       .positions = {3},
       .group = {1, 1, 1, 16},
       .src_strides = Dims{128, 64, 1, 4}},
      {.name = "channels_of_tokens",
       .dims = {1, 2, 8, 16},
       .capacity = 24,
       .positions = {8},
       .group = {1, 1, 8, 1},
       .dst_strides = Dims{768, 384, 1, 24}},
      {.name = "parameters_by_channel_first",
       .dims = {2, 2, 8, 16},
       .capacity = 24,
       .positions = {8, 16},
       .group = {1, 1, 4, 1},
       .parameter_strides = Dims{192, 96, 1, 6}},
  };
}

class AppendTest : public ::testing::TestWithParam<AppendCase> {};

TEST_P(AppendTest, WritesItsTokensAndNothingElse) {
  for (const QuantizeTypes& types : kFewTypes) {
    AppendCase test = GetParam();
    test.types = types;
    ExpectAppends(test);
    test.given = true;
    ExpectAppends(test);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, AppendTest, ::testing::ValuesIn(Layouts()),
                         [](const auto& info) { return info.param.name; });

TEST(Append, EveryType) {
  for (const QuantizeTypes& types : AllQuantizeTypes()) {
    ExpectAppends({"types", {2, 2, 3, 32}, 9, {5, 1}, {1, 1, 1, 16}, types});
    ExpectAppends({"types", {2, 2, 3, 9}, 9, {5, 2}, {1, 1, 1, 9}, types});
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(Append, Conversions) {
  for (const DataType src : {kF32, kF16, kBF16}) {
    for (const DataType dst : {kF32, kF16, kBF16}) {
      for (AppendCase test : Layouts()) {
        test.group.clear();
        test.parameter_strides.reset();
        test.types = {src, dst, kUndef, kUndef};
        ExpectAppends(test);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

// What a conversion rounds, ties included, and what it does not reach.
TEST(Append, ConversionsOfOddNumbers) {
  std::vector<double> odd = {kNan,
                             kInfinity,
                             -kInfinity,
                             0.0,
                             -0.0,
                             65504,
                             65519.9,
                             65520,
                             1e30,
                             0x1p-24,
                             0x1p-25,
                             0x1.8p-25,
                             0x1p-140,
                             1 + 0x1p-11,
                             1 + 0x1.8p-10,
                             1 + 0x1p-8,
                             1 + 0x1.8p-7,
                             3.3961775292e38,
                             -3.4028234664e38,
                             0x1p-133,
                             0x1.8p-133,
                             -(1 + 0x1p-8),
                             -0x1p-14,
                             0x1.ffcp-15,
                             -0x1.ffep-15,
                             0x1.fep127,
                             0x1.fffffep127,
                             2049,
                             2051,
                             -257,
                             259,
                             1e-45};
  while (odd.size() < 2 * 41) odd.push_back(odd[odd.size() - 32] * 1.37);
  for (const DataType src : {kF32, kF16, kBF16}) {
    for (const DataType dst : {kF32, kF16, kBF16}) {
      ExpectAppends({"odd", {1, 1, 2, 41}, 3, {1}, {}, {src, dst, kUndef, kUndef}}, odd);
    }
  }
}

TEST(Append, PromptsThatSeveralThreadsShare) {
  for (const QuantizeTypes& types : {kFewTypes[0], kFewTypes[1], kFewTypes[6]}) {
    ExpectAppends({"rows", {2, 2, 700, 64}, 800, {64, 3}, {1, 1, 1, 32}, types});
    ExpectAppends({"columns", {1, 2, 704, 96}, 768, {64}, {1, 1, 32, 1}, types});
    ExpectAppends({"tokens", {2, 3, 500, 64}, 600, {2, 100}, {1, 1, 2, 64}, types});
    ExpectAppends({"all", {1, 1, 1100, 64}, 1100, {0}, {1, 1, 1100, 64}, types});
  }
  ExpectAppends({"numbers", {1, 1, 2000, 96}, 3000, {999}, {}, {kF32, kF16, kUndef, kUndef}});
}

// A token that is not finite spoils its own group, in memory that is full of other ones.
TEST(Append, NumbersThatAreNotFiniteStayInTheirGroup) {
  for (const QuantizeTypes& types : kFewTypes) {
    for (const Dims& group : {Dims{1, 1, 1, 16}, Dims{1, 1, 4, 1}, Dims{1, 1, 1, 48}}) {
      for (const double bad : {kNan, kInfinity, -kInfinity}) {
        const AppendCase test{"bad", {2, 2, 4, 48}, 12, {4, 8}, group, types};
        std::vector<double> values = QuantizeNumbers(test.dims);
        values[0] = values[50] = values[700] = bad;
        ExpectAppends(test, values);
      }
    }
  }
}

TEST(Append, GroupsWithoutSpread) {
  for (const QuantizeTypes& types : kFewTypes) {
    for (const Dims& group : {Dims{1, 1, 1, 32}, Dims{1, 1, 4, 1}}) {
      for (const double value : {0.0, 1.0, -2.5}) {
        const AppendCase test{"flat", {1, 2, 4, 32}, 8, {4}, group, types};
        ExpectAppends(test, std::vector<double>(256, value));
      }
    }
  }
}

// Scales that exist already: by channel, by head, for the whole, in groups over rows.
TEST(Append, GivenScales) {
  for (const QuantizeTypes& types : kFewTypes) {
    for (const Dims& group : {Dims{1, 1, 24, 1}, Dims{4, 1, 24, 1}, Dims{4, 2, 24, 40},
                              Dims{2, 1, 24, 40}, Dims{2, 2, 1, 8}, Dims{4, 1, 1, 1}}) {
      ExpectAppends({"given", {4, 2, 3, 40}, 24, {21, 0, -1, 5}, group, types, /*given=*/true});
    }
    ExpectAppends({"by_tokens", {4, 2, 6, 40}, 24, {18, 0, -1, 6}, {2, 1, 3, 8}, types, true});
  }
}

// Codes do not depend on how many tokens come at once.
TEST(Append, TokenByTokenIsAllAtOnce) {
  for (const QuantizeTypes& types : kFewTypes) {
    for (const int64_t size : {64, 80, 33}) {
      AppendCase all{"all", {2, 3, 64, size}, 70, {3, 6}, {1, 1, 1, size}, types};
      const std::vector<double> values = QuantizeNumbers(all.dims);
      const QuantizeMemory before = MemoryBefore(all);
      for (const AppendBackend& backend : AppendBackends()) {
        const auto run = [&](const AppendCase& test, const std::vector<double>& x,
                             const QuantizeMemory& memory) {
          const auto executable = std::move(*backend.compile(*test.MakePartition()));
          return *RunAppend(test, *executable, *MakeSerialExecutor(), Pack(test.src(), x), memory);
        };
        const QuantizeMemory want = run(all, values, before);
        for (const int64_t chunk : {1, 7, 32}) {
          QuantizeMemory memory = before;
          for (int64_t first = 0; first < 64; first += chunk) {
            AppendCase part = all;
            part.dims[2] = std::min(chunk, 64 - first);
            part.positions = {3 + first, 6 + first};
            std::vector<double> x;
            for (int64_t head = 0; head < 6; ++head) {
              for (int64_t j = 0; j < part.dims[2] * size; ++j) {
                x.push_back(values[(head * 64 + first) * size + j]);
              }
            }
            memory = run(part, x, memory);
          }
          EXPECT_TRUE(memory == want)
              << types.ToString() << " in chunks of " << chunk << ", " << backend.name;
        }
      }
    }
  }
}

// By hand, without the oracle: s8 by token and head.
TEST(Append, AsAPlainLoop) {
  const AppendCase test{"loop", {2, 3, 2, 16}, 5, {3, 1}, {1, 1, 1, 16}};
  const std::vector<double> x = Unpack(test.src(), Pack(test.src(), QuantizeNumbers(test.dims)));
  const QuantizeMemory before = MemoryBefore(test);
  QuantizeMemory want = before;
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 3; ++h) {
      for (int64_t t = 0; t < 2; ++t) {
        const double* row = &x[((b * 3 + h) * 2 + t) * 16];
        double most = 0;
        for (int64_t d = 0; d < 16; ++d) most = std::max(most, std::abs(row[d]));
        const int64_t token = (b * 3 + h) * 5 + test.positions[b] + t;
        const auto scale = static_cast<float>(most / 127);
        StoreElement(kF32, want.scales.data(), token, scale);
        for (int64_t d = 0; d < 16; ++d) {
          StoreElement(kS8, want.codes.data(), token * 16 + d, std::nearbyint(row[d] / scale));
        }
      }
    }
  }
  for (const AppendBackend& backend : AppendBackends()) {
    const auto executable = std::move(*backend.compile(*test.MakePartition()));
    EXPECT_TRUE(*RunAppend(test, *executable, *MakeSerialExecutor(), Pack(test.src(), x), before) ==
                want)
        << backend.name;
  }
}

TEST(Append, ShapesThatCannotGoTogether) {
  const auto why = [](const AppendCase& test) {
    return std::string(test.MakePartition().status().message());
  };
  EXPECT_THAT(why({"much", {1, 2, 9, 32}, 8, {0}, {1, 1, 1, 32}}),
              HasSubstr("has 9 tokens along dim 2, more than tensor 2 [1,2,8,32] holds"));
  EXPECT_THAT(why({"group", {1, 2, 6, 32}, 16, {0}, {1, 1, 4, 1}}),
              HasSubstr("groups of 4 do not divide dim 2 of tensor 0"));
  EXPECT_THAT(why({"given", {1, 2, 6, 32}, 16, {0}, {1, 1, 4, 1}, {}, true}),
              HasSubstr("groups of 4 do not divide dim 2 of tensor 0"));
  EXPECT_THAT(why({"capacity", {1, 2, 4, 32}, 18, {0}, {1, 1, 4, 1}}),
              HasSubstr("groups of 4 do not divide dim 2 of tensor 2"));
  EXPECT_THAT(why({"rows", {2, 2, 4, 32}, 16, {0, 4}, {2, 1, 4, 1}}),
              HasSubstr("computes scales of groups of 2 along dim 0"));

  GraphBuilder g;
  const Value x = g.Input("x", kF32, {1, 2, 4, 32});
  const Value positions = g.Input("positions", kS32, {1});
  const auto cache = g.Append(x, positions, 64, {.group_shape = {1, 1, 4, 1}, .type = kS8});
  absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  const std::vector<Partition> partitions = *PartitionGraph(*graph);
  LogicalTensor scales = graph->tensor(cache.scales.id);
  EXPECT_EQ(scales.dims, (Dims{1, 2, 16, 32}));
  scales.dims = Dims{1, 2, 15, 32};
  scales.strides.reset();
  EXPECT_THAT(
      std::string(partitions[0].WithPorts({scales}).status().message()),
      HasSubstr(
          "holds 16 groups of 4 tokens along dim 2, but tensor 3 'Append_3' [1,2,15,32] holds "
          "15 scales there"));
}

std::string KernelOf(const AppendCase& test) {
  return (*cpu::CompileStore(*test.MakePartition()->store(), *cpu::KernelsAt(0)))->kernel();
}

TEST(Append, KernelSaysWhatRuns) {
  EXPECT_EQ(KernelOf({"", {1, 2, 4, 64}, 16, {0}, {1, 1, 1, 32}, {kF32, kU4, kF16, kF16}}),
            "cpu/portable append, quantize, ranges and codes in one kernel: runs of 32 elements");
  EXPECT_EQ(KernelOf({"", {1, 2, 4, 64}, 16, {0}, {}, {kF32, kF16, kUndef, kUndef}}),
            "cpu/portable append, convert: runs of 256 elements");
  EXPECT_EQ(KernelOf({"", {1, 2, 4, 9}, 16, {0}, {1, 1, 1, 9}, {kF32, kU4, kF16, kF16}}),
            "cpu/portable append, quantize, ranges and codes in one kernel: runs of 9 elements");
}

}  // namespace
}  // namespace kvant::testing
