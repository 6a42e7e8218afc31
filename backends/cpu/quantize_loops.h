// The axes of a quantization, and how the loops of a layout share them out.
#ifndef KVANT_BACKENDS_CPU_QUANTIZE_LOOPS_H_
#define KVANT_BACKENDS_CPU_QUANTIZE_LOOPS_H_

#include <string>

#include "absl/container/inlined_vector.h"
#include "kvant/graph/graph.h"
#include "kvant/kernels/cpu/quantize.h"

namespace kvant::cpu {

// The tensors of a DynamicQuantize or Append, and their positions among the op's ports.
struct QuantizeTensors {
  const LogicalTensor* src = nullptr;
  const LogicalTensor* codes = nullptr;        // of a conversion: numbers
  const LogicalTensor* scales = nullptr;       // null: a conversion
  const LogicalTensor* zero_points = nullptr;  // null: none
  bool computes = false;                       // scales and zero points are outputs
};
QuantizeTensors QuantizeTensorsOf(const Graph& graph, const Op& op);

struct LoopAxis : QuantizeAxis {
  bool in_group = false;
};
using LoopAxes = absl::InlinedVector<LoopAxis, 8>;

// Dimensions `first` to `last` - 1, each split into one of groups and one within groups; those of
// extent 1 are left out, and neighbours are merged where one continues the other.
LoopAxes SplitAxes(const Op& op, const QuantizeTensors& tensors, int first, int last);

// See QuantizeProblem.
struct QuantizeLoops {
  QuantizeLayout layout = QuantizeLayout::kElements;
  LoopAxes outer, inner;
  int64_t groups = 1, group = 1;
  QuantizeAxis lines;
  QuantizeStrides next;

  // Whether lines of codes of so many bits begin at whole bytes, as rows and columns must, if the
  // first does.
  bool WholeBytes(int bits) const;
};

// Why neither rows nor columns will do; empty if one will.
std::string WhyElements(const LoopAxes& axes, const QuantizeTensors& tensors);

// Rows or columns, by what the last axis is.
QuantizeLoops LineLoops(LoopAxes axes);
QuantizeLoops ElementLoops(const LoopAxes& axes);
// Rows: of side by side numbers where there are any, else of one each.
QuantizeLoops ConversionLoops(LoopAxes axes);

}  // namespace kvant::cpu

#endif  // KVANT_BACKENDS_CPU_QUANTIZE_LOOPS_H_
