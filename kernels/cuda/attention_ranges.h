// Of attention in parts: which tokens are multiplied as packed codes, and which are the others.
//
// K and V are of several segments with ranges. Columns [begin, end) are those that both have in
// the segment of codes; one kernel has these, another the rest:
//
//   K        sinks | codes . . . . . . . . . . | window        V may leave its codes elsewhere
//   codes              [begin, end)
//   others   sinks | head                tail  | window        head and tail: of the segment of
//   codes
//
// Ranges of both go to AttentionParams::done, s32: of codes {first, tokens} of K [b0], and of V;
// then of the others [b0][segments + 1] of K, and of V.
#ifndef KVANT_KERNELS_CUDA_ATTENTION_RANGES_H_
#define KVANT_KERNELS_CUDA_ATTENTION_RANGES_H_

#include "kvant/kernels/cuda/columns.h"

namespace kvant::cuda {

// Where the ranges lie.
struct PartRanges {
  i32 codes_k, codes_v, others_k, others_v, size;

  KVANT_DEVICE static constexpr PartRanges Of(i32 batch, i32 k_segments, i32 v_segments) {
    PartRanges at{};
    at.codes_v = batch * 2;
    at.others_k = batch * 4;
    at.others_v = at.others_k + batch * (k_segments + 1) * 2;
    at.size = at.others_v + batch * (v_segments + 1) * 2;
    return at;
  }
};

// A thread for each batch entry.
template <class T>
class AttentionRanges {
 public:
  KVANT_DEVICE static void Run(const AttentionParams& p) {
    const i64 thread = BlockIndex() * BlockThreads() + ThreadIndex();
    if (thread >= p.batch[0]) return;
    const i32 b0 = static_cast<i32>(thread);
    const PartRanges at = PartRanges::Of(p.batch[0], T::k.k_segments, T::k.v_segments);
    const SegmentColumns k = Codes(p.k, T::k.k_codes, b0), v = Codes(p.v, T::k.v_codes, b0);
    const i32 begin = MaxOf(k.begin, v.begin), end = MaxOf(begin, MinOf(k.end, v.end));
    i32* const ranges = reinterpret_cast<i32*>(p.done);
    StoreRange(k, begin, end, ranges + at.codes_k + b0 * 2);
    StoreRange(v, begin, end, ranges + at.codes_v + b0 * 2);
    StoreOthers(p.k, T::k.k_segments, T::k.k_codes, b0, k, begin, end,
                ranges + at.others_k + b0 * (T::k.k_segments + 1) * 2);
    StoreOthers(p.v, T::k.v_segments, T::k.v_codes, b0, v, begin, end,
                ranges + at.others_v + b0 * (T::k.v_segments + 1) * 2);
  }

 private:
  KVANT_DEVICE static SegmentColumns Codes(const SegmentParams* segments, i32 codes, i32 b0) {
    i32 before = 0;
    KVANT_NO_UNROLL
    for (i32 s = 0; s < codes; ++s) before = ReadRange(b0, segments[s], before).end;
    return ReadRange(b0, segments[codes], before);
  }
  // Columns [begin, end) of a segment, of those that it has.
  KVANT_DEVICE static void StoreRange(const SegmentColumns& columns, i32 begin, i32 end, i32* to) {
    const i32 from = MaxOf(begin, columns.begin), tokens = MinOf(end, columns.end) - from;
    Store(to, tokens > 0 ? columns.TokenOf(from) : 0);
    Store(to + 1, MaxOf(tokens, 0));
  }
  KVANT_DEVICE static void StoreOthers(const SegmentParams* segments, i32 count, i32 codes, i32 b0,
                                       const SegmentColumns& columns, i32 begin, i32 end, i32* to) {
    KVANT_NO_UNROLL
    for (i32 s = 0; s < count; ++s) {
      if (s == codes) {
        StoreRange(columns, columns.begin, begin, to);
        StoreRange(columns, end, columns.end, to + 2);
        to += 4;
        continue;
      }
      const SegmentColumns whole = ReadRange(b0, segments[s], 0);
      StoreRange(whole, whole.begin, whole.end, to);
      to += 2;
    }
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_ATTENTION_RANGES_H_
