// MergeAttention: attention over all tokens, made of that over parts of them. A thread makes 4
// channels of a row: each part's are read once, and all threads of a row read its statistics.
//
// A launch takes up to kMaxMergeParts. Of more, each launch but the last leaves what it has made in
// f32, where it is the first part of the next.
#ifndef KVANT_KERNELS_CUDA_MERGE_H_
#define KVANT_KERNELS_CUDA_MERGE_H_

#include "kvant/kernels/cuda/online_softmax.h"

namespace kvant::cuda {

inline constexpr i32 kMaxMergeAxes = 6;
inline constexpr i32 kMaxMergeParts = 24;
inline constexpr i32 kMergeChannels = 4;  // of a thread

struct MergeTraits {
  i32 first, others;  // ElementType of the outputs of the first part, and of the others
  i32 result;
  i32 stats;    // there are statistics of the result
  i32 axes;     // of rows
  i32 vectors;  // all 4 channels are side by side, and aligned where an array is
};

// The outputs of a part, or of all, and their statistics.
struct MergePart {
  void* output;
  float* stats;
  i64 strides[kMaxMergeAxes], channel;  // of output, in elements
  i64 stats_strides[kMaxMergeAxes];
};

struct MergeParams {
  MergePart parts[kMaxMergeParts];
  MergePart result;
  i32 extents[kMaxMergeAxes];
  i32 part_count, channels;
  u32 row_threads;
  u32 count;  // of threads, for all rows
};

template <class T>
class MergeAttention {
 public:
  KVANT_DEVICE static void Run(const MergeParams& p) {
    const i64 thread = BlockIndex() * BlockThreads() + ThreadIndex();
    if (thread >= p.count) return;
    const u32 index = static_cast<u32>(thread), row = index / p.row_threads;
    const i32 channel = static_cast<i32>(index - row * p.row_threads) * kMergeChannels;
    const Row at(p, row);
    // Written so that a NaN is kept, in the sum.
    float max = -Infinity();
    KVANT_NO_UNROLL
    for (i32 i = 0; i < p.part_count; ++i) {
      const float stats = at.StatsOf(p.parts[i]);
      max = stats > max ? stats : max;
    }
    float sum = 0.f, out[kMergeChannels] = {};
    KVANT_NO_UNROLL
    for (i32 i = 0; i < p.part_count; ++i) {
      const float stats = at.StatsOf(p.parts[i]);
      if (stats == -Infinity()) continue;
      const float weight = ExpAbove(stats, max);
      sum += weight;
      if (T::k.first == T::k.others || i > 0) {
        Add(T::k.others, p, p.parts[i], at, channel, weight, out);
      } else {
        Add(T::k.first, p, p.parts[i], at, channel, weight, out);
      }
    }
    const bool empty = sum == 0.f;
    if (T::k.stats != 0 && channel == 0) {
      Store(p.result.stats + at.IndexOf(p.result.stats_strides),
            empty ? -Infinity() : max + Log(sum));
    }
    KVANT_UNROLL
    for (i32 c = 0; c < kMergeChannels; ++c) out[c] = empty ? 0.f : Divide(out[c], sum);
    StoreResult(p, at.IndexOf(p.result.strides) + channel * p.result.channel, channel, out);
  }

 private:
  // The place of a row along each axis.
  class Row {
   public:
    KVANT_DEVICE Row(const MergeParams& p, u32 row) {
      KVANT_UNROLL
      for (i32 a = T::k.axes - 1; a > 0; --a) {
        const u32 extent = static_cast<u32>(p.extents[a]), rest = row / extent;
        at_[a] = row - rest * extent;
        row = rest;
      }
      at_[0] = row;
    }
    KVANT_DEVICE i64 IndexOf(const i64 (&strides)[kMaxMergeAxes]) const {
      i64 index = 0;
      KVANT_UNROLL
      for (i32 a = 0; a < T::k.axes; ++a) index += at_[a] * strides[a];
      return index;
    }
    KVANT_DEVICE float StatsOf(const MergePart& part) const {
      return Load(part.stats + IndexOf(part.stats_strides));
    }

   private:
    u32 at_[kMaxMergeAxes];
  };

  KVANT_DEVICE static bool HasVectors(i32 type, const void* data) {
    const u64 bytes = BitsOf(type) / 8 * kMergeChannels;
    return T::k.vectors != 0 && reinterpret_cast<u64>(data) % bytes == 0;
  }

  KVANT_DEVICE static void Add(i32 type, const MergeParams& p, const MergePart& part, const Row& at,
                               i32 channel, float weight, float (&out)[kMergeChannels]) {
    const i64 index = at.IndexOf(part.strides) + channel * part.channel;
    float x[kMergeChannels];
    if (HasVectors(type, part.output)) {
      LoadFour(type, part.output, index, x);
    } else {
      KVANT_UNROLL
      for (i32 c = 0; c < kMergeChannels; ++c) {
        const bool there = channel + c < p.channels;
        x[c] = there ? LoadElement(type, part.output, index + c * part.channel) : 0.f;
      }
    }
    KVANT_UNROLL
    for (i32 c = 0; c < kMergeChannels; ++c) out[c] = Fma(weight, x[c], out[c]);
  }

  KVANT_DEVICE static void StoreResult(const MergeParams& p, i64 index, i32 channel,
                                       const float (&out)[kMergeChannels]) {
    const i32 type = T::k.result;
    if (!HasVectors(type, p.result.output)) {
      KVANT_UNROLL
      for (i32 c = 0; c < kMergeChannels; ++c) {
        if (channel + c >= p.channels) break;
        StoreElement(type, p.result.output, index + c * p.result.channel, out[c]);
      }
    } else if (BitsOf(type) == 32) {
      Store(reinterpret_cast<Words4*>(static_cast<float*>(p.result.output) + index),
            Words4{{AsBits(out[0]), AsBits(out[1]), AsBits(out[2]), AsBits(out[3])}});
    } else {
      Store(reinterpret_cast<Words2*>(static_cast<u16*>(p.result.output) + index),
            type == kFloat16 ? Words2{{PackF16(out[0], out[1]), PackF16(out[2], out[3])}}
                             : Words2{{PackBF16(out[0], out[1]), PackBF16(out[2], out[3])}});
    }
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_MERGE_H_
