#include "kvant/graph/op_shapes.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace kvant {
namespace {

// Whether these dims can be a scalar's: none, or all ones (or unknown).
bool MayBeScalar(absl::Span<const int64_t> dims) {
  return std::ranges::all_of(dims, [](int64_t d) { return MayEqual(d, 1); });
}

constexpr ShapeRule kRules[] = {
#define KVANT_OP(kind, op_class, inputs, outputs, attributes, type_rule, shape_rule) (shape_rule),
#include "kvant/graph/ops.inc"
};

bool Broadcasts(const Op& op) { return op.Get<Attr::kAutoBroadcast>() != "none"; }

// a and b with broadcasting, or equal where the op does not broadcast.
absl::Status CombineDims(const Op& op, const LogicalTensor& a, const LogicalTensor& b,
                         std::optional<Dims>& result) {
  if (!a.dims || !b.dims) return absl::OkStatus();
  if (!Broadcasts(op) && !MayEqual(*a.dims, *b.dims)) {
    return ShapeError(op, DescribeDims(a), " and ", DescribeDims(b),
                      " differ, and auto_broadcast is none");
  }
  result = a.dims;
  const int conflict = BroadcastInto(*result, *b.dims);
  if (conflict < 0) return absl::OkStatus();
  return ShapeError(op, DescribeDims(a), " and ", DescribeDims(b),
                    " do not broadcast: they conflict in dim ", conflict, " of the result");
}

// The part of a MatMul operand that is multiplied: which dims are rows and
// columns once transposed. A missing one (rank 1) is -1.
struct MatrixDims {
  int rows = -1;
  int cols = -1;
};

MatrixDims MatrixDimsOf(const LogicalTensor& tensor, bool transpose, bool is_weights) {
  const int rank = tensor.rank();
  // As in NumPy, a vector is a row on the left and a column on the right.
  if (rank == 1) return is_weights ? MatrixDims{0, -1} : MatrixDims{-1, 0};
  if (transpose) return {rank - 1, rank - 2};
  return {rank - 2, rank - 1};
}

// Batch dims of both, broadcast.
absl::Status MatMulBatch(const Op& op, const LogicalTensor& src, const LogicalTensor& weights,
                         Dims& result) {
  const absl::Span<const int64_t> a = *src.dims, b = *weights.dims;
  const absl::Span<const int64_t> batch = a.first(std::max(src.rank() - 2, 0));
  result.assign(batch.begin(), batch.end());
  const int conflict = BroadcastInto(result, b.first(std::max(weights.rank() - 2, 0)));
  if (conflict < 0) return absl::OkStatus();
  return ShapeError(op, "batch dimensions of ", DescribeDims(src), " and ", DescribeDims(weights),
                    " do not broadcast: they conflict in dim ", conflict, " of the result");
}

// StaticReshape's target with copied dims put in; `open` is the index of -1.
absl::Status ReshapeTarget(const Op& op, const LogicalTensor& src,
                           const std::vector<int64_t>& shape, Dims& dims, int& open) {
  const bool copies = op.Get<Attr::kSpecialZero>();
  open = -1;
  dims.assign(shape.begin(), shape.end());
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == -1) {
      if (open >= 0) {
        return ShapeError(op, "shape has more than one -1: [", DimsToString(shape), "]");
      }
      open = static_cast<int>(i);
      dims[i] = kUnknownDim;
    } else if (shape[i] < 0) {
      return ShapeError(op, "shape has a negative dim: [", DimsToString(shape), "]");
    } else if (shape[i] == 0 && copies) {
      if (src.dims && i >= src.dims->size()) {
        return ShapeError(op, "shape copies dim ", i, ", but ", DescribeDims(src), " has none");
      }
      dims[i] = src.dims ? (*src.dims)[i] : kUnknownDim;
    }
  }
  return absl::OkStatus();
}

