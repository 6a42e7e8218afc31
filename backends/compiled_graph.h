// CompiledGraph: a whole graph with the kernels that run it.
#ifndef KVANT_BACKENDS_COMPILED_GRAPH_H_
#define KVANT_BACKENDS_COMPILED_GRAPH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/backends/compiled_partition.h"
#include "kvant/backends/tensor.h"
#include "kvant/graph/graph.h"

namespace kvant {

// Immutable and cheap to copy; may be executed from several threads at once. One that was made by
// default or moved from has nothing to run.
class CompiledGraph {
 public:
  // With all shapes inferred. Its inputs() and outputs() are the positions below.
  const Graph& graph() const;
  // In the order in which they run.
  const std::vector<CompiledPartition>& partitions() const;
  // Nothing runs op by op.
  bool fused() const;
  // The largest CompiledPartition::rounding.
  double rounding() const;
  // What runs each partition and which backends were passed over, then why attention was not found
  // where it nearly was: a sentence or more each.
  std::vector<std::string> explanations() const;
  // The explanations, a line each.
  std::string ToString() const;

  // Of one execution: what partitions hand on to each other, and their own.
  size_t scratch_bytes() const;
  // Positional or by name, scratch and errors as CompiledPartition::Execute: on a GPU scratch of
  // one's own must be zeroed once. All is checked before anything runs. An error that only values
  // show (a KV length over capacity) may come after some partitions have written what is theirs.
  absl::Status Execute(const Stream& stream, absl::Span<const ConstTensor> inputs,
                       absl::Span<const Tensor> outputs, absl::Span<std::byte> scratch = {}) const;
  using NamedInputs = CompiledPartition::NamedInputs;
  using NamedOutputs = CompiledPartition::NamedOutputs;
  absl::Status Execute(const Stream& stream, NamedInputs inputs, NamedOutputs outputs) const;

 private:
  friend class Engine;
  // Where a partition's port lies: an input or output of the graph, or so far into the scratch.
  struct Place {
    enum class In : uint8_t { kInputs, kOutputs, kScratch };
    In in = In::kScratch;
    size_t at = 0;
  };
  struct Step {
    std::vector<Place> inputs, outputs;
    size_t scratch_at = 0;
  };
  struct State;
  static absl::StatusOr<CompiledGraph> Make(const Engine& engine, Graph graph,
                                            std::vector<CompiledPartition> partitions,
                                            std::vector<std::string> misses);
  absl::Status RunStep(size_t step, const Stream& stream, absl::Span<const ConstTensor> inputs,
                       absl::Span<const Tensor> outputs, std::byte* scratch) const;

  std::shared_ptr<const State> state_;
};

inline std::ostream& operator<<(std::ostream& out, const CompiledGraph& compiled) {
  return out << compiled.ToString();
}

}  // namespace kvant

#endif  // KVANT_BACKENDS_COMPILED_GRAPH_H_
