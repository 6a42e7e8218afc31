// The products of every kernel set against f64 loops, over shapes that leave tails
// everywhere, in memory that ends at an unreadable page.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "kvant/backends/cpu/attention_plan.h"
#include "kvant/kernels/cpu/kernels.h"
#include "kvant/tests/backends/attention/harness.h"

namespace kvant::cpu {
namespace {

constexpr DataType kStoredTypes[] = {kF32, kF16, kBF16, kF8E4M3, kF8E5M2};
constexpr int64_t kHeadSizes[] = {1, 7, 15, 16, 17, 33, 40, 64, 72, 100, 128, 131, 257, 320};
constexpr int64_t kRowCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 17};
// Blocks of tile registers are of 32 rows.
constexpr int64_t kRowCountsOfPairs[] = {1,  2,  3,  4,  5,  6,  7,  8, 11,
                                         12, 13, 16, 17, 32, 33, 50, 64};
constexpr float kUntouched = 1234.5f;

// Floats that end where an unreadable page begins, all different.
class Floats {
 public:
  Floats(int64_t n, int seed) : buffer_(n * sizeof(float)) {
    std::mt19937 random(seed);
    for (int64_t i = 0; i < n; ++i) {
      data()[i] = static_cast<float>(random()) / 2147483648.f - 0.875f;
    }
  }
  Floats(int64_t n, float value) : buffer_(n * sizeof(float)) {
    for (int64_t i = 0; i < n; ++i) data()[i] = value;
  }
  float* data() const { return static_cast<float*>(buffer_.data()); }
  float operator[](int64_t i) const { return data()[i]; }

 private:
  GuardedBuffer buffer_;
};

// Elements of a type, likewise.
class Elements : public GuardedBuffer {
 public:
  Elements(DataType type, int64_t n) : GuardedBuffer(BytesFor(type, n)) {
    std::mt19937 random(7);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = static_cast<uint32_t>(random());
      double x = static_cast<double>(bits) / 2147483648.0 - 0.9;
      if (IsInteger(type)) {
        const int64_t codes = std::min<int64_t>(HighestOf(type) - LowestOf(type) + 1, 1 << 20);
        x = static_cast<double>(LowestOf(type) + bits % codes);
      }
      StoreElement(type, data(), i, x);
    }
  }
};

// Sums of products of values below 1.2, in f32.
double Tolerance(int64_t n) { return 1e-6 * std::sqrt(static_cast<double>(n)) + 1e-7; }

TEST(CpuProducts, QkOfTiles) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    for (int64_t d : kHeadSizes) {
      for (int64_t rows : kRowCounts) {
        for (int64_t tokens : {1, 13, 35, 49, 64}) {
          const Floats q(rows * d, 1), k(d * kHalfTile, 2), scores(rows * kTokenTile, kUntouched);
          kernels->qk(q.data(), rows, d, k.data(), tokens, scores.data());
          for (int64_t i = 0; i < rows * tokens; ++i) {
            const int64_t r = i / tokens, t = i % tokens;
            double want = 0;
            for (int64_t c = 0; c < d; ++c) want += double{q[r * d + c]} * k[c * kHalfTile + t];
            ASSERT_NEAR(scores[r * kTokenTile + t], want, Tolerance(d))
                << kernels->name << " " << d << " channels, row " << r << " of " << rows;
          }
        }
      }
    }
  }
}

TEST(CpuProducts, PvOfTiles) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    for (int64_t d : kHeadSizes) {
      for (int64_t rows : kRowCounts) {
        for (int64_t tokens : {1, 2, 31, 64}) {
          const Floats probs(rows * kTokenTile, 1), v(tokens * d, 2), shrink(rows, 3);
          const Floats before(rows * d, 4), out(rows * d, 4);
          kernels->pv(probs.data(), rows, tokens, v.data(), d, shrink.data(), out.data());
          for (int64_t r = 0; r < rows; ++r) {
            for (int64_t c = 0; c < d; ++c) {
              double want = double{before[r * d + c]} * shrink[r];
              for (int64_t t = 0; t < tokens; ++t) {
                want += double{probs[r * kTokenTile + t]} * v[t * d + c];
              }
              ASSERT_NEAR(out[r * d + c], want, Tolerance(tokens))
                  << kernels->name << " " << d << " channels, row " << r << " of " << rows;
            }
          }
        }
      }
    }
  }
}

// Tokens that lie `stride` elements apart from element `index` on.
TokenRows RowsIn(DataType type, const Elements& from, int64_t index, int64_t stride, int64_t tokens,
                 int64_t channels) {
  const int64_t bytes = BitsOf(type) / 8;
  return RowsFrom(static_cast<const char*>(from.data()) + index * bytes, stride * bytes,
                  channels * bytes, tokens);
}

