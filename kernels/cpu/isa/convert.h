// Numbers of f32, f16 and bf16 in vectors, and QuantizeKernels::convert, over a vector wrapper such
// as simd.h's.
#ifndef KVANT_KERNELS_CPU_ISA_CONVERT_H_
#define KVANT_KERNELS_CPU_ISA_CONVERT_H_

#include <cstdint>

#include "kvant/kernels/cpu/isa/load.h"

namespace kvant::cpu {
namespace {

// Calls f(Stored<...>()) for the types that are quantized.
template <typename S, typename F>
void WithNumbers(DataType type, F f) {
  if (type == kF16) return f(Stored<16, S::FromF16>());
  if (type == kBF16) return f(Stored<16, S::FromBF16>());
  return f(Stored<32, S::FromF32>());
}

template <typename Type>
const uint8_t* NumberAt(const void* data, int64_t index) {
  return static_cast<const uint8_t*>(data) + index * (Type::kBits / 8);
}

template <typename S, typename Type>
typename S::Vector LoadNumbers(const uint8_t* p) {
  return Type::kConvert(S::template LoadRaw<S::kWidth * Type::kBits / 8>(p));
}
// The first n < kWidth; zeros beyond.
template <typename S, typename Type>
typename S::Vector LoadSomeNumbers(const uint8_t* p, int64_t n) {
  return Type::kConvert(S::LoadRawSome(p, n * (Type::kBits / 8)));
}

// Prefetches every other line of so many bytes, in the second-level cache.
template <typename S>
void Prefetch(const uint8_t* p, int64_t bytes) {
  if constexpr (S::kWidth > 1) {
#pragma GCC unroll 4
    for (int64_t at = 0; at < bytes; at += 128) __builtin_prefetch(p + at, 0, 2);
  }
}

// Whole vectors, then what is left through memory of its own.
template <typename S, typename Type, typename Store>
void ConvertTo(const uint8_t* p, int64_t n, uint8_t* out, int64_t out_bytes, Store store) {
  int64_t i = 0;
  for (; i + S::kWidth <= n; i += S::kWidth) {
    store(out + i * out_bytes, LoadNumbers<S, Type>(p + i * Type::kBits / 8));
  }
  if (i >= n) return;
  uint8_t rest[S::kWidth * 4];
  store(rest, LoadSomeNumbers<S, Type>(p + i * Type::kBits / 8, n - i));
  __builtin_memcpy(out + i * out_bytes, rest, (n - i) * out_bytes);
}

template <typename S>
void Convert(DataType type, const void* src, int64_t index, int64_t n, DataType to, void* out,
             int64_t out_index) {
  const int64_t out_bytes = to == kF32 ? 4 : 2;
  uint8_t* const first = static_cast<uint8_t*>(out) + out_index * out_bytes;
  WithNumbers<S>(type, [=](auto stored) {
    using Type = decltype(stored);
    using Vector = typename S::Vector;
    const uint8_t* p = NumberAt<Type>(src, index);
    if (type == to) {
      __builtin_memcpy(first, p, n * out_bytes);
    } else if (to == kF32) {
      ConvertTo<S, Type>(p, n, first, 4, [](uint8_t* at, Vector x) {
        float values[S::kWidth];
        S::Store(values, x);
        __builtin_memcpy(at, values, sizeof(values));
      });
    } else if (to == kF16) {
      ConvertTo<S, Type>(p, n, first, 2, [](uint8_t* at, Vector x) { S::StoreF16(at, x); });
    } else {
      ConvertTo<S, Type>(p, n, first, 2, [](uint8_t* at, Vector x) { S::StoreBF16(at, x); });
    }
  });
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CONVERT_H_
