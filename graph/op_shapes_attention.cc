// Shape rules of the ops that load from a cache, and of those that are attention by themselves.
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

// How q, k and v must agree; q is of rank 3 if queries are ragged.
absl::Status CheckQkv(const Op& op, const LogicalTensor& q, const LogicalTensor& k,
                      const LogicalTensor& v) {
  const int last = q.rank() - 1;
  if (last == 3) KVANT_RETURN_IF_ERROR(CheckSameDim(op, "batch sizes of q and k", q, 0, k, 0));
  KVANT_RETURN_IF_ERROR(CheckSameDim(op, "batch sizes of k and v", k, 0, v, 0));
  KVANT_RETURN_IF_ERROR(CheckSameDim(op, "head sizes of q and k", q, last, k, 3));
  KVANT_RETURN_IF_ERROR(CheckSameDim(op, "lengths of k and v", k, 2, v, 2));
  KVANT_RETURN_IF_ERROR(CheckSameDim(op, "numbers of heads of k and v", k, 1, v, 1));
  const int64_t q_heads = (*q.dims)[1], kv_heads = (*k.dims)[1];
  if (MayEqual(q_heads, kv_heads) || (kv_heads != 0 && q_heads % kv_heads == 0)) {
    return absl::OkStatus();
  }
  return ShapeError(op, q_heads, " query heads (", q.Label(), ", dim 1) are no multiple of ",
                    kv_heads, " key heads (", k.Label(), ", dim 1)");
}

// An input with one value per element of a dim.
absl::Status CheckVector(const Op& op, const LogicalTensor& tensor, std::string_view role,
                         int64_t count) {
  if (MayBeVector(tensor, count)) return absl::OkStatus();
  return ShapeError(op, role, " must be [", count, "], but are ", DescribeDims(tensor));
}

absl::Status CheckWindows(const Op& op) {
  for (const auto& [attr, window] : {std::pair(Attr::kLeftWindow, op.Get<Attr::kLeftWindow>()),
                                     std::pair(Attr::kRightWindow, op.Get<Attr::kRightWindow>())}) {
    if (window >= -1) continue;
    return SchemaError(op, AttrName(attr), " must be -1 (unbounded) or more, not ", window);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckOnePerRow(const Op& op, const LogicalTensor& tensor, std::string_view role,
                            int64_t rows) {
  if (MayBeVector(tensor, rows) || MayBeVector(tensor, 1)) return absl::OkStatus();
  return ShapeError(op, role, " must be [", rows, "] or [1], but are ", DescribeDims(tensor));
}

absl::Status LoadTokensShape(const Op& op, ShapeContext& context) {
  const LogicalTensor& src = *context.inputs[0];
  if (!src.dims) return absl::OkStatus();
  KVANT_RETURN_IF_ERROR(TokenAxisOf(op, src).status());
  for (size_t i = 1; i < context.inputs.size(); ++i) {
    KVANT_RETURN_IF_ERROR(CheckOnePerRow(op, *context.inputs[i], InputName(op, i), (*src.dims)[0]));
  }
  return context.Give(src.dims);
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
  return context.Give(std::move(dims));
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
  KVANT_ASSIGN_OR_RETURN(Dims dims, JoinInputs(op, context, 1, axis));
  if (rows != 1 && dims[0] == 1) {
    dims[0] = rows;
  } else if (rows != 1 && !MayEqual(rows, dims[0])) {
    return ShapeError(op, "ranges of ", rows, " rows do not go with ", DescribeDims(first));
  }
  return context.Give(std::move(dims));
}

absl::Status AttentionShape(const Op& op, ShapeContext& context) {
  KVANT_RETURN_IF_ERROR(CheckWindows(op));
  if (const float* const cap = op.Find<Attr::kSoftCap>(); cap != nullptr && *cap <= 0) {
    return SchemaError(op, "soft_cap must be above 0, not ", *cap);
  }
  const bool ragged = FindInput(op, "query_offsets").has_value();
  if (FindInput(op, "kv_first") && !FindInput(op, "kv_lengths")) {
    return SchemaError(op, "has kv_first, but no kv_lengths");
  }
  if (op.Find<Attr::kSelectFill>() && !FindInput(op, "select")) {
    return SchemaError(op, "has select_fill, but no select");
  }
  for (size_t i = 0; i < 3; ++i) {
    const LogicalTensor& tensor = *context.inputs[i];
    const int rank = i == 0 && ragged ? 3 : 4;
    if (!tensor.dims) return absl::OkStatus();
    if (tensor.rank() == rank) continue;
    return ShapeError(op, InputName(op, i), " has rank ", rank,
                      ragged ? " beside query_offsets" : "", ", but is ", DescribeDims(tensor));
  }
  const LogicalTensor &q = *context.inputs[0], &k = *context.inputs[1], &v = *context.inputs[2];
  const Dims &qd = *q.dims, &kd = *k.dims, &vd = *v.dims;
  KVANT_RETURN_IF_ERROR(CheckQkv(op, q, k, v));
  const int64_t rows = ragged ? qd[0] : qd[2];
  // A packed row is one sequence's.
  const int64_t scores[] = {ragged ? 1 : qd[0], qd[1], rows, kd[2]};
  for (size_t i = 3; i < context.inputs.size(); ++i) {
    const LogicalTensor& tensor = *context.inputs[i];
    const std::string_view name = InputName(op, i);
    if (name == "bias" || name == "select") {
      KVANT_RETURN_IF_ERROR(CheckBroadcastsOnto(op, tensor, scores));
    } else if (name == "query_offsets") {
      const int64_t offsets = kd[0] == kUnknownDim ? kUnknownDim : kd[0] + 1;
      KVANT_RETURN_IF_ERROR(CheckVector(op, tensor, name, offsets));
    } else if (name == "kv_lengths" || name == "kv_first") {
      KVANT_RETURN_IF_ERROR(CheckOnePerRow(op, tensor, name, kd[0]));
    } else {
      KVANT_RETURN_IF_ERROR(CheckVector(op, tensor, name, qd[1]));
    }
  }
  Dims dims = qd;
  dims.back() = vd[3];
  context.outputs[0] = dims;
  dims.back() = 1;
  if (context.outputs.size() > 1) context.outputs[1] = std::move(dims);
  return absl::OkStatus();
}

absl::Status MergeAttentionShape(const Op& op, ShapeContext& context) {
  std::optional<Dims> all;  // what inputs say of the outputs
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
    if (!all) all = dims;
    if (!MayEqual(dims, *all)) {
      return ShapeError(op, DescribeDims(tensor), " is no part beside parts whose outputs are [",
                        DimsToString(*all), "]");
    }
    Complete(*all, dims);
  }
  if (!all) return absl::OkStatus();
  context.outputs[0] = all;
  if (context.outputs.size() < 2) return absl::OkStatus();
  all->back() = 1;
  context.outputs[1] = std::move(all);
  return absl::OkStatus();
}

}  // namespace kvant
