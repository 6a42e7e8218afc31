// The type rules named in ops.inc.
#ifndef KVANT_GRAPH_OP_TYPES_H_
#define KVANT_GRAPH_OP_TYPES_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvant/graph/logical_tensor.h"
#include "kvant/graph/op.h"

namespace kvant {

// One op with its ports, counts already checked.
struct OpPorts {
  const Op& op;
  absl::Span<const LogicalTensor* const> inputs;
  absl::Span<const LogicalTensor* const> outputs;
};

// kInvalidDataType, naming op and tensor, when the kind does not take these types.
absl::Status CheckTypes(const OpPorts& ports);

}  // namespace kvant

#endif  // KVANT_GRAPH_OP_TYPES_H_
