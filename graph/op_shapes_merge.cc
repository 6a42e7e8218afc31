// The shape rule of MergeAttention.
#include <algorithm>

#include "kvant/graph/op_shapes.h"

namespace kvant {
namespace {

// What two inputs say of one shape; where only one knows a dim, that.
absl::Status Agree(const Op& op, const LogicalTensor& tensor, absl::Span<const int64_t> says,
                   std::optional<Dims>& all) {
  if (!all) {
    all.emplace(says.begin(), says.end());
    return absl::OkStatus();
  }
  if (!MayEqual(says, *all)) {
    return ShapeError(op, DescribeDims(tensor), " is no part beside parts whose outputs are [",
                      DimsToString(*all), "]");
  }
  Complete(*all, says);
  return absl::OkStatus();
}

}  // namespace

absl::Status MergeAttentionShape(const Op& op, ShapeContext& context) {
  std::optional<Dims> all;
  for (size_t port = 0; port < context.inputs.size(); ++port) {
    const LogicalTensor& tensor = *context.inputs[port];
    if (!tensor.dims) continue;
    Dims dims = *tensor.dims;
    if (dims.empty()) {
      return ShapeError(op, DescribeDims(tensor), " has no dim of channels");
    }
    if (port % 2 == 1) {
      if (!MayEqual(dims.back(), 1)) {
        return ShapeError(op, "stats have one number for a row, but are ", DescribeDims(tensor));
      }
      dims.back() = kUnknownDim;
    }
    KVANT_RETURN_IF_ERROR(Agree(op, tensor, dims, all));
  }
  if (!all) return absl::OkStatus();
  context.outputs[0] = all;
  if (context.outputs.size() < 2) return absl::OkStatus();
  all->back() = 1;
  context.outputs[1] = std::move(all);
  return absl::OkStatus();
}

}  // namespace kvant
