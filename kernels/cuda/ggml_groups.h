// Formula ggml: scales, zero points and codes of groups as quantize_row_{q8_0,q4_0,q4_1,iq4_nl}_ref
// of ggml (ggml/src/ggml-quants.c) computes them, in f32; docs/ops.md has it. Products are rounded
// before anything is added to them.
#ifndef KVANT_KERNELS_CUDA_GGML_GROUPS_H_
#define KVANT_KERNELS_CUDA_GGML_GROUPS_H_

#include "kvant/kernels/cuda/quantize_runs.h"

namespace kvant::cuda {

KVANT_DEVICE float RoundedProduct(float a, float b) { return AsFloat(Opaque(AsBits(a * b))); }

// A group that `lanes` lanes of a warp hold: element 8 * (r * lanes + lane) + i is x[r][i]. All
// lanes of the warp take part in what is computed of it.
template <class T>
class GgmlGroup {
 public:
  using Numbers = float[T::kMax.lane_runs][kRun];

  // counts[r]: elements of x[r]. `range` is that of the group.
  KVANT_DEVICE GgmlGroup(const Numbers& x, const i32 (&counts)[T::kMax.lane_runs],
                         const ValueRange& range) {
    const bool finite = range.max - range.max == 0.f && range.min - range.min == 0.f;
    const float min = T::k.ggml == kGgmlQ4_1 ? Within(T::k.zero_points, range.min) : range.min;
    float d = 0.f;
    if (T::k.ggml == kGgmlQ8_0) {
      d = Within(T::k.scales, Divide(range.max, 127.f));
    } else if (T::k.ggml == kGgmlQ4_1) {
      d = Within(T::k.scales, Divide(Max(min, range.max) - min, 15.f));
    } else {
      const float extreme = Extreme(x, counts, range.max);
      if (T::k.ggml == kGgmlQ4_0) d = Within(T::k.scales, Divide(extreme, -8.f));
      if (T::k.ggml == kGgmlIq4Nl && Abs(extreme) >= kLeast) d = Divide(extreme, Value(0));
    }
    const float reciprocal = Divide(1.f, d);
    offset_ = min;
    factor_ = reciprocal - reciprocal == 0.f ? reciprocal : 0.f;
    // Nothing is left of such a group.
    const bool vanishes = T::k.ggml == kGgmlIq4Nl && factor_ == 0.f;
    has_codes_ = finite && !vanishes;
    if (T::k.ggml == kGgmlIq4Nl) d = Fit(x, counts, d);
    parameters_.scale = finite ? (vanishes ? 0.f : AsStored(T::k.scales, d)) : QuietNan();
    parameters_.zero_point = 0.f;
    if (T::k.ggml == kGgmlQ4_1 && finite) {
      parameters_.zero_point = AsStored(T::k.zero_points, -(min + 0.f));
    }
  }

  KVANT_DEVICE const ComputedParameters& parameters() const { return parameters_; }

  KVANT_DEVICE PackedRun Encode(const float (&x)[kRun]) const {
    PackedRun run;
    KVANT_UNROLL
    for (i32 i = 0; i < kRun; ++i) {
      const i32 bits = BitsOf(T::k.codes);
      if (has_codes_) run.Set(bits, i, Code(x[i]) & ((1u << bits) - 1));
    }
    return run;
  }

 private:
  static constexpr float kLeast = 1e-15f;  // GROUP_MAX_EPS: less is nothing, for iq4_nl

  KVANT_DEVICE static float WithSignOf(float x, double magnitude) {
    return AsFloat(AsBits(static_cast<float>(magnitude)) | (AsBits(x) & 0x80000000u));
  }
  // x, or the largest number with its sign where x would be infinite.
  KVANT_DEVICE static float Within(i32 type, float x) {
    return RoundTo(type, Abs(x)) <= LargestFinite(type) ? x : WithSignOf(x, LargestFinite(type));
  }
  // With its sign, that of 0 included.
  KVANT_DEVICE static float AsStored(i32 type, float x) {
    return WithSignOf(x, RoundTo(type, Abs(Within(type, x))));
  }

