#include "kvant/kernels/device/fragment.h"

#include <set>
#include <utility>

#include "gtest/gtest.h"

namespace kvant::device {
namespace {

constexpr Fragment kAll[] = {
    Fragment::kMmaK16A, Fragment::kMmaK16B,          Fragment::kMmaK8A,
    Fragment::kMmaK8B,  Fragment::kMmaTF32A,         Fragment::kMmaTF32B,
    Fragment::kMmaC,    Fragment::kMatrix4,          Fragment::kMatrix4Transposed,
    Fragment::kMatrix,  Fragment::kMatrixTransposed,
};

template <typename Visit>
void ForElements(const FragmentLayout& layout, Visit visit) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < layout.registers; ++r) {
      for (int h = 0; h < layout.halves; ++h) visit(lane, r, h, layout.At(lane, r, h));
    }
  }
}

void ExpectSame(Element a, Element b) {
  EXPECT_EQ(a.row, b.row);
  EXPECT_EQ(a.column, b.column);
}

TEST(FragmentTest, EachElementIsHeldOnce) {
  for (const Fragment fragment : kAll) {
    const FragmentLayout layout = LayoutOf(fragment);
    std::set<std::pair<int, int>> seen;
    ForElements(layout, [&](int, int, int, Element e) {
      EXPECT_GE(e.row, 0);
      EXPECT_LT(e.row, layout.rows);
      EXPECT_GE(e.column, 0);
      EXPECT_LT(e.column, layout.columns);
      EXPECT_TRUE(seen.emplace(e.row, e.column).second) << e.row << ", " << e.column;
    });
    EXPECT_EQ(seen.size(), static_cast<size_t>(layout.rows * layout.columns));
  }
}

// Examples from the PTX manual's drawings.
TEST(FragmentTest, KnownElements) {
  ExpectSame(LayoutOf(Fragment::kMmaK16A).At(5, 3, 1), {9, 11});
  ExpectSame(LayoutOf(Fragment::kMmaK16B).At(5, 1, 0), {10, 1});
  ExpectSame(LayoutOf(Fragment::kMmaC).At(31, 3, 0), {15, 7});
  ExpectSame(LayoutOf(Fragment::kMmaTF32A).At(6, 2, 0), {1, 6});
  ExpectSame(LayoutOf(Fragment::kMmaTF32B).At(6, 1, 0), {6, 1});
}

// The accumulators of two products side by side are, packed in pairs, the A of the next one.
TEST(FragmentTest, PackedAccumulatorIsA) {
  const FragmentLayout a = LayoutOf(Fragment::kMmaK16A);
  const FragmentLayout c = LayoutOf(Fragment::kMmaC);
  ForElements(a, [&](int lane, int r, int h, Element e) {
    Element product = c.At(lane, 2 * (r % 2) + h, 0);
    product.column += 8 * (r / 2);
    ExpectSame(product, e);
  });
}

// LoadMatrix4 of the four 8 x 8 parts of A, rows first, gives A's registers.
TEST(FragmentTest, LoadedMatricesAreA) {
  const FragmentLayout a = LayoutOf(Fragment::kMmaK16A);
  ForElements(LayoutOf(Fragment::kMatrix4), [&](int lane, int m, int h, Element e) {
    ExpectSame({e.row % 8 + 8 * (m % 2), e.column + 8 * (m / 2)}, a.At(lane, m, h));
  });
}

// LoadMatrix4Transposed of a 16 x 16 part of a row-major [k][n] matrix gives two Bs.
TEST(FragmentTest, TransposedMatricesAreB) {
  const FragmentLayout b = LayoutOf(Fragment::kMmaK16B);
  ForElements(LayoutOf(Fragment::kMatrix4Transposed), [&](int lane, int m, int h, Element e) {
    ExpectSame({e.row % 8 + 8 * (m % 2), e.column}, b.At(lane, m % 2, h));
  });
}

TEST(FragmentTest, TransposesSwapRowAndColumn) {
  const auto expect = [](Fragment fragment, Fragment transposed) {
    ForElements(LayoutOf(fragment), [&](int lane, int r, int h, Element e) {
      const Element t = LayoutOf(transposed).At(lane, r, h);
      ExpectSame({e.row % 8, e.column}, {t.column, t.row % 8});
      EXPECT_EQ(e.row / 8, t.row / 8);
    });
  };
  expect(Fragment::kMatrix, Fragment::kMatrixTransposed);
  expect(Fragment::kMatrix4, Fragment::kMatrix4Transposed);
}

static_assert(LayoutOf(Fragment::kMmaC).At(4, 2, 0).row == 9, "usable in constants");

}  // namespace
}  // namespace kvant::device
