// The CUDA kernels of DynamicQuantize and DynamicDequantize on the SIMT executor, judged by the
// oracle; the executor finds no fault. Memory ends where an unreadable page begins.
#include <cmath>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kvant/backends/cuda/cuda_backend.h"
#include "kvant/backends/cuda/runtime/jit.h"
#include "kvant/backends/cuda/simt/launcher.h"
#include "kvant/backends/cuda/store/quantize_plan.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tests/backends/attention/harness.h"
#include "kvant/tests/backends/store/quantize_harness.h"

namespace kvant::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::unique_ptr<Executable> CompileOn(const std::shared_ptr<cuda::Launcher>& launcher,
                                      const Partition& partition) {
  auto executable = cuda::MakeBackend("cuda_simt", launcher)->Compile(partition);
  EXPECT_TRUE(executable.ok()) << executable.status();
  return executable.ok() ? std::move(*executable) : nullptr;
}

void ExpectQuantizesOnDevice(const QuantizeCase& test, const std::vector<double>& values,
                             const QuantizeMemory* given = nullptr) {
  SCOPED_TRACE(test.layout.name + " " + test.types.ToString() +
               (given == nullptr ? ", computed" : ", taken"));
  const Bytes src = Pack(test.src(), values);
  const std::unique_ptr<Executable> executable =
      CompileOn(cuda::MakeSimtLauncher(), test.MakePartition(given == nullptr));
  ASSERT_NE(executable, nullptr);
  const QuantizeMemory got = RunQuantize(test, *executable, *MakeSerialExecutor(), src, given);
  ExpectAsOracle(test, Unpack(test.src(), src), got, RunOracle(test, src, given), given == nullptr);
  if (::testing::Test::HasFailure()) ADD_FAILURE() << executable->kernel();
}

void ExpectBothForms(const QuantizeCase& test, const std::vector<double>& values) {
  ExpectQuantizesOnDevice(test, values);
  const QuantizeMemory given = RunOracle(test, Pack(test.src(), values));
  ExpectQuantizesOnDevice(test, values, &given);
}

// What DynamicDequantize makes of a case's codes, scales and zero points; its values are the case's
// source.
std::vector<double> RunDequantize(const QuantizeCase& test, const QuantizeMemory& memory,
                                  bool on_device) {
  Op op;
  op.kind = OpKind::kDynamicDequantize;
  op.name = "dequantize";
  op.attrs = test.attributes(/*computes=*/false);
  std::vector<LogicalTensor> inputs{test.codes(), test.scales()};
  const bool has_zero_points = test.types.zero_points != kUndef;
  if (has_zero_points) inputs.push_back(test.zero_points());
  Graph graph;
  absl::Status status = graph.AddOp(op, inputs, {test.src()});
  if (status.ok()) status = graph.Finalize();
  if (status.ok()) status = InferShapes(graph);
  EXPECT_TRUE(status.ok()) << status;
  const Partition partition = PartitionGraph(graph)->front();
  const auto executable = on_device ? CompileOn(cuda::MakeSimtLauncher(), partition)
                                    : *MakeOracleBackend()->Compile(partition);
  std::deque<cpu::GuardedBuffer> buffers;
  const auto guarded = [&buffers](const Bytes& bytes) {
    buffers.emplace_back(bytes.size());
    if (!bytes.empty()) std::memcpy(buffers.back().data(), bytes.data(), bytes.size());
    return buffers.back().data();
  };
  std::vector<const void*> in{guarded(memory.codes), guarded(memory.scales)};
  if (has_zero_points) in.push_back(guarded(memory.zero_points));
  Bytes values = Pack(test.src(), {});
  std::vector<void*> out{guarded(values)};
  const auto executor = MakeSerialExecutor();
  const absl::Status done = executable->Run({*executor, in, absl::MakeSpan(out)});
  EXPECT_TRUE(done.ok()) << done;
  if (!values.empty()) std::memcpy(values.data(), out[0], values.size());
  const std::vector<double> result = Unpack(test.src(), values);
  // Nothing but elements was written.
  EXPECT_TRUE(Pack(test.src(), result) == values);
  return result;
}

