// What a warp has of the output (of its channels, where warps share tiles) once more, by f32 alone:
// where products of packed codes would lose more than they may (CodesKeys::Loses,
// CodesValues::Loses). Every code is dequantized, so that nothing is but f32's own error, whatever
// scales, zero points and queries are.
//
//   lanes are tokens       scores of 8 rows with 32 tokens, each lane its own
//   lanes are a row's      steps, online softmax, row by row, in shared memory
//   lanes are channels     output of 8 rows += p V, token by token
//
// It is for few tiles of few inputs, and made to be small and to take few registers, not to be
// fast.
#ifndef KVANT_KERNELS_CUDA_CODES_EXACT_H_
#define KVANT_KERNELS_CUDA_CODES_EXACT_H_

#include "kvant/kernels/cuda/codes_slices.h"
#include "kvant/kernels/cuda/codes_work.h"
#include "kvant/kernels/cuda/dequantize_tile.h"
#include "kvant/kernels/cuda/finish.h"
#include "kvant/kernels/cuda/score_steps.h"

namespace kvant::cuda {

// Shared memory of a warp: codebooks of K and V, scores [row][lane], and max, sum and shrinkage of
// each row.
struct ExactShared {
  static constexpr i32 kRows = 8, kCodebookBytes = 64;
  static constexpr i32 kScores = 2 * kCodebookBytes, kRowStates = kScores + kRows * 32 * 4;
  static constexpr i32 kBytes = kRowStates + kRows * 3 * 4 + 32;
};

template <class T>
class CodesExact {
 public:
  // rotated: where rotated queries lie, if there are any.
  KVANT_DEVICE CodesExact(const AttentionParams& p, SharedAddress work, SharedAddress rotated,
                          SharedAddress scratch)
      : p_(p), work_(work), rotated_(rotated), scratch_(scratch) {
    StoreCodebook(T::k.k[0], KeySegment<T>(p), 0);
    StoreCodebook(T::k.v[0], ValueSegment<T>(p), ExactShared::kCodebookBytes);
  }

  // Of the warp's tiles, at tiles' columns first, first + step, ... before `end` (CodesWork::Lead):
  // the state in shared memory (finish.h).
  KVANT_DEVICE void Run(i32 first, i32 step, i32 end, SharedAddress state) const {
    KVANT_NO_UNROLL
    for (i32 row = 0; row < Finish<T>::Rows(); row += kRows) RunRows(row, first, step, end, state);
  }

 private:
  static constexpr i32 kRows = ExactShared::kRows;
  static constexpr i32 kSlots = CeilDiv(ValueSlice(T::kMax), 32);
  using Work = CodesWork<T>;
  using Steps = RowSteps<T>;

  KVANT_DEVICE void StoreCodebook(const SegmentTraits& traits, const SegmentParams& segment,
                                  i32 at) const {
    if (LaneIndex() >= traits.codebook) return;
    StoreSharedFloat(scratch_ + static_cast<u32>(at + LaneIndex() * 4),
                     Load(segment.codebook + LaneIndex()));
  }
  KVANT_DEVICE SharedAddress ScoreAt(i32 r, i32 lane) const {
    return scratch_ + static_cast<u32>(ExactShared::kScores + (r * 32 + lane) * 4);
  }
  enum RowField : i32 { kMaximum, kSum, kShrink };
  KVANT_DEVICE SharedAddress RowAt(RowField field, i32 r) const {
    return scratch_ + static_cast<u32>(ExactShared::kRowStates + (field * kRows + r) * 4);
  }

  KVANT_DEVICE void RunRows(i32 row, i32 first, i32 step, i32 end, SharedAddress state) const {
    if (LaneIndex() < kRows) {
      StoreSharedFloat(RowAt(kMaximum, LaneIndex()), -Infinity());
      StoreSharedFloat(RowAt(kSum, LaneIndex()), 0.f);
    }
    float out[kRows][kSlots];
    KVANT_UNROLL
    for (i32 r = 0; r < kRows; ++r) {
      KVANT_UNROLL
      for (i32 s = 0; s < kSlots; ++s) out[r][s] = 0.f;
    }
    const i32 lead = Work::Load(p_, work_).Lead();
    KVANT_NO_UNROLL
    for (i32 tile = first; tile < end; tile += step) {
      KVANT_NO_UNROLL
      for (i32 token = MaxOf(tile, lead); token < MinOf(tile + T::k.warp_tile, end); token += 32) {
        const i32 count = MinOf(32, MinOf(tile + T::k.warp_tile, end) - token);
        WarpSync();  // the last tokens' probabilities are done with
        Scores(row, token + MinOf(LaneIndex(), count - 1));
        KVANT_NO_UNROLL
        for (i32 r = 0; r < kRows; ++r) Softmax(row, r, token, LaneIndex() < count);
        WarpSync();
        AddValues(token, count, out);
      }
    }
    WarpSync();
    Store(row, out, state);
  }

  // ring: the columns of a ring.
  KVANT_DEVICE Position At(i32 token, const SegmentColumns& ring, const SegmentTraits& traits,
                           const SegmentParams& segment, const Work& work) const {
    Position at{work.rows.b0, work.rows.b1, work.rows.b2, 0};
    MoveTo(traits, segment, HasRanges(T::k) ? ring.TokenOf(token) : token, at);
    return at;
  }

