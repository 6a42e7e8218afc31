// The tensors of ops that quantize, and the axes along which loops and kernels walk them.
#ifndef KVANT_BACKENDS_QUANTIZE_AXES_H_
#define KVANT_BACKENDS_QUANTIZE_AXES_H_

#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "kvant/graph/graph.h"
#include "kvant/graph/op_shapes.h"

namespace kvant {

// The tensors of a DynamicQuantize, DynamicDequantize or Append.
struct QuantizeTensors {
  const LogicalTensor* values = nullptr;
  const LogicalTensor* codes = nullptr;        // of a conversion: numbers
  const LogicalTensor* scales = nullptr;       // null: a conversion
  const LogicalTensor* zero_points = nullptr;  // null: none
  const LogicalTensor* positions = nullptr;    // null: no Append
  bool computes = false;                       // scales and zero points are outputs
};
QuantizeTensors QuantizeTensorsOf(const Graph& graph, const Op& op);

struct GroupedAxis {
  int64_t extent = 1;
  // Elements by which an index moves in each tensor.
  int64_t values = 0, codes = 0, scales = 0, zero_points = 0, positions = 0;
  bool in_group = false;
};
using GroupedAxes = absl::InlinedVector<GroupedAxis, 8>;

// Dimensions `first` to `last` - 1 of the values, each split into an axis of groups and one within
// groups; those of extent 1 are left out.
GroupedAxes SplitAxes(const Op& op, const QuantizeTensors& tensors, int first, int last);
// Makes one of neighbours where the outer continues the inner in every tensor.
void MergeAxes(GroupedAxes& axes);

// Of an Append: by how much what a row writes lies further along for `tokens.group` tokens of its
// position.
GroupedAxis PositionAxis(const Op& op, const QuantizeTensors& tensors,
                         const AppendedTokens& tokens);

// The positions of an Append, where the host reads them.
class AppendPositions {
 public:
  AppendPositions(Op op, const QuantizeTensors& tensors);

  // Elements from one row's position to the next; 0: all rows have the same.
  int64_t step() const { return step_; }
  // kInvalidArguments, of the first row that does not fit.
  absl::Status Check(const int32_t* positions) const;

 private:
  Op op_;
  AppendedTokens tokens_;
  int64_t rows_ = 0, step_ = 0;
};

}  // namespace kvant

#endif  // KVANT_BACKENDS_QUANTIZE_AXES_H_