// Adds `next` to the dims of what is concatenated along `axis` and begins with `first`, of known
// rank.
absl::Status Continue(const Op& op, const LogicalTensor& first, const LogicalTensor& next, int axis,
                      Dims& dims) {
  if (!next.dims) {
    dims[axis] = kUnknownDim;
    return absl::OkStatus();
  }
  bool fits = next.dims->size() == dims.size();
  for (int d = 0; fits && d < first.rank(); ++d) {
    fits = d == axis || MayEqual(dims[d], (*next.dims)[d]);
    if (fits && dims[d] == kUnknownDim && d != axis) dims[d] = (*next.dims)[d];
  }
  if (!fits) {
    return ShapeError(op, DescribeDims(next), " does not continue ", DescribeDims(first),
                      " along dim ", axis);
  }
  const int64_t more = (*next.dims)[axis];
  int64_t& sum = dims[axis];
  if (more == kUnknownDim || sum == kUnknownDim) {
    sum = kUnknownDim;
  } else if (__builtin_add_overflow(sum, more, &sum)) {
    return ShapeError(op, "the concatenated dim ", axis, " overflows 64 bits");
  }
  return absl::OkStatus();
}

}  // namespace

ShapeRule ShapeRuleOf(OpKind kind) { return kRules[static_cast<size_t>(kind)]; }

std::string DescribeDims(const LogicalTensor& tensor) {
  return absl::StrCat(tensor.Label(), " [", tensor.dims ? DimsToString(*tensor.dims) : "*", "]");
}

bool MayBeVector(const LogicalTensor& tensor, int64_t count) {
  if (!tensor.dims || (count == 1 && MayBeScalar(*tensor.dims))) return true;
  return tensor.rank() == 1 && MayEqual((*tensor.dims)[0], count);
}

absl::StatusOr<int> NormalizeAxis(const Op& op, int64_t axis, const LogicalTensor& tensor) {
  const int rank = tensor.rank();
  if (axis < -rank || axis >= rank) {
    return ShapeError(op, "axis ", axis, " is outside the rank ", rank, " of ",
                      DescribeDims(tensor));
  }
  return static_cast<int>(FromFront(axis, rank));
}

absl::Status CheckBroadcastsOnto(const Op& op, const LogicalTensor& tensor,
                                 absl::Span<const int64_t> target) {
  if (!tensor.dims) return absl::OkStatus();
  const Dims& dims = *tensor.dims;
  bool fits = dims.size() <= target.size();
  for (size_t i = 0; fits && i < dims.size(); ++i) {
    fits = dims[i] == 1 || MayEqual(dims[i], target[target.size() - dims.size() + i]);
  }
  if (fits) return absl::OkStatus();
  return ShapeError(op, DescribeDims(tensor), " does not broadcast onto [", DimsToString(target),
                    "]");
}

absl::Status CheckSameDim(const Op& op, const char* what, const LogicalTensor& a, int dim_a,
                          const LogicalTensor& b, int dim_b) {
  const int64_t left = (*a.dims)[dim_a], right = (*b.dims)[dim_b];
  if (MayEqual(left, right)) return absl::OkStatus();
  return ShapeError(op, what, " differ: ", left, " (", a.Label(), ", dim ", dim_a, ") vs ", right,
                    " (", b.Label(), ", dim ", dim_b, ")");
}

absl::Status MergeOutput(const Op& op, const LogicalTensor& declared, std::optional<Dims>& found) {
  if (!found) {
    found = declared.dims;
  } else if (declared.dims && *found != *declared.dims) {
    const Dims& other = *declared.dims;
    // A scalar may be declared as one element.
    if (found->size() + other.size() == 1 && MayBeScalar(*found) && MayBeScalar(other)) {
      found = other;
    } else if (!MayEqual(*found, other)) {
      return ShapeError(op, "the inputs give an output of [", DimsToString(*found), "], but ",
                        DescribeDims(declared), " is declared");
    } else {
      Complete(*found, other);
    }
  }
  if (!found) return absl::OkStatus();
  int64_t bits = std::max(BitsOf(declared.type), 1);
  bool overflow = found->size() > kMaxRank;
  for (const int64_t dim : *found) {
    if (dim == 0) return absl::OkStatus();
    if (dim != kUnknownDim) overflow |= __builtin_mul_overflow(bits, dim, &bits);
  }
  if (!overflow) return absl::OkStatus();
  return ShapeError(op, "the output, ", declared.Label(), ", would be [", DimsToString(*found),
                    "]: its size overflows 64 bits or its rank ", kMaxRank);
}

absl::Status NoShape(const Op&, ShapeContext&) { return absl::OkStatus(); }

