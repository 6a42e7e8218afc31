#include "kvant/kernels/cpu/score_steps.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

namespace kvant::cpu {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
// Beyond any column, and far enough from overflow to be added to.
constexpr int64_t kFar = int64_t{1} << 60;

// The column on the diagonal for the row at `p`.
int64_t Diagonal(const Step& step, const Reader& reader, const Position& p, const Extent& extent) {
  const int64_t row = p.at[kRow] - extent.q_first;
  switch (step.alignment) {
    case Step::Alignment::kTopLeft:
      return row;
    case Step::Alignment::kBottomRight:
      return row + extent.kv_len - extent.q_len;
    case Step::Alignment::kRuntime:
      break;
  }
  const int64_t add = std::clamp(reader.Integer(step.shift_add, p), -kFar / 4, kFar / 4);
  return row + add - std::clamp(reader.Integer(step.shift_sub, p), -kFar / 4, kFar / 4);
}

// The columns in band for the row at `p`.
ColumnRange Band(const Step& step, const Reader& reader, const Position& p, const Extent& extent) {
  const int64_t diagonal = Diagonal(step, reader, p, extent);
  return {diagonal + std::clamp(step.lower, -kFar, kFar),
          diagonal + std::clamp(step.upper, -kFar, kFar) + 1};
}

bool OverColumns(const Array& array) { return array.strides[kCol] != 0; }

bool WritesNegInf(const Step& step, const Reader& reader, const Position& p) {
  return !OverColumns(step.operand) && reader.Scalar(step.operand, p) == kNegInf;
}

// Whether the step leaves -inf as it is, whatever the column.
bool KeepsNegInf(const Step& step, const Reader& reader, const Position& p) {
  switch (step.kind) {
    case Step::Kind::kMultiply:
    case Step::Kind::kDivide: {
      if (OverColumns(step.operand)) return false;
      const float factor = reader.Scalar(step.operand, p);
      return factor > 0.f && factor < std::numeric_limits<float>::infinity();
    }
    case Step::Kind::kAdd:
    case Step::Kind::kSubtract:
    case Step::Kind::kAlibi:
      return true;
    case Step::Kind::kSelect:
    case Step::Kind::kBand:
      return WritesNegInf(step, reader, p);
    case Step::Kind::kMaximum:
    case Step::Kind::kMinimum:
    case Step::Kind::kTanh:
      break;
  }
  return false;
}

template <typename Op>
void Combine(const float* operand, bool per_column, int64_t n, float* scores, Op op) {
  if (per_column) {
    for (int64_t i = 0; i < n; ++i) scores[i] = op(scores[i], operand[i]);
  } else {
    const float value = *operand;
    for (int64_t i = 0; i < n; ++i) scores[i] = op(scores[i], value);
  }
}

void ApplyBand(ColumnRange in, bool inverted, const float* fill, bool per_column, int64_t first,
               int64_t n, float* scores) {
  const int64_t begin = std::clamp<int64_t>(in.begin - first, 0, n);
  const int64_t end = std::clamp<int64_t>(in.end - first, begin, n);
  const auto write = [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) scores[i] = per_column ? fill[i] : *fill;
  };
  if (inverted) return write(begin, end);
  write(0, begin);
  write(end, n);
}

void ApplySelect(const Step& step, const Reader& reader, const Position& p, const float* operand,
                 bool per_column, int64_t n, float* scores, float* condition) {
  if (!OverColumns(step.condition)) {
    if ((reader.Scalar(step.condition, p) != 0.f) != step.inverted) return;
    return Combine(operand, per_column, n, scores, [](float, float fill) { return fill; });
  }
  reader.Line(step.condition, p, kCol, n, condition);
  const float keep = step.inverted ? 0.f : 1.f;
  for (int64_t i = 0; i < n; ++i) {
    const float fill = per_column ? operand[i] : *operand;
    scores[i] = condition[i] == keep ? scores[i] : fill;
  }
}

void ApplyAlibi(int64_t first, const float* slope, bool per_column, int64_t n, float* scores) {
  float distance[kTokenTile];
  if (std::abs(first) < int64_t{1} << 30) {
    // 32 bits are converted many at a time.
    const int32_t base = static_cast<int32_t>(first);
    for (int32_t i = 0; i < kTokenTile; ++i) distance[i] = static_cast<float>(base + i);
  } else {
    for (int64_t i = 0; i < n; ++i) distance[i] = static_cast<float>(first + i);
  }
  for (int64_t i = 0; i < n; ++i) scores[i] += (per_column ? slope[i] : *slope) * distance[i];
}

