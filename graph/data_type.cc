#include "kvant/graph/data_type.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>

namespace kvant {
namespace {

enum class Class : uint8_t { None, Float, Signed, Unsigned, Bool };

struct TypeRow {
  std::string_view name;
  int bits;
  Class klass;
  double largest;
};

constexpr TypeRow kRows[] = {
#define KVANT_DATA_TYPE(name, json, bits, klass, largest) {json, bits, Class::klass, largest},
#include "kvant/graph/data_type.inc"
};

// A type that there is not has no name, and is otherwise like kUndef.
const TypeRow& RowOf(DataType type) {
  static constexpr TypeRow kNone{"", 0, Class::None, 0};
  const auto index = static_cast<size_t>(type);
  return index < std::size(kRows) ? kRows[index] : kNone;
}

// A binary floating-point format of at most 16 bits: sign, exponent, mantissa.
struct Format {
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;  // e4m3 ("fn") has none; its largest exponent holds numbers
};
constexpr Format kF16Format{5, 10, true};
constexpr Format kBF16Format{8, 7, true};
constexpr Format kE4M3Format{4, 3, false};
constexpr Format kE5M2Format{5, 2, true};

// Encodes with round to nearest even in one step.
uint16_t Encode(Format format, double value) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const uint32_t sign =
      std::signbit(value) ? 1u << (format.exponent_bits + format.mantissa_bits) : 0;
  const uint32_t top_exponent = ((1u << format.exponent_bits) - 1) << format.mantissa_bits;
  const uint32_t infinity = top_exponent;
  const uint32_t quiet_nan = format.has_infinity
                                 ? top_exponent | (1u << (format.mantissa_bits - 1))
                                 : top_exponent | ((1u << format.mantissa_bits) - 1);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | quiet_nan);
  const uint32_t overflow = format.has_infinity ? infinity : quiet_nan;
  const double magnitude = std::fabs(value);
  if (std::isinf(value)) return static_cast<uint16_t>(sign | overflow);
  if (magnitude == 0) return static_cast<uint16_t>(sign);
  int exponent = 0;
  std::frexp(magnitude, &exponent);  // magnitude = m * 2^exponent, m in [0.5, 1)
  const int unbiased = std::max(exponent - 1, 1 - bias);
  // In units of the last place of that binade. Rounding up to the next binade
  // carries into the exponent field by itself; the default rounding mode is to
  // nearest even.
  const double units = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - unbiased));
  const auto code = static_cast<uint64_t>(units) +
                    (static_cast<uint64_t>(unbiased + bias - 1) << format.mantissa_bits);
  const uint32_t limit = format.has_infinity ? infinity : quiet_nan;
  if (code >= limit) return static_cast<uint16_t>(sign | overflow);
  return static_cast<uint16_t>(sign | code);
}

float Decode(Format format, uint32_t bits) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const uint32_t mantissa_mask = (1u << format.mantissa_bits) - 1;
  const uint32_t exponent_mask = (1u << format.exponent_bits) - 1;
  const uint32_t mantissa = bits & mantissa_mask;
  const uint32_t exponent = (bits >> format.mantissa_bits) & exponent_mask;
  const float sign = (bits >> (format.mantissa_bits + format.exponent_bits)) & 1 ? -1.f : 1.f;
  if (exponent == exponent_mask) {
    if (format.has_infinity) {
      if (mantissa == 0) return sign * std::numeric_limits<float>::infinity();
      return std::numeric_limits<float>::quiet_NaN();
    }
    if (mantissa == mantissa_mask) return std::numeric_limits<float>::quiet_NaN();
  }
  if (exponent == 0) {
    return sign * std::ldexp(static_cast<float>(mantissa), 1 - bias - format.mantissa_bits);
  }
  return sign * std::ldexp(static_cast<float>(mantissa | (mantissa_mask + 1)),
                           static_cast<int>(exponent) - bias - format.mantissa_bits);
}

template <typename T>
T Read(const void* data, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * static_cast<int64_t>(sizeof(T)),
              sizeof(T));
  return value;
}

template <typename T>
void Write(void* data, int64_t index, T value) {
  std::memcpy(static_cast<char*>(data) + index * static_cast<int64_t>(sizeof(T)), &value,
              sizeof(T));
}

// The code of a type of less than 8 bits, unsigned.
uint8_t ReadBits(const void* data, int64_t index, int bits) {
  const int per_byte = 8 / bits;
  const auto byte = Read<uint8_t>(data, index / per_byte);
  return static_cast<uint8_t>((byte >> (index % per_byte * bits)) & ((1 << bits) - 1));
}

void WriteBits(void* data, int64_t index, int bits, uint8_t code) {
  const int per_byte = 8 / bits;
  const int shift = static_cast<int>(index % per_byte) * bits;
  const auto mask = static_cast<uint8_t>(((1 << bits) - 1) << shift);
  const auto byte = Read<uint8_t>(data, index / per_byte);
  Write<uint8_t>(
      data, index / per_byte,
      static_cast<uint8_t>((byte & ~mask) | (static_cast<uint8_t>(code << shift) & mask)));
}

