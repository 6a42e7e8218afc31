// Shape rules of what quantizes, dequantizes, appends to a cache and rotates.
#include <algorithm>

#include "kvant/graph/op_shapes.h"

namespace kvant {
namespace {

bool Quantizes(const Op& op, std::string_view how) { return op.Get<Attr::kQType>() == how; }

// Null unless it quantizes per group, and says of which shape.
const std::vector<int64_t>* GroupShapeOf(const Op& op) {
  return Quantizes(op, "per_group") ? op.Find<Attr::kGroupShape>() : nullptr;
}

// The dims of a tensor with one value per group: those of x divided by group_shape's.
absl::StatusOr<Dims> DivideIntoGroups(const Op& op, const LogicalTensor& x,
                                      const std::vector<int64_t>& group_shape) {
  if (group_shape.size() != x.dims->size()) {
    return ArgumentsError(op, "group_shape [", DimsToString(group_shape), "] and ", DescribeDims(x),
                          " differ in rank");
  }
  Dims groups = *x.dims;
  for (size_t i = 0; i < group_shape.size(); ++i) {
    const int64_t group = group_shape[i];
    if (group < 1) {
      return ArgumentsError(op, "group_shape [", DimsToString(group_shape), "] has a group of ",
                            group, " in dim ", i);
    }
    if (groups[i] == kUnknownDim) continue;
    if (groups[i] % group != 0) {
      return ArgumentsError(op, "groups of ", group, " do not divide dim ", i, " of ",
                            DescribeDims(x));
    }
    groups[i] /= group;
  }
  return groups;
}

// The dims of scales or zero points of x: one, one per element of an axis, or one per group.
// Nothing where they depend on x, whose rank is not known.
absl::Status SetParameterDims(const Op& op, const LogicalTensor& x, std::optional<Dims>& dims) {
  if (Quantizes(op, "per_tensor")) {
    dims = Dims{1};
  } else if (Quantizes(op, "per_channel") && x.dims) {
    KVANT_ASSIGN_OR_RETURN(const int axis, NormalizeAxis(op, op.Get<Attr::kAxis>(), x));
    dims = Dims{(*x.dims)[axis]};
  } else if (Quantizes(op, "per_group")) {
    const auto* group_shape = op.Find<Attr::kGroupShape>();
    if (group_shape == nullptr) return ArgumentsError(op, "per_group needs a group_shape");
    if (!x.dims) return absl::OkStatus();
    KVANT_ASSIGN_OR_RETURN(dims, DivideIntoGroups(op, x, *group_shape));
  }
  return absl::OkStatus();
}

absl::Status CheckParameters(const Op& op, const LogicalTensor& x, const LogicalTensor& tensor,
                             const char* role) {
  std::optional<Dims> dims;
  KVANT_RETURN_IF_ERROR(SetParameterDims(op, x, dims));
  if (!dims || !tensor.dims) return absl::OkStatus();
  if (!Quantizes(op, "per_group")) {
    if (MayBeVector(tensor, dims->front())) return absl::OkStatus();
    if (Quantizes(op, "per_tensor")) {
      return ArgumentsError(op, "per_tensor takes one of ", role, ", but has ",
                            DescribeDims(tensor));
    }
    return ArgumentsError(op, role, " per channel must be [", dims->front(), "] as dim ",
                          FromFront(op.Get<Attr::kAxis>(), x.rank()), " of ", DescribeDims(x),
                          ", but are ", DescribeDims(tensor));
  }
  if (tensor.dims->size() != dims->size()) {
    return ArgumentsError(op, role, " per group have the rank of ", DescribeDims(x), ", but are ",
                          DescribeDims(tensor));
  }
  for (size_t i = 0; i < dims->size(); ++i) {
    if (MayEqual((*tensor.dims)[i], (*dims)[i])) continue;
    return ArgumentsError(op, "groups of ", op.Get<Attr::kGroupShape>()[i], " along dim ", i,
                          " of ", DescribeDims(x), " need ", (*dims)[i], " of ", role,
                          " there, but there are ", (*tensor.dims)[i], " in ",
                          DescribeDims(tensor));
  }
  return absl::OkStatus();
}

// Scales and, if they are there, zero points of x from input `first` on.
absl::Status CheckGivenParameters(const Op& op, const LogicalTensor& x, const ShapeContext& context,
                                  size_t first) {
  KVANT_RETURN_IF_ERROR(CheckParameters(op, x, *context.inputs[first], "scales"));
  if (context.inputs.size() <= first + 1) return absl::OkStatus();
  // One zero point may serve all channels; oneDNN's own tests use that.
  const LogicalTensor& zps = *context.inputs[first + 1];
  if (Quantizes(op, "per_channel") && MayBeVector(zps, 1)) return absl::OkStatus();
  return CheckParameters(op, x, zps, "zero points");
}

// Dim `axis` of an output as the graph has it, if it has that rank there.
int64_t DeclaredDim(const ShapeContext& context, size_t output, int rank, int axis) {
  if (context.declared.empty() || context.declared[output]->rank() != rank) return kUnknownDim;
  return (*context.declared[output]->dims)[axis];
}

// Tokens that appended ones must be a multiple of: those of a group.
int64_t TokensOfGroup(const Op& op, int axis) {
  const auto* group_shape = GroupShapeOf(op);
  return group_shape != nullptr ? (*group_shape)[axis] : 1;
}

// Outputs of an op that puts tokens of src, which has dst's rank, into dst along `axis`.
absl::Status SetAppended(const Op& op, const LogicalTensor& src, const LogicalTensor& dst, int axis,
                         ShapeContext& context) {
  context.outputs[0] = dst.dims;
  if (context.inputs.size() > 2) {
    KVANT_RETURN_IF_ERROR(CheckGivenParameters(op, dst, context, 2));
    const int64_t tokens = (*src.dims)[axis], capacity = (*dst.dims)[axis];
    const int64_t group = TokensOfGroup(op, axis);
    const bool known = tokens != kUnknownDim && capacity != kUnknownDim;
    if (!known || group >= capacity || tokens % group == 0) return absl::OkStatus();
    return ArgumentsError(op, "groups of ", group, " do not divide dim ", axis, " of ",
                          DescribeDims(src));
  }
  if (context.outputs.size() < 2) return absl::OkStatus();
  const auto* group_shape = GroupShapeOf(op);
  if (group_shape == nullptr) {
    return ArgumentsError(op, "computes scales, which needs qtype per_group and a group_shape");
  }
  KVANT_RETURN_IF_ERROR(DivideIntoGroups(op, src, *group_shape).status());
  if ((*group_shape)[0] != 1) {
    return ArgumentsError(op, "computes scales of groups of ", (*group_shape)[0],
                          " along dim 0, whose rows have positions of their own");
  }
  KVANT_ASSIGN_OR_RETURN(const Dims groups, DivideIntoGroups(op, dst, *group_shape));
  for (size_t i = 1; i < context.outputs.size(); ++i) {
    const int64_t declared = DeclaredDim(context, i, src.rank(), axis);
    if (!MayEqual(declared, groups[axis])) {
      return ShapeError(op, DescribeDims(dst), " holds ", groups[axis], " groups of ",
                        (*group_shape)[axis], " tokens along dim ", axis, ", but ",
                        DescribeDims(*context.declared[i]), " holds ", declared,
                        i == 1 ? " scales there" : " zero points there");
    }
    context.outputs[i] = groups;
  }
  return absl::OkStatus();
}

// Each token of dst, a pool of pages, is written by itself: no group has a part of a page, or of
// the pages; with given scales it may have all.
absl::Status CheckGroupsOfSlots(const Op& op, const LogicalTensor& dst, int axis, bool given) {
  const auto* group_shape = GroupShapeOf(op);
  if (group_shape == nullptr) return absl::OkStatus();
  KVANT_RETURN_IF_ERROR(DivideIntoGroups(op, dst, *group_shape).status());
  for (const int d : {0, axis}) {
    const int64_t group = (*group_shape)[d];
    if (group == 1 || (given && MayEqual((*dst.dims)[d], group))) continue;
    return ArgumentsError(op, "groups of ", group, " along dim ", d, " of ", DescribeDims(dst),
                          " are of several ", d == 0 ? "pages" : "tokens",
                          ", but each token has a slot of its own");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status StaticQuantShape(const Op& op, ShapeContext& context) {
  const LogicalTensor& x = *context.inputs[0];
  const size_t count = op.Get<Attr::kScales>().size();
  const size_t zero_points = op.Get<Attr::kZps>().size();
  if (Quantizes(op, "per_tensor")) {
    if (count != 1) {
      return ArgumentsError(op, "per_tensor takes one scale, but has ", count);
    }
  } else if (x.dims) {
    KVANT_ASSIGN_OR_RETURN(const int axis, NormalizeAxis(op, op.Get<Attr::kAxis>(), x));
    if (!MayEqual((*x.dims)[axis], static_cast<int64_t>(count))) {
      return ArgumentsError(op, "dim ", axis, " of ", DescribeDims(x), " needs ", (*x.dims)[axis],
                            " scales, but there are ", count);
    }
  }
  if (zero_points != 0 && zero_points != count) {
    return ArgumentsError(op, "has ", zero_points, " zero points, but ", count, " scales");
  }
  return context.Give(x.dims);
}

absl::Status DynamicQuantShape(const Op& op, ShapeContext& context) {
  const LogicalTensor& x = *context.inputs[0];
  KVANT_RETURN_IF_ERROR(CheckGivenParameters(op, x, context, 1));
  return context.Give(x.dims);
}

absl::Status DynamicQuantizeShape(const Op& op, ShapeContext& context) {
  if (context.inputs.size() > 1) return DynamicQuantShape(op, context);
  const LogicalTensor& x = *context.inputs[0];
  context.outputs[0] = x.dims;
  std::optional<Dims> groups;
  KVANT_RETURN_IF_ERROR(SetParameterDims(op, x, groups));
  for (size_t i = 1; i < context.outputs.size(); ++i) context.outputs[i] = groups;
  return absl::OkStatus();
}

// For refusals: what the op writes to is no longer called like its source.
void NameAsDeclared(const ShapeContext& context, LogicalTensor& dst) {
  dst.name = context.declared.empty() ? "" : context.declared[0]->name;
  if (!context.declared.empty()) dst.id = context.declared[0]->id;
}

absl::Status AppendShape(const Op& op, ShapeContext& context) {
  const LogicalTensor& src = *context.inputs[0];
  if (!src.dims) return absl::OkStatus();
  KVANT_ASSIGN_OR_RETURN(const int axis, NormalizeAxis(op, op.Get<Attr::kTokenAxis>(), src));
  if (axis == 0) return ArgumentsError(op, "token_axis is 0, which positions count along");
  KVANT_RETURN_IF_ERROR(CheckOnePerRow(op, *context.inputs[1], "positions", (*src.dims)[0]));
  LogicalTensor dst = src;
  const int64_t tokens = (*src.dims)[axis], capacity = DeclaredDim(context, 0, src.rank(), axis);
  (*dst.dims)[axis] = capacity;
  NameAsDeclared(context, dst);
  if (tokens != kUnknownDim && capacity != kUnknownDim && tokens > capacity) {
    return ShapeError(op, DescribeDims(src), " has ", tokens, " tokens along dim ", axis,
                      ", more than ", DescribeDims(dst), " holds");
  }
  return SetAppended(op, src, dst, axis, context);
}

absl::Status AppendPagesShape(const Op& op, ShapeContext& context) {
  const LogicalTensor &src = *context.inputs[0], &slots = *context.inputs[1];
  if (!src.dims) return absl::OkStatus();
  LogicalTensor dst = src;
  dst.dims->push_back(kUnknownDim);
  KVANT_ASSIGN_OR_RETURN(const int axis, NormalizeAxis(op, op.Get<Attr::kTokenAxis>(), dst));
  if (axis == 0 || axis == src.rank()) {
    return ArgumentsError(op, "token_axis is ", axis, ", that of ",
                          axis == 0 ? "pages" : "features");
  }
  if (slots.dims && (slots.rank() != 1 || !MayEqual((*slots.dims)[0], (*src.dims)[0]))) {
    return ShapeError(op, "slots are [", (*src.dims)[0], "] as dim 0 of ", DescribeDims(src),
                      ", but are ", DescribeDims(slots));
  }
  const LogicalTensor rows = TokensAsRows(src, axis);
  dst.dims = rows.dims;
  NameAsDeclared(context, dst);
  int64_t& pages = (*dst.dims)[0] = DeclaredDim(context, 0, rows.rank(), 0);
  int64_t& page = (*dst.dims)[axis] = DeclaredDim(context, 0, rows.rank(), axis);
  int64_t all;
  if (pages != kUnknownDim && page != kUnknownDim && __builtin_mul_overflow(pages, page, &all)) {
    return ShapeError(op, "the tokens of ", pages, " pages overflow 64 bits");
  }
  KVANT_RETURN_IF_ERROR(CheckGroupsOfSlots(op, dst, axis, context.inputs.size() > 2));
  return SetAppended(op, rows, dst, axis, context);
}

bool Appends(OpKind kind) { return kind == OpKind::kAppend || kind == OpKind::kAppendPages; }

LogicalTensor TokensAsRows(const LogicalTensor& src, int axis) {
  LogicalTensor rows = src;
  rows.dims->insert(rows.dims->begin() + axis, 1);
  if (rows.strides) rows.strides->insert(rows.strides->begin() + axis, 1);
  return rows;
}

AppendedTokens AppendedTokensOf(const Op& op, const LogicalTensor& src, const LogicalTensor& dst) {
  AppendedTokens to;
  to.axis = static_cast<int>(FromFront(op.Get<Attr::kTokenAxis>(), dst.rank()));
  to.capacity = (*dst.dims)[to.axis];
  if (op.kind == OpKind::kAppendPages) {
    to.tokens = 1;
    to.page = to.capacity;
    to.capacity *= (*dst.dims)[0];
    return to;
  }
  to.tokens = (*src.dims)[to.axis];
  const int64_t group = TokensOfGroup(op, to.axis);
  // Where no group ends along the axis, any position goes.
  if (group < to.capacity) to.group = group;
  return to;
}

absl::Status AppendedTokens::Check(const Op& op, int64_t row, int64_t position) const {
  if (position < 0) return absl::OkStatus();
  if (op.kind == OpKind::kAppendPages && position >= capacity) {
    return ArgumentsError(op, "slot ", position, " of token ", row, " is beyond the ", capacity,
                          " of the pool, in pages of ", page);
  }
  if (position > capacity - tokens) {
    return ArgumentsError(op, "position ", position, " of row ", row, " and ", tokens,
                          " tokens are beyond the capacity of ", capacity);
  }
  if (position % group == 0) return absl::OkStatus();
  return ArgumentsError(op, "position ", position, " of row ", row, " is within a group of ", group,
                        " tokens");
}

absl::Status HadamardShape(const Op& op, ShapeContext& context) {
  const LogicalTensor& src = *context.inputs[0];
  const int64_t block = op.Get<Attr::kBlock>();
  if (block < 1 || (block & (block - 1)) != 0) {
    return ArgumentsError(op, "a block of ", block, " is no power of two");
  }
  if (!src.dims) return absl::OkStatus();
  if (src.rank() == 0 || (src.dims->back() != kUnknownDim && src.dims->back() % block != 0)) {
    return ShapeError(op, "blocks of ", block, " do not divide the last dim of ",
                      DescribeDims(src));
  }
  return context.Give(src.dims);
}

Dims QuantizationGroup(const Op& op, absl::Span<const int64_t> dims) {
  Dims group(dims.begin(), dims.end());
  if (Quantizes(op, "per_channel")) {
    group[FromFront(op.Get<Attr::kAxis>(), static_cast<int64_t>(dims.size()))] = 1;
  } else if (const std::vector<int64_t>* shape = GroupShapeOf(op)) {
    for (size_t d = 0; d < shape->size(); ++d) {
      group[d] = group[d] == 0 ? (*shape)[d] : std::min((*shape)[d], group[d]);
    }
  }
  return group;
}

int64_t GroupStride(const Op& op, const LogicalTensor& parameters, int rank, int d) {
  if (parameters.elements() == 1) return 0;
  const Dims strides = parameters.StridesOrDense();
  if (Quantizes(op, "per_group") && parameters.rank() == rank) {
    return (*parameters.dims)[d] == 1 ? 0 : strides[d];
  }
  return FromFront(op.Get<Attr::kAxis>(), rank) == d ? strides.back() : 0;
}

}  // namespace kvant
