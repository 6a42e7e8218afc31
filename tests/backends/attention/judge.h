// Attention by plain f64 loops, through the views of a spec, element by element.
#ifndef KVANT_TESTS_BACKENDS_ATTENTION_JUDGE_H_
#define KVANT_TESTS_BACKENDS_ATTENTION_JUDGE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <vector>

#include "kvant/graph/data_type.h"
#include "kvant/kernels/philox.h"
#include "kvant/patterns/attention_spec.h"
#include "kvant/tests/backends/attention/harness.h"

namespace kvant::cpu {

inline constexpr double kInf = std::numeric_limits<double>::infinity();

template <typename Visit>
void ForEachPosition(const Dims5& dims, Visit visit) {
  Dims5 p{};
  for (int64_t extent : dims) {
    if (extent == 0) return;
  }
  while (true) {
    visit(p);
    int axis = kViewRank - 1;
    while (axis >= 0 && ++p[axis] == dims[axis]) p[axis--] = 0;
    if (axis < 0) return;
  }
}

// The f64 loops. Reads through views only, element by element.
class Judge {
 public:
  Judge(const AttentionSpec& spec, const std::deque<GuardedBuffer>& inputs)
      : spec_(spec), inputs_(inputs) {}

  struct Row {
    std::vector<double> out;
    double stats = 0;
  };

  Row Compute(Dims5 p) {
    const int64_t first = First(p), length = Length(p);
    std::vector<double> probs(length);
    Row row;
    if (spec_.over_queries) {
      for (int64_t c = 0; c < length; ++c) probs[c] = Column(p, c)[p[3]];
    } else {
      for (int64_t c = 0; c < length; ++c) probs[c] = c < first ? -kInf : Score(p, c, length);
      row.stats = Softmax(p, probs);
    }
    for (int64_t c = 0; c < length; ++c) probs[c] = Finish(p, c, probs[c]);
    row.out.assign(spec_.v_head_size, 0.0);
    for (int64_t c = first; c < length; ++c) {
      const std::vector<double>& v = Token(spec_.v, p, c);
      for (int64_t d = 0; d < spec_.v_head_size; ++d) row.out[d] += probs[c] * v[d];
    }
    Rotate(spec_.output_hadamard, row.out);
    return row;
  }

  bool Kept(const Dims5& p, int64_t c) const {
    const Dropout& dropout = *spec_.dropout;
    int64_t index = p[0];
    index = index * spec_.batch[1] + p[1];
    index = index * spec_.batch[2] + p[2];
    index = (index * spec_.q_len + p[3]) * spec_.kv_len + c;
    return DropoutKeeps(static_cast<uint64_t>(Value(dropout.seed, p)),
                        static_cast<uint64_t>(Value(dropout.offset, p)), index,
                        Value(dropout.probability, p));
  }

