// Of attention in parts: the parts' outputs become one.
//
// In AttentionParams::partials, f32: of each part the outputs [b0, b1, b2, q_len, v_head_size], and
// behind them for each row the maximum of its scores and the sum of their exponentials above it
// (AttentionTraits::stats_are_states).
#ifndef KVANT_KERNELS_CUDA_ATTENTION_JOIN_H_
#define KVANT_KERNELS_CUDA_ATTENTION_JOIN_H_

#include "kvant/kernels/cuda/finish.h"

namespace kvant::cuda {

inline constexpr i32 kAttentionParts = 2;

// A thread for each number of the output.
template <class T>
class AttentionJoin {
 public:
  KVANT_DEVICE static void Run(const AttentionParams& p) {
    const i64 rows = i64{p.batch[0]} * p.batch[1] * p.batch[2] * p.q_len;
    const i64 thread = BlockIndex() * BlockThreads() + ThreadIndex();
    const i64 row = thread / T::k.v_head_size;
    if (row >= rows) return;
    const i32 d = static_cast<i32>(thread - row * T::k.v_head_size);
    const Position at = PositionOf(p, row);
    const i64 part_floats = rows * (T::k.v_head_size + 2);
    float max = -Infinity(), sum = 0.f, out = 0.f;
    float maxima[kAttentionParts];
    KVANT_UNROLL
    for (i32 part = 0; part < kAttentionParts; ++part) {
      maxima[part] = Load(States(p, part, part_floats, rows) + row * 2);
      max = maxima[part] > max ? maxima[part] : max;
    }
    KVANT_UNROLL
    for (i32 part = 0; part < kAttentionParts; ++part) {
      const float of = Load(States(p, part, part_floats, rows) + row * 2 + 1);
      // What a part without a score has is 0, and a NaN is kept.
      const float weight = ExpAbove(maxima[part], max) * of;
      sum += weight;
      out = Fma(weight, Load(p.partials + part * part_floats + thread), out);
    }
    const float factor = Finish<T>::AddSink(p, at, max, sum);
    const bool empty = max == -Infinity() && sum == 0.f;
    const float of_empty = T::k.inf_as_zero ? 0.f : QuietNan();
    if (d == 0 && T::k.stats.type != kNone) {
      StoreElement(T::k.stats.type, p.stats.data, IndexOf(T::k.stats, p.stats, at, 0),
                   empty ? Finish<T>::StatsOfEmpty() : max + Log(sum));
    }
    float value = empty ? of_empty : Divide(out * factor, sum);
    if (T::k.rounds_output) value = RoundedCode(T::k.output.type, p.output_rounding, value);
    StoreElement(T::k.output.type, p.output.data, IndexOf(T::k.output, p.output, at, d), value);
  }

 private:
  KVANT_DEVICE static const float* States(const AttentionParams& p, i32 part, i64 part_floats,
                                          i64 rows) {
    return p.partials + part * part_floats + rows * T::k.v_head_size;
  }
  KVANT_DEVICE static Position PositionOf(const AttentionParams& p, i64 row) {
    Position at;
    i64 rest = row / p.q_len;
    at.row = static_cast<i32>(row - rest * p.q_len);
    at.b2 = static_cast<i32>(rest % p.batch[2]);
    rest /= p.batch[2];
    at.b1 = static_cast<i32>(rest % p.batch[1]);
    at.b0 = static_cast<i32>(rest / p.batch[1]);
    return at;
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_ATTENTION_JOIN_H_
