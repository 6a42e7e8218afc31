#include "kvant/graph/builder.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/graph/op_shapes.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

// `attrs` with those that QuantizeOptions, or DequantizeOptions, say.
template <typename Options>
Attributes WithQuantization(const Options& options, Attributes attrs = {}) {
  if (!options.group_shape.empty()) {
    attrs.Set(Attr::kQType, std::string("per_group"));
    attrs.Set(Attr::kGroupShape,
              std::vector<int64_t>(options.group_shape.begin(), options.group_shape.end()));
  } else {
    attrs.Set(Attr::kQType, std::string(options.axis ? "per_channel" : "per_tensor"));
  }
  if (options.axis) attrs.Set(Attr::kAxis, *options.axis);
  if (!options.codebook.empty()) attrs.Set(Attr::kCodebook, options.codebook);
  return attrs;
}

// The values that are there.
absl::InlinedVector<Value, 4> Present(std::initializer_list<std::optional<Value>> values) {
  absl::InlinedVector<Value, 4> present;
  for (const std::optional<Value>& value : values) {
    if (value) present.push_back(*value);
  }
  return present;
}

// Why a builder does not take a value.
std::string_view WhyForeign(Value value) {
  return value.builder == 0 ? "is a Value that no builder made" : "is a Value of another builder";
}

// Lays a tensor out: with these strides, or those that it has, or densely where its shape is known.
void LayOut(LogicalTensor& tensor, std::optional<Dims> strides) {
  tensor.layout = Layout::kStrided;
  if (strides) tensor.strides = std::move(strides);
  if (!tensor.strides && tensor.has_shape()) tensor.strides = DenseStrides(*tensor.dims);
}

}  // namespace

GraphBuilder::GraphBuilder(GraphOptions options) : options_(std::move(options)) {}

GraphBuilder::Stamp::Stamp() {
  static std::atomic<uint64_t> last{0};
  value = ++last;
}

void GraphBuilder::Fail(absl::Status status) {
  if (status_.ok()) status_ = std::move(status);
}

LogicalTensor& GraphBuilder::AddTensor(std::string_view name, DataType type) {
  LogicalTensor& tensor = tensors_.emplace_back();
  tensor.id = tensors_.size() - 1;
  tensor.type = type;
  tensor.name = name;
  stamps_.push_back(stamp_.value);
  produced_.push_back(false);
  consumed_.push_back(false);
  is_output_.push_back(false);
  return tensor;
}

const LogicalTensor& GraphBuilder::Describe(Value value) const {
  return Has(value) ? tensors_[value.id] : NoTensor();
}

Value GraphBuilder::Input(std::string_view name, DataType type, Dims dims,
                          std::optional<Dims> strides, Property property) {
  LogicalTensor& tensor = AddTensor(name, type);
  tensor.dims = std::move(dims);
  tensor.strides = std::move(strides);
  tensor.property = property;
  if (const absl::Status valid = ValidateTensor(tensor); !valid.ok()) {
    Fail(MakeError(ErrorKindOf(valid), "input '", tensor.name, "': ", valid.message()));
  } else {
    LayOut(tensor, std::nullopt);
  }
  Claim(/*output=*/false, name);
  return ValueOf(tensor.id);
}

// Graph::Finalize finds it as well, but not at the call that is wrong.
bool GraphBuilder::Claim(bool output, std::string_view name) {
  if (name.empty() || (output ? output_names_ : input_names_).emplace(name).second) return true;
  Fail(MakeError(ErrorKind::kInvalidGraph, output ? "two outputs" : "two inputs", " are named '",
                 name, "'"));
  return false;
}

Value GraphBuilder::HostScalar(std::string_view name, DataType type) {
  return Input(name, type, Dims(), std::nullopt, Property::kHostScalar);
}

Value GraphBuilder::Scalar(DataType type, double value) {
  if (const std::string why = Constant::WhyNot(type, value); !why.empty()) {
    Fail(InvalidArguments("Scalar: ", why));
  }
  return AddConstant(Constant(type, value));
}