// Scores of the keys' first `tokens`; those beyond are untouched.
void CheckScores(const Floats& scores, const Floats& q, int64_t rows, int64_t d, int64_t tokens,
                 const std::function<float(int64_t t, int64_t c)>& key) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t t = 0; t < kTokenTile; ++t) {
      if (t >= tokens) {
        ASSERT_EQ(scores[r * kTokenTile + t], kUntouched);
        continue;
      }
      double want = 0;
      for (int64_t c = 0; c < d; ++c) want += q[r * d + c] * key(t, c);
      ASSERT_NEAR(scores[r * kTokenTile + t], want, Tolerance(d))
          << d << " channels, row " << r << " of " << rows << ", token " << t << " of " << tokens;
    }
  }
}

double Rounded(float x) { return RoundTo(kBF16, x); }

// Rows of `columns` floats as pairs along the rows.
void PairAlongRows(const KernelSet& kernels, const Floats& from, int64_t rows, int64_t columns,
                   uint32_t* to) {
  const int64_t pairs = (columns + 1) / 2;
  std::fill_n(to, rows * pairs, 0u);
  for (int64_t r = 0; r < rows; ++r) {
    kernels.pairs->load(kF32, from.data(), r * columns, columns, {},
                        reinterpret_cast<uint16_t*>(to + r * pairs));
  }
}

// Rows of `columns` floats as pairs of two rows each.
void PairRows(const KernelSet& kernels, const Floats& from, int64_t rows, int64_t columns,
              uint32_t* to) {
  const GuardedBuffer rounded(rows * columns * 2);
  auto* const lines = static_cast<uint16_t*>(rounded.data());
  kernels.pairs->load(kF32, from.data(), 0, rows * columns, {}, lines);
  for (int64_t r = 0; r < rows; r += 2) {
    const uint16_t* const line = lines + r * columns;
    kernels.pairs->zip(line, r + 1 < rows ? line + columns : nullptr, columns,
                       to + r / 2 * columns);
  }
}

