// DynamicQuantize on the kernels of every instruction set, judged by the oracle.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "gtest/gtest.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/tests/backends/store/quantize_harness.h"

namespace kvant::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class CpuQuantizeTest : public ::testing::TestWithParam<QuantizeLayout> {};

TEST_P(CpuQuantizeTest, EveryTypeAsTheOracle) {
  for (const QuantizeTypes& types : AllQuantizeTypes()) {
    ExpectQuantizesBothForms({GetParam(), types}, QuantizeNumbers(GetParam().dims));
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, CpuQuantizeTest, ::testing::ValuesIn(QuantizeLayouts()),
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
      ExpectQuantizesBothForms({layout, types}, QuantizeNumbers(layout.dims));
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

// A number and its zero point in real units fit f32, but not their sum.
TEST(CpuQuantize, SumsWithZeroPointsBeyondF32) {
  std::vector<double> values;
  for (int i = 0; i < 64; ++i) values.push_back(3.3e38 * (i % 9 - 4) / 4 * (i < 32 ? 1 : 1e-40));
  for (const DataType codes : {kU8, kU4, kU2, kS4}) {
    const QuantizeTypes types{.codes = codes, .scales = kF32, .zero_points = kF32};
    const QuantizeLayout layout{.name = "rows", .dims = {2, 32}, .group = {1, 32}};
    ExpectQuantizesBothForms({layout, types}, values);
  }
}

TEST(CpuQuantize, PowersOfTwoAndFloors) {
  for (const QuantizeTypes& types : kFewTypes) {
    for (const float floor : {0.f, 1e-3f, 0.1f}) {
      for (const bool power_of_two : {false, true}) {
        const QuantizeLayout layout{.name = "runs", .dims = {7, 128}, .group = {1, 32}};
        ExpectQuantizes({layout, types, power_of_two, floor}, QuantizeNumbers(layout.dims, 5));
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
          std::vector<double> values = QuantizeNumbers(layout.dims);
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

// NaN of either sign, in any part of a group that several threads share.
TEST(CpuQuantize, NanInPartsOfAGroup) {
  for (const QuantizeTypes& types : {kFewTypes[0], kFewTypes[1], kFewTypes[3]}) {
    const QuantizeLayout layout{.name = "tensor", .dims = {3, 70000}};
    for (const double bad : {kNan, -kNan}) {
      for (const int at : {7, 100000, 209999}) {
        std::vector<double> values = QuantizeNumbers(layout.dims);
        values[at] = bad;
        ExpectQuantizes({layout, types}, values);
      }
    }
  }
}

// Zero points of more than 16 bits that bring codes back into their range.
TEST(CpuQuantize, ZeroPointsFarAway) {
  for (const QuantizeLayout& layout :
       {QuantizeLayout{.name = "runs", .dims = {8, 64}, .group = {1, 16}},
        QuantizeLayout{.name = "runs_apart",
        .dims = {6, 4, 32},
        .group = {1, 1, 32},
        .code_strides = Dims{160, 32, 1}},
        QuantizeLayout{.name = "codes_apart",
        .dims = {6, 4, 32},
        .group = {1, 1, 32},
        .code_strides = Dims{160, 40, 1}},
        QuantizeLayout{.name = "tensor", .dims = {3, 70000}},
        QuantizeLayout{.name = "columns", .dims = {2000, 48}, .axis = 1}}) {
    // Also beyond what f32 holds to the last bit.
    for (const double zero_point : {40000., -50000., 16777217., -2147483581.}) {
      const QuantizeCase test{layout, {kF32, kU8, kF32, kS32}};
      const auto count = static_cast<size_t>(test.scales().elements());
      std::vector<double> values(QuantizeNumbers(layout.dims).size());
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = (static_cast<double>(i * 7 % 256) - zero_point) * 0.5;
      }
      ExpectQuantizesWith(test, values,
                          {{},
                           Pack(test.scales(), std::vector<double>(count, 0.5)),
                           Pack(test.zero_points(), std::vector<double>(count, zero_point))});
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
          std::vector<double> values = QuantizeNumbers(test.layout.dims, 9), s(count), z(count);
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

// Numbers and zero points whose sum f32 does not hold.
TEST(CpuQuantize, RealZeroPointsOfLargeNumbers) {
  for (const DataType codes : {kS8, kU8, kS4, kU4}) {
    for (const Dims& group : {Dims{1, 32}, Dims{4, 1}}) {
      const QuantizeCase test{{.name = "large", .dims = {8, 32}, .group = group},
                              {kF32, codes, kF32, kF32}};
      const int64_t count = test.scales().elements();
      std::vector<double> values, s(count), z(count);
      for (int64_t i = 0; i < 256; ++i) values.push_back((static_cast<double>(i) - 127) * 2.6e36);
      for (int64_t i = 0; i < count; ++i) {
        s[i] = (i % 2 == 0 ? 1 : -1) * (i % 3 == 0 ? 9e37 : 2.5e37);
        z[i] = i % 4 < 2 ? 2.2e38 : -3.1e38;
      }
      ExpectQuantizesWith(test, values, {{}, Pack(test.scales(), s), Pack(test.zero_points(), z)});
    }
  }
}

// Also where numbers are far from 0 for their spread, and scales at their type's limits.
TEST(CpuQuantize, SetsAgreeOnEveryBit) {
  for (const QuantizeTypes& types : kFewTypes) {
    for (const Dims& group : {Dims{1, 32}, Dims{1, 48}, Dims{1, 11}, Dims{4, 1}}) {
      const QuantizeCase test{{.name = "sets", .dims = {16, 1056}, .group = group}, types};
      for (const double mean : {0.0, 1.0, -300.0, 6e4, 1e9, -1e30}) {
        std::vector<double> values = QuantizeNumbers(test.layout.dims, 3);
        for (double& value : values) value = mean + value * (1 + std::abs(mean) / 64);
        const Bytes src = Pack(test.src(), values);
        std::optional<QuantizeMemory> want;
        for (int i = 0; const cpu::KernelSet* kernels = cpu::KernelsAt(i); ++i) {
          const auto executable =
              std::move(*cpu::CompileStore(*test.MakePartition(true).store(), *kernels));
          const QuantizeMemory got =
              RunQuantize(test, *executable, *MakeSerialExecutor(), src, nullptr);
          if (!want) want = got;
          EXPECT_TRUE(got == *want) << kernels->name << " " << types.ToString() << " " << mean;
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
        const auto executable =
            std::move(*cpu::CompileStore(*test.MakePartition(false).store(), *kernels));
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

// Two threads, for those who ask.
class AskingExecutor : public Executor {
 public:
  int max_concurrency() const override { return 2; }
  void ParallelFor(int64_t n, absl::FunctionRef<void(int64_t, int)> body) override {
    asked_ = true;
    for (int64_t i = 0; i < n; ++i) body(i, 0);
  }
  bool asked() const { return asked_; }

 private:
  bool asked_ = false;
};

// Where a byte has codes of two units, threads would lose each other's.
TEST(CpuQuantize, UnitsThatShareBytesStayInOneThread) {
  const struct {
    QuantizeLayout layout;
    bool threads;
  } cases[] = {
      {{.name = "dense", .dims = {2, 6000, 64}, .group = {1, 1, 64}}, true},
      {{.name = "apart",
        .dims = {2, 600, 64},
        .group = {1, 1, 64},
        .code_strides = Dims{64, 129, 1}},
       false},
      {{.name = "odd runs", .dims = {64, 2046}, .group = {1, 11}}, true},
      {{.name = "even parts", .dims = {3, 114036}, .group = {1, 114036}}, true},
      {{.name = "odd parts", .dims = {3, 114035}, .group = {1, 114035}}, false},
  };
  for (const auto& [layout, threads] : cases) {
    const QuantizeCase test{layout, {kF32, kU4, kF32, kF32}};
    const auto executable =
        std::move(*cpu::CompileStore(*test.MakePartition(true).store(), *cpu::KernelsAt(0)));
    AskingExecutor executor;
    RunQuantize(test, *executable, executor, Pack(test.src(), QuantizeNumbers(layout.dims)));
    EXPECT_EQ(executor.asked(), threads) << layout.name;
  }
}

std::string KernelOf(const QuantizeLayout& layout, DataType codes) {
  const QuantizeCase test{layout, {kF32, codes, kF32, kUndef}};
  return (*cpu::CompileStore(*test.MakePartition(true).store(), *cpu::KernelsAt(0)))->kernel();
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
            "cpu/portable quantize, ranges and codes in one kernel: columns of 32 elements");
  EXPECT_EQ(KernelOf({.name = "", .dims = {64, 16}, .group = {2, 4}}, kS8),
            "cpu/portable quantize, ranges and codes in one kernel: element by element (a group is "
            "neither one run nor one column)");
}

}  // namespace
}  // namespace kvant::testing
