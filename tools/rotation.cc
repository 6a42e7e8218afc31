#include "kvant/tools/rotation.h"

#include <algorithm>
#include <utility>

#include "kvant/graph/status.h"
#include "kvant/tools/memory_speed.h"

namespace kvant {

absl::StatusOr<Rotation> MakeRotation(const GraphRunner& runner, const BufferMap& inputs,
                                      int64_t bytes, int64_t beyond) {
  constexpr int64_t kMaxCopies = 4096;
  if (beyond == 0) beyond = 2 * LastLevelCacheBytes();
  const int64_t copies =
      std::clamp<int64_t>(beyond / std::max<int64_t>(bytes, 1) + 1, 2, kMaxCopies);
  Rotation rotation;
  for (int64_t i = 0; i < copies; ++i) {
    auto copy = std::make_unique<BufferMap>();
    for (const auto& [id, buffer] : inputs) copy->emplace(id, buffer.Copy());
    KVANT_ASSIGN_OR_RETURN(GraphRunner::Binding binding, runner.Bind(*copy));
    rotation.buffers.push_back(std::move(copy));
    rotation.bindings.push_back(std::move(binding));
  }
  return rotation;
}

int64_t PortBytes(const Graph& graph) {
  int64_t bytes = 0;
  for (TensorId id : graph.inputs()) bytes += graph.tensor(id).memory_bytes();
  for (TensorId id : graph.outputs()) bytes += graph.tensor(id).memory_bytes();
  return bytes;
}

}  // namespace kvant