// Every set, type, head size and number of rows and tokens.
template <typename Check>
void ForStoredKeys(Check check) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    if (kernels->qk_stored == nullptr) continue;
    for (DataType type : kStoredTypes) {
      for (int64_t d : kHeadSizes) {
        for (int64_t rows : kRowCounts) {
          for (int64_t tokens : {1, 3, 15, 16, 33, 64}) {
            SCOPED_TRACE(testing::Message() << kernels->name << " " << DataTypeName(type));
            check(*kernels, type, d, rows, tokens);
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(CpuProducts, QkOfStoredRows) {
  ForStoredKeys(
      [](const KernelSet& kernels, DataType type, int64_t d, int64_t rows, int64_t tokens) {
        const int64_t stride = d + 3, index = 5;
        const Elements k(type, index + (tokens - 1) * stride + d);
        const Floats q(rows * d, 1), scores(rows * kTokenTile, kUntouched);
        kernels.qk_stored(type, RowsIn(type, k, index, stride, tokens, d), q.data(), rows, d,
                          scores.data());
        CheckScores(scores, q, rows, d, tokens, [&](int64_t t, int64_t c) {
          return static_cast<float>(LoadElement(type, k.data(), index + t * stride + c));
        });
      });
}

TEST(CpuProducts, QkOfStoredRowsOfPairs) {
  ForStoredKeys(
      [](const KernelSet& kernels, DataType type, int64_t d, int64_t rows, int64_t tokens) {
        if (type != kBF16 || d % 2 != 0 || kernels.pairs == nullptr) return;
        if (kernels.pairs->qk_stored == nullptr) return;
        const int64_t stride = d + 3, index = 5, pairs = d / 2;
        const Elements k(type, index + (tokens - 1) * stride + d);
        const Floats q(rows * d, 1), scores(rows * kTokenTile, kUntouched);
        const GuardedBuffer q_pairs(rows * pairs * 4);
        auto* const qp = static_cast<uint32_t*>(q_pairs.data());
        for (int64_t i = 0; i < rows * d; ++i) q.data()[i] = static_cast<float>(Rounded(q[i]));
        PairAlongRows(kernels, q, rows, d, qp);
        kernels.pairs->qk_stored(RowsIn(type, k, index, stride, tokens, d), qp, rows, pairs,
                                 scores.data());
        CheckScores(scores, q, rows, d, tokens, [&](int64_t t, int64_t c) {
          return static_cast<float>(LoadElement(type, k.data(), index + t * stride + c));
        });
      });
}

TEST(CpuProducts, QkOfStoredChannels) {
  ForStoredKeys(
      [](const KernelSet& kernels, DataType type, int64_t d, int64_t rows, int64_t tokens) {
        const int64_t stride = tokens + 3, index = 5, bytes = BitsOf(type) / 8;
        const Elements k(type, index + (d - 1) * stride + tokens);
        const Floats q(rows * d, 1), scores(rows * kTokenTile, kUntouched);
        const auto* const at = static_cast<const uint8_t*>(k.data()) + index * bytes;
        kernels.qk_channels(type, at, at + tokens * bytes, stride * bytes, tokens, q.data(), rows,
                            d, scores.data());
        CheckScores(scores, q, rows, d, tokens, [&](int64_t t, int64_t c) {
          return static_cast<float>(LoadElement(type, k.data(), index + c * stride + t));
        });
      });
}

TEST(CpuProducts, PvOfStoredRows) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    if (kernels->pv_stored == nullptr) continue;
    for (DataType type : kStoredTypes) {
      for (int64_t d : kHeadSizes) {
        for (int64_t rows : kRowCounts) {
          const int64_t tokens = 1 + (d * 7 + rows * 5) % kTokenTile;
          const int64_t stride = d + 3, index = 5;
          const Elements v(type, index + (tokens - 1) * stride + d);
          const Floats probs(rows * kTokenTile, 1), shrink(rows, 3);
          const Floats before(rows * d, 4), out(rows * d, 4);
          kernels->pv_stored(type, RowsIn(type, v, index, stride, tokens, d), probs.data(), rows,
                             shrink.data(), d, out.data());
          for (int64_t r = 0; r < rows; ++r) {
            for (int64_t c = 0; c < d; ++c) {
              double want = double{before[r * d + c]} * shrink[r];
              for (int64_t t = 0; t < tokens; ++t) {
                want +=
                    probs[r * kTokenTile + t] * LoadElement(type, v.data(), index + t * stride + c);
              }
              ASSERT_NEAR(out[r * d + c], want, Tolerance(tokens))
                  << kernels->name << " " << DataTypeName(type) << " " << d << " channels, row "
                  << r << " of " << rows << ", " << tokens << " tokens";
            }
          }
        }
      }
    }
  }
}

// Products of two bf16 are exact in f32.
TEST(CpuProducts, QkOfPairs) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    if (kernels->pairs == nullptr) continue;
    for (int64_t d : kHeadSizes) {
      for (int64_t rows : kRowCountsOfPairs) {
        const int64_t pairs = (d + 1) / 2;
        const Floats q(rows * d, 1), k(d * kHalfTile, 2);
        const GuardedBuffer q_pairs(rows * pairs * 4), k_pairs(pairs * kHalfTile * 4);
        uint32_t* const qp = static_cast<uint32_t*>(q_pairs.data());
        uint32_t* const kp = static_cast<uint32_t*>(k_pairs.data());
        PairAlongRows(*kernels, q, rows, d, qp);
        PairRows(*kernels, k, d, kHalfTile, kp);
        const Floats scores(rows * kTokenTile, kUntouched);
        kernels->pairs->qk(qp, rows, pairs, kp, scores.data());
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t t = 0; t < kHalfTile; ++t) {
            double want = 0;
            for (int64_t c = 0; c < d; ++c) {
              want += Rounded(q[r * d + c]) * Rounded(k[c * kHalfTile + t]);
            }
            ASSERT_NEAR(scores[r * kTokenTile + t], want, Tolerance(d))
                << kernels->name << " " << d << " channels, row " << r << " of " << rows
                << ", token " << t;
          }
        }
      }
    }
  }
}

