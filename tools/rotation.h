// Copies of a graph's buffers, so that a benchmark finds none of them in a cache.
#ifndef KVANT_TOOLS_ROTATION_H_
#define KVANT_TOOLS_ROTATION_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kvant/tools/buffer.h"
#include "kvant/tools/graph_runner.h"

namespace kvant {

struct Rotation {
  std::vector<std::unique_ptr<BufferMap>> buffers;
  std::vector<GraphRunner::Binding> bindings;
};

// Enough copies of `inputs` (`bytes` with the outputs, at least two) that none is
// still cached when its turn comes again: more than `beyond` bytes, or twice the
// host's last-level cache. The errors of GraphRunner::Bind.
absl::StatusOr<Rotation> MakeRotation(const GraphRunner& runner, const BufferMap& inputs,
                                      int64_t bytes, int64_t beyond = 0);

// Bytes of everything the graph reads and writes.
int64_t PortBytes(const Graph& graph);

}  // namespace kvant

#endif  // KVANT_TOOLS_ROTATION_H_
