// Shape rules of the ops that load from a cache.
#include "kvant/graph/op_shapes.h"

namespace kvant {
namespace {

// The axis of tokens of `src`, of known rank: any but the first.
absl::StatusOr<int> TokenAxisOf(const Op& op, const LogicalTensor& src) {
  if (const int64_t* group = op.Find<Attr::kTokenGroup>(); group != nullptr && *group < 1) {
    return ShapeError(op, "a row for ", *group, " tokens");
  }
  KVANT_ASSIGN_OR_RETURN(const int axis, NormalizeAxis(op, op.Get<Attr::kTokenAxis>(), src));
  if (axis > 0) return axis;
  return ShapeError(op, "the token axis of ", DescribeDims(src), " is that of rows");
}

// Of an index tensor: its dim `axis`, unknown where it is not there.
int64_t DimOf(const LogicalTensor& tensor, int axis) {
  return tensor.dims ? (*tensor.dims)[axis] : kUnknownDim;
}

}  // namespace

absl::Status CheckOnePerRow(const Op& op, const LogicalTensor& tensor, std::string_view role,
                            int64_t rows) {
  if (!tensor.dims || MayBeScalar(*tensor.dims)) return absl::OkStatus();
  if (tensor.rank() == 1 && MayEqual((*tensor.dims)[0], rows)) return absl::OkStatus();
  return ShapeError(op, role, " must be [", rows, "] or [1], but are ", DescribeDims(tensor));
}

absl::Status LoadTokensShape(const Op& op, ShapeContext& context) {
  const LogicalTensor& src = *context.inputs[0];
  if (!src.dims) return absl::OkStatus();
  KVANT_RETURN_IF_ERROR(TokenAxisOf(op, src).status());
  for (size_t i = 1; i < context.inputs.size(); ++i) {
    KVANT_RETURN_IF_ERROR(CheckOnePerRow(op, *context.inputs[i], InputName(op, i), (*src.dims)[0]));
  }
  context.outputs[0] = src.dims;
  return absl::OkStatus();
}

absl::Status LoadPagesShape(const Op& op, ShapeContext& context) {
  const LogicalTensor &pool = *context.inputs[0], &table = *context.inputs[1];
  if (table.dims && table.rank() != 2) {
    return ShapeError(op, "page_table must be [rows, pages of a row], but is ",
                      DescribeDims(table));
  }
  const int64_t rows = DimOf(table, 0), most = DimOf(table, 1);
  KVANT_RETURN_IF_ERROR(CheckOnePerRow(op, *context.inputs[2], "lengths", rows));
  if (!pool.dims) return absl::OkStatus();
  KVANT_ASSIGN_OR_RETURN(const int axis, TokenAxisOf(op, pool));
  Dims dims = *pool.dims;
  dims[0] = rows;
  int64_t& tokens = dims[axis];
  if (tokens == kUnknownDim || most == kUnknownDim) {
    tokens = kUnknownDim;
  } else if (__builtin_mul_overflow(tokens, most, &tokens)) {
    return ShapeError(op, "the tokens of ", most, " pages overflow 64 bits");
  }
  context.outputs[0] = std::move(dims);
  return absl::OkStatus();
}

absl::Status LoadRangesShape(const Op& op, ShapeContext& context) {
  const LogicalTensor &ranges = *context.inputs[0], &first = *context.inputs[1];
  const auto count = static_cast<int64_t>(context.inputs.size()) - 1;
  if (ranges.dims && (ranges.rank() != 3 || !MayEqual((*ranges.dims)[1], count) ||
                      !MayEqual((*ranges.dims)[2], 2))) {
    return ShapeError(op, "ranges of ", count, " src must be [rows, ", count, ", 2], but are ",
                      DescribeDims(ranges));
  }
  const int64_t rows = DimOf(ranges, 0);
  if (context.outputs.size() > 1) context.outputs[1] = Dims{rows};
  if (!first.dims) return absl::OkStatus();
  KVANT_ASSIGN_OR_RETURN(const int axis, TokenAxisOf(op, first));
  Dims dims = *first.dims;
  for (size_t i = 2; i < context.inputs.size(); ++i) {
    KVANT_RETURN_IF_ERROR(Continue(op, first, *context.inputs[i], axis, dims));
  }
  if (rows != 1 && dims[0] == 1) {
    dims[0] = rows;
  } else if (rows != 1 && !MayEqual(rows, dims[0])) {
    return ShapeError(op, "ranges of ", rows, " rows do not go with ", DescribeDims(first));
  }
  context.outputs[0] = std::move(dims);
  return absl::OkStatus();
}

}  // namespace kvant
