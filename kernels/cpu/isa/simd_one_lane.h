// A vector of one float in plain C++, for templates that portable.cc shares with the sets that
// have vectors; what simd.h says of the members holds here.
#ifndef KVANT_KERNELS_CPU_ISA_SIMD_ONE_LANE_H_
#define KVANT_KERNELS_CPU_ISA_SIMD_ONE_LANE_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kvant/graph/data_type.h"
#include "kvant/kernels/cpu/isa/portable_load.h"

namespace kvant::cpu {
namespace {

struct OneLane {
  static constexpr int kWidth = 1;
  using Vector = float;
  using Raw = uint32_t;

  static Vector Zero() { return 0; }
  static Vector Set1(float x) { return x; }
  static Vector Load(const float* p) { return *p; }
  static void Store(float* p, Vector v) { *p = v; }
  // Fewer than one lane is none.
  static void StoreSome(float*, Vector, int64_t) {}

  static Vector Add(Vector a, Vector b) { return a + b; }
  static Vector Sub(Vector a, Vector b) { return a - b; }
  static Vector Mul(Vector a, Vector b) { return a * b; }
  static Vector Div(Vector a, Vector b) { return a / b; }
  static Vector Fma(Vector a, Vector b, Vector c) { return std::fma(a, b, c); }
  static Vector Fnma(Vector a, Vector b, Vector c) { return std::fma(-a, b, c); }
  static Vector Abs(Vector a) { return std::fabs(a); }
  static Vector Max(Vector a, Vector b) { return a > b ? a : b; }
  static Vector Min(Vector a, Vector b) { return a < b ? a : b; }
  static Vector ZeroNan(Vector x, Vector value) { return x != x ? 0 : value; }
  static Vector ZeroBelow(Vector x, Vector bound, Vector value) { return x < bound ? 0 : value; }
  using Index = uint32_t;
  using Table = const float*;
  static Table LoadTable(const float* p, int64_t) { return p; }
  static Vector Look(Table table, Index i) { return table[i % 16]; }
  static Vector Gather(const float* p, Index i) { return p[i]; }
  static Index IndexOne() { return 1; }
  static Index IndexFromBits(Vector v) { return std::bit_cast<uint32_t>(v); }
  static Vector BitsOfIndex(Index i) { return std::bit_cast<float>(i); }
  static Index Descend(Index i, Vector x, Vector bound) { return 2 * i + (x > bound ? 1 : 0); }
  static Index IndexU8(Raw raw) { return raw; }
  // Saturated beyond 2^20.
  static Index NearestInteger(Vector v) {
    constexpr float kMost = 0x1p20f, kRound = 12582912.f;  // where the last place is 1
    const float clamped = Min(Max(v, -kMost), kMost);
    return std::bit_cast<uint32_t>(clamped + kRound) - std::bit_cast<uint32_t>(kRound);
  }
  static Index AddIndex(Index a, Index b) { return a + b; }
  static Raw Words(int x) { return static_cast<Raw>(x); }
  static Raw Bytes(int x) { return static_cast<uint8_t>(x) * 0x01010101u; }
  static Raw XorRaw(Raw a, Raw b) { return a ^ b; }
  static Raw ClampToBytes(const Index (&v)[4], Raw offset, Raw limit_bytes) {
    const auto limit = static_cast<int32_t>(limit_bytes & 0xff);
    Raw bytes = 0;
    for (int i = 0; i < 4; ++i) {
      const auto code = static_cast<int32_t>(v[i] + offset);
      bytes |= static_cast<Raw>(code < 0 ? 0 : code > limit ? limit : code) << (8 * i);
    }
    return bytes;
  }
  template <int kBits>
  static Raw PackBytes(Raw bytes) {
    if constexpr (kBits == 8) return bytes;
    const Raw pairs = (bytes | bytes >> (8 - kBits)) & (kBits == 4 ? 0x00ff00ff : 0x000f000f);
    return (pairs | pairs >> (16 - 2 * kBits)) & (kBits == 4 ? 0xffff : 0xff);
  }
  template <int kBytes>
  static void StoreRaw(uint8_t* p, Raw raw) {
    std::memcpy(p, &raw, kBytes);  // little endian, as codes are
  }
  static Vector OrderKey(Vector x) {
    const int32_t bits = std::bit_cast<int32_t>(x);
    return std::bit_cast<float>(bits ^ ((bits >> 31) & 0x7fffffff));
  }
  static Vector MagnitudeKey(Vector x) { return std::fabs(x); }
  static Vector MinKey(Vector a, Vector b) {
    return std::bit_cast<int32_t>(a) < std::bit_cast<int32_t>(b) ? a : b;
  }
  static Vector MaxKey(Vector a, Vector b) {
    return std::bit_cast<int32_t>(a) > std::bit_cast<int32_t>(b) ? a : b;
  }
  static void StoreF16(uint8_t* p, Vector v) {
    const uint16_t half = F32ToF16(v);
    std::memcpy(p, &half, sizeof(half));
  }
  static void StoreBF16(uint8_t* p, Vector v) {
    const uint16_t half = F32ToBF16(v);
    std::memcpy(p, &half, sizeof(half));
  }

  template <int kBytes>
  static Raw LoadRaw(const uint8_t* p) {
    Raw raw = 0;
    std::memcpy(&raw, p, kBytes);
    return raw;
  }
  static Raw LoadRawSome(const uint8_t*, int64_t) { return 0; }

  static Vector FromF32(Raw raw) { return std::bit_cast<float>(raw); }
  static Vector FromF16(Raw raw) { return portable::FromF16(static_cast<uint16_t>(raw)); }
  static Vector FromBF16(Raw raw) { return std::bit_cast<float>(raw << 16); }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_SIMD_ONE_LANE_H_
