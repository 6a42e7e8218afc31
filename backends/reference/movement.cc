// Ops that move elements. Arrays are dense and values are not rounded inside a plan, so
// StaticReshape, Reorder and TypeCast are other names for the same array.
#include <cstring>
#include <utility>
#include <vector>

#include "kvant/backends/reference/lowering.h"
#include "kvant/backends/reference/onednn.h"
#include "kvant/backends/reference/pieces.h"
#include "kvant/backends/reference/rows.h"

namespace kvant::reference {

Array Gather(Plan& plan, const Array& x, const Dims& dims, const Dims& strides) {
  Array result = plan.NewArray(dims, x.storage);
  if (result.elements() == 0) return result;
  const Walk walk(dims, {DenseStrides(dims), strides});
  const auto from = StridedDesc(walk.dims(), walk.strides(1), x.storage);
  if (x.storage != Storage::kS64 && !from.is_zero()) {
    const auto to = DenseDesc(walk.dims(), x.storage);
    const dnnl::reorder::primitive_desc description(CpuEngine(), from, CpuEngine(), to,
                                                    UserScratchpad(), /*allow_empty=*/true);
    if (description.get(/*allow_empty=*/true)) {
      AddPrimitive(plan, dnnl::reorder(description), description.scratchpad_desc(),
                   {{DNNL_ARG_FROM, x, from}}, {DNNL_ARG_TO, result, to});
      return result;
    }
  }
  plan.AddStep({x}, {result}, [=](const RunContext& context) {
    walk.ForEachRow(context.executor, [&](const Row& row) {
      CopyRow(row, BytesOf(x.storage), context.data<void>(result), context.data<void>(x));
    });
  });
  return result;
}

Array Concat(Plan& plan, absl::Span<const Array> arrays, int64_t axis) {
  Dims dims = arrays.front().dims;
  dims[axis] = 0;
  for (const Array& array : arrays) dims[axis] += array.dims[axis];
  Array result = plan.NewArray(dims, arrays.front().storage);
  const int64_t outer = ElementsOf(absl::MakeSpan(dims).subspan(0, axis));
  std::vector<Array> reads(arrays.begin(), arrays.end());
  plan.AddStep(arrays, {result}, [=](const RunContext& context) {
    const auto piece_bytes = [&](const Array& array) {
      return static_cast<size_t>(array.elements() / outer) * BytesOf(array.storage);
    };
    context.executor.ParallelFor(outer, [&](int64_t block, int) {
      std::byte* to = context.data<std::byte>(result) + block * piece_bytes(result);
      for (const Array& array : reads) {
        const size_t bytes = piece_bytes(array);
        if (bytes == 0) continue;
        std::memcpy(to, context.data<std::byte>(array) + block * bytes, bytes);
        to += bytes;
      }
    });
  });
  return result;
}

absl::StatusOr<Array> LowerStaticReshape(const Op& op, Lowering& lowering) {
  return lowering.Input(op, 0);
}
absl::StatusOr<Array> LowerReorder(const Op& op, Lowering& lowering) {
  return lowering.Input(op, 0);
}
absl::StatusOr<Array> LowerTypeCast(const Op& op, Lowering& lowering) {
  return lowering.Input(op, 0);
}

absl::StatusOr<Array> LowerStaticTranspose(const Op& op, Lowering& lowering) {
  const Array x = lowering.Input(op, 0);
  const auto order = op.Get<Attr::kOrder>();
  const Dims dense = DenseStrides(x.dims);
  Dims dims, strides;
  for (int64_t axis : order) {
    axis = FromFront(axis, x.dims.size());
    dims.push_back(x.dims[axis]);
    strides.push_back(dense[axis]);
  }
  return Gather(lowering.plan, x, dims, strides);
}

absl::StatusOr<Array> LowerSlice(const Op& op, Lowering& lowering) {
  const Array x = lowering.Input(op, 0);
  const int64_t axis = FromFront(op.Get<Attr::kAxis>(), x.dims.size());
  Dims dims = x.dims;
  dims[axis] = op.Get<Attr::kSize>();
  const Array result = lowering.plan.NewArray(dims, x.storage);
  const int64_t outer = ElementsOf(absl::MakeSpan(dims).subspan(0, axis));
  const int64_t inner = ElementsOf(absl::MakeSpan(dims).subspan(axis + 1));
  const auto bytes = [&](int64_t elements) {
    return static_cast<size_t>(elements * inner) * BytesOf(x.storage);
  };
  const size_t from = bytes(x.dims[axis]), begin = bytes(op.Get<Attr::kBegin>());
  const size_t run = bytes(dims[axis]);
  lowering.plan.AddStep({x}, {result}, [=](const RunContext& context) {
    context.executor.ParallelFor(run == 0 ? 0 : outer, [&](int64_t i, int) {
      const auto block = static_cast<size_t>(i);
      std::memcpy(context.data<std::byte>(result) + block * run,
                  context.data<std::byte>(x) + block * from + begin, run);
    });
  });
  return result;
}

absl::StatusOr<Array> LowerConcat(const Op& op, Lowering& lowering) {
  std::vector<Array> arrays;
  for (int i = 0; lowering.HasInput(op, i); ++i) arrays.push_back(lowering.Input(op, i));
  const int64_t axis = FromFront(op.Get<Attr::kAxis>(), arrays.front().dims.size());
  return Concat(lowering.plan, arrays, axis);
}

}  // namespace kvant::reference
