#include "kvant/kernels/cpu/finish.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kvant/kernels/cpu/lines.h"
#include "kvant/kernels/philox.h"

namespace kvant::cpu {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// The dense row-major index of [b0, b1, b2, q, 0] in the probabilities.
uint64_t ProbabilityIndex(const AttentionProblem& problem, const Position& p) {
  int64_t index = p.at[0];
  for (int axis = 1; axis < 3; ++axis) index = index * problem.batch[axis] + p.at[axis];
  return static_cast<uint64_t>((index * problem.q_len + p.at[kRow]) * problem.kv_len);
}

void StoreRow(const KernelSet& kernels, const Array& array, void* data, Position p, int64_t n,
              const float* values) {
  StoreLine(kernels, array.type, data, array.IndexOf(p), array.strides[kCol], n, values);
}

// Whether vectors may round: sums of codes and zero points are whole numbers far below 2^23, and
// divisors far from the ends of f32.
bool TakesVectors(const Rounding& rounding) {
  constexpr int64_t kMostZeroPoint = int64_t{1} << 15;
  return IsInteger(rounding.type) && BitsOf(rounding.type) <= 8 &&
         rounding.zero_point >= -kMostZeroPoint && rounding.zero_point <= kMostZeroPoint &&
         rounding.scale >= 0x1p-100f && rounding.scale <= 0x1p100f;
}

float Code(const Rounding& rounding, float value) {
  const float scaled = value / rounding.scale;
  const auto zero_point = static_cast<float>(rounding.zero_point);
  if (!IsFloat(rounding.type)) return std::nearbyint(scaled) + zero_point;
  const float code = scaled + zero_point, most = static_cast<float>(LargestOf(rounding.type));
  return std::isfinite(value) ? std::clamp(code, -most, most) : code;
}

// One row of it, which may be overwritten.
void StoreOutput(const KernelSet& kernels, const AttentionProblem& problem, const Position& p,
                 float* row, void* data) {
  const Array& output = problem.output;
  const Rounding& rounding = problem.output_rounding;
  const int64_t n = problem.v_head_size;
  if (TakesVectors(rounding) && output.strides[kCol] == 1) {
    // Of the group and those that the kernel may read beyond.
    float scales[4], zero_points[4];
    std::fill_n(scales, 4, rounding.scale);
    std::fill_n(zero_points, 4, static_cast<float>(rounding.zero_point));
    const QuantizeParameters how{.codes = rounding.type,
                                 .zero_points = ZeroPoints::kCodes,
                                 .bits = BitsOf(rounding.type),
                                 .lowest = static_cast<int>(LowestOf(rounding.type)),
                                 .scales = scales,
                                 .values = zero_points};
    return kernels.quantize->row_codes({kF32, row, 0, n, 1, 1, 0}, how,
                                       {data, output.IndexOf(p), 0});
  }
  if (rounding.type != kUndef) {
    for (int64_t d = 0; d < n; ++d) row[d] = Code(rounding, row[d]);
  }
  StoreRow(kernels, output, data, p, n, row);
}

}  // namespace

void JoinStates(const KernelSet& kernels, int64_t rows, int64_t v_head_size, const State& state,
                const State& other) {
  constexpr int64_t kAtOnce = kHalfTile / 2;
  for (int64_t first = 0; first < rows; first += kAtOnce) {
    const int64_t end = std::min(first + kAtOnce, rows);
    float factors[kHalfTile];
    std::fill_n(factors, kHalfTile, kNegInf);
    float* factor = factors;
    for (int64_t r = first; r < end; ++r) {
      // The factor of a NaN is NaN, whatever the maximum.
      const float max = std::max(state.max[r], other.max[r]);
      const float base = max == kNegInf ? 0.f : max;
      *factor++ = state.max[r] - base;
      *factor++ = other.max[r] - base;
      state.max[r] = max;
    }
    kernels.exp_row(factors, kHalfTile, 0.f);
    factor = factors;
    for (int64_t r = first; r < end; ++r, factor += 2) {
      state.sum[r] = state.sum[r] * factor[0] + other.sum[r] * factor[1];
      kernels.pv(factor + 1, 1, 1, other.out + r * v_head_size, v_head_size, factor,
                 state.out + r * v_head_size);
    }
  }
}

