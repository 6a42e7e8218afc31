// From the states of warps, then of splits, to what is stored.
//
// A state is of the M rows of a block: max[M], sum[M], out[M][v_block], all f32. States of warps
// lie in shared memory, those of splits in AttentionParams::partials. They are joined in order, so
// that the result does not depend on which block comes last. Parts leave rows as states of their
// own (LeftRows), of which attention_parts.h makes the output.
#ifndef KVANT_KERNELS_CUDA_FINISH_H_
#define KVANT_KERNELS_CUDA_FINISH_H_

#include "kvant/kernels/cuda/dropout.h"
#include "kvant/kernels/cuda/online_softmax.h"
#include "kvant/kernels/cuda/rotation.h"

namespace kvant::cuda {

KVANT_DEVICE float LoadSharedFloat(SharedAddress at) { return AsFloat(LoadShared32(at)); }
KVANT_DEVICE void StoreSharedFloat(SharedAddress at, float x) { StoreShared32(at, AsBits(x)); }

// What a block computes: rows [row, row + M) of those that share K and V.
struct BlockRows {
  i32 b0, b1, b2;  // b2: of all rows where K and V vary over it, else 0
  i32 row, rows;   // rows: fewer than M in the last tile
  i32 q_first, q_len;
  bool split_b2;

  // Of local row r; of one that exists where r is beyond the last.
  KVANT_DEVICE Position At(i32 r) const {
    const i32 index = row + MinOf(r, rows - 1);
    if (split_b2) return {b0, b1, b2, q_first + index};
    return {b0, b1, index / q_len, q_first + index % q_len};
  }
};

KVANT_DEVICE float RoundedCode(i32 type, const RoundingParams& rounding, float value) {
  const float scaled = Divide(value, rounding.scale);
  const bool integer = BitsOf(type) <= 8 && !IsF8(type);
  const float code = (integer ? RoundEven(scaled) : scaled) + rounding.zero_point;
  return IsF8(type) ? SaturateF8(type, value, code) : code;
}

// What a part has of rows [b0, b1, b2, q_len], in AttentionParams::partials: {max, sum} of each,
// then outputs [v_head_size]. Written by one block and read by another.
struct LeftRows {
  float *states, *outputs;

  KVANT_DEVICE static LeftRows Of(const AttentionParams& p, i32 part, i32 v_head_size) {
    const i64 rows = i64{p.batch[0]} * p.batch[1] * p.batch[2] * p.q_len;
    float* const states = p.partials + (part == kCodesPart ? 0 : rows * (v_head_size + 2));
    return {states, states + 2 * rows};
  }
};

template <class T>
struct Finish {
  KVANT_DEVICE static i32 Rows() { return RowsOf(T::k); }
  // Floats of a state, in shared memory and in partials.
  KVANT_DEVICE static i32 StateFloats() { return Rows() * (T::k.v_block + 2); }

  // What joining `count` states takes beside them, in shared memory.
  KVANT_DEVICE static constexpr i32 FactorBytes(i32 rows, i32 count) { return rows * count * 8; }

  // Joins the states of the block's `count` warps. They lie one after the other from `first` on,
  // where the result comes. All threads.
  KVANT_DEVICE static void JoinWarps(i32 count, SharedAddress first, SharedAddress factors) {
    Join(count, first, factors,
         [&](i32 i, i32 at) { return LoadSharedFloat(first + (i * StateFloats() + at) * 4); });
  }

  // Leaves what the state at `first` has of the block's rows and channels. All threads.
  KVANT_DEVICE static void LeaveRows(const AttentionParams& p, const BlockRows& block, i32 channel,
                                     SharedAddress first) {
    const LeftRows left = LeftRows::Of(p, T::k.part, T::k.v_head_size);
    const i64 above = RowsAbove(p, block);
    const i32 rows = Rows();
    for (i32 at = ThreadIndex(); channel == 0 && at < 2 * block.rows; at += BlockThreads()) {
      device::Store(left.states + above * 2 + at,
                    LoadSharedFloat(first + (at % 2 * rows + at / 2) * 4));
    }
    for (i32 at = ThreadIndex(); at < block.rows * T::k.v_block; at += BlockThreads()) {
      const i32 r = at / T::k.v_block, d = channel + at % T::k.v_block;
      if (d >= T::k.v_head_size) continue;
      device::Store(left.outputs + (above + r) * T::k.v_head_size + d,
                    LoadSharedFloat(first + (2 * rows + at) * 4));
    }
  }

  // The state at `first` becomes that of both parts. All threads.
  KVANT_DEVICE static void JoinParts(const AttentionParams& p, const BlockRows& block, i32 channel,
                                     SharedAddress first, SharedAddress factors) {
    const i32 rows = Rows();
    const i64 above = RowsAbove(p, block);
    Join(kParts, first, factors, [&](i32 i, i32 at) {
      const LeftRows left = LeftRows::Of(p, i == 0 ? kOthersPart : kCodesPart, T::k.v_head_size);
      // Beyond the last, of one that exists, as BlockRows::At.
      const auto row = [&](i32 r) { return above + MinOf(r, block.rows - 1); };
      if (at < 2 * rows) return LoadCoherent(left.states + row(at % rows) * 2 + at / rows);
      const i32 r = (at - 2 * rows) / T::k.v_block;
      const i32 d = channel + (at - 2 * rows) % T::k.v_block;
      const i64 from = row(r) * T::k.v_head_size + d;
      return d < T::k.v_head_size ? LoadCoherent(left.outputs + from) : 0.f;
    });
  }

