// What masks are made of, in plain code: oneDNN has none of it.
#include <algorithm>
#include <numeric>
#include <vector>

#include "kvant/backends/reference/lowering.h"
#include "kvant/backends/reference/pieces.h"
#include "kvant/kernels/philox.h"

namespace kvant::reference {
namespace {

int64_t ScalarOf(const RunContext& context, const Array& array) {
  if (array.storage == Storage::kS64) return *context.data<int64_t>(array);
  return *context.data<int32_t>(array);
}

}  // namespace

// 0, 1, ..., of dims that are 1 along the other axes.
absl::StatusOr<Array> LowerGenIndex(const Op& op, Lowering& lowering) {
  const Dims& dims = lowering.OutputDims(op, 0);
  const int64_t axis = FromFront(op.Get<Attr::kAxis>(), dims.size());
  Dims compact(dims.size(), 1);
  compact[axis] = dims[axis];
  const Array result = lowering.plan.NewArray(compact, Storage::kS32);
  lowering.plan.AddStep({}, {result}, [=](const RunContext& context) {
    std::iota(context.data<int32_t>(result), context.data<int32_t>(result) + result.elements(), 0);
  });
  return result;
}

absl::StatusOr<Array> LowerDropout(const Op& op, Lowering& lowering) {
  const Array x = lowering.Input(op, 0);
  const Array seed = lowering.Input(op, 1), offset = lowering.Input(op, 2);
  const Array probability = lowering.Input(op, 3);
  KVANT_RETURN_IF_ERROR(lowering.CheckProbability(op, op.inputs[3]));
  const Array y = lowering.plan.NewArray(x.dims);
  std::optional<Array> mask;
  if (lowering.HasOutput(op, 1)) mask = lowering.plan.NewArray(x.dims);
  std::vector<Array> writes{y};
  if (mask) writes.push_back(*mask);
  lowering.plan.AddStep(
      {x, seed, offset, probability}, writes,
      [=](const RunContext& context) {
        const auto key = static_cast<uint64_t>(ScalarOf(context, seed));
        const auto start = static_cast<uint64_t>(ScalarOf(context, offset));
        const double p = *context.data(probability);
        const uint64_t threshold = DropoutThreshold(p);
        constexpr int64_t kTask = 1024 * kPhiloxBlock;
        const int64_t elements = x.elements();
        context.executor.ParallelFor((elements + kTask - 1) / kTask, [&](int64_t task, int) {
          const int64_t end = std::min(elements, (task + 1) * kTask);
          uint32_t words[kPhiloxBlock];
          for (int64_t i = task * kTask; i < end; ++i) {
            const int64_t in_block = i % kPhiloxBlock;
            if (in_block == 0) {
              PhiloxWords(key, start, static_cast<uint64_t>(i / kPhiloxBlock), words);
            }
            const bool keep = words[in_block] >= threshold;
            const float value = context.data(x)[i];
            context.data(y)[i] = keep ? static_cast<float>(value / (1 - p)) : 0.f;
            if (mask) context.data(*mask)[i] = keep ? 1.f : 0.f;
          }
        });
      },
      /*overwrites=*/0);
  if (mask) lowering.SetOutput(op, 1, *mask);
  return y;
}

}  // namespace kvant::reference
