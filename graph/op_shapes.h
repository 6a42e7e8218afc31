// Shape rules: what each op's inputs say about the dims of its outputs. One
// function per ShapeRule of ops.inc; ShapeRuleOf finds it.
//
// A rule reads the inputs' dims, checks them against each other and the
// attributes, and sets the outputs' dims. It tolerates inputs of unknown rank
// and single unknown dims: what they leave open stays unknown. Rules run at
// every compile, so they allocate little and format text only to complain.
#ifndef KVANT_GRAPH_OP_SHAPES_H_
#define KVANT_GRAPH_OP_SHAPES_H_

#include <optional>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/graph/logical_tensor.h"
#include "kvant/graph/op.h"
#include "kvant/graph/status.h"

namespace kvant {

// One op's ports. Inputs are given. The rule sets the dims of outputs, nullopt where it does not
// know the rank. `declared` are the outputs as the graph has them, for what no input says: the
// capacity of what Append writes to, the pages of AppendPages. There are none without a graph.
struct ShapeContext {
  absl::InlinedVector<const LogicalTensor*, 8> inputs;
  absl::InlinedVector<const LogicalTensor*, 2> declared;
  absl::InlinedVector<std::optional<Dims>, 2> outputs;

  // How a rule ends that sets output 0.
  absl::Status Give(std::optional<Dims> dims) {
    outputs[0] = std::move(dims);
    return absl::OkStatus();
  }
};

using ShapeRule = absl::Status (*)(const Op& op, ShapeContext& context);
ShapeRule ShapeRuleOf(OpKind kind);

// Combines what a rule found for the output `declared` with what is declared of
// it. `found` becomes the more specific of both. kInvalidShape where they
// disagree or the tensor's size in bits overflows.
absl::Status MergeOutput(const Op& op, const LogicalTensor& declared, std::optional<Dims>& found);

template <typename... Parts>
absl::Status ShapeError(const Op& op, const Parts&... what) {
  return OpError(ErrorKind::kInvalidShape, op, what...);
}
// "tensor 3 [1,8,128]", for messages.
std::string DescribeDims(const LogicalTensor& tensor);

// Whether a tensor can have `count` elements along one axis and no other; one is a scalar, too.
bool MayBeVector(const LogicalTensor& tensor, int64_t count);
// Axis counted from the front; kInvalidShape when it is outside the rank.
absl::StatusOr<int> NormalizeAxis(const Op& op, int64_t axis, const LogicalTensor& tensor);
// kInvalidShape unless `tensor` broadcasts onto `target` without enlarging it.
absl::Status CheckBroadcastsOnto(const Op& op, const LogicalTensor& tensor,
                                 absl::Span<const int64_t> target);
// The dims of the inputs from `first` on, whose rank is known, concatenated along `axis`;
// kInvalidShape where they differ in another.
absl::StatusOr<Dims> JoinInputs(const Op& op, const ShapeContext& context, size_t first, int axis);
// kInvalidShape, "<what> differ: ..", unless dim `dim_a` of a may be dim `dim_b` of b.
absl::Status CheckSameDim(const Op& op, const char* what, const LogicalTensor& a, int dim_a,
                          const LogicalTensor& b, int dim_b);
// kInvalidShape unless `tensor`, input `role`, is [rows] or one for all of them.
absl::Status CheckOnePerRow(const Op& op, const LogicalTensor& tensor, std::string_view role,
                            int64_t rows);

// Of a dynamic quantization op that passed its shape rule. Elements per group along each dimension
// of what it quantizes or dequantizes, which has these dims; a dim of 0 may have groups of 0. For
// Append they are src's: what is beyond src of a group of all tokens does not count.
Dims QuantizationGroup(const Op& op, absl::Span<const int64_t> dims);
// Elements by which its scales, or zero points, move from one group to the next along dimension `d`
// of a tensor of that rank, 0 if there is one group: they have its rank, or one axis, or are one
// for all.
int64_t GroupStride(const Op& op, const LogicalTensor& parameters, int rank, int d);

// Whether it is Append or AppendPages, which write a part of their outputs.
bool Appends(OpKind kind);
// src of an AppendPages as Append takes it: a token is a row, of one token along `axis` of dst.
LogicalTensor TokensAsRows(const LogicalTensor& src, int axis);

// Where an Append or AppendPages that passed its shape rule writes.
struct AppendedTokens {
  int axis = 0;          // of dst, from the front
  int64_t tokens = 0;    // of a row of src
  int64_t capacity = 0;  // of dst
  int64_t group = 1;     // positions are multiples of it
  int64_t page = 0;      // AppendPages: tokens of one; positions are slots

  // kInvalidArguments, in a sentence, unless tokens fit dst from `position` on; a negative one
  // leaves its row out.
  absl::Status Check(const Op& op, int64_t row, int64_t position) const;
};
AppendedTokens AppendedTokensOf(const Op& op, const LogicalTensor& src, const LogicalTensor& dst);

#define KVANT_OP(kind, op_class, inputs, outputs, attributes, type_rule, shape_rule) \
  absl::Status shape_rule(const Op& op, ShapeContext& context);
#include "kvant/graph/ops.inc"

}  // namespace kvant

#endif  // KVANT_GRAPH_OP_SHAPES_H_
