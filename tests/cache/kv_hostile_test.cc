// Caches of numbers that are hard to quantize: what comes out is finite, on every engine, and of
// small numbers as good as of others.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kvant/cache/kv_attention.h"
#include "kvant/cache/kv_cache.h"
#include "kvant/graph/status.h"
#include "kvant/tests/cache/kv_cache_testing.h"
#include "kvant/tests/common/hostile_data.h"

namespace kvant {
namespace {

using cache_testing::Attend;
using cache_testing::AttendByDefinition;
using cache_testing::Bench;
using cache_testing::Difference;
using cache_testing::MakeBench;
using cache_testing::Queries;
using cache_testing::SmallOptions;
using cache_testing::Stored;
using cache_testing::Tokens;
using testing::Hostile;
using testing::HostileNumbers;
using testing::kAllHostile;

std::vector<Engine> Engines() {
  return {Engine::Create({.threads = 2}).value(),
          Engine::Create({.device = Device::kCudaSimt, .threads = 2}).value()};
}

template <typename T>
int64_t NotFinite(const std::vector<T>& values) {
  return std::count_if(values.begin(), values.end(), [](T x) { return !std::isfinite(x); });
}

// A kind to a row of the batch, as large as the cache takes it.
void Fill(double largest, uint64_t seed, Tokens& tokens, int64_t heads, int64_t size) {
  for (int64_t b = 0; b < static_cast<int64_t>(std::size(kAllHostile)); ++b) {
    const HostileNumbers numbers{kAllHostile[b], seed, std::min(1e5, largest)};
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t t = 0; t < tokens.count(); ++t) {
        for (int64_t d = 0; d < size; ++d) {
          const int64_t at[] = {h, t, d};
          tokens.at(b, h, t)[d] = static_cast<float>(numbers(at));
        }
      }
    }
  }
}

class KvHostileTest : public ::testing::TestWithParam<std::string> {};

TEST_P(KvHostileTest, EverySchemeIsFinite) {
  const CacheScheme scheme = ParseCacheScheme(GetParam()).value();
  const int64_t tokens = std::max(scheme.k.residual, scheme.v.residual) + 20;  // some leave windows
  KvCacheOptions options = SmallOptions(GetParam(), tokens);
  options.batch = std::size(kAllHostile);
  for (const Engine& engine : Engines()) {
    Bench bench = MakeBench(options, tokens, &engine);
    Fill((*bench.cache->tensor(0, false))->largest(), 1, bench.k, options.heads, options.head_size);
    Fill((*bench.cache->tensor(0, true))->largest(), 2, bench.v, options.heads, options.head_size);
    ASSERT_TRUE(bench.cache->Append(0, bench.k.Slice(0, tokens), bench.v.Slice(0, tokens)).ok());
    for (const bool values : {false, true}) {
      for (int64_t b = 0; b < options.batch; ++b) {
        EXPECT_EQ(NotFinite(Stored(*bench.cache, 0, values, b, 1)), 0)
            << (values ? "V of " : "K of ") << NameOf(kAllHostile[b]);
      }
    }
    const std::vector<float> q = Queries(3, options.batch * 4 * options.head_size);
    const std::vector<float> out = Attend(*bench.cache, 0, q, 4);
    for (int64_t b = 0; b < options.batch; ++b) {
      const auto row = out.begin() + b * 4 * options.head_size;
      EXPECT_EQ(NotFinite(std::vector<float>(row, row + 4 * options.head_size)), 0)
          << NameOf(kAllHostile[b]);
    }
  }
}

