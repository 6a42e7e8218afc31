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
  int exponent_bits;
  double largest;
};

constexpr TypeRow kRows[] = {
#define KVANT_DATA_TYPE(name, json, bits, klass, exponent, largest) \
  {json, bits, Class::klass, exponent, largest},
#include "kvant/graph/data_type.inc"
};

// A type that there is not has no name, and is otherwise like kUndef.
const TypeRow& RowOf(DataType type) {
  static constexpr TypeRow kNone{};
  const auto index = static_cast<size_t>(type);
  return index < std::size(kRows) ? kRows[index] : kNone;
}

// A binary floating-point format of at most 16 bits: sign, exponent, mantissa.
struct Format {
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;  // e4m3 ("fn") has none; its largest exponent holds numbers
};
Format FormatOf(DataType type) {
  const TypeRow& row = RowOf(type);
  return {row.exponent_bits, row.bits - 1 - row.exponent_bits, type != kF8E4M3};
}

// 2^exponent, of an exponent that normal numbers have.
double Power(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

// Encodes with round to nearest even in one step.
uint16_t Encode(Format format, double value) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const uint32_t sign =
      std::signbit(value) ? 1u << (format.exponent_bits + format.mantissa_bits) : 0;
  const uint32_t top_exponent = ((1u << format.exponent_bits) - 1) << format.mantissa_bits;
  const uint32_t quiet_nan = format.has_infinity
                                 ? top_exponent | (1u << (format.mantissa_bits - 1))
                                 : top_exponent | ((1u << format.mantissa_bits) - 1);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | quiet_nan);
  const uint32_t overflow = format.has_infinity ? top_exponent : quiet_nan;
  if (std::isinf(value)) return static_cast<uint16_t>(sign | overflow);
  const double magnitude = std::fabs(value);
  const auto exponent = static_cast<int>(std::bit_cast<uint64_t>(magnitude) >> 52) - 1023;
  const int unbiased = std::max(exponent, 1 - bias);
  // In units of the last place of that binade. Rounding up to the next binade
  // carries into the exponent field by itself; the default rounding mode is to
  // nearest even.
  const double units = std::nearbyint(magnitude * Power(format.mantissa_bits - unbiased));
  const auto code = static_cast<uint64_t>(units) +
                    (static_cast<uint64_t>(unbiased + bias - 1) << format.mantissa_bits);
  return static_cast<uint16_t>(sign | std::min<uint64_t>(code, overflow));
}

float Decode(Format format, uint64_t bits) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const uint32_t mantissa_mask = (1u << format.mantissa_bits) - 1;
  const uint32_t exponent_mask = (1u << format.exponent_bits) - 1;
  const uint32_t mantissa = bits & mantissa_mask;
  const uint32_t exponent = (bits >> format.mantissa_bits) & exponent_mask;
  const float sign = (bits >> (format.mantissa_bits + format.exponent_bits)) & 1 ? -1.f : 1.f;
  if (exponent == exponent_mask) {
    if (format.has_infinity && mantissa == 0) return sign * std::numeric_limits<float>::infinity();
    if (format.has_infinity || mantissa == mantissa_mask) {
      return std::numeric_limits<float>::quiet_NaN();
    }
  }
  // Subnormal numbers are in units of the smallest binade, and lack the leading 1.
  const uint32_t leading = exponent == 0 ? 0 : mantissa_mask + 1;
  const int binade = std::max(static_cast<int>(exponent), 1) - bias;
  return static_cast<float>(sign * (mantissa + leading) * Power(binade - format.mantissa_bits));
}

template <typename T>
T Read(const void* data, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * static_cast<int64_t>(sizeof(T)),
              sizeof(T));
  return value;
}

template <typename T>
void Write(void* data, int64_t index, uint64_t code) {
  const T value = static_cast<T>(code);
  std::memcpy(static_cast<char*>(data) + index * static_cast<int64_t>(sizeof(T)), &value,
              sizeof(T));
}

// The code of an element of so many bits.
uint64_t ReadCode(const void* data, int64_t index, int bits) {
  if (bits == 64) return Read<uint64_t>(data, index);
  if (bits == 32) return Read<uint32_t>(data, index);
  if (bits == 16) return Read<uint16_t>(data, index);
  const int64_t at = index * bits;
  return Read<uint8_t>(data, at / 8) >> (at % 8) & ((1u << bits) - 1);
}

void WriteCode(void* data, int64_t index, int bits, uint64_t code) {
  if (bits == 64) return Write<uint64_t>(data, index, code);
  if (bits == 32) return Write<uint32_t>(data, index, code);
  if (bits == 16) return Write<uint16_t>(data, index, code);
  const int64_t at = index * bits;
  const uint64_t mask = ((uint64_t{1} << bits) - 1) << (at % 8);
  const uint64_t others = Read<uint8_t>(data, at / 8) & ~mask;
  Write<uint8_t>(data, at / 8, others | (code << (at % 8) & mask));
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
  return FindByName<DataType>(kRows, name, &TypeRow::name);
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

float F16ToF32(uint16_t bits) { return Decode(FormatOf(kF16), bits); }
uint16_t F32ToF16(float value) { return Encode(FormatOf(kF16), value); }
float BF16ToF32(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
uint16_t F32ToBF16(float value) { return Encode(FormatOf(kBF16), value); }
float F8E4M3ToF32(uint8_t bits) { return Decode(FormatOf(kF8E4M3), bits); }
float F8E5M2ToF32(uint8_t bits) { return Decode(FormatOf(kF8E5M2), bits); }

double LoadElement(DataType type, const void* data, int64_t index) {
  const int bits = BitsOf(type);
  if (bits == 0) return 0;
  const uint64_t code = ReadCode(data, index, bits);
  if (type == kF32) return std::bit_cast<float>(static_cast<uint32_t>(code));
  if (type == kBF16) return BF16ToF32(static_cast<uint16_t>(code));
  if (IsFloat(type)) return Decode(FormatOf(type), code);
  if (type == kBoolean) return code != 0 ? 1 : 0;
  if (!IsSigned(type)) return static_cast<double>(code);
  // Its highest bit is the sign.
  return static_cast<double>(static_cast<int64_t>(code << (64 - bits)) >> (64 - bits));
}

void StoreElement(DataType type, void* data, int64_t index, double value) {
  const int bits = BitsOf(type);
  if (bits == 0) return;
  uint64_t code;
  if (type == kF32) {
    code = std::bit_cast<uint32_t>(static_cast<float>(value));
  } else if (IsFloat(type)) {
    code = Encode(FormatOf(type), value);
  } else if (type == kBoolean) {
    code = value != 0 ? 1 : 0;
  } else {
    code = static_cast<uint64_t>(SaturateToInteger(type, value));
  }
  WriteCode(data, index, bits, code);
}

double RoundTo(DataType type, double value) {
  uint64_t storage = 0;
  StoreElement(type, &storage, 0, value);
  return LoadElement(type, &storage, 0);
}

double RoundScale(DataType type, double scale) {
  const double smallest_normal = type == kF16 ? 0x1p-14 : 0x1p-126;
  const double step = type == kF16 ? 0x1p-24 : type == kBF16 ? 0x1p-133 : 0x1p-149;
  return scale < smallest_normal ? std::ceil(scale / step) * step : RoundTo(type, scale);
}

}  // namespace kvant
