// KernelSet::load over a vector wrapper such as simd_avx512.h's.
#ifndef KVANT_KERNELS_CPU_ISA_LOAD_H_
#define KVANT_KERNELS_CPU_ISA_LOAD_H_

#include <cstdint>

#include "kvant/graph/data_type.h"

namespace kvant::cpu {
namespace {

// Elements of kBits that kConvert turns into floats, kWidth at a time. Of the last and,
// for elements smaller than a byte, of a first byte only a part is wanted; neither
// makes it read another.
template <typename S, int kBits, auto kConvert>
void LoadAs(const void* data, int64_t index, int64_t n, float* out) {
  constexpr int64_t kBytes = S::kWidth * kBits / 8;
  const uint8_t* p = static_cast<const uint8_t*>(data) + index * kBits / 8;
  int64_t i = 0;
  if constexpr (kBits < 8) {
    constexpr int64_t kPerByte = 8 / kBits;
    if (const int64_t skipped = index % kPerByte; skipped != 0 && n > 0) {
      const uint8_t rest = static_cast<uint8_t>(*p++ >> (skipped * kBits));
      i = n < kPerByte - skipped ? n : kPerByte - skipped;
      S::StoreSome(out, kConvert(S::LoadRawSome(&rest, 1)), i);
    }
  }
  for (; i + S::kWidth <= n; i += S::kWidth, p += kBytes) {
    S::Store(out + i, kConvert(S::template LoadRaw<kBytes>(p)));
  }
  if (i < n) S::StoreSome(out + i, kConvert(S::LoadRawSome(p, ((n - i) * kBits + 7) / 8)), n - i);
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
  switch (type) {
    case kF32:
      return LoadAs<S, 32, S::FromF32>(data, index, n, out);
    case kF16:
      return LoadAs<S, 16, S::FromF16>(data, index, n, out);
    case kBF16:
      return LoadAs<S, 16, S::FromBF16>(data, index, n, out);
    case kF8E4M3:
      return LoadAs<S, 8, S::FromE4M3>(data, index, n, out);
    case kF8E5M2:
      return LoadAs<S, 8, S::FromE5M2>(data, index, n, out);
    case kS8:
      return LoadAs<S, 8, S::FromS8>(data, index, n, out);
    case kU8:
      return LoadAs<S, 8, S::FromU8>(data, index, n, out);
    case kS4:
      return LoadAs<S, 4, S::FromS4>(data, index, n, out);
    case kU4:
      return LoadAs<S, 4, S::FromU4>(data, index, n, out);
    case kS2:
      return LoadAs<S, 2, S::FromS2>(data, index, n, out);
    case kU2:
      return LoadAs<S, 2, S::FromU2>(data, index, n, out);
    case kBoolean:
      return LoadAs<S, 8, S::FromBoolean>(data, index, n, out);
    case kS32:
      return LoadAs<S, 32, S::FromS32>(data, index, n, out);
    case kS64:
      return LoadS64(data, index, n, out);
    case kUndef:
      break;
  }
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_LOAD_H_
