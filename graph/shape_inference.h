// Shape inference over a whole graph.
#ifndef KVANT_GRAPH_SHAPE_INFERENCE_H_
#define KVANT_GRAPH_SHAPE_INFERENCE_H_

#include "absl/status/status.h"
#include "kvant/graph/graph.h"

namespace kvant {

// Infers the shapes of every op's outputs from its inputs, in topological
// order, and writes them into the graph's tensors. A tensor whose input shapes
// are not known stays as it was. Strides of internal tensors are left alone.
//
// kInvalidShape when an op's inputs contradict each other or a declared output
// shape; kInvalidArguments for a group_shape or scale shape that does not fit.
// Messages name op, tensors and numbers. On error some tensors may have been
// updated already.
absl::Status InferShapes(Graph& graph);

// The same with the given shapes (matched by id) put in first; all other
// tensors' shapes but constants' and graph inputs' are forgotten before
// inferring, so that a graph is re-inferred for new lengths. A tensor whose dims
// change loses its strides, unless it is given.
//
// Also kInvalidArguments for an id that is not in the graph, ValidateTensor's
// errors, and kInvalidDataType for a type other than the graph's (undef is any).
absl::Status InferShapes(Graph& graph, absl::Span<const LogicalTensor> known);

// kInvalidShape, naming both, where the shape of one of the op's tensors is not known.
absl::Status CheckShapesKnown(const Graph& graph, const Op& op);

}  // namespace kvant

#endif  // KVANT_GRAPH_SHAPE_INFERENCE_H_
