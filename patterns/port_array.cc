#include "kvant/patterns/port_array.h"

#include <algorithm>

namespace kvant {

PortArray FindPortArray(const Graph& graph, absl::Span<const TensorId> inputs,
                        absl::Span<const TensorId> outputs, TensorId id) {
  const LogicalTensor& tensor = graph.tensor(id);
  PortArray array;
  array.type = tensor.type;
  array.strides = tensor.StridesOrDense();
  array.constant = tensor.value;
  array.on_host = tensor.property == Property::kHostScalar;
  const auto port_in = [id](absl::Span<const TensorId> ports) {
    const auto* at = std::find(ports.begin(), ports.end(), id);
    return at == ports.end() ? kNoPort : static_cast<int>(at - ports.begin());
  };
  array.port = port_in(outputs);
  array.output = array.port != kNoPort;
  if (!array.output) array.port = port_in(inputs);
  return array;
}

}  // namespace kvant
