// The device vocabulary on the SIMT executor (simt.h), for g++: the names and signatures of ptx.h,
// where the contracts are. Whatever waits or touches memory takes the line of its call as trailing
// default arguments, so that reports can name it.
#ifndef KVANT_KERNELS_DEVICE_SIMT_OPS_H_
#define KVANT_KERNELS_DEVICE_SIMT_OPS_H_

#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kvant/graph/data_type.h"
#include "kvant/kernels/device/simt_calls.h"

#define KVANT_DEVICE inline
#define KVANT_UNROLL
#define KVANT_NO_UNROLL
// The line that calls the operation.
#define KVANT_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace kvant::device {

using i8 = signed char;
using u8 = unsigned char;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

// In the executor's own address space, as on a GPU: not a pointer.
using SharedAddress = u32;

struct alignas(8) Words2 {
  u32 v[2];
};
struct alignas(16) Words4 {
  u32 v[4];
};

// ---- Where this thread is
KVANT_DEVICE i32 ThreadIndex() { return simt::CurrentPosition().thread; }
KVANT_DEVICE i32 BlockThreads() { return simt::CurrentPosition().threads; }
KVANT_DEVICE i64 BlockIndex() { return simt::CurrentPosition().block; }
KVANT_DEVICE i64 GridBlocks() { return simt::CurrentPosition().blocks; }
KVANT_DEVICE i32 LaneIndex() { return ThreadIndex() % 32; }

