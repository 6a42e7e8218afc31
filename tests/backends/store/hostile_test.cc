// DynamicQuantize of numbers that are hard to quantize, on every engine. Each must give what the
// oracle does; and whether that is right is judged here, in f64, from what is stored and the
// numbers: every value comes back within half a step of its scale.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/backends/cuda_simt.h"
#include "kvant/graph/codebooks.h"
#include "kvant/tests/backends/attention/harness.h"
#include "kvant/tests/backends/store/append_harness.h"
#include "kvant/tests/backends/store/quantize_harness.h"
#include "kvant/tests/common/hostile_data.h"
#include "kvant_test_config.h"

namespace kvant::testing {
namespace {

constexpr int64_t kKinds = std::size(kAllHostile), kTokens = 8, kChannels = 64;

// [kind, token, channel].
std::vector<double> HostileValues(DataType type) {
  std::vector<double> values;
  for (const Hostile kind : kAllHostile) {
    const HostileNumbers numbers{kind, /*seed=*/7, type == kF16 ? 65504.0 : 1e5};
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t c = 0; c < kChannels; ++c) {
        const int64_t at[] = {t, c};
        values.push_back(numbers(at));
      }
    }
  }
  return values;
}

// What a type of scales or zero points can hold.
struct Precision {
  double smallest_normal, step, relative, largest, largest_power;
};
Precision PrecisionOf(DataType type) {
  if (type == kF16) return {0x1p-14, 0x1p-24, 0x1p-11, 65504, 32768};
  if (type == kBF16) return {0x1p-126, 0x1p-133, 0x1p-8, 0x1.fep127, 0x1p127};
  return {0x1p-126, 0x1p-149, 0x1p-24, 0x1.fffffep127, 0x1p127};
}

// One group of a case: its numbers, and what is stored of it.
struct StoredGroup {
  const QuantizeCase& test;
  std::vector<double> x, codes;
  double scale = 0, zero_point = 0;
  double min = 0, max = 0;

  bool by_codes() const { return IsInteger(test.types.zero_points); }
  bool by_reals() const { return IsFloat(test.types.zero_points); }
  double Lowest() const {
    const DataType type = test.types.codes;
    if (type == kF8E4M3) return -448;
    if (type == kF8E5M2) return -57344;
    return static_cast<double>(LowestOf(type));
  }
  double Highest() const {
    return IsFloat(test.types.codes) ? -Lowest() : static_cast<double>(HighestOf(test.types.codes));
  }
  double Span() const {
    if (by_reals()) return max - min;
    if (by_codes()) return std::max(max, 0.0) - std::min(min, 0.0);
    return std::max(std::abs(min), std::abs(max));
  }
  double Steps() const {
    if (by_reals() || by_codes()) return Highest() - Lowest();
    if (test.codebook.empty()) return Highest();
    double largest = 0;
    for (const float entry : test.codebook) largest = std::max<double>(largest, std::abs(entry));
    return largest;
  }
  double Value(double code) const {
    if (!test.codebook.empty()) return test.codebook[static_cast<size_t>(code)] * scale;
    return by_reals() ? code * scale - zero_point : (code - zero_point) * scale;
  }

  // What is wrong with the scale; empty if nothing is.
  std::string JudgeScale() const {
    const Precision type = PrecisionOf(test.types.scales);
    const double wanted = std::max<double>(Span() / Steps(), test.floor);
    const double largest = test.power_of_two ? type.largest_power : type.largest;
    if (wanted == 0) return scale == 1 ? "" : "a group without spread has not scale 1";
    if (wanted > largest) return scale == largest ? "" : "is not the type's largest";
    const double rounding = wanted < type.smallest_normal ? 0 : wanted * type.relative;
    if (scale < wanted - rounding) return "the group's range is beyond the codes";
    const double most = test.power_of_two ? 2 * wanted : wanted + rounding;
    if (scale > std::max(most, type.step * std::ceil(most / type.step)))
      return "is larger than it need be";
    return "";
  }

  // How far from x its value may be.
  double Bound(double value) const {
    // Quotients are of f32.
    const double half = 0.5 * scale * (1 + Steps() * 0x1p-22);
    if (IsFloat(test.types.codes)) {
      const bool e4m3 = test.types.codes == kF8E4M3;
      const double relative = e4m3 ? 0x1p-4 : 0x1p-3, least = e4m3 ? 0x1p-10 : 0x1p-17;
      const double within = std::max(std::abs(value) * relative, least * scale) * (1 + 1e-5);
      return std::max(within, std::abs(value) - Highest() * scale);
    }
    if (!test.codebook.empty()) {
      double nearest = std::numeric_limits<double>::infinity();
      for (const float entry : test.codebook) {
        nearest = std::min(nearest, std::abs(entry * scale - value));
      }
      return nearest + 1e-5 * scale;
    }
    // A code of 0 may have moved by half a step, which the largest then are beyond the codes.
    if (by_codes()) return half + std::max(0.0, Span() - Steps() * scale);
    const double low = Value(Lowest()), high = Value(Highest());
    return std::max({half, low - value, value - high}) + std::abs(zero_point) * 0x1p-23;
  }