 private:
  int64_t First(const Dims5& p) const {
    return spec_.kv_first.present() ? static_cast<int64_t>(Read(spec_.kv_first, p)) : 0;
  }
  int64_t Length(const Dims5& p) const {
    if (spec_.kv_lengths.present()) return static_cast<int64_t>(Read(spec_.kv_lengths, p));
    if (!spec_.k[0].range.present()) return spec_.kv_len;
    int64_t length = 0;
    for (const KvSegment& segment : spec_.k) length += Range(segment, p)[1];
    return length;
  }
  // First token and tokens of a segment.
  std::array<int64_t, 2> Range(const KvSegment& segment, const Dims5& p) const {
    if (!segment.range.present()) return {0, segment.tokens()};
    return {static_cast<int64_t>(Read(segment.range, {p[0], 0, 0, 0, 0})),
            static_cast<int64_t>(Read(segment.range, {p[0], 0, 0, 0, 1}))};
  }
  double Read(const View& view, const Dims5& p) const {
    return LoadElement(view.type, inputs_[view.port].data(), IndexOf(view, p));
  }
  double Value(const Operand& operand, const Dims5& p) const {
    if (operand.constant) return operand.constant->value();
    return operand.view.present() ? Read(operand.view, p) : 0.0;
  }
  double Dequantized(const View& data, const std::optional<Quantization>& q, const Dims5& p) const {
    double code = Read(data, p);
    if (!q) return code;
    if (!q->scales.present()) {
      const int64_t i = q->static_axis < 0 ? 0 : p[q->static_axis];
      const double zp = q->static_zps.empty() ? 0.0 : static_cast<double>(q->static_zps[i]);
      return (code - zp) * q->static_scales[i];
    }
    Dims5 g;
    for (int a = 0; a < kViewRank; ++a) g[a] = p[a] / q->group[a];
    const double scale = Read(q->scales, g);
    if (!q->codebook.empty()) return q->codebook[static_cast<size_t>(code)] * scale;
    if (!q->zero_points.present()) return code * scale;
    const double zp = Read(q->zero_points, g);
    return IsFloat(q->zero_points.type) ? code * scale - zp : (code - zp) * scale;
  }
  // All channels of one.
  const std::vector<double>& Token(const absl::InlinedVector<KvSegment, 1>& segments, Dims5 p,
                                   int64_t token) {
    int64_t row = &segments == &spec_.k ? 0 : static_cast<int64_t>(spec_.k.size());
    for (const KvSegment& segment : segments) {
      const int64_t capacity = segment.data.dims[3];
      const auto [first, tokens] = Range(segment, p);
      if (token < tokens) {
        p[3] = (first + token) % capacity;
        // Coordinates along axes that the data is broadcast over do not exist for it.
        for (int a = 0; a < 3; ++a) p[a] = segment.data.dims[a] == 1 ? 0 : p[a];
        std::vector<double>& x = tokens_[{row, p[0], p[1], p[2], p[3]}];
        for (p[4] = std::ssize(x); p[4] < segment.data.dims[4]; ++p[4]) {
          x.push_back(Dequantized(segment.data, segment.quantization, p));
        }
        return x;
      }
      token -= tokens;
      ++row;
    }
    ADD_FAILURE() << "no such token";
    std::abort();
  }
  // Element (i, j) of the matrix is -1 where i and j have an odd number of ones in common.
  static void Rotate(int64_t block, std::vector<double>& x) {
    if (block == 0) return;
    const std::vector<double> from = x;
    for (size_t i = 0; i < x.size(); ++i) {
      const size_t n = block, first = i / n * n;
      x[i] = 0;
      for (size_t j = 0; j < n; ++j) {
        x[i] += from[first + j] * (std::popcount((i - first) & j) % 2 == 0 ? 1 : -1);
      }
      x[i] /= std::sqrt(static_cast<double>(block));
    }
  }
  const std::vector<double>& Query(Dims5 p) {
    std::vector<double>& q = queries_[{p[0], p[1], p[2], p[3]}];
    if (!q.empty()) return q;
    for (p[4] = 0; p[4] < spec_.head_size; ++p[4]) {
      q.push_back(Dequantized(spec_.q, spec_.q_quantization, p));
    }
    Rotate(spec_.q_hadamard, q);
    return q;
  }
  double Score(Dims5 p, int64_t c, int64_t length) {
    const std::vector<double>& q = Query(p);
    const std::vector<double>& k = Token(spec_.k, p, c);
    double s = 0;
    for (int64_t d = 0; d < spec_.head_size; ++d) s += q[d] * k[d];
    p[4] = c;
    for (const ScoreStep& step : spec_.steps) s = Step(step, p, s, length);
    return s;
  }
  double Step(const ScoreStep& step, const Dims5& p, double s, int64_t length) const {
    using Kind = ScoreStep::Kind;
    const double x = Value(step.operand, p);
    int64_t shift = 0;
    if (step.alignment == ScoreStep::Alignment::kBottomRight) shift = length - spec_.q_len;
    if (step.alignment == ScoreStep::Alignment::kRuntime) {
      shift = static_cast<int64_t>(Value(step.shift_add, p) - Value(step.shift_sub, p));
    }
    const int64_t distance = p[4] - (p[3] + shift);
    switch (step.kind) {
      case Kind::kMultiply:
        return s * x;
      case Kind::kDivide:
        return s / x;
      case Kind::kAdd:
        return s + x;
      case Kind::kSubtract:
        return s - x;
      case Kind::kMaximum:
        return s < x || std::isnan(x) ? x : s;
      case Kind::kMinimum:
        return x < s || std::isnan(x) ? x : s;
      case Kind::kTanh:
        return std::tanh(s);
      case Kind::kSelect:
        return (Read(step.condition, p) != 0) != step.inverted ? s : x;
      case Kind::kAlibi:
        return s + x * static_cast<double>(distance);
      case Kind::kBand:
        break;
    }
    const bool in =
        (!step.left || -*step.left <= distance) && (!step.right || distance <= *step.right);
    return in != step.inverted ? s : x;
  }
  // Probabilities over the queries.
  const std::vector<double>& Column(Dims5 p, int64_t c) {
    std::vector<double>& column = columns_[{p[0], p[1], p[2], c}];
    if (!column.empty()) return column;
    for (p[3] = 0; p[3] < spec_.q_len; ++p[3]) column.push_back(Score(p, c, spec_.kv_len));
    Softmax(p, column);
    return column;
  }
  // Turns scores into probabilities; returns the statistics.
  double Softmax(const Dims5& p, std::vector<double>& s) const {
    double max = spec_.sinks.present() ? Read(spec_.sinks, p) : -kInf;
    const double sink = max;
    for (double x : s) max = std::max(max, x);
    const auto hidden = [](double x) { return x == -kInf; };
    if (max == -kInf && std::all_of(s.begin(), s.end(), hidden)) {
      const bool zero = spec_.softmax_mode == SoftmaxMode::kInfAsZero;
      for (double& x : s) x = zero ? 0.0 : std::nan("");
      return zero ? 0.0 : std::nan("");
    }
    double sum = spec_.sinks.present() ? std::exp(sink - max) : 0.0;
    for (double& x : s) sum += x = std::exp(x - max);
    for (double& x : s) x /= sum;
    return max + std::log(sum);
  }
  double Finish(const Dims5& p, int64_t c, double x) const {
    if (spec_.dropout) x = Kept(p, c) ? x / (1 - Value(spec_.dropout->probability, p)) : 0.0;
    if (!spec_.probs_quantization) return x;
    const FakeQuantize& q = *spec_.probs_quantization;
    const double code = RoundTo(q.type, std::nearbyint(x / q.scale) + q.zero_point);
    return (code - q.zero_point) * q.scale;
  }

  const AttentionSpec& spec_;
  const std::deque<GuardedBuffer>& inputs_;
  std::map<std::array<int64_t, 4>, std::vector<double>> queries_;
  std::map<std::array<int64_t, 5>, std::vector<double>> tokens_;
  std::map<std::array<int64_t, 4>, std::vector<double>> columns_;  // with over_queries
};

}  // namespace kvant::cpu

#endif  // KVANT_TESTS_BACKENDS_ATTENTION_JUDGE_H_
