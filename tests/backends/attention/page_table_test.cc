// Tokens in pages, against the same tokens side by side: tables of any strides, with nothing behind
// them; first tokens amid a page; parameters that lie run by run in a page; tiles of several pages
// that are dequantized.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "kvant/tests/backends/attention/harness.h"

namespace kvant::cpu {
namespace {

constexpr int64_t kPagesOfRow = 6;

// Moves keys and values, of kPagesOfRow * page_tokens tokens, to pages in no order.
void MoveToPages(Case& c, int64_t page_tokens, bool rows_innermost) {
  const int64_t rows = c.shape.b0;
  std::vector<int32_t> order(static_cast<size_t>(rows * kPagesOfRow));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(5));
  std::vector<Dims5> places(order.size());  // of a page: batch row, and which of its pages
  for (size_t i = 0; i < order.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    places[static_cast<size_t>(order[i])] = {at / kPagesOfRow, at % kPagesOfRow};
  }
  for (KvSegment* segment : {&c.spec.k[0], &c.spec.v[0]}) {
    const auto move = [&](View& view, int64_t group) {
      const View from = view;
      const int64_t tokens = page_tokens / group;
      const Dims5 dims{rows * kPagesOfRow, from.dims[1], from.dims[2], tokens, from.dims[4]};
      Dims5 strides = Dense(dims);
      if (from.strides[3] == 1 && from.dims[4] > 1) {
        strides[3] = 1;
        strides[4] = tokens;
      }
      view = c.AddInput(from.type, dims, strides, [&](Dims5 p) {
        const Dims5& place = places[static_cast<size_t>(p[0])];
        p[0] = place[0];
        p[3] += place[1] * tokens;
        return LoadElement(from.type, c.inputs[from.port].data(), IndexOf(from, p));
      });
    };
    move(segment->data, 1);
    if (segment->quantization) {
      Quantization& how = *segment->quantization;
      move(how.scales, how.group[3]);
      if (how.zero_points.present()) move(how.zero_points, how.group[3]);
    }
    const Dims5 strides = rows_innermost ? Dims5{1, 0, 0, 0, rows} : Dims5{kPagesOfRow, 0, 0, 0, 1};
    segment->page_table = c.AddInput(
        kS32, {rows, 1, 1, 1, kPagesOfRow}, strides,
        [&](const Dims5& p) { return order[static_cast<size_t>(p[0] * kPagesOfRow + p[4])]; });
  }
}

void Check(const Format& format, int64_t page_tokens, double tolerance, double factor_of_v = 1,
           int64_t heads = 2) {
  const int64_t kv_len = kPagesOfRow * page_tokens;
  for (const bool rows_innermost : {false, true}) {
    for (const int64_t first : {0, 5}) {
      SCOPED_TRACE(testing::Message()
                   << DataTypeName(format.type) << ", pages of " << page_tokens << ", "
                   << (rows_innermost ? "rows innermost, " : "") << "from token " << first);
      Case c =
          Plain({.b0 = 3, .b1 = heads, .ratio = 2, .q_len = 1, .kv_len = kv_len, .d = 32, .dv = 48},
                format, format);
      c.spec.softmax_mode = SoftmaxMode::kInfAsZero;
      const int64_t lengths[] = {kv_len - page_tokens - 3, 7, kv_len};
      c.spec.kv_lengths = c.AddDense(kS32, {3, 1, 1, 1, 1}, [&](const Dims5& p) {
        return static_cast<double>(lengths[p[0]]);
      });
      if (first > 0) c.spec.kv_first = c.AddScalar(kS32, static_cast<double>(first));
      if (factor_of_v != 1) {
        const View& scales = c.spec.v[0].quantization->scales;
        const auto n = static_cast<int64_t>(c.inputs[scales.port].bytes() / sizeof(float));
        auto* const values = static_cast<float*>(c.inputs[scales.port].data());
        for (int64_t i = 0; i < n; ++i) values[i] *= static_cast<float>(factor_of_v);
      }
      const std::vector<double> expected = c.Expected();
      MoveToPages(c, page_tokens, rows_innermost);
      for (int i = 0; const KernelSet* set = KernelsAt(i); ++i) {
        ASSERT_TRUE(c.Run(*set, 2).ok());
        EXPECT_LE(c.RelativeError(expected), tolerance) << set->name;
      }
    }
  }
}

TEST(CpuPageTable, AnyStridesAndFirstTokens) {
  for (const int64_t page_tokens : {8, 16, 48, 64}) {
    Check({.type = kF16}, page_tokens, 1e-5);
    Check({.type = kU4, .group = {1, 1, 1, 1, 16}, .scales = kF32, .zero_points = kU4}, page_tokens,
          1e-3);
  }
}

TEST(CpuPageTable, ParametersThatLieRunByRun) {
  for (const int64_t page_tokens : {32, 64}) {
    for (const DataType type : {kU8, kF8E4M3}) {
      Check({.type = type,
             .group = {1, 1, 1, 16, 1},
             .scales = kF32,
             .zero_points = type == kU8 ? kU8 : kUndef,
             .parameters_by_channel = true},
            page_tokens, 1e-3);
    }
  }
}

// Of 4 bits, one for each of an odd number of tokens; and one for each page, of types and numbers
// that are read for one page at a time.
TEST(CpuPageTable, ParametersOfPages) {
  const Format odd{.type = kU8, .group = {1, 1, 1, 1, 0}, .scales = kF32, .zero_points = kU4};
  Check(odd, 15, 1e-3);
  Check(odd, 15, 1e-3, 1, /*heads=*/1);
  for (const DataType zero_points : {kU8, kS32}) {
    for (const int64_t page_tokens : {16, 48}) {
      Check({.type = kU8,
             .group = {1, 1, 1, page_tokens, 16},
             .scales = kF32,
             .zero_points = zero_points},
            page_tokens, 1e-3);
    }
  }
}

// Products on codes do not take scales as small as these.
TEST(CpuPageTable, TilesOfSeveralPagesThatAreDequantized) {
  Check({.type = kU4, .group = {1, 1, 1, 1, 16}, .scales = kF32}, 16, 1e-3, 1e-25);
  Check({.type = kU4, .group = {1, 1, 1, 1, 16}, .scales = kF32}, 48, 1e-3, 1e-25);
}

}  // namespace
}  // namespace kvant::cpu
