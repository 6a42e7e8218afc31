#include "kvant/tools/acceptance.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace kvant {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

LogicalTensor Tensor(DataType type, Dims dims, std::optional<Dims> strides = std::nullopt) {
  LogicalTensor tensor;
  tensor.type = type;
  tensor.dims = std::move(dims);
  tensor.strides = std::move(strides);
  return tensor;
}

// Compares two lists of values stored as `type`.
Comparison CompareAs(DataType type, const std::vector<double>& want,
                     const std::vector<double>& got) {
  std::vector<std::byte> a(want.size() * 8), b(got.size() * 8);
  for (size_t i = 0; i < want.size(); ++i) StoreElement(type, a.data(), i, want[i]);
  for (size_t i = 0; i < got.size(); ++i) StoreElement(type, b.data(), i, got[i]);
  return Compare(Tensor(type, {static_cast<int64_t>(want.size())}), a.data(), b.data());
}

TEST(AcceptanceTest, EqualPasses) {
  const Comparison c = CompareAs(kF32, {1, -2, 0}, {1, -2, 0});
  EXPECT_TRUE(c.passed);
  EXPECT_EQ(c.failing, 0);
  EXPECT_EQ(c.total, 3);
  EXPECT_EQ(c.max_abs, 0);
  EXPECT_EQ(c.rel_l2, 0);
}

TEST(AcceptanceTest, AbsoluteOrRelativeBoundSuffices) {
  EXPECT_TRUE(CompareAs(kF32, {1e-6}, {1.9e-5}).passed);  // 2e-5 absolute
  EXPECT_FALSE(CompareAs(kF32, {1e-6}, {2.2e-5}).passed);
  EXPECT_TRUE(CompareAs(kF32, {1000}, {1000.007}).passed);  // 8e-6 relative
  EXPECT_FALSE(CompareAs(kF32, {1000}, {1000.009}).passed);
  EXPECT_TRUE(CompareAs(kF16, {100}, {100.0625}).passed);  // 9.8e-4 relative
  EXPECT_FALSE(CompareAs(kF16, {100}, {100.125}).passed);
  EXPECT_TRUE(CompareAs(kBF16, {100}, {100.5}).passed);  // 7.8e-3 relative
  EXPECT_FALSE(CompareAs(kBF16, {100}, {101}).passed);
}

TEST(AcceptanceTest, EightBitIntegersMayBeOffByOne) {
  EXPECT_TRUE(CompareAs(kU8, {100, 0}, {101, 1}).passed);
  EXPECT_FALSE(CompareAs(kU8, {100, 0}, {102, 0}).passed);
  EXPECT_TRUE(CompareAs(kS8, {-5}, {-6}).passed);
  EXPECT_FALSE(CompareAs(kS32, {100}, {101}).passed);
  EXPECT_FALSE(CompareAs(kBoolean, {0}, {1}).passed);
}

TEST(AcceptanceTest, NonFiniteValuesMustMeetTheirLike) {
  EXPECT_TRUE(CompareAs(kF32, {NAN, kInf, -kInf}, {NAN, kInf, -kInf}).passed);
  EXPECT_FALSE(CompareAs(kF32, {0}, {NAN}).passed);
  EXPECT_FALSE(CompareAs(kF32, {NAN}, {0}).passed);
  EXPECT_FALSE(CompareAs(kF32, {kInf}, {-kInf}).passed);
  EXPECT_FALSE(CompareAs(kF32, {kInf}, {1e30}).passed);
  const Comparison c = CompareAs(kF32, {NAN, 0, 1}, {0, kInf, 3});
  EXPECT_EQ(c.failing, 3);
  EXPECT_EQ(c.not_finite, 2);
}

TEST(AcceptanceTest, FewFailingPointsAreForgivenBySmallError) {
  std::vector<double> want(2048, 1.0), got(2048, 1.0);
  got[7] = got[8] = 1.05;
  Comparison c = CompareAs(kF32, want, got);
  EXPECT_TRUE(c.passed);
  EXPECT_EQ(c.failing, 2);
  EXPECT_GT(c.rel_l2, 0);
  got[9] = 1.05;  // three of 2048 are too many
  EXPECT_FALSE(CompareAs(kF32, want, got).passed);
  got[9] = got[8] = 1.0;
  got[7] = 2.0;  // one, but far off
  EXPECT_FALSE(CompareAs(kF32, want, got).passed);
  got[7] = NAN;  // never forgiven
  EXPECT_FALSE(CompareAs(kF32, want, got).passed);
}

TEST(AcceptanceTest, ZeroEverywhereIsNoExcuse) {
  std::vector<double> want(4096, 0.0), got(4096, 0.0);
  got[100] = 0.01;
  EXPECT_FALSE(CompareAs(kF32, want, got).passed);
}

TEST(AcceptanceTest, FollowsStridesAndIgnoresPadding) {
  const LogicalTensor tensor = Tensor(kF32, {2, 3}, Dims{4, 1});
  std::vector<float> want = {1, 2, 3, 99, 4, 5, 6, 99};
  std::vector<float> got = {1, 2, 3, -7, 4, 5, 6, -8};
  EXPECT_TRUE(Compare(tensor, want.data(), got.data()).passed);
  got[6] = 7;
  const Comparison c = Compare(tensor, want.data(), got.data());
  EXPECT_FALSE(c.passed);
  EXPECT_EQ(c.failing, 1);
  EXPECT_EQ(c.max_abs, 1);
}

TEST(AcceptanceTest, EmptyTensorPasses) {
  const Comparison c = Compare(Tensor(kF32, {2, 0, 3}), nullptr, nullptr);
  EXPECT_TRUE(c.passed);
  EXPECT_EQ(c.total, 0);
}

}  // namespace
}  // namespace kvant
