// Highway for the one target that the unit's flags choose, and the types of simd.h.
#ifndef KVANT_KERNELS_CPU_ISA_SIMD_TYPES_H_
#define KVANT_KERNELS_CPU_ISA_SIMD_TYPES_H_

// One target; and no assertions, which would call libhwy.
#define HWY_COMPILE_ONLY_STATIC
#define HWY_IS_DEBUG_BUILD 0
#include <hwy/highway.h>

#include <cstdint>
#include <cstring>

namespace kvant::cpu {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

struct SimdTypes {
  using FloatTag = hn::CappedTag<float, 16>;
  static constexpr FloatTag kFloats{};
  static constexpr hn::Rebind<int32_t, FloatTag> kInt32s{};
  static constexpr hn::Rebind<uint32_t, FloatTag> kUint32s{};
  static constexpr hn::Repartition<uint64_t, FloatTag> kUint64s{};
  static constexpr hn::Repartition<int16_t, FloatTag> kInt16s{};
  static constexpr hn::Repartition<uint8_t, FloatTag> kBytes{};
  using Vector = hn::Vec<FloatTag>;
  using Index = hn::Vec<decltype(kInt32s)>;
  using Raw = hn::Vec<decltype(kBytes)>;  // bytes as they are stored
  using Int16s = hn::Vec<decltype(kInt16s)>;

  static constexpr int kWidth = HWY_LANES(float);

  template <typename V>
  static Vector Floating(V v) {
    return hn::BitCast(kFloats, v);
  }
  // Pairs of each quarter of a and of b: the first two, the last two.
  static Vector PairsLower(Vector a, Vector b) {
    return Floating(
        hn::InterleaveLower(kUint64s, hn::BitCast(kUint64s, a), hn::BitCast(kUint64s, b)));
  }
  static Vector PairsUpper(Vector a, Vector b) {
    return Floating(
        hn::InterleaveUpper(kUint64s, hn::BitCast(kUint64s, a), hn::BitCast(kUint64s, b)));
  }
  // The first kCount bytes of a vector as one of that size.
  template <int kCount, typename V>
  static auto FirstBytes(V v) {
    if constexpr (hn::MaxLanes(hn::DFromV<V>()) == kCount) {
      return v;
    } else {
      return FirstBytes<kCount>(hn::LowerHalf(v));
    }
  }
  // What conversions take: kCount bytes, or the first ones of a wider vector. Where just these are
  // loaded, instructions that widen them read memory themselves. From a register they cross lanes,
  // at half the speed (f16 by AVX2 on a Zen 3).
  template <int kCount>
  struct Narrow {
    hn::Vec<hn::CappedTag<uint8_t, kCount>> vector;

    template <typename V>
    Narrow(V v) : vector(FirstBytes<kCount>(v)) {}
  };
};

// What narrower vectors have in common: masks are vectors, and a dword holds all their nibbles.
template <typename Own>
struct NarrowTarget : SimdTypes {
  static Vector ZeroBelow(Vector x, Vector bound, Vector value) {
    return hn::IfThenZeroElse(hn::Lt(x, bound), value);
  }
  template <typename Mask>
  static Vector NanWhere(Mask words, Vector value) {
    const hn::Rebind<int16_t, FloatTag> d;
    return hn::Or(value, Floating(hn::PromoteTo(kInt32s, hn::VecFromMask(d, words))));
  }
  using Nibbles = Narrow<kWidth / 2>;
  using BitPairs = Narrow<kWidth / 4>;
  static Index IndexU4(Nibbles raw) { return Int32Of(hn::ShiftRight<28>(TopBits<4>(raw))); }
  static Index IndexU2(BitPairs raw) { return Int32Of(hn::ShiftRight<30>(TopBits<2>(raw))); }
  static Vector FromU4(Nibbles raw) { return hn::ConvertTo(kFloats, IndexU4(raw)); }
  static Vector FromS4(Nibbles raw) {
    return hn::ConvertTo(kFloats, hn::ShiftRight<28>(Int32Of(TopBits<4>(raw))));
  }
  static Vector FromU2(BitPairs raw) { return hn::ConvertTo(kFloats, IndexU2(raw)); }
  static Vector FromS2(BitPairs raw) {
    return hn::ConvertTo(kFloats, hn::ShiftRight<30>(Int32Of(TopBits<2>(raw))));
  }

 protected:
  using Uint32s = hn::Vec<decltype(kUint32s)>;
  struct TwoQwords {
    uint64_t low, high;
  };
  // The first n <= 16 bytes, zeros beyond: the first and the last word, which may overlap.
  static TwoQwords SomeBytes(const uint8_t* p, int64_t n) {
    const auto qword = [p](int64_t at) {
      uint64_t x;
      std::memcpy(&x, p + at, sizeof(x));
      return x;
    };
    const auto dword = [p](int64_t at) -> uint64_t {
      uint32_t x;
      std::memcpy(&x, p + at, sizeof(x));
      return x;
    };
    uint64_t low = 0, high = 0;
    if (n >= 8) {
      low = qword(0);
      if (n > 8) high = qword(n - 8) >> (8 * (16 - n));
    } else if (n >= 4) {
      low = dword(0) | dword(n - 4) << (8 * (n - 4));
    } else if (n > 0) {
      low = p[0] | uint64_t{p[n / 2]} << (8 * (n / 2)) | uint64_t{p[n - 1]} << (8 * (n - 1));
    }
    return {low, high};
  }

 private:
  static Index Int32Of(Uint32s v) { return hn::BitCast(kInt32s, v); }
  // Dword i holds element i in its top bits.
  template <int kBits, typename Some>
  static Uint32s TopBits(Some raw) {
    alignas(32) static constexpr uint32_t kShifts[] = {
        32 - kBits,     32 - 2 * kBits, 32 - 3 * kBits, 32 - 4 * kBits,
        32 - 5 * kBits, 32 - 6 * kBits, 32 - 7 * kBits, 32 - 8 * kBits};
    return Own::FirstDword(raw.vector) << hn::Load(kUint32s, kShifts);
  }
};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_SIMD_TYPES_H_
