// What every use of a oneDNN primitive shares.
#ifndef KVANT_BACKENDS_REFERENCE_ONEDNN_H_
#define KVANT_BACKENDS_REFERENCE_ONEDNN_H_

#include <vector>

#include "dnnl.hpp"
#include "kvant/backends/reference/plan.h"

namespace kvant::reference {

const dnnl::engine& CpuEngine();

// Dense row-major; a scalar becomes one dim of 1, since oneDNN has no rank 0.
dnnl::memory::desc DenseDesc(absl::Span<const int64_t> dims, Storage storage = Storage::kF32);
// With strides in elements. An empty descriptor if oneDNN does not take them (0, or overlapping).
dnnl::memory::desc StridedDesc(absl::Span<const int64_t> dims, absl::Span<const int64_t> strides,
                               Storage storage = Storage::kF32);

// Scratchpads are ours: a primitive may then run in several threads at once.
dnnl::primitive_attr UserScratchpad();

struct PrimitiveArg {
  int name = 0;  // DNNL_ARG_...
  Array array;
  dnnl::memory::desc desc;
};
// One step that runs a primitive made with UserScratchpad().
void AddPrimitive(Plan& plan, const dnnl::primitive& primitive,
                  const dnnl::memory::desc& scratchpad, std::vector<PrimitiveArg> reads,
                  PrimitiveArg write, int overwrites = -1);

}  // namespace kvant::reference

#endif  // KVANT_BACKENDS_REFERENCE_ONEDNN_H_