  // Of the lane's token with rows [row, row + 8).
  KVANT_DEVICE void Scores(i32 row, i32 token) const {
    const Work work = Work::Load(p_, work_);
    const Position at = At(token, work.KeyColumns(p_), T::k.k[0], KeySegment<T>(p_), work);
    float sums[kRows] = {};
    KVANT_NO_UNROLL
    for (i32 d = 0; d < T::k.head_size; d += 8) {
      float k[8];
      LoadValues(T::k.k[0], KeySegment<T>(p_), scratch_, at, d, kCol, T::k.head_size, k);
      KVANT_UNROLL
      for (i32 r = 0; r < kRows; ++r) {
        float q[8];
        LoadQuery(work.rows, row + r, d, q);
        // Long sums of large numbers lose less when short ones are added up.
        float sum = 0.f;
        KVANT_UNROLL
        for (i32 i = 0; i < 8; ++i) sum = Fma(q[i], k[i], sum);
        sums[r] += sum;
      }
    }
    KVANT_UNROLL
    for (i32 r = 0; r < kRows; ++r) StoreSharedFloat(ScoreAt(r, LaneIndex()), sums[r]);
  }
  KVANT_DEVICE void LoadQuery(const BlockRows& rows, i32 r, i32 d, float (&q)[8]) const {
    if (T::k.q_hadamard == 0) {
      return LoadValues(T::k.q, p_.q, 0, rows.At(r), d, kCol, T::k.head_size, q);
    }
    KVANT_UNROLL
    for (i32 i = 0; i < 8; ++i) {
      q[i] = LoadSharedFloat(rotated_ + static_cast<u32>((r * T::k.head_size + d + i) * 4));
    }
  }

  // Scores of a row become probabilities.
  KVANT_DEVICE void Softmax(i32 row, i32 r, i32 token, bool exists) const {
    const Work work = Work::Load(p_, work_);
    const Steps steps(p_, work.rows.At(row + r), Extent::Whole(p_, work.kv_len));
    const SharedAddress at = ScoreAt(r, LaneIndex());
    float x = -Infinity();
    if (exists) {
      const i32 column = token + LaneIndex() - work.Lead();
      x = Steps::Bounded(steps.template Apply<false>(p_, column, LoadSharedFloat(at)));
    }
    const float before = LoadSharedFloat(RowAt(kMaximum, r));
    float top = Max(before, x);
    KVANT_UNROLL
    for (i32 mask = 1; mask < 32; mask *= 2) top = Max(top, ShuffleXor(top, mask));
    const float p = ExpAbove(x, top), shrink = ExpAbove(before, top);
    float sum = p;
    KVANT_UNROLL
    for (i32 mask = 1; mask < 32; mask *= 2) sum += ShuffleXor(sum, mask);
    StoreSharedFloat(at, p);
    WarpSync();  // all have read the maximum
    if (LaneIndex() != 0) return;
    StoreSharedFloat(RowAt(kSum, r), Fma(LoadSharedFloat(RowAt(kSum, r)), shrink, sum));
    StoreSharedFloat(RowAt(kMaximum, r), top);
    StoreSharedFloat(RowAt(kShrink, r), shrink);
  }

  KVANT_DEVICE void AddValues(i32 token, i32 count, float (&out)[kRows][kSlots]) const {
    const Work work = Work::Load(p_, work_);
    const i32 slice = WarpSlice<T>::ValueChannel(0);
    KVANT_UNROLL
    for (i32 r = 0; r < kRows; ++r) {
      const float shrink = LoadSharedFloat(RowAt(kShrink, r));
      KVANT_UNROLL
      for (i32 s = 0; s < kSlots; ++s) out[r][s] *= shrink;
    }
    KVANT_NO_UNROLL
    for (i32 t = 0; t < count; ++t) {
      const Position at =
          At(token + t, work.ValueColumns(p_), T::k.v[0], ValueSegment<T>(p_), work);
      float v[kSlots];
      KVANT_UNROLL
      for (i32 s = 0; s < kSlots; ++s) {
        const i32 d = slice + MinOf(s * 32 + LaneIndex(), ValueSlice(T::k) - 1);
        v[s] = LoadValue(T::k.v[0], ValueSegment<T>(p_), scratch_ + ExactShared::kCodebookBytes, at,
                         d);
      }
      KVANT_UNROLL
      for (i32 r = 0; r < kRows; ++r) {
        const float p = LoadSharedFloat(ScoreAt(r, t));
        KVANT_UNROLL
        for (i32 s = 0; s < kSlots; ++s) out[r][s] = Fma(p, v[s], out[r][s]);
      }
    }
  }

  KVANT_DEVICE void Store(i32 row, const float (&out)[kRows][kSlots], SharedAddress state) const {
    const i32 rows = Finish<T>::Rows(), slice = WarpSlice<T>::ValueChannel(0);
    if (WarpSlice<T>::Index() == 0 && LaneIndex() < kRows) {
      const i32 r = row + LaneIndex();
      StoreSharedFloat(state + static_cast<u32>(r * 4),
                       LoadSharedFloat(RowAt(kMaximum, LaneIndex())));
      StoreSharedFloat(state + static_cast<u32>((rows + r) * 4),
                       LoadSharedFloat(RowAt(kSum, LaneIndex())));
    }
    WarpSync();
    KVANT_UNROLL
    for (i32 r = 0; r < kRows; ++r) {
      KVANT_UNROLL
      for (i32 s = 0; s < kSlots; ++s) {
        const i32 i = s * 32 + LaneIndex();
        const i32 at = 2 * rows + (row + r) * T::k.v_head_size + slice + i;
        if (i < ValueSlice(T::k)) StoreSharedFloat(state + static_cast<u32>(at * 4), out[r][s]);
      }
    }
  }

  const AttentionParams& p_;
  const SharedAddress work_, rotated_, scratch_;
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CODES_EXACT_H_