// Outputs as input 0. Further inputs are scalars (Dropout's), and an axis is one of
// the input's (GenIndex).
absl::Status SameShape(const Op& op, ShapeContext& context) {
  const LogicalTensor& src = *context.inputs[0];
  for (size_t i = 1; i < context.inputs.size(); ++i) {
    const LogicalTensor& scalar = *context.inputs[i];
    if (!MayBeVector(scalar, 1)) {
      return ShapeError(op, "input ", i, " must be a scalar, but is ", DescribeDims(scalar));
    }
  }
  if (!src.dims) return absl::OkStatus();
  if (const int64_t* axis = op.Find<Attr::kAxis>()) {
    KVANT_RETURN_IF_ERROR(NormalizeAxis(op, *axis, src).status());
  }
  for (std::optional<Dims>& output : context.outputs) output = src.dims;
  return absl::OkStatus();
}

absl::Status MatMulShape(const Op& op, ShapeContext& context) {
  const LogicalTensor& src = *context.inputs[0];
  const LogicalTensor& weights = *context.inputs[1];
  if (!src.dims || !weights.dims) return absl::OkStatus();
  if (src.rank() == 0 || weights.rank() == 0) {
    return ShapeError(op, "a scalar cannot be multiplied as a matrix: ", DescribeDims(src), " and ",
                      DescribeDims(weights));
  }
  const MatrixDims a = MatrixDimsOf(src, op.Get<Attr::kTransposeA>(), false);
  const MatrixDims b = MatrixDimsOf(weights, op.Get<Attr::kTransposeB>(), true);
  KVANT_RETURN_IF_ERROR(CheckSameDim(op, "inner dimensions", src, a.cols, weights, b.rows));
  Dims dims;
  KVANT_RETURN_IF_ERROR(MatMulBatch(op, src, weights, dims));
  if (a.rows >= 0) dims.push_back((*src.dims)[a.rows]);
  if (b.cols >= 0) dims.push_back((*weights.dims)[b.cols]);
  if (context.inputs.size() > 2) {
    KVANT_RETURN_IF_ERROR(CheckBroadcastsOnto(op, *context.inputs[2], dims));
  }
  return context.Give(std::move(dims));
}

absl::Status SoftMaxShape(const Op& op, ShapeContext& context) {
  const LogicalTensor& src = *context.inputs[0];
  if (!src.dims) return absl::OkStatus();
  KVANT_ASSIGN_OR_RETURN(const int axis, NormalizeAxis(op, op.Get<Attr::kAxis>(), src));
  context.outputs[0] = src.dims;
  if (context.outputs.size() > 1) {
    context.outputs[1] = src.dims;
    (*context.outputs[1])[axis] = 1;
  }
  for (size_t i = 1; i < context.inputs.size(); ++i) {
    KVANT_RETURN_IF_ERROR(
        CheckOnePerRow(op, *context.inputs[i], InputName(op, i), axis == 0 ? 1 : (*src.dims)[0]));
  }
  return absl::OkStatus();
}

// The gradient and the probabilities have the same dims.
absl::Status SoftMaxBackwardShape(const Op& op, ShapeContext& context) {
  const LogicalTensor& diff = *context.inputs[0];
  const LogicalTensor& probs = *context.inputs[1];
  if (!diff.dims || !probs.dims) return absl::OkStatus();
  KVANT_RETURN_IF_ERROR(NormalizeAxis(op, op.Get<Attr::kAxis>(), diff).status());
  if (!MayEqual(*diff.dims, *probs.dims)) {
    return ShapeError(op, "diff_dst, ", DescribeDims(diff), ", and dst, ", DescribeDims(probs),
                      ", differ");
  }
  return context.Give(diff.dims);
}

absl::Status BinaryShape(const Op& op, ShapeContext& context) {
  return CombineDims(op, *context.inputs[0], *context.inputs[1], context.outputs[0]);
}

absl::Status SelectShape(const Op& op, ShapeContext& context) {
  const LogicalTensor& condition = *context.inputs[0];
  std::optional<Dims>& result = context.outputs[0];
  KVANT_RETURN_IF_ERROR(CombineDims(op, *context.inputs[1], *context.inputs[2], result));
  if (!result || !condition.dims) return absl::OkStatus();
  if (!Broadcasts(op) && condition.dims->size() != result->size()) {
    return ShapeError(op, "the condition, ", DescribeDims(condition),
                      ", has another rank, and auto_broadcast is none");
  }
  return CheckBroadcastsOnto(op, condition, *result);
}