  // Whether this block is the last of `count` that count at `done`, and so sees what all of them
  // stored. word: of shared memory, for all threads.
  KVANT_DEVICE static bool IsLast(u32* done, i32 count, SharedAddress word) {
    Fence();
    BlockSync();
    if (ThreadIndex() == 0) {
      StoreShared32(word, AtomicIncrement(done, static_cast<u32>(count - 1)));
    }
    BlockSync();
    const bool last = LoadShared32(word) == static_cast<u32>(count - 1);
    if (!last) return false;
    Fence();
    BlockSync();
    return true;
  }

  // Leaves the block's state in partials, as the `split`-th of `count`, which are those of `tile`
  // and begin with the `state`-th of the kind. Whether this is the last of them; if so, the state
  // of them all is in shared memory.
  KVANT_DEVICE static bool JoinSplits(const AttentionParams& p, i64 state, i32 split, i32 count,
                                      i64 tile, SharedAddress first, SharedAddress factors) {
    const i32 floats = StateFloats(), rows = Rows();
    float* const partials = p.partials + SplitOf<T>(p).partials + state * floats;
    for (i32 at = ThreadIndex(); at < floats; at += BlockThreads()) {
      device::Store(partials + static_cast<i64>(split) * floats + at,
                    LoadSharedFloat(first + at * 4));
    }
    if (!IsLast(p.done + SplitOf<T>(p).done + tile, count, factors)) return false;
    FindFactors(count, first, factors, [&](i32 i, i32 at) {
      return LoadCoherent(partials + static_cast<i64>(i) * floats + at);
    });
    for (i32 at = ThreadIndex() * 4; at < rows * T::k.v_block; at += BlockThreads() * 4) {
      JoinFour(partials + 2 * rows + at, count, factors + at / T::k.v_block * 4,
               first + (2 * rows + at) * 4);
    }
    BlockSync();
    return true;
  }

  // Statistics of a row without a score.
  KVANT_DEVICE static float StatsOfEmpty() {
    if (!T::k.inf_as_zero) return QuietNan();
    return T::k.empty_is_ln0 ? -Infinity() : 0.f;
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
    if (T::k.output_hadamard != 0) return StoreRotatedRows(p, block, channel, first, final);
    for (i32 at = ThreadIndex(); at < block.rows * T::k.v_block; at += BlockThreads()) {
      const i32 r = at / T::k.v_block, i = at % T::k.v_block;
      const RowEnd row = EndOf(p, block, first, r, final);
      if (i == 0 && channel == 0) StoreStats(p, row);
      if (channel + i >= T::k.v_head_size) continue;
      Store(p, row, channel + i, Output(first, row, r, i, final));
    }
  }

 private:
  // Of all rows [b0, b1, b2, q_len], how many come before the block's.
  KVANT_DEVICE static i64 RowsAbove(const AttentionParams& p, const BlockRows& block) {
    i64 group = i64{block.b0} * p.batch[1] + block.b1;
    if (block.split_b2) group = group * p.batch[2] + block.b2;
    return group * p.rows + block.row;
  }

  static constexpr i32 kSlots = CeilDiv(MaxOf(T::kMax.v_block, T::kMax.v_head_size), 32);

  // Of a row: what its output is multiplied with, and then divided by.
  struct RowEnd {
    Position position;
    float max, sum, factor;
    bool empty;
  };
  KVANT_DEVICE static RowEnd EndOf(const AttentionParams& p, const BlockRows& block,
                                   SharedAddress first, i32 r, bool final) {
    RowEnd row;
    row.max = LoadSharedFloat(first + r * 4);
    row.sum = LoadSharedFloat(first + (Rows() + r) * 4);
    row.position = block.At(r);
    row.factor = final ? 1.f : AddSink(p, row.position, row.max, row.sum);
    row.empty = row.max == -Infinity() && row.sum == 0.f;
    return row;
  }
  // NaN, as an integer code, is 0.
  KVANT_DEVICE static float OfEmpty() {
    const bool codes = T::k.probs_type != kNone && !IsF8(T::k.probs_type);
    return T::k.inf_as_zero || codes ? 0.f : QuietNan();
  }

