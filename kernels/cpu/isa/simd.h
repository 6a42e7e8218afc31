// The float vectors that the templates of an instruction set are written over, on Google Highway:
// those of the set that the unit is compiled for. simd_<set>.h has what Highway has no word for.
//
// Everything here has internal linkage: another unit's copy is compiled for another CPU.
#ifndef KVANT_KERNELS_CPU_ISA_SIMD_H_
#define KVANT_KERNELS_CPU_ISA_SIMD_H_

#include <cstdint>
#include <cstring>

#include "kvant/kernels/cpu/isa/simd_types.h"
#if HWY_TARGET == HWY_AVX3
#include "kvant/kernels/cpu/isa/simd_avx512.h"
#elif HWY_TARGET == HWY_AVX2
#include "kvant/kernels/cpu/isa/simd_avx2.h"
#elif HWY_TARGET == HWY_NEON
#include "kvant/kernels/cpu/isa/simd_neon.h"
#else
#error "No vectors are written for what this unit is compiled for."
#endif

namespace kvant::cpu {
namespace {

struct Simd : SimdTarget {
  static Vector Zero() { return hn::Zero(kFloats); }
  static Vector Set1(float x) { return hn::Set(kFloats, x); }
  static Vector Load(const float* p) { return hn::LoadU(kFloats, p); }
  static void Store(float* p, Vector v) { hn::StoreU(v, kFloats, p); }

  static Vector Add(Vector a, Vector b) { return hn::Add(a, b); }
  static Vector Sub(Vector a, Vector b) { return hn::Sub(a, b); }
  static Vector Mul(Vector a, Vector b) { return hn::Mul(a, b); }
  static Vector Div(Vector a, Vector b) { return hn::Div(a, b); }
  static Vector Fma(Vector a, Vector b, Vector c) { return hn::MulAdd(a, b, c); }
  // c - a * b.
  static Vector Fnma(Vector a, Vector b, Vector c) { return hn::NegMulAdd(a, b, c); }
  static Vector Abs(Vector a) { return hn::Abs(a); }