Value GraphBuilder::AddConstant(const Constant& value) {
  const Value result = Input("", value.type(), Dims(), std::nullopt, Property::kConstant);
  tensors_[result.id].value = value;
  return result;
}

absl::Status GraphBuilder::Check(Op& op) {
  ShapeContext context;
  absl::InlinedVector<const LogicalTensor*, 2> outputs;
  for (const TensorId id : op.inputs) {
    context.inputs.push_back(&tensors_[id]);
  }
  for (const TensorId id : op.outputs) outputs.push_back(&tensors_[id]);
  KVANT_RETURN_IF_ERROR(CheckSchema(op, context.inputs, outputs));
  context.outputs.resize(op.outputs.size());
  KVANT_RETURN_IF_ERROR(ShapeRuleOf(op.kind)(op, context));
  for (size_t i = 0; i < op.outputs.size(); ++i) {
    KVANT_RETURN_IF_ERROR(MergeOutput(op, *outputs[i], context.outputs[i]));
    tensors_[op.outputs[i]].dims = std::move(context.outputs[i]);
  }
  return absl::OkStatus();
}

Value GraphBuilder::Emit(OpKind kind, absl::Span<const Value> inputs,
                         absl::Span<const Result> results, Attributes attrs,
                         std::string_view name) {
  Op op;
  op.id = ops_.size();
  op.kind = kind;
  op.attrs = std::move(attrs);
  absl::Status wrong;
  for (size_t i = 0; i < inputs.size(); ++i) {
    op.inputs.push_back(inputs[i].id);
    if (Has(inputs[i]) || !wrong.ok()) continue;
    wrong = InvalidArguments(OpKindName(kind), " (op ", op.id, "): input ", i, " ",
                             WhyForeign(inputs[i]));
  }
  for (const Result& result : results) {
    LogicalTensor& tensor = AddTensor(name, result.type);
    tensor.dims = result.dims;
    if (wrong.ok()) wrong = ValidateTensor(tensor);
    if (name.empty()) {
      tensor.name = absl::StrCat(std::string(OpKindName(kind)), "_", tensor.id);
    } else if (!op.outputs.empty()) {
      absl::StrAppend(&tensor.name, "_", op.outputs.size());
    }
    tensor.layout = Layout::kUndef;  // until Output says otherwise
    produced_[tensor.id] = true;
    op.outputs.push_back(tensor.id);
  }
  op.name = op.outputs.empty() ? std::string(name) : tensors_[op.outputs[0]].name;
  const Value first = ValueOf(op.outputs.empty() ? 0 : op.outputs[0]);
  // After an error, further ones would follow from it.
  if (!status_.ok()) return first;
  if (wrong.ok()) wrong = Check(op);
  if (!wrong.ok()) {
    Fail(std::move(wrong));
    return first;
  }
  for (const TensorId id : op.inputs) consumed_[id] = true;
  ops_.push_back(std::move(op));
  return first;
}

GraphBuilder::OneOrTwo GraphBuilder::EmitTwo(OpKind kind, absl::Span<const Value> inputs,
                                             DataType first, DataType second, Attributes attrs) {
  const Result results[] = {first, second};
  const bool both = second != kUndef;
  const Value result =
      Emit(kind, inputs, absl::MakeSpan(results).first(both ? 2 : 1), std::move(attrs));
  return {result, both ? std::optional(ValueOf(result.id + 1)) : std::nullopt};
}

std::vector<Value> GraphBuilder::AddOp(OpKind kind, std::string_view name,
                                       const std::vector<Value>& inputs,
                                       const std::vector<Result>& results, Attributes attrs) {
  const Value first = Emit(kind, inputs, results, std::move(attrs), name);
  std::vector<Value> values;
  for (size_t i = 0; i < results.size(); ++i) values.push_back(ValueOf(first.id + i));
  return values;
}