  // Zero points in real units are of their type; what that costs at either end of the range.
  std::string JudgeZeroPoint() const {
    if (!by_reals()) return "";
    const Precision type = PrecisionOf(test.types.zero_points);
    if (std::abs(zero_point) >= type.largest) return "";
    if (scale >= PrecisionOf(test.types.scales).largest) return "";
    const double off = std::max(std::abs(zero_point) * type.relative, type.step / 2) +
                       Span() * PrecisionOf(test.types.scales).relative;
    const double low = Value(Lowest()), high = Value(Highest());
    if (low - min > off) return "the smallest is below the codes";
    if (max - high > off) return "the largest is beyond the codes";
    return "";
  }

  void Judge() const {
    for (const std::string& wrong : {JudgeScale(), JudgeZeroPoint()}) {
      EXPECT_EQ(wrong, "") << "scale " << scale << ", zero point " << zero_point
                           << ", numbers from " << min << " to " << max;
    }
    for (size_t i = 0; i < x.size(); ++i) {
      const double error = std::abs(Value(codes[i]) - x[i]);
      if (error <= Bound(x[i])) continue;
      ADD_FAILURE() << x[i] << " is stored as " << codes[i] << " with scale " << scale
                    << " and zero point " << zero_point << ": " << Value(codes[i])
                    << ", numbers from " << min << " to " << max;
      return;
    }
  }
};

// The same of ggml's formats, whose codes are of a scale that has not been rounded yet.
void JudgeGgml(const StoredGroup& group) {
  const double magnitude = std::max(std::abs(group.min), std::abs(group.max));
  const DataType codes = group.test.types.codes;
  double step = magnitude / (codes == kS8 ? 127 : 8), most = codes == kS8 ? 0.5 : 1;
  double offset = 0;
  if (group.by_reals()) {
    step = (group.max - group.min) / 15;
    most = 0.5;
    offset = std::abs(group.zero_point + group.min);
  }
  if (!group.test.codebook.empty()) most = 24;  // at the end that no entry is near to
  const double codes_of_step = codes == kS8 ? 127 : group.test.codebook.empty() ? 15 : 127;
  const double rounding = std::abs(std::abs(group.scale) - step);
  for (size_t i = 0; i < group.x.size(); ++i) {
    const double value = group.Value(group.codes[i]);
    ASSERT_TRUE(std::isfinite(value)) << group.x[i];
    if (!group.test.codebook.empty() || std::abs(group.scale) == 65504) continue;
    EXPECT_LE(std::abs(value - group.x[i]),
              1.0001 * most * step + codes_of_step * rounding + offset)
        << group.x[i];
  }
}

void Judge(const QuantizeCase& test, const std::vector<double>& x, const QuantizeMemory& stored) {
  const std::vector<double> codes = Unpack(test.codes(), stored.codes);
  const std::vector<double> scales = Unpack(test.scales(), stored.scales);
  std::vector<double> zero_points;
  if (test.types.zero_points != kUndef) {
    zero_points = Unpack(test.zero_points(), stored.zero_points);
  }
  std::vector<StoredGroup> groups(scales.size(), StoredGroup{test, {}, {}});
  const Dims &dims = test.layout.dims, &group = test.layout.group;
  for (size_t i = 0; i < x.size(); ++i) {
    const int64_t at[] = {static_cast<int64_t>(i) / (dims[1] * dims[2]),
                          static_cast<int64_t>(i) / dims[2] % dims[1],
                          static_cast<int64_t>(i) % dims[2]};
    const int64_t index =
        (at[0] / group[0] * (dims[1] / group[1]) + at[1] / group[1]) * (dims[2] / group[2]) +
        at[2] / group[2];
    StoredGroup& of = groups[index];
    of.min = of.x.empty() ? x[i] : std::min(of.min, x[i]);
    of.max = of.x.empty() ? x[i] : std::max(of.max, x[i]);
    of.x.push_back(x[i]);
    of.codes.push_back(codes[i]);
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    groups[g].scale = scales[g];
    if (!zero_points.empty()) groups[g].zero_point = zero_points[g];
    SCOPED_TRACE("group " + std::to_string(g) + ", " +
                 std::string(NameOf(kAllHostile[g * kKinds / groups.size()])));
    if (test.ggml) {
      JudgeGgml(groups[g]);
    } else {
      groups[g].Judge();
    }
    if (::testing::Test::HasFailure()) return;
  }
}

