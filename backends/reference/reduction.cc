// Reductions through oneDNN.
#include <algorithm>
#include <limits>
#include <vector>

#include "kvant/backends/reference/lowering.h"
#include "kvant/backends/reference/onednn.h"
#include "kvant/backends/reference/pieces.h"

namespace kvant::reference {
namespace {

using dnnl::algorithm;

// What a reduction of no elements gives.
float OfNothing(algorithm kind) {
  if (kind == algorithm::reduction_sum) return 0.f;
  if (kind == algorithm::reduction_max) return -std::numeric_limits<float>::infinity();
  return std::numeric_limits<float>::quiet_NaN();
}

absl::Status LowerReduce(const Op& op, Lowering& lowering, algorithm kind) {
  const Array x = lowering.Input(op, 0);
  std::vector<int64_t> axes = op.attrs.GetOr(Attr::kAxes, std::vector<int64_t>());
  for (int64_t& axis : axes) axis = FromFront(axis, x.dims.size());
  lowering.SetOutput(op, 0, Reduce(lowering.plan, kind, x, axes));
  return absl::OkStatus();
}

}  // namespace

Array Reduce(Plan& plan, algorithm kind, const Array& x, absl::Span<const int64_t> axes) {
  Dims dims = x.dims;
  for (int64_t axis : axes) dims[axis] = 1;
  if (dims == x.dims) return x;  // oneDNN rejects a reduction that reduces nothing
  const Array result = plan.NewArray(dims);
  if (x.elements() == 0) {
    plan.AddStep({}, {result}, [=](const RunContext& context) {
      std::fill_n(context.data(result), result.elements(), OfNothing(kind));
    });
    return result;
  }
  const auto from = DenseDesc(x.dims), to = DenseDesc(dims);
  const dnnl::reduction::primitive_desc description(CpuEngine(), kind, from, to, 0.f, 0.f,
                                                    UserScratchpad());
  AddPrimitive(plan, dnnl::reduction(description), description.scratchpad_desc(),
               {{DNNL_ARG_SRC, x, from}}, {DNNL_ARG_DST, result, to});
  return result;
}

absl::Status LowerReduceSum(const Op& op, Lowering& lowering) {
  return LowerReduce(op, lowering, algorithm::reduction_sum);
}
absl::Status LowerReduceMax(const Op& op, Lowering& lowering) {
  return LowerReduce(op, lowering, algorithm::reduction_max);
}
absl::Status LowerReduceMean(const Op& op, Lowering& lowering) {
  return LowerReduce(op, lowering, algorithm::reduction_mean);
}

}  // namespace kvant::reference