Value GraphBuilder::MatMul(Value a, Value b, MatMulOptions options) {
  const DataType type = options.type == kUndef ? Describe(a).type : options.type;
  return Emit(OpKind::kMatMul, {a, b}, {type},
              {{Attr::kTransposeA, options.transpose_a}, {Attr::kTransposeB, options.transpose_b}});
}

GraphBuilder::OneOrTwo GraphBuilder::EmitSoftMax(Value x, const SoftMaxOptions& options,
                                                 bool stats) {
  if (options.first && !options.lengths) {
    Fail(InvalidArguments("SoftMax of ", Describe(x).Label(), ": it has first, but no lengths"));
  }
  return EmitTwo(OpKind::kSoftMax, Present({x, options.lengths, options.first}),
                 options.type == kUndef ? Describe(x).type : options.type, stats ? kF32 : kUndef,
                 {{Attr::kAxis, options.axis}, {Attr::kMode, std::string(options.mode)}});
}

Value GraphBuilder::DynamicDequantize(Value codes, Value scales, std::optional<Value> zero_points,
                                      const DequantizeOptions& options) {
  const DataType type = options.type == kUndef ? Describe(scales).type : options.type;
  return Emit(OpKind::kDynamicDequantize, Present({codes, scales, zero_points}), {type},
              WithQuantization(options));
}

Value GraphBuilder::DynamicQuantize(Value x, Value scales, std::optional<Value> zero_points,
                                    const DequantizeOptions& options) {
  return Emit(OpKind::kDynamicQuantize, Present({x, scales, zero_points}), {options.type},
              WithQuantization(options));
}

GraphBuilder::Quantized GraphBuilder::EmitQuantize(OpKind kind, absl::Span<const Value> inputs,
                                                   const QuantizeOptions& options,
                                                   Attributes attrs) {
  absl::InlinedVector<Result, 3> types{options.type, options.scale_type};
  if (options.zero_point_type != kUndef) types.push_back(options.zero_point_type);
  attrs = WithQuantization(options, std::move(attrs));
  if (options.power_of_two_scales) attrs.Set(Attr::kPowerOfTwoScales, true);
  if (options.scale_floor != 0) attrs.Set(Attr::kScaleFloor, options.scale_floor);
  if (options.ggml_formula) attrs.Set(Attr::kFormula, std::string("ggml"));
  const Value codes = Emit(kind, inputs, types, std::move(attrs));
  Quantized result{codes, ValueOf(codes.id + 1), std::nullopt};
  if (options.zero_point_type != kUndef) result.zero_points = ValueOf(codes.id + 2);
  return result;
}

GraphBuilder::Quantized GraphBuilder::DynamicQuantize(Value x, const QuantizeOptions& options) {
  return EmitQuantize(OpKind::kDynamicQuantize, {x}, options, {});
}

void GraphBuilder::SetCapacity(Value output, const Capacity& to, int64_t group) {
  if (!status_.ok() || !tensors_[output.id].dims) return;
  Dims& dims = *tensors_[output.id].dims;
  const int64_t rank = static_cast<int64_t>(dims.size());
  const int64_t at = FromFront(to.token_axis, rank);
  if (at < 0 || at >= rank) return;  // scales without that axis
  dims[at] = to.tokens / group;
  if (to.kind == OpKind::kAppendPages) dims[0] = to.pages;
  if (absl::Status valid = ValidateTensor(tensors_[output.id]); !valid.ok()) Fail(std::move(valid));
}

