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

// What type rules ask beside types, op_types_quantize.cc. kInvalidGraphOp: scales both given and
// computed, options of one beside the other, a codebook or a formula that does not fit.
// Of an op that quantizes; `first` is the input for scales.
absl::Status CheckQuantizeForm(const OpPorts& ports, size_t first);
absl::Status CheckDequantizeForm(const OpPorts& ports);
// Of an Append of numbers, which takes nothing that belongs to codes.
absl::Status CheckConversionForm(const OpPorts& ports);

}  // namespace kvant

#endif  // KVANT_GRAPH_OP_TYPES_H_
