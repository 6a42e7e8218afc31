// The matrix operations on the SIMT executor against plain loops.
#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kvant/graph/data_type.h"
#include "kvant/kernels/device/fragment.h"
#include "kvant/tests/kernels/device/launch.h"

namespace kvant::device {
namespace {

using simt::LaunchCleanly;
using simt::MmaModel;
using simt::Report;

// Row-major matrices, with the bits of their elements.
struct Product {
  std::vector<u32> a, b;
  std::vector<float> c;
  int depth;
};

enum class Kind { kF16K16, kF16K8, kBF16K16, kTF32K8 };

float ValueOf(Kind kind, u32 bits) {
  switch (kind) {
    case Kind::kF16K16:
    case Kind::kF16K8:
      return F16ToF32(static_cast<u16>(bits));
    case Kind::kBF16K16:
      return BF16ToF32(static_cast<u16>(bits));
    case Kind::kTF32K8:
      break;
  }
  return std::bit_cast<float>(bits & 0xffffe000u);
}

Product MakeProduct(Kind kind, unsigned seed) {
  Product p;
  p.depth = kind == Kind::kF16K16 || kind == Kind::kBF16K16 ? 16 : 8;
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.3f);
  const auto fill = [&](std::vector<u32>& m, int count) {
    for (int i = 0; i < count; ++i) {
      const float x = normal(rng);
      m.push_back(kind == Kind::kTF32K8    ? AsBits(x)
                  : kind == Kind::kBF16K16 ? F32ToBF16(x)
                                           : F32ToF16(x));
    }
  };
  fill(p.a, 16 * p.depth);
  fill(p.b, p.depth * 8);
  for (int i = 0; i < 16 * 8; ++i) p.c.push_back(normal(rng));
  return p;
}

// The registers of one lane.
std::vector<u32> Pick(Fragment fragment, const std::vector<u32>& matrix, int lane) {
  const FragmentLayout layout = LayoutOf(fragment);
  std::vector<u32> words(layout.registers);
  for (int r = 0; r < layout.registers; ++r) {
    for (int h = 0; h < layout.halves; ++h) {
      const Element e = layout.At(lane, r, h);
      words[r] |= matrix[e.row * layout.columns + e.column] << (16 * h);
    }
  }
  return words;
}

std::vector<float> Multiply(Kind kind, const Product& p, const MmaModel& model = {}) {
  const auto [fragment_a, fragment_b] =
      kind == Kind::kTF32K8  ? std::pair(Fragment::kMmaTF32A, Fragment::kMmaTF32B)
      : kind == Kind::kF16K8 ? std::pair(Fragment::kMmaK8A, Fragment::kMmaK8B)
                             : std::pair(Fragment::kMmaK16A, Fragment::kMmaK16B);
  std::vector<std::vector<u32>> a, b;
  for (int lane = 0; lane < 32; ++lane) {
    a.push_back(Pick(fragment_a, p.a, lane));
    b.push_back(Pick(fragment_b, p.b, lane));
  }
  std::vector<float> result(16 * 8);
  const FragmentLayout c = LayoutOf(Fragment::kMmaC);
  const auto body = [&] {
    const u32* x = a[LaneIndex()].data();
    const u32* y = b[LaneIndex()].data();
    const auto at = [&](int r) {
      const Element e = c.At(LaneIndex(), r, 0);
      return e.row * 8 + e.column;
    };
    float d[4];
    for (int r = 0; r < 4; ++r) d[r] = p.c[at(r)];
    switch (kind) {
      case Kind::kF16K16:
        MmaF16K16(d, x[0], x[1], x[2], x[3], y[0], y[1]);
        break;
      case Kind::kF16K8:
        MmaF16K8(d, x[0], x[1], y[0]);
        break;
      case Kind::kBF16K16:
        MmaBF16K16(d, x[0], x[1], x[2], x[3], y[0], y[1]);
        break;
      case Kind::kTF32K8:
        MmaTF32K8(d, x[0], x[1], x[2], x[3], y[0], y[1]);
        break;
    }
    for (int r = 0; r < 4; ++r) result[at(r)] = d[r];
  };
  LaunchCleanly({}, body, {.accumulate = model});
  return result;
}

void ExpectMatmul(Kind kind, const MmaModel& model, double bound) {
  const Product p = MakeProduct(kind, 7);
  const std::vector<float> got = Multiply(kind, p, model);
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      double sum = p.c[m * 8 + n];
      for (int k = 0; k < p.depth; ++k) {
        sum += static_cast<double>(ValueOf(kind, p.a[m * p.depth + k])) *
               ValueOf(kind, p.b[k * 8 + n]);
      }
      EXPECT_NEAR(got[m * 8 + n], sum, bound) << m << ", " << n;
    }
  }
}