  // Element i is op over the elements of v[i]. Halves of the vectors are folded into each
  // other's, then quarters, so that it takes two shuffles for each op.
  template <typename Op>
  static HWY_INLINE Vector FoldEach(const Vector (&v)[kWidth], Op op) {
    Vector fours[kWidth / 4];
#pragma GCC unroll 4
    for (int i = 0; i < kWidth; i += 4) {
      fours[i / 4] = FoldFour(v[i], v[i + 1], v[i + 2], v[i + 3], op);
    }
    return FoldFours(fours, op);
  }
  // The same in two steps, with fewer vectors at a time; the second is FoldFours.
  template <typename Op>
  static HWY_INLINE Vector FoldFour(Vector a, Vector b, Vector c, Vector d, Op op) {
    const auto halves = [op](Vector x, Vector y) {
      return op(hn::InterleaveLower(kFloats, x, y), hn::InterleaveUpper(kFloats, x, y));
    };
    const Vector x = halves(a, b), y = halves(c, d);
    return op(PairsLower(x, y), PairsUpper(x, y));
  }
  // even, odd: of a0 b0 a1 b1 ..., see Zip.
  static void Unzip(Vector a, Vector b, Vector* even, Vector* odd) {
    *even = hn::ConcatEven(kFloats, b, a);
    *odd = hn::ConcatOdd(kFloats, b, a);
  }
  // v holds kCount lists in turn, an element of each; they become a vector each. kCount is odd: so
  // of each list every lane has one element, in one of the vectors.
  template <int kCount>
  static HWY_INLINE void Deal(Vector (&v)[kCount]) {
    static_assert(kCount % 2 == 1 && (kWidth & (kWidth - 1)) == 0);
    struct Places {
      alignas(64) uint32_t kept[kCount][kWidth];  // lanes with an element of list i, in v[0]
      alignas(64) int32_t at[kCount][kWidth];     // where the elements of list i are
    };
    alignas(64) static constexpr Places kPlaces = [] {
      Places places{};
      for (int i = 0; i < kCount; ++i) {
        for (int lane = 0; lane < kWidth; ++lane) {
          places.kept[i][lane] = lane % kCount == i ? 0xffffffff : 0;
          places.at[i][lane] = (lane * kCount + i) % kWidth;
        }
      }
      return places;
    }();
    Vector dealt[kCount];
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      Vector all = hn::Zero(kFloats);
#pragma GCC unroll 8
      for (int k = 0; k < kCount; ++k) {
        const uint32_t* const kept = kPlaces.kept[(i + kCount * kWidth - k * kWidth) % kCount];
        all = hn::OrAnd(all, v[k], Floating(hn::Load(kUint32s, kept)));
      }
      dealt[i] = hn::TableLookupLanes(all, hn::SetTableIndices(kFloats, kPlaces.at[i]));
    }
    for (int i = 0; i < kCount; ++i) v[i] = dealt[i];
  }
  // Lane i has what lane i ^ step had.
  template <int step>
  static Vector Partner(Vector v) {
    if constexpr (step == 1) return hn::Shuffle2301(v);
    if constexpr (step == 2) return hn::Shuffle1032(v);
    if constexpr (step == 4) return hn::SwapAdjacentBlocks(v);
    if constexpr (step == 8) return hn::ConcatLowerUpper(kFloats, v, v);
  }
  // Row i becomes column i.
  static HWY_INLINE void Transpose(Vector (&v)[kWidth]) {
    // v[4 * i + j]: of rows 4 * i to 4 * i + 3, columns j, j + 4 and so on.
#pragma GCC unroll 4
    for (int i = 0; i < kWidth; i += 4) {
      const Vector low0 = hn::InterleaveLower(kFloats, v[i], v[i + 1]);
      const Vector low1 = hn::InterleaveLower(kFloats, v[i + 2], v[i + 3]);
      const Vector high0 = hn::InterleaveUpper(kFloats, v[i], v[i + 1]);
      const Vector high1 = hn::InterleaveUpper(kFloats, v[i + 2], v[i + 3]);
      v[i] = PairsLower(low0, low1);
      v[i + 1] = PairsUpper(low0, low1);
      v[i + 2] = PairsLower(high0, high1);
      v[i + 3] = PairsUpper(high0, high1);
    }
    TransposeBlocks(v);
  }
  // x is NaN ? 0 : value.
  static Vector ZeroNan(Vector x, Vector value) { return hn::IfThenElseZero(hn::Eq(x, x), value); }
  // The bits as an integer that is in the order of the values; its own inverse.
  static Vector OrderKey(Vector x) { return OrderKeysOf(kInt32s, x); }
  // Of the absolute value: itself.
  static Vector MagnitudeKey(Vector x) { return hn::Abs(x); }
  static Vector MinKey(Vector a, Vector b) { return LowerOf(kInt32s, a, b); }
  static Vector MaxKey(Vector a, Vector b) { return HigherOf(kInt32s, a, b); }
  // The same of two numbers of 16 bits in each element.
  static Vector OrderKeys(Vector x) { return OrderKeysOf(kInt16s, x); }
  static Vector MagnitudeKeys(Vector x) {
    return Floating(hn::And(hn::BitCast(kInt16s, x), hn::Set(kInt16s, 0x7fff)));
  }
  static Vector MinKeys(Vector a, Vector b) { return LowerOf(kInt16s, a, b); }
  static Vector MaxKeys(Vector a, Vector b) { return HigherOf(kInt16s, a, b); }
  // kWidth numbers of 16 bits, rounded to nearest even.
  static void StoreF16(uint8_t* p, Vector v) {
    const hn::Rebind<hwy::float16_t, FloatTag> halves;
    hn::StoreU(hn::DemoteTo(halves, v), halves, reinterpret_cast<hwy::float16_t*>(p));
  }
  static void StoreBF16(uint8_t* p, Vector v) {
    const hn::Rebind<uint16_t, FloatTag> halves;
    const auto bits = hn::BitCast(kUint32s, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(kUint32s, 1));
    const auto up = hn::Add(bits, hn::Add(odd, hn::Set(kUint32s, 0x7fff)));
    const auto quiet = hn::Or(bits, hn::Set(kUint32s, 0x400000));
    const auto rounded = hn::IfThenElse(hn::Eq(v, v), Floating(up), Floating(quiet));
    hn::StoreU(hn::TruncateTo(halves, hn::ShiftRight<16>(hn::BitCast(kUint32s, rounded))), halves,
               reinterpret_cast<uint16_t*>(p));
  }