// Padding, say: its scale, 1 in some schemes, takes no bits from the tokens beside it.
TEST_P(KvHostileTest, AZeroTokenCostsTheOthersNothing) {
  const CacheScheme scheme = ParseCacheScheme(GetParam()).value();
  const int64_t tokens = std::max(scheme.k.residual, scheme.v.residual) + 70;
  for (const double size : {1e-3, 1e-4}) {
    Bench bench = MakeBench(SmallOptions(GetParam(), tokens), tokens);
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t t = 0; t < tokens; ++t) {
          for (int64_t d = 0; d < 64; ++d) {
            float& v = bench.v.at(b, h, t)[d];
            v = t == 33 ? 0.f : v * static_cast<float>(size);
          }
        }
      }
    }
    ASSERT_TRUE(bench.cache->Append(0, bench.k.Slice(0, tokens), bench.v.Slice(0, tokens)).ok());
    const std::vector<float> q = Queries(3, 2 * 4 * 64);
    EXPECT_LE(Difference(Attend(*bench.cache, 0, q, 4), AttendByDefinition(*bench.cache, 0, q, 4)),
              5e-4)
        << size;
  }
}

std::vector<std::string> SchemeNames() {
  std::vector<std::string> names;
  for (const NamedCacheScheme& named : NamedCacheSchemes()) names.emplace_back(named.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Schemes, KvHostileTest, ::testing::ValuesIn(SchemeNames()),
                         [](const auto& info) { return info.param; });

// Codes of floats are as good whatever their scale, which is subnormal in f16 for most of these.
TEST(KvSmallNumbersTest, Fp8KeepsItsRelativePrecision) {
  constexpr int64_t kTokens = 32;
  constexpr double kLeast = 0x1p-34;  // half a subnormal step of e4m3, of f16's least scale
  for (const auto& [scheme, precision] :
       {std::pair("fp8_th", 0x1p-4), std::pair("fp8_e5m2_th", 0x1p-3),
        std::pair("f8_e4m3:g32", 0x1p-4), std::pair("f8_e5m2:g32", 0x1p-3),
        std::pair("f8_e5m2:channel:g8+bulk8+f32", 0x1p-3)}) {
    for (const double largest : {3.0, 0.0105, 1.2e-3, 3.5e-4, 2e-5, 6e-7}) {
      SCOPED_TRACE(std::string(scheme) + " of numbers up to " + std::to_string(largest));
      for (const Engine& engine : Engines()) {
        KvCacheOptions options = SmallOptions(scheme, kTokens);
        Bench bench = MakeBench(options, kTokens, &engine);
        std::mt19937 rng(5);
        std::normal_distribution<double> normal;
        for (int64_t b = 0; b < 2; ++b) {
          for (int64_t h = 0; h < 2; ++h) {
            for (int64_t i = 0; i < kTokens * 64; ++i) {
              bench.v.at(b, h, 0)[i] =
                  static_cast<float>(std::clamp(normal(rng) / 3, -1.0, 1.0) * largest);
            }
          }
        }
        ASSERT_TRUE(
            bench.cache->Append(0, bench.k.Slice(0, kTokens), bench.v.Slice(0, kTokens)).ok());
        for (int64_t b = 0; b < 2; ++b) {
          const std::vector<double> stored = Stored(*bench.cache, 0, true, b, 1);
          for (int64_t i = 0; i < kTokens * 64; ++i) {
            const double x = bench.v.at(b, 1, 0)[i];
            ASSERT_LE(std::abs(stored[i] - x),
                      std::abs(x) * precision * 1.001 + largest * 1e-5 + kLeast)
                << x << " of token " << i / 64 << " reads as " << stored[i];
          }
        }
        const std::vector<float> q = Queries(3, 2 * 4 * 64);
        EXPECT_EQ(NotFinite(Attend(*bench.cache, 0, q, 4)), 0);
      }
    }
  }
}

// The largest number that a static scale is for has a code of it as it is stored, too; what is
// beyond gets the largest code.
TEST(KvSmallNumbersTest, StaticScalesRoundUpAndCodesSaturate) {
  constexpr double kScale = 1.3 * 0x1p-24, kStored = 0x1p-23;
  for (const auto& [scheme, highest] :
       {std::pair("s8:tensor", 127.0), std::pair("f8_e4m3:tensor", 448.0),
        std::pair("f8_e5m2:tensor", 57344.0)}) {
    SCOPED_TRACE(scheme);
    for (const Engine& engine : Engines()) {
      KvCacheOptions options = SmallOptions(scheme, 2);
      for (auto* scales : {&options.k_scales, &options.v_scales}) {
        *scales = {{static_cast<float>(kScale)}, {static_cast<float>(kScale)}};
      }
      Bench bench = MakeBench(options, 2, &engine);
      for (int64_t d = 0; d < 64; ++d) {
        const double largest = (d % 2 == 0 ? 1 : -1) * kScale * highest;
        bench.v.at(0, 0, 0)[d] = static_cast<float>(largest);
        bench.v.at(0, 0, 1)[d] = static_cast<float>(1e3 * largest);
      }
      ASSERT_TRUE(bench.cache->Append(0, bench.k.Slice(0, 2), bench.v.Slice(0, 2)).ok());
      const std::vector<double> stored = Stored(*bench.cache, 0, true, 0, 0);
      for (int64_t d = 0; d < 64; ++d) {
        const double x = bench.v.at(0, 0, 0)[d];
        ASSERT_NEAR(stored[d], x, std::abs(x) / 8) << "channel " << d;
        ASSERT_NEAR(std::abs(stored[64 + d]), highest * kStored, kStored) << "channel " << d;
      }
      EXPECT_EQ(NotFinite(Attend(*bench.cache, 0, Queries(3, 2 * 4 * 64), 4)), 0);
    }
  }
}

// Codes of a codebook are its entries, also where the scale is not computed.
TEST(KvSmallNumbersTest, StaticScalesOfCodebooks) {
  for (const char* scheme :
       {"u4:tensor:nf4", "u4:head:iq4_nl", "u4:channel:e2m1", "u4:tensor:nf4+rot"}) {
    SCOPED_TRACE(scheme);
    const NumberFormat format = ParseCacheScheme(scheme)->k.format;
    const std::vector<float> entries = format.codebook_values();
    double gap = 0;
    for (size_t i = 1; i < entries.size(); ++i) {
      gap = std::max<double>(gap, std::abs(entries[i] - entries[i - 1]));
    }
    const double most = std::abs(entries.back());
    for (const Engine& engine : Engines()) {
      KvCacheOptions options = SmallOptions(scheme, 2);
      const int64_t scales = format.groups == NumberFormat::Groups::kTensor ? 1
                             : format.groups == NumberFormat::Groups::kHead ? 2
                                                                            : 2 * 64;
      // Rotated numbers are at most 8 times as large.
      const float scale = ParseCacheScheme(scheme)->k.rotation == 0 ? 0.25f : 2.f;
      for (auto* of : {&options.k_scales, &options.v_scales}) {
        of->assign(2, std::vector<float>(scales, scale));
      }
      Bench bench = MakeBench(options, 2, &engine);
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t d = 0; d < 64; ++d) {
          bench.v.at(0, h, 0)[d] =
              static_cast<float>(0.25 * most * static_cast<double>(d - 32) / 32);
        }
      }
      ASSERT_TRUE(bench.cache->Append(0, bench.k.Slice(0, 1), bench.v.Slice(0, 1)).ok());
      const std::vector<double> stored = Stored(*bench.cache, 0, true, 0, 1);
      double square = 0;
      for (int64_t d = 0; d < 64; ++d) {
        const double error = stored[d] - bench.v.at(0, 1, 0)[d];
        square += error * error;
      }
      EXPECT_LE(std::sqrt(square / 64), gap / 2 * scale) << "root mean square";
    }
  }
}

// What rounds to infinity is refused, as f16 refuses it.
TEST(KvSmallNumbersTest, WhatBF16DoesNotHold) {
  for (const char* scheme : {"bf16", "u4:g32:zp:sf32+window1+bf16"}) {
    Bench bench = MakeBench(SmallOptions(scheme, 2), 2);
    bench.v.at(1, 0, 0)[3] = 3.4e38f;
    const absl::Status status = bench.cache->Append(0, bench.k.Slice(0, 1), bench.v.Slice(0, 1));
    EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments) << scheme << ": " << status;
    bench.v.at(1, 0, 0)[3] = 0x1.fep127f;
    EXPECT_TRUE(bench.cache->Append(0, bench.k.Slice(0, 1), bench.v.Slice(0, 1)).ok()) << scheme;
  }
}

}  // namespace
}  // namespace kvant
