// Where what a block of attention over packed codes reads begins: token 0 of its segments, or of
// page 0.
#ifndef KVANT_KERNELS_CUDA_CODES_BASES_H_
#define KVANT_KERNELS_CUDA_CODES_BASES_H_

#include "kvant/kernels/cuda/codes_format.h"
#include "kvant/kernels/cuda/codes_work.h"

namespace kvant::cuda {

inline constexpr i32 kSides = 4;  // K scales, V scales, K zero points, V zero points

template <class T>
struct CodesBases {
  const u8 *k, *v;
  const u8* sides[kSides];

  KVANT_DEVICE static CodesBases Of(const AttentionParams& p, SharedAddress work) {
    const BlockRows rows = CodesWork<T>::Load(p, work).rows;
    const Position at{HasPages(T::k) ? 0 : rows.b0, rows.b1, rows.b2, 0};
    const SegmentParams &k = KeySegment<T>(p), &v = ValueSegment<T>(p);
    return {Codes(T::k.k[0], k, at),
            Codes(T::k.v[0], v, at),
            {Side(T::k.k[0], T::k.k[0].scales, k.scales, at),
             Side(T::k.v[0], T::k.v[0].scales, v.scales, at),
             Side(T::k.k[0], T::k.k[0].zero_points, k.zero_points, at),
             Side(T::k.v[0], T::k.v[0].zero_points, v.zero_points, at)}};
  }

 private:
  KVANT_DEVICE static const u8* Codes(const SegmentTraits& traits, const SegmentParams& segment,
                                      const Position& at) {
    return static_cast<const u8*>(segment.data.data) +
           IndexOf(traits.data, segment.data, at, 0) * BitsOf(traits.data.type) / 8;
  }
  KVANT_DEVICE static const u8* Side(const SegmentTraits& traits, const ArrayTraits& side,
                                     const Array& array, const Position& at) {
    const bool in_common = !CodeFormat::Varies(side) && !CodeFormat::IsByChannel(traits);
    if (side.type == kNone || in_common) return nullptr;
    return static_cast<const u8*>(array.data) +
           GroupIndex(traits, side, array, at, 0) * BitsOf(side.type) / 8;
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CODES_BASES_H_
