// The axes of a quantization, and how the loops of a layout share them out.
#ifndef KVANT_BACKENDS_CPU_QUANTIZE_LOOPS_H_
#define KVANT_BACKENDS_CPU_QUANTIZE_LOOPS_H_

#include <string>

#include "absl/container/inlined_vector.h"
#include "kvant/kernels/cpu/quantize.h"
#include "kvant/patterns/store_spec.h"

namespace kvant::cpu {

struct LoopAxis : QuantizeAxis {
  bool in_group = false;
};
using LoopAxes = absl::InlinedVector<LoopAxis, 8>;

// Those of dimensions `first` to `last` - 1, merged.
LoopAxes LoopAxesOf(const StoreSpec& spec, int first, int last);

// See QuantizeProblem.
struct QuantizeLoops {
  QuantizeLayout layout = QuantizeLayout::kElements;
  LoopAxes outer, inner;
  int64_t groups = 1, group = 1;
  QuantizeAxis runs, lines;
  QuantizeStrides next;
};

// Why neither rows nor columns will do; empty if one will.
std::string WhyElements(const LoopAxes& axes, const StoreSpec& spec);

// Rows or columns, by what the last axis is. With `dense_source`, numbers of all runs of a batch
// are side by side.
QuantizeLoops LineLoops(LoopAxes axes, bool dense_source);
QuantizeLoops ElementLoops(const LoopAxes& axes);
// Rows: of side by side numbers where there are any, else of one each.
QuantizeLoops ConversionLoops(LoopAxes axes);

}  // namespace kvant::cpu

#endif  // KVANT_BACKENDS_CPU_QUANTIZE_LOOPS_H_
