// An array of a spec that is walked along the dims of a tensor: where it lies, and its strides.
#ifndef KVANT_PATTERNS_PORT_ARRAY_H_
#define KVANT_PATTERNS_PORT_ARRAY_H_

#include <optional>

#include "absl/types/span.h"
#include "kvant/graph/graph.h"
#include "kvant/patterns/attention_spec.h"

namespace kvant {

struct PortArray {
  int port = kNoPort;  // of the outputs if `output`, else of the inputs
  bool output = false;
  std::optional<Constant> constant;  // instead of a port
  bool on_host = false;              // a host scalar's port
  DataType type = kUndef;
  Dims strides;  // in elements; 0 broadcasts

  bool present() const { return type != kUndef; }
  // Where it lies at execution.
  const void* Find(absl::Span<const void* const> inputs, absl::Span<void* const> outputs) const {
    if (constant) return constant->data();
    return output ? outputs[port] : inputs[port];
  }
};

// That of a tensor of known shape, by its own strides; without a port if it is none of these.
PortArray FindPortArray(const Graph& graph, absl::Span<const TensorId> inputs,
                        absl::Span<const TensorId> outputs, TensorId id);

}  // namespace kvant

#endif  // KVANT_PATTERNS_PORT_ARRAY_H_
