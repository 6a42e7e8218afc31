// Attention over packed codes, for few rows of queries: K and V are read once, and go from a warp's
// ring in shared memory (codes_ring.h) straight into tensor cores (codes_keys.h, codes_values.h).
// Nothing is dequantized: scales and zero points are applied to scores and probabilities. A warp
// that finds in the end that its tokens lost too much by that does them once more (codes_exact.h).
//
//   block = (b0, b1[, b2]) x 8 row_blocks rows x split of the tokens
//   warp  = every token_warps-th tile of the split, all rows
//           (of large heads: all tiles, a slice of their channels; codes_slices.h)
//     queries to registers, as B operands
//     for every tile: scores, steps, online softmax, output += V^T P
//   join warps, then splits (the last block to come), normalise, store
//
// The softmax is in powers of two and by a reference that lags behind the maximum, so that most
// tiles need no maximum of all lanes and no rescaling:
//
//   p = 2^((score - reference) log2 e + top)
//
// reference: the maximum when it was last set. It is set again where a score is beyond it by more
// than kSlack. top: as large as f16 has room for beside scales, so that small ones keep their bits.
#ifndef KVANT_KERNELS_CUDA_ATTENTION_CODES_H_
#define KVANT_KERNELS_CUDA_ATTENTION_CODES_H_

#include "kvant/kernels/cuda/codes_exact.h"
#include "kvant/kernels/cuda/codes_values.h"
#include "kvant/kernels/cuda/finish.h"
#include "kvant/kernels/cuda/score_steps.h"

namespace kvant::cuda {

// Shared memory of a block: what the block computes, rotated queries, codebooks, scores that warps
// exchange; then rings, and once they are done with, states of warps, what warps need that do their
// tokens once more, and factors.
struct CodesShared {
  i32 k_codebook, v_codebook, exchange, rings, exact, factors, bytes;

  // splits: the most that a sequence may have.
  KVANT_DEVICE static constexpr CodesShared Of(const AttentionTraits& t, i32 splits) {
    const i32 rows = t.row_blocks * 8;
    const i32 warps = t.token_warps * t.channel_warps;
    const i32 rings = warps * t.stages * CodesLayout::Of(t).stage_bytes;
    const i32 states = t.token_warps * rows * (t.v_head_size + 2) * 4;
    const i32 joined = MaxOf(splits, t.token_warps);
    const i32 exact = CeilDiv(states, 16) * 16;
    const i32 factors = exact + warps * ExactShared::kBytes;
    const i32 k_codebook = kWorkBytes + (t.q_hadamard != 0 ? rows * t.head_size * 4 : 0);
    const i32 of_k = t.k[0].codebook != 0 ? CodebookTable::kBytes : 0;
    const i32 v_codebook = k_codebook + (t.one_codebook ? 0 : of_k);
    const i32 exchange = v_codebook + (t.v[0].codebook != 0 ? CodebookTable::kBytes : 0);
    const i32 first = exchange + ExchangeBytes(t);
    return {k_codebook,
            v_codebook,
            exchange,
            first,
            first + exact,
            first + factors,
            first + MaxOf(rings, factors + rows * joined * 8)};
  }
};

template <class T>
class AttentionCodes {
 public:
  KVANT_DEVICE static void Run(const AttentionParams& p) { AttentionCodes(p).Run(); }
  // Whether this is the block that has left rows of a part, and which.
  KVANT_DEVICE static bool RunPart(const AttentionParams& p, BlockRows& rows) {
    AttentionCodes part(p);
    if (!part.Run()) return false;
    rows = Work::Load(p, part.work_).rows;
    return true;
  }

 private:
  using Ring = CodesRing<T>;
  using Keys = CodesKeys<T>;
  using Values = CodesValues<T>;
  using Steps = RowSteps<T>;
  using Ending = Finish<T>;
  using Work = CodesWork<T>;
  using Slice = WarpSlice<T>;
  using Scores = typename Keys::Scores;
  static constexpr i32 kRowBlocks = T::kMax.row_blocks;
  static constexpr float kSlack = 4.f;
  // V's scales, normalised, may be up to 2^16 / 2^(Top() + kSlack).
  KVANT_DEVICE static float Top() { return Values::Format().scale_type == kNone ? 11.f : 5.f; }
  // What scores, and the output, may lose.
  KVANT_DEVICE static float ScoreLimit() { return T::k.arithmetic == kByF32 ? 4e-5f : 1e-3f; }
  KVANT_DEVICE static float OutputLimit() { return T::k.arithmetic == kByF32 ? 1e-5f : 5e-4f; }