[[maybe_unused]] QuantizeMemory RunReference(const QuantizeCase& test,
                                             const std::vector<double>& x) {
  const absl::StatusOr<Values> values =
      RunGraph(test.MakeGraph(/*computes=*/true), {{0, x}}, "reference");
  EXPECT_TRUE(values.ok()) << values.status();
  if (!values.ok()) return {};
  QuantizeMemory memory{Pack(test.codes(), values->at(1)), Pack(test.scales(), values->at(2)), {}};
  if (test.types.zero_points != kUndef)
    memory.zero_points = Pack(test.zero_points(), values->at(3));
  return memory;
}

// The oracle's result is right, and every engine's is like it; that of the cpu and cuda kernels the
// same bits, on every instruction set.
void ExpectHolds(const QuantizeCase& test) {
  SCOPED_TRACE(test.layout.name + " " + test.types.ToString());
  const Bytes src = Pack(test.src(), HostileValues(test.types.src));
  const std::vector<double> x = Unpack(test.src(), src);  // as rounded
  const QuantizeMemory want = RunOracle(test, src);
  Judge(test, x, want);
  const Partition partition = test.MakePartition(/*computes=*/true);
  QuantizeMemory first;
  for (int i = 0; const cpu::KernelSet* kernels = cpu::KernelsAt(i); ++i) {
    SCOPED_TRACE(kernels->name);
    const auto executable = std::move(*cpu::CompileStore(*partition.store(), *kernels));
    const QuantizeMemory got = RunQuantize(test, *executable, *MakeSerialExecutor(), src);
    ExpectAsOracle(test, x, got, want, /*computes=*/true);
    if (i == 0) {
      Judge(test, x, got);
      first = got;
    }
    EXPECT_TRUE(got == first) << "not the codes of other instruction sets";
  }
  const auto device = MakeCudaSimtBackend()->Compile(partition);
  ASSERT_TRUE(device.ok()) << device.status();
  SCOPED_TRACE((*device)->kernel());
  const QuantizeMemory got = RunQuantize(test, **device, *MakeSerialExecutor(), src);
  ExpectAsOracle(test, x, got, want, /*computes=*/true);
  EXPECT_TRUE(got == first) << "not the codes of the cpu";
#ifdef KVANT_WITH_ONEDNN
  if (!test.ggml) ExpectAsOracle(test, x, RunReference(test, x), want, /*computes=*/true);
#endif
}

std::vector<QuantizeLayout> Layouts() {
  const Dims dims{kKinds, kTokens, kChannels};
  return {{.name = "groups", .dims = dims, .group = {1, 1, 8}},
          {.name = "tokens", .dims = dims, .group = {1, 1, kChannels}},
          {.name = "channels", .dims = dims, .group = {1, kTokens, 1}},
          {.name = "all", .dims = dims, .group = {1, kTokens, kChannels}}};
}

void ExpectHoldsInAllLayouts(QuantizeCase test) {
  for (const QuantizeLayout& layout : Layouts()) {
    if (test.ggml && layout.group[1] != 1) continue;
    test.layout = layout;
    ExpectHolds(test);
    if (::testing::Test::HasFailure()) return;
  }
}