  KVANT_DEVICE static void StoreStats(const AttentionParams& p, const RowEnd& row) {
    if (T::k.stats.type == kNone) return;
    StoreElement(T::k.stats.type, p.stats.data, IndexOf(T::k.stats, p.stats, row.position, 0),
                 row.empty ? StatsOfEmpty() : row.max + Log(row.sum));
  }
  // Channel i of the block's.
  KVANT_DEVICE static float Output(SharedAddress first, const RowEnd& row, i32 r, i32 i,
                                   bool final) {
    const i32 at = 2 * Rows() + r * T::k.v_block + i;
    float out = LoadSharedFloat(first + at * 4) * row.factor;
    if (!final) out = Divide(out, row.sum);
    return row.empty ? OfEmpty() : out;
  }
  KVANT_DEVICE static void Store(const AttentionParams& p, const RowEnd& row, i32 d, float out) {
    if (T::k.rounds_output) out = RoundedCode(T::k.output.type, p.output_rounding, out);
    StoreElement(T::k.output.type, p.output.data, IndexOf(T::k.output, p.output, row.position, d),
                 out);
  }

  KVANT_DEVICE static void StoreRotatedRows(const AttentionParams& p, const BlockRows& block,
                                            i32 channel, SharedAddress first, bool final) {
    KVANT_NO_UNROLL
    for (i32 r = WarpIndex(); r < block.rows; r += BlockThreads() / 32) {
      const RowEnd row = EndOf(p, block, first, r, final);
      if (LaneIndex() == 0 && channel == 0) StoreStats(p, row);
      float x[kSlots];
      KVANT_UNROLL
      for (i32 s = 0; s < kSlots; ++s) {
        const i32 i = s * 32 + LaneIndex();
        x[s] = i < T::k.v_block ? Output(first, row, r, i, final) : 0.f;
      }
      Rotate(T::k.output_hadamard, 1.f / RootOf(T::k.output_hadamard), x);
      KVANT_UNROLL
      for (i32 s = 0; s < kSlots; ++s) {
        const i32 i = s * 32 + LaneIndex();
        if (i < T::k.v_block && channel + i < T::k.v_head_size) Store(p, row, channel + i, x[s]);
      }
    }
  }

  // Joins `count` states, of which state(i, at) gives the numbers, into the one at `first`.
  template <class State>
  KVANT_DEVICE static void Join(i32 count, SharedAddress first, SharedAddress factors,
                                State state) {
    FindFactors(count, first, factors, state);
    const i32 rows = Rows();
    for (i32 at = ThreadIndex(); at < rows * T::k.v_block; at += BlockThreads()) {
      float out = 0.f;
      for (i32 i = 0; i < count; ++i) {
        const float factor = LoadSharedFloat(factors + (i * rows + at / T::k.v_block) * 4);
        out = Fma(state(i, 2 * rows + at), factor, out);
      }
      StoreSharedFloat(first + (2 * rows + at) * 4, out);
    }
    BlockSync();
  }

  // What each state shrinks by; their maximum and sum to the first state in shared memory. The
  // states' own are read by all threads at once, because they are far.
  template <class Load>
  KVANT_DEVICE static void FindFactors(i32 count, SharedAddress first, SharedAddress factors,
                                       Load state) {
    const i32 rows = Rows();
    const SharedAddress sums = factors + rows * count * 4;
    for (i32 at = ThreadIndex(); at < rows * count; at += BlockThreads()) {
      StoreSharedFloat(factors + at * 4, state(at / rows, at % rows));
      StoreSharedFloat(sums + at * 4, state(at / rows, rows + at % rows));
    }
    BlockSync();
    if (ThreadIndex() < rows) {
      const i32 r = ThreadIndex();
      float max = -Infinity(), sum = 0.f;
      // Written so that a NaN on either side is kept, in max or in sum.
      for (i32 i = 0; i < count; ++i) {
        const float other = LoadSharedFloat(factors + (i * rows + r) * 4);
        max = other > max ? other : max;
      }
      for (i32 i = 0; i < count; ++i) {
        const SharedAddress at = (i * rows + r) * 4;
        const float factor = ExpAbove(LoadSharedFloat(factors + at), max);
        sum += factor * LoadSharedFloat(sums + at);
        StoreSharedFloat(factors + at, factor);
      }
      StoreSharedFloat(first + r * 4, max);
      StoreSharedFloat(first + (rows + r) * 4, sum);
    }
    BlockSync();
  }

  // Four floats of `count` states at once; kBatch states are asked for before the first is needed.
  KVANT_DEVICE static void JoinFour(const float* from, i32 count, SharedAddress factors,
                                    SharedAddress to) {
    constexpr i32 kBatch = 8;
    float out[4] = {};
    KVANT_NO_UNROLL
    for (i32 first = 0; first < count; first += kBatch) {
      Words4 x[kBatch];
      KVANT_UNROLL
      for (i32 i = 0; i < kBatch; ++i) {
        const i64 state = MinOf(first + i, count - 1);
        x[i] = LoadCoherent(reinterpret_cast<const Words4*>(from + state * StateFloats()));
      }
      KVANT_UNROLL
      for (i32 i = 0; i < kBatch; ++i) {
        if (first + i >= count) break;
        const float factor = LoadSharedFloat(factors + (first + i) * Rows() * 4);
        KVANT_UNROLL
        for (i32 e = 0; e < 4; ++e) out[e] = Fma(AsFloat(x[i].v[e]), factor, out[e]);
      }
    }
    KVANT_UNROLL
    for (i32 e = 0; e < 4; ++e) StoreSharedFloat(to + e * 4, out[e]);
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_FINISH_H_