// split: each probability as two numbers. An infinity in V stays one, a NaN too, and no other
// channel sees them.
void CheckPvOfPairs(bool split) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    if (kernels->pairs == nullptr) continue;
    for (int64_t d : kHeadSizes) {
      for (int64_t rows : kRowCountsOfPairs) {
        const int64_t tokens = 1 + (d * 7 + rows * 5) % kTokenTile;
        const Floats probs(rows * kTokenTile, 1), v(tokens * d, 2), shrink(rows, 3);
        for (int64_t r = 0; r < rows; ++r) {
          float* const row = probs.data() + r * kTokenTile;
          std::fill(row + tokens, row + kTokenTile, std::nanf(""));  // not read beyond
          std::fill(row + tokens, row + WholeHalves(tokens), 0.f);
        }
        const GuardedBuffer v_pairs((tokens + 1) / 2 * d * 4);
        uint32_t* const vp = static_cast<uint32_t*>(v_pairs.data());
        PairRows(*kernels, v, tokens, d, vp);
        const Floats before(rows * d, 4), out(rows * d, 4);
        const int64_t infinite = split && d % 2 == 0 ? d / 2 : -1, nan = infinite + 1;
        // Of the first token, or of the second, which a pair has in its upper half.
        const int64_t spoilt = rows % 2 == 0 && tokens > 1 ? 1 : 0;
        const auto spoil = [&](int64_t channel, float value) {
          const uint32_t bits = F32ToBF16(value);
          vp[channel] =
              spoilt == 1 ? (vp[channel] & 0xffff) | bits << 16 : (vp[channel] & 0xffff0000) | bits;
        };
        if (infinite >= 0) {
          spoil(infinite, HUGE_VALF);
          if (nan < d) spoil(nan, std::nanf(""));
          for (int64_t r = 0; r < rows; ++r) {
            probs.data()[r * kTokenTile + spoilt] = r % 2 == 0 ? 1.f : 0.3f;
          }
        }
        if (split) {
          kernels->pairs->pv_split(probs.data(), rows, tokens, vp, d, shrink.data(), out.data());
        } else {
          kernels->pairs->pv(probs.data(), rows, tokens, vp, d, shrink.data(), out.data());
        }
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < d; ++c) {
            double want = double{before[r * d + c]} * shrink[r], lost = 0;
            for (int64_t t = 0; t < tokens; ++t) {
              const float p = probs[r * kTokenTile + t];
              const double value = Rounded(v[t * d + c]);
              want += (split ? p : Rounded(p)) * value;
              if (split) lost += 0x1p-17 * std::abs(p * value);
            }
            if (infinite >= 0 && (c == infinite || c == nan)) {
              ASSERT_EQ(std::isnan(out[r * d + c]), c == nan) << r << " " << c << " of " << d;
              ASSERT_FALSE(std::isfinite(out[r * d + c]));
              continue;
            }
            ASSERT_NEAR(out[r * d + c], want, Tolerance(tokens) + lost)
                << kernels->name << " " << d << " channels, row " << r << " of " << rows << ", "
                << tokens << " tokens";
          }
        }
      }
    }
  }
}

TEST(CpuProducts, PvOfPairs) { CheckPvOfPairs(/*split=*/false); }
TEST(CpuProducts, PvOfPairsWithProbabilitiesInTwo) { CheckPvOfPairs(/*split=*/true); }

TEST(CpuProducts, ParametersOfEveryGroupSize) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    for (int64_t group = 1; group <= 70; ++group) {
      for (int64_t into = 0; into < group; ++into) {
        for (int64_t n : {1, 5, 8, 16, 23, 31, 64, 80, 131}) {
          const Floats in((into + n - 1) / group + 1, 1), out(n, kUntouched);
          kernels->expand(in.data(), group, into, n, out.data());
          for (int64_t e = 0; e < n; ++e) {
            ASSERT_EQ(out[e], in[(into + e) / group])
                << kernels->name << " element " << e << " of " << n << " in groups of " << group
                << " from " << into;
          }
        }
      }
    }
    // Groups whose elements f32 does not count.
    for (int64_t group : {int64_t{1} << 24, (int64_t{1} << 40) + 1}) {
      for (int64_t into : {int64_t{0}, group / 2, group - 7, group - 16, group - 17}) {
        const int64_t n = 40;
        const Floats in((into + n - 1) / group + 1, 1), out(n, kUntouched);
        kernels->expand(in.data(), group, into, n, out.data());
        for (int64_t e = 0; e < n; ++e) {
          ASSERT_EQ(out[e], in[(into + e) / group]) << kernels->name << " " << into << " " << e;
        }
      }
    }
  }
}

TEST(CpuProducts, ScaleByGroups) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    for (int64_t n : {1, 7, 8, 16, 31, 40, 64, 131}) {
      for (int64_t group : {1, 16, 32, 48, 131, 200}) {
        for (int zero_points = 0; zero_points < 3; ++zero_points) {
          const int64_t count = (n - 1) / group + 1;
          const Floats scales(count, 1), zps(count, 2), before(n, 3), values(n, 3);
          const Scaling how{scales.data(), zero_points == 0 ? nullptr : zps.data(), group,
                            zero_points == 2};
          kernels->scale(how, n, values.data());
          for (int64_t e = 0; e < n; ++e) {
            const double code = before[e], scale = scales[e / group], zp = zps[e / group];
            double want = code * scale;
            if (zero_points == 1) want = (code - zp) * scale;
            if (zero_points == 2) want = code * scale - zp;
            ASSERT_NEAR(values[e], want, 2e-7)
                << kernels->name << " " << n << " in groups of " << group;
          }
        }
      }
    }
  }
}

