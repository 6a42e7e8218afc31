#include "kvant/kernels/cpu/isa/portable_load.h"

#include <array>
#include <bit>
#include <cstring>

namespace kvant::cpu::portable {
namespace {

template <typename T>
T ReadAs(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

// Elements of whole bytes.
template <typename T, typename Convert>
void LoadBytes(const void* data, int64_t index, int64_t n, float* out, Convert convert) {
  const uint8_t* p = static_cast<const uint8_t*>(data) + index * sizeof(T);
  for (int64_t i = 0; i < n; ++i) out[i] = convert(ReadAs<T>(p + i * sizeof(T)));
}

// Elements of kBits < 8 bits: a part of a first byte, whole bytes, a part of a last.
template <int kBits, typename Convert>
void LoadPacked(const void* data, int64_t index, int64_t n, float* out, Convert convert) {
  constexpr int kPerByte = 8 / kBits;
  constexpr int kMask = (1 << kBits) - 1;
  const uint8_t* bytes = static_cast<const uint8_t*>(data);
  const auto one = [&](int64_t at) {
    return convert((bytes[at / kPerByte] >> (at % kPerByte * kBits)) & kMask);
  };
  int64_t i = 0;
  for (; i < n && (index + i) % kPerByte != 0; ++i) out[i] = one(index + i);
  const uint8_t* whole = bytes + (index + i) / kPerByte;
  const int64_t count = (n - i) / kPerByte;
  for (int64_t b = 0; b < count; ++b) {
    for (int j = 0; j < kPerByte; ++j) {
      out[i + b * kPerByte + j] = convert((whole[b] >> (j * kBits)) & kMask);
    }
  }
  for (i += count * kPerByte; i < n; ++i) out[i] = one(index + i);
}

using ByteTable = std::array<float, 256>;

template <typename Convert>
ByteTable MakeTable(Convert convert) {
  ByteTable table;
  for (int i = 0; i < 256; ++i) table[i] = convert(static_cast<uint8_t>(i));
  return table;
}

}  // namespace

void Load(DataType type, const void* data, int64_t index, int64_t n, float* out) {
  static const ByteTable e4m3 = MakeTable(F8E4M3ToF32);
  static const ByteTable e5m2 = MakeTable(F8E5M2ToF32);
  const auto plain = [](auto value) { return static_cast<float>(value); };
  switch (type) {
    case kF32:
      return LoadBytes<float>(data, index, n, out, plain);
    case kF16:
      return LoadBytes<uint16_t>(data, index, n, out, FromF16);
    case kBF16:
      return LoadBytes<uint16_t>(data, index, n, out, [](uint16_t bits) {
        return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
      });
    case kS32:
      return LoadBytes<int32_t>(data, index, n, out, plain);
    case kS64:
      return LoadBytes<int64_t>(data, index, n, out, plain);
    case kS8:
      return LoadBytes<int8_t>(data, index, n, out, plain);
    case kU8:
      return LoadBytes<uint8_t>(data, index, n, out, plain);
    case kBoolean:
      return LoadBytes<uint8_t>(data, index, n, out, [](uint8_t b) { return b != 0 ? 1.f : 0.f; });
    case kF8E4M3:
      return LoadBytes<uint8_t>(data, index, n, out, [](uint8_t b) { return e4m3[b]; });
    case kF8E5M2:
      return LoadBytes<uint8_t>(data, index, n, out, [](uint8_t b) { return e5m2[b]; });
    case kU4:
    case kU2:
      return type == kU4 ? LoadPacked<4>(data, index, n, out, plain)
                         : LoadPacked<2>(data, index, n, out, plain);
    case kS4:
      return LoadPacked<4>(data, index, n, out,
                           [](int code) { return static_cast<float>((code ^ 8) - 8); });
    case kS2:
      return LoadPacked<2>(data, index, n, out,
                           [](int code) { return static_cast<float>((code ^ 2) - 2); });
    case kUndef:
      break;
  }
}

}  // namespace kvant::cpu::portable
