// The device vocabulary as PTX: one instruction or intrinsic per function, and nothing else. What
// is wrong here no test without a GPU can see, hence one parity test per function for a GPU.
//
// Lanes and fragments (fragment.h has the layouts): g = lane / 4, c = lane % 4.
#ifndef KVANT_KERNELS_DEVICE_PTX_H_
#define KVANT_KERNELS_DEVICE_PTX_H_

#define KVANT_DEVICE __device__ __forceinline__
#define KVANT_UNROLL _Pragma("unroll")
#define KVANT_NO_UNROLL _Pragma("unroll 1")

namespace kvant::device {

using i8 = signed char;
using u8 = unsigned char;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

// An address in the block's shared memory, in bytes.
using SharedAddress = u32;

struct alignas(8) Words2 {
  u32 v[2];
};
struct alignas(16) Words4 {
  u32 v[4];
};

// ---- Where this thread is. Blocks are one-dimensional, and so is the grid.
KVANT_DEVICE i32 ThreadIndex() { return static_cast<i32>(threadIdx.x); }
KVANT_DEVICE i32 BlockThreads() { return static_cast<i32>(blockDim.x); }
KVANT_DEVICE i64 BlockIndex() { return blockIdx.x; }
KVANT_DEVICE i64 GridBlocks() { return gridDim.x; }
KVANT_DEVICE i32 LaneIndex() { return static_cast<i32>(threadIdx.x & 31); }
// Known to the compiler to be the same in all lanes.
KVANT_DEVICE i32 WarpIndex() {
  return __shfl_sync(0xffffffffu, static_cast<i32>(threadIdx.x >> 5), 0);
}

// ---- Barriers and collectives: by all threads of the block, or all lanes of the warp.
KVANT_DEVICE void BlockSync() { __syncthreads(); }
KVANT_DEVICE void WarpSync() { __syncwarp(); }
KVANT_DEVICE float ShuffleXor(float value, i32 mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
KVANT_DEVICE u32 ShuffleXor(u32 value, i32 mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
KVANT_DEVICE float Shuffle(float value, i32 lane) { return __shfl_sync(0xffffffffu, value, lane); }
KVANT_DEVICE u32 Shuffle(u32 value, i32 lane) { return __shfl_sync(0xffffffffu, value, lane); }
KVANT_DEVICE bool Any(bool value) { return __any_sync(0xffffffffu, value); }

// ---- Bits
KVANT_DEVICE float AsFloat(u32 bits) { return __uint_as_float(bits); }
KVANT_DEVICE u32 AsBits(float value) { return __float_as_uint(value); }
KVANT_DEVICE double AsDouble(u64 bits) {
  return __longlong_as_double(static_cast<long long>(bits));
}
KVANT_DEVICE u64 AsBits(double value) { return static_cast<u64>(__double_as_longlong(value)); }
// prmt: byte i of the result is byte (selector >> 4i) & 7 of a, b; its sign if bit 3 is set.
KVANT_DEVICE u32 Permute(u32 a, u32 b, u32 selector) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}
// (a & b) ^ c and (a & b) | c in one LOP3, which C does not promise.
KVANT_DEVICE u32 AndXor(u32 a, u32 b, u32 c) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
KVANT_DEVICE u32 AndOr(u32 a, u32 b, u32 c) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// Hides a value's origin, so that it is kept in a register instead of computed again.
KVANT_DEVICE u32 Opaque(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}
KVANT_DEVICE const u8* Opaque(const u8* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// ---- f32 arithmetic. NaN: Max and Min return the other operand.
KVANT_DEVICE float Fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
KVANT_DEVICE float Max(float a, float b) { return fmaxf(a, b); }
KVANT_DEVICE float Min(float a, float b) { return fminf(a, b); }
KVANT_DEVICE float Abs(float a) { return fabsf(a); }
KVANT_DEVICE float Divide(float a, float b) { return __fdiv_rn(a, b); }
// 2^x to 2 ulp; ex2.approx.
KVANT_DEVICE float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KVANT_DEVICE float Log(float x) { return logf(x); }
KVANT_DEVICE float Tanh(float x) { return tanhf(x); }
// To the nearest integer, ties to even.
KVANT_DEVICE float RoundEven(float x) { return rintf(x); }
KVANT_DEVICE double Fma(double a, double b, double c) { return __fma_rn(a, b, c); }
KVANT_DEVICE u32 MultiplyHigh(u32 a, u32 b) { return __umulhi(a, b); }

// ---- Pairs of 16-bit floats in a word, the first in the low half. Rounding to nearest even.
KVANT_DEVICE u32 PackF16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
KVANT_DEVICE u32 PackBF16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
KVANT_DEVICE float F16Low(u32 pair) {
  float f;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(pair));
  return f;
}
KVANT_DEVICE float F16High(u32 pair) {
  float f;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(pair));
  return f;
}
KVANT_DEVICE float BF16Low(u32 pair) { return AsFloat(pair << 16); }
KVANT_DEVICE float BF16High(u32 pair) { return AsFloat(pair & 0xffff0000u); }
KVANT_DEVICE u32 MultiplyF16x2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
KVANT_DEVICE u32 AddF16x2(u32 a, u32 b) {
  u32 r;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
KVANT_DEVICE u32 FmaF16x2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// a * b - c; the sign costs nothing.
KVANT_DEVICE u32 FmsF16x2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("{.reg .b32 n; neg.f16x2 n, %3; fma.rn.f16x2 %0, %1, %2, n;}"
      : "=r"(r)
      : "r"(a), "r"(b), "r"(c));
  return r;
}
KVANT_DEVICE u32 FmaBF16x2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// Of magnitudes; NaN is passed over.
KVANT_DEVICE u32 MaxAbsF16x2(u32 a, u32 b) {
  u32 r;
  asm("{.reg .b32 x, y; abs.f16x2 x, %1; abs.f16x2 y, %2; max.f16x2 %0, x, y;}"
      : "=r"(r)
      : "r"(a), "r"(b));
  return r;
}
// The two f8 e4m3 in the low half as f16, exactly; a NaN's sign is lost.
KVANT_DEVICE u32 F16x2OfE4M3(u32 bytes) {
#if __CUDA_ARCH__ >= 900
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(static_cast<u16>(bytes)));
  return r;
#else
  // With a bit more of exponent they are f16 that are 256 times too small.
  const u32 x = Permute(bytes, 0, 0x1404);
  const u32 small = (x >> 1 & 0x3f803f80u) | (x & 0x80008000u);
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(small), "r"(0x5c005c00u));
  if ((x & 0x00007f00u) == 0x00007f00u) r |= 0x00007fffu;
  if ((x & 0x7f000000u) == 0x7f000000u) r |= 0x7fff0000u;
  return r;