void ExpectDequantizes(const QuantizeCase& test, const std::vector<double>& numbers) {
  SCOPED_TRACE(test.layout.name + " " + test.types.ToString());
  const QuantizeMemory memory = RunOracle(test, Pack(test.src(), numbers));
  const std::vector<double> want = RunDequantize(test, memory, false);
  const std::vector<double> got = RunDequantize(test, memory, true);
  ASSERT_EQ(got.size(), want.size());
  // f32 arithmetic, then one rounding.
  const double ulp = test.types.src == kF32 ? 0x1p-22 : test.types.src == kF16 ? 0x1p-10 : 0x1p-7;
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::isnan(want[i]) ? std::isnan(got[i]) : got[i] == want[i]) continue;
    if (std::abs(got[i] - want[i]) <= std::abs(want[i]) * ulp + 0x1p-24) continue;
    ADD_FAILURE() << "element " << i << " is " << got[i] << ", not " << want[i];
    return;
  }
}

// Beyond QuantizeLayouts: appending to a cache, and groups that several launches share.
std::vector<QuantizeLayout> DeviceLayouts() {
  std::vector<QuantizeLayout> layouts = QuantizeLayouts();
  layouts.push_back({.name = "append_token",
                     .dims = {2, 3, 1, 64},
                     .group = {1, 1, 1, 32},
                     .code_strides = Dims{3 * 10 * 64, 10 * 64, 64, 1},
                     .parameter_strides = Dims{3 * 10 * 2, 10 * 2, 2, 1}});
  layouts.push_back({.name = "append_channel_block",
                     .dims = {2, 2, 32, 48},
                     .group = {1, 1, 32, 1},
                     .code_strides = Dims{2 * 96 * 48, 96 * 48, 48, 1},
                     .parameter_strides = Dims{2 * 3 * 48, 3 * 48, 48, 1}});
  layouts.push_back({.name = "tokens_side_by_side",
                     .dims = {2, 5, 20},
                     .group = {1, 1, 20},
                     .code_strides = Dims{120, 1, 6}});
  layouts.push_back({.name = "rows_of_256", .dims = {5, 256}, .group = {1, 256}});
  layouts.push_back({.name = "rows_of_1000", .dims = {2, 1000}, .group = {1, 1000}});
  layouts.push_back({.name = "tensor_in_parts", .dims = {3, 7001}});
  layouts.push_back({.name = "columns_in_parts", .dims = {600, 40}, .axis = 1});
  return layouts;
}

class CudaQuantizeTest : public ::testing::TestWithParam<QuantizeLayout> {};

