// Elements of every storage type to f32 and back, and where they lie.
#ifndef KVANT_KERNELS_CUDA_ELEMENTS_H_
#define KVANT_KERNELS_CUDA_ELEMENTS_H_

#include "kvant/kernels/cuda/attention_params.h"

namespace kvant::cuda {

inline constexpr u32 kInfinityBits = 0x7f800000u;
KVANT_DEVICE float Infinity() { return AsFloat(kInfinityBits); }
KVANT_DEVICE float QuietNan() { return AsFloat(0x7fc00000u); }

KVANT_DEVICE float F8E5M2ToFloat(u32 bits) { return F16Low(bits << 8); }
KVANT_DEVICE float F8E4M3ToFloat(u32 bits) {
  // As f16 the exponent is 8 too small, for subnormals as well.
  const float value = F16Low((bits & 0x80) << 8 | (bits & 0x7f) << 7) * 256.f;
  return (bits & 0x7f) == 0x7f ? QuietNan() : value;
}

// The code of `bits` bits at the bottom of a word.
KVANT_DEVICE float CodeToFloat(i32 type, u32 code) {
  switch (type) {
    case kInt8:
      return static_cast<float>(static_cast<i8>(code));
    case kUint8:
      return static_cast<float>(code & 0xff);
    case kInt4:
      return static_cast<float>(static_cast<i32>((code & 15) ^ 8) - 8);
    case kUint4:
      return static_cast<float>(code & 15);
    case kInt2:
      return static_cast<float>(static_cast<i32>((code & 3) ^ 2) - 2);
    case kUint2:
      return static_cast<float>(code & 3);
    case kBool:
      return (code & 0xff) != 0 ? 1.f : 0.f;
    case kFloat8E4M3:
      return F8E4M3ToFloat(code & 0xff);
    case kFloat8E5M2:
      return F8E5M2ToFloat(code & 0xff);
    case kFloat16:
      return F16Low(code);
    case kBFloat16:
      return BF16Low(code);
    default:
      return AsFloat(code);
  }
}

// Bytes before an element, whose index is not negative: a shift does, where a division would ask
// for the sign.
KVANT_DEVICE constexpr i64 BytesTo(i32 bits, i64 index) {
  return bits >= 8 ? index * (bits / 8) : index >> (bits == 4 ? 1 : 2);
}

KVANT_DEVICE float LoadElement(i32 type, const void* data, i64 index) {
  switch (BitsOf(type)) {
    case 64:
      return static_cast<float>(Load(static_cast<const i64*>(data) + index));
    case 32:
      if (type == kInt32) return static_cast<float>(Load(static_cast<const i32*>(data) + index));
      return Load(static_cast<const float*>(data) + index);
    case 16:
      return CodeToFloat(type, Load(static_cast<const u16*>(data) + index));
    case 8:
      return CodeToFloat(type, Load(static_cast<const u8*>(data) + index));
    default: {
      const u32 byte = Load(static_cast<const u8*>(data) + BytesTo(BitsOf(type), index));
      return CodeToFloat(type,
                         byte >> static_cast<u32>(index) * static_cast<u32>(BitsOf(type)) % 8);
    }
  }
}

KVANT_DEVICE i64 LoadInteger(i32 type, const void* data, i64 index) {
  if (type == kInt64) return Load(static_cast<const i64*>(data) + index);
  if (type == kInt32) return Load(static_cast<const i32*>(data) + index);
  return static_cast<i64>(LoadElement(type, data, index));
}

// 8 elements as they are stored, in as many words as they fill.
struct Eight {
  u32 v[8];
};

// From `index` on, aligned to their size.
KVANT_DEVICE Eight LoadEight(i32 type, const void* data, i64 index) {
  Eight eight{};
  const i32 bits = BitsOf(type);
  const auto* at = static_cast<const u8*>(data) + BytesTo(bits, index);
  if (bits >= 16) {
    KVANT_UNROLL
    for (i32 i = 0; i < bits / 16; ++i) {
      const Words4 x = Load(reinterpret_cast<const Words4*>(at) + i);
      KVANT_UNROLL
      for (i32 w = 0; w < 4; ++w) eight.v[4 * i + w] = x.v[w];
    }
  } else if (bits == 8) {
    const Words2 x = Load(reinterpret_cast<const Words2*>(at));
    eight.v[0] = x.v[0];
    eight.v[1] = x.v[1];
  } else if (bits == 4) {
    eight.v[0] = Load(reinterpret_cast<const u32*>(at));
  } else {
    eight.v[0] = Load(reinterpret_cast<const u16*>(at));
  }
  return eight;
}

// The same from shared memory.
KVANT_DEVICE Eight LoadEight(i32 type, SharedAddress at) {
  Eight eight{};
  const i32 bits = BitsOf(type);
  if (bits >= 16) {
    KVANT_UNROLL
    for (i32 i = 0; i < bits / 16; ++i) {
      const Words4 x = LoadShared128(at + 16 * i);
      KVANT_UNROLL
      for (i32 w = 0; w < 4; ++w) eight.v[4 * i + w] = x.v[w];
    }
  } else if (bits == 8) {
    const Words2 x = LoadShared64(at);
    eight.v[0] = x.v[0];
    eight.v[1] = x.v[1];
  } else {
    eight.v[0] = bits == 4 ? LoadShared32(at) : LoadShared16(at);
  }
  return eight;
}

// `count` words of shared memory, in loads as wide as their number allows. from: a multiple of
// their size.
template <i32 kWords>
KVANT_DEVICE void LoadSharedWords(SharedAddress from, i32 count, u32 (&words)[kWords]) {
  KVANT_UNROLL
  for (i32 i = 0; i < count; i += count % 4 == 0 ? 4 : count % 2 == 0 ? 2 : 1) {
    if (count % 4 == 0) {
      const Words4 x = LoadShared128(from + i * 4);
      KVANT_UNROLL
      for (i32 e = 0; e < 4; ++e) words[(i + e) % kWords] = x.v[e];
    } else if (count % 2 == 0) {
      const Words2 x = LoadShared64(from + i * 4);
      KVANT_UNROLL
      for (i32 e = 0; e < 2; ++e) words[(i + e) % kWords] = x.v[e];
    } else {
      words[i % kWords] = LoadShared32(from + i * 4);
    }
  }
}

KVANT_DEVICE void Unpack(i32 type, const Eight& eight, float (&values)[8]) {
  const i32 bits = BitsOf(type);
  KVANT_UNROLL
  for (i32 i = 0; i < 8; ++i) {
    values[i] = CodeToFloat(type, eight.v[i * bits / 32] >> i * bits % 32);
  }
}

// 4 floats of 16 or 32 bits from `index` on, aligned to their size.
KVANT_DEVICE void LoadFour(i32 type, const void* data, i64 index, float (&values)[4]) {
  if (BitsOf(type) == 32) {
    const Words4 x = Load(reinterpret_cast<const Words4*>(static_cast<const float*>(data) + index));
    KVANT_UNROLL
    for (i32 i = 0; i < 4; ++i) values[i] = AsFloat(x.v[i]);
  } else {
    const Words2 x = Load(reinterpret_cast<const Words2*>(static_cast<const u16*>(data) + index));
    KVANT_UNROLL
    for (i32 i = 0; i < 4; ++i) values[i] = CodeToFloat(type, x.v[i / 2] >> i % 2 * 16);
  }
}

// x rounded to a float of 3 (e4m3) or 2 (e5m2) bits of mantissa; ties to even. Beyond the largest:
// NaN for e4m3, infinity for e5m2.
KVANT_DEVICE u32 FloatToF8(float x, i32 type) {
  const i32 mantissa = type == kFloat8E4M3 ? 3 : 2;
  const i32 lowest = type == kFloat8E4M3 ? -6 : -14;  // exponent of the smallest normal number
  const u32 nan = 0x7f, beyond = type == kFloat8E4M3 ? 0x7fu : 0x7cu;
  const u32 sign = AsBits(x) >> 24 & 0x80, bits = AsBits(x) & 0x7fffffff;
  if (bits > kInfinityBits) return sign | nan;
  if (bits >= AsBits(65536.f)) return sign | beyond;
  const i32 exponent = MaxOf(static_cast<i32>(bits >> 23) - 127, lowest);
  // In units of the last place: at most 2^(mantissa + 1), and the carry moves the exponent on.
  const float units = AsFloat(bits) * AsFloat(static_cast<u32>(127 + mantissa - lowest) << 23);
  const float scale = AsFloat(static_cast<u32>(127 + lowest - exponent) << 23);
  const u32 code = static_cast<u32>(RoundEven(units * scale)) +
                   (static_cast<u32>(exponent - lowest) << mantissa);
  return sign | (code >= beyond ? beyond : code);
}

KVANT_DEVICE constexpr bool IsF8(i32 type) { return type == kFloat8E4M3 || type == kFloat8E5M2; }

// Codes are within [LowestCode, HighestCode].
KVANT_DEVICE constexpr i32 HighestCode(i32 type) {
  switch (type) {
    case kFloat8E4M3:
      return 448;
    case kFloat8E5M2:
      return 57344;
    case kInt32:
      return 0x7fffffff;
    case kInt8:
      return 127;
    case kInt4:
      return 7;
    case kUint4:
      return 15;
    case kInt2:
      return 1;
    case kUint2:
      return 3;
    default:
      return 255;
  }
}
KVANT_DEVICE constexpr i32 LowestCode(i32 type) {
  switch (type) {
    case kFloat8E4M3:
    case kFloat8E5M2:
      return -HighestCode(type);
    case kInt32:
    case kInt8:
    case kInt4:
    case kInt2:
      return -HighestCode(type) - 1;
    default:
      return 0;
  }
}

// The f8 code, not rounded yet, of a number, `code` being its quotient by the scale: that of a
// finite number is finite, unless it is NaN.
KVANT_DEVICE float SaturateF8(i32 type, float number, float code) {
  const auto highest = static_cast<float>(HighestCode(type));
  return Abs(number) < Infinity() && code == code ? Min(Max(code, -highest), highest) : code;
}

// The bits that store `value` in up to 16 bits: rounded to even; integers saturate and take NaN
// for 0.
KVANT_DEVICE u32 FloatToCode(i32 type, float value) {
  switch (type) {
    case kFloat16:
      return PackF16(value, 0.f) & 0xffff;
    case kBFloat16:
      return PackBF16(value, 0.f) & 0xffff;
    case kFloat8E4M3:
    case kFloat8E5M2:
      return FloatToF8(value, type);
    case kBool:
      return value != 0.f ? 1 : 0;
    default: {
      if (value != value) return 0;
      const auto lowest = static_cast<float>(LowestCode(type));
      const auto highest = static_cast<float>(HighestCode(type));
      const float code = Min(Max(RoundEven(value), lowest), highest);
      return static_cast<u32>(static_cast<i32>(code));
    }
  }
}

// Types of at least 8 bits but integers of 32 and 64.
KVANT_DEVICE void StoreElement(i32 type, void* data, i64 index, float value) {
  switch (BitsOf(type)) {
    case 32:
      return Store(static_cast<float*>(data) + index, value);
    case 16:
      return Store(static_cast<u16*>(data) + index, static_cast<u16>(FloatToCode(type, value)));
    default:
      return Store(static_cast<u8*>(data) + index, static_cast<u8>(FloatToCode(type, value)));
  }
}

// Where something lies: a block knows b0 and b1, a row the rest.
struct Position {
  i32 b0, b1, b2, row;
};

// The index of an element; only along axes where it varies, so that nothing is multiplied by 0.
KVANT_DEVICE i64 IndexOf(const ArrayTraits& traits, const Array& array, const Position& at,
                         i32 col) {
  i64 index = array.offset;
  if (traits.varies & 1) index += at.b0 * array.strides[0];
  if (traits.varies & 2) index += at.b1 * array.strides[1];
  if (traits.varies & 4) index += at.b2 * array.strides[2];
  if (traits.varies & 8) index += at.row * array.strides[kRow];
  if (traits.varies & 16) index += col * array.strides[kCol];
  return index;
}
KVANT_DEVICE i64 IndexOf(const BatchArray& array, const Position& at) {
  return array.offset + at.b0 * array.strides[0] + at.b1 * array.strides[1] +
         at.b2 * array.strides[2];
}

// Parameters of groups, by the element's coordinates over the group's.
KVANT_DEVICE i64 GroupIndex(const SegmentTraits& traits, const ArrayTraits& parameter,
                            const Array& array, const Position& at, i32 channel) {
  return IndexOf(parameter, array,
                 {at.b0 / traits.group[0], at.b1 / traits.group[1], at.b2 / traits.group[2],
                  at.row / traits.group[kRow]},
                 channel / traits.group[kCol]);
}

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_ELEMENTS_H_
