// What happens to scores between Q x K and the softmax.
#ifndef KVANT_KERNELS_CUDA_SCORE_STEPS_H_
#define KVANT_KERNELS_CUDA_SCORE_STEPS_H_

#include "kvant/kernels/cuda/columns.h"

namespace kvant::cuda {

// The steps of the traits T on one row of scores: what is the same for the whole row is found once.
template <class T>
class RowSteps {
 public:
  // Whether any column is ever hidden.
  KVANT_DEVICE static constexpr bool Hides() {
    bool any = false;
    for (i32 i = 0; i < T::k.step_count; ++i) any |= T::k.steps[i].hides != 0;
    return any;
  }

  // extent: of the batch entry of `at`.
  KVANT_DEVICE RowSteps(const AttentionParams& p, const Position& at, const Extent& extent)
      : at_(at), kv_first_(extent.kv_first), kv_len_(extent.kv_len) {
    KVANT_UNROLL
    for (i32 i = 0; i < T::k.step_count; ++i) {
      const StepTraits& traits = T::k.steps[i];
      if (traits.kind == kBand) {
        const i64 diagonal = Diagonal(traits, p.steps[i], at, extent);
        band_[i] = {Clamp(diagonal + p.steps[i].lower), Clamp(diagonal + p.steps[i].upper + 1)};
      } else if (traits.kind == kAlibi) {
        // Far diagonals are far from exact in f32 anyhow.
        const i64 diagonal = Diagonal(traits, p.steps[i], at, extent);
        band_[i].begin = static_cast<i32>(diagonal < -kFar  ? -kFar
                                          : diagonal > kFar ? kFar
                                                            : diagonal);
      }
      if (!HasOperand(traits.kind) || !Uniform(traits)) continue;
      const float operand = Operand(traits, p.steps[i], 0);
      uniform_[i] = traits.kind == kDivide ? Divide(1.f, operand) : operand;
    }
  }

  // The columns that may end up at anything but -inf.
  KVANT_DEVICE ColumnRange Live() const {
    ColumnRange live{kv_first_, kv_len_};
    KVANT_UNROLL
    for (i32 i = 0; i < T::k.step_count; ++i) {
      if (!T::k.steps[i].hides) continue;
      live.begin = MaxOf(live.begin, band_[i].begin);
      live.end = MinOf(live.end, band_[i].end);
    }
    return live;
  }

  // The columns that no band changes.
  KVANT_DEVICE ColumnRange InBands() const {
    ColumnRange inside{kv_first_, kv_len_};
    KVANT_UNROLL
    for (i32 i = 0; i < T::k.step_count; ++i) {
      if (T::k.steps[i].kind != kBand) continue;
      inside.begin = MaxOf(inside.begin, band_[i].begin);
      inside.end = T::k.steps[i].inverted ? 0 : MinOf(inside.end, band_[i].end);
    }
    return inside;
  }

  // Scores that are finite, and so far from 0 that times log2 e they are not, as masks of the
  // lowest number make them, are taken a little nearer: to a power of two, whose product with log2
  // e is exact, so that a row of nothing else has equal weights.
  KVANT_DEVICE static float Bounded(float score) {
    if (!AddsOrWrites() || Abs(score) <= kMost || Abs(score) == Infinity()) return score;
    return score < 0.f ? -kMost : score > 0.f ? kMost : score;
  }

  // The score of column `col` before and after; kInBands: it is one of InBands.
  template <bool kInBands>
  KVANT_DEVICE float Apply(const AttentionParams& p, i32 col, float score) const {
    KVANT_UNROLL
    for (i32 i = 0; i < T::k.step_count; ++i) {
      if (kInBands && T::k.steps[i].kind == kBand) continue;
      score = Step(i, p, col, score);
    }
    return score;
  }

 private:
  static constexpr float kMost = 0x1p127f;