// ---- Bits
KVANT_DEVICE float AsFloat(u32 bits) { return std::bit_cast<float>(bits); }
KVANT_DEVICE u32 AsBits(float value) { return std::bit_cast<u32>(value); }
KVANT_DEVICE double AsDouble(u64 bits) { return std::bit_cast<double>(bits); }
KVANT_DEVICE u64 AsBits(double value) { return std::bit_cast<u64>(value); }
KVANT_DEVICE u32 Permute(u32 a, u32 b, u32 selector) {
  const u64 bytes = a | u64{b} << 32;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 nibble = selector >> (4 * i) & 15;
    u32 byte = static_cast<u32>(bytes >> (8 * (nibble & 7))) & 0xff;
    if ((nibble & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}
KVANT_DEVICE u32 AndXor(u32 a, u32 b, u32 c) { return (a & b) ^ c; }
KVANT_DEVICE u32 AndOr(u32 a, u32 b, u32 c) { return (a & b) | c; }
KVANT_DEVICE u32 Opaque(u32 value) { return value; }
KVANT_DEVICE const u8* Opaque(const u8* pointer) { return pointer; }

// ---- Barriers and collectives
KVANT_DEVICE void BlockSync(KVANT_SITE) { simt::BlockBarrier({file, line}); }
KVANT_DEVICE void WarpSync(KVANT_SITE) { simt::WarpBarrier({file, line}); }
KVANT_DEVICE u32 ShuffleXor(u32 value, i32 mask, KVANT_SITE) {
  return simt::ShuffleXor(value, mask, {file, line});
}
KVANT_DEVICE float ShuffleXor(float value, i32 mask, KVANT_SITE) {
  return AsFloat(simt::ShuffleXor(AsBits(value), mask, {file, line}));
}
KVANT_DEVICE u32 Shuffle(u32 value, i32 lane, KVANT_SITE) {
  return simt::ShuffleFrom(value, lane, {file, line});
}
KVANT_DEVICE float Shuffle(float value, i32 lane, KVANT_SITE) {
  return AsFloat(simt::ShuffleFrom(AsBits(value), lane, {file, line}));
}
// A shuffle on a GPU, so all lanes must come here too.
KVANT_DEVICE i32 WarpIndex(KVANT_SITE) {
  return static_cast<i32>(Shuffle(static_cast<u32>(ThreadIndex()) / 32, 0, file, line));
}
KVANT_DEVICE bool Any(bool value, KVANT_SITE) { return simt::AnyLane(value, {file, line}); }

// ---- f32 arithmetic
KVANT_DEVICE float Fma(float a, float b, float c) { return std::fma(a, b, c); }
KVANT_DEVICE float Max(float a, float b) { return std::fmax(a, b); }
KVANT_DEVICE float Min(float a, float b) { return std::fmin(a, b); }
KVANT_DEVICE float Abs(float a) { return std::fabs(a); }
KVANT_DEVICE float Divide(float a, float b) { return a / b; }
KVANT_DEVICE float Exp2(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;  // NaN stays
}
KVANT_DEVICE float Log(float x) { return std::log(x); }
KVANT_DEVICE float Tanh(float x) { return std::tanh(x); }
KVANT_DEVICE float RoundEven(float x) { return std::nearbyint(x); }
KVANT_DEVICE double Fma(double a, double b, double c) { return std::fma(a, b, c); }
KVANT_DEVICE u32 MultiplyHigh(u32 a, u32 b) { return static_cast<u32>(u64{a} * b >> 32); }

// ---- Pairs of 16-bit floats
KVANT_DEVICE u32 PackF16(float lo, float hi) {
  return F32ToF16(lo) | static_cast<u32>(F32ToF16(hi)) << 16;
}
KVANT_DEVICE u32 PackBF16(float lo, float hi) {
  return F32ToBF16(lo) | static_cast<u32>(F32ToBF16(hi)) << 16;
}
KVANT_DEVICE float F16Low(u32 pair) { return F16ToF32(static_cast<u16>(pair)); }
KVANT_DEVICE float F16High(u32 pair) { return F16ToF32(static_cast<u16>(pair >> 16)); }
KVANT_DEVICE float BF16Low(u32 pair) { return AsFloat(pair << 16); }
KVANT_DEVICE float BF16High(u32 pair) { return AsFloat(pair & 0xffff0000u); }
// The f16 or bf16 nearest to a b + c, rounded once.
KVANT_DEVICE u16 FmaRounded(DataType type, float a, float b, float c) {
  const double product = static_cast<double>(a) * b;  // exact
  double sum = product + c;
  // Where the sum of doubles is not exact, an odd last bit keeps it off the ties of 16 bits.
  const double high = sum - product;
  const double lost = (product - (sum - high)) + (c - high);
  if (lost != 0 && (std::bit_cast<u64>(sum) & 1) == 0) {
    sum = std::nextafter(sum, lost > 0 ? HUGE_VAL : -HUGE_VAL);
  }
  u16 bits;
  StoreElement(type, &bits, 0, sum);
  return bits;
}
KVANT_DEVICE u32 FmaF16x2(u32 a, u32 b, u32 c) {
  return FmaRounded(kF16, F16Low(a), F16Low(b), F16Low(c)) |
         static_cast<u32>(FmaRounded(kF16, F16High(a), F16High(b), F16High(c))) << 16;
}
KVANT_DEVICE u32 FmsF16x2(u32 a, u32 b, u32 c) { return FmaF16x2(a, b, c ^ 0x80008000u); }
KVANT_DEVICE u32 FmaBF16x2(u32 a, u32 b, u32 c) {
  return FmaRounded(kBF16, BF16Low(a), BF16Low(b), BF16Low(c)) |
         static_cast<u32>(FmaRounded(kBF16, BF16High(a), BF16High(b), BF16High(c))) << 16;
}
KVANT_DEVICE u32 AddF16x2(u32 a, u32 b) { return FmaF16x2(a, 0x3c003c00u, b); }
KVANT_DEVICE u32 MaxAbsF16x2(u32 a, u32 b) {
  return PackF16(Max(Abs(F16Low(a)), Abs(F16Low(b))), Max(Abs(F16High(a)), Abs(F16High(b))));
}
KVANT_DEVICE u32 F16x2OfE4M3(u32 bytes) {
  u32 pair = 0;
  for (int i = 0; i < 2; ++i) {
    const u32 byte = bytes >> 8 * i & 0xff, magnitude = byte & 0x7f;
    // With a bit more of exponent it is an f16 that is 256 times too small.
    const float value = F16ToF32(static_cast<u16>(magnitude << 7)) * 256.f;
    const u32 bits = magnitude == 0x7f ? 0x7fffu : F32ToF16(value) | (byte & 0x80) << 8;
    pair |= bits << 16 * i;
  }
  return pair;
}
// Products of f16 are exact in f32.
KVANT_DEVICE u32 MultiplyF16x2(u32 a, u32 b) {
  return PackF16(F16Low(a) * F16Low(b), F16High(a) * F16High(b));
}
KVANT_DEVICE u32 MultiplyByLowF16(u32 a, u32 s) {
  return MultiplyF16x2(a, (s & 0xffffu) * 0x10001u);
}
KVANT_DEVICE u32 MultiplyByHighF16(u32 a, u32 s) { return MultiplyF16x2(a, (s >> 16) * 0x10001u); }

// ---- Global memory
template <class T>
inline constexpr bool kIsGlobalElement =
    std::is_same_v<T, u8> || std::is_same_v<T, u16> || std::is_same_v<T, u32> ||
    std::is_same_v<T, i32> || std::is_same_v<T, i64> || std::is_same_v<T, float> ||
    std::is_same_v<T, Words2> || std::is_same_v<T, Words4>;

template <class T>
KVANT_DEVICE T LoadGlobal(const T* p, bool coherent, const char* file, int line) {
  static_assert(kIsGlobalElement<T>);
  T value{};
  if (simt::BeginGlobalLoad(p, sizeof(T), coherent, {file, line})) {
    memcpy(&value, static_cast<const void*>(p), sizeof(T));
  }
  return value;
}
template <class T>
KVANT_DEVICE T Load(const T* p, KVANT_SITE) {
  return LoadGlobal(p, /*coherent=*/false, file, line);
}
KVANT_DEVICE u8 LoadCoherent(const u8* p, KVANT_SITE) {
  return LoadGlobal(p, /*coherent=*/true, file, line);
}
KVANT_DEVICE u32 LoadCoherent(const u32* p, KVANT_SITE) {
  return LoadGlobal(p, /*coherent=*/true, file, line);
}
KVANT_DEVICE i32 LoadCoherent(const i32* p, KVANT_SITE) {
  return LoadGlobal(p, /*coherent=*/true, file, line);
}
KVANT_DEVICE float LoadCoherent(const float* p, KVANT_SITE) {
  return LoadGlobal(p, /*coherent=*/true, file, line);
}
KVANT_DEVICE Words4 LoadCoherent(const Words4* p, KVANT_SITE) {
  return LoadGlobal(p, /*coherent=*/true, file, line);
}
template <class T>
KVANT_DEVICE void Store(T* p, T value, KVANT_SITE) {
  static_assert(kIsGlobalElement<T>);
  if (simt::BeginGlobalStore(p, sizeof(T), {file, line})) {
    memcpy(static_cast<void*>(p), &value, sizeof(T));
  }
}
KVANT_DEVICE void Fence() { simt::FenceGlobal(); }
KVANT_DEVICE u32 AtomicIncrement(u32* p, u32 limit, KVANT_SITE) {
  if (!simt::BeginAtomic(p, sizeof(u32), {file, line})) return 0;
  const u32 old = *p;
  *p = old >= limit ? 0 : old + 1;
  return old;
}

// ---- Shared memory
KVANT_DEVICE SharedAddress SharedBase() { return simt::kSharedBase; }
template <class T>
KVANT_DEVICE T ReadSharedAs(SharedAddress p, const char* file, int line) {
  T value;
  simt::ReadShared(p, sizeof(T), &value, {file, line});
  return value;
}
KVANT_DEVICE u32 LoadShared8(SharedAddress p, KVANT_SITE) {
  return ReadSharedAs<u8>(p, file, line);
}
KVANT_DEVICE u32 LoadShared16(SharedAddress p, KVANT_SITE) {
  return ReadSharedAs<u16>(p, file, line);
}
KVANT_DEVICE u32 LoadShared32(SharedAddress p, KVANT_SITE) {
  return ReadSharedAs<u32>(p, file, line);
}
KVANT_DEVICE Words2 LoadShared64(SharedAddress p, KVANT_SITE) {
  return ReadSharedAs<Words2>(p, file, line);
}
KVANT_DEVICE Words4 LoadShared128(SharedAddress p, KVANT_SITE) {
  return ReadSharedAs<Words4>(p, file, line);
}
KVANT_DEVICE void StoreShared8(SharedAddress p, u32 x, KVANT_SITE) {
  const u8 value = static_cast<u8>(x);
  simt::WriteShared(p, sizeof(value), &value, {file, line});
}
KVANT_DEVICE void StoreShared16(SharedAddress p, u32 x, KVANT_SITE) {
  const u16 value = static_cast<u16>(x);
  simt::WriteShared(p, sizeof(value), &value, {file, line});
}
KVANT_DEVICE void StoreShared32(SharedAddress p, u32 x, KVANT_SITE) {
  simt::WriteShared(p, sizeof(x), &x, {file, line});
}
KVANT_DEVICE void StoreShared64(SharedAddress p, Words2 x, KVANT_SITE) {
  simt::WriteShared(p, sizeof(x), &x, {file, line});
}
KVANT_DEVICE void StoreShared128(SharedAddress p, Words4 x, KVANT_SITE) {
  simt::WriteShared(p, sizeof(x), &x, {file, line});
}

// ---- cp.async
KVANT_DEVICE void CopyAsync(i32 width, SharedAddress to, const void* from, i32 valid, KVANT_SITE) {
  simt::StartCopy(static_cast<size_t>(width), to, from, static_cast<size_t>(valid), {file, line});
}
KVANT_DEVICE void CopyAsync(i32 width, SharedAddress to, const void* from, KVANT_SITE) {
  CopyAsync(width, to, from, width, file, line);
}
KVANT_DEVICE void CopyAsyncCommit() { simt::CommitCopies(); }
template <i32 kPending>
KVANT_DEVICE void CopyAsyncWait() {
  simt::WaitForCopies(kPending);
}

// ---- Matrices of 8 x 8 16-bit elements
KVANT_DEVICE Words4 LoadMatrix4(SharedAddress row, KVANT_SITE) {
  Words4 words;
  simt::LoadMatrices(row, /*transposed=*/false, words.v, {file, line});
  return words;
}
KVANT_DEVICE Words4 LoadMatrix4Transposed(SharedAddress row, KVANT_SITE) {
  Words4 words;
  simt::LoadMatrices(row, /*transposed=*/true, words.v, {file, line});
  return words;
}
KVANT_DEVICE u32 TransposeMatrix(u32 x, KVANT_SITE) { return simt::TransposeWord(x, {file, line}); }

// ---- d += A x B
KVANT_DEVICE void MmaF16K16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1,
                            KVANT_SITE) {
  const u32 a[] = {a0, a1, a2, a3};
  const u32 b[] = {b0, b1};
  simt::Mma(simt::MmaKind::kF16K16, d, a, b, {file, line});
}
KVANT_DEVICE void MmaF16K8(float (&d)[4], u32 a0, u32 a1, u32 b0, KVANT_SITE) {
  const u32 a[] = {a0, a1};
  simt::Mma(simt::MmaKind::kF16K8, d, a, &b0, {file, line});
}
KVANT_DEVICE void MmaBF16K16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1,
                             KVANT_SITE) {
  const u32 a[] = {a0, a1, a2, a3};
  const u32 b[] = {b0, b1};
  simt::Mma(simt::MmaKind::kBF16K16, d, a, b, {file, line});
}
KVANT_DEVICE void MmaTF32K8(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1,
                            KVANT_SITE) {
  const u32 a[] = {a0, a1, a2, a3};
  const u32 b[] = {b0, b1};
  simt::Mma(simt::MmaKind::kTF32K8, d, a, b, {file, line});
}

}  // namespace kvant::device

#undef KVANT_SITE

#endif  // KVANT_KERNELS_DEVICE_SIMT_OPS_H_