double SignExtend(uint8_t code, int bits) {
  const int half = 1 << (bits - 1);
  return (code ^ half) - half;
}

int64_t SaturateToInteger(DataType type, double value) {
  if (std::isnan(value)) return 0;
  const double rounded = std::nearbyint(value);
  // The bounds of s64 are not doubles; comparing first avoids the overflow.
  if (rounded <= static_cast<double>(LowestOf(type))) return LowestOf(type);
  if (rounded >= static_cast<double>(HighestOf(type))) return HighestOf(type);
  return static_cast<int64_t>(rounded);
}

bool IsSigned(DataType type) { return RowOf(type).klass == Class::Signed; }

}  // namespace

std::string_view DataTypeName(DataType type) { return RowOf(type).name; }

std::optional<DataType> DataTypeFromName(std::string_view name) {
  for (size_t i = 0; i < std::size(kRows); ++i) {
    if (kRows[i].name == name) return static_cast<DataType>(i);
  }
  return std::nullopt;
}

int BitsOf(DataType type) { return RowOf(type).bits; }
bool IsFloat(DataType type) { return RowOf(type).klass == Class::Float; }
bool IsInteger(DataType type) { return IsSigned(type) || RowOf(type).klass == Class::Unsigned; }
bool IsComputeFloat(DataType type) { return type == kF32 || type == kBF16 || type == kF16; }

int64_t LowestOf(DataType type) {
  if (!IsSigned(type)) return 0;
  return std::numeric_limits<int64_t>::min() >> (64 - BitsOf(type));
}

int64_t HighestOf(DataType type) {
  if (RowOf(type).klass == Class::Bool) return 1;
  if (IsSigned(type)) return std::numeric_limits<int64_t>::max() >> (64 - BitsOf(type));
  return (int64_t{1} << BitsOf(type)) - 1;
}

double LargestOf(DataType type) { return RowOf(type).largest; }

int64_t BytesFor(DataType type, int64_t elements) {
  const int bits = BitsOf(type);
  if (bits == 0) return 0;
  return bits >= 8 ? elements * (bits / 8) : (elements + 8 / bits - 1) / (8 / bits);
}

float F16ToF32(uint16_t bits) { return Decode(kF16Format, bits); }
uint16_t F32ToF16(float value) { return Encode(kF16Format, value); }
float BF16ToF32(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
uint16_t F32ToBF16(float value) { return Encode(kBF16Format, value); }
float F8E4M3ToF32(uint8_t bits) { return Decode(kE4M3Format, bits); }
float F8E5M2ToF32(uint8_t bits) { return Decode(kE5M2Format, bits); }

double LoadElement(DataType type, const void* data, int64_t index) {
  switch (type) {
    case kUndef:
      return 0;
    case kF32:
      return Read<float>(data, index);
    case kF16:
      return F16ToF32(Read<uint16_t>(data, index));
    case kBF16:
      return BF16ToF32(Read<uint16_t>(data, index));
    case kF8E4M3:
      return F8E4M3ToF32(Read<uint8_t>(data, index));
    case kF8E5M2:
      return F8E5M2ToF32(Read<uint8_t>(data, index));
    case kS64:
      return static_cast<double>(Read<int64_t>(data, index));
    case kS32:
      return Read<int32_t>(data, index);
    case kS8:
      return Read<int8_t>(data, index);
    case kU8:
      return Read<uint8_t>(data, index);
    case kBoolean:
      return Read<uint8_t>(data, index) != 0 ? 1 : 0;
    case kS4:
      return SignExtend(ReadBits(data, index, 4), 4);
    case kU4:
      return ReadBits(data, index, 4);
    case kS2:
      return SignExtend(ReadBits(data, index, 2), 2);
    case kU2:
      return ReadBits(data, index, 2);
  }
  return 0;
}

void StoreElement(DataType type, void* data, int64_t index, double value) {
  switch (type) {
    case kUndef:
      return;
    case kF32:
      return Write(data, index, static_cast<float>(value));
    case kF16:
      return Write(data, index, Encode(kF16Format, value));
    case kBF16:
      return Write(data, index, Encode(kBF16Format, value));
    case kF8E4M3:
      return Write(data, index, static_cast<uint8_t>(Encode(kE4M3Format, value)));
    case kF8E5M2:
      return Write(data, index, static_cast<uint8_t>(Encode(kE5M2Format, value)));
    case kBoolean:
      return Write<uint8_t>(data, index, value != 0 ? 1 : 0);
    case kS64:
      return Write(data, index, SaturateToInteger(type, value));
    case kS32:
      return Write(data, index, static_cast<int32_t>(SaturateToInteger(type, value)));
    case kS8:
    case kU8:
      return Write(data, index, static_cast<uint8_t>(SaturateToInteger(type, value)));
    case kS4:
    case kU4:
    case kS2:
    case kU2:
      return WriteBits(data, index, BitsOf(type),
                       static_cast<uint8_t>(SaturateToInteger(type, value)));
  }
}

double RoundTo(DataType type, double value) {
  uint64_t storage = 0;
  StoreElement(type, &storage, 0, value);
  return LoadElement(type, &storage, 0);
}

}  // namespace kvant
