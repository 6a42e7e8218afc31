// Rewriting a graph by ids, in the syntax of oneDNN's benchdnn:
//
//   --in-shapes=ID:SHAPE[*LAYOUT][+ID:...]   SHAPE 2x8x1x64, or "scalar" or "-";
//       LAYOUT a tag (acdb) or strides (512x64x64x1); "ID:*LAYOUT" and "ID:acdb" keep
//       the shape. A new shape without a layout is dense.
//   --dt=TYPE            every floating-point tensor that ops compute in
//   --dt=ID:TYPE[+...]   these tensors
//   --op-attrs=OPID:NAME:VALUE[*NAME:VALUE][+OPID:...]   lists 1x1x32x1; the value
//       "undef" removes the attribute
#ifndef KVANT_TOOLS_OVERRIDES_H_
#define KVANT_TOOLS_OVERRIDES_H_

#include <string>

#include "absl/status/statusor.h"
#include "kvant/graph/graph.h"

namespace kvant {

struct Overrides {
  std::string in_shapes;
  std::string dt;
  std::string op_attrs;

  bool empty() const { return in_shapes.empty() && dt.empty() && op_attrs.empty(); }
};

// The graph with these rewritten, its schema checked anew and its shapes inferred
// anew; a tensor whose shape changes keeps the order of its strides. Without
// overrides only infers shapes. kInvalidArguments for text that does not parse
// and ids that do not exist, otherwise the errors of Graph::AddOp and InferShapes.
absl::StatusOr<Graph> ApplyOverrides(const Graph& graph, const Overrides& overrides);

}  // namespace kvant

#endif  // KVANT_TOOLS_OVERRIDES_H_