void ApplyStep(const Step& step, const Reader& reader, const Position& p, int64_t n,
               const Extent& extent, float* s, StepOperand& last) {
  using Kind = Step::Kind;
  if (step.kind == Kind::kTanh) return reader.kernels->tanh(s, n);
  const float* const operand = last.scratch;
  const bool wide = OverColumns(step.operand);
  if (const int64_t index = step.operand.IndexOf(p); last.step != &step || last.index != index) {
    reader.Line(step.operand, p, kCol, wide ? n : 1, last.scratch);
    last.step = &step;
    last.index = index;
  }
  switch (step.kind) {
    case Kind::kMultiply:
      return Combine(operand, wide, n, s, [](float a, float b) { return a * b; });
    case Kind::kDivide:
      return Combine(operand, wide, n, s, [](float a, float b) { return a / b; });
    case Kind::kAdd:
      return Combine(operand, wide, n, s, [](float a, float b) { return a + b; });
    case Kind::kSubtract:
      return Combine(operand, wide, n, s, [](float a, float b) { return a - b; });
    case Kind::kMaximum:
      return Combine(operand, wide, n, s, [](float a, float b) { return a < b || b != b ? b : a; });
    case Kind::kMinimum:
      return Combine(operand, wide, n, s, [](float a, float b) { return b < a || b != b ? b : a; });
    case Kind::kSelect:
      return ApplySelect(step, reader, p, operand, wide, n, s, last.scratch + kTokenTile);
    case Kind::kBand:
      return ApplyBand(Band(step, reader, p, extent), step.inverted, operand, wide, p.at[kCol], n,
                       s);
    case Kind::kAlibi: {
      const int64_t diagonal = Diagonal(step, reader, p, extent);
      return ApplyAlibi(p.at[kCol] - diagonal, operand, wide, n, s);
    }
    case Kind::kTanh:
      return;
  }
}

}  // namespace

ColumnRange LiveColumns(const AttentionProblem& problem, const Reader& reader, const Position& p,
                        const Extent& extent) {
  ColumnRange live{extent.kv_first, extent.kv_len};
  // From the last step back: as long as every later step keeps -inf, a band counts.
  for (int i = problem.step_count - 1; i >= 0; --i) {
    const Step& step = problem.steps[i];
    if (step.kind == Step::Kind::kBand && !step.inverted && WritesNegInf(step, reader, p)) {
      const ColumnRange in = Band(step, reader, p, extent);
      live.begin = std::max(live.begin, in.begin);
      live.end = std::min(live.end, in.end);
    }
    if (!KeepsNegInf(step, reader, p)) break;
  }
  return live;
}

ColumnRange UnbandedColumns(const AttentionProblem& problem, const Reader& reader,
                            const Position& p, const Extent& extent) {
  ColumnRange columns{extent.kv_first, extent.kv_len};
  for (int i = 0; i < problem.step_count; ++i) {
    const Step& step = problem.steps[i];
    if (step.kind != Step::Kind::kBand) continue;
    if (step.inverted) return {};
    const ColumnRange in = Band(step, reader, p, extent);
    columns.begin = std::max(columns.begin, in.begin);
    columns.end = std::min(columns.end, in.end);
  }
  return columns;
}

int LeadingFactors(const AttentionProblem& problem) {
  int count = 0;
  while (count < problem.step_count) {
    const Step& step = problem.steps[count];
    const bool scales = step.kind == Step::Kind::kMultiply || step.kind == Step::Kind::kDivide;
    if (!scales || OverColumns(step.operand)) break;
    ++count;
  }
  return count;
}

float Factor(const AttentionProblem& problem, const Reader& reader, const Position& p,
             int leading) {
  float factor = 1.f;
  for (int i = 0; i < leading; ++i) {
    const Step& step = problem.steps[i];
    const float operand = reader.Scalar(step.operand, p);
    factor = step.kind == Step::Kind::kMultiply ? factor * operand : factor / operand;
  }
  return factor;
}

float Amplification(const AttentionProblem& problem, const Reader& reader, const Position& p,
                    int first) {
  using Kind = Step::Kind;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  // Any error may move a rounded probability by a step, so scores must be as exact as f32's.
  constexpr float kOfSteps = 1024.f;
  float product = problem.probs_rounding.type == kUndef ? 1.f : kOfSteps;
  for (int i = first; i < problem.step_count; ++i) {
    const Step& step = problem.steps[i];
    if (step.kind != Kind::kMultiply && step.kind != Kind::kDivide) continue;
    if (OverColumns(step.operand)) return kInf;
    const float operand = std::abs(reader.Scalar(step.operand, p));
    product = step.kind == Kind::kMultiply ? product * operand : product / operand;
  }
  return product < kInf ? product : kInf;
}

StepRange StepsLeft(const AttentionProblem& problem, int first, bool in_bands) {
  const auto skipped = [&](const Step& step) { return in_bands && step.kind == Step::Kind::kBand; };
  while (first < problem.step_count && skipped(problem.steps[first])) ++first;
  return {first, in_bands};
}

void ApplySteps(const AttentionProblem& problem, const Reader& reader, const StepRange& steps,
                const Position& p, int64_t n, const Extent& extent, float* scores,
                StepOperand& operand) {
  for (int i = steps.first; i < problem.step_count; ++i) {
    const Step& step = problem.steps[i];
    if (step.kind == Step::Kind::kBand && steps.skip_bands) continue;
    ApplyStep(step, reader, p, n, extent, scores, operand);
  }
}

}  // namespace kvant::cpu