  // Of rows 2c and 2c + 1 of each row block.
  struct State {
    float add[kRowBlocks][2];    // top - reference, or in scores' units -reference (Exponent)
    float limit[kRowBlocks][2];  // scores beyond it move the reference; -inf: there was none yet
    float sum[kRowBlocks][2];    // of this lane's tokens
  };

  KVANT_DEVICE explicit AttentionCodes(const AttentionParams& p)
      : p_(p),
        work_(SharedBase()),
        shared_(SharedBase() + static_cast<u32>(CodesShared::Of(T::k, 1).rings)) {}

  // Whether its rows end in this block.
  KVANT_DEVICE bool Run() {
    if (WarpIndex() == 0) Work::Find(p_, work_);
    if (T::k.k[0].codebook != 0) CodebookTable::Fill(KeySegment<T>(p_), 1.f, KCodebook());
    if (T::k.v[0].codebook != 0 && !T::k.one_codebook) {
      CodebookTable::Fill(ValueSegment<T>(p_), 1.f, VCodebook());
    }
    BlockSync();
    if (Work::Load(p_, work_).rows.b0 >= p_.batch[0]) return false;
    if (T::k.q_hadamard != 0) RotateQueries();
    State state;
    Values values(Common(T::k.v[0], ValueSegment<T>(p_)).zero_point, VCodebook());
    const WarpTokens tokens = MultiplyAll(state, values);
    return End(state, values, tokens);
  }

  // A warp's, tiles apart; and whether too much of them was lost.
  struct WarpTokens {
    i32 first, end;
    bool lost;
  };

  KVANT_DEVICE WarpTokens MultiplyAll(State& state, Values& values) const {
    const Work work = Work::Load(p_, work_);
    const i32 kv_len = work.kv_len;
    const LiveColumns live = FindLive(work.rows, kv_len);
    const i32 lead = work.Lead();
    const i32 first = (live.any.begin + lead) / T::k.warp_tile;
    const i32 last = CeilDiv(live.any.end + lead, T::k.warp_tile);
    const i32 count = live.any.begin < live.any.end ? last - first : 0;
    const i32 share = CeilDiv(count, work.splits);
    const i32 begin = first + MinOf(count, work.split * share);
    const i32 end = first + MinOf(count, (work.split + 1) * share);
    const ColumnRange tokens{begin * T::k.warp_tile, MinOf(end * T::k.warp_tile, kv_len + lead)};
    Keys keys(p_, work.rows, OnlyScaled() ? Multiplier() * kLog2E : 1.f,
              Common(T::k.k[0], KeySegment<T>(p_)), Rotated(), KCodebook());
    Sweep(keys, tokens, lead, live.all, kv_len, state, values);
    // Scores of NaN alone have moved no limit.
    const auto saw_any = [&](i32 rb, i32 h) {
      const float sum = state.sum[rb][h];
      return state.limit[rb][h] > -Infinity() || !(sum == sum);
    };
    const float limit = ScoreLimit() / static_cast<float>(T::k.channel_warps);
    bool lost = keys.Loses(OnlyScaled() ? 1.f : Multiplier(), limit);
    const Position at{work.rows.b0, work.rows.b1, work.rows.b2, 0};
    const auto of_channel = [&](i32 d) {
      const SegmentParams& v = ValueSegment<T>(p_);
      return LoadElement(T::k.v[0].scales.type, v.scales.data,
                         GroupIndex(T::k.v[0], T::k.v[0].scales, v.scales, at, d));
    };
    lost |= values.Complete(Common(T::k.v[0], ValueSegment<T>(p_)).scale, of_channel,
                            CeilDiv(tokens.end - tokens.begin, T::k.token_warps), saw_any,
                            OutputLimit());
    return {tokens.begin + Slice::TokenWarp() * T::k.warp_tile, tokens.end, Any(lost)};
  }

