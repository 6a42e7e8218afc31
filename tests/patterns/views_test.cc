// FoldedView against tensors of element numbers that are really moved.
#include "kvant/patterns/views.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace kvant {
namespace {

// Where each element lies, in row-major order of the dims.
struct Addresses {
  Dims dims;
  std::vector<int64_t> values;
};

int64_t Product(const Dims& dims) {
  return std::accumulate(dims.begin(), dims.end(), int64_t{1}, std::multiplies<>());
}

Dims Coordinates(const Dims& dims, int64_t linear) {
  Dims result(dims.size());
  for (size_t i = dims.size(); i-- > 0;) {
    result[i] = linear % dims[i];
    linear /= dims[i];
  }
  return result;
}

int64_t Linear(const Dims& dims, const Dims& coordinates) {
  int64_t linear = 0;
  for (size_t i = 0; i < dims.size(); ++i) linear = linear * dims[i] + coordinates[i];
  return linear;
}

Addresses Lay(const Dims& dims, const Dims& strides) {
  Addresses result{dims, std::vector<int64_t>(Product(dims))};
  for (int64_t i = 0; i < Product(dims); ++i) {
    const Dims at = Coordinates(dims, i);
    for (size_t d = 0; d < dims.size(); ++d) result.values[i] += at[d] * strides[d];
  }
  return result;
}

Addresses Transposed(const Addresses& from, const std::vector<int64_t>& order) {
  Addresses result = from;
  for (size_t i = 0; i < order.size(); ++i) result.dims[i] = from.dims[order[i]];
  for (int64_t i = 0; i < Product(result.dims); ++i) {
    const Dims at = Coordinates(result.dims, i);
    Dims source(at.size());
    for (size_t d = 0; d < at.size(); ++d) source[order[d]] = at[d];
    result.values[i] = from.values[Linear(from.dims, source)];
  }
  return result;
}

// What the view says, through its atoms.
Addresses Read(const FoldedView& view) {
  Addresses result;
  for (int i = 0; i < view.rank(); ++i) result.dims.push_back(view.dim(i));
  result.values.resize(Product(result.dims));
  for (int64_t i = 0; i < Product(result.dims); ++i) {
    const Dims at = Coordinates(result.dims, i);
    result.values[i] = view.offset();
    for (int axis = 0; axis < view.rank(); ++axis) {
      int64_t rest = at[axis];
      const auto atoms = view.axis(axis);
      for (size_t a = atoms.size(); a-- > 0;) {
        result.values[i] += rest % atoms[a].extent * atoms[a].stride;
        rest /= atoms[a].extent;
      }
    }
  }
  return result;
}

// A random factorisation of `total` into 1 to 5 dims.
std::vector<int64_t> RandomDims(int64_t total, std::mt19937& random) {
  std::vector<int64_t> dims(1 + random() % 5, 1);
  for (int64_t factor = 2; total > 1; ++factor) {
    while (total % factor == 0) {
      dims[random() % dims.size()] *= factor;
      total /= factor;
    }
  }
  return dims;
}

TEST(FoldedView, RandomMovesAgreeWithMovedElements) {
  std::mt19937 random(7);
  int reshaped = 0;
  for (int round = 0; round < 2000; ++round) {
    const int64_t total = std::vector<int64_t>{24, 36, 60, 64, 7, 1}[random() % 6];
    const std::vector<int64_t> first = RandomDims(total, random);
    Dims dims(first.begin(), first.end()), strides(first.size());
    std::vector<int64_t> order(first.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    int64_t stride = 1;
    for (int64_t axis : order) {  // any order of axes, padded at random
      strides[axis] = stride;
      stride *= dims[axis] + random() % 2;
    }
    FoldedView view(dims, strides);
    Addresses expected = Lay(dims, strides);
    for (int move = 0; move < 5; ++move) {
      if (random() % 2) {
        std::vector<int64_t> permutation(view.rank());
        std::iota(permutation.begin(), permutation.end(), 0);
        std::shuffle(permutation.begin(), permutation.end(), random);
        FoldedView there_and_back = view;
        ASSERT_TRUE(there_and_back.Transpose(permutation));
        view = there_and_back;
        ASSERT_TRUE(there_and_back.InverseTranspose(permutation));
        EXPECT_EQ(Read(there_and_back).values, expected.values);
        expected = Transposed(expected, permutation);
      } else {
        const std::vector<int64_t> to = RandomDims(total, random);
        FoldedView tried = view;
        if (!tried.Reshape(to)) continue;
        ++reshaped;
        view = tried;
        expected.dims.assign(to.begin(), to.end());
      }
      const Addresses actual = Read(view);
      ASSERT_EQ(actual.dims, expected.dims);
      ASSERT_EQ(actual.values, expected.values);
    }
  }
  EXPECT_GT(reshaped, 1000);
}

TEST(FoldedView, ReshapeThatCutsAnAtomUnevenlyFails) {
  const int64_t dims[] = {2, 3}, strides[] = {1, 2};  // column-major
  const int64_t to[] = {3, 2};
  EXPECT_FALSE(FoldedView(dims, strides).Reshape(to));
  const int64_t dense[] = {3, 1};
  EXPECT_TRUE(FoldedView(dims, dense).Reshape(to));
  const int64_t other_count[] = {4, 2};
  EXPECT_FALSE(FoldedView(dims, dense).Reshape(other_count));
}

TEST(FoldedView, TransposeRejectsAnotherRank) {
  const int64_t dims[] = {2, 3}, strides[] = {3, 1};
  FoldedView view(dims, strides);
  const int64_t short_order[] = {0}, long_order[] = {0, 1, 2};
  EXPECT_FALSE(view.Transpose(short_order));
  EXPECT_FALSE(view.InverseTranspose(long_order));
  const int64_t negative[] = {-1, 0};
  EXPECT_TRUE(view.Transpose(negative));
  EXPECT_EQ(view.dim(0), 3);
}

TEST(FoldedView, GroupsSurviveMovesAndSlices) {
  // Scales [2, 6, 4] in groups {1, 1, 32}: per-token groups along a head of 128.
  const int64_t dims[] = {2, 6, 4}, strides[] = {24, 4, 1}, counts[] = {1, 1, 32};
  FoldedView scales = FoldedView(dims, strides).Repeat(counts);
  const int64_t split[] = {2, 1, 6, 128};
  ASSERT_TRUE(scales.Reshape(split));
  const int64_t order[] = {0, 1, 3, 2};
  ASSERT_TRUE(scales.Transpose(order));
  ASSERT_TRUE(scales.Slice(3, 2, 3));
  EXPECT_EQ(scales.offset(), 8);
  ASSERT_TRUE(scales.Slice(2, 64, 32));
  EXPECT_EQ(scales.offset(), 10);
  EXPECT_EQ(scales.dim(2), 32);
  EXPECT_FALSE(scales.Slice(2, 16, 16) && scales.dim(2) != 16);
}

TEST(FoldedView, SliceInsideAGroupFails) {
  const int64_t dims[] = {4}, strides[] = {1}, counts[] = {32};
  FoldedView scales = FoldedView(dims, strides).Repeat(counts);
  EXPECT_FALSE(scales.Slice(0, 16, 64));
  EXPECT_FALSE(scales.Slice(0, 32, 48));
  EXPECT_TRUE(scales.Slice(0, 32, 64));
  EXPECT_EQ(scales.offset(), 1);
}

TEST(ToView, MergesLeadingAxesOnlyWhenEven) {
  const int64_t dims[] = {2, 3, 4, 5}, strides[] = {60, 20, 5, 1};
  BatchAxes batch;
  batch.end[0] = 2;
  View view;
  ASSERT_TRUE(ToView(FoldedView(dims, strides), batch, 2, 3, false, &view));
  EXPECT_EQ(view.dims, (std::array<int64_t, 5>{6, 1, 1, 4, 5}));
  EXPECT_EQ(view.strides, (std::array<int64_t, 5>{20, 0, 0, 5, 1}));
  const int64_t padded[] = {70, 20, 5, 1};
  EXPECT_FALSE(ToView(FoldedView(dims, padded), batch, 2, 3, false, &view));
}

TEST(ToView, BroadcastAxesHaveExtentOne) {
  const int64_t dims[] = {1, 7}, strides[] = {7, 1}, to[] = {3, 5, 7};
  FoldedView mask(dims, strides);
  ASSERT_TRUE(mask.BroadcastTo(to));
  BatchAxes batch;
  batch.end[0] = 1;
  View view;
  ASSERT_TRUE(ToView(mask, batch, 1, 2, true, &view));
  EXPECT_EQ(view.dims, (std::array<int64_t, 5>{1, 1, 1, 1, 7}));
  const int64_t narrower[] = {5, 7};
  EXPECT_FALSE(mask.BroadcastTo(narrower));
}

}  // namespace
}  // namespace kvant
