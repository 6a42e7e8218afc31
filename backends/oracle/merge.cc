// MergeAttention, from its definition in ops.inc.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kvant/backends/oracle/ops.h"

namespace kvant::oracle {

absl::StatusOr<Array> EvalMergeAttention(OpContext& context) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const auto parts = static_cast<int>(context.inputs.size() / 2);
  const Dims& dims = context.out_dims(0);
  const int64_t channels = dims.back(),
                rows = ElementsOf(absl::MakeSpan(dims).first(dims.size() - 1));
  Array output(dims);
  Array* const stats = context.Output(1);
  context.executor.ParallelFor(rows, [&](int64_t row, int) {
    double max = -kInf;
    for (int i = 0; i < parts; ++i) max = std::fmax(max, context.in(2 * i + 1).values[row]);
    double sum = 0;
    double* const to = output.data() + row * channels;
    for (int i = 0; i < parts; ++i) {
      const double stat = context.in(2 * i + 1).values[row];
      if (stat == -kInf) continue;
      const double weight = std::exp(stat - max);
      const double* const from = context.in(2 * i).data() + row * channels;
      for (int64_t c = 0; c < channels; ++c) to[c] += weight * from[c];
      sum += weight;
    }
    if (sum != 0) {
      for (int64_t c = 0; c < channels; ++c) to[c] /= sum;
    }
    if (stats) stats->values[row] = sum == 0 ? -kInf : max + std::log(sum);
  });
  return output;
}

}  // namespace kvant::oracle