// All types on small layouts, every so many on large ones.
TEST_P(CudaQuantizeTest, AsTheOracle) {
  const std::vector<QuantizeTypes> types = AllQuantizeTypes();
  const std::vector<double> numbers = QuantizeNumbers(GetParam().dims);
  const size_t step = numbers.size() > 5000 ? 37 : 5;
  for (size_t i = numbers.size() % step; i < types.size(); i += step) {
    ExpectBothForms({GetParam(), types[i]}, numbers);
    ExpectDequantizes({GetParam(), types[i]}, numbers);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, CudaQuantizeTest, ::testing::ValuesIn(DeviceLayouts()),
                         [](const auto& info) { return info.param.name; });

constexpr QuantizeTypes kFewTypes[] = {
    {kF32, kS8, kF32, kUndef},     {kF16, kU4, kF16, kU4}, {kBF16, kS4, kBF16, kS4},
    {kF32, kU2, kF16, kF16},       {kF32, kU8, kF32, kU8}, {kF16, kS2, kF32, kF32},
    {kF32, kF8E4M3, kF16, kUndef}, {kF16, kU2, kF16, kU2}, {kF32, kF8E5M2, kF32, kUndef}};

const std::vector<QuantizeLayout>& FewLayouts() {
  static const auto* const layouts =
      new std::vector<QuantizeLayout>{{.name = "runs", .dims = {8, 64}, .group = {1, 16}},
                                      {.name = "tails", .dims = {8, 66}, .group = {1, 11}},
                                      {.name = "columns", .dims = {8, 64}, .group = {4, 1}},
                                      {.name = "blocks", .dims = {8, 64}, .group = {2, 16}},
                                      {.name = "one", .dims = {8, 64}}};
  return *layouts;
}

TEST(CudaQuantize, EveryTypeOfAGroup) {
  const std::vector<QuantizeTypes> types = AllQuantizeTypes();
  for (size_t i = 0; i < types.size(); ++i) {
    const QuantizeLayout layout{.name = "runs", .dims = {3, 32}, .group = {1, 16}};
    ExpectBothForms({layout, types[i]}, QuantizeNumbers(layout.dims, static_cast<uint32_t>(i)));
    ExpectDequantizes({layout, types[i]}, QuantizeNumbers(layout.dims, 7));
    if (HasFailure()) return;
  }
}

TEST(CudaQuantize, GroupsWithoutSpread) {
  for (const QuantizeTypes& types : kFewTypes) {
    for (const double value : {0.0, 1.0, -2.5, 300.0}) {
      const QuantizeLayout layout{.name = "constant", .dims = {4, 32}, .group = {1, 16}};
      ExpectQuantizesOnDevice({layout, types}, std::vector<double>(128, value));
      ExpectQuantizesOnDevice({layout, types, /*power_of_two=*/true, /*floor=*/0.25f},
                              std::vector<double>(128, value));
    }
  }
}

TEST(CudaQuantize, ExtremeNumbers) {
  for (const QuantizeTypes& types : kFewTypes) {
    const double largest = types.src == kF16 ? 65504 : 3.38e38;
    const double smallest = types.src == kF16 ? 0x1p-24 : 0x1p-133;
    std::vector<double> values;
    for (const double by : {largest, smallest, largest / 1e4, smallest * 1e4, 1e-30, 1e4}) {
      for (int i = 0; i < 32; ++i) values.push_back(by * (i % 7 - 3) / 3);
    }
    for (const Dims& group : {Dims{1, 32}, Dims{1, 1}, Dims{6, 1}}) {
      const QuantizeLayout layout{.name = "extremes", .dims = {6, 32}, .group = group};
      ExpectBothForms({layout, types}, values);
      ExpectQuantizesOnDevice({layout, types, /*power_of_two=*/true}, values);
    }
  }
}

// Scales are the oracle's to the bit, whatever range they are of.
// Numbers and zero points whose sum f32 does not hold.
TEST(CudaQuantize, RealZeroPointsOfLargeNumbers) {
  for (const DataType codes : {kS8, kU8, kU4}) {
    for (const DataType scales : {kF32, kF16}) {
      for (const Dims& group : {Dims{1, 32}, Dims{4, 1}}) {
        const QuantizeCase test{{.name = "large", .dims = {8, 32}, .group = group},
                                {kF32, codes, scales, kF32}};
        const int64_t count = test.scales().elements();
        std::vector<double> values, s(count), z(count);
        for (int64_t i = 0; i < 256; ++i) values.push_back((static_cast<double>(i) - 127) * 2.6e36);
        ExpectQuantizesOnDevice(test, values);
        for (int64_t i = 0; i < count; ++i) {
          s[i] = (i % 2 == 0 ? 1 : -1) * (scales == kF16 ? 6e4 : i % 3 == 0 ? 9e37 : 2.5e37);
          z[i] = i % 4 < 2 ? 2.2e38 : -3.1e38;
        }
        const QuantizeMemory given{{}, Pack(test.scales(), s), Pack(test.zero_points(), z)};
        ExpectQuantizesOnDevice(test, values, &given);
      }
    }
  }
}

TEST(CudaQuantize, PowersOfTwoAndFloors) {
  for (const QuantizeTypes& types : kFewTypes) {
    for (const float floor : {0.f, 0.1f}) {
      for (const bool power_of_two : {false, true}) {
        const QuantizeLayout layout{.name = "runs", .dims = {40, 16}, .group = {1, 8}};
        ExpectQuantizesOnDevice({layout, types, power_of_two, floor},
                                QuantizeNumbers(layout.dims, 5));
      }
    }
  }
}

TEST(CudaQuantize, NumbersThatAreNotFiniteStayInTheirGroup) {
  for (const QuantizeTypes& types : kFewTypes) {
    for (const QuantizeLayout& layout : FewLayouts()) {
      for (const double bad : {kNan, -kInfinity}) {
        std::vector<double> values = QuantizeNumbers(layout.dims);
        values[100] = bad;
        ExpectBothForms({layout, types}, values);
      }
    }
  }
}

// Scales and zero points that no range gives.
TEST(CudaQuantize, OddGivenParameters) {
  const double scales[] = {0, -0.5, kInfinity, kNan, 1e-40, 3e38, -1e-3, 0.25};
  const double zero_points[] = {0, 3, -3, 7, 100, -100, 40000, -2000000000};
  for (const DataType codes : {kS8, kU4, kU2}) {
    for (const DataType type : {kUndef, kS32, kF32}) {
      for (const Dims& group : {Dims{1, 16}, Dims{8, 1}, Dims{1, 3}}) {
        const QuantizeCase test{{.name = "odd", .dims = {8, 48}, .group = group},
                                {kF32, codes, kF32, type}};
        const int64_t count = test.scales().elements();
        std::vector<double> values = QuantizeNumbers(test.layout.dims, 9), s(count), z(count);
        values[3] = kNan;
        values[40] = kInfinity;
        values[230] = -kInfinity;
        for (int64_t i = 0; i < count; ++i) s[i] = scales[i % 8], z[i] = zero_points[i / 3 % 8];
        QuantizeMemory given{{}, Pack(test.scales(), s), {}};
        if (type != kUndef) given.zero_points = Pack(test.zero_points(), z);
        ExpectQuantizesOnDevice(test, values, &given);
      }
    }
  }
}

TEST(CudaQuantize, TensorsWithoutElements) {
  for (const DataType zero_points : {kUndef, kU4, kF32}) {
    const QuantizeTypes types{kF32, kU8, kF32, zero_points};
    for (const QuantizeLayout& layout :
         {QuantizeLayout{.name = "tensor", .dims = {0, 4}},
          QuantizeLayout{.name = "channels", .dims = {0, 4}, .axis = 1},
          QuantizeLayout{.name = "no_channels", .dims = {0, 4}, .axis = 0},
          QuantizeLayout{.name = "groups", .dims = {0, 4}, .group = {1, 4}}}) {
      ExpectQuantizesOnDevice({layout, types}, {});
    }
  }
}

// Codes in a codebook, of which no two values are the same distance from their codes.
TEST(CudaQuantize, CodebooksAreReadBack) {
  for (const DataType codes : {kU2, kU4, kU8}) {
    std::vector<float> codebook;
    for (int i = 0; i < 1 << BitsOf(codes); ++i) {
      codebook.push_back(std::sin(static_cast<float>(7 * i + 1)) * (1 + static_cast<float>(i % 3)));
    }
    for (const QuantizeLayout& layout : FewLayouts()) {
      for (const DataType type : {kF32, kF16, kBF16}) {
        QuantizeCase test{layout, {type, codes, kF16, kUndef}};
        test.codebook = codebook;
        ExpectDequantizes(test, QuantizeNumbers(layout.dims, 3));
      }
    }
  }
}

absl::StatusOr<cuda::QuantizePlan> PlanOf(const QuantizeLayout& layout, const QuantizeTypes& types,
                                          bool computes = true) {
  const QuantizeCase test{layout, types};
  return cuda::PlanStore(*test.MakePartition(computes).store(),
                         cuda::MakeSimtLauncher()->properties());
}

TEST(CudaQuantize, PlanSaysWhatRuns) {
  const auto text = [](const QuantizeLayout& layout, DataType codes, DataType zero_points) {
    return PlanOf(layout, {kF16, codes, kF16, zero_points})->ToString();
  };
  const QuantizeLayout rows{.name = "", .dims = {4, 64}, .group = {1, 32}};
  EXPECT_EQ(text(rows, kU4, kU4), "groups of 32 elements, each by 2 lanes");
  EXPECT_EQ(text({.name = "", .dims = {64, 128}, .group = {32, 1}}, kU2, kF16),
            "groups in columns, 32 by 128 threads");
  EXPECT_EQ(text({.name = "", .dims = {2, 200000}}, kU4, kUndef),
            "ranges in 16 parts, then groups, each by 256 threads");
  EXPECT_EQ(text({.name = "", .dims = {64, 15}, .group = {32, 1}}, kU4, kU4),
            "parameters of groups in columns, 16 by 64 threads, then codes, byte by byte, then "
            "codes, byte by byte");
}

TEST(CudaQuantize, RefusesLinesThatInterleave) {
  const QuantizeLayout layout{
      .name = "interleaved", .dims = {2, 4}, .group = {1, 4}, .code_strides = Dims{1, 2}};
  EXPECT_TRUE(PlanOf(layout, {kF32, kU4, kF32, kUndef}).ok());  // nested the other way round
  const QuantizeLayout crossed{
      .name = "crossed", .dims = {2, 2}, .group = {1, 2}, .code_strides = Dims{3, 2}};
  EXPECT_TRUE(PlanOf(crossed, {kF32, kU4, kF32, kUndef}).ok());
  const QuantizeLayout knotted{
      .name = "knotted", .dims = {2, 3}, .group = {1, 3}, .code_strides = Dims{3, 2}};
  const auto plan = PlanOf(knotted, {kF32, kU4, kF32, kUndef});
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(
      plan.status().message(),
      "does not take codes of less than a byte whose groups or rows end within bytes that others "
      "write");
}

// What is written for GPUs compiles for them, and nothing is spilled.
TEST(CudaQuantize, CompilesWithoutSpills) {
  const QuantizeLayout layouts[] = {{.name = "", .dims = {512, 128}, .group = {1, 128}},
                                    {.name = "", .dims = {512, 1024}, .group = {1, 1024}},
                                    {.name = "", .dims = {512, 128}, .group = {32, 1}},
                                    {.name = "", .dims = {512, 1280}},
                                    {.name = "", .dims = {512, 33}, .group = {1, 3}}};
  const QuantizeTypes types[] = {{kF16, kU4, kF16, kU4}, {kF32, kF8E4M3, kF32, kUndef}};
  cuda::Jit jit({.disk_cache = false});
  for (const char* arch : {"sm_80", "sm_90a", "sm_100a"}) {
    for (size_t i = 0; i < std::size(layouts); ++i) {
      const auto plan = PlanOf(layouts[i], types[i % 2]);
      ASSERT_TRUE(plan.ok()) << plan.status();
      for (const cuda::QuantizeLaunch& launch : plan->launches) {
        const auto cubin = jit.Get(cuda::MakeQuantizeKernel(launch).source, arch);
        if (cubin.status().code() == absl::StatusCode::kUnimplemented) {
          GTEST_SKIP() << cubin.status();
        }
        ASSERT_TRUE(cubin.ok()) << cubin.status();
        ASSERT_TRUE((*cubin)->stats.has_value());
        const cuda::KernelStats& stats = *(*cubin)->stats;
        EXPECT_EQ(stats.spill_store_bytes + stats.spill_load_bytes, 0);
        EXPECT_LE(stats.registers, 128);
        RecordProperty(plan->ToString() + " " + arch, stats.registers);
      }
    }
  }
}

}  // namespace
}  // namespace kvant::testing