  // Of the codebook, whose numbers follow its tree.
  KVANT_DEVICE static float Value(u32 code) {
    const i32 at = (2 << T::k.codebook_bits) + static_cast<i32>(code);
    return AsFloat(LoadShared32(SharedBase() + 4 * at));
  }

  // The first of the elements of the largest magnitude, with its sign; 0 has none.
  KVANT_DEVICE static float Extreme(const Numbers& x, const i32 (&counts)[T::kMax.lane_runs],
                                    float largest) {
    const i32 lanes = T::k.lanes, lane = LaneIndex() % lanes;
    u32 first = ~0u;  // twice its index, and 1 if it is negative
    KVANT_UNROLL
    for (i32 r = 0; r < T::k.lane_runs; ++r) {
      KVANT_UNROLL
      for (i32 i = 0; i < kRun; ++i) {
        const u32 index = static_cast<u32>((r * lanes + lane) * kRun + i);
        const u32 key = 2 * index + (x[r][i] < 0.f ? 1 : 0);
        if (i < counts[r] && Abs(x[r][i]) == largest && key < first) first = key;
      }
    }
    KVANT_UNROLL
    for (i32 mask = lanes / 2; mask > 0; mask /= 2) {
      const u32 other = ShuffleXor(first, mask);
      first = other < first ? other : first;
    }
    return largest == 0.f ? 0.f : first % 2 == 1 ? -largest : largest;
  }

  // The scale with which the codes that the factor gives fit best: sums in the order of elements.
  // `d` where they are beyond f32.
  KVANT_DEVICE float Fit(const Numbers& x, const i32 (&counts)[T::kMax.lane_runs], float d) const {
    const i32 lanes = T::k.lanes, lane = LaneIndex() % lanes, first_lane = LaneIndex() - lane;
    float sum_qx = 0.f, sum_qq = 0.f;
    KVANT_UNROLL
    for (i32 r = 0; r < T::k.lane_runs; ++r) {
      float by_x[kRun], by_q[kRun];
      KVANT_UNROLL
      for (i32 i = 0; i < kRun; ++i) {
        const float q = Value(Code(x[r][i])), weighted = RoundedProduct(x[r][i] * x[r][i], q);
        by_x[i] = RoundedProduct(weighted, x[r][i]);
        by_q[i] = RoundedProduct(weighted, q);
      }
      KVANT_NO_UNROLL
      for (i32 turn = 0; turn < lanes; ++turn) {
        KVANT_UNROLL
        for (i32 i = 0; i < kRun; ++i) {
          if (i < counts[r]) {
            sum_qx += by_x[i];
            sum_qq += by_q[i];
          }
        }
        sum_qx = Shuffle(sum_qx, first_lane + turn);
        sum_qq = Shuffle(sum_qq, first_lane + turn);
      }
    }
    if (!(Abs(sum_qx) < Infinity())) return d;
    return sum_qq > 0.f ? Divide(sum_qx, sum_qq) : 0.f;
  }

  KVANT_DEVICE u32 Code(float x) const {
    if (T::k.ggml == kGgmlQ4_1) x -= offset_;
    const float product = RoundedProduct(x, factor_);
    // Beyond the codes only where the scale or minimum is the largest of its type.
    const auto within = [&](float low, float high) { return Min(Max(product, low), high); };
    switch (T::k.ggml) {
      case kGgmlQ8_0: {
        // Halves away from 0.
        const float most = within(-128.f, 127.f), even = RoundEven(most), rest = most - even;
        i32 code = static_cast<i32>(even);
        if (most > 0.f && rest >= 0.5f) ++code;
        if (most < 0.f && rest <= -0.5f) --code;
        return static_cast<u32>(code);
      }
      case kGgmlQ4_0:
        return static_cast<u32>(MinOf(15, static_cast<i32>(within(-8.f, 8.f) + 8.5f)) - 8);
      case kGgmlQ4_1:
        return static_cast<u32>(static_cast<i32>(within(0.f, 15.f) + 0.5f));
      default:
        return Coder<T>::NearestEntry(product);
    }
  }

  float factor_, offset_;
  bool has_codes_;
  ComputedParameters parameters_;
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_GGML_GROUPS_H_
