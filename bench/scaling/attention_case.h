// A decode step over sequences of given lengths, or the end of a prompt, for unit_times.
#ifndef KVANT_BENCH_SCALING_ATTENTION_CASE_H_
#define KVANT_BENCH_SCALING_ATTENTION_CASE_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kvant/graph/graph.h"
#include "kvant/tools/buffer.h"

namespace kvant {

struct AttentionCase {
  DataType type = kU4;  // of K and V, in groups of `group` channels with f32 scales
  int64_t group = 32;
  bool zero_points = false;
  int64_t kv_heads = 8, ratio = 4, head_size = 128;
  std::vector<int64_t> lengths;  // of sequences: one is contiguous, several are in pages
  int64_t queries = 1;           // of each sequence
  bool bf16 = false;             // products may be computed in bf16
  bool by_tokens = false;        // a token's heads lie side by side: [N, S, H, D]
};

absl::StatusOr<Graph> MakeCaseGraph(const AttentionCase& of);
// Random codes and queries, positive scales, zero points in the middle; lengths and pages in order.
BufferMap MakeCaseInputs(const AttentionCase& of, const Graph& graph);

}  // namespace kvant

#endif  // KVANT_BENCH_SCALING_ATTENTION_CASE_H_
