// KernelSet::round and ByteKernels, one by one, over guarded memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <limits>
#include <random>
#include <vector>

#include "kvant/kernels/cpu/kernels.h"
#include "kvant/tests/backends/attention/harness.h"

namespace kvant::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(CpuKernels, RoundGivesTheNearestEvenCode) {
  const RoundedCodes codes{-5, 250, -5, 0.5f};
  const std::vector<float> values = {0,      0.49f,  0.5f,   0.51f,  1.5f,          2.5f,   -0.5f,
                                     -1.5f,  249.4f, 249.5f, 250.5f, 1e30f,         kInf,   -kInf,
                                     -1e30f, -5.5f,  -4.5f,  1e-38f, std::nanf(""), 100.5f, 101.5f};
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    for (const int64_t columns : {kHalfTile, kTokenTile}) {
      std::vector<float> tile(2 * kTokenTile, 7.f);
      for (int64_t t = 0; t < columns; ++t) {
        tile[t] = values[t % values.size()];
        tile[kTokenTile + t] = 4 * values[(t + 3) % values.size()];
      }
      const std::vector<float> before = tile;
      const float divisors[] = {1, 4};
      kernels->round(codes, 2, columns, divisors, tile.data());
      for (int64_t at = 0; at < 2 * kTokenTile; ++at) {
        const float x = before[at] / divisors[at / kTokenTile];
        const float code = std::isnan(x)
                               ? codes.of_nan
                               : std::clamp(std::nearbyint(x), codes.lowest, codes.highest);
        const float want = at % kTokenTile < columns ? code * codes.unit : before[at];
        ASSERT_EQ(tile[at], want) << kernels->name << " " << before[at];
      }
    }
  }
}

class ByteKernelsOf : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    const KernelSet* const set = KernelsAt(GetParam());
    if (set == nullptr || set->bytes == nullptr) GTEST_SKIP() << "no such kernels";
    bytes_ = set->bytes;
  }
  int Byte() { return static_cast<int>(random_() % 256); }

  const ByteKernels* bytes_ = nullptr;
  std::mt19937 random_{7};
};

TEST_P(ByteKernelsOf, BytesAreValuesLessTheShift) {
  for (int64_t n = 1; n <= 70; ++n) {
    const GuardedBuffer values(n * sizeof(float)), out((n + 3) / 4 * 4);
    auto* const from = static_cast<float*>(values.data());
    auto* const to = static_cast<int8_t*>(out.data());
    int32_t sum = 0;
    std::vector<int> want;
    for (int64_t i = 0; i < n; ++i) {
      want.push_back(Byte() - 128);
      from[i] = static_cast<float>(want.back() + 37);
      sum += want.back();
    }
    ASSERT_EQ(bytes_->bytes(from, n, 37, to), sum);
    want.resize((n + 3) / 4 * 4);
    for (size_t i = 0; i < want.size(); ++i) ASSERT_EQ(to[i], want[i]) << n;
  }
}

TEST_P(ByteKernelsOf, ZipPutsRowsInTurn) {
  for (int64_t n = 1; n <= 70; ++n) {
    for (int rows = 1; rows <= 4; ++rows) {
      std::deque<GuardedBuffer> memory;
      const uint8_t* four[4] = {};
      for (int j = 0; j < rows; ++j) {
        auto* const row = static_cast<uint8_t*>(memory.emplace_back(n).data());
        std::generate_n(row, n, [this] { return static_cast<uint8_t>(Byte()); });
        four[j] = row;
      }
      const GuardedBuffer out(n * sizeof(uint32_t));
      const auto* const to = static_cast<const uint8_t*>(out.data());
      bytes_->zip(four, n, 0x80, static_cast<uint32_t*>(out.data()));
      for (int64_t at = 0; at < 4 * n; ++at) {
        const uint8_t* const row = four[at % 4];
        ASSERT_EQ(to[at], row == nullptr ? 0 : row[at / 4] ^ 0x80) << n << " " << at;
      }
    }
  }
}

TEST_P(ByteKernelsOf, ProductsAreThoseOfIntegers) {
  for (const int64_t quads : {1, 2, 16, 33}) {
    for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 12, 17}) {
      for (const int64_t size : {kHalfTile, int64_t{1}, int64_t{15}, int64_t{16}, int64_t{130}}) {
        const bool keys = size == kHalfTile;
        const int64_t row_bytes = keys ? 4 * quads : kTokenTile;
        if (row_bytes < 4 * quads) continue;
        const GuardedBuffer left(rows * row_bytes), right(quads * size * 4);
        auto* const a = static_cast<int8_t*>(left.data());
        auto* const b = static_cast<uint8_t*>(right.data());
        std::generate_n(a, left.bytes(), [this] { return static_cast<int8_t>(Byte()); });
        std::generate_n(b, right.bytes(), [this] { return static_cast<uint8_t>(Byte()); });
        std::vector<int32_t> of_rows(rows), of_columns(size), sums(size);
        for (int32_t& term : of_rows) term = Byte() * 1000 - 128000;
        for (int32_t& term : of_columns) term = Byte() * 1000 - 128000;
        bytes_->sums(reinterpret_cast<const uint32_t*>(b), size, quads, size, -3, sums.data());
        std::vector<float> shrink(rows, 0.5f);
        const GuardedBuffer out(rows * (keys ? kTokenTile : size) * sizeof(float));
        auto* const to = static_cast<float*>(out.data());
        std::fill_n(to, out.bytes() / sizeof(float), 6.f);
        const ByteTerms terms{of_rows.data(), of_columns.data()};
        const auto* const columns = reinterpret_cast<const uint32_t*>(b);
        if (keys) {
          bytes_->qk(a, rows, quads, columns, terms, to);
        } else {
          bytes_->pv(a, rows, quads, columns, size, terms, shrink.data(), to);
        }
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < size; ++c) {
            int32_t sum = of_rows[r] + of_columns[c], of_column = 0;
            for (int64_t i = 0; i < 4 * quads; ++i) {
              const int32_t byte = b[(i / 4 * size + c) * 4 + i % 4];
              sum += a[r * row_bytes + i] * byte;
              of_column += byte;
            }
            ASSERT_EQ(sums[c], -3 * of_column);
            const float got = to[r * (keys ? kTokenTile : size) + c];
            ASSERT_EQ(got, static_cast<float>(sum) + (keys ? 0.f : 3.f)) << rows << " " << size;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sets, ByteKernelsOf, testing::Range(0, 8));

}  // namespace
}  // namespace kvant::cpu
