// A graph in Graphviz's language.
#ifndef KVANT_TOOLS_DOT_H_
#define KVANT_TOOLS_DOT_H_

#include <string>

#include "absl/types/span.h"
#include "kvant/graph/graph.h"
#include "kvant/patterns/partition.h"

namespace kvant {

// Ops as nodes, tensors as edges that say type and shape, partitions as boxes around their ops.
std::string DrawDot(const Graph& graph, absl::Span<const Partition> partitions);

}  // namespace kvant

#endif  // KVANT_TOOLS_DOT_H_