  // Indices, and tables of up to 16 floats that are looked up by their low four bits: LoadTable,
  // Look.
  static Vector Gather(const float* p, Index i) { return hn::GatherIndex(kFloats, p, i); }
  static Index IndexOne() { return hn::Set(kInt32s, 1); }
  static Index IndexFromBits(Vector v) { return hn::BitCast(kInt32s, v); }
  static Vector BitsOfIndex(Index i) { return Floating(i); }
  // x > bound ? 2 i + 1 : 2 i.
  static Index Descend(Index i, Vector x, Vector bound) {
    const Index right = hn::BitCast(kInt32s, hn::VecFromMask(kFloats, hn::Gt(x, bound)));
    return hn::Sub(hn::Add(i, i), right);
  }
  static Index AddIndex(Index a, Index b) { return hn::Add(a, b); }

  static Raw Words(int x) { return hn::BitCast(kBytes, hn::Set(kInt16s, static_cast<int16_t>(x))); }
  static Raw Bytes(int x) { return hn::Set(kBytes, static_cast<uint8_t>(x)); }
  static Raw XorRaw(Raw a, Raw b) { return hn::Xor(a, b); }
  // Integers within 2^31 - 1, plus `offset`, clamped to 0 .. limit <= 255, in the order that
  // PackBytes takes.
  static Raw ClampToBytes(const Index (&v)[4], Raw offset_words, Raw limit_bytes) {
    const auto offset = hn::BitCast(kInt16s, offset_words);
    const auto low = hn::SaturatedAdd(hn::ReorderDemote2To(kInt16s, v[0], v[1]), offset);
    const auto high = hn::SaturatedAdd(hn::ReorderDemote2To(kInt16s, v[2], v[3]), offset);
    return hn::Min(ClampWords(low, high), limit_bytes);
  }

  // Qwords: kWidth / 2 numbers of 64 bits.
  static Raw Qwords(uint64_t x) { return hn::BitCast(kBytes, hn::Set(kUint64s, x)); }
  static Raw AddQwords(Raw a, Raw b) {
    return hn::BitCast(kBytes, hn::Add(hn::BitCast(kUint64s, a), hn::BitCast(kUint64s, b)));
  }
  static Raw HighDwords(Raw a) {
    return hn::BitCast(kBytes, hn::ShiftRight<32>(hn::BitCast(kUint64s, a)));
  }
  // Of their low dwords.
  static Raw MulDwords(Raw a, Raw b) {
    return hn::BitCast(kBytes, hn::MulEven(hn::BitCast(kUint32s, a), hn::BitCast(kUint32s, b)));
  }
  static Raw XorEach(Raw a, Raw b, Raw c) { return hn::Xor3(a, b, c); }
  // p[4 * i + j] becomes the low dword of the qword of words[j] that has i in QwordOrder.
  static Raw QwordOrder() {
    constexpr uint64_t kBlocks = kWidth / 4;
    uint64_t order[kWidth / 2];
    for (uint64_t b = 0; b < kBlocks; ++b) {
      order[2 * b] = b;
      order[2 * b + 1] = kBlocks + b;
    }
    return hn::BitCast(kBytes, hn::LoadU(kUint64s, order));
  }
  static void StoreInFours(uint32_t* p, const Raw (&words)[4]) {
    const Vector first = PairDwords(words[0], words[1]), second = PairDwords(words[2], words[3]);
    Store(reinterpret_cast<float*>(p), PairsLower(first, second));
    Store(reinterpret_cast<float*>(p) + kWidth, PairsUpper(first, second));
  }

  // 2^k, for k in the low bits of `shifted` (-127 < k < 128).
  static Vector PowerOfTwo(Vector shifted) {
    return Floating(
        hn::ShiftLeft<23>(hn::Add(hn::BitCast(kInt32s, shifted), hn::Set(kInt32s, 127))));
  }

  // The first kBytes, of a whole vector or less.
  template <int kCount>
  static void StoreRaw(uint8_t* p, Raw raw) {
    hn::StoreU(FirstBytes<kCount>(raw), hn::CappedTag<uint8_t, kCount>(), p);
  }
  // kCount bytes as a vector of that size.
  template <int kCount>
  static auto LoadRaw(const uint8_t* p) {
    return hn::LoadU(hn::CappedTag<uint8_t, kCount>(), p);
  }

