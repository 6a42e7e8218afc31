// Graphs as JSON, in the format of oneDNN's own graph dumps
// (ONEDNN_GRAPH_DUMP=graph).
#ifndef KVANT_GRAPH_JSON_H_
#define KVANT_GRAPH_JSON_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "kvant/graph/graph.h"

namespace kvant {

inline constexpr size_t kMaxGraphBytes = size_t{1} << 28;

// Reads a graph and finalizes it. Ops may come in any order; unknown keys are
// ignored; input_ports and output_ports are advisory and not read.
// kInvalidJson for malformed text or a value of the wrong JSON type (with its
// path, e.g. "graph[3].inputs[0].shape"), otherwise AddOp's and Finalize's errors.
// `max_bytes` bounds the text, nesting is bounded at 64.
absl::StatusOr<Graph> GraphFromJson(std::string_view text, size_t max_bytes = kMaxGraphBytes);
// At most kMaxGraphBytes of it.
absl::StatusOr<Graph> GraphFromJsonFile(const std::string& path);

// Writes what oneDNN writes, same keys and types, and two keys of its own behind them where the
// graph has constants or names: kvant_constants, kvant_names.
std::string GraphToJson(const Graph& graph);

}  // namespace kvant

#endif  // KVANT_GRAPH_JSON_H_
