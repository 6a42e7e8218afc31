// The statistics input of a training-backward graph.
#ifndef KVANT_TOOLS_BACKWARD_STATS_H_
#define KVANT_TOOLS_BACKWARD_STATS_H_

#include "absl/status/status.h"
#include "kvant/graph/graph.h"
#include "kvant/tools/buffer.h"

namespace kvant {

// Backward graphs recompute the scores and read forward's log-sum-exp:
// exp(scores - stats). Computes those scores, the first operand of `subtract`, on
// the oracle from the inputs in `buffers`, and writes max + ln(sum exp(x - max)) of
// each row to the buffer of tensor `stats` (0 for a row that is wholly -inf).
absl::Status FillBackwardStats(const Graph& graph, const Op& subtract, TensorId stats,
                               BufferMap& buffers);

}  // namespace kvant

#endif  // KVANT_TOOLS_BACKWARD_STATS_H_
