// DynamicQuantize on the kernels of every instruction set, judged by the oracle.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "gtest/gtest.h"
#include "kvant/backends/cpu/quantize_plan.h"
#include "kvant/tests/backends/quantize_harness.h"

namespace kvant::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

int64_t ElementsOf(const Dims& dims) {
  int64_t n = 1;
  for (const int64_t dim : dims) n *= dim;
  return n;
}

// With a mean and a spread that differ from stretch to stretch.
std::vector<double> Numbers(const Dims& dims, uint32_t seed = 1) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(ElementsOf(dims));
  double mean = 0, spread = 1;
  for (size_t i = 0; i < values.size(); ++i) {
    if (i % 29 == 0) {
      mean = 3 * normal(rng);
      spread = std::exp(normal(rng));
    }
    values[i] = mean + spread * normal(rng);
  }
  return values;
}

// Every type of numbers, codes, scales and zero points; those of scales take turns.
std::vector<QuantizeTypes> AllTypes() {
  std::vector<QuantizeTypes> all;
  constexpr DataType kScales[] = {kF16, kF32, kBF16};
  for (const DataType src : {kF32, kF16, kBF16}) {
    for (const DataType codes : {kS8, kU8, kS4, kU4, kS2, kU2, kF8E4M3, kF8E5M2}) {
      std::vector<DataType> zero_points{kUndef};
      if (IsInteger(codes)) zero_points = {kUndef, codes, kS32, kU8, kS8, kF32, kF16, kBF16};
      for (const DataType type : zero_points) {
        all.push_back({src, codes, kScales[all.size() % 3], type});
      }
    }
  }
  return all;
}

const std::vector<QuantizeLayout>& Layouts() {
  static const auto* const layouts = new std::vector<QuantizeLayout>{
      {.name = "runs_of_32", .dims = {3, 5, 64}, .group = {1, 1, 32}},
      {.name = "runs_of_16", .dims = {2, 70, 16}, .group = {1, 1, 16}},
      {.name = "rows", .dims = {2, 3, 96}, .group = {1, 1, 96}},
      {.name = "rows_of_several_axes", .dims = {3, 4, 48}, .group = {1, 4, 48}},
      {.name = "runs_of_11", .dims = {7, 33}, .group = {1, 11}},
      {.name = "runs_of_5", .dims = {6, 40}, .group = {1, 5}},
      {.name = "runs_of_3_odd_rows", .dims = {5, 9}, .group = {1, 3}},
      {.name = "runs_of_20", .dims = {4, 120}, .group = {1, 20}},
      {.name = "runs_of_600", .dims = {4, 1200}, .group = {1, 600}},
      {.name = "rows_of_603", .dims = {4, 603}, .group = {1, 603}},
      {.name = "one_each", .dims = {5, 33}, .group = {1, 1}},
      {.name = "columns_of_32", .dims = {2, 64, 48}, .group = {1, 32, 1}},
      {.name = "columns_of_4_odd", .dims = {3, 8, 35}, .group = {1, 4, 1}},
      {.name = "columns_of_4_even", .dims = {3, 8, 36}, .group = {1, 4, 1}},
      {.name = "columns_beyond_a_chunk", .dims = {4, 300}, .group = {2, 1}},
      {.name = "static_channels", .dims = {2, 40, 20}, .group = {1, 40, 1}},
      {.name = "per_tensor", .dims = {3, 7, 11}},
      {.name = "scalar", .dims = {}},
      {.name = "channel_last", .dims = {6, 40}, .axis = 1},
      {.name = "channel_first", .dims = {6, 40}, .axis = 0},
      {.name = "channel_middle", .dims = {2, 5, 16}, .axis = 1},
      {.name = "blocks", .dims = {8, 64}, .group = {4, 16}},
      {.name = "padded_lines",
       .dims = {3, 5, 64},
       .group = {1, 1, 32},
       .src_strides = Dims{400, 72, 1},
       .code_strides = Dims{404, 80, 1}},
      {.name = "padded_columns",
       .dims = {2, 8, 20},
       .group = {1, 4, 1},
       .src_strides = Dims{200, 24, 1},
       .code_strides = Dims{256, 32, 1}},
      {.name = "one_group_per_padded_line",
       .dims = {9, 32},
       .group = {1, 32},
       .src_strides = Dims{48, 1}},
      {.name = "swapped_axes",
       .dims = {2, 16, 12},
       .group = {1, 1, 4},
       .src_strides = Dims{192, 1, 16}},
      {.name = "codes_apart", .dims = {4, 16}, .group = {1, 8}, .code_strides = Dims{40, 2}},
      {.name = "parameters_apart",
       .dims = {3, 4, 64},
       .group = {1, 1, 16},
       .parameter_strides = Dims{64, 12, 3}},
      {.name = "parameters_swapped",
       .dims = {6, 64},
       .group = {1, 16},
       .parameter_strides = Dims{1, 6}},
  };
  return *layouts;
}

class CpuQuantizeTest : public ::testing::TestWithParam<QuantizeLayout> {};

