// Codes to 16-bit values, against (code - zero point) * scale in f64 rounded once.
#include "kvant/kernels/cuda/dequantize_codes.h"

#include <cmath>
#include <random>

#include "gtest/gtest.h"

namespace kvant::cuda {
namespace {

constexpr i32 kCodeTypes[] = {kInt8, kUint8, kInt4, kUint4, kInt2, kUint2};
constexpr i32 kZeroTypes[] = {kNone, kUint8, kInt8, kUint4, kInt4};

float Rounded(i32 arithmetic, float x) {
  const u32 pair = Pack(arithmetic, x, 0.f);
  return arithmetic == kByF16 ? F16Low(pair) : BF16Low(pair);
}

class CodesToValuesTest : public ::testing::Test {
 protected:
  // A word of codes of any value, whose pairs are of one group or of two.
  void Check(i32 arithmetic, const SegmentTraits& traits, const GroupParameters& group,
             const GroupParameters& other) {
    const CodesToValues codes(arithmetic, traits);
    ASSERT_TRUE(codes.Takes());
    const i32 bits = BitsOf(traits.data.type);
    const auto word = static_cast<u32>(rng_());
    const GroupParameters groups[] = {group, other};
    const Words2 words[] = {codes.Parameters(group, 1.f), codes.Parameters(other, 1.f)};
    PairParameters parameters{{words[0].v[0], words[1].v[0]}, {words[0].v[1], words[1].v[1]}};
    if (codes.HasHalves()) {
      const auto halves = [](u32 low, u32 high) { return (low & 0xffff) | high << 16; };
      const u32 scale = halves(words[0].v[0], words[1].v[0]);
      const u32 offset = halves(words[0].v[1], words[1].v[1]);
      parameters = PairParameters::Same({{scale, offset}});
    }
    for (i32 i = 0; i < 32 / bits; ++i) {
      const u32 raw = word >> i * bits & static_cast<u32>((uint64_t{1} << bits) - 1);
      const i32 place = codes.Order().PlaceOf(i);
      const u32 pair = codes.Pair(word, place / 2, parameters, /*entries=*/0);
      const u32 half = pair >> place % 2 * 16 & 0xffff;
      const float got = arithmetic == kByF16 ? F16Low(half) : BF16Low(half);
      const double code = CodeToFloat(traits.data.type, raw);
      const auto [scale, zero_point] = groups[place % 2];
      const double exact =
          traits.real_zero_points ? code * scale - zero_point : (code - zero_point) * scale;
      // f32 keeps the products of numbers of 16 bits and the codes whole.
      const float expected = Rounded(arithmetic, static_cast<float>(exact));
      if (std::isnan(expected) && std::isnan(got)) continue;
      EXPECT_EQ(got, expected) << code << " of type " << traits.data.type << ", zero point "
                               << zero_point << " of type " << traits.zero_points.type << ", scale "
                               << scale << " of type " << traits.scales.type;
    }
  }

  SegmentTraits Traits(i32 data, i32 scales, i32 zero_points, bool real) {
    SegmentTraits traits{};
    traits.data.type = data;
    traits.scales.type = scales;
    traits.zero_points.type = zero_points;
    traits.real_zero_points = real;
    return traits;
  }

  // Once to twice as large.
  float Scale(i32 type, float magnitude) {
    const float scale = magnitude * (1.f + static_cast<float>(rng_() % 1000) / 1000.f);
    if (type == kFloat32) return scale;
    return Rounded(type == kFloat16 ? kByF16 : kByBF16, scale);
  }

