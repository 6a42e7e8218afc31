// From a graph to partitions.
#ifndef KVANT_PATTERNS_PARTITIONER_H_
#define KVANT_PATTERNS_PARTITIONER_H_

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

// Splits a finalized graph, in topological order. Every op but End (and Wildcard, which nothing
// runs) is in exactly one partition. Shapes may be unknown; then Partition::attention() is null
// until WithPorts. What was nearly attention is among the misses of the partitions around it.
// kInvalidGraph if the graph is not finalized.
absl::StatusOr<std::vector<Partition>> PartitionGraph(const Graph& graph,
                                                      const PartitionOptions& options = {});

}  // namespace kvant

#endif  // KVANT_PATTERNS_PARTITIONER_H_
