// Element types, and how one element is read from and written to memory.
//
// Sub-byte types are packed little-end first: with linear element index i
// (through strides), 4-bit element 2i is the low nibble of byte i, and 2-bit
// element 4i is the lowest two bits of byte i. s4 and s2 are two's complement.
#ifndef KVANT_GRAPH_DATA_TYPE_H_
#define KVANT_GRAPH_DATA_TYPE_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

namespace kvant {

enum class DataType : uint8_t {
#define KVANT_DATA_TYPE(name, ...) name,
#include "kvant/graph/data_type.inc"
};

#define KVANT_DATA_TYPE(name, ...) inline constexpr DataType name = DataType::name;
#include "kvant/graph/data_type.inc"

// The enumerator whose row of a table has that name; nothing if none has.
template <typename Enum, typename Rows, typename Name = std::identity>
std::optional<Enum> FindByName(const Rows& rows, std::string_view name, Name name_of = {}) {
  const auto found = std::ranges::find(rows, name, name_of);
  if (found == std::ranges::end(rows)) return std::nullopt;
  return static_cast<Enum>(found - std::ranges::begin(rows));
}

// oneDNN's spelling, e.g. "f8_e4m3".
std::string_view DataTypeName(DataType type);
// The type of that name, or nothing.
std::optional<DataType> DataTypeFromName(std::string_view name);

// Size of one element in bits: 2, 4, 8, 16, 32 or 64; 0 for undef.
int BitsOf(DataType type);
// Any floating-point type, f8 included.
bool IsFloat(DataType type);
// Any integer type, 64-bit and sub-byte included; not boolean.
bool IsInteger(DataType type);
// f32, bf16, f16: the types that ops compute in.
bool IsComputeFloat(DataType type);
// Smallest and largest value of an integer or boolean type.
int64_t LowestOf(DataType type);
int64_t HighestOf(DataType type);
// Largest finite value of a floating-point type; the lowest is its negative.
double LargestOf(DataType type);

// Bytes that `elements` consecutive elements occupy; a last half byte counts
// whole.
int64_t BytesFor(DataType type, int64_t elements);

// Conversions between storage formats and f32. Rounding is to nearest, ties to
// even. Overflow gives infinity, but f8_e4m3 has none and gives NaN: where numbers
// are quantized, they are clamped to LargestOf before.
float F16ToF32(uint16_t bits);
uint16_t F32ToF16(float value);
float BF16ToF32(uint16_t bits);
uint16_t F32ToBF16(float value);
float F8E4M3ToF32(uint8_t bits);
float F8E5M2ToF32(uint8_t bits);

// Element `index` (linear, in elements) of the array at `data`, exactly.
// `data` needs no alignment beyond one byte.
double LoadElement(DataType type, const void* data, int64_t index);
// Writes `value` there. Floats round to nearest even in one step from f64;
// integers round to nearest even and saturate; boolean stores value != 0.
// Sub-byte neighbours in the same byte are preserved (not atomic).
void StoreElement(DataType type, void* data, int64_t index, double value);
// `value` as it reads back after StoreElement.
double RoundTo(DataType type, double value);
// A scale >= 0 as f32, f16 or bf16 holds it: to nearest, but upward where it is subnormal. There
// the nearest may be half as large, and the largest number that it is for would be beyond the
// codes.
double RoundScale(DataType type, double scale);

}  // namespace kvant

#endif  // KVANT_GRAPH_DATA_TYPE_H_