#endif
}
// a times the low, or the high, half of s.
KVANT_DEVICE u32 MultiplyByLowF16(u32 a, u32 s) {
  u32 r;
  asm("{.reg .f16 l, h; .reg .b32 d; mov.b32 {l, h}, %2; mov.b32 d, {l, l}; mul.rn.f16x2 %0, %1, "
      "d;}"
      : "=r"(r)
      : "r"(a), "r"(s));
  return r;
}
KVANT_DEVICE u32 MultiplyByHighF16(u32 a, u32 s) {
  u32 r;
  asm("{.reg .f16 l, h; .reg .b32 d; mov.b32 {l, h}, %2; mov.b32 d, {h, h}; mul.rn.f16x2 %0, %1, "
      "d;}"
      : "=r"(r)
      : "r"(a), "r"(s));
  return r;
}

// ---- Global memory. T: u8, u16, u32, i32, i64, float, Words2, Words4; aligned to its size.
// What nobody writes while the kernel runs.
template <class T>
KVANT_DEVICE T Load(const T* p) {
  return __ldg(p);
}
template <>
KVANT_DEVICE Words2 Load(const Words2* p) {
  const uint2 x = __ldg(reinterpret_cast<const uint2*>(p));
  return {{x.x, x.y}};
}
template <>
KVANT_DEVICE Words4 Load(const Words4* p) {
  const uint4 x = __ldg(reinterpret_cast<const uint4*>(p));
  return {{x.x, x.y, x.z, x.w}};
}
// What other blocks wrote, before a Fence and an atomic that this block has seen, or what this
// thread did.
KVANT_DEVICE u8 LoadCoherent(const u8* p) { return __ldcg(p); }
KVANT_DEVICE u32 LoadCoherent(const u32* p) { return __ldcg(p); }
KVANT_DEVICE i32 LoadCoherent(const i32* p) { return __ldcg(p); }
KVANT_DEVICE float LoadCoherent(const float* p) { return __ldcg(p); }
KVANT_DEVICE Words4 LoadCoherent(const Words4* p) {
  const uint4 x = __ldcg(reinterpret_cast<const uint4*>(p));
  return {{x.x, x.y, x.z, x.w}};
}
template <class T>
KVANT_DEVICE void Store(T* p, T value) {
  *p = value;
}
// Makes what this thread wrote visible to the device before what it writes next.
KVANT_DEVICE void Fence() { __threadfence(); }
// The old value; the new one is 0 where old >= limit, else old + 1.
KVANT_DEVICE u32 AtomicIncrement(u32* p, u32 limit) { return atomicInc(p, limit); }