GraphBuilder::Quantized GraphBuilder::EmitAppend(const Capacity& to, Value x, Value places,
                                                 const QuantizeOptions& options) {
  if (IsComputeFloat(options.type)) {
    if (!options.group_shape.empty() || options.axis || options.zero_point_type != kUndef ||
        !options.codebook.empty()) {
      Fail(InvalidArguments(OpKindName(to.kind), " of type ", DataTypeName(options.type),
                            " converts: it has no scales, so no group_shape, axis, "
                            "zero_point_type or codebook"));
    }
    const Value dst =
        Emit(to.kind, {x, places}, {options.type}, {{Attr::kTokenAxis, to.token_axis}});
    SetCapacity(dst, to, 1);
    return {dst, Value(), std::nullopt};
  }
  const Quantized result =
      EmitQuantize(to.kind, {x, places}, options, {{Attr::kTokenAxis, to.token_axis}});
  const int64_t rank = static_cast<int64_t>(options.group_shape.size());
  const int64_t at = FromFront(to.token_axis, rank);
  const int64_t group = at >= 0 && at < rank ? std::max<int64_t>(1, options.group_shape[at]) : 1;
  SetCapacity(result.codes, to, 1);
  SetCapacity(result.scales, to, group);
  if (result.zero_points) SetCapacity(*result.zero_points, to, group);
  return result;
}

Value GraphBuilder::EmitAppend(const Capacity& to, Value x, Value places, Value scales,
                               std::optional<Value> zero_points, const DequantizeOptions& options) {
  const Value dst = Emit(to.kind, Present({x, places, scales, zero_points}), {options.type},
                         WithQuantization(options, {{Attr::kTokenAxis, to.token_axis}}));
  SetCapacity(dst, to, 1);
  return dst;
}

Value GraphBuilder::LoadTokens(Value x, Value lengths, std::optional<Value> first,
                               LoadOptions options) {
  return Emit(OpKind::kLoadTokens, Present({x, lengths, first}), {Describe(x).type},
              {{Attr::kTokenAxis, options.token_axis}, {Attr::kTokenGroup, options.token_group}});
}

Value GraphBuilder::LoadPages(Value pool, Value page_table, Value lengths, LoadOptions options) {
  return Emit(OpKind::kLoadPages, {pool, page_table, lengths}, {Describe(pool).type},
              {{Attr::kTokenAxis, options.token_axis}, {Attr::kTokenGroup, options.token_group}});
}

GraphBuilder::OneOrTwo GraphBuilder::EmitLoadRanges(absl::Span<const Value> segments, Value ranges,
                                                    int64_t token_axis, bool lengths) {
  absl::InlinedVector<Value, 4> inputs{ranges};
  inputs.insert(inputs.end(), segments.begin(), segments.end());
  const DataType type = segments.empty() ? kUndef : Describe(segments[0]).type;
  return EmitTwo(OpKind::kLoadRanges, inputs, type, lengths ? kS32 : kUndef,
                 {{Attr::kTokenAxis, token_axis}});
}

Value GraphBuilder::Arithmetic(OpKind kind, Value a, Value b) {
  const DataType left = Describe(a).type, right = Describe(b).type;
  return Emit(kind, {a, b}, {left == right ? left : kF32});
}

Value GraphBuilder::Reorder(Value x, std::optional<Dims> strides) {
  const Value result = Unary(OpKind::kReorder, x);
  LayOut(tensors_[result.id], std::move(strides));
  return result;
}

Value GraphBuilder::Concat(absl::Span<const Value> values, int64_t axis) {
  const DataType type = values.empty() ? kUndef : Describe(values[0]).type;
  return Emit(OpKind::kConcat, values, {type}, {{Attr::kAxis, axis}});
}

Value GraphBuilder::CausalMask(Value scores, Value fill, std::optional<Value> kv_len,
                               std::optional<Value> q_len) {
  const int rank = std::max(Describe(scores).rank(), 0);  // unknown: count from the end
  Value rows = GenIndex(scores, rank - 2);
  if (kv_len) rows = Add(rows, *kv_len);
  if (q_len) rows = Subtract(rows, *q_len);
  const Value columns = GenIndex(scores, rank - 1);
  return Select(GreaterEqual(rows, columns), scores, fill);
}

