#include "kvant/backends/quantize.h"

#include <cmath>
#include <limits>
#include <string>
#include <tuple>

#include "gtest/gtest.h"
#include "kvant/graph/status.h"
#include "kvant/tests/backends/op_testing.h"

namespace kvant::testing {
namespace {

// [2, 3, 16]: every row has its own mean and spread.
const Dims kDims = {2, 3, 16};

std::vector<float> Data() {
  std::vector<float> data;
  for (int row = 0; row < 6; ++row) {
    for (int i = 0; i < 16; ++i) {
      data.push_back(static_cast<float>(0.7 * row - 1.5 + (1 + row) * std::sin(1.3 * i + row)));
    }
  }
  return data;
}

struct Scheme {
  DataType codes;
  DataType scales;
  DataType zero_points;  // undef: none
  Dims group;
};

std::string Name(const ::testing::TestParamInfo<Scheme>& info) {
  const auto name = [](DataType type) { return std::string(DataTypeName(type)); };
  std::string text = name(info.param.codes) + "_" + name(info.param.scales) + "_" +
                     name(info.param.zero_points) + "_g";
  for (int64_t dim : info.param.group) text += "_" + std::to_string(dim);
  return text;
}

LogicalTensor Dense(TensorId id, DataType type, const Dims& dims) {
  LogicalTensor tensor;
  tensor.id = id;
  tensor.type = type;
  tensor.dims = dims;
  return tensor;
}

class ComputeScalesTest : public ::testing::TestWithParam<Scheme> {};

// Data -> codes -> data on the oracle.
std::vector<double> RoundTrip(const Scheme& scheme, const std::vector<float>& data,
                              const Dims& groups, const std::vector<double>& scales,
                              const std::vector<double>& zero_points) {
  const Attributes attrs = {
      {Attr::kQType, std::string("per_group")},
      {Attr::kGroupShape, std::vector<int64_t>(scheme.group.begin(), scheme.group.end())}};
  const bool has_zero_points = scheme.zero_points != kUndef;
  Graph graph;
  for (const OpKind kind : {OpKind::kDynamicQuantize, OpKind::kDynamicDequantize}) {
    const bool quantizes = kind == OpKind::kDynamicQuantize;
    Op op;
    op.id = quantizes ? 0 : 1;
    op.kind = kind;
    op.attrs = attrs;
    std::vector<LogicalTensor> inputs = {
        quantizes ? Dense(0, kF32, kDims) : Dense(3, scheme.codes, kDims),
        Dense(1, scheme.scales, groups)};
    if (has_zero_points) inputs.push_back(Dense(2, scheme.zero_points, groups));
    const LogicalTensor output = quantizes ? Dense(3, scheme.codes, kDims) : Dense(4, kF32, kDims);
    EXPECT_TRUE(graph.AddOp(op, inputs, {output}).ok());
  }
  EXPECT_TRUE(graph.Finalize().ok());
  Values values = {{0, {data.begin(), data.end()}}, {1, scales}, {2, zero_points}};
  const absl::StatusOr<Values> result = RunGraph(graph, values, "oracle");
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? result->at(4) : std::vector<double>();
}

// The most that a value may be off: half a step, and what the stored scale and zero point miss.
double Bound(const Scheme& scheme, double x, double scale, double spread) {
  if (scheme.codes == kF8E4M3) return std::max(std::abs(x) / 16, scale / 512) * 1.01;
  if (scheme.codes == kF8E5M2) return std::max(std::abs(x) / 8, scale / 65536) * 1.01;
  const double epsilon = scheme.scales == kF32 ? 1e-6 : scheme.scales == kF16 ? 1e-3 : 8e-3;
  const bool shifted = scheme.zero_points != kUndef && IsInteger(scheme.zero_points);
  return (shifted ? 1.0 : 0.5) * scale + epsilon * spread;
}

TEST_P(ComputeScalesTest, RoundTripsWithinHalfAStep) {
  const Scheme& scheme = GetParam();
  const std::vector<float> data = Data();
  Dims groups;
  for (size_t d = 0; d < kDims.size(); ++d) groups.push_back(kDims[d] / scheme.group[d]);
  const LogicalTensor scale_desc = Dense(0, scheme.scales, groups);
  const LogicalTensor zp_desc = Dense(0, scheme.zero_points, groups);
  Bytes scale_memory = Pack(scale_desc, {});
  Bytes zp_memory(scale_desc.elements() * 4);
  const absl::Status done =
      ComputeScales(data, kDims, scheme.group, scheme.codes, scheme.scales, scale_memory.data(),
                    scheme.zero_points, zp_memory.data());
  ASSERT_TRUE(done.ok()) << done;
  const std::vector<double> scales = Unpack(scale_desc, scale_memory);
  std::vector<double> zero_points;
  if (scheme.zero_points != kUndef) zero_points = Unpack(zp_desc, zp_memory);
  const std::vector<double> back = RoundTrip(scheme, data, groups, scales, zero_points);
  ASSERT_EQ(back.size(), data.size());
  for (size_t i = 0; i < data.size(); ++i) {
    const int64_t at[3] = {static_cast<int64_t>(i) / 48, static_cast<int64_t>(i) / 16 % 3,
                           static_cast<int64_t>(i) % 16};
    int64_t group = 0;
    for (int d = 0; d < 3; ++d) group = group * groups[d] + at[d] / scheme.group[d];
    EXPECT_NEAR(back[i], data[i], Bound(scheme, data[i], scales[group], 20)) << "element " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Formats, ComputeScalesTest,
    ::testing::Values(Scheme{kS8, kF32, kUndef, {1, 1, 16}}, Scheme{kS8, kF16, kUndef, {2, 3, 16}},
                      Scheme{kS4, kF32, kUndef, {1, 1, 4}}, Scheme{kS2, kF32, kUndef, {1, 1, 2}},
                      Scheme{kU8, kF32, kU8, {1, 3, 1}}, Scheme{kU4, kF16, kU4, {1, 1, 8}},
                      Scheme{kU4, kF32, kS32, {1, 3, 4}}, Scheme{kU2, kF32, kU2, {1, 1, 16}},
                      Scheme{kS4, kBF16, kS8, {2, 1, 1}}, Scheme{kU4, kF32, kF32, {1, 1, 8}},
                      Scheme{kU2, kF32, kF32, {1, 3, 1}}, Scheme{kS4, kF32, kF32, {1, 1, 16}},
                      Scheme{kF8E4M3, kF32, kUndef, {1, 1, 16}},
                      Scheme{kF8E5M2, kF32, kUndef, {1, 3, 2}}),
    Name);

TEST(ComputeScalesByHandTest, Symmetric) {
  const float data[] = {-1, 0.5, 0, 0, 7, -14};
  float scales[3];
  ASSERT_TRUE(ComputeScales(data, {6}, {2}, kS4, kF32, scales, kUndef, nullptr).ok());
  EXPECT_FLOAT_EQ(scales[0], 1.f / 7);
  EXPECT_EQ(scales[1], 1);  // a group of zeros
  EXPECT_EQ(scales[2], 2);
}

TEST(ComputeScalesByHandTest, IntegerZeroPointsWidenTheRangeToZero) {
  const float data[] = {15, 30, -30, -6, -10, 5};
  float scales[3];
  int8_t zero_points[3];
  ASSERT_TRUE(ComputeScales(data, {6}, {2}, kU4, kF32, scales, kS8, zero_points).ok());
  EXPECT_EQ(scales[0], 2);
  EXPECT_EQ(zero_points[0], 0);
  EXPECT_EQ(scales[1], 2);
  EXPECT_EQ(zero_points[1], 15);
  EXPECT_EQ(scales[2], 1);
  EXPECT_EQ(zero_points[2], 10);
}

TEST(ComputeScalesByHandTest, FloatZeroPointsReproduceTheMinimum) {
  const float data[] = {15, 30, 3, 3};
  float scales[2], zero_points[2];
  ASSERT_TRUE(ComputeScales(data, {4}, {2}, kS4, kF32, scales, kF32, zero_points).ok());
  EXPECT_EQ(scales[0], 1);
  EXPECT_EQ(zero_points[0], -8 * 1 - 15);
  EXPECT_EQ(scales[1], 1);  // no spread
  EXPECT_EQ(zero_points[1], -8 * 1 - 3);
}

TEST(ComputeScalesByHandTest, ScalesThatDoNotFitTheirTypeStayUsable) {
  const float data[] = {1e30f, -1e30f, 1e-12f, 0};
  uint16_t scales[2];
  ASSERT_TRUE(ComputeScales(data, {4}, {2}, kS8, kF16, scales, kUndef, nullptr).ok());
  EXPECT_EQ(F16ToF32(scales[0]), 65504);
  EXPECT_EQ(F16ToF32(scales[1]), 1);
}

struct BadCall {
  std::vector<float> data = std::vector<float>(8, 1.f);
  Dims dims = {2, 4};
  Dims group = {1, 2};
  DataType codes = kS8, scales = kF32, zero_points = kUndef;
  std::string message;
};

TEST(ComputeScalesErrorsTest, SayWhatIsWrongAndWriteNothing) {
  const std::vector<BadCall> calls = {
      {.group = {2}, .message = "ComputeScales: group_shape has 1 dims, the data 2"},
      {.group = {1, 3}, .message = "ComputeScales: groups of 3 do not divide dim 1 of 4"},
      {.group = {0, 1}, .message = "ComputeScales: groups of 0 do not divide dim 0 of 2"},
      {.dims = {3, 4}, .message = "ComputeScales: dims hold 12 elements, the data 8"},
      {.dims = {int64_t{1} << 62, 4}, .message = "ComputeScales: dims overflow"},
      {.codes = kF32, .message = "ComputeScales: f32 is not a type of codes"},
      {.scales = kS8, .message = "ComputeScales: scales cannot be s8"},
      {.zero_points = kBoolean, .message = "ComputeScales: zero points cannot be boolean"},
      {.codes = kF8E4M3,
       .zero_points = kF32,
       .message = "ComputeScales: f8_e4m3 codes take no zero points"},
      {.data = {1, 1, 1, 1, 1, std::numeric_limits<float>::infinity(), 1, 1},
       .message = "ComputeScales: element 5 is not finite"},
  };
  for (const BadCall& call : calls) {
    std::vector<float> scales(16, 42.f), zero_points(16, 42.f);
    const absl::Status done =
        ComputeScales(call.data, call.dims, call.group, call.codes, call.scales, scales.data(),
                      call.zero_points, zero_points.data());
    EXPECT_EQ(ErrorKindOf(done), ErrorKind::kInvalidArguments);
    EXPECT_EQ(std::string(done.message()), call.message);
    EXPECT_EQ(scales, std::vector<float>(16, 42.f));
    EXPECT_EQ(zero_points, std::vector<float>(16, 42.f));
  }
}

}  // namespace
}  // namespace kvant::testing
