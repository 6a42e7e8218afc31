#include "kvant/graph/data_type.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace kvant {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

const std::vector<DataType>& AllTypes() {
  static const auto* const types = new std::vector<DataType>{
#define KVANT_DATA_TYPE(name, ...) name,
#include "kvant/graph/data_type.inc"
  };
  return *types;
}

TEST(DataType, NamesRoundTrip) {
  for (DataType type : AllTypes()) EXPECT_EQ(DataTypeFromName(DataTypeName(type)), type);
  EXPECT_EQ(DataTypeFromName("f64"), std::nullopt);
  EXPECT_EQ(DataTypeName(kF8E4M3), "f8_e4m3");
}

// Every code of every type up to 16 bits survives load -> store -> load.
TEST(DataType, EveryCodeRoundTrips) {
  for (DataType type : AllTypes()) {
    const int bits = BitsOf(type);
    if (bits == 0 || bits > 16) continue;
    for (uint32_t code = 0; code < (1u << bits); ++code) {
      const uint32_t stored = code;
      const double value = LoadElement(type, &stored, 0);
      uint32_t again = 0;
      StoreElement(type, &again, 0, value);
      const double reread = LoadElement(type, &again, 0);
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(reread)) << DataTypeName(type) << " " << code;
      } else {
        EXPECT_EQ(value, reread) << DataTypeName(type) << " " << code;
        if (type != kBoolean) {
          EXPECT_EQ(again, stored) << DataTypeName(type);
        }
      }
    }
  }
}

// Between two neighbouring values, the nearer one; at the middle, the even code.
TEST(DataType, RoundsToNearestEven) {
  for (DataType type : {kF16, kBF16, kF8E4M3, kF8E5M2}) {
    const uint32_t codes = 1u << (BitsOf(type) - 1);
    for (uint32_t code = 0; code + 1 < codes; ++code) {
      const uint32_t next = code + 1;
      const double low = LoadElement(type, &code, 0);
      const double high = LoadElement(type, &next, 0);
      if (!std::isfinite(low) || !std::isfinite(high)) continue;
      const double middle = (low + high) / 2;
      const double step = (high - low) / 64;
      EXPECT_EQ(RoundTo(type, middle - step), low) << DataTypeName(type) << " " << code;
      EXPECT_EQ(RoundTo(type, middle + step), high) << DataTypeName(type) << " " << code;
      EXPECT_EQ(RoundTo(type, middle), code % 2 == 0 ? low : high) << DataTypeName(type);
      EXPECT_EQ(RoundTo(type, -middle), code % 2 == 0 ? -low : -high) << DataTypeName(type);
    }
  }
}

TEST(DataType, KnownValues) {
  EXPECT_EQ(F32ToF16(1.f), 0x3C00);
  EXPECT_EQ(F32ToF16(65504.f), 0x7BFF);
  EXPECT_EQ(F16ToF32(0x0001), std::ldexp(1.f, -24));
  EXPECT_EQ(F32ToBF16(1.f), 0x3F80);
  EXPECT_EQ(F8E4M3ToF32(0x7E), 448.f);
  EXPECT_EQ(F8E5M2ToF32(0x7B), 57344.f);
  EXPECT_TRUE(std::isnan(F8E4M3ToF32(0x7F)));
}

TEST(DataType, Overflow) {
  EXPECT_EQ(RoundTo(kF16, 65520), kInf);
  EXPECT_EQ(RoundTo(kF16, 65519), 65504);
  EXPECT_EQ(RoundTo(kF8E4M3, 463), 448);
  EXPECT_TRUE(std::isnan(RoundTo(kF8E4M3, 465)));
  EXPECT_EQ(RoundTo(kF8E5M2, -1e9), -kInf);
  EXPECT_EQ(RoundTo(kS8, 300), 127);
  EXPECT_EQ(RoundTo(kS4, -9), -8);
  EXPECT_EQ(RoundTo(kU2, 7), 3);
  EXPECT_EQ(RoundTo(kU4, -1), 0);
  EXPECT_EQ(RoundTo(kS32, 1e12), 2147483647);
  EXPECT_EQ(RoundTo(kU8, 2.5), 2);
  EXPECT_EQ(RoundTo(kU8, 3.5), 4);
}

TEST(DataType, SubByteOrderAndNeighbours) {
  const uint8_t nibbles[] = {0x21, 0xF8};
  EXPECT_EQ(LoadElement(kU4, nibbles, 0), 1);
  EXPECT_EQ(LoadElement(kU4, nibbles, 1), 2);
  EXPECT_EQ(LoadElement(kS4, nibbles, 2), -8);
  EXPECT_EQ(LoadElement(kS4, nibbles, 3), -1);
  const uint8_t pairs[] = {0b11100100};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(LoadElement(kU2, pairs, i), i);
  uint8_t byte = 0xFF;
  StoreElement(kU2, &byte, 2, 0);
  EXPECT_EQ(byte, 0b11001111);
  StoreElement(kS4, &byte, 0, -3);
  EXPECT_EQ(byte, 0b11001101);
}

TEST(DataType, Bytes) {
  EXPECT_EQ(BytesFor(kU4, 5), 3);
  EXPECT_EQ(BytesFor(kS2, 5), 2);
  EXPECT_EQ(BytesFor(kS64, 5), 40);
  EXPECT_EQ(BytesFor(kU4, 0), 0);
  EXPECT_EQ(BytesFor(kUndef, 3), 0);
}

}  // namespace
}  // namespace kvant
