// A graph as a picture.
#ifndef KVANT_TOOLS_DRAW_H_
#define KVANT_TOOLS_DRAW_H_

#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvant/graph/graph.h"
#include "kvant/patterns/partition.h"

namespace kvant {

// DrawDot (dot.h) as an SVG file, through Graphviz's `dot`. kUnimplemented when that is
// not installed.
absl::Status DrawSvg(const Graph& graph, absl::Span<const Partition> partitions,
                     const std::string& path);

}  // namespace kvant

#endif  // KVANT_TOOLS_DRAW_H_