TEST_P(CpuQuantizeTest, EveryTypeAsTheOracle) {
  for (const QuantizeTypes& types : AllTypes()) {
    ExpectQuantizesBothForms({GetParam(), types}, Numbers(GetParam().dims));
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, CpuQuantizeTest, ::testing::ValuesIn(Layouts()),
                         [](const auto& info) { return info.param.name; });

// Codes, scales and zero points of a few types that together use all loops.
constexpr QuantizeTypes kFewTypes[] = {
    {kF32, kS8, kF32, kUndef},     {kF16, kU4, kF16, kU4},       {kBF16, kS4, kBF16, kS4},
    {kF32, kU2, kF16, kF16},       {kF32, kU8, kF32, kU8},       {kF16, kS2, kF32, kF32},
    {kF32, kF8E4M3, kF16, kUndef}, {kF32, kF8E5M2, kF32, kUndef}};

TEST(CpuQuantize, GroupsThatSeveralThreadsShare) {
  for (const QuantizeTypes& types : kFewTypes) {
    for (const QuantizeLayout& layout :
         {QuantizeLayout{.name = "tensor", .dims = {5, 45001}},
          QuantizeLayout{.name = "rows", .dims = {2, 70000}, .group = {1, 70000}},
          QuantizeLayout{.name = "channels", .dims = {2000, 48}, .axis = 1}}) {
      ExpectQuantizesBothForms({layout, types}, Numbers(layout.dims));
    }
  }
}

TEST(CpuQuantize, GroupsWithoutSpread) {
  for (const QuantizeTypes& types : kFewTypes) {
    for (const Dims& group : {Dims{1, 32}, Dims{4, 1}, Dims{2, 16}}) {
      for (const double value : {0.0, -0.0, 1.0, -2.5, 1e-3, 300.0}) {
        const QuantizeLayout layout{.name = "constant", .dims = {4, 64}, .group = group};
        ExpectQuantizesBothForms({layout, types}, std::vector<double>(256, value));
        ExpectQuantizes({layout, types, /*power_of_two=*/true, /*floor=*/0.25f},
                        std::vector<double>(256, value));
      }
    }
  }
}

TEST(CpuQuantize, ExtremeNumbers) {
  for (const QuantizeTypes& types : kFewTypes) {
    const double largest = types.src == kF16 ? 65504 : 3.38e38;
    const double smallest = types.src == kF16 ? 0x1p-24 : 0x1p-133;
    std::vector<double> values;
    for (const double by : {largest, smallest, largest / 1e4, smallest * 1e4, 1e-30, 1e4}) {
      for (int i = 0; i < 32; ++i) values.push_back(by * (i % 7 - 3) / 3);
    }
    for (const Dims& group : {Dims{1, 32}, Dims{1, 1}, Dims{2, 8}, Dims{6, 32}}) {
      const QuantizeLayout layout{.name = "extremes", .dims = {6, 32}, .group = group};
      ExpectQuantizes({layout, types}, values);
      ExpectQuantizes({layout, types, /*power_of_two=*/true}, values);
    }
    const QuantizeLayout columns{.name = "columns", .dims = {6, 32}, .group = {6, 1}};
    ExpectQuantizesBothForms({columns, types}, values);
  }
}

TEST(CpuQuantize, PowersOfTwoAndFloors) {
  for (const QuantizeTypes& types : kFewTypes) {
    for (const float floor : {0.f, 1e-3f, 0.1f}) {
      for (const bool power_of_two : {false, true}) {
        const QuantizeLayout layout{.name = "runs", .dims = {7, 128}, .group = {1, 32}};
        ExpectQuantizes({layout, types, power_of_two, floor}, Numbers(layout.dims, 5));
      }
    }
  }
}

// What is not finite makes its own group NaN, and only that.
TEST(CpuQuantize, NumbersThatAreNotFiniteStayInTheirGroup) {
  for (const QuantizeTypes& types : kFewTypes) {
    for (const QuantizeLayout& layout :
         {QuantizeLayout{.name = "runs", .dims = {8, 64}, .group = {1, 16}},
          QuantizeLayout{.name = "tails", .dims = {8, 66}, .group = {1, 11}},
          QuantizeLayout{.name = "columns", .dims = {8, 64}, .group = {4, 1}},
          QuantizeLayout{.name = "blocks", .dims = {8, 64}, .group = {2, 16}},
          QuantizeLayout{.name = "one", .dims = {8, 64}}}) {
      for (const double bad : {kNan, -kNan, kInfinity, -kInfinity}) {
        for (const int at : {0, 100, 250}) {
          std::vector<double> values = Numbers(layout.dims);
          values[at] = bad;
          ExpectQuantizesBothForms({layout, types}, values);
          const QuantizeCase test{layout, types};
          const QuantizeMemory out = RunOracle(test, Pack(test.src(), values));
          const std::vector<double> scales = Unpack(test.scales(), out.scales);
          const auto nans = std::count_if(scales.begin(), scales.end(),
                                          [](double scale) { return std::isnan(scale); });
          EXPECT_EQ(nans, 1);
        }
      }
    }
  }
}

// Scales and zero points that no range gives.
TEST(CpuQuantize, OddGivenParameters) {
  const double scales[] = {0, -0.5, kInfinity, kNan, 1e-40, 3e38, -1e-3, 0.25};
  const double zero_points[] = {0, 3, -3, 7, 100, -100, 40000, -2000000000};
  for (const DataType src : {kF32, kF16}) {
    for (const DataType codes : {kS8, kU4, kU2}) {
      for (const DataType type : {kUndef, kS32, kF32}) {
        for (const Dims& group : {Dims{1, 32}, Dims{1, 4}}) {
          const QuantizeCase test{{.name = "odd", .dims = {8, 32}, .group = group},
                                  {src, codes, kF32, type}};
          const int64_t count = test.scales().elements();
          std::vector<double> values = Numbers(test.layout.dims, 9), s(count), z(count);
          values[3] = kNan;
          values[40] = kInfinity;
          values[230] = -kInfinity;
          for (int64_t i = 0; i < count; ++i) s[i] = scales[i % 8], z[i] = zero_points[i / 3 % 8];
          QuantizeMemory given{{}, Pack(test.scales(), s), {}};
          if (type != kUndef) given.zero_points = Pack(test.zero_points(), z);
          ExpectQuantizesWith(test, values, given);
        }
      }
    }
  }
}

// Data on ties: every quotient is an integer and a half.
TEST(CpuQuantize, TiesGoToEven) {
  for (const DataType src : {kF32, kF16}) {
    for (const DataType zero_points : {kUndef, kS8}) {
      const QuantizeCase test{{.name = "ties", .dims = {16, 32}, .group = {1, 32}},
                              {src, kS8, kF32, zero_points}};
      std::vector<double> values, scales(16), zps(16);
      for (int i = 0; i < 16; ++i) {
        scales[i] = 0.25 + 0.125 * i;
        zps[i] = i % 5 - 2;
        for (int j = 0; j < 32; ++j) values.push_back((j - 16 + 0.5) * scales[i]);
      }
      QuantizeMemory given{{}, Pack(test.scales(), scales), {}};
      if (zero_points != kUndef) given.zero_points = Pack(test.zero_points(), zps);
      const QuantizeMemory want = RunOracle(test, Pack(test.src(), values), &given);
      for (int i = 0; const cpu::KernelSet* kernels = cpu::KernelsAt(i); ++i) {
        const auto executable = cpu::CompileQuantize(test.MakePartition(false), *kernels);
        EXPECT_TRUE(RunQuantize(test, *executable, *MakeSerialExecutor(), Pack(test.src(), values),
                                &given) == want)
            << kernels->name;
      }
    }
  }
}

TEST(CpuQuantize, TensorsWithoutElements) {
  for (const DataType zero_points : {kUndef, kU8, kF32}) {
    const QuantizeTypes types{kF32, kU8, kF32, zero_points};
    for (const QuantizeLayout& layout :
         {QuantizeLayout{.name = "tensor", .dims = {0, 4}},
          QuantizeLayout{.name = "channels", .dims = {0, 4}, .axis = 1},
          QuantizeLayout{.name = "no_channels", .dims = {0, 4}, .axis = 0},
          QuantizeLayout{.name = "groups", .dims = {0, 4}, .group = {1, 4}}}) {
      ExpectQuantizes({layout, types}, {});
    }
  }
}

std::string KernelOf(const QuantizeLayout& layout, DataType codes) {
  const QuantizeCase test{layout, {kF32, codes, kF32, kUndef}};
  return cpu::CompileQuantize(test.MakePartition(true), *cpu::KernelsAt(0))->kernel();
}

TEST(CpuQuantize, KernelSaysWhatRuns) {
  EXPECT_EQ(KernelOf({.name = "", .dims = {4, 64}, .group = {1, 32}}, kU4),
            "cpu/portable quantize, ranges and codes in one kernel: runs of 32 elements");
  EXPECT_EQ(KernelOf({.name = "", .dims = {64, 16}, .group = {32, 1}}, kU4),
            "cpu/portable quantize, ranges and codes in one kernel: columns of 32 elements");
  EXPECT_EQ(KernelOf({.name = "", .dims = {2, 200000}}, kU4),
            "cpu/portable quantize, ranges and codes in one kernel: runs of 400000 elements, in 7 "
            "parts each");
  EXPECT_EQ(KernelOf({.name = "", .dims = {64, 15}, .group = {32, 1}}, kU4),
            "cpu/portable quantize, ranges and codes in one kernel: element by element (codes of "
            "different lines share bytes)");
  EXPECT_EQ(KernelOf({.name = "", .dims = {64, 16}, .group = {2, 4}}, kS8),
            "cpu/portable quantize, ranges and codes in one kernel: element by element (a group is "
            "neither one run nor one column)");
}

}  // namespace
}  // namespace kvant::testing