// What PairKernels' load takes is `want`, rounded.
void CheckRounded(const KernelSet& kernels, DataType type, const Elements& data, int64_t index,
                  int64_t n, const Scaling& how, const Floats& want) {
  if (kernels.pairs == nullptr || index * BitsOf(type) % 8 != 0) return;
  const GuardedBuffer got(n * 2);
  kernels.pairs->load(type, data.data(), index, n, how, static_cast<uint16_t*>(got.data()));
  for (int64_t i = 0; i < n; ++i) {
    ASSERT_EQ(LoadElement(kBF16, got.data(), i), Rounded(want[i])) << i << ", " << want[i];
  }
}

TEST(CpuProducts, RoundedLoadsWithoutScales) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    for (DataType type : {kF32, kF16, kBF16, kF8E4M3, kF8E5M2, kS8, kU8, kS4, kU4, kS2, kU2}) {
      const bool is_position = type == kU2 || type == kU4 || type == kU8;
      const Floats codebook(is_position ? int64_t{1} << BitsOf(type) : 0, 5);
      for (int64_t n : {1, 2, 7, 16, 31, 32, 33, 64, 131}) {
        for (int64_t index : {0, 1, 4, 7}) {
          SCOPED_TRACE(testing::Message()
                       << kernels->name << " " << DataTypeName(type) << " " << n);
          const Elements data(type, index + n);
          const Floats want(n, 3), scale(1, 0.75f);
          kernels->load(type, data.data(), index, n, want.data());
          CheckRounded(*kernels, type, data, index, n, {}, want);
          if (!is_position) continue;
          kernels->load_entries(codebook.data(), type, data.data(), index, n, want.data());
          CheckRounded(*kernels, type, data, index, n, {.codebook = codebook.data()}, want);
          const Scaling how{.scales = scale.data(), .group = n, .codebook = codebook.data()};
          kernels->scale(how, n, want.data());
          CheckRounded(*kernels, type, data, index, n, how, want);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(CpuProducts, LoadScaledIsLoadThenScale) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    for (DataType type :
         {kF32, kF16, kBF16, kF8E4M3, kF8E5M2, kS8, kU8, kS4, kU4, kS2, kU2, kS32}) {
      for (int64_t n : {1, 2, 3, 5, 7, 13, 16, 27, 31, 48, 64, 131}) {
        for (int64_t index : {0, 1, 2, 3, 4, 6, 7}) {
          const Elements data(type, index + n);
          for (int64_t group : {1, 16, 32, 131}) {
            for (int zero_points = 0; zero_points < 3; ++zero_points) {
              const int64_t count = (n - 1) / group + 1;
              const Floats scales(count, 1), zps(count, 2);
              const Scaling how{scales.data(), zero_points == 0 ? nullptr : zps.data(), group,
                                zero_points == 2};
              const Floats want(n, 3), got(n, 4);
              kernels->load(type, data.data(), index, n, want.data());
              kernels->scale(how, n, want.data());
              kernels->load_scaled(type, data.data(), index, n, how, got.data());
              SCOPED_TRACE(testing::Message()
                           << kernels->name << " " << DataTypeName(type) << " " << n << " from "
                           << index << " in groups of " << group);
              ASSERT_EQ(std::memcmp(got.data(), want.data(), n * sizeof(float)), 0);
              CheckRounded(*kernels, type, data, index, n, how, want);
              if (testing::Test::HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

TEST(CpuProducts, Transpose) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    for (int64_t rows : {1, 3, 4, 5, 8, 15, 16, 17, 32}) {
      for (int64_t cols : {1, 3, 4, 7, 8, 15, 16, 20, 40, 128}) {
        const int64_t in_stride = cols + 2, out_stride = rows + 1;
        const Floats in((rows - 1) * in_stride + cols, 1);
        const Floats out((cols - 1) * out_stride + rows, kUntouched);
        kernels->transpose(in.data(), in_stride, rows, cols, out.data(), out_stride);
        for (int64_t c = 0; c < cols; ++c) {
          for (int64_t r = 0; r < rows; ++r) {
            ASSERT_EQ(out[c * out_stride + r], in[r * in_stride + c]) << kernels->name;
          }
          if (c + 1 < cols) {
            ASSERT_EQ(out[c * out_stride + rows], kUntouched);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvant::cpu