  KVANT_DEVICE SharedAddress KCodebook() const {
    return work_ + static_cast<u32>(CodesShared::Of(T::k, 1).k_codebook);
  }
  KVANT_DEVICE SharedAddress VCodebook() const {
    return work_ + static_cast<u32>(CodesShared::Of(T::k, 1).v_codebook);
  }
  KVANT_DEVICE SharedAddress Rotated() const { return work_ + static_cast<u32>(kWorkBytes); }

  // To shared memory, in f32.
  KVANT_DEVICE void RotateQueries() const {
    constexpr i32 kSlots = CeilDiv(T::kMax.head_size, 32);
    const BlockRows rows = Work::Load(p_, work_).rows;
    KVANT_NO_UNROLL
    for (i32 r = WarpIndex(); r < Ending::Rows(); r += BlockThreads() / 32) {
      const Position at = rows.At(r);
      float x[kSlots];
      KVANT_UNROLL
      for (i32 s = 0; s < kSlots; ++s) {
        const i32 d = s * 32 + LaneIndex();
        x[s] = d < T::k.head_size ? LoadElement(T::k.q.data.type, p_.q.data.data,
                                                IndexOf(T::k.q.data, p_.q.data, at, d))
                                  : 0.f;
      }
      Rotate(T::k.q_hadamard, 1.f / RootOf(T::k.q_hadamard), x);
      KVANT_UNROLL
      for (i32 s = 0; s < kSlots; ++s) {
        const i32 d = s * 32 + LaneIndex();
        if (d >= T::k.head_size) continue;
        StoreSharedFloat(Rotated() + static_cast<u32>((r * T::k.head_size + d) * 4), x[s]);
      }
    }
    BlockSync();
  }

  // Whether all that is done to scores is a factor, and columns that are hidden.
  KVANT_DEVICE static constexpr bool OnlyScaled() {
    bool only = true;
    for (i32 i = 0; i < T::k.step_count; ++i) only &= IsFactor(T::k.steps[i]) || IsHiding(i);
    return only;
  }
  KVANT_DEVICE static constexpr bool IsFactor(const StepTraits& step) {
    return (step.kind == kMultiply || step.kind == kDivide) &&
           (step.operand.type == kNone || step.operand.varies == 0);
  }
  KVANT_DEVICE static constexpr bool IsHiding(i32 i) {
    return T::k.steps[i].kind == kBand && T::k.steps[i].hides;
  }
  KVANT_DEVICE float Multiplier() const {
    float product = 1.f;
    KVANT_UNROLL
    for (i32 i = 0; i < T::k.step_count; ++i) {
      const StepTraits& step = T::k.steps[i];
      if (!IsFactor(step)) continue;
      const Array& operand = p_.steps[i].operand;
      const float x = step.operand.type == kNone
                          ? p_.steps[i].constant
                          : LoadElement(step.operand.type, operand.data, operand.offset);
      product = step.kind == kMultiply ? product * x : Divide(product, x);
    }
    return product;
  }

  // The columns that any row may see, and those that all rows do.
  struct LiveColumns {
    ColumnRange any, all;
  };
  KVANT_DEVICE LiveColumns FindLive(const BlockRows& rows, i32 kv_len) const {
    LiveColumns live{{0, kv_len}, {0, kv_len}};
    if (!Steps::Hides()) return live;
    live.all = Steps(p_, rows.At(LaneIndex()), Extent::Whole(p_, kv_len)).Live();
    const bool any = live.all.begin < live.all.end;
    live.any = {any ? live.all.begin : kv_len, any ? live.all.end : 0};
    KVANT_UNROLL
    for (i32 mask = 1; mask < 32; mask *= 2) {
      live.any.begin = MinOf(live.any.begin, ShuffleXor(live.any.begin, mask));
      live.any.end = MaxOf(live.any.end, ShuffleXor(live.any.end, mask));
      live.all.begin = MaxOf(live.all.begin, ShuffleXor(live.all.begin, mask));
      live.all.end = MinOf(live.all.end, ShuffleXor(live.all.end, mask));
    }
    return live;
  }
  KVANT_DEVICE static i32 ShuffleXor(i32 value, i32 mask) {
    return static_cast<i32>(device::ShuffleXor(static_cast<u32>(value), mask));
  }