void AddSinks(const AttentionProblem& problem, const Reader& reader, const RowTile& tile,
              State& state) {
  if (!problem.sinks.present()) return;
  for (int64_t r = 0; r < tile.rows; ++r) {
    const float sink = reader.Scalar(problem.sinks, tile.At(r));
    if (sink == kNegInf) continue;
    const float max = sink > state.max[r] ? sink : state.max[r];
    const float factor = std::exp(state.max[r] - max);
    state.max[r] = max;
    state.sum[r] = state.sum[r] * factor + std::exp(sink - max);
    float* out = state.out + r * problem.v_head_size;
    for (int64_t d = 0; d < problem.v_head_size; ++d) out[d] *= factor;
  }
}

void Finish(const KernelSet& kernels, const AttentionProblem& problem, const RowTile& tile,
            const State& state, bool normalize, void* const* outputs) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    const Position p = tile.At(r);
    const bool empty = state.max[r] == kNegInf && state.sum[r] == 0.f;
    float* out = state.out + r * problem.v_head_size;
    if (empty) {
      const bool zeros = problem.inf_as_zero || IsInteger(problem.probs_rounding.type);
      std::fill_n(out, problem.v_head_size, zeros ? 0.f : std::numeric_limits<float>::quiet_NaN());
    } else if (normalize) {
      const float sum = state.sum[r];
      for (int64_t d = 0; d < problem.v_head_size; ++d) out[d] /= sum;
    }
    if (problem.output_factor != 1.f) {
      for (int64_t d = 0; d < problem.v_head_size; ++d) out[d] *= problem.output_factor;
    }
    if (problem.output_hadamard > 1) {
      kernels.hadamard(out, problem.v_head_size, problem.output_hadamard);
    }
    StoreOutput(kernels, problem, p, out, outputs[problem.output.buffer]);
    if (problem.stats.present()) {
      float stats = state.max[r] + std::log(state.sum[r]);
      if (empty) {
        stats =
            problem.inf_as_zero ? problem.stats_of_empty : std::numeric_limits<float>::quiet_NaN();
      }
      StoreRow(kernels, problem.stats, outputs[problem.stats.buffer], p, 1, &stats);
    }
  }
}

Statistics StatisticsAt(const AttentionProblem& problem, const Position& batch, int64_t count,
                        float* all) {
  int64_t index = batch.at[0];
  for (int axis = 1; axis < 3; ++axis) index = index * problem.batch[axis] + batch.at[axis];
  float* max = all + index * 2 * count;
  return {max, max + count};
}

void StoreStatistics(const AttentionProblem& problem, const RowTile& tile, const State& state,
                     float* all) {
  const float of_empty = problem.inf_as_zero ? 0.f : std::numeric_limits<float>::quiet_NaN();
  for (int64_t r = 0; r < tile.rows; ++r) {
    const Position p = tile.At(r);
    const Statistics to = StatisticsAt(problem, p, problem.q_len, all);
    const bool empty = state.max[r] == kNegInf && state.sum[r] == 0.f;
    to.max[p.at[kRow]] = empty ? of_empty : state.max[r];
    to.log_sum[p.at[kRow]] = empty ? 0.f : std::log(state.sum[r]);
  }
}

void SubtractStatistics(const AttentionProblem& problem, const RowTile& tile, int64_t token,
                        int64_t n, float* all, float* scores) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    const Statistics of = StatisticsAt(problem, tile.At(r), problem.kv_len, all);
    const float* max = of.max + token;
    const float* log_sum = of.log_sum + token;
    float* row = scores + r * kTokenTile;
    for (int64_t i = 0; i < n; ++i) row[i] = row[i] - max[i] - log_sum[i];
  }
}

DropoutState ReadDropout(const AttentionProblem& problem, const Reader& reader) {
  const Position origin;
  const auto probability = static_cast<double>(reader.Scalar(problem.probability, origin));
  return {static_cast<uint64_t>(reader.Integer(problem.seed, origin)),
          static_cast<uint64_t>(reader.Integer(problem.dropout_offset, origin)),
          DropoutThreshold(probability), static_cast<float>(1.0 / (1.0 - probability))};
}

