#include "kvant/tools/backward_stats.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "kvant/graph/status.h"
#include "kvant/tools/graph_runner.h"
#include "kvant/tools/tensor_walk.h"

namespace kvant {
namespace {

// Indices of the ops that `id` is computed from.
std::vector<Graph::OpIndex> AncestorsOf(const Graph& graph, TensorId id) {
  std::vector<Graph::OpIndex> ops;
  absl::flat_hash_set<Graph::OpIndex> seen;
  std::vector<TensorId> todo = {id};
  while (!todo.empty()) {
    const Graph::OpIndex op = graph.FindTensor(todo.back())->producer.op;
    todo.pop_back();
    if (op == Graph::kNoOp || !seen.insert(op).second) continue;
    ops.push_back(op);
    const auto& inputs = graph.ops()[op].inputs;
    todo.insert(todo.end(), inputs.begin(), inputs.end());
  }
  return ops;
}

// Memory offsets of a tensor's elements in dense row-major order.
std::vector<int64_t> OffsetsOf(const LogicalTensor& tensor) {
  std::vector<int64_t> offsets;
  offsets.reserve(static_cast<size_t>(tensor.elements()));
  ForEachElement(tensor, [&](int64_t, int64_t offset, const Dims&) { offsets.push_back(offset); });
  return offsets;
}

double LogSumExp(const std::vector<double>& row) {
  const double top = *std::max_element(row.begin(), row.end());
  if (top == -std::numeric_limits<double>::infinity()) return 0;
  double sum = 0;
  for (double x : row) sum += std::exp(x - top);
  return top + std::log(sum);
}

}  // namespace

absl::Status FillBackwardStats(const Graph& graph, const Op& subtract, TensorId stats_id,
                               BufferMap& buffers) {
  const LogicalTensor& scores = graph.tensor(subtract.inputs[0]);
  const LogicalTensor& stats = graph.tensor(stats_id);
  if (!scores.has_shape() || scores.rank() < 1 || scores.dims->back() == 0) {
    return absl::OkStatus();
  }
  const int64_t cols = scores.dims->back();
  if (stats.elements() != scores.elements() / cols) return absl::OkStatus();  // not per row

  BufferMap work;
  if (const std::vector<Graph::OpIndex> ops = AncestorsOf(graph, scores.id); !ops.empty()) {
    const Graph forward = graph.Subgraph(ops);
    for (TensorId id : forward.inputs()) {
      if (id != stats_id) work.emplace(id, buffers.at(id).Copy());
    }
    // Scores that depend on the statistics themselves are no forward pass.
    if (forward.FindTensor(stats_id) != nullptr) return absl::OkStatus();
    KVANT_ASSIGN_OR_RETURN(Engine engine, Engine::Create(EngineOptionsFor("oracle", 0)));
    KVANT_ASSIGN_OR_RETURN(const GraphRunner runner,
                           GraphRunner::Create(forward, std::move(engine)));
    KVANT_RETURN_IF_ERROR(runner.Run(work));
  } else {
    work.emplace(scores.id, buffers.at(scores.id).Copy());
  }

  const std::byte* const data = work.at(scores.id).data();
  const std::vector<int64_t> to = OffsetsOf(stats);
  std::vector<double> row(static_cast<size_t>(cols));
  ForEachElement(scores, [&](int64_t index, int64_t offset, const Dims&) {
    const int64_t col = index % cols;
    row[col] = LoadElement(scores.type, data, offset);
    if (col + 1 < cols) return;
    StoreElement(stats.type, buffers.at(stats_id).data(), to[index / cols], LogSumExp(row));
  });
  return absl::OkStatus();
}

}  // namespace kvant
