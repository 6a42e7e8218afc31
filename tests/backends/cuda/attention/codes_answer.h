// The answer of a CodesProblem in f64, from what is stored.
#ifndef KVANT_TESTS_BACKENDS_CUDA_ATTENTION_CODES_ANSWER_H_
#define KVANT_TESTS_BACKENDS_CUDA_ATTENTION_CODES_ANSWER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvant/tests/backends/cuda/attention/codes_problem.h"
#include "kvant/tests/backends/cuda/attention/codes_side.h"

namespace kvant::cuda {

struct CodesAnswer {
  const CodesProblem& problem;
  const SideData &k, &v;
  const Elements& q;                // [b][kv head][row][channel]
  const std::vector<float>& sinks;  // of each query head
  double scale;                     // of scores

  static constexpr float kCap = 5.f;

  // Compares an output, [b][kv head][row][channel]: errors and NaN of `result`.
  void Judge(const Elements& output, CodesResult& result) const;

 private:
  int Rows() const { return problem.heads_per_kv * problem.q_len; }
  int Length(int b) const {
    return problem.lengths.size() == 1 ? problem.lengths[0]
                                       : problem.lengths[static_cast<size_t>(b)];
  }
  std::vector<double> Values(const SideData& s, int b, int h, int channels) const;
  // Of row r of a head. lost: its error where f32 loses 2^-23 of each score's and product's
  // magnitude.
  std::vector<double> Answer(int64_t row, int r, int head, int length,
                             const std::vector<double>& keys, const std::vector<double>& values,
                             std::vector<double>& lost) const;
};

}  // namespace kvant::cuda

#endif  // KVANT_TESTS_BACKENDS_CUDA_ATTENTION_CODES_ANSWER_H_