  // Whether any step makes more of a score than a multiple.
  KVANT_DEVICE static constexpr bool AddsOrWrites() {
    bool any = false;
    for (i32 i = 0; i < T::k.step_count; ++i) {
      const StepTraits& step = T::k.steps[i];
      const bool hides = step.kind == kBand && step.hides;
      any |= !hides && step.kind != kMultiply && step.kind != kDivide && step.kind != kTanh;
    }
    return any;
  }

  // Beyond any column, and far enough from overflow to be added to.
  static constexpr i64 kFar = 1 << 30;

  // Whether the operand is one number for the row.
  KVANT_DEVICE static constexpr bool Uniform(const StepTraits& traits) {
    return traits.operand.type == kNone || (traits.operand.varies >> kCol & 1) == 0;
  }

  KVANT_DEVICE i32 Clamp(i64 column) const { return ClampedTo(kv_len_, column); }

  KVANT_DEVICE static i64 ShiftOperand(const ArrayTraits& traits, const BatchArray& array,
                                       const Position& at) {
    if (traits.type == kNone) return 0;
    const i64 value = LoadInteger(traits.type, array.data, IndexOf(array, at));
    return value < -kFar ? -kFar : value > kFar ? kFar : value;
  }

  // The column on the diagonal of the row.
  KVANT_DEVICE static i64 Diagonal(const StepTraits& traits, const StepParams& step,
                                   const Position& at, const Extent& extent) {
    const i32 row = at.row - extent.q_first;
    if (traits.alignment == kTopLeft) return row;
    if (traits.alignment == kBottomRight) return row + extent.kv_len - extent.q_len;
    return row + step.shift + ShiftOperand(traits.shift_add, step.shift_add, at) -
           ShiftOperand(traits.shift_sub, step.shift_sub, at);
  }

  KVANT_DEVICE float Operand(const StepTraits& traits, const StepParams& step, i32 col) const {
    if (traits.operand.type == kNone) return step.constant;
    return LoadElement(traits.operand.type, step.operand.data,
                       IndexOf(traits.operand, step.operand, at_, col));
  }

  KVANT_DEVICE bool Keeps(i32 i, const AttentionParams& p, i32 col) const {
    const StepTraits& traits = T::k.steps[i];
    if (traits.kind == kBand) {
      return (band_[i].begin <= col && col < band_[i].end) != (traits.inverted != 0);
    }
    const StepParams& step = p.steps[i];
    const float condition = LoadElement(traits.condition.type, step.condition.data,
                                        IndexOf(traits.condition, step.condition, at_, col));
    return (condition != 0.f) != (traits.inverted != 0);
  }

  KVANT_DEVICE float Step(i32 i, const AttentionParams& p, i32 col, float score) const {
    const StepTraits& traits = T::k.steps[i];
    const bool uniform = Uniform(traits);
    const auto operand = [&] { return uniform ? uniform_[i] : Operand(traits, p.steps[i], col); };
    switch (static_cast<StepKind>(traits.kind)) {
      case kMultiply:
        return score * operand();
      case kDivide:
        return uniform ? score * operand() : Divide(score, operand());
      case kAdd:
        return score + operand();
      case kSubtract:
        return score - operand();
      case kMaximum: {
        const float least = operand();
        return score < least || least != least ? least : score;
      }
      case kMinimum: {
        const float most = operand();
        return most < score || most != most ? most : score;
      }
      case kTanh:
        return Tanh(score);
      case kSelect:
      case kBand:
        return Keeps(i, p, col) ? score : operand();
      case kAlibi:
        return score + operand() * static_cast<float>(col - band_[i].begin);
    }
    return score;
  }

  static constexpr i32 kSteps = T::kMax.step_count > 0 ? T::kMax.step_count : 1;

  const Position at_;
  const i32 kv_first_, kv_len_;
  float uniform_[kSteps];     // operands that do not vary over columns; of kDivide, the reciprocal
  ColumnRange band_[kSteps];  // the columns in band; of kAlibi, the diagonal
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_SCORE_STEPS_H_
