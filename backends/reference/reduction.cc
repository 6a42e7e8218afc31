// Reductions through oneDNN.
#include <algorithm>
#include <limits>
#include <vector>

#include "kvant/backends/reference/lowering.h"
#include "kvant/backends/reference/onednn.h"
#include "kvant/backends/reference/pieces.h"
#include "kvant/backends/reference/rows.h"

namespace kvant::reference {
namespace {

using dnnl::algorithm;

// What a reduction of no elements gives.
float OfNothing(algorithm kind) {
  if (kind == algorithm::reduction_sum) return 0.f;
  if (kind == algorithm::reduction_max) return -std::numeric_limits<float>::infinity();
  return std::numeric_limits<float>::quiet_NaN();
}

// oneDNN starts a maximum at the lowest finite value and gives that for nothing but -inf. Looks at
// the elements again where it did.
Array RepairedMax(Plan& plan, const Array& max, const Array& x) {
  Array result = plan.NewArray(max.dims);
  const Dims dense = DenseStrides(x.dims);
  Dims kept(x.dims), reduced(x.dims);
  for (size_t axis = 0; axis < x.dims.size(); ++axis) {
    (max.dims[axis] == x.dims[axis] ? reduced : kept)[axis] = 1;
  }
  plan.AddStep(
      {max, x}, {result},
      [=, outer = Walk(kept, {DenseStrides(kept), dense}),
       inner = Walk(reduced, {dense})](const RunContext& context) {
        const auto serial = MakeSerialExecutor();
        const auto largest = [&](const float* from) {
          float value = -std::numeric_limits<float>::infinity();
          inner.ForEachRow(*serial, [&](const Row& row) {
            for (int64_t i = 0; i < row.count; ++i) {
              value = std::max(value, from[row.offset[0] + i * row.stride[0]]);
            }
          });
          return value;
        };
        outer.ForEachRow(context.executor, [&](const Row& row) {
          for (int64_t i = 0; i < row.count; ++i) {
            const int64_t at = row.offset[0] + i * row.stride[0];
            const float value = context.data(max)[at];
            const bool suspect = value == std::numeric_limits<float>::lowest();
            context.data(result)[at] =
                suspect ? largest(context.data(x) + row.offset[1] + i * row.stride[1]) : value;
          }
        });
      },
      /*overwrites=*/0);
  return result;
}

Array LowerReduce(Lowering& lowering, algorithm kind) {
  const Array x = lowering.Input(0);
  std::vector<int64_t> axes = lowering.op().Get<Attr::kAxes>();
  for (int64_t& axis : axes) axis = FromFront(axis, x.dims.size());
  return Reduce(lowering.plan, kind, x, axes);
}

}  // namespace

Array Reduce(Plan& plan, algorithm kind, const Array& x, absl::Span<const int64_t> axes) {
  Dims dims = x.dims;
  for (int64_t axis : axes) dims[axis] = 1;
  if (dims == x.dims) return x;  // oneDNN rejects a reduction that reduces nothing
  if (x.elements() == 0) return Expanded(plan, ConstantArray(plan, {OfNothing(kind)}, {}), dims);
  Array result = plan.NewArray(dims);
  const auto from = DenseDesc(x.dims), to = DenseDesc(dims);
  const dnnl::reduction::primitive_desc description(CpuEngine(), kind, from, to, 0.f, 0.f,
                                                    UserScratchpad());
  AddPrimitive(plan, dnnl::reduction(description), description.scratchpad_desc(),
               {{DNNL_ARG_SRC, x, from}}, {DNNL_ARG_DST, result, to});
  if (kind == algorithm::reduction_max) return RepairedMax(plan, result, x);
  return result;
}

absl::StatusOr<Array> LowerReduceSum(Lowering& lowering) {
  return LowerReduce(lowering, algorithm::reduction_sum);
}
absl::StatusOr<Array> LowerReduceMax(Lowering& lowering) {
  return LowerReduce(lowering, algorithm::reduction_max);
}
absl::StatusOr<Array> LowerReduceMean(Lowering& lowering) {
  return LowerReduce(lowering, algorithm::reduction_mean);
}

}  // namespace kvant::reference