class HostileQuantizeTest : public ::testing::TestWithParam<DataType> {
 protected:
  static DataType scales() { return GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(Scales, HostileQuantizeTest, ::testing::Values(kF16, kBF16, kF32),
                         [](const auto& info) { return std::string(DataTypeName(info.param)); });

TEST_P(HostileQuantizeTest, FloatCodes) {
  for (const DataType codes : {kF8E4M3, kF8E5M2}) {
    for (const DataType src : {kF32, kF16, kBF16}) {
      ExpectHoldsInAllLayouts({.layout = {}, .types = {src, codes, scales()}});
    }
  }
}

TEST_P(HostileQuantizeTest, IntegersWithoutZeroPoints) {
  for (const DataType codes : {kS8, kS4, kS2}) {
    ExpectHoldsInAllLayouts({.layout = {}, .types = {kF32, codes, scales()}});
  }
}

TEST_P(HostileQuantizeTest, IntegerZeroPoints) {
  for (const DataType codes : {kS8, kU8, kS4, kU4, kU2}) {
    ExpectHoldsInAllLayouts({.layout = {}, .types = {kF32, codes, scales(), codes}});
    ExpectHoldsInAllLayouts({.layout = {}, .types = {kF16, codes, scales(), kS32}});
  }
}

TEST_P(HostileQuantizeTest, RealZeroPoints) {
  for (const DataType codes : {kS8, kU8, kU4, kU2}) {
    for (const DataType zero_points : {kF16, kF32, kBF16}) {
      ExpectHoldsInAllLayouts({.layout = {}, .types = {kF32, codes, scales(), zero_points}});
    }
  }
}

TEST_P(HostileQuantizeTest, PowersOfTwoAndFloors) {
  for (const DataType codes : {kF8E4M3, kF8E5M2, kS8, kS4}) {
    const QuantizeTypes types{kF32, codes, scales()};
    ExpectHoldsInAllLayouts({.layout = {}, .types = types, .power_of_two = true});
    ExpectHoldsInAllLayouts({.layout = {}, .types = types, .floor = 1e-6f});
    ExpectHoldsInAllLayouts({.layout = {}, .types = types, .power_of_two = true, .floor = 3e-9f});
  }
}

TEST_P(HostileQuantizeTest, Codebooks) {
  for (const CodebookRow& row : kCodebooks) {
    ExpectHoldsInAllLayouts({.layout = {},
                             .types = {kF32, kU4, scales()},
                             .codebook = {row.values.begin(), row.values.end()}});
  }
}

TEST_P(HostileQuantizeTest, FormatsOfGgml) {
  const std::vector<float> iq4_nl(std::begin(kIq4NlCodebook), std::end(kIq4NlCodebook));
  for (const DataType src : {kF32, kF16}) {
    ExpectHoldsInAllLayouts({.layout = {}, .types = {src, kS8, scales()}, .ggml = true});
    ExpectHoldsInAllLayouts({.layout = {}, .types = {src, kS4, scales()}, .ggml = true});
    ExpectHoldsInAllLayouts({.layout = {}, .types = {src, kU4, scales(), scales()}, .ggml = true});
    ExpectHoldsInAllLayouts(
        {.layout = {}, .types = {src, kU4, scales()}, .codebook = iq4_nl, .ggml = true});
  }
}

// ggml's scales and minima would be infinite here, and in the last its sums.
TEST_P(HostileQuantizeTest, FormatsOfGgmlBeyondTheirTypes) {
  const std::vector<float> iq4_nl(std::begin(kIq4NlCodebook), std::end(kIq4NlCodebook));
  for (const double factor : {70.0, 1e4, 1e30}) {
    std::vector<double> values = HostileValues(kF32);
    for (double& value : values) value *= factor;
    for (const QuantizeTypes& types : {QuantizeTypes{kF32, kS8, scales()},
                                       {kF32, kS4, scales()},
                                       {kF32, kU4, scales(), scales()},
                                       {kF32, kU4, scales()}}) {
      QuantizeCase test{.layout = Layouts()[0], .types = types, .ggml = true};
      if (types.codes == kU4 && types.zero_points == kUndef) test.codebook = iq4_nl;
      ExpectQuantizes(test, values);
      const QuantizeMemory stored = RunOracle(test, Pack(test.src(), values));
      std::vector<double> parameters = Unpack(test.scales(), stored.scales);
      if (types.zero_points != kUndef) {
        const std::vector<double> minima = Unpack(test.zero_points(), stored.zero_points);
        parameters.insert(parameters.end(), minima.begin(), minima.end());
      }
      for (const double x : parameters) ASSERT_TRUE(std::isfinite(x)) << types.ToString();
    }
  }
}

// Append computes what DynamicQuantize does.
TEST_P(HostileQuantizeTest, Appended) {
  const QuantizeTypes all[] = {{kF32, kF8E4M3, scales()},
                               {kF32, kF8E5M2, scales()},
                               {kF32, kS8, scales()},
                               {kF32, kU4, scales(), scales()},
                               {kF32, kU4, scales(), kU4}};
  for (const QuantizeTypes& types : all) {
    for (const Dims& group : {Dims{1, 1, 1, 32}, Dims{1, 1, 8, 1}}) {
      ExpectAppends({.name = types.ToString(),
                     .dims = {kKinds, 1, kTokens, kChannels},
                     .capacity = 2 * kTokens,
                     .positions = {8},
                     .group = group,
                     .types = types},
                    HostileValues(types.src));
    }
  }
}

}  // namespace
}  // namespace kvant::testing