TEST(DeviceMatrixTest, MmaIsMatmul) {
  for (const Kind kind : {Kind::kF16K16, Kind::kF16K8, Kind::kBF16K16, Kind::kTF32K8}) {
    ExpectMatmul(kind, {}, 5e-6);
    ExpectMatmul(kind, {.products = 8, .extra_bits = 1}, 2e-5);
  }
}

Product Ones(float c, std::vector<float> row_of_a) {
  Product p{std::vector<u32>(16 * 16), std::vector<u32>(16 * 8, F32ToF16(1)),
            std::vector<float>(16 * 8, c), 16};
  for (int i = 0; i < 16 * 16; ++i) p.a[i] = F32ToF16(row_of_a[i % 16]);
  return p;
}

TEST(DeviceMatrixTest, SubnormalsAreExact) {
  std::vector<float> row(16);
  row[3] = 0x1p-24f;
  EXPECT_EQ(Multiply(Kind::kF16K16, Ones(0, row))[0], 0x1p-24f);
}

// 1 and 2^-24 four times: f32 rounds each sum to 1, and alignment cuts each term off, unless a bit
// more is kept.
TEST(DeviceMatrixTest, AccumulatorModels) {
  std::vector<float> row(16);
  for (int i = 0; i < 4; ++i) row[i] = 0x1p-24f;
  EXPECT_EQ(Multiply(Kind::kF16K16, Ones(1, row))[0], 1.0f);
  EXPECT_EQ(Multiply(Kind::kF16K16, Ones(1, row), {.products = 8})[0], 1.0f);
  EXPECT_EQ(Multiply(Kind::kF16K16, Ones(1, row), {.products = 8, .extra_bits = 1})[0],
            1.0f + 0x1p-22f);
  // Truncated towards zero where the nearest would be above.
  row = std::vector<float>(16);
  row[0] = 0x1.8p-14f;
  EXPECT_EQ(Multiply(Kind::kF16K16, Ones(1024, row))[0], 1024.0f + 0x1p-13f);
  EXPECT_EQ(Multiply(Kind::kF16K16, Ones(1024, row), {.products = 8, .extra_bits = 2})[0], 1024);
  EXPECT_EQ(Multiply(Kind::kF16K16, Ones(-1024, row), {.products = 8})[0], -1024);
  // What is not finite.
  row[0] = INFINITY;
  EXPECT_EQ(Multiply(Kind::kF16K16, Ones(1, row), {.products = 8})[0], INFINITY);
  EXPECT_TRUE(std::isnan(Multiply(Kind::kF16K16, Ones(-INFINITY, row), {.products = 8})[0]));
}

// Row i holds 8i + column.
TEST(DeviceMatrixTest, LoadMatrices) {
  std::vector<Words4> plain(32), transposed(32);
  const Report report = LaunchCleanly({.shared_bytes = 32 * 16}, [&] {
    const SharedAddress row = SharedBase() + 16 * LaneIndex();
    for (int i = 0; i < 8; ++i) StoreShared16(row + 2 * i, 8 * LaneIndex() + i);
    WarpSync();
    Store(&plain[LaneIndex()], LoadMatrix4(row));
    Store(&transposed[LaneIndex()], LoadMatrix4Transposed(row));
  });
  for (int lane = 0; lane < 32; ++lane) {
    const u32 g = lane / 4, c = lane % 4;
    for (u32 m = 0; m < 4; ++m) {
      EXPECT_EQ(plain[lane].v[m], (64 * m + 8 * g + 2 * c) * 0x10001 + 0x10000);
      EXPECT_EQ(transposed[lane].v[m], (64 * m + 16 * c + g) * 0x10001 + 0x80000);
    }
  }
  EXPECT_EQ(report.counters.load_matrices, 2u);
}

TEST(DeviceMatrixTest, Transpose) {
  std::vector<u32> out(32);
  const Report report = LaunchCleanly({}, [&] {
    const u32 g = LaneIndex() / 4, c = LaneIndex() % 4;
    Store(&out[LaneIndex()], TransposeMatrix((8 * g + 2 * c) * 0x10001 + 0x10000));
  });
  for (u32 lane = 0; lane < 32; ++lane) {
    EXPECT_EQ(out[lane], (lane % 4 * 16 + lane / 4) * 0x10001 + 0x80000);
  }
  EXPECT_EQ(report.counters.transposes, 1u);
}

}  // namespace
}  // namespace kvant::device