namespace {

// Random words of up to kTokenTile elements from `index` on, and which of them are kept.
class Draws {
 public:
  Draws(const KernelSet& kernels, const DropoutState& dropout, uint64_t index, int64_t n)
      : words_(blocks_ + index % kPhiloxBlock),
        none_(dropout.threshold > std::numeric_limits<uint32_t>::max()),
        least_(static_cast<uint32_t>(dropout.threshold)) {
    const int64_t blocks = CeilDiv(words_ - blocks_ + n, kPhiloxBlock);
    kernels.philox(dropout.seed, dropout.offset, index / kPhiloxBlock, blocks, blocks_);
  }

  // Calls use(i, whether element i is kept) for i < n, in a loop that compilers vectorize.
  template <typename Use>
  void ForEach(int64_t n, Use use) const {
    if (none_) {
      for (int64_t i = 0; i < n; ++i) use(i, false);
    } else {
      for (int64_t i = 0; i < n; ++i) use(i, words_[i] >= least_);
    }
  }

 private:
  uint32_t blocks_[kTokenTile + kPhiloxBlock];
  const uint32_t* const words_;
  const bool none_;
  const uint32_t least_;
};

}  // namespace

void ApplyDropout(const KernelSet& kernels, const AttentionProblem& problem,
                  const DropoutState& dropout, const RowTile& tile, int64_t token, int64_t n,
                  float* probs) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    const Draws draws(kernels, dropout, ProbabilityIndex(problem, tile.At(r)) + token, n);
    float* const row = probs + r * kTokenTile;
    draws.ForEach(n, [=, factor = dropout.factor](int64_t i, bool kept) {
      row[i] = kept ? row[i] * factor : 0.f;
    });
  }
}

void WriteDropoutMask(const KernelSet& kernels, const AttentionProblem& problem,
                      const DropoutState& dropout, const RowTile& tile, ColumnRange columns,
                      void* const* outputs) {
  const Array& mask = problem.dropout_mask;
  void* const data = outputs[mask.buffer];
  const int64_t stride = mask.strides[kCol];
  for (int64_t r = 0; r < tile.rows; ++r) {
    Position p = tile.At(r);
    const uint64_t row = ProbabilityIndex(problem, p);
    for (int64_t column = columns.begin; column < columns.end; column += kTokenTile) {
      const int64_t n = std::min(kTokenTile, columns.end - column);
      p.at[kCol] = column;
      const int64_t index = mask.IndexOf(p);
      const Draws draws(kernels, dropout, row + column, n);
      if (stride == 1 && BitsOf(mask.type) == 8 && !IsFloat(mask.type)) {
        auto* const bytes = static_cast<uint8_t*>(data) + index;
        draws.ForEach(n, [=](int64_t i, bool kept) { bytes[i] = kept ? 1 : 0; });
      } else {
        draws.ForEach(n, [&](int64_t i, bool kept) {
          StoreElement(mask.type, data, index + i * stride, kept ? 1.0 : 0.0);
        });
      }
    }
  }
}

namespace {

void RoundValues(const Rounding& rounding, int64_t n, float* values) {
  const float zero_point = static_cast<float>(rounding.zero_point);
  for (int64_t i = 0; i < n; ++i) {
    double code = 0;  // of NaN, where codes are integers
    if (!std::isnan(values[i])) {
      code = RoundTo(rounding.type, Code(rounding, values[i]));
    } else if (!IsInteger(rounding.type)) {
      continue;
    }
    values[i] = (static_cast<float>(code) - zero_point) * rounding.unit;
  }
}

}  // namespace

void RoundQuotients(const KernelSet& kernels, const Rounding& rounding, int64_t rows, int64_t n,
                    float* divisors, float* values) {
  const int64_t columns = WholeHalves(n);
  const bool by_kernel = TakesVectors(rounding);
  if (by_kernel) {
    for (int64_t r = 0; r < rows; ++r) divisors[r] *= rounding.scale;
    const auto zero_point = static_cast<float>(rounding.zero_point);
    const RoundedCodes codes{static_cast<float>(LowestOf(rounding.type)) - zero_point,
                             static_cast<float>(HighestOf(rounding.type)) - zero_point, -zero_point,
                             rounding.unit};
    kernels.round(codes, rows, columns, divisors, values);
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* const row = values + r * kTokenTile;
    if (!by_kernel) {
      for (int64_t t = 0; t < n; ++t) row[t] /= divisors[r];
      if (rounding.type != kUndef) RoundValues(rounding, n, row);
    }
    std::fill(row + n, row + columns, 0.f);
  }
}

}  // namespace kvant::cpu