// ---- Shared memory. The block's dynamic shared memory, aligned to 1024 bytes.
KVANT_DEVICE SharedAddress SharedBase() {
  extern __shared__ __align__(1024) unsigned char kvant_shared[];
  return static_cast<u32>(__cvta_generic_to_shared(kvant_shared));
}
KVANT_DEVICE u32 LoadShared8(SharedAddress p) {
  u32 r;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(r) : "r"(p) : "memory");
  return r;
}
KVANT_DEVICE u32 LoadShared16(SharedAddress p) {
  u32 r;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(r) : "r"(p) : "memory");
  return r;
}
KVANT_DEVICE u32 LoadShared32(SharedAddress p) {
  u32 r;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(p) : "memory");
  return r;
}
KVANT_DEVICE Words2 LoadShared64(SharedAddress p) {
  Words2 r;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(r.v[0]), "=r"(r.v[1]) : "r"(p) : "memory");
  return r;
}
KVANT_DEVICE Words4 LoadShared128(SharedAddress p) {
  Words4 r;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
               : "r"(p)
               : "memory");
  return r;
}
KVANT_DEVICE void StoreShared8(SharedAddress p, u32 x) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(p), "r"(x) : "memory");
}
KVANT_DEVICE void StoreShared16(SharedAddress p, u32 x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(p), "h"(static_cast<u16>(x)) : "memory");
}
KVANT_DEVICE void StoreShared32(SharedAddress p, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(p), "r"(x) : "memory");
}
KVANT_DEVICE void StoreShared64(SharedAddress p, Words2 x) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(p), "r"(x.v[0]), "r"(x.v[1]) : "memory");
}
KVANT_DEVICE void StoreShared128(SharedAddress p, Words4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(p), "r"(x.v[0]), "r"(x.v[1]),
               "r"(x.v[2]), "r"(x.v[3])
               : "memory");
}

// ---- cp.async: copies `width` bytes (4, 8 or 16; both sides aligned to that), the first `valid`
// of them from memory and zeros after. Done once its group has been waited for, by this thread.
KVANT_DEVICE void CopyAsync(i32 width, SharedAddress to, const void* from, i32 valid) {
  if (width == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid)
                 : "memory");
  } else if (width == 8) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(valid)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid)
                 : "memory");
  }
}
KVANT_DEVICE void CopyAsync(i32 width, SharedAddress to, const void* from) {
  if (width == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else if (width == 8) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
  }
}
KVANT_DEVICE void CopyAsyncCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `kPending` of this thread's groups are under way.
template <i32 kPending>
KVANT_DEVICE void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Matrices of 8 x 8 16-bit elements. Row i of matrix m is the 16 bytes at lane 8m + i's `row`.
// Word m: elements [g][2c, 2c + 1] of matrix m; transposed: [2c, 2c + 1][g].
KVANT_DEVICE Words4 LoadMatrix4(SharedAddress row) {
  Words4 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
               : "r"(row)
               : "memory");
  return r;
}
KVANT_DEVICE Words4 LoadMatrix4Transposed(SharedAddress row) {
  Words4 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
               : "r"(row)
               : "memory");
  return r;
}
// A word holds [g][2c, 2c + 1]; the result [2c, 2c + 1][g]. What all lanes must come to is
// volatile: the compiler may not move it to where only some do.
KVANT_DEVICE u32 TransposeMatrix(u32 x) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

// ---- d += A x B, d 16 x 8 f32. A is 16 x 16 (x 8 for K8), B 16 x 8 (8 x 8).
KVANT_DEVICE void MmaF16K16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
KVANT_DEVICE void MmaF16K8(float (&d)[4], u32 a0, u32 a1, u32 b0) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
}
KVANT_DEVICE void MmaBF16K16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// tf32: f32 bits of which the lower 13 are ignored.
KVANT_DEVICE void MmaTF32K8(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace kvant::device

#endif  // KVANT_KERNELS_DEVICE_PTX_H_