GraphBuilder::OneOrTwo GraphBuilder::ScaledDotProductAttention(Value q, Value k, Value v,
                                                               AttentionOptions options) {
  absl::InlinedVector<Value, 12> inputs{q, k, v};
  std::string names;
  const auto optional_input = [&](const char* name, const std::optional<Value>& value) {
    if (!value) return;
    absl::StrAppend(&names, names.empty() ? "" : ",", name);
    inputs.push_back(*value);
  };
  optional_input("bias", options.bias);
  optional_input("select", options.select);
  optional_input("kv_lengths", options.kv_lengths);
  optional_input("kv_first", options.kv_first);
  optional_input("query_offsets", options.query_offsets);
  optional_input("sinks", options.sinks);
  optional_input("alibi_slopes", options.alibi_slopes);

  Attributes attrs;
  if (!names.empty()) attrs.Set(Attr::kOptionalInputs, std::move(names));
  if (options.scale) attrs.Set(Attr::kScale, *options.scale);
  if (options.soft_cap) attrs.Set(Attr::kSoftCap, *options.soft_cap);
  if (options.select_fill) attrs.Set(Attr::kSelectFill, *options.select_fill);
  if (options.bottom_right) attrs.Set(Attr::kMaskAlignment, std::string("bottom_right"));
  attrs.Set(Attr::kLeftWindow, options.left_window);
  attrs.Set(Attr::kRightWindow, options.right_window);
  return EmitTwo(OpKind::kScaledDotProductAttention, inputs, Describe(q).type,
                 options.stats ? kF32 : kUndef, std::move(attrs));
}

GraphBuilder::OneOrTwo GraphBuilder::MergeAttention(absl::Span<const AttentionPart> parts,
                                                    MergeOptions options) {
  absl::InlinedVector<Value, 8> inputs;
  for (const AttentionPart& part : parts) inputs.insert(inputs.end(), {part.output, part.stats});
  if (options.type == kUndef && !parts.empty()) options.type = Describe(parts[0].output).type;
  return EmitTwo(OpKind::kMergeAttention, inputs, options.type, options.stats ? kF32 : kUndef, {});
}

void GraphBuilder::Output(std::string_view name, Value value, std::optional<Dims> strides) {
  if (!status_.ok()) return;
  if (!Has(value) || !produced_[value.id]) {
    const std::string_view why = Has(value) ? "is not the result of an op" : WhyForeign(value);
    return Fail(InvalidArguments("output '", name, "': value ", value.id, " ", why));
  }
  if (is_output_[value.id]) {
    return Fail(InvalidArguments("output '", name, "': ", tensors_[value.id].Label(),
                                 " is an output already"));
  }
  if (!Claim(/*output=*/true, name)) return;
  tensors_[value.id].name = name;
  LayOut(tensors_[value.id], std::move(strides));
  is_output_[value.id] = true;
}

absl::StatusOr<Graph> GraphBuilder::Build() && {
  return WithoutExceptions([this] { return Finish(); });
}

absl::StatusOr<Graph> GraphBuilder::Finish() {
  const absl::Status first =
      std::exchange(status_, InvalidArguments("a builder builds one graph, and this one has"));
  if (!first.ok()) return first;
  // An output that ops consume as well is marked by an End.
  for (TensorId id = 0; id < tensors_.size(); ++id) {
    if (!is_output_[id] || !consumed_[id]) continue;
    ops_.push_back({.kind = OpKind::kEnd, .name = tensors_[id].name, .inputs = {id}});
  }
  Graph graph(std::move(options_));
  absl::InlinedVector<LogicalTensor, 4> inputs, outputs;
  for (size_t i = 0; i < ops_.size(); ++i) {
    Op& op = ops_[i];
    op.id = i;
    if (!op.outputs.empty()) op.name = tensors_[op.outputs[0]].name;
    inputs.clear();
    outputs.clear();
    for (const TensorId id : op.inputs) inputs.push_back(tensors_[id]);
    for (const TensorId id : op.outputs) outputs.push_back(tensors_[id]);
    KVANT_RETURN_IF_ERROR(graph.AddOp(std::move(op), inputs, outputs));
  }
  KVANT_RETURN_IF_ERROR(graph.Finalize());
  KVANT_RETURN_IF_ERROR(InferShapes(graph));
  return graph;
}

}  // namespace kvant