absl::Status ReduceShape(const Op& op, ShapeContext& context) {
  const LogicalTensor& src = *context.inputs[0];
  if (!src.dims) return absl::OkStatus();
  uint32_t reduced = 0;
  for (const int64_t axis : op.Get<Attr::kAxes>()) {
    KVANT_ASSIGN_OR_RETURN(const int normalized, NormalizeAxis(op, axis, src));
    if (reduced >> normalized & 1) {
      return ShapeError(op, "axis ", axis, " occurs twice in axes");
    }
    reduced |= 1u << normalized;
  }
  const bool keep = op.Get<Attr::kKeepDims>();
  Dims dims;
  for (int i = 0; i < src.rank(); ++i) {
    if (!(reduced >> i & 1)) {
      dims.push_back((*src.dims)[i]);
    } else if (keep) {
      dims.push_back(1);
    }
  }
  return context.Give(std::move(dims));
}

absl::Status ReshapeShape(const Op& op, ShapeContext& context) {
  const LogicalTensor& src = *context.inputs[0];
  const std::vector<int64_t>& shape = op.Get<Attr::kShape>();
  Dims dims;
  int open;
  KVANT_RETURN_IF_ERROR(ReshapeTarget(op, src, shape, dims, open));
  const std::optional<int64_t> total = src.has_shape() ? CheckedProduct(*src.dims) : std::nullopt;
  if (total) {
    // With every input dim known, only the -1 can be unknown here.
    if (open >= 0) dims[open] = 1;
    const std::optional<int64_t> rest = CheckedProduct(dims);
    const bool divides = rest && *rest != 0 && *total % *rest == 0;
    if (open >= 0 ? !divides : rest != total) {
      return ShapeError(op, DescribeDims(src), " does not reshape to [", DimsToString(shape),
                        "]: the numbers of elements differ");
    }
    if (open >= 0) dims[open] = *total / *rest;
  }
  return context.Give(std::move(dims));
}

absl::Status TransposeShape(const Op& op, ShapeContext& context) {
  const LogicalTensor& src = *context.inputs[0];
  const std::vector<int64_t>& order = op.Get<Attr::kOrder>();
  if (!src.dims) return absl::OkStatus();
  bool permutes = order.size() == src.dims->size();
  uint32_t seen = 0;
  Dims dims;
  for (size_t i = 0; permutes && i < order.size(); ++i) {
    KVANT_ASSIGN_OR_RETURN(const int axis, NormalizeAxis(op, order[i], src));
    permutes = !(seen >> axis & 1);
    seen |= 1u << axis;
    dims.push_back((*src.dims)[axis]);
  }
  if (!permutes) {
    return ShapeError(op, "order [", DimsToString(order), "] does not permute the dims of ",
                      DescribeDims(src));
  }
  return context.Give(std::move(dims));
}

absl::Status SliceShape(const Op& op, ShapeContext& context) {
  const LogicalTensor& src = *context.inputs[0];
  if (!src.dims) return absl::OkStatus();
  KVANT_ASSIGN_OR_RETURN(const int axis, NormalizeAxis(op, op.Get<Attr::kAxis>(), src));
  Dims dims = *src.dims;
  const int64_t begin = op.Get<Attr::kBegin>(), size = op.Get<Attr::kSize>();
  if (begin < 0 || size < 0 ||
      (dims[axis] >= 0 && (begin > dims[axis] || size > dims[axis] - begin))) {
    return ShapeError(op, "elements ", begin, " and on, ", size, " of them, of axis ", axis,
                      " are not in ", DescribeDims(src));
  }
  dims[axis] = size;
  return context.Give(std::move(dims));
}

absl::StatusOr<Dims> JoinInputs(const Op& op, const ShapeContext& context, size_t first, int axis) {
  Dims dims = *context.inputs[first]->dims;
  for (size_t i = first + 1; i < context.inputs.size(); ++i) {
    KVANT_RETURN_IF_ERROR(Continue(op, *context.inputs[first], *context.inputs[i], axis, dims));
  }
  return dims;
}

absl::Status ConcatShape(const Op& op, ShapeContext& context) {
  const LogicalTensor& first = *context.inputs[0];
  if (!first.dims) return absl::OkStatus();
  KVANT_ASSIGN_OR_RETURN(const int axis, NormalizeAxis(op, op.Get<Attr::kAxis>(), first));
  KVANT_ASSIGN_OR_RETURN(context.outputs[0], JoinInputs(op, context, 0, axis));
  return absl::OkStatus();
}

}  // namespace kvant
