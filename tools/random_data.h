// Random inputs for a graph, each fit for what the graph does with it.
#ifndef KVANT_TOOLS_RANDOM_DATA_H_
#define KVANT_TOOLS_RANDOM_DATA_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "kvant/backends/executor.h"
#include "kvant/graph/graph.h"
#include "kvant/tools/buffer.h"

namespace kvant {

enum class DataKind : uint8_t {
  // benchdnn's small integers: Q +-4, K and V +-2, codes s8 +-4, s4 +-2, u4 0..4,
  // divisors 2, 4 or 8, scales powers of two, masks 0 and -inf with one row that is
  // masked whole. Scores are then exact in any order of summation.
  kInteger,
  // Normal-like values whose means differ per head, token and channel, so that a
  // mixed-up index shows; codes over their whole range, scales to match, some of
  // them negative; scale and soft cap as models have them.
  kReal,
};

struct RandomDataOptions {
  DataKind kind = DataKind::kInteger;
  uint64_t seed = 1;
};

// A buffer for every input of a graph whose shapes are known, laid out by its
// strides. The statistics that a backward graph reads are those of its own
// scores (computed by the oracle), so that its probabilities sum to 1.
absl::StatusOr<BufferMap> MakeRandomInputs(const Graph& graph, const RandomDataOptions& options,
                                           Executor& executor);

}  // namespace kvant

#endif  // KVANT_TOOLS_RANDOM_DATA_H_
