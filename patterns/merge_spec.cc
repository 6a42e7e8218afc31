#include "kvant/patterns/merge_spec.h"

namespace kvant {

int64_t MergeSpec::rows() const { return ElementsOf(absl::MakeSpan(dims).first(dims.size() - 1)); }

MergeSpec ResolveMerge(const Graph& graph, absl::Span<const TensorId> inputs,
                       absl::Span<const TensorId> outputs) {
  const Op& op = graph.ops().front();
  const auto find = [&](TensorId id) { return FindPortArray(graph, inputs, outputs, id); };
  const auto find_stats = [&](TensorId id) {
    PortArray stats = find(id);
    stats.strides.back() = 0;
    return stats;
  };
  MergeSpec spec;
  spec.dims = *graph.tensor(op.outputs[0]).dims;
  for (size_t i = 0; i + 1 < op.inputs.size(); i += 2) {
    spec.parts.push_back({find(op.inputs[i]), find_stats(op.inputs[i + 1])});
  }
  spec.output = find(op.outputs[0]);
  if (op.outputs.size() > 1) spec.stats = find_stats(op.outputs[1]);
  return spec;
}

}  // namespace kvant
