// Codebooks and the formulas of ggml in DynamicQuantize, on the kernels of every instruction set
// and on CUDA's, judged by the oracle.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/backends/cuda_simt.h"
#include "kvant/graph/codebooks.h"
#include "kvant/tests/backends/store/append_harness.h"
#include "kvant/tests/backends/store/quantize_harness.h"

namespace kvant::testing {
namespace {

using Codebook = std::vector<float>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Codebook Named(std::string_view name) {
  const absl::Span<const float> values = FindCodebook(name)->values;
  return {values.begin(), values.end()};
}

// In no order, with values that occur twice.
Codebook Shuffled(int count) {
  std::mt19937 rng(count);
  std::normal_distribution<float> normal;
  Codebook codebook;
  for (int i = 0; i < count; ++i) {
    codebook.push_back(i % 5 == 4 ? codebook[i / 2] : normal(rng));
  }
  return codebook;
}

struct Table {
  std::string name;
  DataType codes;
  Codebook values;
};

std::vector<Table> Tables() {
  return {{"nf4", kU4, Named("nf4")},         {"iq4_nl", kU4, Named("iq4_nl")},
          {"e2m1", kU4, Named("e2m1")},       {"four", kU2, {-1.5f, -0.5f, 0.5f, 1.5f}},
          {"four_mixed", kU2, {3, -1, 0, 3}}, {"sixteen", kU4, Shuffled(16)},
          {"many", kU8, Shuffled(256)}};
}

class CpuCodebookTest : public ::testing::TestWithParam<QuantizeLayout> {};

TEST_P(CpuCodebookTest, EveryTableAsTheOracle) {
  for (const Table& table : Tables()) {
    for (const DataType src : {kF32, kF16, kBF16}) {
      const QuantizeTypes types{src, table.codes, src == kF32 ? kF16 : kF32, kUndef};
      const QuantizeCase test{.layout = GetParam(), .types = types, .codebook = table.values};
      ExpectQuantizesBothForms(test, QuantizeNumbers(GetParam().dims));
      if (HasFailure()) {
        ADD_FAILURE() << table.name;
        return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, CpuCodebookTest, ::testing::ValuesIn(QuantizeLayouts()),
                         [](const auto& info) { return info.param.name; });

// Numbers on the middles between entries, whose code must be the oracle's.
TEST(CpuCodebook, TiesGoToTheLowerCode) {
  for (const Table& table : Tables()) {
    if (table.name == "nf4" || table.name == "sixteen" || table.name == "many") continue;
    const QuantizeCase test{.layout = {.name = "ties", .dims = {1, 256}, .group = {1, 256}},
                            .types = {kF32, table.codes, kF32, kUndef},
                            .codebook = table.values};
    std::vector<double> values;
    for (const float a : table.values) {
      for (const float b : table.values) values.push_back((a + b) / 2);
    }
    values.resize(256, 0.25);
    const Bytes src = Pack(test.src(), values);
    QuantizeMemory given{{}, Pack(test.scales(), {1}), {}};
    const QuantizeMemory want = RunOracle(test, src, &given);
    for (int i = 0; const cpu::KernelSet* kernels = cpu::KernelsAt(i); ++i) {
      const auto executable =
          std::move(*cpu::CompileStore(*test.MakePartition(false).store(), *kernels));
      EXPECT_TRUE(RunQuantize(test, *executable, *MakeSerialExecutor(), src, &given) == want)
          << table.name << " " << kernels->name;
    }
    const auto simt = std::move(*MakeCudaSimtBackend()->Compile(test.MakePartition(false)));
    EXPECT_TRUE(RunQuantize(test, *simt, *MakeSerialExecutor(), src, &given) == want)
        << table.name << " " << simt->kernel();
  }
}

TEST(CpuCodebook, OddNumbersAndScales) {
  const double scales[] = {0, -0.5, kInfinity, kNan, 1e-40, 3e38, -1e-3, 0.25};
  for (const Table& table : Tables()) {
    const QuantizeCase test{.layout = {.name = "odd", .dims = {8, 32}, .group = {1, 4}},
                            .types = {kF32, table.codes, kF32, kUndef},
                            .codebook = table.values};
    std::vector<double> values = QuantizeNumbers(test.layout.dims, 9), given;
    values[3] = kNan;
    values[40] = kInfinity;
    values[230] = -kInfinity;
    for (int64_t i = 0; i < test.scales().elements(); ++i) given.push_back(scales[i % 8]);
    ExpectQuantizesWith(test, values, {{}, Pack(test.scales(), given), {}});
    ExpectQuantizes(test, values);
    ExpectQuantizes(test, std::vector<double>(256, 0.0));
  }
}

struct Format {
  std::string name;
  DataType codes, zero_points = kUndef;
  Codebook codebook = {};
};

std::vector<Format> GgmlFormats() {
  return {
      {"q8_0", kS8}, {"q4_0", kS4}, {"q4_1", kU4, kF16}, {"iq4_nl", kU4, kUndef, Named("iq4_nl")}};
}

QuantizeCase GgmlCase(const Format& format, const QuantizeLayout& layout, DataType src = kF32,
                      DataType scales = kF16) {
  return {.layout = layout,
          .types = {src, format.codes, scales, format.zero_points},
          .codebook = format.codebook,
          .ggml = true};
}

TEST(CpuGgmlFormula, EveryRunAsTheOracle) {
  for (const Format& format : GgmlFormats()) {
    for (const QuantizeLayout& layout :
         {QuantizeLayout{.name = "runs_of_32", .dims = {5, 7, 64}, .group = {1, 1, 32}},
          QuantizeLayout{.name = "runs_of_16", .dims = {9, 48}, .group = {1, 16}},
          QuantizeLayout{.name = "runs_of_11", .dims = {6, 44}, .group = {1, 11}},
          QuantizeLayout{.name = "rows_of_96", .dims = {2, 3, 96}, .group = {1, 1, 96}},
          QuantizeLayout{.name = "runs_of_600", .dims = {4, 1200}, .group = {1, 600}},
          QuantizeLayout{.name = "tensor", .dims = {70000}},
          QuantizeLayout{.name = "padded",
          .dims = {3, 5, 64},
          .group = {1, 1, 32},
          .src_strides = Dims{400, 72, 1},
          .code_strides = Dims{404, 80, 1}},
          QuantizeLayout{.name = "parameters_swapped",
          .dims = {6, 64},
          .group = {1, 16},
          .parameter_strides = Dims{1, 6}}}) {
      for (const DataType src : {kF32, kF16, kBF16}) {
        for (const DataType scales : {kF16, kF32, kBF16}) {
          SCOPED_TRACE(format.name);
          ExpectQuantizes(GgmlCase(format, layout, src, scales), QuantizeNumbers(layout.dims, 4));
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Groups where the largest and the smallest are as far from 0, of nothing, of tiny numbers, of
// halves of a step, of what is not finite, and of scales beyond f16.
TEST(CpuGgmlFormula, OddGroups) {
  const QuantizeLayout layout{.name = "runs", .dims = {17, 32}, .group = {1, 32}};
  std::vector<double> values = QuantizeNumbers(layout.dims, 3);
  const auto row = [&values](int r) { return values.begin() + r * 32; };
  for (const int r : {0, 1, 2}) {
    *(row(r) + 3 + r) = r % 2 == 0 ? 100 : -100;
    *(row(r) + 30) = r % 2 == 0 ? -100 : 100;
  }
  std::fill(row(3), row(4), 0.0);
  std::fill(row(4), row(5), -0.0);
  std::fill(row(5), row(6), 5.0);
  for (int i = 0; i < 32; ++i) {
    *(row(6) + i) = 1e-17 * (i - 7);
    *(row(7) + i) = 1e-14 * (i - 9);
    *(row(8) + i) = 0.5 * (i % 16) * (i % 2 ? -1 : 1) - (i == 0 ? 8 : 0);
    *(row(9) + i) = (i - 15.5) * 127 / 15.5;
    *(row(10) + i) = 1e-42 * (i - 3);
    *(row(11) + i) = 3e38 * (i - 16) / 16;
    *(row(12) + i) = 2e7 * (i - 13);
    *(row(16) + i) = -7e4 - 100 * i;
  }
  *(row(13) + 5) = kNan;
  *(row(14) + 31) = kInfinity;
  *(row(15) + 0) = -kInfinity;
  for (const Format& format : GgmlFormats()) {
    SCOPED_TRACE(format.name);
    ExpectQuantizes(GgmlCase(format, layout), values);
    ExpectQuantizes(GgmlCase(format, layout, kF32, kF32), values);
  }
}

TEST(CpuCodebook, AppendedAsQuantized) {
  for (const bool given : {false, true}) {
    ExpectAppends({.name = "codebook",
                   .dims = {2, 3, 5, 64},
                   .capacity = 11,
                   .positions = {4, 6},
                   .group = {1, 1, 1, 32},
                   .types = {kF32, kU4, kF16, kUndef},
                   .given = given,
                   .codebook = Named("nf4")});
  }
  for (const Format& format : GgmlFormats()) {
    SCOPED_TRACE(format.name);
    ExpectAppends({.name = "ggml",
                   .dims = {2, 3, 5, 64},
                   .capacity = 11,
                   .positions = {4, 6},
                   .group = {1, 1, 1, 32},
                   .types = {kF16, format.codes, kF16, format.zero_points},
                   .codebook = format.codebook,
                   .ggml = true});
  }
}

// 4096 blocks of 32, a quarter of them on a grid, where ties are.
std::vector<double> BlockNumbers() {
  uint32_t state = 1;
  const auto draw = [&state] {
    state = state * 1664525u + 1013904223u;
    return static_cast<double>(state >> 8) / (1 << 24);
  };
  std::vector<double> values;
  for (int block = 0; block < 4096; ++block) {
    double spread = draw();
    spread *= draw();
    spread = 0.001 + 40 * (spread * draw());
    const double mean = (draw() - 0.5) * spread;
    for (int i = 0; i < 32; ++i) {
      double value = draw();
      value += draw();
      value = (value + draw() - 1.5) * spread + mean;
      if (block % 4 == 3) value = static_cast<double>(static_cast<int>(value * 64 / spread)) / 16;
      values.push_back(value);
    }
  }
  return values;
}

// What ggml stores: scale, minimum, codes, of 4 bits the first half of a block in the low nibbles.
std::vector<uint8_t> GgmlBlocks(const QuantizeCase& test, const QuantizeMemory& memory) {
  const std::vector<double> codes = Unpack(test.codes(), memory.codes);
  const auto* scales = reinterpret_cast<const uint8_t*>(memory.scales.data());
  const auto* minima = reinterpret_cast<const uint8_t*>(memory.zero_points.data());
  std::vector<uint8_t> bytes;
  for (size_t block = 0; block < codes.size() / 32; ++block) {
    bytes.insert(bytes.end(), {scales[2 * block], scales[2 * block + 1]});
    if (test.types.zero_points != kUndef) {
      const uint8_t negated = minima[2 * block + 1] ^ 0x80;
      bytes.insert(bytes.end(), {minima[2 * block], negated});
    }
    const double* of = codes.data() + block * 32;
    const int offset = test.types.codes == kS4 ? 8 : 0;
    const auto code = [&](int i) { return static_cast<int>(of[i]) + offset; };
    if (test.types.codes == kS8) {
      for (int i = 0; i < 32; ++i) bytes.push_back(static_cast<uint8_t>(code(i)));
    } else {
      for (int i = 0; i < 16; ++i)
        bytes.push_back(static_cast<uint8_t>(code(i) | code(i + 16) << 4));
    }
  }
  return bytes;
}

uint64_t HashOf(const std::vector<uint8_t>& bytes) {
  uint64_t hash = 14695981039346656037u;
  for (const uint8_t byte : bytes) hash = (hash ^ byte) * 1099511628211u;
  return hash;
}

// The bytes that quantize_row_*_ref of ggml 0.25 writes for these numbers, compiled without FMA;
// for all but iq4_nl, which it lacks, gguf.quants 0.19 (Python) writes the same.
TEST(CpuGgmlFormula, BytesOfGgml) {
  struct Golden {
    uint64_t hash;
    std::vector<uint8_t> first;
  };
  const Golden goldens[] = {
      {0x0aeb35d8b57c0bc5, {0x91, 0x24, 0xf6, 0xf8, 0xfd, 0x4b, 0x39, 0xd4}},
      {0x2b7a9f674345ef5a, {0x88, 0xb4, 0x49, 0xd9, 0x88, 0x93, 0x54, 0x5b}},
      {0xd2c569f1563ad317, {0xfc, 0x33, 0xe9, 0xbd, 0xb5, 0x05, 0x66, 0x5b}},
      {0x01dab221acdb5012, {0x94, 0xa4, 0x39, 0xe9, 0x88, 0x92, 0x44, 0x4b}},
  };
  const QuantizeLayout layout{.name = "blocks", .dims = {4096, 32}, .group = {1, 32}};
  const std::vector<double> values = BlockNumbers();
  const std::vector<Format> formats = GgmlFormats();
  for (size_t f = 0; f < formats.size(); ++f) {
    const QuantizeCase test = GgmlCase(formats[f], layout);
    const Bytes src = Pack(test.src(), values);
    const auto expect = [&](const QuantizeMemory& memory, const std::string& who) {
      const std::vector<uint8_t> bytes = GgmlBlocks(test, memory);
      EXPECT_EQ(std::vector<uint8_t>(bytes.begin(), bytes.begin() + 8), goldens[f].first)
          << formats[f].name << " " << who;
      EXPECT_EQ(HashOf(bytes), goldens[f].hash) << formats[f].name << " " << who;
    };
    expect(RunOracle(test, src), "oracle");
    for (int i = 0; const cpu::KernelSet* kernels = cpu::KernelsAt(i); ++i) {
      const auto executable =
          std::move(*cpu::CompileStore(*test.MakePartition(true).store(), *kernels));
      expect(RunQuantize(test, *executable, *MakeSerialExecutor(), src), kernels->name);
    }
    const auto simt = std::move(*MakeCudaSimtBackend()->Compile(test.MakePartition(true)));
    expect(RunQuantize(test, *simt, *MakeSerialExecutor(), src), simt->kernel());
  }
}

TEST(CpuGgmlFormula, OtherGroupsAreDeclined) {
  const QuantizeCase test =
      GgmlCase(GgmlFormats()[0], {.name = "columns", .dims = {64, 16}, .group = {32, 1}});
  const auto compiled = cpu::CompileStore(*test.MakePartition(true).store(), *cpu::KernelsAt(0));
  ASSERT_FALSE(compiled.ok());
  EXPECT_THAT(
      std::string(compiled.status().message()),
      ::testing::HasSubstr("formula ggml where groups are no runs of elements side by side"));
  EXPECT_THAT(
      std::string(MakeCudaSimtBackend()->Compile(test.MakePartition(true)).status().message()),
      ::testing::HasSubstr("formula ggml where groups are no runs of up to 1024 elements"));
}

}  // namespace
}  // namespace kvant::testing