  static Vector FromF32(Narrow<4 * kWidth> raw) { return Floating(raw.vector); }
  static Vector FromF16(Narrow<2 * kWidth> raw) {
    const hn::Rebind<hwy::float16_t, FloatTag> halves;
    return hn::PromoteTo(kFloats, hn::BitCast(halves, raw.vector));
  }
  static Vector FromBF16(Narrow<2 * kWidth> raw) {
    const hn::Rebind<uint16_t, FloatTag> halves;
    const auto words = hn::BitCast(halves, raw.vector);
    return Floating(hn::ShiftLeft<16>(hn::PromoteTo(kUint32s, words)));
  }
  static Vector FromE5M2(Narrow<kWidth> raw) {
    const hn::Rebind<uint16_t, FloatTag> words;
    const hn::Rebind<hwy::float16_t, FloatTag> halves;
    const auto wide = hn::ShiftLeft<8>(hn::PromoteTo(words, raw.vector));
    return hn::PromoteTo(kFloats, hn::BitCast(halves, wide));
  }
  // With its exponent in f16's place, a code is worth 2^-8 of its value; the last is no number.
  static Vector FromE4M3(Narrow<kWidth> raw) {
    const hn::Rebind<int16_t, FloatTag> words;
    const hn::Rebind<int8_t, FloatTag> bytes;
    const hn::Rebind<hwy::float16_t, FloatTag> halves;
    const auto wide = hn::PromoteTo(words, hn::BitCast(bytes, raw.vector));
    const auto half = hn::And(hn::ShiftLeft<7>(wide), hn::Set(words, 0x3f80));
    const auto sign = hn::And(wide, hn::Set(words, int16_t{-0x8000}));
    const Vector value = hn::PromoteTo(kFloats, hn::BitCast(halves, hn::Or(half, sign)));
    return NanWhere(hn::Eq(half, hn::Set(words, 0x3f80)), Mul(value, Set1(256.f)));
  }
  static Vector FromS32(Narrow<4 * kWidth> raw) {
    return hn::ConvertTo(kFloats, hn::BitCast(kInt32s, raw.vector));
  }
  static Vector FromS8(Narrow<kWidth> raw) {
    const hn::Rebind<int8_t, FloatTag> bytes;
    return hn::ConvertTo(kFloats, hn::PromoteTo(kInt32s, hn::BitCast(bytes, raw.vector)));
  }
  static Vector FromU8(Narrow<kWidth> raw) { return hn::ConvertTo(kFloats, IndexU8(raw)); }
  static Vector FromBoolean(Narrow<kWidth> raw) {
    const Index code = IndexU8(raw);
    return hn::IfThenZeroElse(hn::RebindMask(kFloats, hn::Eq(code, hn::Zero(kInt32s))), Set1(1.f));
  }
  static Index IndexU8(Narrow<kWidth> raw) { return hn::PromoteTo(kInt32s, raw.vector); }

 private:
  template <typename Tag>
  static Vector OrderKeysOf(Tag tag, Vector x) {
    constexpr int kSign = 8 * sizeof(hn::TFromD<Tag>) - 1;
    const auto bits = hn::BitCast(tag, x);
    const auto most = hn::Set(tag, hwy::LimitsMax<hn::TFromD<Tag>>());
    return Floating(hn::Xor(bits, hn::And(hn::ShiftRight<kSign>(bits), most)));
  }
  template <typename Tag>
  static Vector LowerOf(Tag tag, Vector a, Vector b) {
    return Floating(hn::Min(hn::BitCast(tag, a), hn::BitCast(tag, b)));
  }
  template <typename Tag>
  static Vector HigherOf(Tag tag, Vector a, Vector b) {
    return Floating(hn::Max(hn::BitCast(tag, a), hn::BitCast(tag, b)));
  }
  // Low dwords of qwords side by side.
  static Vector PairDwords(Raw low, Raw high) {
    const auto up = hn::ShiftLeft<32>(hn::BitCast(kUint64s, high));
    return hn::OddEven(Floating(up), Floating(low));
  }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_SIMD_H_