  // What all tokens have in common.
  KVANT_DEVICE CommonParameters Common(const SegmentTraits& traits,
                                       const SegmentParams& segment) const {
    const BlockRows rows = Work::Load(p_, work_).rows;
    const Position at{rows.b0, rows.b1, rows.b2, 0};
    CommonParameters common{1.f, 0.f};
    if (traits.codebook != 0) common.scale = Load(segment.codebook + CodebookTable::kFactorAt);
    if (CodeFormat::IsByChannel(traits)) return common;
    if (traits.scales.type != kNone && !CodeFormat::Varies(traits.scales)) {
      common.scale *= LoadElement(traits.scales.type, segment.scales.data,
                                  GroupIndex(traits, traits.scales, segment.scales, at, 0));
    }
    if (traits.zero_points.type != kNone && !CodeFormat::Varies(traits.zero_points)) {
      common.zero_point =
          LoadElement(traits.zero_points.type, segment.zero_points.data,
                      GroupIndex(traits, traits.zero_points, segment.zero_points, at, 0));
    }
    return common;
  }

  // tokens: tiles' columns, of which the first is `lead` before column 0 (CodesWork::Lead).
  KVANT_DEVICE void Sweep(Keys& keys, const ColumnRange& tokens, i32 lead,
                          const ColumnRange& all_live, i32 kv_len, State& state,
                          Values& values) const {
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 h = 0; h < 2; ++h) {
        state.add[rb][h] = state.sum[rb][h] = 0.f;
        state.limit[rb][h] = -Infinity();
      }
    }
    const CodesLayout l = Ring::Layout();
    const i32 warp = WarpIndex(), lane = LaneIndex();
    const SharedAddress begin = shared_ + static_cast<u32>(warp * Ring::RingBytes());
    // Hidden, so that it is not computed anew at every use.
    const SharedAddress k_row = Opaque(begin + static_cast<u32>(l.k.MatrixRow(lane)));
    const SharedAddress v_row = l.k.format.RowBytes() == l.v.format.RowBytes()
                                    ? k_row
                                    : Opaque(begin + static_cast<u32>(l.v.MatrixRow(lane)));
    const i32 first = tokens.begin + Slice::TokenWarp() * T::k.warp_tile;
    ScoreExchange<T> exchange(work_ + static_cast<u32>(CodesShared::Of(T::k, 1).exchange));
    Ring ring(p_, work_, begin, first, tokens.end);
    ring.Wait();
    keys.Clear(begin, first < tokens.end);
    values.Clear(Values::NormalExponent(begin, MaxOf(0, lead - first), tokens.end - first));
    KVANT_NO_UNROLL
    for (i32 token = first; token < tokens.end; token += Ring::Step()) {
      const u32 stage = ring.Next(token);
      const i32 column = token - lead;
      Scores scores;
      if (OnlyScaled()) {
        Multiply(keys, k_row + stage, begin + stage, state.add, exchange, scores);
        if (!WholeTile(column, tokens.end - lead, all_live)) Hide(column, kv_len, scores);
      } else {
        const float none[kRowBlocks][2] = {};
        Multiply(keys, k_row + stage, begin + stage, none, exchange, scores);
        ApplySteps(column, kv_len, scores);
      }
      MoveReference(state, values, scores);
      ForEach(scores, [&](float& x, i32 rb, i32 h) {
        x = Exp2(Exponent(state, x, rb, h));
        state.sum[rb][h] += x;
      });
      values.Add(v_row + stage + static_cast<u32>(l.v_offset), begin + stage, scores);
    }
    CopyAsyncWait<0>();
    WarpSync();
  }

  // scores = multiplier * Q K + add, of all channels.
  KVANT_DEVICE static void Multiply(Keys& keys, SharedAddress at, SharedAddress stage,
                                    const float (&add)[kRowBlocks][2], ScoreExchange<T>& exchange,
                                    Scores& scores) {
    if (!Slice::Shares()) return keys.Multiply(at, stage, add, scores);
    const float none[kRowBlocks][2] = {};
    keys.Multiply(at, stage, none, scores);
    exchange.Add(add, scores);
  }

  // use(x, row block, h): of query 8 rb + 2c + h.
  template <class Use>
  KVANT_DEVICE static void ForEach(Scores& scores, Use use) {
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 j = 0; j < T::k.warp_tile / 16; ++j) {
        KVANT_UNROLL
        for (i32 e = 0; e < 4; ++e) use(scores[rb][j][e], rb, e % 2);
      }
    }
  }

  // Whether all rows see all columns of the tile at `first`.
  KVANT_DEVICE static bool WholeTile(i32 first, i32 end, const ColumnRange& all_live) {
    if (first + T::k.warp_tile > end || (Work::HasLead() && first < 0)) return false;
    return !Steps::Hides() || (first >= all_live.begin && first + T::k.warp_tile <= all_live.end);
  }

  // use(steps, rb, h) for each of the lane's rows.
  template <class Use>
  KVANT_DEVICE void ForEachRow(i32 kv_len, Use use) const {
    const BlockRows rows = Work::Load(p_, work_).rows;
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 h = 0; h < 2; ++h) {
        use(Steps(p_, rows.At(rb * 8 + LaneIndex() % 4 * 2 + h), Extent::Whole(p_, kv_len)), rb, h);
      }
    }
  }
  // use(x, token in the tile) for the scores of row 8 rb + 2c + h.
  template <class Use>
  KVANT_DEVICE static void ForEachOfRow(Scores& scores, i32 rb, i32 h, Use use) {
    const CodesLayout l = Ring::Layout();
    KVANT_UNROLL
    for (i32 i = 0; i < T::k.warp_tile / 8; ++i) {
      use(scores[rb][i / 2][h + i % 2 * 2], l.Token(LaneIndex() / 4, i));
    }
  }

  KVANT_DEVICE void Hide(i32 first, i32 kv_len, Scores& scores) const {
    ForEachRow(kv_len, [&](const Steps& steps, i32 rb, i32 h) {
      const ColumnRange live = steps.Live();
      ForEachOfRow(scores, rb, h, [&](float& x, i32 col) {
        if (first + col < live.begin || first + col >= live.end) x = -Infinity();
      });
    });
  }

  KVANT_DEVICE void ApplySteps(i32 first, i32 kv_len, Scores& scores) const {
    ForEachRow(kv_len, [&](const Steps& steps, i32 rb, i32 h) {
      ForEachOfRow(scores, rb, h, [&](float& x, i32 col) {
        const i32 column = first + col;
        const bool exists = column < kv_len && (!Work::HasLead() || column >= 0);
        x = exists ? Steps::Bounded(steps.template Apply<false>(p_, column, x)) : -Infinity();
      });
    });
  }

  // What a weight is 2 to the power of. Products of scores that are only scaled begin at `add`;
  // others take it once it has moved: a reference of -1e9 would swallow them in f32.
  KVANT_DEVICE static float Exponent(const State& state, float score, i32 rb, i32 h) {
    return OnlyScaled() ? score : Fma(score + state.add[rb][h], kLog2E, Top());
  }

  // Where a score is too far above the reference.
  KVANT_DEVICE void MoveReference(State& state, Values& values, Scores& scores) const {
    float highest[kRowBlocks][2];
    bool beyond = false;
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 h = 0; h < 2; ++h) {
        highest[rb][h] = Max(scores[rb][0][h], scores[rb][0][h + 2]);
        KVANT_UNROLL
        for (i32 j = 1; j < T::k.warp_tile / 16; ++j) {
          highest[rb][h] = Max(highest[rb][h], Max(scores[rb][j][h], scores[rb][j][h + 2]));
        }
        beyond |= Exponent(state, highest[rb][h], rb, h) > state.limit[rb][h];
      }
    }
    if (!Any(beyond)) return;
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 h = 0; h < 2; ++h) {
        float most = highest[rb][h];
        KVANT_UNROLL
        for (i32 mask = 4; mask < 32; mask *= 2) most = Max(most, device::ShuffleXor(most, mask));
        const bool any = most > -Infinity();
        const float before = state.add[rb][h];
        float add = !any ? before : OnlyScaled() ? before - (most - Top()) : -most;
        if (state.limit[rb][h] > -Infinity()) add = Min(add, before);
        if (any) state.limit[rb][h] = Top() + kSlack;
        const float factor = Exp2(Min((add - before) * (OnlyScaled() ? 1.f : kLog2E), 0.f));
        state.add[rb][h] = add;
        state.sum[rb][h] *= factor;
        values.Shrink(rb, h, factor);
        if (!OnlyScaled()) continue;
        KVANT_UNROLL
        for (i32 j = 0; j < T::k.warp_tile / 16; ++j) {
          scores[rb][j][h] += add - before;
          scores[rb][j][h + 2] += add - before;
        }
      }
    }
  }

  KVANT_DEVICE bool End(const State& state, const Values& values, const WarpTokens& tokens) const {
    const SharedAddress factors = work_ + static_cast<u32>(CodesShared::Of(T::k, 1).factors);
    const SharedAddress mine =
        shared_ + static_cast<u32>(Slice::TokenWarp() * Ending::StateFloats() * 4);
    BlockSync();  // rings are done with
    if (Slice::Shares() ? AnyWarp(tokens.lost, factors) : tokens.lost) {
      const i32 scratch = CodesShared::Of(T::k, 1).exact;
      const CodesExact<T> exact(
          p_, work_, Rotated(),
          work_ + static_cast<u32>(scratch + WarpIndex() * ExactShared::kBytes));
      exact.Run(tokens.first, Ring::Step(), tokens.end, mine);
    } else {
      StoreState(state, values, mine);
    }
    BlockSync();
    Ending::JoinWarps(T::k.token_warps, shared_, factors);
    const Work work = Work::Load(p_, work_);
    if (work.splits > 1 && !Ending::JoinSplits(p_, Work::Block(p_) - work.split, work.split,
                                               work.splits, work.item, shared_, factors)) {
      return false;
    }
    if (T::k.part == kWhole) {
      Ending::StoreRows(p_, work.rows, 0, shared_, false);
    } else {
      Ending::LeaveRows(p_, work.rows, 0, shared_);
    }
    return true;
  }

  // votes: a word of shared memory for each warp.
  KVANT_DEVICE static bool AnyWarp(bool mine, SharedAddress votes) {
    const SharedAddress own = votes + static_cast<u32>(WarpIndex() * 4);
    if (LaneIndex() == 0) StoreShared32(own, mine ? 1 : 0);
    BlockSync();
    u32 any = 0;
    KVANT_UNROLL
    for (i32 w = 0; w < kChannelWarps; ++w) any |= LoadShared32(votes + static_cast<u32>(w * 4));
    return any != 0;
  }

  KVANT_DEVICE void StoreState(const State& state, const Values& values, SharedAddress mine) const {
    const i32 rows = Ending::Rows(), c = LaneIndex() % 4;
    const bool states = Slice::Index() == 0 && LaneIndex() / 4 == 0;
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 h = 0; h < 2; ++h) {
        float sum = state.sum[rb][h];
        KVANT_UNROLL
        for (i32 mask = 4; mask < 32; mask *= 2) sum += device::ShuffleXor(sum, mask);
        if (!states) continue;
        const bool any = state.limit[rb][h] > -Infinity();
        const i32 r = 8 * rb + 2 * c + h;
        const float add = state.add[rb][h], at = OnlyScaled() ? add * -kLn2 : -add - Top() * kLn2;
        StoreSharedFloat(mine + r * 4, any ? at : -Infinity());
        StoreSharedFloat(mine + (rows + r) * 4, sum);
      }
    }
    values.Store(mine + 2 * rows * 4);
  }

  const AttentionParams& p_;
  const SharedAddress work_;    // in shared memory
  const SharedAddress shared_;  // rings and states
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_ATTENTION_CODES_H_
