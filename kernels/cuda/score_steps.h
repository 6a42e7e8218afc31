// What happens to scores between Q x K and the softmax.
#ifndef KVANT_KERNELS_CUDA_SCORE_STEPS_H_
#define KVANT_KERNELS_CUDA_SCORE_STEPS_H_

#include "kvant/kernels/cuda/elements.h"

namespace kvant::cuda {

// Beyond any column, and far enough from overflow to be added to.
inline constexpr i64 kFar = i64{1} << 40;

struct ColumnRange {
  i32 begin, end;
};

// The steps of the traits T, for one row of scores. kv_len: of the batch entry of `at`, the real
// one where there is one.
template <class T>
struct ScoreSteps {
  // Scores of column `col` before and after.
  KVANT_DEVICE static float Apply(const AttentionParams& p, const Position& at, i32 kv_len, i32 col,
                                  float score) {
    KVANT_UNROLL
    for (i32 i = 0; i < T::k.step_count; ++i) {
      score = Step(T::k.steps[i], p, p.steps[i], at, kv_len, col, score);
    }
    return score;
  }

  // The columns of a row that may end up at anything but -inf.
  KVANT_DEVICE static ColumnRange Live(const AttentionParams& p, const Position& at, i32 kv_len) {
    ColumnRange live{0, kv_len};
    KVANT_UNROLL
    for (i32 i = 0; i < T::k.step_count; ++i) {
      if (!T::k.steps[i].hides) continue;
      const i64 diagonal = Diagonal(T::k.steps[i], p, p.steps[i], at, kv_len);
      live.begin = MaxOf(live.begin, Clamp(diagonal + p.steps[i].lower, kv_len));
      live.end = MinOf(live.end, Clamp(diagonal + p.steps[i].upper + 1, kv_len));
    }
    return live;
  }

  // Whether Live is ever less than all.
  KVANT_DEVICE static constexpr bool Hides() {
    bool any = false;
    for (i32 i = 0; i < T::k.step_count; ++i) any |= T::k.steps[i].hides != 0;
    return any;
  }

 private:
  KVANT_DEVICE static i32 Clamp(i64 column, i32 kv_len) {
    return static_cast<i32>(column < 0 ? 0 : column > kv_len ? kv_len : column);
  }

  KVANT_DEVICE static i64 ShiftOperand(const ArrayTraits& traits, const BatchArray& array,
                                       const Position& at) {
    if (traits.type == kNone) return 0;
    const i64 value = LoadInteger(traits.type, array.data, IndexOf(array, at));
    return value < -kFar ? -kFar : value > kFar ? kFar : value;
  }

  // The column on the diagonal of a row.
  KVANT_DEVICE static i64 Diagonal(const StepTraits& traits, const AttentionParams& p,
                                   const StepParams& step, const Position& at, i32 kv_len) {
    if (traits.alignment == kTopLeft) return at.row;
    if (traits.alignment == kBottomRight) return at.row + kv_len - p.q_len;
    return at.row + ShiftOperand(traits.shift_add, step.shift_add, at) -
           ShiftOperand(traits.shift_sub, step.shift_sub, at);
  }

  KVANT_DEVICE static float Step(const StepTraits& traits, const AttentionParams& p,
                                 const StepParams& step, const Position& at, i32 kv_len, i32 col,
                                 float score) {
    if (traits.kind == kTanh) return Tanh(score);
    bool keep = true;
    if (traits.kind == kSelect) {
      const float condition = LoadElement(traits.condition.type, step.condition.data,
                                          IndexOf(traits.condition, step.condition, at, col));
      keep = (condition != 0.f) != (traits.inverted != 0);
    } else if (traits.kind == kBand) {
      const i64 off = col - Diagonal(traits, p, step, at, kv_len);
      keep = (step.lower <= off && off <= step.upper) != (traits.inverted != 0);
    }
    if ((traits.kind == kSelect || traits.kind == kBand) && keep) return score;
    const float operand = traits.operand.type == kNone
                              ? step.constant
                              : LoadElement(traits.operand.type, step.operand.data,
                                            IndexOf(traits.operand, step.operand, at, col));
    switch (traits.kind) {
      case kMultiply:
        return score * operand;
      case kDivide:
        return Divide(score, operand);
      case kAdd:
        return score + operand;
      case kSubtract:
        return score - operand;
      case kMaximum:
        return score < operand ? operand : score;
      case kMinimum:
        return operand < score ? operand : score;
      case kAlibi:
        return score + operand * static_cast<float>(col - Diagonal(traits, p, step, at, kv_len));
      default:
        return operand;
    }
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_SCORE_STEPS_H_
