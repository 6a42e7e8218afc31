// From a graph to partitions.
#ifndef KVANT_PATTERNS_PARTITIONER_H_
#define KVANT_PATTERNS_PARTITIONER_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvant/graph/graph.h"
#include "kvant/patterns/partition.h"

namespace kvant {

struct PartitionOptions {
  enum class Grammar : uint8_t {
    kNative,  // fuse all that means attention
    kOneDnn,  // fuse what oneDNN fuses: reproduces its partitions
  };
  Grammar grammar = Grammar::kNative;
};

struct PartitionResult {
  // In topological order; every op but End (and Wildcard, which nothing runs)
  // is in exactly one.
  std::vector<Partition> partitions;
  // Near misses: why a SoftMax that might have been attention is not fused, or
  // not wholly, a sentence each, naming ops.
  std::vector<std::string> explanations;
};

// Splits a finalized graph. Shapes may be unknown; then Partition::attention()
// is null until WithPorts. kInvalidGraph if the graph is not finalized.
absl::StatusOr<PartitionResult> PartitionGraphExplained(const Graph& graph,
                                                        const PartitionOptions& options = {});
absl::StatusOr<std::vector<Partition>> PartitionGraph(const Graph& graph,
                                                      const PartitionOptions& options = {});

}  // namespace kvant

#endif  // KVANT_PATTERNS_PARTITIONER_H_
