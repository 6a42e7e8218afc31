// KernelSet::load over a vector wrapper such as simd.h's.
#ifndef KVANT_KERNELS_CPU_ISA_LOAD_H_
#define KVANT_KERNELS_CPU_ISA_LOAD_H_

#include <cstdint>

#include "kvant/graph/data_type.h"

namespace kvant::cpu {
namespace {

// How elements of a type become floats.
template <int bits, auto convert>
struct Stored {
  static constexpr int kBits = bits;
  static constexpr auto kConvert = convert;

  template <typename Raw>
  auto Convert(Raw raw) const {
    return kConvert(raw);
  }
};

// Calls f(Stored<...>()) for any type but s64.
template <typename S, typename F>
void WithElements(DataType type, F f) {
  switch (type) {
    case kF32:
      return f(Stored<32, S::FromF32>());
    case kF16:
      return f(Stored<16, S::FromF16>());
    case kBF16:
      return f(Stored<16, S::FromBF16>());
    case kF8E4M3:
      return f(Stored<8, S::FromE4M3>());
    case kF8E5M2:
      return f(Stored<8, S::FromE5M2>());
    case kS8:
      return f(Stored<8, S::FromS8>());
    case kU8:
      return f(Stored<8, S::FromU8>());
    case kS4:
      return f(Stored<4, S::FromS4>());
    case kU4:
      return f(Stored<4, S::FromU4>());
    case kS2:
      return f(Stored<2, S::FromS2>());
    case kU2:
      return f(Stored<2, S::FromU2>());
    case kBoolean:
      return f(Stored<8, S::FromBoolean>());
    case kS32:
      return f(Stored<32, S::FromS32>());
    case kS64:
    case kUndef:
      return;
  }
}

// Elements of a table by their positions, of kBits each.
template <typename S, int bits>
struct Entries {
  static constexpr int kBits = bits;
  typename S::Table table;
  const float* values;

  explicit Entries(const float* codebook)
      : table(S::LoadTable(codebook, 1 << (bits == 2 ? 2 : 4))), values(codebook) {}

  template <typename Raw>
  typename S::Vector Convert(Raw raw) const {
    if constexpr (kBits == 8) return S::Gather(values, S::IndexU8(raw));
    if constexpr (kBits == 4) return S::Look(table, S::IndexU4(raw));
    return S::Look(table, S::IndexU2(raw));
  }
};

// Calls f(Entries<...>(codebook)).
template <typename S, typename F>
void WithEntries(const float* codebook, DataType type, F f) {
  if (type == kU2) return f(Entries<S, 2>(codebook));
  if (type == kU4) return f(Entries<S, 4>(codebook));
  f(Entries<S, 8>(codebook));
}

// Of the last bytes and, for elements smaller than a byte, of a first byte only a part is
// wanted; neither makes it read another.
template <typename S, typename Type, typename Out>
void LoadAs(Type type, const void* data, int64_t index, int64_t n, Out* out) {
  constexpr int kBits = Type::kBits;
  constexpr int64_t kBytes = S::kWidth * kBits / 8;
  const uint8_t* p = static_cast<const uint8_t*>(data) + index * kBits / 8;
  int64_t i = 0;
  if constexpr (kBits < 8) {
    constexpr int64_t kPerByte = 8 / kBits;
    if (const int64_t skipped = index % kPerByte; skipped != 0 && n > 0) {
      const uint8_t rest = static_cast<uint8_t>(*p++ >> (skipped * kBits));
      i = n < kPerByte - skipped ? n : kPerByte - skipped;
      S::StoreSome(out, type.Convert(S::LoadRawSome(&rest, 1)), i);
    }
  }
  for (; i + S::kWidth <= n; i += S::kWidth, p += kBytes) {
    S::Store(out + i, type.Convert(S::template LoadRaw<kBytes>(p)));
  }
  if (i < n) {
    const int64_t bytes = ((n - i) * kBits + 7) / 8;
    S::StoreSome(out + i, type.Convert(S::LoadRawSome(p, bytes)), n - i);
  }
}

inline void LoadS64(const void* data, int64_t index, int64_t n, float* out) {
  const uint8_t* p = static_cast<const uint8_t*>(data) + index * 8;
  for (int64_t i = 0; i < n; ++i) {
    int64_t value;
    __builtin_memcpy(&value, p + i * 8, sizeof(value));
    out[i] = static_cast<float>(value);
  }
}

template <typename S>
void Load(DataType type, const void* data, int64_t index, int64_t n, float* out) {
  if (type == kS64) return LoadS64(data, index, n, out);
  WithElements<S>(type, [=](auto stored) { LoadAs<S>(stored, data, index, n, out); });
}

template <typename S>
void LoadEntries(const float* codebook, DataType type, const void* data, int64_t index, int64_t n,
                 float* out) {
  WithEntries<S>(codebook, type, [=](auto entries) { LoadAs<S>(entries, data, index, n, out); });
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_LOAD_H_
