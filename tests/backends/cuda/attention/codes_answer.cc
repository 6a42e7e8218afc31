#include "kvant/tests/backends/cuda/attention/codes_answer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace kvant::cuda {

void CodesAnswer::Judge(const Elements& output, CodesResult& result) const {
  double error = 0, norm = 0, own = 0;
  for (int b = 0; b < problem.batch; ++b) {
    for (int h = 0; h < problem.kv_heads; ++h) {
      const std::vector<double> keys = Values(k, b, h, problem.head_size);
      const std::vector<double> values = Values(v, b, h, problem.v_head_size);
      for (int r = 0; r < Rows(); ++r) {
        const int64_t row = (int64_t{b} * problem.kv_heads + h) * Rows() + r;
        std::vector<double> lost;
        const std::vector<double> answer = Answer(row, r, h, Length(b), keys, values, lost);
        for (int d = 0; d < problem.v_head_size; ++d) {
          const double got = output.Get(row * problem.v_head_size + d);
          const double want = answer[static_cast<size_t>(d)];
          result.wrong_nan += std::isnan(got) != std::isnan(want);
          if (std::isnan(want)) continue;
          error += (got - want) * (got - want);
          norm += want * want;
          own += lost[static_cast<size_t>(d)] * lost[static_cast<size_t>(d)];
        }
      }
    }
  }
  result.error = norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
  result.own_error = norm == 0 ? 0 : std::sqrt(own / norm);
}

std::vector<double> CodesAnswer::Values(const SideData& s, int b, int h, int channels) const {
  std::vector<double> values;
  for (int t = 0; t < Length(b); ++t) {
    for (int d = 0; d < channels; ++d) values.push_back(s.Value(b, h, s.Place(b, t), d));
  }
  return values;
}

std::vector<double> CodesAnswer::Answer(int64_t row, int r, int head, int length,
                                        const std::vector<double>& keys,
                                        const std::vector<double>& values,
                                        std::vector<double>& lost) const {
  const int head_size = problem.head_size;
  std::vector<double> scores, sizes;
  const int seen = problem.causal ? r % problem.q_len + length - problem.q_len + 1 : length;
  double top = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int t = 0; t < seen; ++t) {
    double score = 0, size = 0;
    for (int d = 0; d < head_size; ++d) {
      const double x = q.Get(row * head_size + d) * keys[static_cast<size_t>(t * head_size + d)];
      score += x;
      size += std::abs(x);
    }
    score *= scale;
    sizes.push_back(size * scale);
    if (problem.soft_cap) score = std::tanh(score / kCap) * kCap;
    scores.push_back(score);
    top = std::max(top, score);
  }
  const double sink = sinks[static_cast<size_t>(head * problem.heads_per_kv + r / problem.q_len)];
  if (problem.sinks) top = std::max(top, sink);
  std::vector<double> out(static_cast<size_t>(problem.v_head_size));
  lost.assign(out.size(), 0);
  if (scores.empty()) return out;
  if (problem.sinks) sum = std::exp(sink - top);
  for (size_t t = 0; t < scores.size(); ++t) {
    const double p = std::exp(scores[t] - top);
    sum += p;
    for (size_t d = 0; d < out.size(); ++d) out[d] += p * values[t * out.size() + d];
  }
  for (double& x : out) x /= sum;
  for (size_t t = 0; t < scores.size(); ++t) {
    const double p = std::exp(scores[t] - top) / sum;
    for (size_t d = 0; d < out.size(); ++d) {
      const double x = values[t * out.size() + d];
      const double off = 0x1p-23 * p * (sizes[t] * std::abs(x - out[d]) + std::abs(x));
      lost[d] = std::hypot(lost[d], off);
    }
  }
  return out;
}

}  // namespace kvant::cuda
