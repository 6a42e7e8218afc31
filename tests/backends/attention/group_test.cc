// Groups of every size along the head and along tokens, on every kernel set, against f64 loops.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iterator>
#include <vector>

#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/tests/backends/attention/harness.h"

namespace kvant::cpu {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// What groups are of. Whether few rows go by integer products depends on the group and the CPU, so
// that this is what those may lose.
constexpr double kTolerance = 5e-4;

struct Codes {
  DataType type;
  bool codebook = false;
};
constexpr Codes kCodes[] = {{kS8},     {kU8},     {kS4},       {kU4},       {kS2},      {kU2},
                            {kF8E4M3}, {kF8E5M2}, {kU2, true}, {kU4, true}, {kU8, true}};

// Codes in one of the forms that have parameters, a different one for each `turn`.
Format FormatOf(const Codes& codes, const Dims5& group, int64_t turn) {
  Format format{.type = codes.type, .group = group};
  const DataType scales[] = {kF32, kF16, kBF16};
  format.scales = scales[turn % 3];
  if (codes.codebook) {
    for (int64_t i = 0; i < int64_t{1} << BitsOf(codes.type); ++i) {
      format.codebook.push_back(0.01f * static_cast<float>(i * i % 97) - 0.4f);
    }
  } else {
    const DataType zero_points[] = {kUndef, IsInteger(codes.type) ? codes.type : kS8, kF16, kF32};
    format.zero_points = zero_points[turn % 4];
  }
  format.parameters_by_channel = turn % 5 == 1;
  return format;
}

// Three of kCodes, others for each `group`, so that every one meets every size of tail.
std::vector<Codes> SomeCodes(int64_t group) {
  std::vector<Codes> some;
  for (int64_t i = 3 * group; i < 3 * group + 3; ++i) some.push_back(kCodes[i % std::size(kCodes)]);
  return some;
}

// Rows that share K and V: few are multiplied by stored rows, many by tiles.
constexpr int64_t kRows[] = {1, 4, 20};

TEST(CpuGroups, EverySizeAlongTheHead) {
  for (int64_t group = 1; group <= 64; ++group) {
    // More than two vectors, and a tail of the last unless 16 divides the group.
    const int64_t d = group * (36 / group + 1);
    int64_t turn = group;
    for (const Codes& codes : SomeCodes(group)) {
      const Format k = FormatOf(codes, {1, 1, 1, 1, group}, turn++);
      const Format v = FormatOf(codes, {1, 1, 1, 1, group}, turn++);
      const int64_t rows = kRows[turn % 3];
      SCOPED_TRACE(testing::Message() << DataTypeName(codes.type) << " groups of " << group
                                      << " of " << d << ", " << rows << " rows");
      Plain({.b0 = 1, .b1 = 1, .ratio = rows, .q_len = 1, .kv_len = 67, .d = d, .dv = d}, k, v)
          .Check(kTolerance);
      if (HasFailure()) return;
    }
  }
}

// Also of channels whose tokens are side by side, and from the middle of a group on.
TEST(CpuGroups, EverySizeAlongTokens) {
  for (int64_t group = 1; group <= 64; ++group) {
    const int64_t tokens = group * (70 / group + 1);
    int64_t turn = group;
    for (const Codes& codes : SomeCodes(group)) {
      const int64_t channels = turn % 2 == 0 ? 1 : 4;
      Format k = FormatOf(codes, {1, 1, 1, group, channels}, turn++);
      Format v = FormatOf(codes, {1, 1, 1, group, channels}, turn++);
      if (turn % 3 == 0) k.order = v.order = Format::Order::kChannelMajor;
      const int64_t rows = kRows[turn % 3];
      SCOPED_TRACE(testing::Message() << DataTypeName(codes.type) << " groups of " << group
                                      << " tokens, " << rows << " rows");
      Case c =
          Plain({.b0 = 1, .b1 = 1, .ratio = rows, .q_len = 1, .kv_len = tokens, .d = 44, .dv = 44});
      // A tile of the second segment begins within a group.
      c.SetK(k, {tokens - group, group});
      c.SetV(v, {tokens});
      c.Check(kTolerance);
      if (HasFailure()) return;
    }
  }
}

// Scales that vary along the head beside zero points that do not, and the reverse.
TEST(CpuGroups, ParametersOfDifferentExtent) {
  for (int64_t group : {1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 32, 40}) {
    const int64_t d = group * (36 / group + 1);
    for (bool scales_vary : {false, true}) {
      for (int64_t rows : kRows) {
        SCOPED_TRACE(testing::Message() << "groups of " << group << ", " << rows << " rows");
        Case c =
            Plain({.b0 = 1, .ratio = rows, .q_len = 1, .kv_len = 70, .d = d, .dv = d},
                  {.type = kS8, .group = {1, 1, 1, 1, group}, .scales = kF32, .zero_points = kF32});
        Quantization& how = *c.spec.k[0].quantization;
        View& same = scales_vary ? how.zero_points : how.scales;
        // Of the first group.
        same.strides[4] = 0;
        c.Check(kTolerance);
        if (HasFailure()) return;
      }
    }
  }
}

// Elements of which no axis is dense.
TEST(CpuGroups, OfElementsThatAreNotSideBySide) {
  for (const Codes& codes : kCodes) {
    for (int64_t group : {1, 3, 8, 16, 40}) {
      Format format = FormatOf(codes, {1, 1, 1, 1, group}, group);
      format.order = Format::Order::kInterleaved;
      SCOPED_TRACE(testing::Message() << DataTypeName(codes.type) << " groups of " << group);
      Plain({.ratio = 2, .q_len = 1, .kv_len = 70, .d = 2 * group, .dv = 3 * group}, format, format)
          .Check(kTolerance);
      if (HasFailure()) return;
    }
  }
}

TEST(CpuGroups, TheKernelSaysWhatCostsMore) {
  if (HighestKernels().qk_stored == nullptr) GTEST_SKIP() << "this CPU has only products of tiles";
  const auto kernel = [](const Format& k, const Format& v) {
    const Case c = Plain({.q_len = 1, .d = 48, .dv = 48}, k, v);
    return (*CompileAttention(c.spec, HighestKernels()))->kernel();
  };
  for (DataType type : {kS8, kF8E4M3}) {
    const Format few{.type = type, .group = {1, 1, 1, 1, 8}, .scales = kF32};
    EXPECT_THAT(kernel(few, {}), HasSubstr("K by f32 products (groups of 8 channels), some 3 to 10 "
                                           "times as long"));
    EXPECT_THAT(kernel({}, few), HasSubstr("V by f32 products (groups of 8 channels), some 3 to 10 "
                                           "times as long"));
  }
  const Format by_channel{.type = kF16, .order = Format::Order::kChannelMajor};
  EXPECT_THAT(kernel(by_channel, by_channel),
              AllOf(HasSubstr("K by f32 products, "),
                    HasSubstr("V by f32 products (its tokens, not channels, are side by side), "
                              "some")));
  const Format apart{.type = kF16, .order = Format::Order::kInterleaved};
  EXPECT_THAT(kernel(apart, {}),
              HasSubstr("the channels of a token are not side by side), some 15 to 30 times"));
  for (const Format& format : {Format{}, Format{.type = kF8E5M2},
                               Format{.type = kS8, .group = {1, 1, 1, 1, 16}, .scales = kF32}}) {
    EXPECT_THAT(kernel(format, format), Not(HasSubstr("times as long")));
  }
}

}  // namespace
}  // namespace kvant::cpu