  std::mt19937 rng_{1};
};

TEST_F(CodesToValuesTest, WithIntegerZeroPoints) {
  for (const i32 arithmetic : {kByF16, kByBF16}) {
    for (const i32 scales : {kFloat16, kBFloat16}) {
      for (const i32 data : kCodeTypes) {
        for (const i32 zero : kZeroTypes) {
          const SegmentTraits traits = Traits(data, scales, zero, false);
          for (const float magnitude : {1e-6f, 0.37f, 1.f, 200.f}) {
            const auto group = [&] {
              const float zero_point =
                  zero == kNone ? 0.f : CodeToFloat(zero, static_cast<u32>(rng_()));
              return GroupParameters{Scale(scales, magnitude), zero_point};
            };
            for (int round = 0; round < 20; ++round) Check(arithmetic, traits, group(), group());
          }
        }
      }
    }
  }
}

TEST_F(CodesToValuesTest, WithRealZeroPoints) {
  for (const i32 arithmetic : {kByF16, kByBF16}) {
    const i32 own = arithmetic == kByF16 ? kFloat16 : kBFloat16;
    for (const i32 data : kCodeTypes) {
      const SegmentTraits traits = Traits(data, own, own, true);
      for (int round = 0; round < 50; ++round) {
        // Multiples of 1/16, and sums that f32 holds.
        const auto group = [&] {
          return GroupParameters{static_cast<float>(1 + rng_() % 100) / 16.f,
                                 static_cast<float>(static_cast<i32>(rng_() % 200) - 100) / 16.f};
        };
        Check(arithmetic, traits, group(), group());
      }
    }
  }
}

TEST_F(CodesToValuesTest, OfF8) {
  for (const i32 arithmetic : {kByF16, kByBF16}) {
    for (const i32 scales : {kFloat16, kBFloat16, kFloat32}) {
      for (const i32 data : {kFloat8E4M3, kFloat8E5M2}) {
        const SegmentTraits traits = Traits(data, scales, kNone, false);
        for (const float magnitude : {1e-6f, 0.37f, 1.f, 100.f}) {
          const auto group = [&] { return GroupParameters{Scale(scales, magnitude), 0.f}; };
          // A word has 4 of the 256 numbers.
          for (int round = 0; round < 300; ++round) Check(arithmetic, traits, group(), group());
        }
      }
    }
  }
}

TEST_F(CodesToValuesTest, GroupsOfNothingAreZeros) {
  for (const i32 zero : kZeroTypes) {
    const SegmentTraits traits = Traits(kUint4, kFloat16, zero, false);
    const CodesToValues codes(kByF16, traits);
    const Words2 parameters = codes.Parameters({0.f, 0.f}, 1.f);
    for (i32 i = 0; i < codes.Pairs(); ++i) {
      const auto same = PairParameters::Same(parameters);
      EXPECT_EQ(codes.Pair(0, i, same, /*entries=*/0) & 0x7fff7fffu, 0u);
    }
  }
}

TEST_F(CodesToValuesTest, WhatGoesAnotherWay) {
  const auto takes = [](i32 arithmetic, const SegmentTraits& traits) {
    return CodesToValues(arithmetic, traits).Takes();
  };
  EXPECT_FALSE(takes(kByF16, Traits(kFloat8E4M3, kFloat16, kUint8, false)));
  EXPECT_FALSE(takes(kByF16, Traits(kFloat16, kFloat16, kNone, false)));
  EXPECT_FALSE(takes(kByF16, Traits(kInt8, kNone, kNone, false)));
  EXPECT_FALSE(takes(kByTF32, Traits(kInt8, kFloat16, kNone, false)));
  EXPECT_FALSE(takes(kByF16, Traits(kUint4, kFloat16, kInt32, false)));
  SegmentTraits codebook = Traits(kUint4, kFloat16, kNone, false);
  codebook.codebook = 16;
  EXPECT_FALSE(takes(kByF16, codebook));
  codebook.codebook_table = 1;
  EXPECT_TRUE(takes(kByF16, codebook));
  EXPECT_FALSE(takes(kByBF16, codebook));
  codebook.scales.type = kBFloat16;
  EXPECT_TRUE(takes(kByBF16, codebook));
}

TEST(ChannelOrderTest, LowerHalvesAreAtEvenPlaces) {
  for (const i32 span : {2, 4, 8, 16}) {
    const ChannelOrder order{span};
    for (i32 place = 0; place < 48; place += 2) {
      const i32 channel = order.ChannelAt(place);
      EXPECT_LT(channel % span, span / 2) << span;
      EXPECT_EQ(order.PlaceOf(channel), place) << span;
      EXPECT_EQ(order.PlaceOf(channel + span / 2), place + 1) << span;
    }
  }
}

}  // namespace
}  // namespace kvant::cuda
