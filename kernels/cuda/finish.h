// From the states of warps, then of splits, to what is stored.
//
// A state is of the M rows of a block: max[M], sum[M], out[M][v_block], all f32. States of warps
// lie in shared memory, those of splits in AttentionParams::partials. They are joined in order, so
// that the result does not depend on which block comes last.
#ifndef KVANT_KERNELS_CUDA_FINISH_H_
#define KVANT_KERNELS_CUDA_FINISH_H_

#include "kvant/kernels/cuda/dropout.h"
#include "kvant/kernels/cuda/online_softmax.h"

namespace kvant::cuda {

KVANT_DEVICE float LoadSharedFloat(SharedAddress at) { return AsFloat(LoadShared32(at)); }
KVANT_DEVICE void StoreSharedFloat(SharedAddress at, float x) { StoreShared32(at, AsBits(x)); }

// What a block computes: rows [row, row + M) of those that share K and V.
struct BlockRows {
  i32 b0, b1, b2;  // b2: of all rows where K and V vary over it, else 0
  i32 row, rows;   // rows: fewer than M in the last tile
  bool split_b2;

  // Of local row r; of one that exists where r is beyond the last.
  KVANT_DEVICE Position At(const AttentionParams& p, i32 r) const {
    const i32 index = row + MinOf(r, rows - 1);
    if (split_b2) return {b0, b1, b2, index};
    return {b0, b1, index / p.q_len, index % p.q_len};
  }
};

KVANT_DEVICE float RoundedCode(i32 type, const RoundingParams& rounding, float value) {
  const float scaled = Divide(value, rounding.scale);
  const bool integer = BitsOf(type) <= 8 && type != kFloat8E4M3 && type != kFloat8E5M2;
  return (integer ? RoundEven(scaled) : scaled) + rounding.zero_point;
}

template <class T>
struct Finish {
  KVANT_DEVICE static i32 Rows() {
    return T::k.kernel == kCodesKernel ? T::k.row_blocks * 8 : T::k.row_warps * 16;
  }
  // Floats of a state, in shared memory and in partials.
  KVANT_DEVICE static i32 StateFloats() { return Rows() * (T::k.v_block + 2); }

  // Joins `count` states: state(i, f) is float f of the i-th. The first in shared memory becomes
  // the result; `factors` has room for count x Rows() floats there. All threads.
  template <class Load>
  KVANT_DEVICE static void Join(i32 count, SharedAddress first, SharedAddress factors, Load state) {
    const i32 rows = Rows();
    float max = -Infinity(), sum = 0.f;
    if (ThreadIndex() < rows) {
      const i32 r = ThreadIndex();
      // Written so that a NaN on either side is kept, in max or in sum.
      for (i32 i = 0; i < count; ++i) {
        const float other = state(i, r);
        max = other > max ? other : max;
      }
      for (i32 i = 0; i < count; ++i) {
        const float factor = ExpAbove(state(i, r), max);
        sum += factor * state(i, rows + r);
        StoreSharedFloat(factors + (i * rows + r) * 4, factor);
      }
    }
    BlockSync();
    if (ThreadIndex() < rows) {
      StoreSharedFloat(first + ThreadIndex() * 4, max);
      StoreSharedFloat(first + (rows + ThreadIndex()) * 4, sum);
    }
    for (i32 at = ThreadIndex(); at < rows * T::k.v_block; at += BlockThreads()) {
      const i32 r = at / T::k.v_block;
      float out = 0.f;
      for (i32 i = 0; i < count; ++i) {
        const float factor = LoadSharedFloat(factors + (i * rows + r) * 4);
        out = Fma(state(i, 2 * rows + at), factor, out);
      }
      StoreSharedFloat(first + (2 * rows + at) * 4, out);
    }
    BlockSync();
  }

  // Leaves the block's state in partials. Whether this is the last of its splits; if so, the state
  // of them all is in shared memory.
  KVANT_DEVICE static bool JoinSplits(const AttentionParams& p, i64 tile, i32 split,
                                      SharedAddress first, SharedAddress factors) {
    float* partials = p.partials + tile * p.splits * StateFloats();
    for (i32 at = ThreadIndex(); at < StateFloats(); at += BlockThreads()) {
      Store(partials + static_cast<i64>(split) * StateFloats() + at,
            LoadSharedFloat(first + at * 4));
    }
    Fence();
    BlockSync();
    if (ThreadIndex() == 0) {
      const u32 done = AtomicIncrement(p.done + tile, static_cast<u32>(p.splits - 1));
      StoreShared32(factors, done);
    }
    BlockSync();
    const bool last = LoadShared32(factors) == static_cast<u32>(p.splits - 1);
    if (!last) return false;
    Fence();
    BlockSync();
    Join(p.splits, first, factors, [&](i32 i, i32 at) {
      return LoadCoherent(partials + static_cast<i64>(i) * StateFloats() + at);
    });
    return true;
  }

  // A logit that joins the denominator only. max and sum: of a row; returns what its output and sum
  // shrink by.
  KVANT_DEVICE static float AddSink(const AttentionParams& p, const Position& at, float& max,
                                    float& sum) {
    if (T::k.sinks.type == kNone) return 1.f;
    const float sink = LoadElement(T::k.sinks.type, p.sinks.data, IndexOf(p.sinks, at));
    if (sink == -Infinity()) return 1.f;
    const float top = sink > max ? sink : max;
    const float factor = ExpAbove(max, top);
    sum = sum * factor + ExpAbove(sink, top);
    max = top;
    return factor;
  }

  // Stores rows of the state at `first`. final: probabilities were, and sinks are in the sums.
  KVANT_DEVICE static void StoreRows(const AttentionParams& p, const BlockRows& block, i32 channel,
                                     SharedAddress first, bool final) {
    const i32 rows = Rows();
    const float of_empty = T::k.inf_as_zero ? 0.f : QuietNan();
    for (i32 at = ThreadIndex(); at < block.rows * T::k.v_block; at += BlockThreads()) {
      const i32 r = at / T::k.v_block, d = channel + at % T::k.v_block;
      float max = LoadSharedFloat(first + r * 4);
      float sum = LoadSharedFloat(first + (rows + r) * 4);
      const Position position = block.At(p, r);
      const float factor = final ? 1.f : AddSink(p, position, max, sum);
      const bool empty = max == -Infinity() && sum == 0.f;
      if (at % T::k.v_block == 0 && channel == 0 && T::k.stats.type != kNone) {
        StoreElement(T::k.stats.type, p.stats.data, IndexOf(p.stats, position, 0),
                     empty ? of_empty : max + Log(sum));
      }
      if (d >= T::k.v_head_size) continue;
      float out = LoadSharedFloat(first + (2 * rows + at) * 4) * factor;
      if (!final) out = Divide(out, sum);
      if (empty) out = of_empty;
      if (T::k.rounds_output) out = RoundedCode(T::k.output.type, p.output_rounding, out);
      StoreElement(T::k.output.type, p.output.data, IndexOf(p.output, position, d), out);
    }
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_FINISH_H_
